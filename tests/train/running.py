"""Run a run file on the ranks of a pool, as `steelyard train` does on ranks of its own."""

import torch
import torch.distributed as dist

from steelyard.parallel import mesh
from steelyard.record.read import read_folder
from steelyard.spec import load
from steelyard.train.launch import Silent
from steelyard.train.loop import Loop
from steelyard.train.watch import StopSignal, Watch


def on_rank(path, overrides, resumed=lambda loop: None):
    """Runs on every rank of a pool: the Result of the run. `resumed(loop)` is called before its first step."""
    loaded = load(path, overrides, dist.get_world_size())
    watch = Watch(dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size())
    loop = Loop(
        loaded, mesh.build(loaded.run.parallel, torch.device("cpu")), watch, StopSignal(watch, launched=False), Silent()
    )
    loop.resume()
    resumed(loop)
    return loop.train()


def train(pool, path, *overrides, folder=None):
    """Train on the pool and return (result, record)."""
    if folder is not None:
        overrides = (*overrides, f"record.folder={folder}")
    loaded = load(path, overrides, pool.world)
    results = pool.run(on_rank, path, overrides)
    return results[0], read_folder(loaded.run.record.folder)


def losses(record):
    return [s.loss for s in record.steps]
