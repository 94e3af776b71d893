"""What nanoGPT prints about parameters and counts as FLOPs."""

from steelyard.frameworks.views import Printed, View, score_products, tokens
from steelyard.predict import parameters
from steelyard.spec.run import Run

NAME = "nanoGPT"


def without_positions(run: Run) -> int:
    """Every parameter but the position table; its LayerNorm has a bias only where linear layers have one."""
    left_out = 0
    for entry in parameters.tensors(run.model, run.parallel.tensor):
        norm_bias = entry.part == "norm" and entry.name.endswith(".bias") and not run.model.bias
        if entry.part == "position" or norm_bias:
            left_out += entry.numel
    return parameters.unique(run.model, run.parallel.tensor) - left_out


def printed(run: Run) -> tuple[Printed, ...]:
    found = without_positions(run)
    return (
        Printed(
            "nanogpt_without_positions",
            found,
            "Leaves out the position table; the tied word embedding counts once, padding rows count.",
            (f"number of parameters: {found / 1e6:.2f}M",),
        ),
    )


def views(run: Run) -> tuple[View, ...]:
    per_token = 6 * without_positions(run) + 6 * score_products(run)
    says = "6N + 12 L h s per token: norms and biases counted as products, full score matrices, no recomputation."
    return (View("nanogpt", per_token * tokens(run), f"nanoGPT's MFU, always against 312 TFLOP/s: {says}"),)
