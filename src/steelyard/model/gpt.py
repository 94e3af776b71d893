"""The decoder: embedding, blocks, final norm, loss or logits. All of it, or the part one pipeline stage holds."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from steelyard.model.attention import Attention, Cache
from steelyard.model.dropout import Dropout
from steelyard.model.loss import ChunkedLoss
from steelyard.model.mlp import MLP
from steelyard.model.norm import norm
from steelyard.model.position import Place, place
from steelyard.spec.model import Model


class Embedding(nn.Module):
    """Token embedding, plus learned positions, norm and dropout where the spec has them."""

    def __init__(self, spec: Model, rows: int, seed: int):
        super().__init__()
        self.word = nn.Embedding(rows, spec.hidden_size)
        learned = spec.position == "learned"
        self.position = nn.Embedding(spec.max_position_embeddings, spec.hidden_size) if learned else None
        self.norm = norm(spec, spec.hidden_size) if spec.embedding_norm else None
        self.dropout = Dropout(spec.hidden_dropout, seed, "embedding")

    def forward(self, tokens: Tensor, positions: Tensor | None, where: Place, first: int = 0) -> Tensor:
        """tokens [batch, sequence] -> [batch, sequence, hidden]; positions default to first, first + 1, ..."""
        hidden = self.word(tokens)
        if self.position is not None:
            if positions is None:
                positions = torch.arange(first, first + tokens.shape[1], device=tokens.device)
            hidden = hidden + self.position(positions)
        if self.norm is not None:
            hidden = self.norm(hidden)
        return self.dropout(hidden, where)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, spec: Model, layer: int, seed: int):
        super().__init__()
        self.attention_norm = norm(spec, spec.hidden_size)
        self.attention = Attention(spec, layer, seed)
        self.attention_dropout = Dropout(spec.hidden_dropout, seed, f"{layer}/attention_out")
        self.mlp_norm = norm(spec, spec.hidden_size)
        self.mlp = MLP(spec)
        self.mlp_dropout = Dropout(spec.hidden_dropout, seed, f"{layer}/mlp_out")

    def forward(self, hidden: Tensor, where: Place, cache: Cache | None = None) -> Tensor:
        attended = self.attention(self.attention_norm(hidden), where, cache)
        hidden = hidden + self.attention_dropout(attended, where)
        return hidden + self.mlp_dropout(self.mlp(self.mlp_norm(hidden)), where)


class GPT(nn.Module):
    """The layers with the given numbers, with the embedding if `first` and the final norm and head if `last`.

    `rows` is the padded vocabulary. With tied embeddings the head is the embedding's own table where both are here, and
    a table of its own (`head`) on a last stage apart from the first; keeping the two equal is the caller's part.
    """

    def __init__(
        self,
        spec: Model,
        rows: int,
        seed: int = 0,
        layers: Iterable[int] | None = None,
        first: bool = True,
        last: bool = True,
    ):
        super().__init__()
        self.spec = spec
        numbers = range(spec.num_layers) if layers is None else layers
        self.embedding = Embedding(spec, rows, seed) if first else None
        self.layers = nn.ModuleDict({str(number): Block(spec, number, seed) for number in numbers})
        self.norm = norm(spec, spec.hidden_size) if last else None
        shared = spec.tied_embeddings and first
        self.head = nn.Linear(spec.hidden_size, rows, bias=False) if last and not shared else None
        self.loss: nn.Module | None = (
            ChunkedLoss(rows if spec.padding_in_softmax else spec.vocab_size) if last else None
        )

    @property
    def head_weight(self) -> Tensor:
        """The output table [rows, hidden]."""
        if self.head is not None:
            return self.head.weight
        assert self.embedding is not None
        return self.embedding.word.weight

    def forward(
        self,
        inputs: Tensor,
        *,
        labels: Tensor | None = None,
        weights: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        samples: Tensor | None = None,
        step: int = 0,
        grad_scale: float = 1.0,
        cache: Cache | None = None,
    ) -> Tensor:
        """inputs: tokens [batch, sequence] on the first stage, hidden states [batch, sequence, hidden] elsewhere.

        Returns hidden states unless `last`; then logits [batch, sequence, rows], or with labels and weights (both
        [batch, sequence]) the two sums of `ChunkedLoss`.
        """
        seen = cache.length if cache is not None else 0
        length = seen + (inputs.shape[1] if self.embedding is not None else self.spec.seq_length)
        dtype = inputs.dtype if self.embedding is None else self.embedding.word.weight.dtype
        if positions is None and seen:
            positions = torch.arange(seen, length, device=inputs.device)[None]
        where = place(self.spec, length, inputs.device, positions, documents, samples, step, dtype)
        hidden = inputs
        if self.embedding is not None:
            hidden = self.embedding(inputs, positions, where)
        for block in self.layers.values():
            hidden = block(hidden, where, cache)
        if self.norm is None or self.loss is None:
            return hidden
        hidden = self.norm(hidden)
        if labels is None or weights is None:
            return hidden @ self.head_weight.T
        return self.loss(hidden, self.head_weight, labels, weights, grad_scale)
