"""A training step of the GPT-2 shape against transformers' GPT-2 with torch.optim.AdamW, on this machine.

    python benchmarks/step.py            steps of the two in turn: tokens a second, their ratio, share of the peak
    python benchmarks/step.py --arm X    peak memory of one arm alone, in a process of its own (used by the first)

6 layers x 512 x 8 heads, sequence 512, vocabulary 50,304, batch 4, float32, one process. Both arms clip gradients to 1
and report the loss of every step. The peak is a float32 matrix product of 2048 x 2048 measured between the steps.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time
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


def memory(arm):
    """Peak resident bytes of an arm in a process of its own."""
    done = subprocess.run([sys.executable, __file__, "--arm", arm], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arm", choices=ARMS)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    if options.arm:
        run = ARMS[options.arm]()
        for number in range(8):
            run(number, tokens_of(number))
        print(peak_resident())
        return
    runs = {name: make() for name, make in ARMS.items()}
    model_flops = flops.model_flops(RUN.model, VOCABULARY) * BATCH
    rows = []
    for number in range(options.steps + 2):
        tokens = tokens_of(number)
        ours, theirs = timed(runs["steelyard"], number, tokens), timed(runs["transformers"], number, tokens)
        rows.append((ours, theirs, theirs / ours, model_flops / ours / peak_flops()))
    rows = rows[2:]  # the first two steps touch the memory for the first time
    ours, theirs, ratio, share = (statistics.median(column) for column in zip(*rows, strict=True))
    low, high = min(row[2] for row in rows), max(row[2] for row in rows)
    count = BATCH * LENGTH
    print(f"{options.steps} steps each, in turn, on {torch.get_num_threads()} threads; medians")
    print(f"steelyard     {count / ours:8,.0f} tokens/s   {share:.2f} of the float32 matrix-product peak")
    print(f"transformers  {count / theirs:8,.0f} tokens/s")
    print(f"ratio         {ratio:8.2f} x (pair by pair, {low:.2f} to {high:.2f})")
    mine, other = memory("steelyard"), memory("transformers")
    print(f"peak memory   {mine / 2**20:,.0f} MiB against {other / 2**20:,.0f} MiB: {mine / other:.2f} x")


if __name__ == "__main__":
    main()
