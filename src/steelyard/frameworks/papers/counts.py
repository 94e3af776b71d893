"""FLOPs by formulas that people quote: Narayanan et al. 2021, 6N and 8N."""

from steelyard.frameworks.views import Printed, View, tokens
from steelyard.predict import parameters
from steelyard.spec.run import Run

NAME = "papers and rules of thumb"


def narayanan(run: Run, padded_vocab_size: int, factor: int) -> int:
    """24 factor B s L h^2 (1 + s / 6h + V / 16Lh), written as factor B s (24 L h^2 + 4 L s h + 3/2 V h).

    Source: Narayanan et al. 2021 (arXiv 2104.04473), equation 3, where factor is 4.
    """
    model = run.model
    layers, h, s = model.num_layers, model.hidden_size, model.seq_length
    return factor * tokens(run) * (48 * layers * h * h + 8 * layers * s * h + 3 * padded_vocab_size * h) // 2


def printed(run: Run) -> tuple[Printed, ...]:
    return ()


def views(run: Run) -> tuple[View, ...]:
    count, vocabulary = tokens(run), run.padded_vocab_size
    unique = parameters.unique(run.model, run.parallel.tensor)
    without = parameters.without_embeddings(run.model)
    taken = "full score matrices, MLP taken for 4 x hidden without a gate"
    return (
        View(
            "narayanan_2021_factor_4",
            narayanan(run, vocabulary, 4),
            f"The 2021 paper with full recomputation: {taken}; equals our hardware FLOPs where those hold.",
        ),
        View(
            "narayanan_2021_factor_3",
            narayanan(run, vocabulary, 3),
            f"The 2021 paper's formula without recomputation: {taken}; its head has 3/4 of its FLOPs, so it is not "
            "model FLOPs.",
        ),
        View("6n", 6 * unique * count, "6 x parameters x tokens: attention left out, lookups counted as products."),
        View(
            "6n_without_embeddings",
            6 * without * count,
            "6 x parameters without embeddings x tokens: neither attention nor head.",
        ),
        View("8n", 8 * unique * count, "8 x parameters x tokens: 6N with everything, the head too, recomputed."),
    )
