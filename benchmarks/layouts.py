"""What a layout costs on this machine: the same run on one rank and on two, in turn, by `steelyard train` itself.

    python benchmarks/layouts.py [--rounds N] [--hidden H]

All arms compute the same losses at the same global batch on the same number of threads in all (one rank with two, two
ranks with one each), so the ratio is the overhead of cutting the work. Medians of seconds a step after warm-up.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from steelyard.data.store import Writer
from steelyard.record.read import read_folder

RUN = """
[model]
num_layers = 4
hidden_size = {hidden}
num_attention_heads = 8
seq_length = 256
vocab_size = 4096
position = "rotary"
[batch]
global_batch_size = 8
micro_batch_size = 2
[length]
steps = 14
[data]
train = ["{folder}/text"]
split = "1"
cache = "{folder}/cache"
[evaluation]
steps = 0
[checkpoint]
every_steps = 0
[record]
tensorboard = false
"""
ARMS = {
    "one rank": (1, []),
    "dp2": (2, []),
    "dp2 zero 3": (2, ["parallel.zero=3"]),
    "tp2": (2, ["parallel.tensor=2"]),
    "tp2 sequence": (2, ["parallel.tensor=2", "parallel.sequence=true"]),
    "pp2": (2, ["parallel.pipeline=2"]),
}


def seconds_per_step(path: Path, folder: Path, name: str, number: int) -> float:
    world, options = ARMS[name]
    record = folder / f"{name.replace(' ', '-')}-{number}"
    command = [sys.executable, "-m", "steelyard.cli.main", "train", str(path), *options, f"record.folder={record}"]
    subprocess.run([*command, "--world", str(world)], check=True, capture_output=True)
    return read_folder(record).speed["seconds_per_step"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=256)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Writer(folder / "text", np.dtype(np.uint16)) as writer:
            generator = np.random.default_rng(0)
            for _ in range(200):
                writer.add_document([generator.integers(0, 4096, 1000, dtype=np.uint16)])
        path = folder / "run.toml"
        path.write_text(RUN.format(folder=folder, hidden=options.hidden))
        rounds = [
            {arm: seconds_per_step(path, folder, arm, number) for arm in ARMS} for number in range(options.rounds)
        ]
    print(f"seconds a step, medians of {options.rounds} rounds in turn; ratio to one rank, round by round")
    for arm in ARMS:
        seconds = statistics.median(r[arm] for r in rounds)
        ratios = [r[arm] / r["one rank"] for r in rounds]
        print(
            f"{arm:<14} {seconds:7.3f}   {statistics.median(ratios):5.2f} x   ({min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
