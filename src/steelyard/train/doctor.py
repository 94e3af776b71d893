"""What this machine has, whether its ranks can talk, and what is wrong with it."""

import importlib
import os
import platform
import shutil
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from steelyard import hardware
from steelyard.parallel.shard import DTYPES
from steelyard.train.environment import device_name

__all__ = ["DTYPES", "Finding", "examine", "matrix_product_flops", "matrix_product_peak"]

LIBRARIES = ("torch", "numpy", "pydantic", "tokenizers", "safetensors", "tensorboard", "numba")


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at and found. `advice` says what to do where something is wrong; "" elsewhere."""

    name: str
    found: str
    advice: str = ""


def examine() -> Iterator[Finding]:
    """Every finding, as it is made; the measured ones last."""
    yield from _software()
    yield from _host()
    yield from _gpus()
    yield _collectives()  # before anything computes here: threads that have worked do not survive a fork
    yield from _peaks()


def _software() -> Iterator[Finding]:
    yield Finding("python", platform.python_version())
    for name in LIBRARIES:
        try:
            yield Finding(name, str(getattr(importlib.import_module(name), "__version__", "installed")))
        except ImportError as failure:
            yield Finding(name, f"cannot be imported: {failure}", "install the extra: pip install 'steelyard[train]'")


def _host() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding("processor", f"{device_name(torch.device('cpu'))}, {cores} cores")
    given = os.environ.get("OMP_NUM_THREADS")
    few = given is not None and given.isdigit() and int(given) < cores
    yield Finding(
        "threads",
        f"{torch.get_num_threads()} (OMP_NUM_THREADS {given or 'not set'})",
        f"OMP_NUM_THREADS={given} leaves cores idle in a run of one rank; unset it" if few else "",
    )
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield Finding("memory", f"{pages / 2**30:.1f} GiB")
    free = shutil.disk_usage(".").free
    yield Finding("disk here", f"{free / 2**30:.1f} GiB free", "checkpoints may not fit" if free < 2**30 else "")
    if os.path.isdir("/dev/shm"):
        shared = shutil.disk_usage("/dev/shm").total
        small = torch.cuda.is_available() and shared < 2**30
        advice = "NCCL between GPUs wants 1 GiB; start the container with a larger --shm-size" if small else ""
        yield Finding("shared memory", f"{shared / 2**20:,.0f} MiB", advice)


def _gpus() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        built = torch.version.cuda is not None
        advice = "torch was built for CUDA but sees no GPU: check the driver (nvidia-smi)" if built else ""
        yield Finding("GPUs", "none; runs use the CPU and gloo", advice)
        return
    yield Finding("CUDA", f"{torch.version.cuda}, driver {_driver()}")
    for number in range(torch.cuda.device_count()):
        name = torch.cuda.get_device_name(number)
        free, total = torch.cuda.mem_get_info(number)
        busy = f"{(total - free) / 2**30:.1f} GiB are in use by others" if total - free > 2 * 2**30 else ""
        known = [chip for chip in hardware.chips() if chip.split("-")[0] in name]
        unknown = "" if known else "not in hardware/chips.toml: give hardware.peak_flops to have an MFU"
        peers = [
            other for other in range(torch.cuda.device_count())
            if other != number and torch.cuda.can_device_access_peer(number, other)
        ]  # fmt: skip
        links = f", direct access to {peers}" if peers else ""
        yield Finding(f"GPU {number}", f"{name}, {total / 2**30:.1f} GiB{links}", busy or unknown)


def _driver() -> str:
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception as failure:  # the library raises errors of its own for every way a driver can be absent
        return f"unknown ({failure})"


def _peaks() -> Iterator[Finding]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name, dtype in DTYPES.items():
        best, size = matrix_product_peak(device, dtype)
        yield Finding(f"{name} product", f"{best / 1e12:.4g} TFLOP/s (up to size {size})")


def matrix_product_peak(device: torch.device, dtype: torch.dtype) -> tuple[float, int]:
    """FLOP/s of a matrix product, the best over growing sizes, and the largest size tried. Half precision on a CPU
    without units for it is hundreds of times slower, so a size is tried only where it will not take long."""
    largest = 8192 if device.type == "cuda" else 2048
    size, best = 128, 0.0
    while size <= largest and (best == 0 or 2 * size**3 / best < 0.25):
        best = max(best, matrix_product_flops(device, dtype, size))
        size *= 2
    return best, size // 2


def matrix_product_flops(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """FLOP/s of one [size, size] matrix product, the best of three after a warm-up."""
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    best = float("inf")
    for _ in range(4):
        began = time.perf_counter()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


def _collectives() -> Finding:
    """Two ranks (on GPUs: all) start, add a vector over all of them and check the sum."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from steelyard.train.launch import quiet_launcher

    world = max(2, torch.cuda.device_count()) if torch.cuda.is_available() else 2
    if torch.cuda.is_available() and torch.cuda.device_count() < 2:
        return Finding("collectives", "one GPU: nothing to talk to")
    quiet_launcher()
    config = LaunchConfig(
        1, 1, world, run_id=uuid.uuid4().hex, rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0,
        start_method="spawn" if torch.cuda.is_available() else "fork",
    )  # fmt: skip
    began = time.perf_counter()
    try:
        rates = elastic_launch(config, _add_up)()
    except Exception as failure:  # whatever fails here is the finding
        return Finding(
            "collectives", f"{world} ranks failed: {failure}",
            "check that localhost resolves and that no firewall blocks it; on GPUs run with NCCL_DEBUG=INFO",
        )  # fmt: skip
    seconds = time.perf_counter() - began
    rate = min(rates.values())
    return Finding(
        "collectives", f"{world} ranks agree on a sum; all-reduce {rate / 1e9:.2f} GB/s; {seconds:.1f} s in all"
    )


def _add_up() -> float:
    """On every rank: bytes a second of a checked all-reduce of 16 MiB."""
    cuda = torch.cuda.is_available()
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=60))
    values = torch.full((2**22,), float(rank + 1), device=device)
    dist.barrier()
    began = time.perf_counter()
    dist.all_reduce(values)
    total = values[0].item()
    seconds = time.perf_counter() - began
    world = dist.get_world_size()
    dist.destroy_process_group()
    if total != world * (world + 1) / 2:
        sys.exit(f"the sum is {total}")
    return values.numel() * values.element_size() / seconds
