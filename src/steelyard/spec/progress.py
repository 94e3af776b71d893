"""Batch size and learning rate as pure functions of consumed samples.

Nothing here depends on the layout, so every layout and every resume sees the same sequence. Source of the shapes:
Megatron-LM's `OptimizerParamScheduler` and `RampupBatchsizeNumMicroBatchesCalculator`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from steelyard.spec.batch import Batch
from steelyard.spec.optimizer import LearningRate
from steelyard.spec.run import Length


@dataclass(frozen=True)
class Level:
    """Consecutive steps with one global batch size. `steps` is 0 for a level that no step of the run uses."""

    global_batch_size: int
    first_step: int
    steps: int
    first_sample: int

    @property
    def samples(self) -> int:
        return self.steps * self.global_batch_size


def batch_size_at(batch: Batch, consumed_samples: int) -> int:
    """Global batch size of the step that starts after `consumed_samples` samples."""
    ramp = batch.ramp_rule
    if ramp is None or consumed_samples >= ramp.samples:
        return batch.global_batch_size
    increments = (batch.global_batch_size - ramp.start) // ramp.increment
    # samples / increments is the length of a level; multiplied out, so that no rounding moves a boundary
    return ramp.start + consumed_samples * increments // ramp.samples * ramp.increment


def _all_levels(batch: Batch) -> Iterator[tuple[int, int | None]]:
    """(global batch size, samples before which it ends); the last level has no end."""
    ramp = batch.ramp_rule
    if ramp is not None:
        increments = (batch.global_batch_size - ramp.start) // ramp.increment
        for number in range(increments):
            yield ramp.start + number * ramp.increment, -(-(number + 1) * ramp.samples // increments)
    yield batch.global_batch_size, None


@lru_cache(maxsize=64)
def levels(batch: Batch, total_samples: int) -> tuple[Level, ...]:
    """Every level of the ramp, with the steps a run of `total_samples` spends on it; the whole run without a ramp."""
    found, step, consumed = [], 0, 0
    for size, end in _all_levels(batch):
        until = total_samples if end is None else min(end, total_samples)
        steps = max(0, -(-(until - consumed) // size))
        found.append(Level(size, step, steps, consumed))
        step, consumed = step + steps, consumed + steps * size
    return tuple(found)


def total_samples(length: Length, batch: Batch, seq_length: int) -> int:
    """Samples the run asks for. Steps count through the ramp; tokens are rounded up to whole samples."""
    if length.samples is not None:
        return length.samples
    if length.tokens is not None:
        return -(-length.tokens // seq_length)
    assert length.steps is not None
    return samples_after(batch, length.steps)


@lru_cache(maxsize=64)
def samples_after(batch: Batch, steps: int) -> int:
    """Samples consumed by the first `steps` steps."""
    consumed = done = 0
    for size, end in _all_levels(batch):
        here = steps - done if end is None else min(steps - done, max(0, -(-(end - consumed) // size)))
        done, consumed = done + here, consumed + here * size
    return consumed


def total_steps(length: Length, batch: Batch, seq_length: int) -> int:
    """Optimizer steps of the run. A length in samples that is no whole number of batches takes one step more."""
    return sum(level.steps for level in levels(batch, total_samples(length, batch, seq_length)))


@dataclass(frozen=True)
class Schedule:
    """The learning rate over samples; all amounts resolved.

    `rate(n, size)` is the rate of an update of `size` samples after `n` samples of successful updates (a skipped step
    does not advance it). With `first_update = "warm"` the update's own samples count, so the first update already
    moves; with "zero" (Megatron) they do not and the first update has rate 0.
    """

    rule: LearningRate
    warmup: float
    decay: int

    def rate(self, samples_updated: int, batch_size: int) -> float:
        return self.at(samples_updated + (batch_size if self.rule.first_update == "warm" else 0))

    def at(self, n: float) -> float:
        """The rate at sample `n` of the curve."""
        peak, minimum = self.rule.peak, self.rule.minimum
        if self.warmup > 0 and n <= self.warmup:
            return peak * (n / self.warmup)
        if self.rule.decay == "constant":
            return peak
        if n > self.decay:
            return minimum
        if self.rule.decay == "inverse_sqrt":
            return max(minimum, peak * math.sqrt(max(self.warmup, 1)) / math.sqrt(max(n, 1)))
        return minimum + self._decayed(n) * (peak - minimum)

    def _decayed(self, n: float) -> float:
        """Share of the way from minimum to peak, 1 at the end of the warm-up and 0 at the end of the decay."""
        if self.rule.decay == "wsd":
            length = round(self.rule.wsd_decay_fraction * self.decay)
            start = self.decay - length
            if n <= start:
                return 1.0
            return _shape(self.rule.wsd_decay, (n - start) / length)
        return _shape(self.rule.decay, (n - self.warmup) / (self.decay - self.warmup))


def _shape(name: str, done: float) -> float:
    if name == "linear":
        return 1.0 - done
    if name == "cosine":
        return 0.5 * (math.cos(math.pi * done) + 1.0)
    if name == "exponential":  # Megatron's WSD: 2 * 0.5^done - 1
        return 2.0 * 0.5**done - 1.0
    return 1.0 - math.sqrt(done)


def schedule(rule: LearningRate, length: Length, batch: Batch, seq_length: int) -> Schedule:
    """Resolve the amounts of `rule` (steps through the ramp, fractions of the decay) into samples."""
    if rule.decay_samples is not None:
        decay = rule.decay_samples
    elif rule.decay_steps is not None:
        decay = samples_after(batch, rule.decay_steps)
    else:
        decay = total_samples(length, batch, seq_length)
    if rule.warmup_samples is not None:
        warmup: float = rule.warmup_samples
    elif rule.warmup_steps is not None:
        warmup = samples_after(batch, rule.warmup_steps)
    else:
        warmup = (rule.warmup_fraction or 0.0) * decay
    return Schedule(rule, warmup, decay)
