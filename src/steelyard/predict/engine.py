"""What our own engine allocates: the states that stay, and a step's actions (predict/chunk.py) in the order in which a
rank runs them. The rehearsal (`steelyard plan --rehearse`) runs the real engine and holds this to account."""

from collections import Counter
from dataclasses import replace
from functools import lru_cache
from math import prod

from steelyard.predict import parameters, stages
from steelyard.predict.chunk import Chunk
from steelyard.predict.memory import Memory, Moment, States
from steelyard.predict.parts import Parts
from steelyard.predict.pipeline import Action, actions, enough, few
from steelyard.predict.shard import Shards, block
from steelyard.predict.timeline import Terms, Timeline, span
from steelyard.spec.model import Model
from steelyard.spec.parallel import Parallel
from steelyard.spec.precision import BYTES
from steelyard.spec.progress import ramp_sizes
from steelyard.spec.run import Run

NAME = "steelyard"


# --- states ----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=512)
def local_shapes(model: Model, parallel: Parallel, pipeline_rank: int) -> dict[tuple[int, ...], int]:
    """Shape of a tensor on one tensor rank -> how many a pipeline rank has."""
    held = parameters.rank_tensors(model, parallel, pipeline_rank)
    return dict(Counter(entry.local_shape(parallel.tensor) for entry in held))


def shard_numel(run: Run, pipeline_rank: int, index: int) -> int:
    """Parameters that shard `index` keeps: FSDP cuts dimension 0 of each tensor into blocks of ceil(rows / shards)."""
    parallel = run.parallel
    shards = parallel.shards
    found = 0
    for shape, count in local_shapes(run.model, parallel, pipeline_rank).items():
        rows = -(-shape[0] // shards)
        found += count * max(0, min(rows, shape[0] - index * rows)) * prod(shape[1:])
    return found


def padded_numel(run: Run, pipeline_rank: int) -> int:
    """Parameters of every shard's memory: FSDP pads all to the largest one's rows."""
    shapes = local_shapes(run.model, run.parallel, pipeline_rank)
    return sum(count * block(shape, run.parallel.shards) for shape, count in shapes.items())


def shard_classes(run: Run, pipeline_rank: int) -> list[tuple[int, int]]:
    """Shards that keep equally many parameters, as (index of the first, how many). A tensor's full blocks are followed
    by the rest of its rows and then by nothing, so only these places are looked at, not every shard."""
    shards = run.parallel.shards
    changes = {0}
    for shape in local_shapes(run.model, run.parallel, pipeline_rank):
        full = shape[0] // -(-shape[0] // shards)
        changes |= {place for place in (full, full + 1) if place < shards}
    starts = sorted(changes)
    found: dict[int, tuple[int, int]] = {}
    for start, end in zip(starts, [*starts[1:], shards], strict=True):
        numel = shard_numel(run, pipeline_rank, start)
        first, count = found.get(numel, (start, 0))
        found[numel] = (first, count + end - start)
    return list(found.values())


def states(run: Run, pipeline_rank: int, index: int) -> States:
    """With FSDP the master weights and the gradients are shards with what pads them to equal ones, the moments without
    it (W, W and 2 W bytes a parameter); the weights the network computes with are gathered during a step (w P, at zero
    3 unit by unit) and gradients live until the update. Without it the weights are their own masters."""
    wide = BYTES[run.precision.master]
    mine = shard_numel(run, pipeline_rank, index)
    if not run.sharded:
        return States(wide * mine, wide * mine, 0, 2 * wide * mine)
    padded = padded_numel(run, pipeline_rank)
    return States(0, wide * padded, wide * padded, 2 * wide * mine)


# --- ranks -----------------------------------------------------------------------------------------------------------


def assumed(run: Run) -> tuple[str, ...]:
    """What was assumed where the run does not say it."""
    if early := _early_level(run):
        micro = run.batch.accumulation
        return (f"each rank in the step that needs most: of {micro} micro-batches, or of {early} early in batch.ramp",)
    return ()


def ranks(run: Run, host: bool = False) -> tuple[Memory, ...]:
    """The memory of every class of equal ranks: pipeline rank outermost, then tensor rank; shards of unequal size are
    apart. With a batch ramp each in the step that takes it most."""
    found = _ranks(run, host)
    if early := _early_level(run):
        then = _ranks(in_step_of(run, early), host)
        found = tuple(max(pair, key=lambda memory: memory.peak) for pair in zip(found, then, strict=True))
    return found


def _ranks(run: Run, host: bool) -> tuple[Memory, ...]:
    found: list[Memory] = []
    parts = Parts(run, host)
    for pipeline_rank in range(run.parallel.pipeline):
        for first, count in shard_classes(run, pipeline_rank):
            copies = count * run.parallel.context * (run.parallel.data // run.parallel.shards)
            memory = _on_rank(run, pipeline_rank, first, copies, parts)
            found += [replace(memory, tensor=tensor) for tensor in range(run.parallel.tensor)]
    return tuple(found)


def _early_level(run: Run) -> int:
    """Micro-batches of the largest level of a batch ramp that has too few for 1F1B to alternate: its last stages hold
    more of them than ever later. 0: there is none."""
    unit = run.batch.micro_batch_size * run.parallel.data
    levels = (size // unit for size in ramp_sizes(run.batch))
    return max((micro for micro in levels if few(run.parallel, micro) and micro < run.batch.accumulation), default=0)


def in_step_of(run: Run, micro_batches: int) -> Run:
    """The run in the steps of its batch ramp that have so many micro-batches on each data rank."""
    if run.batch.ramp is None:
        return run
    size = run.batch.micro_batch_size * run.parallel.data * micro_batches
    batch = {"accumulation": micro_batches, "global_batch_size": size, "ramp": None}
    return run.model_copy(update={"batch": run.batch.model_copy(update=batch)})


def on_rank(run: Run, pipeline_rank: int, index: int, host: bool = False) -> Memory:
    """The memory of shard `index` on one pipeline rank; `host`: with the kernels of a CPU."""
    return _on_rank(run, pipeline_rank, index, 0, Parts(run, host))


def step(run: Run, pipeline_rank: int, index: int = 0, parts: Parts | None = None) -> "Step":
    """The step of shard `index` on one pipeline rank; `parts`: the run's, where they have been played already."""
    return Step(run, pipeline_rank, states(run, pipeline_rank, index), parts or Parts(run, False))


def _on_rank(run: Run, pipeline_rank: int, index: int, count: int, parts: Parts) -> Memory:
    state = states(run, pipeline_rank, index)
    between = States(state.weights, 0, state.master, state.optimizer)  # gradients are a term: they come and go
    moments = tuple(
        _moment(name, between, terms) for name, terms in step(run, pipeline_rank, index, parts).moments().items()
    )
    return Memory(pipeline_rank, 0, count, moments, {}, between, state.optimizer)


def _moment(name: str, between: States, terms: dict[str, int]) -> Moment:
    """Gathered weights and gradients are states while they are there."""
    states_then = replace(
        between, weights=between.weights + terms.pop("gathered", 0), gradients=terms.pop("gradients", 0)
    )
    return Moment(name, states_then, terms)


class Step:
    """One rank's step: the actions of its chunks of the model in the order in which they run."""

    def __init__(self, run: Run, pipeline_rank: int, state: States, parts: Parts):
        self.run, self.parts, self.rank, self.state = run, parts, pipeline_rank, state

    def steady(self) -> Terms:
        """What is there while micro-batches run: the batch, in a pipeline a second time, joined. A token has its id and
        label (int64) and its weight, with `data.reset_positions` its position (int64), with `data.reset_attention` its
        document (int32), and in the batch as it was read whether it counts (bool); a sample has its number."""
        run, size, data = self.run, self.parts.size, self.run.data
        token = 2 * 8 + size.wide + 8 * data.reset_positions + 4 * data.reset_attention
        read = (token + 1) * size.tokens + 8 * run.batch.micro_batch_size
        joined = token * size.tokens + 8 * run.batch.micro_batch_size if run.parallel.pipeline > 1 else 0
        return {"batch": (read + joined) * run.batch.accumulation}

    @property
    def micro_batches(self) -> int:
        """As many as stand for all: without a pipeline the first, two between, the last."""
        micro = self.run.batch.accumulation
        return enough(self.run.parallel, micro) if self.run.parallel.pipeline > 1 else min(micro, 4)

    def actions(self) -> list[Action]:
        if self.run.parallel.pipeline > 1:
            return actions(self.run.parallel, self.micro_batches)[self.rank]
        return [("F", 0), ("B", 0)] * self.micro_batches + [("R", 0)]

    def line(self) -> Timeline:
        """The step up to the optimizer. It ends with the gradients, the batch, and in a pipeline what was made and sent
        last."""
        line, shards = Timeline(), Shards(self.run)
        line.add(span("forward", self.steady()))
        held = range(len(stages.chunks(self.run.parallel, self.rank)))
        chunks = [Chunk(self.run, self.parts, shards, self.rank, number, self.micro_batches) for number in held]
        order = self.actions()
        reduced = len(order) - 2 if self.run.parallel.pipeline == 1 else -1  # by the last micro-batch itself
        for index, (kind, number) in enumerate(order):
            line.add(chunks[number].play(kind, reduces=index == reduced))
        return line

    def moments(self) -> dict[str, Terms]:
        found = self.line().moments()
        found["optimizer"] = {"gradients": self.state.gradients}
        return found
