"""What a step of our own engine sends: every collective and message by kind, mesh axis, calls and bytes.

From the batch's count to the last update, on one rank. Bytes are those of the whole tensor of a call (what is reduced,
gathered, scattered or sent) in the dtype it travels in; what a network carries of it depends on its algorithm.
`train/traffic.py` counts the real ones, and the two must be equal.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from steelyard.predict import parameters, stages
from steelyard.predict.network import Sizes
from steelyard.predict.parameters import Tensor
from steelyard.predict.pipeline import gathers
from steelyard.predict.shard import reduces_each, units
from steelyard.spec.precision import BYTES
from steelyard.spec.run import Run

Difference = tuple[tuple[int, int], tuple[int, int]]  # (calls, bytes) predicted, (calls, bytes) counted


@dataclass(frozen=True)
class Transfer:
    """`calls` operations of one kind over one axis that move `bytes` in all, and what they are for. Axes: tensor,
    shard and replicate (together the data axis), pipeline, and tied (the first and the last stage)."""

    purpose: str
    kind: str
    axis: str
    calls: int
    bytes: int


def on_rank(run: Run, pipeline_rank: int, index: int = 0, micro_batches: int | None = None) -> tuple[Transfer, ...]:
    """One step of shard `index` on a pipeline rank, with `run.batch.accumulation` micro-batches unless said."""
    micro = run.batch.accumulation if micro_batches is None else micro_batches
    step = _Step(run, pipeline_rank, index, micro)
    found = (*step.bookkeeping(), *step.tensor(), *step.data(), *step.pipeline())
    return tuple(entry for entry in found if entry.calls)


def by_operation(transfers: tuple[Transfer, ...]) -> dict[tuple[str, str], tuple[int, int]]:
    """(kind, axis) -> (calls, bytes)."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for entry in transfers:
        calls, size = found.get((entry.kind, entry.axis), (0, 0))
        found[entry.kind, entry.axis] = calls + entry.calls, size + entry.bytes
    return found


def differences(
    transfers: tuple[Transfer, ...], counted: Mapping[tuple[str, str], tuple[int, int]]
) -> dict[str, Difference]:
    """Where a count is not the prediction: "kind over axis" -> ((calls, bytes) predicted, (calls, bytes) counted)."""
    predicted, nothing = by_operation(transfers), (0, 0)
    return {
        f"{kind} over {axis}": (predicted.get((kind, axis), nothing), counted.get((kind, axis), nothing))
        for kind, axis in sorted({*predicted, *counted})
        if predicted.get((kind, axis), nothing) != counted.get((kind, axis), nothing)
    }


class _Step:
    """The mechanisms, one method each."""

    def __init__(self, run: Run, pipeline_rank: int, index: int, micro: int):
        self.run, self.micro, self.rank, self.index = run, micro, pipeline_rank, index
        parallel = run.parallel
        self.size, self.split = Sizes.of(run), stages.split(run.model, run.parallel)
        self.chunks, self.final = stages.chunks(parallel, pipeline_rank), len(self.split) - 1
        self.first, self.last = 0 in self.chunks, self.final in self.chunks
        self.held = parameters.rank_tensors(run.model, parallel, pipeline_rank)
        self.shards = parallel.shards
        self.replicas = parallel.data // self.shards
        self.fsdp = run.sharded

    # --- once a step -------------------------------------------------------------------------------------------------

    def bookkeeping(self) -> Iterator[Transfer]:
        """Counts, loss and norm, all float64: (valid tokens, checksum) over the data ranks, the loss over them and the
        pipeline, squares of gradients (cut over the tensor axis, whole on it) over whatever cuts them."""
        parallel = self.run.parallel
        sizes = {"pipeline": parallel.pipeline, "replicate": self.replicas, "shard": self.shards}
        for axis in ("replicate", "shard"):
            yield self._small("valid tokens", axis, 16, sizes[axis])
        for axis in sizes:
            yield self._small("loss", axis, 8, sizes[axis])
        if self.fsdp and parallel.zero:
            yield self._small("gradient norm", "shard", 16, self.shards)
        yield self._small("gradient norm", "tensor", 8, parallel.tensor)
        yield self._small("gradient norm", "pipeline", 8, parallel.pipeline)

    @staticmethod
    def _small(purpose: str, axis: str, size: int, ranks: int) -> Transfer:
        return Transfer(purpose, "all_reduce", axis, int(ranks > 1), size * (ranks > 1))

    # --- tensor axis -------------------------------------------------------------------------------------------------

    def tensor(self) -> Iterator[Transfer]:
        """Two pairs of collectives a block and micro-batch: hidden states are made whole after attention and MLP
        (forward) and their gradients before them (backward); with sequence parallelism each all-reduce becomes a
        gather and a scatter. Then the ends, what recompute repeats, and replicated weights."""
        if self.run.parallel.tensor == 1:
            return
        layers, hidden = sum(self.split[stage] for stage in self.chunks), self.size.hidden
        names = ("all_gather", "reduce_scatter") if self.run.parallel.sequence else ("all_reduce",)
        for name in names:
            yield self._each("blocks, forward", name, 2 * layers, hidden)
            yield self._each("blocks, backward", name, 2 * layers, hidden)
        if self.first:
            yield self._each("embedding, forward", "all_reduce", 1, hidden)
            if self.run.parallel.sequence:
                yield self._each("embedding, backward", "all_gather", 1, hidden)
        if self.last:
            yield from self._loss()
        yield from self._recompute()
        yield from self._partial()

    def _each(self, purpose: str, kind: str, calls: int, size: int) -> Transfer:
        """`calls` of `size` bytes for every micro-batch."""
        return Transfer(purpose, kind, "tensor", calls * self.micro, calls * size * self.micro)

    def _loss(self) -> Iterator[Transfer]:
        """Maximum, sum and the label's logit of every token, a chunk of tokens at a time; the gradient of the hidden
        states once."""
        chunks, hidden = -(-self.size.tokens // self.size.chunk), self.size.hidden
        calls = 3 * chunks * self.micro
        yield Transfer("loss", "all_reduce", "tensor", calls, 3 * self.size.tokens * self.size.wide * self.micro)
        if self.run.parallel.sequence:
            yield self._each("loss, forward", "all_gather", 1, hidden)
            yield self._each("loss, backward", "reduce_scatter", 1, hidden)
        else:
            yield self._each("loss, backward", "all_reduce", 1, hidden)

    def _recompute(self) -> Iterator[Transfer]:
        """Full recompute repeats a group's forward up to the last tensor that is kept: all but its last reduction,
        unless a dropout mask comes after it. Saved inputs cut over the tensor axis are gathered before, and so are
        their gradients."""
        rule = self.run.recompute
        if rule.mode != "full":
            return
        covered = [len(group) for stage in self.chunks for group in rule.groups(self.split[stage])]
        blocks, groups = sum(covered), len(covered)
        reductions = 2 * blocks - (0 if self.run.model.hidden_dropout else groups)
        if self.run.parallel.sequence:
            yield self._each("blocks, again", "all_gather", 2 * blocks, self.size.hidden)
            yield self._each("blocks, again", "reduce_scatter", reductions, self.size.hidden)
        else:
            yield self._each("blocks, again", "all_reduce", reductions, self.size.hidden)
            if rule.shard:
                yield self._each("saved inputs", "all_gather", 2 * groups, self.size.hidden)

    def _partial(self) -> Iterator[Transfer]:
        """Gradients of weights that every tensor rank applies to its own heads or positions, summed before they are
        used: once a step, or wherever FSDP reduces them."""
        tensors = [t for t in self.held if self._is_partial(t)]
        precision, every = self.run.precision, self.reductions > 1
        # summed as they were accumulated: whole micro-batches in the dtype of gradients, one alone in the compute dtype
        alone = self.fsdp and self.run.parallel.pipeline == 1 and (every or self.micro == 1)
        width = BYTES[precision.master if not self.fsdp else precision.compute if alone else precision.gradients]
        size = width * sum(t.numel for t in tensors)
        times = self.reductions if self.fsdp else 1
        yield Transfer("replicated weights", "all_reduce", "tensor", len(tensors) * times, size * times)

    def _is_partial(self, tensor: Tensor) -> bool:
        if "query_norm" in tensor.name or "key_norm" in tensor.name:
            return True
        part = tensor.name.rsplit(".", 1)[0]
        return self.run.parallel.sequence and (part == "norm" or part.endswith(("attention_norm", "mlp_norm")))

    # --- data axis ---------------------------------------------------------------------------------------------------

    @property
    def reductions(self) -> int:
        """How often a step reduces gradients: each micro-batch from zero 2 on; a pipeline once."""
        return self.micro if reduces_each(self.run) else 1

    @property
    def gathers(self) -> list[int]:
        """How often a step gathers the weights of each stage. Without a pipeline once, at zero 3 for each forward and
        each backward pass."""
        if self.run.parallel.pipeline > 1:
            return gathers(self.run.parallel, self.rank, self.micro)
        return [2 * self.micro if self.run.parallel.zero == 3 else 1]

    def data(self) -> Iterator[Transfer]:
        """FSDP's units: each block, and what else a stage holds. Rows are padded to equal shards."""
        units = [self._units(stage) for stage in self.chunks]
        calls, padded = sum(map(len, units)), sum(map(sum, units))
        weights, gradients = BYTES[self.run.precision.compute], BYTES[self.run.precision.gradients]
        if self.shards > 1:
            each = list(zip(units, self.gathers, strict=True))
            gathers = sum(len(mine) * times for mine, times in each)
            yield Transfer(
                "weights", "all_gather", "shard", gathers, weights * sum(sum(mine) * times for mine, times in each)
            )
            times = self.reductions
            yield Transfer("gradients", "reduce_scatter", "shard", calls * times, gradients * padded * times)
        if self.replicas > 1:
            times = self.reductions
            share = gradients * padded // self.shards * times
            yield Transfer("gradients", "all_reduce", "replicate", calls * times, share)

    def _units(self, stage: int) -> list[int]:
        """Parameters of each unit of a stage on this tensor rank, padded."""
        ends, blocks = units(self.run, stage)
        return [unit.whole for unit in (ends, *blocks) if unit.shapes]

    # --- pipeline ----------------------------------------------------------------------------------------------------

    def pipeline(self) -> Iterator[Transfer]:
        """Hidden states to the next stage and their gradients back, where the two stand on different ranks; the tied
        word table's gradient between the first and the last."""
        if self.run.parallel.pipeline == 1:
            return
        before = sum(stage > 0 and stage - 1 not in self.chunks for stage in self.chunks)
        after = sum(stage < self.final and stage + 1 not in self.chunks for stage in self.chunks)
        for name, kind, sides in (
            ("hidden states", "send", after), ("hidden states", "receive", before),
            ("their gradients", "send", before), ("their gradients", "receive", after),
        ):  # fmt: skip
            yield Transfer(name, kind, "pipeline", sides * self.micro, sides * self.size.residual * self.micro)
        if self.run.model.tied_embeddings and self.first != self.last:
            rows = self.size.rows
            table: dict[tuple[int, ...], int] = {(rows, self.run.model.hidden_size): 1}
            size = parameters.on_shard(table, self.shards, self.index) * BYTES[self.run.precision.master]
            yield Transfer("tied word table", "all_reduce", "tied", 1, size)
