"""What TorchTitan prints about parameters and counts as FLOPs."""

from steelyard.frameworks.views import Printed, View, score_products, tokens
from steelyard.predict import parameters
from steelyard.spec.run import Run

NAME = "TorchTitan"


def printed(run: Run) -> tuple[Printed, ...]:
    found = parameters.unique_unpadded(run.model)
    return (
        Printed(
            "torchtitan_total",
            found,
            "Counted on the whole model before sharding: exact. Its vocabulary has no padding rows.",
            (f"size: {found:,} total parameters",),
        ),
    )


def views(run: Run) -> tuple[View, ...]:
    """6 (N - token embedding) + 12 L heads head_dim s per token, the head counted whether tied or not."""
    model = run.model
    embedding = 0 if model.tied_embeddings else model.vocab_size * model.hidden_size
    per_token = 6 * (parameters.unique_unpadded(model) - embedding) + 6 * score_products(run)
    return (
        View(
            "torchtitan",
            per_token * tokens(run),
            "TorchTitan's tflops and MFU: norms, biases and positions counted as products, full score matrices, no "
            "recomputation, vocabulary without padding.",
        ),
    )
