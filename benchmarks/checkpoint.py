"""What a checkpoint costs on this machine: against torch.save, and what an asynchronous save takes from training.

    python benchmarks/checkpoint.py [--folder DIR] [--times 6] [--layers 6]

One process, float32, GPT-2 of 512 channels with Adam's moments: 12 bytes a parameter. Arms take turns, and each figure
is a median over the turns with its range.
  1. The same tensors written by our save (checksummed, synced, sealed) and by torch.save + fsync.
  2. In a training run: seconds that training waits for a synchronous and for an asynchronous save, and all that an
     asynchronous one costs: the wait, and how much slower the step is that is computed meanwhile. Training waits for
     the copy and, after that step, until the save is sealed (`checkpoint.overlap_steps = 1`).
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from steelyard.checkpoint.saver import Saver
from steelyard.data.loader import Batch
from steelyard.parallel import mesh
from steelyard.spec import resolve
from steelyard.train.clock import Clock
from steelyard.train.engine import Engine
from steelyard.train.launch import give_back_tensors
from steelyard.train.step import step

BATCH, LENGTH, VOCABULARY = 4, 128, 50304


def engine_of(layers):
    values = {
        "model": {"num_layers": layers, "hidden_size": 512, "num_attention_heads": 8, "seq_length": LENGTH,
                  "vocab_size": VOCABULARY},
        "batch": {"global_batch_size": BATCH},
    }  # fmt: skip
    run = resolve(values).run
    where = mesh.build(run.parallel, torch.device("cpu"))
    return run, where, Engine(run, where)


def tokens_of(number):
    stream = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(number))
    mask = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    return Batch(stream[:, :-1], stream[:, 1:], mask, None, None, torch.arange(BATCH))


def timed(function):
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def torch_save(tensors, path):
    with path.open("wb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())


def settle():
    """Let the disk finish what earlier turns left, so that no arm pays for another."""
    os.sync()


def spread(name, values, unit="s", form=".3f"):
    middle = statistics.median(values)
    print(f"{name:44} {middle:{form}} {unit} ({min(values):{form}} to {max(values):{form}})")
    return middle


def writing(saver, tensors, folder, times):
    """Our save and torch.save + fsync in turn."""
    ours, theirs, ratios = [], [], []
    for number in range(times + 1):
        settle()
        mine = timed(
            lambda number=number: (saver.begin(number, tensors, {"state.json": "{}"}, copy=False), saver.wait())
        )
        assert saver.outcome and not saver.outcome.problem
        settle()
        other = timed(lambda: torch_save(tensors, folder / "torch.pt"))
        (folder / "torch.pt").unlink()
        ours, theirs, ratios = [*ours, mine], [*theirs, other], [*ratios, other / mine]
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    print(f"{size / 2**20:,.0f} MiB, {times} turns each, the first left out")
    spread("save", ours[1:])
    spread("torch.save + fsync", theirs[1:])
    spread("speed of ours over torch.save's", ratios[1:], "x", ".2f")


def training(run, engine, saver, times):
    """Steps with no save, with a synchronous and with an asynchronous one, in turn."""
    count = iter(range(10**9))
    tensors = engine.tensors(with_optimizer=True)

    def train():
        number = next(count)
        return timed(lambda: step(run, engine, [tokens_of(number)], 1e-4, number, Clock()))

    waits, blocked, behind, slower = [], [], [], []
    for turn in range(times + 1):
        settle()
        alone = [train() for _ in range(6)]
        waits.append(timed(lambda turn=turn: (saver.begin(100 + 2 * turn, tensors, {}, copy=False), saver.wait())))
        settle()
        train()
        copying = timed(lambda turn=turn: saver.begin(101 + 2 * turn, tensors, {}))
        slower.append(train() - statistics.median(alone))
        blocked.append(copying + timed(saver.wait))
        assert saver.outcome and not saver.outcome.problem
        behind.append(saver.outcome.seconds)
    waits, blocked, behind, slower = (values[1:] for values in (waits, blocked, behind, slower))
    spread("a step", alone)
    spread("training waits for a synchronous save", waits)
    spread("training waits for an asynchronous save", blocked)
    spread("  share of the synchronous", [b / w for b, w in zip(blocked, waits, strict=True)], "x", ".2f")
    spread("sealed after", behind)
    spread("the step meanwhile took longer by", slower)
    totals = [b + s for b, s in zip(blocked, slower, strict=True)]
    spread("an asynchronous save costs in all", totals)
    spread("  share of the synchronous", [t / w for t, w in zip(totals, waits, strict=True)], "x", ".2f")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=None, help="where to write; default: the system's temporary one")
    parser.add_argument("--times", type=int, default=6)
    parser.add_argument("--layers", type=int, default=6)
    options = parser.parse_args()
    give_back_tensors()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=options.folder))
    try:
        run, where, engine = engine_of(options.layers)
        saver = Saver(folder, 1, where)
        step(run, engine, [tokens_of(0)], 1e-4, 0, Clock())
        writing(saver, engine.tensors(with_optimizer=True), folder, options.times)
        training(run, engine, saver, options.times)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
