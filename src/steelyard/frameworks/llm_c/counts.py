"""What llm.c counts as FLOPs."""

from steelyard.frameworks.views import Printed, View, score_products, tokens
from steelyard.predict import parameters
from steelyard.spec.run import Run

NAME = "llm.c"


def printed(run: Run) -> tuple[Printed, ...]:
    found = parameters.unique(run.model, run.parallel.tensor)
    return (Printed("llm_c_parameters", found, "Each parameter once, padding rows included."),)


def views(run: Run) -> tuple[View, ...]:
    per_token = 6 * parameters.unique(run.model, run.parallel.tensor) + 3 * score_products(run)
    return (
        View(
            "llm_c",
            per_token * tokens(run),
            "llm.c's MFU since 2024-06-05: 6 x all parameters, positions counted as a product, half of each score "
            "matrix.",
        ),
    )
