"""Where a run goes on: which checkpoint it begins from, and what has changed since that was saved."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from steelyard.checkpoint import changes, store
from steelyard.data.loader import Split
from steelyard.parallel.mesh import Mesh
from steelyard.record.schema import Event
from steelyard.spec import error, load
from steelyard.spec.run import Run
from steelyard.train.engine import fingerprint

Note = Callable[[str], None]
Record = Callable[[Event], None]


def choose(run: Run, mesh: Mesh, note: Note, record: Record) -> Path | None:
    """The newest checkpoint that is whole and undamaged; None for a run that has none and is told of none. All ranks
    call it together. Raises UserError C001 for one that was named and is not whole, C002 where none is left."""
    asked, own = run.checkpoint.load, Path(run.record.folder)
    found: list[Path] = []
    if mesh.is_first:
        for line in store.recover(own / "checkpoints"):
            note(line)
        sources = store.sources(own, Path(asked) if asked else None)
        found = [path for source in sources for path in store.newest_first(source)]
    said = [found]  # by the first rank: a shared disk may show others an older folder
    dist.broadcast_object_list(said)
    passed = []
    for path in said[0]:
        why = _problem(path)
        if not why:
            return path
        if path == Path(asked):
            raise error("C001", "checkpoint.load", path=path, detail=why)
        passed.append(f"{path.name} was passed over: {why}")
        note(f"passed over {path}: {why}")
        record(Event(0, "passed_over", {"checkpoint": str(path), "why": why}))
    if asked or passed:  # beginning anew would give up what those hold
        raise error("C002", "checkpoint.load", path="; ".join([asked or str(own), *passed]))
    return None


def _problem(path: Path) -> str:
    """What is wrong with a checkpoint, the same on every rank; each checks a share of its files."""
    whys = [""] * dist.get_world_size()
    found = store.problem(path) or store.damage(path, dist.get_rank(), dist.get_world_size())
    dist.all_gather_object(whys, found)
    return next(filter(None, whys), "")


def compare(path: Path, saved: dict[str, Any], run: Run, split: Split, mesh: Mesh, note: Note, record: Record) -> None:
    """Say what this run does otherwise than the one that saved the state `saved`; `split` is its training data. Raises
    UserError C007 for what changes the network or the tokens and was not accepted."""
    same = [True]
    if mesh.is_first and saved.get("batch"):
        same = [_reads_alike(split, **saved["batch"])]
    dist.broadcast_object_list(same)
    step = saved["state"].get("step", 0)
    found = changes.judge(load(path / "run.toml").run, run, step, same[0], path)
    for change in found:
        note(f"changed since the checkpoint: {change}")
    if found:
        record(Event(step, "changed", {change.key: [change.there, change.here] for change in found}))


def _reads_alike(split: Split, first: int, size: int, hash: str) -> bool:
    """Whether the samples that were trained on last are still those that stand there."""
    if first + size > split.num_samples:  # nothing is left to train on
        return True
    return f"{sum(fingerprint(split.batch(number, 1)) for number in range(first, first + size)):x}" == hash
