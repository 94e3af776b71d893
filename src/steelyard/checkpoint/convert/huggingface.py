"""Hugging Face's GPT-2 and Llama: names and layouts, both ways, and the configuration they are described by.

GPT-2 keeps linear weights as [in, out] (its Conv1D) and the fused projection as all queries, all keys, all values;
Llama keeps them [out, in] and apart. Ours are [out, in], fused, with rows grouped by query group. Rotary channels pair
i with i + half on both sides. Vocabulary tables have no padding rows there. Source: transformers 5 `modeling_gpt2`,
`modeling_llama` and their configurations.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from steelyard.spec.errors import UserError, error, problem
from steelyard.spec.model import Model

ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu", "relu2": "relu2"}
GATES = {"swiglu": "silu", "geglu": "gelu"}

# Our names of a block's parts -> theirs; weights and biases alike.
_GPT2 = {
    "attention_norm": "ln_1", "attention.qkv": "attn.c_attn", "attention.out": "attn.c_proj", "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
}  # fmt: skip
_GPT2_TOP = {
    "embedding.word": "transformer.wte", "embedding.position": "transformer.wpe", "norm": "transformer.ln_f",
    "head": "lm_head",
}  # fmt: skip
_LLAMA = {
    "attention_norm": "input_layernorm", "attention.out": "self_attn.o_proj", "mlp_norm": "post_attention_layernorm",
    "mlp.up": "mlp.up_proj", "mlp.gate": "mlp.gate_proj", "mlp.down": "mlp.down_proj",
}  # fmt: skip
_LLAMA_TOP = {"embedding.word": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_CONV1D = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
_PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")  # masks and angles that old files hold too


def kind_of(model: Model) -> str:
    """The architecture that can say this model. Raises UserError C008 for each key it has no word for."""
    kind = "llama" if model.position == "rotary" or model.gated or model.norm == "rmsnorm" else "gpt2"
    common = {"embedding_norm": False, "qk_norm": False, "qkv_bias": model.bias}
    needed: dict[str, Any] = {
        "gpt2": {
            **common, "position": "learned", "norm": "layernorm", "bias": True,
            "num_query_groups": model.num_attention_heads, "head_dim": model.hidden_size // model.num_attention_heads,
        },
        "llama": {**common, "position": "rotary", "norm": "rmsnorm", "rotary_fraction": 1.0},
    }[kind]  # fmt: skip
    broken = [
        problem("C008", f"model.{key}", kind=kind, name=key, value=getattr(model, key), legal=f"only {key} = {legal}")
        for key, legal in needed.items()
        if getattr(model, key) != legal
    ]
    words = GATES if kind == "llama" else ACTIVATIONS
    if model.activation not in words:
        legal = "one of " + ", ".join(words)
        facts = {"kind": kind, "name": "activation", "value": model.activation, "legal": legal}
        broken.append(problem("C008", "model.activation", **facts))
    if broken:
        raise UserError(broken)
    return kind


def config(model: Model, dtype: str, eod: int | None) -> dict[str, Any]:
    """config.json of a model. `dtype` is torch's name of the weights' type."""
    kind = kind_of(model)
    ends = {} if eod is None else {"bos_token_id": eod, "eos_token_id": eod}
    common = {
        "model_type": kind, "dtype": dtype, "vocab_size": model.vocab_size, "initializer_range": model.init_std,
        "tie_word_embeddings": model.tied_embeddings, **ends,
    }  # fmt: skip
    if kind == "gpt2":
        return {
            "architectures": ["GPT2LMHeadModel"], **common, "n_layer": model.num_layers, "n_embd": model.hidden_size,
            "n_head": model.num_attention_heads, "n_inner": model.ffn_hidden_size,
            "n_positions": model.max_position_embeddings, "activation_function": ACTIVATIONS[model.activation],
            "layer_norm_epsilon": model.norm_eps, "attn_pdrop": model.attention_dropout,
            "resid_pdrop": model.hidden_dropout, "embd_pdrop": model.hidden_dropout,
        }  # fmt: skip
    return {
        "architectures": ["LlamaForCausalLM"], **common, "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size, "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups, "head_dim": model.head_dim,
        "intermediate_size": model.ffn_hidden_size, "max_position_embeddings": model.max_position_embeddings,
        "hidden_act": GATES[model.activation], "rms_norm_eps": model.norm_eps, "attention_bias": model.bias,
        "mlp_bias": model.bias, "attention_dropout": model.attention_dropout,
        "rope_theta": model.rotary_base, "rope_parameters": {"rope_type": "default", "rope_theta": model.rotary_base},
    }  # fmt: skip


# --- out -------------------------------------------------------------------------------------------------------------


def to_theirs(name: str, tensor: Tensor, model: Model) -> Iterator[tuple[str, Tensor]]:
    """One of our tensors under its name or names there, in their layout, without padding rows."""
    module, _, kind = name.rpartition(".")
    gpt2 = kind_of(model) == "gpt2"
    top, inner = (_GPT2_TOP, _GPT2) if gpt2 else (_LLAMA_TOP, _LLAMA)
    if module in top:
        yield f"{top[module]}.{kind}", tensor[: model.vocab_size] if module in ("embedding.word", "head") else tensor
        return
    _, layer, part = module.split(".", 2)
    block = f"transformer.h.{layer}" if gpt2 else f"model.layers.{layer}"
    if part == "attention.qkv":
        projections = split_groups(tensor, model)
        if not gpt2:
            yield from ((f"{block}.{p}.{kind}", t) for p, t in zip(_PROJECTIONS, projections, strict=True))
            return
        tensor = torch.cat(projections)
    yield f"{block}.{inner[part]}.{kind}", tensor.T if gpt2 and part in _CONV1D and kind == "weight" else tensor


def split_groups(rows: Tensor, model: Model) -> tuple[Tensor, Tensor, Tensor]:
    """Fused rows [groups x (per group + 2) x head_dim, ...] -> query, key and value rows, heads in order."""
    grouped = rows.unflatten(0, (model.num_query_groups, model.heads_per_group + 2, model.head_dim))
    query, key, value = grouped.split([model.heads_per_group, 1, 1], dim=1)
    return query.flatten(0, 2), key.flatten(0, 2), value.flatten(0, 2)


def join_groups(query: Tensor, key: Tensor, value: Tensor, model: Model) -> Tensor:
    """The inverse of `split_groups`."""
    parts = [
        part.unflatten(0, (model.num_query_groups, heads, model.head_dim))
        for part, heads in ((query, model.heads_per_group), (key, 1), (value, 1))
    ]
    return torch.cat(parts, dim=1).flatten(0, 2)


# --- in --------------------------------------------------------------------------------------------------------------


def to_ours(tensors: Mapping[str, Tensor], model: Model) -> dict[str, Tensor]:
    """A whole model's tensors under our names, without padding rows. Raises UserError C005 for a name that is not
    understood, C009 for a tied head that is not the word table."""
    gpt2 = kind_of(model) == "gpt2"
    base = "transformer." if gpt2 else "model."
    top = {theirs: ours for ours, theirs in (_GPT2_TOP if gpt2 else _LLAMA_TOP).items()}
    inner = {theirs: ours for ours, theirs in (_GPT2 if gpt2 else _LLAMA).items()}
    blocks = "transformer.h." if gpt2 else "model.layers."
    found: dict[str, Tensor] = {}
    apart: dict[str, dict[str, Tensor]] = {}
    for given, tensor in tensors.items():
        if given.endswith(_BUFFERS):
            continue
        name = given if given.startswith((base, "lm_head")) else base + given  # base models are saved without it
        module, _, kind = name.rpartition(".")
        layer, _, part = module.removeprefix(blocks).partition(".")
        if module in top:
            found[f"{top[module]}.{kind}"] = tensor
        elif part in _PROJECTIONS:
            apart.setdefault(f"layers.{layer}.attention.qkv.{kind}", {})[part] = tensor
        elif part in inner and module.startswith(blocks):
            ours = inner[part]
            turned = tensor.T if gpt2 and ours in _CONV1D and kind == "weight" else tensor
            if gpt2 and ours == "attention.qkv":
                query, key, value = turned.chunk(3)
                turned = join_groups(query, key, value, model)
            found[f"layers.{layer}.{ours}.{kind}"] = turned
        else:
            raise error("C005", name=given)
    for ours, parts in apart.items():
        if missing := [p for p in _PROJECTIONS if p not in parts]:
            raise error("C005", name=f"{ours}, which comes without {', '.join(missing)}")
        query, key, value = (parts[p] for p in _PROJECTIONS)
        found[ours] = join_groups(query, key, value, model)
    return _one_table(found) if model.tied_embeddings else found


def _one_table(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the head of a tied model, which some files hold as well."""
    head = found.pop("head.weight", None)
    if head is not None and not torch.equal(head, found.get("embedding.word.weight", head)):
        raise error("C009", name="the tied word table", first="the embedding", second="lm_head")
    return found
