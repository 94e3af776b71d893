"""Megatron-LM's parameter names and layouts, to ours. Source: Megatron-LM core 0.20 module names.

Matrices are [out, in] on both sides, and the fused query-key-value rows are grouped by query group on both sides. A
gated MLP is one matrix there (gate rows, then up rows) and two here. Transformer Engine keeps a norm's weights inside
the linear layer behind it.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from steelyard.spec.errors import error
from steelyard.spec.model import Model

_LAYER = {
    "input_layernorm": "attention_norm",
    "self_attention.linear_qkv": "attention.qkv",
    "self_attention.q_layernorm": "attention.query_norm",
    "self_attention.k_layernorm": "attention.key_norm",
    "self_attention.linear_proj": "attention.out",
    "pre_mlp_layernorm": "mlp_norm",
    "mlp.linear_fc1": "mlp.up",
    "mlp.linear_fc2": "mlp.down",
}
_INSIDE_LINEAR = {"self_attention.linear_qkv.layer_norm_": "attention_norm.", "mlp.linear_fc1.layer_norm_": "mlp_norm."}
_TOP = {
    "embedding.word_embeddings.weight": "embedding.word.weight",
    "embedding.position_embeddings.weight": "embedding.position.weight",
    "decoder.final_layernorm.weight": "norm.weight",
    "decoder.final_layernorm.bias": "norm.bias",
    "output_layer.weight": "head.weight",
}


def our_name(name: str) -> str | None:
    """Our name of one of Megatron's parameters; None for a name that is not a parameter of a dense GPT."""
    name = name.removeprefix("module.").removeprefix("model.")
    if name in _TOP:
        return _TOP[name]
    found = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
    if not found:
        return None
    layer, rest = found.groups()
    for inside, ours in _INSIDE_LINEAR.items():
        if rest.startswith(inside):
            return f"layers.{layer}.{ours}{rest.removeprefix(inside)}"
    module, _, kind = rest.rpartition(".")
    return f"layers.{layer}.{_LAYER[module]}.{kind}" if module in _LAYER and kind in ("weight", "bias") else None


def to_ours(tensors: Mapping[str, Tensor], model: Model) -> dict[str, Tensor]:
    """A whole model's tensors under our names. Extra state (`_extra_state`) is passed over; raises UserError C005 for
    any other name that is not understood."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not name.endswith("_extra_state"):
            put(found, name, tensor, model)
    return found


def put(found: dict[str, Tensor], name: str, whole: Tensor, model: Model) -> None:
    """Add one of Megatron's tensors under our name, a gated MLP's as two. Raises UserError C005."""
    ours = our_name(name)
    if ours is None:
        raise error("C005", name=name)
    if model.gated and ".mlp.up." in ours:
        found[ours.replace(".up.", ".gate.")], found[ours] = whole.chunk(2)
    else:
        found[ours] = whole


def read(path: Path, model: Model) -> dict[str, Tensor]:
    """A safetensors file with Megatron's names, under our names. Raises UserError C001 or C005."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return to_ours(load_file(path), model)
    except (OSError, SafetensorError) as failure:
        raise error("C001", place=str(path), path=path, detail=str(failure)) from None
