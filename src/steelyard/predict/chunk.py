"""What a stage of the model does to its rank's memory, action by action of a step.

A stage's blocks and ends are played once (predict/parts.py); here they are put together with what FSDP gathers and
takes (predict/shard.py), with what neighbours send, and with what all blocks share.
"""

from collections.abc import Iterator
from functools import cached_property

from steelyard.predict import stages
from steelyard.predict.parameters import stage_tensors
from steelyard.predict.parts import Parts
from steelyard.predict.pipeline import ON_DEMAND
from steelyard.predict.shard import Shards, Unit
from steelyard.predict.timeline import Span, chain, moves
from steelyard.spec.run import Run


class Chunk:
    """One stage on a rank. Without a pipeline it is the whole model."""

    def __init__(self, run: Run, parts: Parts, shards: Shards, rank: int, number: int):
        self.run, self.parts, self.shards, self.size = run, parts, shards, parts.size
        split, mine = stages.split(run.model, run.parallel), stages.chunks(run.parallel, rank)
        stage = mine[number]
        self.first, self.last, self.layers = stage == 0, stage == len(split) - 1, split[stage]
        # a neighbour on the same rank hands its tensors over
        self.receives = not self.first and stage - 1 not in mine
        self.answers = not self.last and stage + 1 not in mine
        # blocks as they run: how many at once, and whether they keep their input only
        again = [(len(group), True) for group in run.recompute.groups(self.layers)]
        self.groups = again + [(1, False)] * (self.layers - sum(count for count, _ in again))
        tensors = [(t.name, t.local_numel(run.parallel.tensor)) for t in stage_tensors(run.model, run.parallel, stage)]
        blocks = [numel for name, numel in tensors if name.startswith("layers.")]
        self.block = Unit(tuple(blocks[: len(blocks) // max(1, self.layers)]))
        self.ends = Unit(tuple(numel for name, numel in tensors if not name.startswith("layers.")), self._others())
        self.gathered, self.done = False, dict.fromkeys("FBIW", 0)
        alike = (self.layers, self.first, self.last, self.receives, self.answers)
        self._made = parts.made.setdefault(alike, {})
        self._received = {
            "RF": moves("forward", ("boundary", self.size.residual)),
            "RB": moves("backward", ("backward", self.size.residual)),
        }

    def _others(self) -> int:
        """Where the word table is not the head as well, DTensor keeps the embedding's gradient whole and partial until
        the last sum."""
        model, parallel = self.run.model, self.run.parallel
        apart = parallel.pipeline > 1 or not model.tied_embeddings
        whole = self.first and apart and not self.shards.each
        return (parallel.tensor - 1) * self.size.rows * model.hidden_size if whole else 0

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
            self.gathered = False
            return chain(self.reduction())
        if kind == "D":
            return self.let_go()
        fresh, bare = not self.done[kind], self.shards.on and not self.gathered
        if not (kind == "I" and self.first):  # which does nothing yet
            dropped = kind == "F" or self.run.parallel.pipeline == 1
            self.gathered = not (self.shards.regathers and dropped)
        self.done[kind] += 1
        make = {"F": self.forward, "B": self.backward, "I": self.inputs, "W": self.weights}[kind]
        if self.run.parallel.pipeline == 1:  # where a backward pass may reduce, which changes `shards`
            return chain(make(fresh, bare, reduces))
        key = (kind, fresh, bare)
        if key not in self._made:
            self._made[key] = chain(make(fresh, bare, False))
        return self._made[key]

    # --- actions: `fresh` ones find no gradients of weights, `bare` ones weights that are not gathered ----------------

    def forward(self, fresh: bool, bare: bool, reduces: bool) -> Iterator[Span]:
        shards, waiting = self.shards, self.ends
        if bare:
            yield shards.gather(self.ends)
        yield self.share()
        if self.first:
            yield self.parts.embedding(False)[0]
        for index, (count, _) in enumerate(self.groups):
            for _ in range((1 if shards.regathers else count) if bare else 0):
                yield shards.gather(self.block)
                yield shards.drop(waiting)
                waiting = self.block
            yield self.group(index, False)[0]
            if shards.regathers:  # gathered blocks of a group go one by one, those left by a backward pass together
                yield shards.gathered(-(1 if bare else count) * self.block.numel)
        if self.last:
            yield self.parts.loss(False)[0]
        if bare:
            yield shards.drop(waiting)
        if shards.regathers:
            yield shards.gathered(-self.ends.numel)
        yield moves("forward", ("masks", -self.shared[0]))

    def backward(self, fresh: bool, bare: bool, reduces: bool) -> Iterator[Span]:
        yield from self.through_blocks(fresh, bare, reduces)
        yield from self.sent(fresh)
        yield from self.through()

    def through_blocks(self, fresh: bool, bare: bool, reduces: bool) -> Iterator[Span]:
        shards, keep = self.shards, self.shards.keeps(fresh)
        if bare:
            yield shards.gather(self.ends, "backward")
            yield shards.drop(self.ends)
        if self.last:
            yield self.parts.loss(keep)[1]
        final = len(self.groups) - 1
        for index, (count, _) in reversed(list(enumerate(self.groups))):
            yield from shards.gather_backward(self.block, count, index == 0, index == final) if bare else ()
            yield self.group(index, keep)[1]
            for _ in range(count):
                yield from shards.take(self.block, fresh, reduces)
        yield moves("backward", ("masks", -self.shared[1]))
        if self.first:
            yield self.parts.embedding(keep)[1]
        yield from shards.take(self.ends, fresh, reduces)

    def inputs(self, fresh: bool, bare: bool, reduces: bool) -> Iterator[Span]:
        """The gradients of the inputs. The first stage has none, and leaves all to the second half."""
        if self.first:
            yield moves("backward")
            return
        keep = self.shards.keeps(fresh)
        if bare:
            yield self.shards.gathered(self.ends.numel + self.layers * self.block.numel, "backward")
        if self.last:
            yield self.put_off_loss(keep)[0]
        for index in reversed(range(self.layers)):
            yield self.put_off(index, keep)[0]
        yield from self.sent(fresh)

    def weights(self, fresh: bool, bare: bool, reduces: bool) -> Iterator[Span]:
        """The gradients of the weights, from the first block on, and then all that their graph has held on to."""
        if self.first:
            yield from self.through_blocks(fresh, bare, reduces)
            yield from self.through()
            return
        keep = self.shards.keeps(fresh)
        parts = [self.put_off(index, keep) for index in range(self.layers)]
        parts += [self.put_off_loss(keep)] if self.last else []
        for _, weights, _ in parts:
            yield weights
        for _, _, rest in parts:
            yield rest
        for unit in (*[self.block] * self.layers, self.ends):
            yield from self.shards.take(unit, fresh, False)
        yield moves("backward", ("masks", -self.shared[1]))
        yield from self.through()

    def reduction(self) -> Iterator[Span]:
        """In a pipeline gradients are reduced when those of all micro-batches have added up."""
        if self.run.parallel.pipeline > 1:
            for unit in (self.ends, *[self.block] * self.layers):
                yield from self.shards.take(unit, False, True, added=True)
        yield from self.shards.settle(self.ends)
        yield self.shards.reduced()

    def let_go(self) -> Span:
        """Its gathered weights go, for those of other chunks of the rank."""
        there, self.gathered = self.shards.on and self.gathered, False
        return self.shards.gathered(-(self.ends.numel + self.layers * self.block.numel) if there else 0)

    # --- their parts -------------------------------------------------------------------------------------------------

    def group(self, index: int, keep: bool, put_off: bool = False) -> list[Span]:
        count, checkpointed = self.groups[index]
        received, answered = index == 0 and not self.first, index == len(self.groups) - 1 and not self.last
        return self.parts.group(count, checkpointed, keep, received, answered, put_off)

    def put_off(self, index: int, keep: bool) -> list[Span]:
        """A block's backward pass in its halves. (Never with full recompute, which runs blocks again as a whole.)"""
        return self.group(index, keep, put_off=True)[1:]

    def put_off_loss(self, keep: bool) -> list[Span]:
        return self.parts.loss(keep, put_off=True)[1:]

    def sent(self, fresh: bool) -> Iterator[Span]:
        """The gradient that is sent back. GPipe and 1F1B keep it until they send the next one (`fresh`: there is none
        before)."""
        waits = fresh and self.run.parallel.pipeline_schedule in ON_DEMAND
        if self.receives and not waits:
            yield moves("backward", ("backward", -self.size.residual))

    def through(self) -> Iterator[Span]:
        """Once a micro-batch is through: what its stage was given and has made, and the gradient that came."""
        residual = self.size.residual
        given, made = residual * self.receives, residual * (not self.last)  # a neighbour here lets go of what it made
        yield moves("backward", ("boundary", -given), ("activations.norm", -made), ("backward", -made))
