"""The gradient norm: every distinct parameter once, whatever is replicated, tied or sharded."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from steelyard.parallel.mesh import Mesh


def local(tensor: Tensor) -> Tensor:
    """This rank's piece of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def tensor_shape(parameter: Tensor) -> tuple[int, ...]:
    """Shape of a parameter on one tensor rank, before the data axis shards it."""
    shape = list(parameter.shape)
    if isinstance(parameter, DTensor):
        for name, placement in zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True):
            if name == "tensor" and isinstance(placement, Shard):
                shape[placement.dim] //= parameter.device_mesh[name].size()
    return tuple(shape)


def gradient_norm(parameters: Iterable[nn.Parameter], mesh: Mesh) -> Tensor:
    """L2 norm over all distinct parameters of the model, the same float64 scalar on every rank.

    `parameters` are this rank's, without copies that another stage counts. What is sharded over an axis is summed over
    it; what is replicated over it counts once.
    """
    squares = torch.zeros(2, dtype=torch.float64, device=mesh.device)  # cut over the tensor axis, or whole on it
    by_kind: tuple[list[Tensor], list[Tensor]] = ([], [])
    sharded = False
    for parameter in parameters:
        if parameter.grad is None:
            continue
        by_kind[0 if _cut_over(parameter, "tensor") else 1].append(local(parameter.grad))
        sharded = sharded or _cut_over(parameter, "shard")
    for kind, gradients in enumerate(by_kind):
        if gradients:
            norms = torch.stack(torch._foreach_norm([g.to(_wide(g)) for g in gradients]))
            squares[kind] = norms.double().square().sum()
    if sharded:
        mesh.all_reduce(squares, ("shard",))
    mesh.all_reduce(squares[:1], ("tensor",))
    return mesh.all_reduce(squares.sum(), ("pipeline",)).sqrt()


def _cut_over(parameter: nn.Parameter, axis: str) -> bool:
    """Whether the ranks of a mesh axis hold different pieces of this parameter."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return axis in names and isinstance(parameter.placements[names.index(axis)], Shard)


def _wide(gradient: Tensor) -> torch.dtype:
    return torch.float64 if gradient.dtype == torch.float64 else torch.float32


@torch.no_grad()
def settle(parameters: Iterable[nn.Parameter]) -> None:
    """Finish gradients that are still partial sums over the tensor axis (replicated weights that each rank applied to
    its own part). FSDP does this itself where it shards."""
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:  # type: ignore[attr-defined]
            parameter.grad = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]


@torch.no_grad()
def scale(parameters: Iterable[nn.Parameter], factor: float | Tensor) -> None:
    """Multiply every gradient in place."""
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)
