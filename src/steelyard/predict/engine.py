"""What our own engine allocates in a step: the spans of predict/network.py in the order in which a rank runs them.

The states that stay, FSDP's gathering and reducing, and the pipeline's actions are here; what a block or the loss
allocates is there. The rehearsal (`steelyard plan --rehearse`) runs the real engine and holds this to account.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial
from math import prod

from steelyard.predict import parameters, stages
from steelyard.predict.memory import Memory, Moment, States
from steelyard.predict.network import Network, Sizes, play, reduces_each, sharded
from steelyard.predict.parameters import Tensor
from steelyard.predict.pipeline import actions
from steelyard.predict.timeline import Span, Terms, Timeline, chain, moves, span
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
    """Parameters that shard `index` keeps: FSDP cuts dimension 0 of each tensor into blocks of ceil(rows / shards)."""
    parallel = run.parallel
    shards = 1 if parallel.zero == 0 else parallel.shard
    found = 0
    for shape, count in local_shapes(run.model, parallel, pipeline_rank).items():
        block = -(-shape[0] // shards)
        found += count * max(0, min(block, shape[0] - index * block)) * prod(shape[1:])
    return found


def states(run: Run, pipeline_rank: int, index: int) -> States:
    """With FSDP the master weights and moments are shards (W and 2 W bytes a parameter); the weights the network
    computes with are gathered during a step (w P, at zero 3 unit by unit) and gradients live until the update. Without
    it the weights are their own masters."""
    wide = BYTES[run.precision.master]
    mine = shard_numel(run, pipeline_rank, index)
    if not sharded(run):
        return States(wide * mine, wide * mine, 0, 2 * wide * mine)
    return States(0, wide * mine, wide * mine, 2 * wide * mine)


# --- ranks -----------------------------------------------------------------------------------------------------------


def assumed(run: Run) -> tuple[str, ...]:
    """What was assumed where the run does not say it."""
    return ()


def ranks(run: Run, host: bool = False) -> tuple[Memory, ...]:
    """The memory of every class of equal ranks: pipeline rank outermost, then tensor rank; shards of unequal size are
    apart."""
    found: list[Memory] = []
    parts = Parts(run, host)
    for pipeline_rank in range(run.parallel.pipeline):
        shards = run.parallel.shard if sharded(run) and run.parallel.zero else 1
        classes: dict[int, tuple[int, int]] = {}
        for index in range(shards):
            numel = shard_numel(run, pipeline_rank, index)
            first, count = classes.get(numel, (index, 0))
            classes[numel] = (first, count + 1)
        for first, count in classes.values():
            copies = count * run.parallel.context * (run.parallel.data // shards)
            memory = _on_rank(run, pipeline_rank, first, copies, parts)
            found += [replace(memory, tensor=tensor) for tensor in range(run.parallel.tensor)]
    return tuple(found)


def on_rank(run: Run, pipeline_rank: int, index: int, host: bool = False) -> Memory:
    """The memory of shard `index` on one pipeline rank; `host`: with the kernels of a CPU."""
    return _on_rank(run, pipeline_rank, index, 0, Parts(run, host))


def step(run: Run, pipeline_rank: int, index: int = 0, parts: "Parts | None" = None) -> "Step":
    """The step of shard `index` on one pipeline rank; `parts`: the run's, where they have been played already."""
    held = parameters.rank_tensors(run.model, run.parallel, pipeline_rank)
    return Step(run, pipeline_rank, held, states(run, pipeline_rank, index), parts or Parts(run, False))


def _on_rank(run: Run, pipeline_rank: int, index: int, count: int, parts: "Parts") -> Memory:
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
    """One rank's step: the spans of its parts in the order in which they run."""

    def __init__(self, run: Run, pipeline_rank: int, held: tuple[Tensor, ...], state: States, parts: "Parts"):
        self.run, self.parts, self.held, self.state, self.size = run, parts, held, state, parts.size
        self.fsdp, self.sync_each = sharded(run), reduces_each(run)
        self.zero3 = self.fsdp and run.parallel.zero == 3
        self.split = stages.split(run.model, run.parallel)
        self.chunks = stages.chunks(run.parallel, pipeline_rank)
        self.rank, self.final = pipeline_rank, len(self.split) - 1
        tensor, width = run.parallel.tensor, self.size.width
        blocks = sum(t.local_numel(tensor) for t in held if t.name.startswith("layers."))
        self.block = blocks // sum(self.split[stage] for stage in self.chunks)
        self.ends = sum(t.local_numel(tensor) for t in held) - blocks
        self._reducing = 0  # bytes of the last reduction's input, which waits for the next one
        self.narrow = width != BYTES[run.precision.master]
        self.reduced = BYTES[run.precision.gradients]
        self.shards = run.parallel.shard if run.parallel.zero else 1

    # --- parts -------------------------------------------------------------------------------------------------------

    def groups(self, layers: int) -> list[tuple[int, bool]]:
        """Blocks of a stage as they run: how many at once, and whether they keep their input only."""
        rule = self.run.recompute
        if rule.mode != "full":
            return [(1, False)] * layers
        covered = layers if rule.layers == "all" else min(rule.layers, layers)
        whole = [min(rule.every, covered - first) for first in range(0, covered, rule.every)]
        return [(count, True) for count in whole] + [(1, False)] * (layers - covered)

    def masks(self) -> int:
        """What all blocks of a micro-batch share: ALiBi's biases for all heads, the mask of documents."""
        model, pairs = self.run.model, self.run.model.seq_length**2
        alibi = model.num_attention_heads * pairs * self.size.width if model.position == "alibi" else 0
        return alibi + (self.run.batch.micro_batch_size * pairs if self.run.data.reset_attention else 0)

    @property
    def masks_stay(self) -> bool:
        """Whether a block that is run again holds on to them."""
        rule = self.run.recompute
        return rule.mode == "full" or (rule.mode == "selective" and "attention" in rule.modules)

    def _keeps(self, first: bool) -> bool:
        """Whether gradients of weights stay where they are made: the first, and those FSDP takes at the unit's end."""
        taken = self.fsdp and (self.sync_each or self.size.width != self.reduced)
        return first or taken

    @property
    def _largest(self) -> int:
        """Parameters of a block's largest tensor."""
        model = self.run.model
        columns = max(model.ffn_hidden_size, model.query_width + 2 * model.key_value_width)
        return model.hidden_size * columns // self.run.parallel.tensor

    @property
    def others(self) -> int:
        """Rows of the word table that are not this tensor rank's and whose gradient it holds all the same: where the
        table is not the head as well, DTensor keeps the embedding's gradient whole and partial until the last sum."""
        apart = self.run.parallel.pipeline > 1 or not self.run.model.tied_embeddings
        rows = (self.run.parallel.tensor - 1) * self.size.rows * self.run.model.hidden_size
        return rows if apart and 0 in self.chunks and not self.sync_each else 0

    def steady(self) -> Terms:
        """What is there while micro-batches run: the batch, in a pipeline a second time, joined. A token has 21 bytes:
        its id and label (int64), whether it counts (bool), and its sample's number and mask."""
        copies = self.run.batch.accumulation * (2 if self.run.parallel.pipeline > 1 else 1)
        return {"batch": (21 + self.size.wide) * self.size.tokens * copies}

    def line(self) -> Timeline:
        """The step up to the optimizer. It ends with the gradients, the batch, and in a pipeline what was sent last."""
        line = Timeline()
        line.add(span("forward", self.steady()))
        if self.run.parallel.pipeline == 1:
            self._alone(line)
        else:
            self._pipeline(line)
        return line

    def moments(self) -> dict[str, Terms]:
        found = self.line().moments()
        found["optimizer"] = {"gradients": self.state.gradients}
        return found

    # --- FSDP --------------------------------------------------------------------------------------------------------

    def gather(self, numel: int, name: str = "forward") -> Span:
        """A unit's weights in the compute dtype: sent (where masters are wider, after a cast), received, copied out."""
        return chain((self.received(numel, name), moves(name, ("gathered", numel * self.size.width))))

    def received(self, numel: int, name: str = "forward") -> Span:
        """The received part alone, before it is copied out. A single shard is not sent."""
        if self.shards == 1:
            return moves(name)
        whole, cast = numel * self.size.width, numel * self.size.width // self.shards if self.narrow else 0
        return moves(name, ("communication", cast), ("communication", whole), ("communication", -cast))

    def drop(self, numel: int) -> Span:
        """What was received, once it is copied out."""
        return moves("forward", ("communication", -numel * self.size.width if self.shards > 1 else 0))

    def gather_backward(self, groups: list[tuple[int, bool]], index: int) -> Iterator[Span]:
        """The weights of a group of blocks before its backward pass, and of the block before it, which is received
        ahead (and of a group copied out, when its blocks run again)."""
        if index == len(groups) - 1:
            yield self.received(self.block, "backward")
        yield moves("backward", ("gathered", self.block * self.size.width))
        yield self.drop(self.block)
        yield moves("backward", ("gathered", (groups[index][0] - 1) * self.block * self.size.width))
        if index:
            yield self.received(self.block, "backward")

    def take(self, numel: int, number: int, last: bool, extra: int = 0, added: bool = False) -> list[Span]:
        """FSDP takes a unit's gradients after its backward pass in micro-batch `number`: adds them to those in the
        dtype of gradients, or reduces them to shards. The last reduction's input waits for the next one. `extra`: rows
        of other ranks whose gradients it has as well; `added`: the last micro-batch's have been added already."""
        narrow, wide = (numel + extra) * self.size.width, (numel + extra) * self.reduced
        casts, sync = narrow != wide, last or self.sync_each
        found = []
        before = number > 0 and not self.sync_each  # there are gradients to be added to
        if casts and before and not added:
            found.append(moves("reduction", ("gradients", -narrow)))
        if not sync:
            if casts and not before:
                largest = self._largest if numel == self.block else numel + extra
                held = largest * self.size.width  # the cast of one tensor, beside what it is cast from
                found.append(
                    moves("reduction", ("gradients", wide - narrow), ("gradients", held), ("gradients", -held))
                )
            return found
        if last or self.run.parallel.zero == 3:
            found.append(moves("reduction", ("gathered", -numel * self.size.width)))
        source, wide = wide if before else narrow, numel * self.reduced
        shard = wide // self.shards
        again = [("gradients", -shard)] if self.sync_each and number else []
        divided = [("communication", wide), ("communication", -wide)] if self.shards == 1 else []
        found.append(moves("reduction", ("communication", -self._reducing), ("communication", wide),
                           ("gradients", -source), ("gradients", shard), *divided, *again))  # fmt: skip
        self._reducing = wide
        return found

    def reduced_all(self) -> Span:
        """The last reduction is through."""
        waited, self._reducing = self._reducing, 0
        return moves("reduction", ("communication", -waited))

    # --- without a pipeline ------------------------------------------------------------------------------------------

    def _alone(self, line: Timeline) -> None:
        """Three micro-batches stand for all: the first, one between, the last."""
        count = min(self.run.batch.accumulation, 3)
        for number in range(count):
            self._forward(line, number)
            self._backward(line, number, number == count - 1)
        line.add(self.reduced_all())

    def _forward(self, line: Timeline, number: int) -> None:
        gathers = self.fsdp and (number == 0 or self.zero3)
        parts, keep = self.parts, self._keeps(number == 0)
        if gathers:
            line.add(self.gather(self.ends))
        waiting = self.ends
        line.add(moves("forward", ("masks", self.masks())))
        line.add(parts.embedding(keep)[0])
        for count, checkpointed in self.groups(sum(self.split)):
            if gathers:
                for _ in range(1 if self.zero3 else count):
                    line.add(self.gather(self.block))
                    line.add(self.drop(waiting))
                    waiting = self.block
            line.add(parts.group(count, checkpointed, keep)[0])
            if self.zero3:
                line.add(moves("forward", ("gathered", -self.block * self.size.width)))
        line.add(parts.loss(keep)[0])
        if gathers:
            line.add(self.drop(waiting))
        if not self.masks_stay:
            line.add(moves("forward", ("masks", -self.masks())))

    def _backward(self, line: Timeline, number: int, last: bool) -> None:
        zero3 = self.zero3
        parts, keep, width = self.parts, self._keeps(number == 0), self.size.width
        if zero3:
            line.add(moves("backward", ("gathered", -self.ends * width)))
            line.add(self.gather(self.ends, "backward"))
            line.add(self.drop(self.ends))
        line.add(parts.loss(keep)[1])
        groups = self.groups(sum(self.split))
        for index, (count, checkpointed) in reversed(list(enumerate(groups))):
            for one in self.gather_backward(groups, index) if zero3 else ():
                line.add(one)
            line.add(parts.group(count, checkpointed, keep)[1])
            if self.fsdp:
                for _ in range(count):
                    for one in self.take(self.block, number, last):
                        line.add(one)
        if self.masks_stay:
            line.add(moves("backward", ("masks", -self.masks())))
        line.add(parts.embedding(keep)[1])
        if self.fsdp:
            for one in self.take(self.ends, number, last, self.others):
                line.add(one)

    # --- in a pipeline -----------------------------------------------------------------------------------------------

    def _pipeline(self, line: Timeline) -> None:
        """The schedule's actions in order, where FSDP reduces the gradients of a stage once they are whole."""
        chunks = [Chunk(self, number) for number in range(len(self.chunks))]
        for kind, number in actions(self.run.parallel, self.run.batch.accumulation)[self.rank]:
            for one in chunks[number].reduction() if kind == "R" else (chunks[number].play(kind),):
                line.add(one)


class Chunk:
    """One stage of a pipeline rank: what each kind of action does to memory."""

    def __init__(self, step: Step, number: int):
        self.step, self.number, self.stage = step, number, step.chunks[number]
        self.layers, self.size = step.split[self.stage], step.size
        self.first, self.last = self.stage == 0, self.stage == step.final
        # a neighbour on the same rank hands its tensors over
        self.receives = not self.first and self.stage - 1 not in step.chunks
        self.answers = not self.last and self.stage + 1 not in step.chunks
        self.ends = sum(
            t.local_numel(step.run.parallel.tensor) for t in step.held
            if (self.first and t.name.startswith("embedding.")) or (self.last and t.name.startswith(("norm.", "head.")))
        )  # fmt: skip
        self.others = step.others if self.first else 0
        self.gathered = self.backward_done = self.weights_done = False
        self._made: dict[tuple[str, bool, bool], Span] = {}

    def play(self, kind: str) -> Span:
        """An action; `fresh` ones find no gradients of weights, `bare` ones weights that are not gathered."""
        if kind == "RF":
            return moves("forward", ("boundary", self.size.residual))
        if kind == "RB":
            return moves("backward", ("backward", self.size.residual))
        fresh = {"F": False, "B": not self.backward_done, "I": not self.backward_done, "W": not self.weights_done}[kind]
        bare = self.step.fsdp and not self.gathered
        if not (kind == "I" and self.first):  # which does nothing yet
            self.gathered = not (kind == "F" and self.step.zero3)
        self.backward_done = self.backward_done or kind in "BI"
        self.weights_done = self.weights_done or kind == "W"
        if (kind, fresh, bare) not in self._made:
            make = {"F": self.forward, "B": self.backward, "I": self.inputs, "W": self.weights}[kind]
            self._made[kind, fresh, bare] = chain(make(fresh, bare))
        return self._made[kind, fresh, bare]

    def forward(self, fresh: bool, bare: bool) -> Iterator[Span]:
        step, zero3 = self.step, self.step.zero3
        waiting = self.ends
        if bare:
            yield step.gather(self.ends)
        yield moves("forward", ("masks", step.masks()))
        if self.first:
            yield step.parts.embedding(False)[0]
        for index, (count, _) in enumerate(step.groups(self.layers)):
            if bare:
                for _ in range(1 if zero3 else count):
                    yield step.gather(step.block)
                    yield step.drop(waiting)
                    waiting = step.block
            yield self.group(index, False)[0]
            if zero3:
                yield moves("forward", ("gathered", -step.block * self.size.width))
        if self.last:
            yield step.parts.loss(False)[0]
        if bare:
            yield step.drop(waiting)
        if zero3:
            yield moves("forward", ("gathered", -self.ends * self.size.width))
        if not step.masks_stay:
            yield moves("forward", ("masks", -step.masks()))

    def backward(self, fresh: bool, bare: bool) -> Iterator[Span]:
        yield from self.through_blocks(fresh, bare)
        yield from self.sent(fresh)
        yield from self.through()

    def through_blocks(self, fresh: bool, bare: bool) -> Iterator[Span]:
        step, keep = self.step, self.step._keeps(fresh)
        if bare:
            yield step.gather(self.ends, "backward")
            yield step.drop(self.ends)
        if self.last:
            yield step.parts.loss(keep)[1]
        groups = step.groups(self.layers)
        for index, (count, _) in reversed(list(enumerate(groups))):
            yield from step.gather_backward(groups, index) if bare else ()
            yield self.group(index, keep)[1]
            if step.fsdp:
                for _ in range(count):
                    yield from step.take(step.block, 0 if fresh else 1, False)
        if step.masks_stay:
            yield moves("backward", ("masks", -step.masks()))
        if self.first:
            yield step.parts.embedding(keep)[1]
        if step.fsdp:
            yield from step.take(self.ends, 0 if fresh else 1, False, self.others)

    def reduction(self) -> Iterator[Span]:
        """The gradients of all micro-batches, which have added up."""
        for numel, extra in ((self.ends, self.others), *[(self.step.block, 0)] * self.layers) if self.step.fsdp else ():
            yield from self.step.take(numel, 1, True, extra, added=True)
        yield self.step.reduced_all()

    def group(self, index: int, keep: bool) -> list[Span]:
        groups = self.step.groups(self.layers)
        count, checkpointed = groups[index]
        received, answered = index == 0 and not self.first, index == len(groups) - 1 and not self.last
        return self.step.parts.group(count, checkpointed, keep, received, answered)

    def sent(self, fresh: bool) -> Iterator[Span]:
        """The gradient that is sent back waits until the next one is (`fresh`: there is none before)."""
        if self.receives and not (fresh and self.number == 0):
            yield moves("backward", ("backward", -self.size.residual))

    def through(self) -> Iterator[Span]:
        """Once a micro-batch is through: what its stage was given and has made, and the gradient that came."""
        residual = self.size.residual
        given, made = residual * self.receives, residual * (not self.last)  # a neighbour here lets go of what it made
        came = made
        yield moves("backward", ("boundary", -given), ("activations.norm", -made), ("backward", -came))

    # --- zero bubble -------------------------------------------------------------------------------------------------

    def inputs(self, fresh: bool, bare: bool) -> Iterator[Span]:
        """The gradients of the inputs. The first stage has none, and leaves all to the second half."""
        step, keep = self.step, self.step._keeps(fresh)
        if self.first:
            return
        if bare:
            yield moves("backward", ("gathered", (self.ends + self.layers * step.block) * self.size.width))
        if self.last:
            yield step.parts.put_off_loss(keep)[0]
        for index in reversed(range(self.layers)):
            yield self.put_off(index, keep)[0]
        yield from self.sent(fresh)

    def weights(self, fresh: bool, bare: bool) -> Iterator[Span]:
        """The gradients of the weights, from the first block on, and all that their graph has held on to."""
        step, keep = self.step, self.step._keeps(fresh)
        if self.first:
            yield from self.through_blocks(fresh, bare)
        else:
            parts = [self.put_off(index, keep) for index in range(self.layers)]
            parts += [step.parts.put_off_loss(keep)] if self.last else []
            for _, weights, _ in parts:
                yield weights
            for _, _, rest in parts:
                yield rest
            for _ in range(self.layers if step.fsdp else 0):
                yield from step.take(step.block, 0 if fresh else 1, False)
            if step.masks_stay:
                yield moves("backward", ("masks", -step.masks()))
            if step.fsdp:
                yield from step.take(self.ends, 0 if fresh else 1, False, self.others)
        yield from self.through()

    def put_off(self, index: int, keep: bool) -> list[Span]:
        """A block's backward pass in its halves. (Never with full recompute, which runs blocks again as a whole.)"""
        return self.step.parts.put_off(keep, index == 0, index == self.layers - 1 and not self.last)


class Parts:
    """The spans of a run's parts, each played once."""

    def __init__(self, run: Run, host: bool):
        self._run, self._host, self.size = run, host, Sizes.of(run, host)
        self._played: dict[tuple[object, ...], list[Span]] = {}

    def embedding(self, keep: bool) -> list[Span]:
        if ("embedding", keep) not in self._played:
            net = Network(self._run, self._host, keep)
            self._played["embedding", keep] = play("embedding", net, net.embedding)
        return self._played["embedding", keep]

    def loss(self, keep: bool) -> list[Span]:
        return self._loss(keep, False)

    def put_off_loss(self, keep: bool) -> list[Span]:
        """The backward pass in its halves, and what goes after them."""
        return self._loss(keep, True)[1:]

    def _loss(self, keep: bool, put_off: bool) -> list[Span]:
        if ("loss", keep, put_off) not in self._played:
            net = Network(self._run, self._host, keep)
            self._played["loss", keep, put_off] = play(
                "loss", net, net.loss, "activations.norm", put_off=put_off, last=True
            )
        return self._played["loss", keep, put_off]

    def group(
        self, count: int, checkpointed: bool, keep: bool, received: bool = False, answered: bool = False
    ) -> list[Span]:
        """`received`, `answered`: at the beginning or the end of a pipeline stage, whose schedule holds on to the input
        or to the result's gradient."""
        return self._group(count, checkpointed, keep, received, answered, False)

    def put_off(self, keep: bool, received: bool, answered: bool) -> list[Span]:
        """A block's backward pass in its halves, and what goes after them."""
        return self._group(1, False, keep, received, answered, True)[1:]

    def _group(
        self, count: int, checkpointed: bool, keep: bool, received: bool, answered: bool, put_off: bool
    ) -> list[Span]:
        key = (count, checkpointed, keep, received, answered, put_off)
        if key not in self._played:
            net = Network(self._run, self._host, keep)
            run, term = partial(net.group, count, checkpointed), "boundary" if received else "activations.norm"
            self._played[key] = play("block", net, run, term, (received, answered), put_off, answered)
        return self._played[key]
