"""A training step of the GPT-2 shape against transformers' GPT-2 with torch.optim.AdamW, on this machine.

    python benchmarks/step.py            steps of the two in turn: tokens a second, their ratio, share of the peak

6 layers x 512 x 8 heads, sequence 512, vocabulary 50,304, batch 4, float32. Each arm has a process of its own, as its
user would run it, and waits while the other computes. Both clip gradients to 1 and report the loss of every step. The
peak is a float32 matrix product of 2048 x 2048 measured between the steps. The last line is the most that any program
could be faster than transformers here if its matrix products ran at that peak and all else took no time.
"""

import argparse
import multiprocessing
import resource
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from steelyard.data.loader import Batch
from steelyard.parallel import mesh
from steelyard.predict import flops
from steelyard.spec import resolve
from steelyard.train.clock import Clock
from steelyard.train.engine import Engine
from steelyard.train.launch import give_back_tensors
from steelyard.train.step import step

BATCH, LENGTH, VOCABULARY = 4, 512, 50304
RUN = resolve(
    {
        "model": {"num_layers": 6, "hidden_size": 512, "num_attention_heads": 8, "seq_length": LENGTH,
                  "vocab_size": VOCABULARY, "activation": "gelu_tanh"},
        "batch": {"global_batch_size": BATCH},
    }
).run  # fmt: skip


def steelyard_arm():
    give_back_tensors()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    engine = Engine(RUN, mesh.build(RUN.parallel, torch.device("cpu")))

    def run(number, tokens):
        mask, samples = torch.ones_like(tokens, dtype=torch.bool), torch.arange(BATCH)
        batch = Batch(tokens[:, :-1], tokens[:, 1:], mask[:, 1:], None, None, samples)
        return step(RUN, engine, [batch], 1e-4, number, Clock()).loss

    return run


def transformers_arm():
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging

    logging.set_verbosity_error()
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=512, n_layer=6, n_head=8, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, loss_type="ForCausalLM",
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def run(number, tokens):
        inputs = tokens[:, :-1]
        loss = model(inputs, labels=inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return run


ARMS = {"steelyard": steelyard_arm, "transformers": transformers_arm}


def tokens_of(number):
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(number))


def timed(function, *arguments):
    began = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - began


def peak_flops(size=2048, times=4):
    """FLOP/s of a float32 matrix product."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    return times * 2 * size**3 / timed(lambda: [a @ b for _ in range(times)])


def peak_resident():
    """This process's own peak in bytes. (ru_maxrss of a child starts at its parent's.)"""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def serve(arm: str, pipe: Connection):
    """In an arm's process: a step for every number that comes, and at the end its peak memory."""
    run = ARMS[arm]()
    while (number := pipe.recv()) is not None:
        pipe.send(timed(run, number, tokens_of(number)))
    pipe.send(peak_resident())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    fresh, pipes = multiprocessing.get_context("spawn"), {}
    for arm in ARMS:
        pipes[arm], end = fresh.Pipe()
        fresh.Process(target=serve, args=(arm, end), daemon=True).start()

    def ask(arm, number):
        pipes[arm].send(number)
        return pipes[arm].recv()

    rows = [(ask("steelyard", n), ask("transformers", n), peak_flops()) for n in range(options.steps + 2)]
    rows = rows[2:]  # the first two steps touch the memory for the first time
    mine, other = (ask(arm, None) for arm in ARMS)
    work = flops.model_flops(RUN.model, VOCABULARY) * BATCH
    ratios = [theirs / ours for ours, theirs, _ in rows]
    print(f"{options.steps} steps each, in turn, on {torch.get_num_threads()} threads; medians")
    for number, arm in enumerate(ARMS):
        speed = BATCH * LENGTH / statistics.median(row[number] for row in rows)
        share = statistics.median(work / row[number] / row[2] for row in rows)
        print(f"{arm:<13} {speed:8,.0f} tokens/s   {share:.2f} of the float32 matrix-product peak")
    ratio = statistics.median(ratios)
    print(f"ratio         {ratio:8.2f} x (pair by pair, {min(ratios):.2f} to {max(ratios):.2f})")
    print(f"peak memory   {mine / 2**20:,.0f} MiB against {other / 2**20:,.0f} MiB: {mine / other:.2f} x")
    print(f"bound         {1 / share:8.2f} x, at the peak throughout")


if __name__ == "__main__":
    main()
