"""What a run runs on. Peaks are dense and carry their source; an unknown chip stays unknown."""

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files

from steelyard.spec.errors import did_you_mean, error
from steelyard.spec.run import Hardware


@dataclass(frozen=True)
class Chip:
    """One device. `peak` maps a dtype (bf16, fp16, fp32, fp64) to dense FLOP/s; a dtype without an entry is unknown.
    Memory in bytes, bandwidths in bytes per second. `generation` is NVIDIA's compute capability times ten;
    `context_bytes` what an idle process with a context takes on the device. None: unknown or not applicable."""

    name: str
    source: str
    peak: dict[str, float]
    memory_bytes: int
    memory_bandwidth: float
    link: float
    generation: int | None = None
    context_bytes: int | None = None


@cache
def chips() -> dict[str, Chip]:
    """Every known chip by name."""
    table = tomllib.loads((files(__name__) / "chips.toml").read_text("utf-8"))
    return {name: Chip(name=name, **facts) for name, facts in table.items()}


def of(spec: Hardware) -> Chip | None:
    """The chip of a run: the named one, with the peak the run file gives where it gives one; None where nothing is
    known."""
    chip = find(spec.chip)
    if spec.peak_flops is None:
        return chip
    peak = dict.fromkeys(("bf16", "fp16", "fp32", "fp64"), spec.peak_flops)
    known = chip or Chip("given device", "", {}, 0, 0.0, 0.0)
    return replace(known, peak=peak, source="hardware.peak_flops of the run file")


def find(name: str) -> Chip | None:
    """The chip of that name; None for "" (unknown). Raises UserError H001 for a name that is not listed."""
    if not name:
        return None
    if name not in chips():
        raise error("H001", "hardware.chip", chip=name, suggestion=did_you_mean(name, list(chips())))
    return chips()[name]
