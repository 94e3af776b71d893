"""How fast a log of a gigabyte is read, and in how much memory.

`python benchmarks/logs.py [gigabytes]` writes two logs of that size, reads each in a process of its own and prints the
seconds and the largest resident memory: one that is training lines and nothing else (the worst case: a run of three
million iterations), one as jobs leave them, with timers, warnings and memory reports between the lines.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LINE = (
    " iteration {n:8d}/ 9000000 | consumed samples: {samples:12d} | elapsed time per iteration (ms): {ms:.1f} | "
    "learning rate: 1.500E-04 | global batch size:  1024 | lm loss: {loss:.6E} | loss scale: 262144.0 | grad norm: "
    "0.617 | number of skipped iterations:   0 | number of nan iterations:   0 |\n"
)
BETWEEN = (
    "time (ms) | forward-compute: 306.62 | forward-recv: 527.58 | backward-compute: 575.17 | optimizer: 94.69\n"
    "[Rank {rank}] (after {n} iterations) memory (MB) | allocated: 21633.0859375 | max allocated: 24432.009765625 | "
    "reserved: 29316.0 | max reserved: 29316.0\n"
    "/opt/python/site-packages/torch/cuda/memory.py:373: FutureWarning: torch.cuda.memory_cached has been renamed\n"
) * 6


def write(path: Path, size: int, mixed: bool) -> int:
    """A log of `size` bytes; the number of its training lines."""
    count, written = 0, 0
    with path.open("w", encoding="ascii") as file:
        while written < size:
            block = []
            for _ in range(2000):
                count += 1
                line = LINE.format(n=count, samples=count * 1024, ms=420 + count % 17, loss=2 + 9 / (1 + count / 1e5))
                block.append(line + (BETWEEN.format(rank=count % 64, n=count) if mixed else ""))
            text = "".join(block)
            file.write(text)
            written += len(text)
    return count


def read(path: str) -> None:
    """In a process of its own: what it took, as JSON."""
    from steelyard.frameworks import detect

    started = time.perf_counter()
    record = detect.read(path)
    took = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": took, "rss_bytes": peak, "kept": len(record.steps), "last": record.steps[-1].step}))


def main() -> None:
    size = int(float(sys.argv[1]) * 2**30) if len(sys.argv) > 1 else 2**30
    with tempfile.TemporaryDirectory() as folder:
        for name, mixed in (("training lines only", False), ("with other lines", True)):
            path = Path(folder) / "run.log"
            count = write(path, size, mixed)
            done = subprocess.run(
                [sys.executable, __file__, "--read", str(path)], capture_output=True, text=True, check=True
            )
            found = json.loads(done.stdout)
            assert count - found["last"] <= count // found["kept"] + 1  # of a long log one step in so many is kept
            print(f"{name}: {path.stat().st_size / 2**30:.2f} GiB, {count:,} training lines: {found['seconds']:.1f} s, "
                  f"{found['rss_bytes'] / 2**20:,.0f} MiB resident, {found['kept']:,} steps kept")  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:2] == ["--read"]:
        read(sys.argv[2])
    else:
        main()
