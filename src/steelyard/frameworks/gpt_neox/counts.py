"""What GPT-NeoX prints about parameters, and the eras of its `approx flops per GPU`."""

from steelyard.frameworks.deepspeed import counts as deepspeed
from steelyard.frameworks.megatron.counts import vocabulary
from steelyard.frameworks.papers.counts import narayanan
from steelyard.frameworks.views import Printed, View, tokens
from steelyard.spec.run import Run

NAME = "GPT-NeoX"


def total(run: Run) -> int | None:
    """Parameters added up over tensor and pipeline ranks; None with virtual stages."""
    layers = deepspeed.placement(run)
    return None if layers is None else deepspeed.params(run, layers).total


def printed(run: Run) -> tuple[Printed, ...]:
    found = total(run)
    if found is None:
        return (Printed("gpt_neox_total", None, "GPT-NeoX's pipeline has no virtual stages."),)
    return (
        Printed(
            "gpt_neox_total",
            found,
            "Added up over tensor and pipeline ranks: replicated tensors count once per tensor rank, tied embeddings "
            "twice with a pipeline.",
            (f" > total params: {found:,}",),
        ),
    )


def views(run: Run) -> tuple[View, ...]:
    found, count, model = total(run), tokens(run), run.model
    factor = 3 if run.recompute.mode == "none" else 4
    scores = 60 * model.seq_length * model.hidden_size * model.num_layers
    taken = "full score matrices, MLP taken for 4 x hidden without a gate"
    return (
        View(
            "gpt_neox_2021",
            None if found is None else count * (6 * found + scores),
            "GPT-NeoX 2021 to 2023: 6 x all parameters and 60 s h L per token, where scores and context need 12.",
        ),
        View(
            "gpt_neox",
            narayanan(run, vocabulary(run), factor),
            f"GPT-NeoX `approx flops` and HFU: the 2021 paper's formula, factor 4 with checkpointing, else 3; {taken}.",
        ),
        View(
            "gpt_neox_mfu",
            narayanan(run, vocabulary(run), 3),
            f"GPT-NeoX MFU since 2024-12-19: the 2021 paper's formula with factor 3, a head of 3/4; {taken}.",
        ),
    )
