"""What LLM-Foundry counts as FLOPs (Composer's speed monitor)."""

from steelyard.frameworks.views import Printed, View, score_products, tokens
from steelyard.predict import parameters
from steelyard.spec.run import Run

NAME = "LLM-Foundry"


def printed(run: Run) -> tuple[Printed, ...]:
    found = parameters.unique(run.model, run.parallel.tensor)
    says = "Each parameter once, padding rows included."
    return (Printed("llm_foundry_n_params", found, says, (f"n_params: {found}",)),)


def views(run: Run) -> tuple[View, ...]:
    """3 (2 N s + 4 L h s^2) per sequence."""
    per_token = 6 * parameters.unique(run.model, run.parallel.tensor) + 6 * score_products(run)
    return (
        View(
            "llm_foundry",
            per_token * tokens(run),
            "LLM-Foundry's MFU: 6 x all parameters, the embedding lookup counted as a product; full score matrices.",
        ),
    )
