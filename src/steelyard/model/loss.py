"""Cross entropy over the vocabulary without ever holding the logits of all tokens.

Logits are made for a chunk of tokens, turned into that chunk's gradient in place and dropped, so neither pass holds
more than one chunk and no logit is computed twice. The price: gradients exist before the backward pass, so a loss scale
must be given to the forward pass.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

# Elements of one chunk of logits: 32 MiB in float32. Large enough to keep the matrix products efficient.
CHUNK_ELEMENTS = 2**23

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
        size = max(1, CHUNK_ELEMENTS // head.shape[0])
        for start in range(0, hidden.shape[0], size):
            chunk = slice(start, start + size)
            logits = (hidden[chunk] @ head.T).to(wide)  # [tokens, rows]
            losses, probabilities, own = _losses(logits, labels[chunk] - first_row, own_classes, reduce)
            sums[0] += (losses * weights[chunk]).sum()
            sums[1] += (losses * (weights[chunk] > 0)).sum()
            if grad_hidden is not None and grad_head is not None:
                grad = _gradient(probabilities, labels[chunk] - first_row, own, weights[chunk] * grad_scale)
                grad = grad.to(hidden.dtype)
                torch.mm(grad, head, out=grad_hidden[chunk])
                if wide == hidden.dtype:
                    torch.addmm(grad_head, grad.T, hidden[chunk], out=grad_head)
                else:
                    grad_head += grad.T @ hidden[chunk]
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


def _losses(logits: Tensor, labels: Tensor, classes: int, reduce: Reduce | None) -> tuple[Tensor, Tensor, Tensor]:
    """Token losses [tokens], softmax [tokens, rows] (0 in padding rows), and which labels are rows of this table.

    `labels` count from this table's first row; `logits` is consumed.
    """
    own = (labels >= 0) & (labels < classes)
    picked = logits.gather(1, labels.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]  # [tokens]
    if reduce is None:
        logs = torch.log_softmax(logits[:, :classes], dim=1)
        losses = -logs.gather(1, labels[:, None])[:, 0]
        probabilities = logs.exp_()
        return losses, _with_padding(probabilities, logits, classes), own
    if classes < logits.shape[1]:
        logits[:, classes:] = -torch.inf
    highest = reduce(logits.amax(dim=1), "max")
    powers = (logits - highest[:, None]).exp_()
    total = reduce(powers.sum(dim=1), "sum")
    target = reduce(torch.where(own, picked, 0), "sum")
    return total.log() + highest - target, powers.div_(total[:, None]), own


def _with_padding(probabilities: Tensor, logits: Tensor, classes: int) -> Tensor:
    """The softmax at the width of the table, 0 in padding rows; reuses the logits' memory."""
    if classes == logits.shape[1]:
        return probabilities
    logits[:, classes:] = 0
    logits[:, :classes] = probabilities
    return logits


def _gradient(probabilities: Tensor, labels: Tensor, own: Tensor, weights: Tensor) -> Tensor:
    """d loss / d logits = weight x (softmax - one-hot), in place."""
    probabilities.mul_(weights[:, None])
    safe = labels.clamp(0, probabilities.shape[1] - 1)[:, None]
    return probabilities.scatter_add_(1, safe, -(weights * own)[:, None])
