"""Self-attention with grouped queries."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from steelyard.model.dropout import keep_mask
from steelyard.model.norm import norm
from steelyard.model.position import Place, causal_mask, rotate
from steelyard.spec.model import Model


class Cache:
    """Keys and values of the tokens seen so far, one pair per layer: [batch, groups, sequence, head_dim]."""

    def __init__(self) -> None:
        self.entries: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def length(self) -> int:
        return next(iter(self.entries.values()))[0].shape[2] if self.entries else 0

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if layer in self.entries:
            past_key, past_value = self.entries[layer]
            key, value = torch.cat([past_key, key], dim=2), torch.cat([past_value, value], dim=2)
        self.entries[layer] = (key, value)
        return key, value


class Core(nn.Module):
    """softmax(query key^T / sqrt(head_dim)) value: the part that selective recompute repeats.

    `first_head` is set from outside where a rank holds only some heads.
    """

    def __init__(self, spec: Model, seed: int, site: str):
        super().__init__()
        self.probability, self.seed, self.site = spec.attention_dropout, seed, site
        self.scale = 1 / math.sqrt(spec.head_dim)
        self.first_head = 0

    def forward(self, query: Tensor, key: Tensor, value: Tensor, place: Place) -> Tensor:
        """query [batch, heads, queries, head_dim], key and value [batch, groups, keys, head_dim] -> like query."""
        grouped = query.shape[1] != key.shape[1]
        bias = self._bias(query, key, place)
        if self.probability > 0 and self.training:
            return self._with_dropout(query, key, value, bias, place)
        causal = bias is None and query.shape[2] > 1
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=bias, is_causal=causal, scale=self.scale, enable_gqa=grouped
        )

    def _bias(self, query: Tensor, key: Tensor, place: Place) -> Tensor | None:
        """None for plain causal attention, else a bool mask or an additive bias with -inf where blocked."""
        queries, keys = query.shape[2], key.shape[2]
        if place.alibi is None:
            if queries != keys and queries > 1:
                return causal_mask(keys, query.device)[-queries:]
            return place.mask
        alibi = place.alibi[:, self.first_head : self.first_head + query.shape[1], -queries:, :keys]
        allowed = place.mask if place.mask is not None else causal_mask(keys, query.device)[-queries:]
        return alibi.masked_fill(~allowed, -math.inf)

    def _with_dropout(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, place: Place) -> Tensor:
        """The math path: fused kernels draw masks of their own, which would depend on the layout."""
        repeat, length = query.shape[1] // key.shape[1], key.shape[2]
        if repeat > 1:
            key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
        scores = query @ key.transpose(-2, -1) * self.scale  # [batch, heads, sequence, sequence]
        if bias is None:
            bias = causal_mask(length, query.device)
        scores = scores.masked_fill(~bias, -math.inf) if bias.dtype == torch.bool else scores + bias
        wide = torch.float64 if scores.dtype == torch.float64 else torch.float32
        weights = scores.softmax(dim=-1, dtype=wide).to(scores.dtype)
        heads = torch.arange(query.shape[1], device=query.device) + self.first_head
        steps = torch.arange(length, device=query.device)
        axes = (heads[:, None, None], steps[None, :, None], steps[None, None, :])
        keep = keep_mask(self.probability, self.seed, self.site, place, axes)
        return (weights * keep / (1 - self.probability)) @ value


class Attention(nn.Module):
    """The query, key and value projections are one matrix whose rows are grouped by query group (that group's query
    heads, its key, its value: Megatron's layout), so that cutting rows over ranks keeps groups whole."""

    def __init__(self, spec: Model, layer: int, seed: int):
        super().__init__()
        self.layer, self.spec = layer, spec
        width = spec.query_width + 2 * spec.key_value_width
        self.qkv = nn.Linear(spec.hidden_size, width, bias=spec.qkv_bias)
        self.query_norm = norm(spec, spec.head_dim) if spec.qk_norm else None
        self.key_norm = norm(spec, spec.head_dim) if spec.qk_norm else None
        self.core = Core(spec, seed, f"{layer}/attention")
        self.out = nn.Linear(spec.query_width, spec.hidden_size, bias=spec.bias)

    def forward(self, hidden: Tensor, place: Place, cache: Cache | None = None) -> Tensor:
        per_group = self.spec.heads_per_group
        # [batch, sequence, groups, per_group + 2, head_dim]
        qkv = self.qkv(hidden).unflatten(-1, (-1, per_group + 2, self.spec.head_dim))
        query, key, value = qkv.split([per_group, 1, 1], dim=3)
        query = query.flatten(2, 3).transpose(1, 2)  # [batch, heads, sequence, head_dim]
        key, value = key.squeeze(3).transpose(1, 2), value.squeeze(3).transpose(1, 2)  # [batch, groups, sequence, ...]
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if place.rotary is not None:
            query, key = rotate(query, place.rotary), rotate(key, place.rotary)
        if cache is not None:
            key, value = cache.extend(self.layer, key, value)
        context = self.core(query, key, value, place)
        return self.out(context.transpose(1, 2).flatten(2))  # [batch, sequence, hidden]
