"""What OLMo-core prints about parameters and counted as FLOPs."""

from steelyard.frameworks.views import Printed, View, score_products, tokens
from steelyard.predict import parameters
from steelyard.spec.run import Run

NAME = "OLMo-core"


def printed(run: Run) -> tuple[Printed, ...]:
    return ()


def views(run: Run) -> tuple[View, ...]:
    per_token = 6 * parameters.without_embeddings(run.model) + 6 * score_products(run)
    return (
        View(
            "olmo_core_before_2025_12",
            per_token * tokens(run),
            "OLMo-core before 2025-12-22: 6 x parameters without embeddings and full score matrices; the head is left "
            "out.",
        ),
    )
