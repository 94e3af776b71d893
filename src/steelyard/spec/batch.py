"""`[batch]`: global = micro x accumulation x data, and the ramp towards it."""

from typing import Annotated, Literal

from pydantic import Field

from steelyard.spec.section import Section

Size = Annotated[int, Field(ge=1)]


class Ramp(Section):
    """Megatron's `--rampup-batch-size`: from `start` in steps of `increment` over `samples` samples."""

    start: Size
    increment: Size
    samples: Size


class Batch(Section):
    """All three of the equation are numbers here; the loader derives those the run file leaves out."""

    global_batch_size: Size
    micro_batch_size: Size
    accumulation: Size
    ramp: Annotated[tuple[Size, Size, Size], Field(strict=False)] | None = None
    loss_mean: Literal["tokens", "micro_batches"] = "tokens"

    @property
    def ramp_rule(self) -> Ramp | None:
        if self.ramp is None:
            return None
        start, increment, samples = self.ramp
        return Ramp(start=start, increment=increment, samples=samples)


def complete(
    global_batch_size: int | None, micro_batch_size: int | None, accumulation: int | None, data: int, pipeline: int
) -> tuple[int, int, int]:
    """The three numbers, from any that are given.

    The global batch is the training contract, so a layout change moves micro batch or accumulation, never it. With
    nothing but the global batch, one micro batch per rank and step; in a pipeline, as few as keep every stage busy.
    Where no whole numbers fit, the nearest are returned and the check of the equation refuses them.
    """
    if global_batch_size is None:
        micro_batch_size = micro_batch_size or 1
        accumulation = accumulation or pipeline
        return micro_batch_size * accumulation * data, micro_batch_size, accumulation
    per_rank = max(1, global_batch_size // data)
    if micro_batch_size is None and accumulation is None:
        accumulation = next((n for n in range(min(pipeline, per_rank), per_rank + 1) if per_rank % n == 0), per_rank)
    if micro_batch_size is None:
        assert accumulation is not None
        micro_batch_size = max(1, per_rank // accumulation)
    if accumulation is None:
        accumulation = max(1, per_rank // micro_batch_size)
    return global_batch_size, micro_batch_size, accumulation
