"""`[precision]` and `[recompute]`: what is computed in which dtype, and what is computed twice."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from steelyard.spec.section import Section

Dtype = Literal["fp64", "fp32", "bf16", "fp16"]
BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


class LossScale(Section):
    """fp16 loss scaling: `static`, or dynamic from 2^initial_power.

    `rule` names whose rule a script asked for; DeepSpeed's and Megatron's move the scale alike (train/loss_scale.py).
    """

    static: Annotated[float, Field(gt=0)] | None = None
    initial_power: int = Field(16, ge=0, le=64)
    window: int = Field(1000, ge=1)
    hysteresis: int = Field(2, ge=1)
    minimum: float = Field(1.0, gt=0)
    rule: Literal["deepspeed", "megatron"] = "deepspeed"

    @property
    def initial(self) -> float:
        return self.static if self.static is not None else float(2**self.initial_power)


class Precision(Section):
    compute: Dtype = "fp32"
    gradients: Dtype
    loss_scale: LossScale = LossScale()

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, given: Any) -> Any:
        if isinstance(given, dict) and "gradients" not in given:
            return {**given, "gradients": "fp64" if given.get("compute") == "fp64" else "fp32"}
        return given

    @property
    def master(self) -> Dtype:
        """dtype of the weights the optimizer updates: fp32, or fp64 in a proof run."""
        return "fp64" if self.compute == "fp64" else "fp32"

    @property
    def scales_loss(self) -> bool:
        return self.compute == "fp16"


class Recompute(Section):
    """Activation recomputation (activation checkpointing)."""

    mode: Literal["none", "selective", "full"] = "none"
    every: int = Field(1, ge=1)
    layers: Literal["all"] | Annotated[int, Field(ge=1)] = "all"
    modules: Annotated[tuple[Literal["attention", "mlp", "norm"], ...], Field(strict=False)] = ("attention",)
    shard: bool = False

    def groups(self, layers: int) -> list[range]:
        """Of a stage's layers, counted from its first, those that full recompute runs again together. The rest keep
        what they save."""
        if self.mode != "full":
            return []
        covered = layers if self.layers == "all" else min(self.layers, layers)
        return [range(first, min(first + self.every, covered)) for first in range(0, covered, self.every)]
