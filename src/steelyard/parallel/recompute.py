"""Activation recompute: full (groups of blocks keep only their input) or selective (chosen parts of each block)."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from steelyard.model.gpt import GPT, Block
from steelyard.parallel.mesh import Mesh
from steelyard.spec.precision import Recompute
from steelyard.spec.run import Run

Runner = Callable[..., Tensor]


def recompute(part: GPT, mesh: Mesh, run: Run) -> None:
    """Apply in place. Names of parameters do not change."""
    rule = run.recompute
    if rule.mode == "full":
        share = mesh if rule.shard and run.parallel.tensor > 1 and not run.parallel.sequence else None
        part.layers = GroupedBlocks(dict(part.layers.items()), rule, share)
    elif rule.mode == "selective":
        for block in part.layers.values():
            for module in _chosen(cast(Block, block), rule):
                module.forward = _checkpointed(module.forward)


def _chosen(block: Block, rule: Recompute) -> Iterable[nn.Module]:
    """The modules of a block that `recompute.modules` names; "attention" is its core, without the projections."""
    if "attention" in rule.modules:
        yield block.attention.core
    if "mlp" in rule.modules:
        yield block.mlp
    if "norm" in rule.modules:
        yield from (block.attention_norm, block.mlp_norm)


def _checkpointed(function: Runner) -> Runner:
    def run(*arguments: Any) -> Tensor:
        # nothing draws from torch's generators: dropout masks are hashes, so no state needs to be replayed
        return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)

    return run


class GroupedBlocks(nn.ModuleDict):
    """The blocks of a part under the same names; iterating gives callables that each run a group of them and keep only
    the group's input. Blocks beyond `recompute.layers` run as they are."""

    def __init__(self, blocks: Mapping[str, nn.Module], rule: Recompute, share: Mesh | None):
        super().__init__(blocks)
        self._rule, self._share = rule, share

    def values(self) -> Any:
        blocks = list(super().values())
        groups = self._rule.groups(len(blocks))
        return [self._runner([blocks[n] for n in group]) for group in groups] + blocks[sum(map(len, groups)) :]

    def _runner(self, group: list[nn.Module]) -> Runner:
        def run_group(hidden: Tensor, *others: Any) -> Tensor:
            for block in group:
                hidden = block(hidden, *others)
            return hidden

        if self._share is None:
            return _checkpointed(run_group)
        return _checkpointed_shared(run_group, self._share)


def _checkpointed_shared(function: Runner, mesh: Mesh) -> Runner:
    """Keep only this tensor rank's part of the saved input, and gather it again before the repeat (partitioned
    activations). The first run uses the whole input that is already there."""

    def run(hidden: Tensor, *others: Any) -> Tensor:
        given = [hidden.detach()]

        def from_part(part: Tensor, *others: Any) -> Tensor:
            return function(_Whole.apply(part, given.pop() if given else None, mesh), *others)

        part = _Part.apply(hidden, mesh)
        return checkpoint(from_part, part, *others, use_reentrant=False, preserve_rng_state=False)

    return run


class _Part(torch.autograd.Function):
    """This tensor rank's slice along the sequence; its gradient is gathered from all."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, mesh: Mesh) -> Tensor:
        ctx.mesh = mesh
        return _slice(hidden, mesh).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return _gather(grads[0], ctx.mesh), None


class _Whole(torch.autograd.Function):
    """The whole hidden state from the slices; every rank has its whole gradient already and keeps its slice of it."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, given: Tensor | None, mesh: Mesh) -> Tensor:
        ctx.mesh = mesh
        return _gather(part, mesh) if given is None else given.view_as(given)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        return _slice(grads[0], ctx.mesh).contiguous(), None, None


def _slice(hidden: Tensor, mesh: Mesh) -> Tensor:
    return hidden.tensor_split(mesh.tensor.size(), dim=1)[mesh.tensor_rank]


def _gather(part: Tensor, mesh: Mesh) -> Tensor:
    parts = [torch.empty_like(part) for _ in range(mesh.tensor.size())]
    dist.all_gather(parts, part.contiguous(), group=mesh.tensor.get_group())
    return torch.cat(parts, dim=1)
