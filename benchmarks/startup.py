"""How long a person waits for an answer, against `import torch` in the same run: `python benchmarks/startup.py`.

Whole processes, in turn, so that a slow moment of the machine hits all of them. The ratio is of the fastest rounds: the
work is the same each time, and whatever else the machine does only adds to it. Exits 1 where a plan takes more than a
fifth of importing torch.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
STEELYARD = [sys.executable, "-m", "steelyard.cli.main"]
LIMIT = 0.2


def arms(bad: Path) -> dict[str, list[str]]:
    return {
        "import torch": [sys.executable, "-c", "import torch"],
        "plan gpt3-175b, 1024 ranks": [*STEELYARD, "plan", str(ROOT / "recipes/gpt3-175b.toml"), "--world", "1024"],
        "--help": [*STEELYARD, "--help"],
        "a bad run file": [*STEELYARD, "plan", str(bad)],
        "python alone": [sys.executable, "-c", ""],
    }


def seconds(command: list[str]) -> float:
    began = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    took = time.perf_counter() - began
    expected = 2 if "error[" in done.stderr else 0
    if done.returncode != expected:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    return took


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=7)
    rounds = options.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        bad = Path(folder) / "bad.toml"
        bad.write_text("[parallel]\ntensor = 5\n[model]\nlayers = 2\n")
        commands = arms(bad)
        for command in commands.values():
            seconds(command)  # fills the disk cache, and writes bytecode where that is allowed
        taken: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(rounds):
            for name, command in commands.items():
                taken[name].append(seconds(command))
    fastest = {name: min(times) for name, times in taken.items()}
    for name, times in taken.items():
        spread = f"median {statistics.median(times):.3f}, slowest {max(times):.3f}"
        ratio = fastest[name] / fastest["import torch"]
        print(f"{name:<28} {fastest[name]:.3f} s  ({spread})  {ratio:.3f} x import torch")
    return int(fastest["plan gpt3-175b, 1024 ranks"] > LIMIT * fastest["import torch"])


if __name__ == "__main__":
    sys.exit(main())
