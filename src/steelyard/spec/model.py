"""`[model]`: the network, independent of how it is run."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from steelyard.spec.section import Section

Kind = Literal["gpt2", "llama"]

# What a kind of model sets when the run file is silent. GPT-2: Radford et al. 2019 with Megatron's exact GELU;
# Llama: Touvron et al. 2023.
KIND_DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "vocab_size": 50257,
        "position": "learned",
        "norm": "layernorm",
        "activation": "gelu",
        "bias": True,
        "tied_embeddings": True,
    },
    "llama": {
        "vocab_size": 32000,
        "position": "rotary",
        "norm": "rmsnorm",
        "activation": "swiglu",
        "bias": False,
        "tied_embeddings": False,
    },
}
GATED = ("swiglu", "geglu")


class Model(Section):
    kind: Kind = "gpt2"
    num_layers: int = Field(12, ge=1, le=10_000)
    hidden_size: int = Field(768, ge=1, le=2**20)
    num_attention_heads: int = Field(12, ge=1)
    head_dim: int = Field(ge=1)
    num_query_groups: int = Field(ge=1)
    ffn_hidden_size: int = Field(ge=1)
    seq_length: int = Field(1024, ge=1, le=2**31)
    max_position_embeddings: int = Field(ge=1)
    vocab_size: int = Field(ge=2)
    vocab_multiple: Annotated[int, Field(ge=1)] | Literal["megatron"] = 128
    padding_in_softmax: bool = False
    position: Literal["learned", "rotary", "alibi", "none"]
    rotary_base: float = Field(10000.0, gt=0)
    rotary_fraction: float = Field(1.0, gt=0, le=1)
    norm: Literal["layernorm", "rmsnorm"]
    norm_eps: float = Field(1e-5, gt=0)
    activation: Literal["gelu", "gelu_tanh", "relu", "relu2", "swiglu", "geglu"]
    bias: bool
    qkv_bias: bool
    tied_embeddings: bool
    embedding_norm: bool = False
    qk_norm: bool = False
    attention_dropout: float = Field(0.0, ge=0, lt=1)
    hidden_dropout: float = Field(0.0, ge=0, lt=1)
    init_std: float = Field(0.02, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, given: Any) -> Any:
        """Add what the kind and the other sizes imply; a value of the wrong type is left for the field to refuse."""
        if not isinstance(given, dict):
            return given
        kind = given.get("kind", "gpt2")
        values = {**KIND_DEFAULTS[kind if isinstance(kind, str) and kind in KIND_DEFAULTS else "gpt2"], **given}
        hidden, heads = values.get("hidden_size", 768), values.get("num_attention_heads", 12)
        if _count(hidden) and _count(heads):
            values.setdefault("head_dim", max(1, hidden // heads))
            values.setdefault("ffn_hidden_size", _ffn_default(hidden, values["activation"] in GATED))
        else:  # the wrong value is reported at its own key; these only keep the report to that one line
            values.setdefault("head_dim", 1)
            values.setdefault("ffn_hidden_size", 1)
        values.setdefault("num_query_groups", heads if _count(heads) else 1)
        seq_length = values.get("seq_length", 1024)
        values.setdefault("max_position_embeddings", seq_length if _count(seq_length) else 1)
        values.setdefault("qkv_bias", values["bias"] is True)
        return values

    @property
    def gated(self) -> bool:
        """Whether the MLP multiplies by a second projection (SwiGLU, GEGLU)."""
        return self.activation in GATED

    @property
    def query_width(self) -> int:
        """Width of all query heads together; equals hidden_size unless head_dim is set apart."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_width(self) -> int:
        """Width of all keys (and of all values): one head per query group."""
        return self.num_query_groups * self.head_dim

    @property
    def heads_per_group(self) -> int:
        return self.num_attention_heads // self.num_query_groups

    def padded_vocab_size(self, tensor: int = 1) -> int:
        """Rows of the embedding table. Depends on the layout only where Megatron's rule (128 x tensor) is asked for.

        Source: Megatron-LM `_vocab_size_with_padding`.
        """
        multiple = 128 * tensor if self.vocab_multiple == "megatron" else self.vocab_multiple
        return -(-self.vocab_size // multiple) * multiple


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _ffn_default(hidden: int, gated: bool) -> int:
    """4 x hidden; for gated MLPs the Llama rule, 8/3 x hidden rounded up to a multiple of 256 (as many parameters)."""
    if not gated:
        return 4 * hidden
    return -(-(8 * hidden // 3) // 256) * 256
