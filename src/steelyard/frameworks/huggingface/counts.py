"""What the Hugging Face Trainer prints about parameters and counts as FLOPs."""

from steelyard.frameworks.views import Printed, View, tokens
from steelyard.predict import parameters
from steelyard.spec.run import Run

NAME = "Hugging Face Trainer"


def printed(run: Run) -> tuple[Printed, ...]:
    found = parameters.unique_unpadded(run.model)
    sharded = " Releases before March 2023 print 0 under ZeRO 3, where each parameter is an empty placeholder."
    return (
        Printed(
            "huggingface_trainable",
            found,
            "Each parameter once; its vocabulary has no padding rows." + (sharded if run.parallel.zero == 3 else ""),
            (f"  Number of trainable parameters = {found:,}",),
        ),
    )


def views(run: Run) -> tuple[View, ...]:
    per_token = 6 * parameters.without_embeddings(run.model)
    return (
        View(
            "huggingface_total_flos",
            per_token * tokens(run),
            "The Trainer's total_flos: 6 x parameters without embeddings per token; neither attention nor head.",
        ),
    )
