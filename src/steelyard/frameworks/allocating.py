"""Finds the model of memory for the system a run is planned for: our own engine, or the folder with a `memory.py`."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from steelyard.predict import engine
from steelyard.predict.memory import Memory
from steelyard.spec.errors import error
from steelyard.spec.run import Run


class Allocations(Protocol):
    """The face of a `memory.py`."""

    NAME: str

    def ranks(self, run: Run) -> tuple[Memory, ...]:
        """The memory of every class of equal ranks, pipeline rank outermost, then tensor rank."""

    def assumed(self, run: Run) -> tuple[str, ...]:
        """What was assumed where the run does not say it, a sentence each."""


@cache
def names() -> tuple[str, ...]:
    return tuple(sorted(path.parent.name for path in Path(__file__).parent.glob("*/memory.py")))


@cache
def known() -> tuple[str, ...]:
    """Every framework a run can be of: ours, and those whose memory, scripts or logs are read here."""
    files = (path for name in ("memory", "script", "log") for path in Path(__file__).parent.glob(f"*/{name}.py"))
    return tuple(sorted({"steelyard", *(path.parent.name for path in files)}))


def folder(framework: str) -> str:
    """A framework's name as that of its folder: "Megatron-LM" is megatron."""
    return framework.lower().replace("-", "_").removesuffix("_lm")


def find(framework: str) -> Allocations | None:
    """The model of the named framework; None where nobody has modelled it."""
    if framework == "steelyard":
        return engine
    name = folder(framework)
    return import_module(f"steelyard.frameworks.{name}.memory") if name in names() else None


def refuse_others(framework: str, run: Run, legal: Mapping[str, tuple[Any, ...]]) -> None:
    """For settings that a framework's model covers with some values only, by dotted key. Raises UserError M004."""
    for key, values in legal.items():
        section, name = key.split(".")
        value = getattr(getattr(run, section), name)
        if value not in values:
            shown = " or ".join(map(str, values))
            raise error("M004", key, framework=framework, name=key, value=value, legal=shown)


def ranks(run: Run) -> tuple[Memory, ...] | None:
    """The memory of every class of equal ranks; None where the run's framework is not modelled."""
    found = find(run.engine.framework)
    return found.ranks(run) if found else None


def of_rank(run: Run, rank: int) -> tuple[Memory, ...] | None:
    """The memory of one rank. The tensor axis is the fastest, then data with context, then the pipeline.

    Raises UserError M001 for a rank that the world does not have.
    """
    parallel = run.parallel
    if not 0 <= rank < parallel.world_size:
        raise error("M001", place="--rank", rank=rank, world=parallel.world_size, last=parallel.world_size - 1)
    rest, tensor = divmod(rank, parallel.tensor)
    pipeline, column = divmod(rest, parallel.data * parallel.context)
    if run.engine.framework == "steelyard":
        shard = column % parallel.shards
        return (replace(engine.of_shard(run, pipeline, shard), tensor=tensor),)
    found = ranks(run)
    return tuple(m for m in found if (m.stage, m.tensor) == (pipeline, tensor))[:1] if found else None
