"""FLOPs by two calculators: llm-analysis and the EleutherAI cookbook."""

from steelyard.frameworks.views import Printed, View, score_products, tokens
from steelyard.spec.run import Run

NAME = "calculators"


def printed(run: Run) -> tuple[Printed, ...]:
    return ()


def views(run: Run) -> tuple[View, ...]:
    model, count = run.model, tokens(run)
    head = 2 * model.hidden_size * run.padded_vocab_size
    blocks = 24 * model.num_layers * model.hidden_size**2 + 2 * score_products(run)
    usual = model.ffn_hidden_size == 4 * model.hidden_size and not model.gated
    everything = "full score matrices; with recomputation everything, the logits too, four times"
    return (
        View(
            "llm_analysis",
            3 * count * (blocks + head) if usual else None,
            f"llm-analysis: {everything}; stops unless the MLP is 4 x hidden.",
        ),
        View(
            "llm_analysis_recompute",
            4 * count * (blocks + head) if usual else None,
            f"llm-analysis: {everything}; stops unless the MLP is 4 x hidden.",
        ),
        View(
            "cookbook",
            count * (4 * blocks + head + 4 * model.hidden_size),
            "EleutherAI cookbook, recomputation by default: head counted forward only, MLP taken for 4 x hidden "
            "whatever is given.",
        ),
        View(
            "cookbook_no_recompute",
            count * (3 * blocks + head + 4 * model.hidden_size),
            "EleutherAI cookbook without recomputation: head counted forward only, MLP taken for 4 x hidden.",
        ),
    )
