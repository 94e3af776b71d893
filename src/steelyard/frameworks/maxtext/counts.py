"""What MaxText counts as FLOPs."""

from steelyard.frameworks.views import Printed, View, layer_products, score_products, tokens
from steelyard.spec.run import Run

NAME = "MaxText"


def printed(run: Run) -> tuple[Printed, ...]:
    return ()


def views(run: Run) -> tuple[View, ...]:
    products = layer_products(run) + run.model.hidden_size * run.padded_vocab_size
    return (
        View(
            "maxtext",
            (6 * products + 3 * score_products(run)) * tokens(run),
            "MaxText since 2025-07-18: products from the actual shapes, half of each score matrix, no recomputation.",
        ),
        View(
            "maxtext_before_2025_07",
            (6 * products + 6 * score_products(run)) * tokens(run),
            "MaxText before 2025-07-18: the same with full score matrices.",
        ),
    )
