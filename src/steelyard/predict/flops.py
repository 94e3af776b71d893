"""Floating-point operations of a run. Every coefficient belongs to a named matrix product; a multiply-add is two.

`model_flops` is what the mathematics needs: forward and backward, causal attention counted once, nothing twice.
`hardware_flops` is what is executed on top of it when activations are recomputed.
"""

from dataclasses import dataclass
from functools import lru_cache

from steelyard.hardware import Chip
from steelyard.spec.errors import error
from steelyard.spec.model import Model
from steelyard.spec.precision import Dtype, Recompute

# The backward of a product y = x w is two products of the same size: dx = dy w^T and dw = x^T dy.
FORWARD_AND_BACKWARD = 3


@dataclass(frozen=True)
class Product:
    """One matrix product of the forward pass, for one sequence: FLOPs = 2 x rows x inner x columns, `times` times in
    the model. `masked` products have a causal mask: half of a score matrix is needed."""

    name: str
    formula: str
    flops: int
    times: int
    masked: bool = False

    def total(self, causal: bool) -> int:
        """FLOPs in the whole model, one sequence, forward."""
        return self.flops * self.times // (2 if causal and self.masked else 1)


@lru_cache(maxsize=64)
def products(model: Model, padded_vocab_size: int) -> tuple[Product, ...]:
    """The matrix products of one forward pass over one sequence of `seq_length` tokens.

    s sequence, h hidden, q = heads x head_dim, k = groups x head_dim, f ffn, V padded vocabulary (the product that is
    executed). Lookups, norms, softmax, biases and the optimizer have no matrix product and count nothing.
    Source: Megatron-LM `num_floating_point_operations`, with the full score matrix.
    """
    s, h, f, layers = model.seq_length, model.hidden_size, model.ffn_hidden_size, model.num_layers
    q, k = model.query_width, model.key_value_width
    gate = [Product("mlp.gate", "2 s h f", 2 * s * h * f, layers)] if model.gated else []
    return (
        Product("attention.qkv", "2 s h (q + 2k)", 2 * s * h * (q + 2 * k), layers),
        Product("attention.scores", "2 s s q", 2 * s * s * q, layers, masked=True),
        Product("attention.context", "2 s s q", 2 * s * s * q, layers, masked=True),
        Product("attention.out", "2 s q h", 2 * s * q * h, layers),
        Product("mlp.up", "2 s h f", 2 * s * h * f, layers),
        *gate,
        Product("mlp.down", "2 s f h", 2 * s * f * h, layers),
        Product("logits", "2 s h V", 2 * s * h * padded_vocab_size, 1),
    )


def forward_per_layer(model: Model, causal: bool = True) -> int:
    """FLOPs of one block's forward pass over one sequence."""
    blocks = [entry for entry in products(model, 1) if entry.name != "logits"]
    return sum(entry.total(causal) for entry in blocks) // model.num_layers


def logits(model: Model, padded_vocab_size: int) -> int:
    """FLOPs of the head's forward pass over one sequence: 2 s h V."""
    return products(model, padded_vocab_size)[-1].flops


def model_flops(model: Model, padded_vocab_size: int, causal: bool = True) -> int:
    """Forward and backward of one sequence. `causal` counts the needed half of each score matrix; without it the
    whole matrix is counted, as eager attention executes it. Times 3 in every product, the logits included."""
    return FORWARD_AND_BACKWARD * sum(entry.total(causal) for entry in products(model, padded_vocab_size))


def recomputed(model: Model, recompute: Recompute, stages: tuple[int, ...], causal: bool = True) -> int:
    """FLOPs of one sequence that are executed a second time in the forward direction.

    `full` repeats the forward of every recomputed block (`layers = n`: the first n of each stage; `every` groups blocks
    and changes memory only), `selective` the products inside the named modules (`attention`: scores and context; `mlp`:
    up, gate and down). The logits are never recomputed. `stages` is the layers of each stage.
    Source: Korthikanti et al. 2022, section 5, per block instead of over the whole model.
    """
    if recompute.mode == "none":
        return 0
    if recompute.mode == "full":
        blocks = sum(len(group) for layers in stages for group in recompute.groups(layers))
        return blocks * forward_per_layer(model, causal)
    again: set[str] = set()
    if "attention" in recompute.modules:
        again |= {"attention.scores", "attention.context"}
    if "mlp" in recompute.modules:
        again |= {"mlp.up", "mlp.gate", "mlp.down"}
    return sum(entry.total(causal) for entry in products(model, 1) if entry.name in again)


def hardware_flops(
    model: Model, padded_vocab_size: int, recompute: Recompute, stages: tuple[int, ...], causal: bool = True
) -> int:
    """`model_flops` plus what is recomputed; one sequence."""
    return model_flops(model, padded_vocab_size, causal) + recomputed(model, recompute, stages, causal)


@dataclass(frozen=True)
class Utilization:
    """FLOP/s per device over the chip's dense peak. Says which FLOPs and which peak it used."""

    value: float
    convention: str
    peak_flops: float
    peak_source: str


def utilization(
    flops: int, seconds: float, devices: int, chip: Chip | None, dtype: Dtype, convention: str
) -> Utilization | None:
    """MFU (with model FLOPs) or HFU (with hardware FLOPs) of `flops` done in `seconds` by `devices` devices.

    None where the chip or its peak in that dtype is unknown. Raises UserError P003 above 100 %: then the time, the
    chip or the FLOPs are wrong.
    """
    if chip is None or dtype not in chip.peak:
        return None
    peak = chip.peak[dtype]
    value = flops / seconds / devices / peak
    if value > 1:
        raise error("P003", "hardware.chip", share=value, chip=chip.name, peak=peak / 1e12, dtype=dtype)
    return Utilization(value, convention, peak, chip.source)
