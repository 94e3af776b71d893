"""What another system would report about a run: the terms in which each framework's `counts.py` speaks."""

from dataclasses import dataclass

from steelyard.spec.run import Run


@dataclass(frozen=True)
class Printed:
    """Something a framework prints about the number of parameters of a run.

    `value` is None where the framework would print nothing or refuse the run; `lines` are the lines of its log. `says`
    is one sentence: what the number counts twice or leaves out, or why there is none.
    """

    key: str
    value: int | float | list[int] | list[list[float]] | None
    says: str
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class View:
    """A framework's own definition of the FLOPs of one optimizer step, for the whole world; None where it has none."""

    key: str
    flops_per_step: int | None
    says: str


def tokens(run: Run) -> int:
    """Tokens of one full global batch."""
    return run.tokens_per_step


def layer_products(run: Run) -> int:
    """Weights in the matrix products of all blocks: the multiply-adds of one token's forward pass through them."""
    model = run.model
    attention = model.hidden_size * (2 * model.query_width + 2 * model.key_value_width)
    mlp = model.hidden_size * model.ffn_hidden_size * (3 if model.gated else 2)
    return model.num_layers * (attention + mlp)


def score_products(run: Run) -> int:
    """Multiply-adds of one token's forward pass through scores and context of all blocks, the full matrices."""
    model = run.model
    return 2 * model.num_layers * model.seq_length * model.query_width
