"""A Hugging Face model's `config.json` (GPT-2 and Llama) as the `[model]` table of a run file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from steelyard.spec.errors import UserError, error

# Hugging Face's name of an activation -> ours. gelu_new and the two after it are the tanh form; silu belongs to a gate.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
GATES = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu"}


def read(path: Path) -> dict[str, Any]:
    """Run-file values of a config.json: `name` (its folder, or the model's own) and `model`.

    The sequence length is not in the file; the longest position is taken. The vocabulary is not padded, since the
    model's tables are not. Raises UserError F001 for a file that is no such configuration, F002 for a value that a run
    file cannot say.
    """
    try:
        given = json.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as failure:
        detail = getattr(failure, "strerror", None) or "it is not JSON, or nested too deeply"
        raise error("F001", place=str(path), detail=detail) from None
    kind = given.get("model_type") if isinstance(given, dict) else None
    if kind not in READERS:
        known = " and ".join(READERS)
        raise error("F001", place=str(path), detail=f"model_type {kind!r} is not one of those read here: {known}")
    try:
        model = READERS[kind](given)
    except UserError as failure:
        raise UserError([problem.at(f"{path}  {problem.key}") for problem in failure.problems]) from None
    except KeyError as missing:
        raise error("F001", place=str(path), detail=f"{missing.args[0]} is missing") from None
    return {"name": _name(given, path), "model": {key: value for key, value in model.items() if value is not None}}


def _name(given: dict[str, Any], path: Path) -> str:
    own = str(given.get("_name_or_path") or "").rstrip("/").rsplit("/", 1)[-1]
    name = own or path.resolve().parent.name
    return "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in name).lstrip("._-") or "run"


def _gpt2(given: dict[str, Any]) -> dict[str, Any]:
    activation = _known("gpt2", given, "activation_function", ACTIVATIONS, "gelu_new")
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if given.get(key):
            raise _unsayable("gpt2", key, True, f"only {key} = false can be planned")
    if given.get("scale_attn_weights") is False:
        raise _unsayable("gpt2", "scale_attn_weights", False, "only scaled attention can be planned")
    positions = given.get("n_positions", 1024)
    return {
        "kind": "gpt2",
        "num_layers": given.get("n_layer", 12),
        "hidden_size": given.get("n_embd", 768),
        "num_attention_heads": given.get("n_head", 12),
        "ffn_hidden_size": given.get("n_inner"),
        "seq_length": positions,
        "max_position_embeddings": positions,
        "vocab_size": given.get("vocab_size", 50257),
        "vocab_multiple": 1,
        "activation": activation,
        "norm_eps": given.get("layer_norm_epsilon", 1e-5),
        "attention_dropout": given.get("attn_pdrop", 0.1),
        "hidden_dropout": given.get("resid_pdrop", 0.1),
        "init_std": given.get("initializer_range", 0.02),
        "tied_embeddings": given.get("tie_word_embeddings", True),
    }


def _llama(given: dict[str, Any]) -> dict[str, Any]:
    attention_bias, mlp_bias = given.get("attention_bias", False), given.get("mlp_bias", False)
    if attention_bias != mlp_bias:
        advice = "attention_bias and mlp_bias must be equal: a run file has one bias for all linear layers"
        raise _unsayable("llama", "attention_bias", attention_bias, advice)
    positions = given.get("max_position_embeddings", 2048)
    rotary = given.get("rope_parameters") or {}
    return {
        "kind": "llama",
        "num_layers": given["num_hidden_layers"],
        "hidden_size": given["hidden_size"],
        "num_attention_heads": given["num_attention_heads"],
        "num_query_groups": given.get("num_key_value_heads"),
        "head_dim": given.get("head_dim"),
        "ffn_hidden_size": given["intermediate_size"],
        "seq_length": positions,
        "max_position_embeddings": positions,
        "vocab_size": given["vocab_size"],
        "vocab_multiple": 1,
        "rotary_base": given.get("rope_theta") or rotary.get("rope_theta") or 10000.0,
        "activation": _known("llama", given, "hidden_act", GATES, "silu"),
        "norm_eps": given.get("rms_norm_eps", 1e-6),
        "bias": attention_bias,
        "attention_dropout": given.get("attention_dropout", 0.0),
        "init_std": given.get("initializer_range", 0.02),
        "tied_embeddings": given.get("tie_word_embeddings", False),
    }


READERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"gpt2": _gpt2, "llama": _llama}


def _known(kind: str, given: dict[str, Any], key: str, words: dict[str, str], default: str) -> str:
    value = given.get(key, default)
    if value not in words:
        raise _unsayable(kind, key, repr(value), f"known here: {', '.join(sorted(words))}")
    return words[value]


def _unsayable(kind: str, key: str, value: object, advice: str) -> UserError:
    return error("F002", key, kind=kind, key_name=key, value=value, advice=advice)
