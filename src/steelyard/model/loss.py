"""Cross entropy over the vocabulary without ever holding the logits of all tokens.

Logits are made for a chunk of tokens and turned into that chunk's gradient in place, in one buffer that the next chunk
takes over, so neither pass holds more than one chunk and no logit is computed twice. The price: gradients exist before
the backward pass, so a loss scale must be given to the forward pass.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

# Elements of one chunk of logits: 64 MiB in float32. Large enough to keep the matrix products efficient.
CHUNK_ELEMENTS = 2**24

Reduce = Callable[[Tensor, str], Tensor]  # (values, "max" or "sum") -> the same reduced over the shards of the rows


class ChunkedLoss(nn.Module):
    """The loss of a micro-batch from its last hidden states.

    Where the rows of the vocabulary are cut over ranks, `first_row` and `reduce` are set from outside.
    """

    def __init__(self, classes: int):
        super().__init__()
        self.classes = classes  # rows of the whole table that take part in the softmax
        self.first_row = 0
        self.reduce: Reduce | None = None

    def forward(self, hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor, grad_scale: float = 1.0) -> Tensor:
        """hidden [batch, sequence, hidden], head [rows, hidden], labels and weights [batch, sequence].

        Returns [2]: the weighted sum of the token losses, which is differentiated, and their plain sum over the tokens
        with a weight above 0, for the record. `grad_scale` multiplies the gradients, not the returned values.
        """
        return _ChunkedCrossEntropy.apply(
            hidden.flatten(0, 1), head, labels.flatten(), weights.flatten(),
            grad_scale, self.classes, self.first_row, self.reduce,
        )  # fmt: skip


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor,
        grad_scale: float, classes: int, first_row: int, reduce: Reduce | None,
    ) -> Tensor:  # fmt: skip
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        differentiate = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        grad_hidden = torch.empty_like(hidden) if differentiate else None
        grad_head = torch.zeros_like(head, dtype=wide) if differentiate else None
        weights = weights.to(wide)
        sums = torch.zeros(2, dtype=wide, device=hidden.device)
        own_classes = max(0, min(classes - first_row, head.shape[0]))
        size = min(hidden.shape[0], max(1, CHUNK_ELEMENTS // head.shape[0]))
        buffer = hidden.new_empty(size, head.shape[0])  # of the products: logits, then their gradient
        wide_buffer = buffer if wide == hidden.dtype else torch.empty_like(buffer, dtype=wide)
        for start in range(0, hidden.shape[0], size):
            states = hidden[start : start + size]
            tokens = slice(start, start + states.shape[0])
            narrow, logits = buffer[: states.shape[0]], wide_buffer[: states.shape[0]]
            torch.mm(states, head.T, out=narrow)
            _copy(narrow, logits)
            losses, own, totals = _losses(logits, labels[tokens] - first_row, own_classes, reduce)
            sums[0] += (losses * weights[tokens]).sum()
            sums[1] += (losses * (weights[tokens] > 0)).sum()
            if grad_hidden is not None and grad_head is not None:
                _gradient(logits, labels[tokens] - first_row, own, totals, weights[tokens] * grad_scale)
                _copy(logits, narrow)
                torch.mm(narrow, head, out=grad_hidden[tokens])
                if wide == hidden.dtype:
                    torch.addmm(grad_head, narrow.T, states, out=grad_head)
                else:
                    grad_head += narrow.T @ states
        if grad_hidden is not None and grad_head is not None:
            ctx.save_for_backward(grad_hidden, grad_head.to(head.dtype))
        return sums

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        """The gradients made in the forward pass, which are those of the loss itself. A zero-bubble schedule comes here
        twice, so they are handed out as they are; a factor belongs into `grad_scale`."""
        factor = grad_outputs[0][0]
        # reading a value would stall a GPU; on the CPU the check is free
        assert factor.device.type != "cpu" or factor == 1, "differentiate the first sum itself, with gradient 1"
        return *ctx.saved_tensors, *[None] * 6


def _copy(source: Tensor, target: Tensor) -> None:
    """Between the buffer of the products and the wide one, which are one where both have the same dtype."""
    if target.dtype != source.dtype:
        target.copy_(source)


def _losses(logits: Tensor, labels: Tensor, classes: int, reduce: Reduce | None) -> tuple[Tensor, Tensor, Tensor]:
    """Token losses [tokens], which labels are rows of this table, and the softmax's denominators [tokens].

    `labels` count from this table's first row. `logits` [tokens, rows] becomes the softmax's numerators, 0 in padding.
    """
    if classes < logits.shape[1]:
        logits[:, classes:] = -torch.inf
    own = (labels >= 0) & (labels < classes)
    picked = torch.where(own, logits.gather(1, labels.clamp(0, logits.shape[1] - 1)[:, None])[:, 0], 0)
    highest = logits.amax(dim=1)
    if reduce is not None:
        picked, highest = reduce(picked, "sum"), reduce(highest, "max")
    totals = logits.sub_(highest[:, None]).exp_().sum(dim=1)
    if reduce is not None:
        totals = reduce(totals, "sum")
    return highest - picked + totals.log(), own, totals


def _gradient(numerators: Tensor, labels: Tensor, own: Tensor, totals: Tensor, weights: Tensor) -> None:
    """d loss / d logits = weight x (softmax - one-hot), in place of the softmax's numerators."""
    numerators.mul_((weights / totals)[:, None])
    safe = labels.clamp(0, numerators.shape[1] - 1)[:, None]
    numerators.scatter_add_(1, safe, -(weights * own)[:, None])
