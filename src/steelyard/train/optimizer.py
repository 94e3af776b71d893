"""AdamW over a rank's parameters: no decay on norms and biases."""

from collections.abc import Iterable

import torch
from torch import nn

from steelyard.spec.optimizer import Optimizer


def build(parameters: Iterable[nn.Parameter], rule: Optimizer) -> torch.optim.AdamW:
    """Decoupled weight decay on tensors with two dimensions (Megatron's rule), epsilon outside the root after bias
    correction. The rate is set before every update."""
    every = list(parameters)
    groups = [
        {"params": [p for p in every if p.dim() >= 2], "weight_decay": rule.weight_decay},
        {"params": [p for p in every if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=0.0, betas=rule.betas, eps=rule.eps, fused=True)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
