"""Checkpoints on disk: safetensors for tensors, JSON for the rest, nothing that executes on load.

    checkpoints/step-0000100/
        shard-*.safetensors   tensors by global name (weights.NAME, mean.NAME, variance.NAME), in any sharding
        state.json            what is not a tensor
        run.toml              the run that saved it
        complete.json         written last: every other file and its size

A save is written into a folder with a leading dot and renamed once it is whole on every rank.
"""

import contextlib
import json
import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from steelyard.spec.errors import error

COMPLETE = "complete.json"


@dataclass(frozen=True)
class Skipped:
    """A folder that looks like a checkpoint and cannot be loaded, and why."""

    path: Path
    why: str


def save(folder: Path, step: int, tensors: dict[str, Tensor], texts: dict[str, str], keep: int) -> Path:
    """Write the checkpoint of `step` into the run's `checkpoints` folder; all ranks call it together.

    `texts` are further files by name. Older complete checkpoints beyond `keep` are removed afterwards. Raises UserError
    C004 on every rank where any rank could not write; what was complete before stays.
    """
    final = folder / f"step-{step:07d}"
    beside = folder / f".step-{step:07d}.part"
    speaker = dist.get_rank() == 0

    def begin() -> None:
        if speaker:
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir(parents=True)

    def write() -> None:
        dcp.save(tensors, storage_writer=dcp.HuggingFaceStorageWriter(str(beside), save_distributed=True))

    def finish() -> None:
        if speaker:
            for name, text in texts.items():
                (beside / name).write_text(text, encoding="utf-8")
            seal(beside, final)
            _retain(folder, keep)

    size = sum(t.numel() * t.element_size() for t in tensors.values())
    for part in (begin, write, finish):
        _together(part, final, size)
    return final


def _together(part: Callable[[], None], path: Path, size: int) -> None:
    """Run a part of a save; a failure on any rank is the same error on all, so that none waits for another."""
    failure = ""
    try:
        part()
    except (Exception, CheckpointException) as caught:  # the storage library wraps what the disk said in its own
        failure = _reason(caught)
    failures: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    if found := next(filter(None, failures), None):
        raise error("C004", "record.folder", path=path, detail=found, bytes=size)


def _reason(caught: BaseException) -> str:
    """The operating system's word for a failure, out of whatever it is wrapped in."""
    inner: BaseException | None = caught
    while inner is not None:
        if isinstance(inner, OSError) and inner.strerror:
            return inner.strerror
        inner = inner.__cause__ or inner.__context__
    return str(caught).strip().splitlines()[-1] if str(caught).strip() else type(caught).__name__


def seal(beside: Path, final: Path) -> Path:
    """Sync every file, list them, and give the folder its name, which is returned."""
    sizes = {}
    for path in sorted(beside.iterdir()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        sizes[path.name] = path.stat().st_size
    marker = beside / COMPLETE
    with marker.open("w") as file:
        json.dump({"files": sizes}, file)
        file.flush()
        os.fsync(file.fileno())
    if final.exists():  # a resumed run reached the same step again: the newer one is as good, and whole
        shutil.rmtree(final)
    beside.rename(final)
    _sync_folder(final.parent)
    return final


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _retain(folder: Path, keep: int) -> None:
    complete = [path for path in _candidates(folder) if not problem(path)]
    for path in complete[:-keep]:
        with contextlib.suppress(OSError):  # a folder that cannot be removed is only disk space
            (path / COMPLETE).unlink()
            shutil.rmtree(path)


def _candidates(folder: Path) -> list[Path]:
    """Folders named like checkpoints, oldest first."""
    found = [path for path in folder.glob("step-*") if path.is_dir() and path.name.removeprefix("step-").isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def problem(path: Path) -> str:
    """Why a folder is not a complete checkpoint; "" where it is."""
    try:
        files = json.loads((path / COMPLETE).read_text("utf-8"))["files"]
        for name, size in files.items():
            if not (path / name).is_file():
                return f"{name} is missing"
            if (actual := (path / name).stat().st_size) != size:
                return f"{name} has {actual:,} bytes instead of {size:,}"
    except FileNotFoundError:
        return f"{COMPLETE} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{COMPLETE} cannot be read"
    return ""


def find(path: Path) -> tuple[Path | None, list[Skipped]]:
    """The newest complete checkpoint of a run folder or checkpoints folder, or the one given; and what was passed over.

    Raises UserError C001 for a single checkpoint that is not complete.
    """
    if path.name.startswith("step-"):
        if why := problem(path):
            raise error("C001", place=str(path), path=path, detail=why)
        return path, []
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    skipped: list[Skipped] = []
    for candidate in reversed(_candidates(folder)):
        why = problem(candidate)
        if not why:
            return candidate, skipped
        skipped.append(Skipped(candidate, why))
    return None, skipped


def read_state(path: Path) -> dict[str, Any]:
    """state.json of a complete checkpoint. Raises UserError C001."""
    try:
        state = json.loads((path / "state.json").read_text("utf-8"))
        assert isinstance(state, dict)
        return state
    except (OSError, ValueError, AssertionError, RecursionError):
        raise error("C001", place=str(path), path=path, detail="state.json cannot be read") from None


def load(path: Path, tensors: dict[str, Tensor]) -> None:
    """Fill the given tensors in place from a checkpoint saved in any layout. Raises UserError C001 or C003."""
    reader = dcp.HuggingFaceStorageReader(str(path))
    try:
        held = reader.read_metadata().state_dict_metadata
    except (Exception, CheckpointException) as failure:  # a damaged file fails in many ways inside the storage library
        raise error("C001", place=str(path), path=path, detail=_reason(failure)) from None
    for name, tensor in tensors.items():
        size = getattr(held.get(name), "size", None)
        if size is None or tuple(size) != tuple(tensor.shape):
            found = (
                f"{name} is not in it" if size is None else f"{name} is {tuple(size)} there, {tuple(tensor.shape)} here"
            )
            raise error("C003", "checkpoint.load", path=path, detail=found)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process alone is meant
        alone = not dist.is_initialized()
        dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(path)), no_dist=alone)
