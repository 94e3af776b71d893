"""What our own engine allocates: the states that stay, and a step's actions (predict/chunk.py) in the order in which a
rank runs them. The rehearsal (`steelyard plan --rehearse`) runs the real engine and holds this to account."""

from collections import Counter
from dataclasses import replace
from functools import lru_cache

from steelyard.predict import parameters, stages
from steelyard.predict.chunk import Chunk
from steelyard.predict.memory import Memory, Moment, States
from steelyard.predict.parts import Parts
from steelyard.predict.pipeline import Action, actions, enough, few
from steelyard.predict.shard import Shards, padded_shard
from steelyard.predict.timeline import Terms, Timeline, span
from steelyard.spec import progress
from steelyard.spec.model import Model
from steelyard.spec.parallel import Parallel
from steelyard.spec.precision import BYTES
from steelyard.spec.run import Run

NAME = "steelyard"


# --- states ----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=512)
def local_shapes(model: Model, parallel: Parallel, pipeline_rank: int) -> dict[tuple[int, ...], int]:
    """Shape of a tensor on one tensor rank -> how many a pipeline rank has."""
    held = parameters.rank_tensors(model, parallel, pipeline_rank)
    return dict(Counter(entry.local_shape(parallel.tensor) for entry in held))


def shard_numel(run: Run, pipeline_rank: int, index: int) -> int:
    """Parameters that shard `index` keeps."""
    shapes = local_shapes(run.model, run.parallel, pipeline_rank)
    return parameters.on_shard(shapes, run.parallel.shards, index)


def states(run: Run, pipeline_rank: int, index: int) -> States:
    """With FSDP the master weights and the gradients are shards with what pads them to equal ones, the moments without
    it (W, W and 2 W bytes a parameter); the weights the network computes with are gathered during a step (w P, at zero
    3 unit by unit) and gradients live until the update. Without it the weights are their own masters."""
    wide = BYTES[run.precision.master]
    mine = shard_numel(run, pipeline_rank, index)
    if not run.sharded:
        return States(wide * mine, wide * mine, 0, 2 * wide * mine)
    shapes = local_shapes(run.model, run.parallel, pipeline_rank)
    padded = sum(count * padded_shard(shape, run.parallel.shards) for shape, count in shapes.items())
    return States(0, wide * padded, wide * padded, 2 * wide * mine)


# --- ranks -----------------------------------------------------------------------------------------------------------


def assumed(run: Run) -> tuple[str, ...]:
    """What was assumed where the run does not say it, and which of its steps is meant where they are unlike."""
    if early := _early_level(run):
        micro = run.batch.accumulation
        return (f"each rank in the step that needs most: of {micro} micro-batches, or of {early} early in batch.ramp",)
    return ()


def ranks(run: Run, host: bool = False) -> tuple[Memory, ...]:
    """The memory of every class of equal ranks: pipeline rank outermost, then tensor rank; shards of unequal size are
    apart. With a batch ramp each in the step that takes it most. `host`: with the kernels of a CPU."""
    found: list[Memory] = []
    played = [(one, Parts(one, host)) for one in _steps(run)]
    for pipeline_rank in range(run.parallel.pipeline):
        shapes = local_shapes(run.model, run.parallel, pipeline_rank)
        for first, count in parameters.shard_classes(shapes, run.parallel.shards).values():
            copies = count * run.parallel.context * (run.parallel.data // run.parallel.shards)
            memory = _largest(played, pipeline_rank, first, copies)
            found += [replace(memory, tensor=tensor) for tensor in range(run.parallel.tensor)]
    return tuple(found)


def of_shard(run: Run, pipeline_rank: int, index: int) -> Memory:
    """The same of shard `index` on one pipeline rank."""
    return _largest([(one, Parts(one, False)) for one in _steps(run)], pipeline_rank, index, 1)


def in_last_step(run: Run, pipeline_rank: int, index: int, host: bool = False) -> Memory:
    """Of shard `index` on one pipeline rank, in a step of the whole global batch."""
    return _on_rank(run, pipeline_rank, index, 1, Parts(run, host))


def _steps(run: Run) -> list[Run]:
    """The run in those of its steps that may take a rank most."""
    early = _early_level(run)
    return [run, in_step_of(run, early)] if early else [run]


def _early_level(run: Run) -> int:
    """Micro-batches of the largest level of a batch ramp that has too few for 1F1B to alternate: its last stages hold
    more of them than ever later. 0: there is none."""
    if run.batch.ramp is None:
        return 0
    unit = run.batch.micro_batch_size * run.parallel.data
    total = progress.total_samples(run.length, run.batch, run.model.seq_length)
    used = {level.global_batch_size // unit for level in progress.levels(run.batch, total) if level.steps}
    return max((micro for micro in used - {run.batch.accumulation} if few(run.parallel, micro)), default=0)


def in_step_of(run: Run, micro_batches: int) -> Run:
    """The run in the steps of its batch ramp that have so many micro-batches on each data rank."""
    if run.batch.ramp is None:
        return run
    size = run.batch.micro_batch_size * run.parallel.data * micro_batches
    batch = {"accumulation": micro_batches, "global_batch_size": size, "ramp": None}
    return run.model_copy(update={"batch": run.batch.model_copy(update=batch)})


def _largest(steps: list[tuple[Run, Parts]], pipeline_rank: int, index: int, count: int) -> Memory:
    found = (_on_rank(run, pipeline_rank, index, count, parts) for run, parts in steps)
    return max(found, key=lambda memory: memory.peak)


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

    def batch(self) -> tuple[Terms, Terms]:
        """The batch as it was read, there throughout the step, and in a pipeline joined, there while micro-batches run.
        A token has its id and label (int64) and its weight, with `data.reset_positions` its position (int64), with
        `data.reset_attention` its document (int32), and in the batch as it was read whether it counts (bool); a sample
        has its number."""
        run, size, data = self.run, self.parts.size, self.run.data
        token = 2 * 8 + size.wide + 8 * data.reset_positions + 4 * data.reset_attention
        read = (token + 1) * size.tokens + 8 * run.batch.micro_batch_size
        joined = token * size.tokens + 8 * run.batch.micro_batch_size if run.parallel.pipeline > 1 else 0
        return {"batch": read * run.batch.accumulation}, {"batch": joined * run.batch.accumulation}

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
        for batch in self.batch():
            line.add(span("forward", batch))
        held = range(len(stages.chunks(self.run.parallel, self.rank)))
        chunks = [Chunk(self.run, self.parts, shards, self.rank, number, self.micro_batches) for number in held]
        order = self.actions()
        reduced = len(order) - 2 if self.run.parallel.pipeline == 1 else -1  # by the last micro-batch itself
        for index, (kind, number) in enumerate(order):
            line.add(chunks[number].play(kind, reduces=index == reduced))
        return line

    def moments(self) -> dict[str, Terms]:
        found = self.line().moments()
        found["optimizer"] = {"gradients": self.state.gradients, **self.batch()[0]}
        return found
