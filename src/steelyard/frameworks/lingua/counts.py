"""What Lingua counts as FLOPs."""

from steelyard.frameworks.views import Printed, View, score_products, tokens
from steelyard.predict import parameters
from steelyard.spec.run import Run

NAME = "Lingua"


def printed(run: Run) -> tuple[Printed, ...]:
    return ()


def views(run: Run) -> tuple[View, ...]:
    """6 (N - V h) + 3.5 x 4 L s h / 2 per token; with tied embeddings N - V h leaves the head out."""
    table = run.padded_vocab_size * run.model.hidden_size
    weights = parameters.unique(run.model, run.parallel.tensor) - table
    per_token = 6 * weights + 7 * score_products(run) // 2
    return (
        View(
            "lingua",
            per_token * tokens(run),
            "Lingua's FLOPS: half of each score matrix, and 3.5 instead of 3 for it because flash attention recomputes "
            "scores backward; no head with tied embeddings.",
        ),
    )
