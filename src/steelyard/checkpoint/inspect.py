"""What is in a checkpoint, whether it is what was saved, and how two of them differ. What is returned is plain JSON."""

import math
from pathlib import Path
from typing import Any

import torch

from steelyard.checkpoint import changes, shards, store
from steelyard.predict import parameters
from steelyard.spec import Run, error, load

ADAM = ("mean", "variance")


def inspect(path: Path) -> dict[str, Any]:
    """A run folder's checkpoints, or one checkpoint; contents by size and shape, without reading the tensors.

    Raises UserError C001, C002.
    """
    chosen = path if path.name.startswith("step-") else store.found(path)
    if why := store.problem(chosen):
        raise error("C001", place=str(chosen), path=chosen, detail=why)
    held, listed, saved = shards.index(chosen), store.files(chosen), store.read_state(chosen)
    run = load(chosen / "run.toml").run
    groups: dict[str, dict[str, int]] = {}
    for name, entries in held.items():
        group = groups.setdefault(name.partition(".")[0], {"tensors": 0, "numel": 0, "bytes": 0})
        numel = math.prod(shards.whole_shape(entries))
        group["tensors"] += 1
        group["numel"] += numel
        group["bytes"] += numel * entries[0].dtype.itemsize
    return {
        "path": str(chosen),
        "name": run.name,
        "steps": saved["state"].get("step", 0),
        "state": saved["state"],
        "loss_scale": (saved.get("scaler") or {}).get("scale") if run.precision.scales_loss else None,
        "parameters": parameters.unique(run.model, run.parallel.tensor),
        "dtype": sorted({str(e.dtype).removeprefix("torch.") for entries in held.values() for e in entries}),
        "layout": _layout(run),
        "groups": groups,
        "files": {name: file.bytes for name, file in listed.items()},
        "bytes": sum(file.bytes for file in listed.values()),
        "others": [] if chosen == path else _others(path, chosen),
    }


def _layout(run: Run) -> dict[str, int]:
    keys = ("data", "tensor", "pipeline", "zero")
    return {"world": run.parallel.world_size, **{key: getattr(run.parallel, key) for key in keys}}


def _others(path: Path, chosen: Path) -> list[dict[str, str]]:
    """The other checkpoints of a run folder, the newest first, and what is wrong with each."""
    others = [other for other in store.newest_first(path) if other != chosen]
    return [{"path": str(other), "problem": store.problem(other)} for other in others]


def verify(path: Path) -> list[dict[str, Any]]:
    """Every checkpoint of a run folder (or the one given), every byte read: its files and its problem, "" for none.

    Raises UserError C002 where there is nothing to verify.
    """
    paths = store.newest_first(path)
    if not paths or not paths[0].is_dir():
        raise error("C002", place=str(path), path=path)
    found = []
    for candidate in paths:
        why = store.problem(candidate) or store.damage(candidate)
        listed = {} if store.problem(candidate) else store.files(candidate)
        unsummed = [name for name, file in listed.items() if file.crc32 is None]
        size = sum(file.bytes for file in listed.values())
        facts = {"path": str(candidate), "problem": why, "files": len(listed), "bytes": size}
        found.append({**facts, "without_checksum": unsummed})
    return found


def diff(first: Path, second: Path) -> dict[str, Any]:
    """How two checkpoints differ: settings, state, and every tensor that is not bit-equal.

    Raises UserError C001, C002.
    """
    a, b = store.found(first), store.found(second)
    held_a, held_b = shards.index(a), shards.index(b)
    here = dict(shards.read_whole(a))
    tensors = []
    for name, right in shards.read_whole(b):
        left = here.pop(name, None)
        if left is not None and (unlike := _unlike(left, right)):
            tensors.append({"name": name, **unlike})
    states = store.read_state(a)["state"], store.read_state(b)["state"]
    keys = [key for key in {**states[0], **states[1]} if states[0].get(key) != states[1].get(key)]
    settings = changes.changes(load(a / "run.toml").run, load(b / "run.toml").run)
    return {
        "a": str(a),
        "b": str(b),
        "settings": [{"key": c.key, "a": c.there, "b": c.here} for c in settings],
        "state": [{"key": key, "a": states[0].get(key), "b": states[1].get(key)} for key in keys],
        "only_a": sorted(set(held_a) - set(held_b)),
        "only_b": sorted(set(held_b) - set(held_a)),
        "tensors": tensors,
        "equal": len(set(held_a) & set(held_b)) - len(tensors),
    }


def _unlike(left: torch.Tensor, right: torch.Tensor) -> dict[str, Any]:
    """How two tensors of one name differ; {} where they are bit-equal."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return {"shapes": [list(left.shape), list(right.shape)], "dtypes": [str(left.dtype), str(right.dtype)]}
    if torch.equal(left.view(torch.uint8) if left.dim() else left, right.view(torch.uint8) if right.dim() else right):
        return {}
    apart, scale = (left.double() - right.double()).abs().max().item(), left.double().abs().max().item()
    finite = math.isfinite(apart)
    return {"largest": apart if finite else None, "relative": apart / scale if finite and scale else None}


def is_different(found: dict[str, Any]) -> bool:
    """Whether two checkpoints hold other weights, another optimizer or another state."""
    return bool(found["tensors"] or found["only_a"] or found["only_b"] or found["state"])
