"""How long a pipeline's ranks wait for each other: the bubble of a schedule, from the cost of its stages."""

from dataclasses import dataclass

from steelyard.predict import stages
from steelyard.spec.model import Model
from steelyard.spec.parallel import Parallel

# Of a micro-batch's forward, input-gradient and weight-gradient passes, how many a rank waits for per rank before it
# while the pipeline fills and drains. Where weight gradients are put off they fill the gap, and one pass is left.
# Source: the orders of torch.distributed.pipelining.schedules, played through with equal passes (a test repeats it).
WAITS = {"gpipe": 3, "1f1b": 3, "interleaved": 3, "zero_bubble": 1, "zbv": 1}
PASSES = 3


@dataclass(frozen=True)
class Bubble:
    """`fraction`: the share of a step's compute time that the average rank waits, transfers not counted.
    `schedule` is the part that filling and draining makes; the rest comes from stages of unequal cost."""

    fraction: float
    schedule: float


def bubble(model: Model, parallel: Parallel, micro_batches: int) -> Bubble:
    """Of one step of `micro_batches` micro-batches a rank.

    A rank's cost is that of its stages in model FLOPs (forward and backward). The steady state takes micro_batches
    times the slowest rank; filling and draining take every other rank's cost once, divided by the stages on a rank.
    """
    ranks = parallel.pipeline
    if ranks == 1:
        return Bubble(0.0, 0.0)
    costs = stages.costs(model, parallel)
    by_rank = [sum(costs[stage] for stage in stages.chunks(parallel, rank)) for rank in range(ranks)]
    virtual, waits = parallel.num_stages // ranks, WAITS[parallel.pipeline_schedule] / PASSES
    steady = micro_batches * max(by_rank)
    fill = (sum(by_rank) - max(by_rank)) / virtual * waits
    busy = micro_batches * sum(by_rank) / ranks
    equal = (ranks - 1) / virtual * waits
    return Bubble(1 - busy / (steady + fill), equal / (micro_batches + equal))
