"""LayerNorm and RMSNorm by the spec's name."""

from torch import nn

from steelyard.spec.model import Model


def norm(spec: Model, width: int) -> nn.Module:
    """The model's norm over the last `width` channels. LayerNorm has weight and bias, RMSNorm weight only."""
    if spec.norm == "rmsnorm":
        return nn.RMSNorm(width, eps=spec.norm_eps)
    return nn.LayerNorm(width, eps=spec.norm_eps)
