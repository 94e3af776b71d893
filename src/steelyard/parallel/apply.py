"""The one page where order is decided: cut into stages, then tensor plan, recompute, compile, shard."""

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from steelyard.model.gpt import GPT
from steelyard.model.init import initial
from steelyard.parallel.mesh import Mesh
from steelyard.parallel.pipeline import Chunk, chunks
from steelyard.parallel.recompute import recompute
from steelyard.parallel.shard import DTYPES, shard
from steelyard.parallel.tensor import tensor_parallel
from steelyard.spec.run import Run


def build(run: Run, mesh: Mesh) -> list[GPT]:
    """The parts of the model on this rank, one per pipeline stage it holds, with their initial weights.

    Nothing is ever allocated whole that this rank does not keep: modules are made on the meta device, cut, and only
    then given memory.
    """
    parts = [_assembled(run, mesh, chunk) for chunk in chunks(run, mesh.pipeline_rank)]
    for part in parts:
        fill(part, run, mesh.device)
    return parts


def _assembled(run: Run, mesh: Mesh, chunk: Chunk) -> GPT:
    """A part of the model, cut and wrapped, still without memory."""
    with torch.device("meta"):
        part = GPT(run.model, run.padded_vocab_size, run.seed, chunk.layers, chunk.first, chunk.last)
        part = part.to(DTYPES[run.precision.master])
    if run.parallel.tensor > 1:
        tensor_parallel(part, mesh, run)
    blocks = list(part.layers.values())
    recompute(part, mesh, run)
    if run.parallel.compile:
        for block in blocks:
            block.compile()
    if run.sharded:
        shard(part, blocks, mesh, run)
    return part


def fill(part: GPT, run: Run, device: torch.device) -> None:
    """Give a part memory and its initial weights."""
    part.to_empty(device=device)
    set_weights(part, run)


@torch.no_grad()
def set_weights(part: GPT, run: Run) -> None:
    """Draw every parameter by its name; a rank that holds a shard draws the whole and keeps its piece."""
    for name, parameter in part.named_parameters():
        whole = initial(run.model, name, tuple(parameter.shape), run.seed).to(parameter.dtype)
        if isinstance(parameter, DTensor):
            # src_data_rank=None: every rank drew the same values, so nothing needs to be sent
            whole = whole.to(parameter.device)
            piece = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.to_local().copy_(piece.to_local())
        else:
            parameter.copy_(whole)
