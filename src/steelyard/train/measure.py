"""Memory of this process and its device, each kind under its own name; never one kind under another's."""

import gc
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from steelyard.parallel.mesh import Mesh


def memory_by_rank(mesh: Mesh) -> list[dict[str, int]]:
    """The bytes by kind of every rank, in rank order; on all ranks."""
    found: list[dict[str, int]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, _cuda(mesh.device) if mesh.device.type == "cuda" else _host())
    return found


def memory(mesh: Mesh) -> dict[str, int]:
    """Bytes by kind, the largest over all ranks.

    GPU: `allocated` and `allocated_peak` (tensors, by the caching allocator), `reserved_peak` (what the allocator holds
    from the driver), `device` (all the driver has given out on this device, contexts and communicators included).
    CPU: `rss` and `rss_peak` (resident memory of the whole process, the Python interpreter and libraries included).
    """
    kinds = _cuda(mesh.device) if mesh.device.type == "cuda" else _host()
    values = torch.tensor(list(kinds.values()), dtype=torch.int64, device=mesh.device)
    mesh.all_reduce(values, ("pipeline", "data", "tensor"), "max")
    return dict(zip(kinds, values.tolist(), strict=True))


def live_tensors(device: torch.device) -> Iterator[Tensor]:
    """Every tensor of this process on a device, one for each storage. Walks the garbage collector's objects, so it is
    for once, not for every step."""
    seen = set[int]()
    for entry in gc.get_objects():
        kind = type(entry)
        if not issubclass(kind, Tensor) or issubclass(kind, DTensor | FakeTensor) or entry.device.type != device.type:
            continue
        storage = entry.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            yield entry


def live_bytes(device: torch.device) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in live_tensors(device))


def _cuda(device: torch.device) -> dict[str, int]:
    free, total = torch.cuda.mem_get_info(device)
    return {
        "allocated": torch.cuda.memory_allocated(device),
        "allocated_peak": torch.cuda.max_memory_allocated(device),
        "reserved_peak": torch.cuda.max_memory_reserved(device),
        "device": total - free,
    }


def _host() -> dict[str, int]:
    # Linux gives the peak in KiB; macOS in bytes, and has no /proc
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return {"rss_peak": peak}
    now = int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {"rss": now, "rss_peak": max(now, peak * 1024)}  # the kernel brings the peak up to date a little later
