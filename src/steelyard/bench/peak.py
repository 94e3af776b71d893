"""`python -m steelyard.bench.peak DTYPE`: FLOP/s of a matrix product on this machine's processor or first GPU.

A program of its own: the process that starts the arms computes nothing itself.
"""

import subprocess
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Peak:
    """FLOP/s of a matrix product in `dtype`: of the whole processor ("cpu"), or of one GPU ("cuda")."""

    flops: float
    device: str
    dtype: str


def measure(dtype: str) -> Peak | None:
    """None where it could not be measured."""
    command = [sys.executable, "-m", "steelyard.bench.peak", dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    words = done.stdout.split()
    return Peak(float(words[1]), words[0], dtype) if done.returncode == 0 and len(words) == 2 else None


def main() -> None:
    import torch

    from steelyard.train.doctor import DTYPES, matrix_product_peak

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(device.type, matrix_product_peak(device, DTYPES[sys.argv[1]])[0])


if __name__ == "__main__":
    main()
