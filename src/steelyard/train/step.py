"""One optimizer step, in the order the machine runs it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from steelyard.data.loader import Batch
from steelyard.spec.run import Run
from steelyard.train.clock import Clock
from steelyard.train.engine import Engine


@dataclass(frozen=True)
class Outcome:
    """loss: mean over the global batch. grad_norm: before clipping. updated: the weights moved. nan: loss or norm was
    not finite and no smaller loss scale can answer it."""

    loss: float
    grad_norm: float
    loss_scale: float
    updated: bool
    nan: bool


def step(run: Run, engine: Engine, batches: Sequence[Batch], rate: float, number: int, clock: Clock) -> Outcome:
    """Forward and backward over this rank's micro-batches, then one update of rate `rate`; `number` is the step's.

    A loss or gradient norm that is not finite on any rank is so on all, and then no rank updates.
    """
    scale = engine.scaler.scale
    with clock.phase("forward-backward"):
        micro_batches = engine.begin(batches)
        engine.forward_backward(micro_batches, number)
    with clock.phase("optimizer"):
        loss = engine.loss()
        norm = engine.clip(run.optimizer.clip_grad)
        finite = math.isfinite(loss) and math.isfinite(norm)
        if finite:
            engine.update(rate)
        nan = not finite and (engine.scaler.at_minimum or not math.isfinite(loss))
        engine.scaler.update(overflow=not finite)
        engine.end()
    return Outcome(loss, norm, scale, finite, nan)
