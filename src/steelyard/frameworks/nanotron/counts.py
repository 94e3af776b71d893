"""What nanotron counts as FLOPs."""

from steelyard.frameworks.views import Printed, View, layer_products, score_products, tokens
from steelyard.spec.run import Run

NAME = "nanotron"


def printed(run: Run) -> tuple[Printed, ...]:
    return ()


def views(run: Run) -> tuple[View, ...]:
    """Products x 6 with an MLP of three matrices, whatever the model has."""
    model = run.model
    third = 0 if model.gated else model.num_layers * model.hidden_size * model.ffn_hidden_size
    products = layer_products(run) + third + model.hidden_size * run.padded_vocab_size
    return (
        View(
            "nanotron",
            (6 * products + 6 * score_products(run)) * tokens(run),
            "nanotron's model and hardware TFLOPs alike: three MLP matrices taken for granted, full score matrices, no "
            "recomputation in either.",
        ),
    )
