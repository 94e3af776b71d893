"""The feed-forward half of a block."""

from torch import Tensor, nn
from torch.nn import functional

from steelyard.spec.model import Model


class MLP(nn.Module):
    """down(act(up(x))); gated kinds multiply: down(act(gate(x)) * up(x))."""

    def __init__(self, spec: Model):
        super().__init__()
        self.activation = spec.activation
        self.up = nn.Linear(spec.hidden_size, spec.ffn_hidden_size, bias=spec.bias)
        self.gate = nn.Linear(spec.hidden_size, spec.ffn_hidden_size, bias=spec.bias) if spec.gated else None
        self.down = nn.Linear(spec.ffn_hidden_size, spec.hidden_size, bias=spec.bias)

    def forward(self, hidden: Tensor) -> Tensor:  # [batch, sequence, hidden]
        inner = self.up(hidden)  # [batch, sequence, ffn]
        if self.gate is not None:
            return self.down(activate(self.activation, self.gate(hidden)) * inner)
        return self.down(activate(self.activation, inner))


def activate(name: str, inner: Tensor) -> Tensor:
    """The spec's activation; gated ones name the function on the gate."""
    if name in ("gelu", "geglu"):
        return functional.gelu(inner)
    if name == "gelu_tanh":
        return functional.gelu(inner, approximate="tanh")
    if name == "swiglu":
        return functional.silu(inner)
    return functional.relu(inner).square() if name == "relu2" else functional.relu(inner)
