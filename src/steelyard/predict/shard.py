"""What FSDP does to a rank's memory: weights that are gathered, gradients that are taken and reduced
(parallel/shard.py in bytes)."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from steelyard.predict.timeline import Span, chain, moves
from steelyard.spec.precision import BYTES
from steelyard.spec.run import Run


def reduces_each(run: Run) -> bool:
    """Whether FSDP reduces the gradients of every micro-batch, and not of a step."""
    return run.parallel.zero >= 2 and run.parallel.pipeline == 1


@dataclass(frozen=True)
class Unit:
    """What FSDP gathers and reduces at once, a block or the ends of a stage: the parameters of its tensors on a rank,
    in order. `others`: rows of the word table, its first tensor, that are not this tensor rank's and whose gradient it
    holds all the same."""

    tensors: tuple[int, ...]
    others: int = 0

    @cached_property
    def numel(self) -> int:
        return sum(self.tensors)


class Shards:
    """FSDP on one rank. Without it (`on` is false) nothing is gathered, taken or reduced."""

    def __init__(self, run: Run):
        self.on, self.each = run.sharded, reduces_each(run)
        self.regathers = self.on and run.parallel.zero == 3
        self._ranks = run.parallel.shards
        precision = run.precision
        self._width, self._wide = BYTES[precision.compute], BYTES[precision.gradients]
        self._casts = precision.compute != precision.master
        self._casts_back = precision.compute != precision.gradients
        self._reducing = 0  # bytes of the last reduction's input, which waits for the next one

    def keeps(self, first: bool) -> bool:
        """Whether gradients of weights stay where an operation makes them: in a first micro-batch, and where FSDP takes
        them at the unit's end."""
        return first or (self.on and (self.each or self._casts_back))

    # --- weights -----------------------------------------------------------------------------------------------------

    def gathered(self, numel: int, name: str = "forward") -> Span:
        """Weights in the compute dtype come (or go, below zero)."""
        return moves(name, ("gathered", numel * self._width))

    def gather(self, unit: Unit, name: str = "forward") -> Span:
        """A unit's weights are sent (where masters are wider, after a cast), received and copied out."""
        return chain((self.receive(unit, name), self.gathered(unit.numel, name)))

    def receive(self, unit: Unit, name: str = "forward") -> Span:
        """Up to the copying out. A single shard is not sent."""
        if self._ranks == 1:
            return moves(name)
        whole = unit.numel * self._width
        cast = whole // self._ranks if self._casts else 0
        return moves(name, ("communication", cast), ("communication", whole), ("communication", -cast))

    def drop(self, unit: Unit) -> Span:
        """What was received, once it is copied out."""
        return moves("forward", ("communication", -unit.numel * self._width if self._ranks > 1 else 0))

    def gather_backward(self, block: Unit, count: int, first: bool, last: bool) -> Iterator[Span]:
        """The weights of a group of `count` blocks before its backward pass, and of the block before it, which is
        received ahead. `first`, `last`: in the order of the forward pass."""
        if last:
            yield self.receive(block, "backward")
        yield self.gathered(block.numel, "backward")
        yield self.drop(block)
        yield self.gathered((count - 1) * block.numel, "backward")
        if not first:
            yield self.receive(block, "backward")

    # --- gradients ---------------------------------------------------------------------------------------------------

    def take(self, unit: Unit, fresh: bool, reduces: bool, added: bool = False) -> Iterator[Span]:
        """FSDP takes a unit's gradients after a backward pass: adds them to those in the dtype of gradients (`fresh`:
        there are none), or `reduces` them to shards, with the last micro-batch at the latest. A reduction's input waits
        for the next one. `added`: the last micro-batch's have been added already."""
        if not self.on:
            return
        narrow, wide = ((unit.numel + unit.others) * size for size in (self._width, self._wide))
        casts, before = self._casts_back, not fresh and not self.each
        if casts and before and not added:
            yield moves("reduction", ("gradients", -narrow))
        if not reduces and not self.each:
            for index, numel in enumerate(unit.tensors if casts and not before else ()):
                whole = numel + (0 if index else unit.others)  # cast one by one, each beside what it was
                yield moves("reduction", ("gradients", whole * self._wide), ("gradients", -whole * self._width))
            return
        if reduces or self.regathers:
            yield self.gathered(-unit.numel, "reduction")
        source, wide = wide if before else narrow, unit.numel * self._wide
        shard = wide // self._ranks
        again = [("gradients", -shard)] if self.each and not fresh else []
        divided = [("communication", wide), ("communication", -wide)] if self._ranks == 1 else []
        yield moves("reduction", ("communication", -self._reducing), ("communication", wide), ("gradients", -source),
                    ("gradients", shard), *divided, *again)  # fmt: skip
        self._reducing = wide

    def settle(self, unit: Unit) -> Iterator[Span]:
        """Without FSDP, what is held of other tensor ranks' rows goes when the step's gradients are summed: a rank's
        own rows are copied out."""
        if unit.others and not self.on:
            mine = unit.tensors[0]
            yield moves(
                "reduction", ("gradients", mine * self._wide), ("gradients", -(mine + unit.others) * self._wide)
            )

    def reduced(self) -> Span:
        """The last reduction is through."""
        waited, self._reducing = self._reducing, 0
        return moves("reduction", ("communication", -waited))
