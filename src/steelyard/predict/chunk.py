"""What a stage of the model does to its rank's memory, action by action of a step.

A stage's blocks and ends are played once (predict/parts.py); here they are put together with what FSDP gathers and
takes (predict/shard.py), with what neighbours send, and with what all blocks share.
"""

from collections.abc import Iterator
from functools import cached_property

from steelyard.predict import stages
from steelyard.predict.parts import Parts, Played
from steelyard.predict.pipeline import ON_DEMAND, few
from steelyard.predict.shard import Shards, Unit, units
from steelyard.predict.timeline import Span, chain, moves
from steelyard.spec.run import Run

SHARDS, RECEIVED, GATHERED = range(3)  # where weights are; without FSDP they are always whole
ENDS = -1  # their place among a chunk's units; a block's is its number


class Chunk:
    """One stage on a rank, for `total` micro-batches. Without a pipeline it is the whole model."""

    def __init__(self, run: Run, parts: Parts, shards: Shards, rank: int, number: int, total: int):
        parallel = run.parallel
        self.run, self.parts, self.shards, self.size = run, parts, shards, parts.size
        split, mine = stages.split(run.model, run.parallel), stages.chunks(run.parallel, rank)
        stage = mine[number]
        self.first, self.last, self.layers = stage == 0, stage == len(split) - 1, split[stage]
        # a neighbour on the same rank hands its tensors over
        self.receives = not self.first and stage - 1 not in mine
        self.answers = not self.last and stage + 1 not in mine
        schedule = "gpipe" if few(parallel, total) else parallel.pipeline_schedule
        self.total, self.on_demand = total, schedule if parallel.pipeline > 1 and schedule in ON_DEMAND else ""
        # blocks as they run: how many at once, and whether they keep their input only
        again = [(len(group), True) for group in run.recompute.groups(self.layers)]
        self.groups = again + [(1, False)] * (self.layers - sum(count for count, _ in again))
        self.ends, blocks = units(run, stage)
        self.block = blocks[0] if blocks else Unit((), shards.count)
        self.weights, self.done = SHARDS, dict.fromkeys("FBIW", 0)
        alike = (self.layers, self.first, self.last, self.receives, self.answers)
        self._made = parts.made.setdefault(alike, {})
        self._received = {
            "RF": moves("forward", ("boundary", self.size.residual)),
            "RB": moves("backward", ("backward", self.size.residual)),
        }

    @cached_property
    def shared(self) -> tuple[int, int]:
        """What all blocks of a micro-batch share, up to the end of its forward pass and up to that of its backward
        pass. Rotary angles are saved by every block. ALiBi's biases for all heads and the mask of documents are inputs
        of attention, of which a block that is run again holds on to them."""
        model, rule, data = self.run.model, self.run.recompute, self.run.data
        micro, pairs = self.run.batch.micro_batch_size, model.seq_length**2
        masks = model.num_attention_heads * pairs * self.size.width if model.position == "alibi" else 0
        masks += micro * pairs if data.reset_attention else 0
        angles = 0
        if model.position == "rotary":
            rotated = int(model.head_dim * model.rotary_fraction)
            angles = model.seq_length * rotated * self.size.width * (micro if data.reset_positions else 1)
        again = rule.mode == "full" or (rule.mode == "selective" and "attention" in rule.modules)
        return (0, masks + angles) if again else (masks, angles)

    def share(self) -> Span:
        """What blocks share is made. ALiBi's biases are distances (int64) times slopes (float64), and then cast."""
        model, pairs, made = self.run.model, self.run.model.seq_length**2, sum(self.shared)
        if model.position != "alibi":
            return moves("forward", ("masks", made))
        exact = 8 * pairs * model.num_attention_heads if self.size.width < 8 else 0
        return moves("forward", ("masks", 8 * pairs), ("masks", exact), ("masks", made), ("masks", -exact - 8 * pairs))

    def play(self, kind: str, reduces: bool = False) -> Span:
        """An action of predict/pipeline.py. `reduces`: FSDP reduces as soon as a unit's backward pass is through."""
        if kind in self._received:
            return self._received[kind]
        if kind == "R":
            self.weights = SHARDS
            return chain(self.reduction())
        if kind == "U":
            self.weights = RECEIVED
            return chain(self.shards.receive(unit) for unit in (self.ends, *[self.block] * self.layers))
        if kind == "D":
            return self.let_go()
        fresh, weights = not self.done[kind], self.weights if self.shards.on else GATHERED
        if kind == "F" or (kind == "B" and self.run.parallel.pipeline == 1):
            self.weights = SHARDS if self.shards.regathers else GATHERED
        elif kind == "B" or (kind == "I") != self.first:  # "I" of the first stage does nothing yet
            self.weights = GATHERED
        self.done[kind] += 1
        make = {"F": self.forward, "B": self.backward, "I": self.inputs, "W": self.put_off_weights}[kind]
        if self.run.parallel.pipeline == 1:  # where a backward pass may reduce, which changes `shards`
            return chain(make(fresh, weights, reduces))
        key = (kind, fresh, weights, kind == "B" and self.done["B"] == self.total)
        if key not in self._made:
            self._made[key] = chain(make(fresh, weights, False))
        return self._made[key]

    # --- actions: `fresh` ones find no gradients of weights; `weights`: where those are -------------------------------

    def forward(self, fresh: bool, weights: int, reduces: bool) -> Iterator[Span]:
        shards, before = self.shards, self.ends
        yield from self.opened(weights)
        if weights == SHARDS:
            yield from (shards.receive(self.ends), shards.copy_out(self.ends))
        yield self.share()
        if self.first:
            yield self.parts.embedding(False).forward[0]
        for index, (count, _) in enumerate(self.groups):
            for number in range(count):
                if weights == SHARDS:
                    yield from (shards.receive(self.block), shards.copy_out(self.block), shards.drop(before))
                    before = self.block
                yield self.group(index, False).forward[number]
                if shards.regathers:
                    yield shards.let_go(self.block)
        if self.last:
            yield self.parts.loss(False).forward[0]
        if shards.regathers:
            yield shards.let_go(self.ends)
        if weights == SHARDS:
            yield shards.drop(before)
        yield moves("forward", ("masks", -self.shared[0]))

    def opened(self, weights: int) -> Iterator[Span]:
        """Weights that were received ahead are copied out, unit by unit."""
        for unit in (self.ends, *[self.block] * self.layers) if weights == RECEIVED else ():
            yield from (self.shards.copy_out(unit), self.shards.drop(unit))

    def backward(self, fresh: bool, weights: int, reduces: bool) -> Iterator[Span]:
        yield from self.sent(fresh, before=True)
        yield from self.through_blocks(fresh, weights, reduces)
        yield from self.sent(fresh)
        yield from self.through(final=self.done["B"] == self.total)

    def through_blocks(self, fresh: bool, weights: int, reduces: bool) -> Iterator[Span]:
        shards, keep, bare = self.shards, self.shards.keeps(fresh), weights == SHARDS
        yield from self.opened(weights)
        yield from self.before_backward() if bare else ()
        if self.last:
            yield self.parts.loss(keep).backward[0]
        place = self.layers
        for index, (count, _) in reversed(list(enumerate(self.groups))):
            first = place - count
            if bare and (self.last or index < len(self.groups) - 1):
                yield from self.before_block(ahead=place > 1)
            spans = self.group(index, keep).backward
            for number, again in enumerate(spans[: count - 1]):  # the last but one has been received ahead
                if bare:
                    yield from [] if number == count - 2 else [shards.receive(self.block, "backward")]
                    yield shards.copy_out(self.block, "backward")
                yield again
                if bare:
                    yield shards.drop(self.block, "backward")
            for span in spans[count - 1 :]:
                place -= 1
                if bare and place == first and count > 1 and first:
                    yield shards.receive(self.block, "backward")
                yield span
                yield from shards.take(self.block, place, fresh, reduces)
        yield moves("backward", ("masks", -self.shared[1]))
        if self.first:
            yield self.parts.embedding(keep).backward[0]
        yield from shards.take(self.ends, ENDS, fresh, reduces)

    def before_backward(self) -> Iterator[Span]:
        """Weights of the ends and of the last block. Where the loss is elsewhere, the stage's result is that of its
        last block, which comes first."""
        shards, ahead = self.shards, self.layers > 0
        if ahead and not self.last:
            yield shards.receive(self.block, "backward")
            yield from self.before_block(ahead=self.layers > 1)
        yield from (shards.receive(self.ends, "backward"), shards.copy_out(self.ends, "backward"))
        yield shards.drop(self.ends, "backward")
        if ahead and self.last:
            yield shards.receive(self.block, "backward")

    def before_block(self, ahead: bool) -> Iterator[Span]:
        """Its weights, which have been received, and `ahead` those of the block before it are received."""
        yield from (self.shards.copy_out(self.block, "backward"), self.shards.drop(self.block, "backward"))
        if ahead:
            yield self.shards.receive(self.block, "backward")

    def inputs(self, fresh: bool, weights: int, reduces: bool) -> Iterator[Span]:
        """The gradients of the inputs. The first stage has none, and leaves all to the second half."""
        if self.first:
            yield moves("backward")
            return
        keep, bare = self.shards.keeps(fresh), weights == SHARDS
        yield from self.opened(weights)
        yield from self.before_backward() if bare else ()
        if self.last:
            yield self.put_off_loss(keep)[0]
        for index in reversed(range(self.layers)):
            if bare and (self.last or index < self.layers - 1):
                yield from self.before_block(ahead=index > 0)
            yield self.put_off(index, keep)[0]
        yield from self.sent(fresh)

    def put_off_weights(self, fresh: bool, weights: int, reduces: bool) -> Iterator[Span]:
        """The gradients of the weights, from the first block on, and then all that their graph has held on to."""
        if self.first:
            yield from self.through_blocks(fresh, weights, reduces)
            yield from self.through()
            return
        keep = self.shards.keeps(fresh)
        parts = [self.put_off(index, keep) for index in range(self.layers)]
        parts += [self.put_off_loss(keep)] if self.last else []
        for _, weighed, _ in parts:
            yield weighed
        for _, _, rest in parts:
            yield rest
        for place in (*range(self.layers), ENDS):
            yield from self.shards.take(self.ends if place == ENDS else self.block, place, fresh, False)
        yield moves("backward", ("masks", -self.shared[1]))
        yield from self.through()

    def reduction(self) -> Iterator[Span]:
        """In a pipeline gradients are reduced when those of all micro-batches have added up."""
        if self.run.parallel.pipeline > 1:
            for place in (ENDS, *range(self.layers)):
                unit = self.ends if place == ENDS else self.block
                yield from self.shards.take(unit, place, False, True, added=True)
        yield from self.shards.settle(self.ends)
        yield self.shards.reduced()

    def let_go(self) -> Span:
        """Its gathered weights go, for those of other chunks of the rank."""
        there, self.weights = self.weights == GATHERED, SHARDS
        gone = (self.shards.let_go(self.ends), self.shards.let_go(self.block, self.layers))
        return chain(gone) if there else moves("forward")

    # --- their parts -------------------------------------------------------------------------------------------------

    def group(self, index: int, keep: bool, put_off: bool = False) -> Played:
        count, checkpointed = self.groups[index]
        received, answered = index == 0 and not self.first, index == len(self.groups) - 1 and not self.last
        return self.parts.group(count, checkpointed, keep, received, answered, put_off)

    def put_off(self, index: int, keep: bool) -> list[Span]:
        """A block's backward pass in its halves. (Never with full recompute, which runs blocks again as a whole.)"""
        return self.group(index, keep, put_off=True).backward

    def put_off_loss(self, keep: bool) -> list[Span]:
        return self.parts.loss(keep, put_off=True).backward

    def sent(self, fresh: bool, before: bool = False) -> Iterator[Span]:
        """The gradient that is sent back, after a backward pass or `before` the next one. 1F1B keeps it until it has
        the next one to send, GPipe until it receives for the next pass (`fresh`: there is none before)."""
        kept = self.on_demand and fresh
        if self.receives and not kept and before == (self.on_demand == "gpipe"):
            yield moves("backward", ("backward", -self.size.residual))

    def through(self, final: bool = False) -> Iterator[Span]:
        """Once a micro-batch is through: what its stage was given and has made, and the gradient that came. GPipe and
        1F1B hold on to what they made last, of the `final` micro-batch."""
        residual = self.size.residual
        kept = final and self.on_demand
        given, made = residual * self.receives, 0 if self.last or kept else residual  # or a neighbour here lets go
        came = 0 if self.last else residual
        yield moves("backward", ("boundary", -given), ("activations.norm", -made), ("backward", -came))
