"""AdamW over the pieces of the parameters that a rank holds: no decay on norms and biases."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from steelyard.parallel.norm import local
from steelyard.spec.optimizer import Optimizer


class AdamW:
    """PyTorch's fused AdamW on local pieces. The update is elementwise, so pieces give what the whole would, and no
    piece needs to know its mesh.

    Decoupled weight decay on tensors with two dimensions (Megatron's rule); epsilon outside the root, after bias
    correction.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], rule: Optimizer):
        self._parameters = list(parameters)
        # each is given its place at every update: FSDP moves shards, and an old one held here would stay
        self._pieces = [nn.Parameter(local(p.detach()).new_empty(0)) for p in self._parameters]
        decayed = [piece for p, piece in self._pairs() if p.dim() >= 2]
        others = [piece for p, piece in self._pairs() if p.dim() < 2]
        groups = [{"params": decayed, "weight_decay": rule.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self._adam = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=0.0, betas=rule.betas, eps=rule.eps, fused=True
        )

    def _pairs(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        return zip(self._parameters, self._pieces, strict=True)

    @torch.no_grad()
    def update(self, rate: float) -> None:
        """Move the parameters that have a gradient."""
        for group in self._adam.param_groups:
            group["lr"] = rate
        for parameter, piece in self._pairs():
            piece.data = local(parameter.detach())
            piece.grad = None if parameter.grad is None else local(parameter.grad)
        self._adam.step()
        for piece in self._pieces:  # held here, shards and gradients would outlive the step
            piece.data, piece.grad = piece.data.new_empty(0), None

    def moments(self) -> Iterator[tuple[nn.Parameter, Tensor, Tensor]]:
        """(parameter, mean, variance): Adam's moments, sharded as their parameter is; made here, as zeros, where no
        update has made them."""
        for parameter, piece in self._pairs():
            state = self._adam.state[piece]
            if not state:
                here = local(parameter.detach())
                state["step"] = torch.zeros((), dtype=torch.float32, device=here.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(here), torch.zeros_like(here)
            yield parameter, _like(state["exp_avg"], parameter), _like(state["exp_avg_sq"], parameter)

    def copy_moments(self, source: nn.Parameter, target: nn.Parameter) -> None:
        """Give `target` the moments of `source`, where there are any."""
        pieces = dict(self._pairs())
        for name, moment in self._adam.state[pieces[source]].items():
            self._adam.state[pieces[target]][name] = moment.clone()

    def set_updates(self, updates: int) -> None:
        """Adam's own count of updates, from which its bias correction follows."""
        for state in self._adam.state.values():
            state["step"].fill_(updates)


def _like(piece: Tensor, parameter: nn.Parameter) -> Tensor:
    """A piece as the distributed tensor its parameter is, without copying."""
    if not isinstance(parameter, DTensor):
        return piece
    return DTensor.from_local(
        piece,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
