"""Weights from elsewhere as a checkpoint of step 0 that a run can start from."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from steelyard.checkpoint import shards, store
from steelyard.predict import parameters
from steelyard.spec import Run, error, write


def check(tensors: Mapping[str, Tensor], run: Run, source: Path) -> None:
    """Every tensor of the run's model is there, in its shape, and nothing else. Raises UserError C003."""
    expected = {t.name: t.shape for t in parameters.tensors(run.model, run.parallel.tensor)}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            there = found.get(name, "not in it")
            here = expected.get(name, "not a part of this model")
            raise error("C003", place=str(source), path=source, detail=f"{name}: {there} there, {here} here")


def write_start(tensors: Mapping[str, Tensor], run: Run, source: Path, folder: Path) -> Path:
    """Write `folder`/checkpoints/step-0000000 with these float32 weights and no optimizer state, for
    `checkpoint.load`. Raises UserError C003, C004, C013."""
    check(tensors, run, source)
    final = store.final_path(folder / "checkpoints", 0)
    if trained := [path for path in store.newest_first(folder) if path.name != final.name]:
        raise error("C013", place=str(folder), path=folder, newest=trained[0].name)
    state = {"schema": 1, "state": {}, "scaler": None, "source": str(source)}
    texts = {"state.json": json.dumps(state), "run.toml": write.dumps(run)}
    whole = {f"weights.{name}": tensor.float() for name, tensor in tensors.items()}
    name = "shard-00000.safetensors"
    try:
        beside = store.begin(folder / "checkpoints", 0)
        file = shards.write(beside / name, shards.in_place([b for n, t in whole.items() for b in shards.blocks(n, t)]))
        return store.seal(beside, final, {name: file}, texts)
    except OSError as failure:
        size = sum(tensor.numel() * torch.float32.itemsize for tensor in tensors.values())
        raise error("C004", path=folder, detail=failure.strerror, bytes=size) from None
