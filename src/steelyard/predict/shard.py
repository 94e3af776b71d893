"""What FSDP does to a rank's memory: weights that are gathered, gradients that are taken and reduced
(parallel/shard.py in bytes)."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

from steelyard.predict import stages
from steelyard.predict.parameters import stage_tensors
from steelyard.predict.timeline import Span, moves
from steelyard.spec.precision import BYTES
from steelyard.spec.run import Run


def reduces_each(run: Run) -> bool:
    """Whether FSDP reduces the gradients of every micro-batch, and not of a step."""
    return run.sharded and run.parallel.zero >= 2 and run.parallel.pipeline == 1


@dataclass(frozen=True)
class Unit:
    """What FSDP gathers and reduces at once, a block or the ends of a stage: the shapes of its tensors on a tensor
    rank, in order. FSDP cuts a tensor's rows over `shards` and pads each shard to the largest. `others`: elements of
    the word table, its first tensor, that are not this tensor rank's and whose gradient it holds all the same."""

    shapes: tuple[tuple[int, ...], ...]
    shards: int
    others: int = 0

    @cached_property
    def tensors(self) -> tuple[int, ...]:
        """Parameters of each tensor."""
        return tuple(prod(shape) for shape in self.shapes)

    @cached_property
    def numel(self) -> int:
        return sum(self.tensors)

    @cached_property
    def shard(self) -> int:
        """Elements of a padded shard."""
        return sum(padded_shard(shape, self.shards) for shape in self.shapes)

    @cached_property
    def whole(self) -> int:
        """Elements of all padded shards."""
        return self.shard * self.shards


def padded_shard(shape: tuple[int, ...], shards: int) -> int:
    """Elements of every shard of a tensor: ceil(rows / shards) rows."""
    return -(-shape[0] // shards) * prod(shape[1:])


def units(run: Run, stage: int) -> tuple[Unit, tuple[Unit, ...]]:
    """The ends and the blocks of a stage."""
    model, parallel = run.model, run.parallel
    shapes = [(t.name, t.local_shape(parallel.tensor)) for t in stage_tensors(model, parallel, stage)]
    ends = tuple(shape for name, shape in shapes if not name.startswith("layers."))
    blocks = tuple(shape for name, shape in shapes if name.startswith("layers."))
    layers = stages.split(model, parallel)[stage]
    # Where the word table is not the head as well, DTensor keeps its gradient whole and partial until the last sum.
    apart = stage == 0 and (parallel.pipeline > 1 or not model.tied_embeddings) and not reduces_each(run)
    others = (parallel.tensor - 1) * prod(ends[0]) if apart else 0
    block = Unit(blocks[: len(blocks) // max(1, layers)], parallel.shards)  # all are alike
    return Unit(ends, parallel.shards, others), (block,) * layers


class Shards:
    """FSDP on one rank. Without it (`on` is false) nothing is gathered, taken or reduced."""

    def __init__(self, run: Run):
        self.on, self.each = run.sharded, reduces_each(run)
        self.regathers = self.on and run.parallel.zero == 3
        self.count = run.parallel.shards
        self._sends = self.on and self.count > 1
        self._replicated = self.on and run.parallel.data > self.count
        precision = run.precision
        self._width, self._wide, self._master = (
            BYTES[dtype] for dtype in (precision.compute, precision.gradients, precision.master)
        )
        self._casts = precision.compute != precision.master
        self._casts_back = precision.compute != precision.gradients
        self._reducing = 0  # bytes of the last reduction's input, which waits for the next one
        self._summed: dict[int, int] = {}  # unit -> bytes of its last all-reduce over replicas, which wait as well

    def keeps(self, first: bool) -> bool:
        """Whether gradients of weights stay where an operation makes them: in a first micro-batch, and where FSDP takes
        them at the unit's end."""
        return first or (self.on and (self.each or self._casts_back))

    # --- weights -----------------------------------------------------------------------------------------------------

    def receive(self, unit: Unit, name: str = "forward") -> Span:
        """A unit's weights are sent (where masters are wider, after a cast) and received. A single shard is not."""
        whole, cast = (size * self._width * self._sends for size in (unit.whole, unit.shard * self._casts))
        return moves(name, ("communication", cast), ("communication", whole), ("communication", -cast))

    def copy_out(self, unit: Unit, name: str = "forward") -> Span:
        """What was received becomes weights. Those of a single shard are cast tensor by tensor, each while the cast
        before it is still there."""
        if self._sends or not self.on or not self._casts:
            return moves(name, ("gathered", unit.whole * self._width * self.on))
        steps, cast = list[tuple[str, int]](), 0
        for numel in unit.tensors:
            before, cast = cast, numel * self._width
            steps += [("communication", cast), ("communication", -before), ("gathered", cast)]
        return moves(name, *steps, ("communication", -cast))

    def drop(self, unit: Unit, name: str = "forward") -> Span:
        """What was received, once it is copied out."""
        return moves(name, ("communication", -unit.whole * self._width * self._sends))

    def let_go(self, unit: Unit, count: int = 1, name: str = "forward") -> Span:
        """The gathered weights of `count` such units."""
        return moves(name, ("gathered", -count * unit.whole * self._width * self.on))

    # --- gradients ---------------------------------------------------------------------------------------------------

    def take(self, unit: Unit, place: int, fresh: bool, reduces: bool, added: bool = False) -> Iterator[Span]:
        """FSDP takes the gradients of unit number `place` after a backward pass: adds them to those in the dtype of
        gradients (`fresh`: there are none), or `reduces` them to shards, with the last micro-batch at the latest. A
        reduction's input waits for the next one, what was summed over replicas for the unit's own next one. `added`:
        the last micro-batch's have been added already."""
        if not self.on or not unit.shapes:
            return
        before = not fresh and not self.each
        if self._casts_back and before and not added:
            yield moves("reduction", ("gradients", -(unit.numel + unit.others) * self._width))
        if reduces or self.each:
            if unit.others:
                yield self._own_rows(unit, self._wide if before else self._width)
            if reduces or self.regathers:
                yield self.let_go(unit, name="reduction")
            yield self._reduce(unit, place, self._wide if before else self._width, again=self.each and not fresh)
        elif self._casts_back and not before:
            for index, numel in enumerate(unit.tensors):
                whole = numel + (0 if index else unit.others)  # cast one by one, each beside what it was
                yield moves("reduction", ("gradients", whole * self._wide), ("gradients", -whole * self._width))

    def _reduce(self, unit: Unit, place: int, width: int, again: bool) -> Span:
        """Gradients of `width` bytes become shards in the dtype of the masters; `again`: which are added to others."""
        received, sent, final = unit.whole * self._wide, unit.shard * self._wide, unit.shard * self._master
        last = unit.tensors[-1] * width * (self.count > 1)  # PyTorch's loop over the gradients holds on to it
        cast = self._wide != self._master
        spare = sent if cast or again else 0  # of the reduction's result, where it does not stay as the gradient
        steps = [
            ("communication", -self._reducing), ("communication", -self._summed.pop(place, 0)),
            ("communication", received), ("gradients", last - unit.numel * width),
            ("communication" if spare else "gradients", sent),
        ]  # fmt: skip
        if self.count == 1:
            steps += [("communication", received), ("communication", -received)]  # divided
        if cast:
            steps += [("communication" if again else "gradients", final)]
        if not self._replicated:
            steps += [("communication", -spare)]
        if cast and again:
            steps += [("communication", -final)]
        self._reducing, self._summed[place] = received, spare * self._replicated
        return moves("reduction", *steps, ("gradients", -last))

    def settle(self, unit: Unit) -> Iterator[Span]:
        """Without FSDP, what is held of other tensor ranks' rows goes when the step's gradients are summed."""
        if unit.others and not self.on:
            yield self._own_rows(unit, self._wide)

    @staticmethod
    def _own_rows(unit: Unit, width: int) -> Span:
        """A rank's own rows of the word table's gradient are copied out of all."""
        mine = unit.tensors[0] * width
        return moves("reduction", ("gradients", mine), ("gradients", -mine - unit.others * width))

    def reduced(self) -> Span:
        """The last reduction is through."""
        waited, self._reducing = self._reducing + sum(self._summed.values()), 0
        self._summed.clear()
        return moves("reduction", ("communication", -waited))
