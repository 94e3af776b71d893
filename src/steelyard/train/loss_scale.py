"""fp16 loss scaling: static, or dynamic.

DeepSpeed's `DynamicLossScaler` and Megatron's `DynamicGradScaler` move the scale alike: an overflow resets the count of
good steps and uses up one hysteresis, and once that was the last, it and every further overflow halve the scale (not
below the minimum); `window` good steps in a row double it and refill the hysteresis, which nothing else refills.
"""

from dataclasses import dataclass
from typing import Any

from steelyard.spec.precision import LossScale, Precision


@dataclass
class Scaler:
    """The scale of the next step. Without loss scaling it is 1 and never changes."""

    rule: LossScale
    dynamic: bool
    scale: float
    good_steps: int = 0
    hysteresis: int = 0

    @classmethod
    def of(cls, precision: Precision) -> "Scaler":
        rule, scaling = precision.loss_scale, precision.scales_loss
        dynamic = scaling and rule.static is None
        return cls(rule, dynamic, rule.initial if scaling else 1.0, 0, rule.hysteresis)

    @property
    def at_minimum(self) -> bool:
        """Whether an overflow can no longer be answered by a smaller scale."""
        return not self.dynamic or self.scale <= self.rule.minimum

    def update(self, overflow: bool) -> None:
        """Move to the next step's scale."""
        if not self.dynamic:
            return
        if overflow:
            self.good_steps = 0
            self.hysteresis = max(0, self.hysteresis - 1)
            if self.hysteresis == 0:
                self.scale = max(self.scale / 2, self.rule.minimum)
            return
        self.good_steps += 1
        if self.good_steps == self.rule.window:
            self.good_steps, self.hysteresis = 0, self.rule.hysteresis
            self.scale *= 2

    def state(self) -> dict[str, Any]:
        return {"scale": self.scale, "good_steps": self.good_steps, "hysteresis": self.hysteresis}

    def load(self, state: dict[str, Any]) -> None:
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])
        self.hysteresis = int(state["hysteresis"])
