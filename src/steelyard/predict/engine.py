"""What our own engine allocates: the terms of predict/memory.py, tensor by tensor.

Symbols: T tokens of a micro-batch, h hidden, q and k the widths of queries and of keys, f ffn, a heads (each on this
tensor rank), s sequence, w bytes of the compute dtype, W bytes of the master dtype, P parameters on this tensor rank.
The rehearsal (`steelyard plan --rehearse`) runs the real engine and holds these formulas to account.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from steelyard.predict import parameters, stages
from steelyard.predict.memory import Memory, Moment, States, times, total
from steelyard.predict.parameters import Tensor
from steelyard.spec.model import Model
from steelyard.spec.parallel import Parallel
from steelyard.spec.precision import BYTES
from steelyard.spec.run import Run

NAME = "steelyard"
LOSS_CHUNK = 2**24  # elements of a chunk of logits: model/loss.py


def sharded(run: Run) -> bool:
    """Whether FSDP holds the weights: not where one data rank computes in its master dtype (parallel/shard.py)."""
    precision = run.precision
    return run.parallel.data > 1 or not precision.compute == precision.gradients == precision.master


@dataclass(frozen=True)
class Sizes:
    """Bytes of one micro-batch's tensors on one rank: a whole hidden state, one between the halves of a block (cut by
    sequence parallelism), and this rank's columns of queries, keys and the MLP."""

    tokens: int
    width: int
    wide: int
    hidden: int
    residual: int
    residual_tokens: int
    query: int
    key: int
    ffn: int
    heads: int
    rows: int
    host: bool


def sizes(run: Run, host: bool = False) -> Sizes:
    model, parallel = run.model, run.parallel
    tokens = run.batch.micro_batch_size * model.seq_length // parallel.context
    width, tensor = BYTES[run.precision.compute], parallel.tensor
    cut = tensor if parallel.sequence else 1
    return Sizes(
        tokens=tokens,
        width=width,
        wide=8 if width == 8 else 4,
        hidden=tokens * model.hidden_size * width,
        residual=tokens * model.hidden_size * width // cut,
        residual_tokens=tokens // cut,
        query=tokens * model.query_width * width // tensor,
        key=tokens * model.key_value_width * width // tensor,
        ffn=tokens * model.ffn_hidden_size * width // tensor,
        heads=model.num_attention_heads // tensor,
        rows=model.padded_vocab_size(tensor) // tensor,
        host=host,
    )


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


# --- activations -----------------------------------------------------------------------------------------------------


def block(run: Run, size: Sizes) -> dict[str, int]:
    """What one block keeps for its backward pass.

    norm: two inputs and two outputs (with sequence parallelism inputs are cut and the gathered outputs whole), their
    statistics. attention: the query-key-value product, context, log-sum-exp; rotated queries and keys stand beside the
    product, whose values are still needed; so do normed ones. scores: only with attention dropout, which takes the math
    path (softmax in the wide dtype, mask, dropped weights; copies of queries, and of a key and value for each), or
    a mask per block. mlp: up, activation and, gated, the
    gate and the product; ReLU keeps its result only.
    """
    model = run.model
    statistics = size.residual_tokens * 2 * (4 if size.width < 8 else 8)
    rotated = (model.position == "rotary") + model.qk_norm
    attention = 2 * size.query + 2 * size.key + rotated * (size.query + size.key)
    if rotated and size.host:
        attention += size.query  # the context lies as the query does, and a copy of it goes to the output product
    scores = 0
    pairs = run.batch.micro_batch_size * size.heads * model.seq_length**2
    if model.attention_dropout:
        scores = pairs * (size.wide + 1 + size.width)
        attention = 4 * size.query + model.qk_norm * (size.query + size.key)
    else:
        attention += size.tokens * size.heads * size.wide
        if model.position == "alibi":
            scores = size.heads * model.seq_length**2 * size.width
        elif run.data.reset_attention:
            scores = run.batch.micro_batch_size * model.seq_length**2 * size.width
    inner = {"relu": 1, "relu2": 2}.get(model.activation, 4 if model.gated else 2)
    return {
        "activations.norm": 2 * norm_inputs(run, size) + 2 * size.hidden + 2 * statistics,
        "activations.attention": attention,
        "activations.scores": scores,
        "activations.mlp": inner * size.ffn,
        "activations.dropout": 2 * size.residual_tokens * model.hidden_size if model.hidden_dropout else 0,
    }


def norm_inputs(run: Run, size: Sizes) -> int:
    """What one norm keeps besides its output: its input. On a CPU, RMSNorm comes apart into operations that keep the
    input and its normalised form in the wide dtype instead."""
    if run.model.norm == "rmsnorm" and size.host:
        return 2 * size.residual * size.wide // size.width
    return size.residual


def kept(run: Run, size: Sizes) -> dict[str, int]:
    """What a block keeps with selective recompute: `attention` drops scores and log-sum-exp, `mlp` everything but its
    input. A norm's output is the input of the product after it and stays."""
    found = block(run, size)
    if run.recompute.mode == "selective":
        if "attention" in run.recompute.modules:
            found["activations.scores"] = 0
            rotated = size.query + size.key if run.model.position == "rotary" or run.model.qk_norm else 0
            found["activations.attention"] = 2 * size.query + 2 * size.key + rotated
        if "mlp" in run.recompute.modules:
            found["activations.mlp"] = 0
    return found


def blocks(run: Run, size: Sizes, layers: int) -> dict[str, int]:
    """One micro-batch on `layers` blocks of a stage, as kept until its backward pass. Full recompute keeps the input of
    each group of `every` blocks, cut over the tensor ranks with `shard`."""
    rule = run.recompute
    if rule.mode != "full":
        return times(kept(run, size), layers)
    covered = layers if rule.layers == "all" else min(rule.layers, layers)
    cut = run.parallel.tensor if rule.shard and not run.parallel.sequence else 1
    inputs = -(-covered // rule.every) * size.residual // cut
    return total([{"activations.inputs": inputs}, times(block(run, size), layers - covered)])


def again(run: Run, size: Sizes, layers: int) -> int:
    """What recompute makes a second time at once: a whole group of blocks, or the named parts of one block."""
    if run.recompute.mode == "full":
        return sum(block(run, size).values()) * min(run.recompute.every, layers) - size.residual
    return sum(block(run, size).values()) - sum(kept(run, size).values())


# --- the moments of a step -------------------------------------------------------------------------------------------


def loss(run: Run, size: Sizes) -> dict[str, int]:
    """The chunked loss at its widest (model/loss.py): the buffer of a chunk's logits and, where they are narrow, their
    wide copy and the product added to the head's gradient; the gradients of the hidden states (T h w) and of the head
    (rows x h, wide). The final norm's input and output are alive too.
    """
    chunk = min(size.tokens, max(1, LOSS_CHUNK // size.rows)) * size.rows
    head = size.rows * run.model.hidden_size
    narrow = 0 if size.width == size.wide else size.width
    return {
        "activations.norm": norm_inputs(run, size) + size.hidden,
        "logits": (size.wide + narrow) * chunk + narrow * head,
        "loss.gradients": size.hidden + head * size.wide,
    }


def embedding(run: Run, size: Sizes) -> dict[str, int]:
    """What the embedding keeps of a micro-batch: its dropout mask."""
    mask = size.residual_tokens * run.model.hidden_size if run.model.hidden_dropout else 0
    return {"activations.embedding": mask}


def masks(run: Run, size: Sizes) -> dict[str, int]:
    """What a micro-batch's blocks share: ALiBi's biases for all heads, or the mask of documents."""
    pairs = run.model.seq_length**2
    if run.model.position == "alibi":
        return {"masks": run.model.num_attention_heads * pairs * size.width + pairs}
    return {"masks": run.batch.micro_batch_size * pairs if run.data.reset_attention else 0}


def assumed(run: Run) -> tuple[str, ...]:
    """What was assumed where the run does not say it."""
    return ()


def ranks(run: Run, host: bool = False) -> tuple[Memory, ...]:
    """The memory of every class of equal ranks: pipeline rank outermost, then tensor rank; shards of unequal size are
    apart."""
    found: list[Memory] = []
    for pipeline_rank in range(run.parallel.pipeline):
        shards = run.parallel.shard if sharded(run) and run.parallel.zero else 1
        classes: dict[int, tuple[int, int]] = {}
        for index in range(shards):
            numel = shard_numel(run, pipeline_rank, index)
            first, count = classes.get(numel, (index, 0))
            classes[numel] = (first, count + 1)
        for first, count in classes.values():
            copies = count * run.parallel.context * (run.parallel.data // shards)
            memory = on_rank(run, pipeline_rank, first, host, count=copies)
            found += [replace(memory, tensor=tensor) for tensor in range(run.parallel.tensor)]
    return tuple(found)


def on_rank(run: Run, pipeline_rank: int, index: int, host: bool = False, tensor: int = 0, count: int = 0) -> Memory:
    """The memory of shard `index` on one pipeline rank; `host`: with the kernels of a CPU."""
    held = parameters.rank_tensors(run.model, run.parallel, pipeline_rank)
    state = states(run, pipeline_rank, index)
    step = Step(run, pipeline_rank, held, state, host)
    between = States(state.weights, 0, state.master, state.optimizer)  # gradients are a term: they come and go
    moments = tuple(_moment(name, between, terms) for name, terms in step.moments().items())
    return Memory(pipeline_rank, tensor, count, moments, {}, between, state.optimizer)


def _moment(name: str, between: States, terms: dict[str, int]) -> Moment:
    """Gathered weights and gradients are states while they are there."""
    states_then = replace(
        between, weights=between.weights + terms.pop("gathered", 0), gradients=terms.pop("gradients", 0)
    )
    return Moment(name, states_then, terms)


def in_flight(run: Run, pipeline_rank: int) -> tuple[int, ...]:
    """Micro-batches whose backward pass is still to come, at most, on each model chunk of a pipeline rank.

    p ranks, v chunks, m micro-batches. GPipe: m. 1F1B: min(m, p - rank). Interleaved:
    2 (p - rank - 1) + (v - 1) m / rounds warm-up passes and one more, spread over the chunks; with zero bubble p - 1
    for the first term, `rank` of them waiting for their weight gradients. ZBV: 2 p - rank - 1 on the way
    there, rank + 1 on the way back.
    Source: torch.distributed.pipelining.schedules.
    """
    parallel, micro = run.parallel, run.batch.accumulation
    ranks, behind = parallel.pipeline, parallel.pipeline - pipeline_rank - 1
    if ranks == 1:
        return (1,)
    if parallel.pipeline_schedule == "gpipe":
        return (micro,)
    if parallel.pipeline_schedule == "1f1b":
        return (min(micro, behind + 1),)
    if parallel.pipeline_schedule == "zbv":
        return min(micro, 2 * ranks - pipeline_rank - 1), min(micro, pipeline_rank + 1)
    per_round = micro // max(1, micro // ranks)
    warmup = behind + pipeline_rank if parallel.pipeline_schedule == "zero_bubble" else 2 * behind
    passes = warmup + (parallel.virtual - 1) * per_round + 1
    counts, left = [], min(passes, micro * parallel.virtual)
    for chunk in range(parallel.virtual):
        # the first chunks run a round ahead; what is left over falls on them as well
        share = min(left, max(per_round, passes - per_round * (parallel.virtual - 1 - chunk)), micro)
        counts.append(share)
        left -= share
    return tuple(counts)


class Step:
    """The moments of one rank's step, each as the terms beside weights, masters and moments."""

    def __init__(self, run: Run, pipeline_rank: int, held: tuple[Tensor, ...], state: States, host: bool):
        self.run, self.size, self.state = run, sizes(run, host), state
        self.fsdp, self.pipeline_rank = sharded(run), pipeline_rank
        self.numel = sum(t.local_numel(run.parallel.tensor) for t in held)
        self.root = sum(t.local_numel(run.parallel.tensor) for t in held if not t.name.startswith("layers."))
        split = stages.split(run.model, run.parallel)
        self.chunks = stages.chunks(run.parallel, pipeline_rank)
        self.layers = [split[stage] for stage in self.chunks]
        self.block = (self.numel - self.root) // sum(self.layers)
        self.passes = in_flight(run, pipeline_rank)
        self.final = len(split) - 1
        self.last = self.final in self.chunks
        self.reduced = BYTES[run.precision.gradients]

    def moments(self) -> dict[str, dict[str, int]]:
        found = {"end of backward": self.end(), "optimizer": self.optimizer()}
        for name, done in self.rounds():
            common = self.common(done)
            found[f"{name}backward"] = total([common, self.backward()])
            if self.partial_rows() or (self.fsdp and self.run.parallel.pipeline > 1 and 0 in self.chunks):
                found[f"{name}embedding"] = total([self.common(done, True), self.embedding_backward()])
            if self.fsdp and self.run.parallel.pipeline == 1:
                found[f"{name}reduction"] = total([common, self.reduction()])
            if self.last and not (self.gpipe and done):  # GPipe: all losses come before the first backward pass
                parts = [common, self.gathered(0), self.lingering(), self.waiting(done or 0), loss(self.run, self.size)]
                found[f"{name}loss"] = total(parts)
            if self.run.model.attention_dropout or self.run.model.hidden_dropout:
                found[f"{name}dropout"] = total([common, self.dropout()])
        if self.last and self.gpipe and self.fsdp:
            head = {"backward": self.size.width * self.root}  # the first of them, before it is added to the others
            found["first gradients"] = total([self.common(1), self.gathered(0), self.waiting(0), head])
        return found

    @property
    def gpipe(self) -> bool:
        return self.run.parallel.pipeline > 1 and self.run.parallel.pipeline_schedule == "gpipe"

    def rounds(self) -> tuple[tuple[str, int | None], ...]:
        """Gradients wait beside all that can be in flight only where more micro-batches come than that; otherwise they
        do beside one less."""
        if sum(self.passes) < self.run.batch.accumulation * len(self.chunks):
            return (("", None),)
        return (("", 0),) if self.run.parallel.pipeline == 1 else (("first ", 0), ("", 1))

    @property
    def whole_gradients(self) -> bool:
        """Whether gradients accumulate unsharded: without FSDP, below zero 2, and always in a pipeline."""
        return not self.fsdp or self.run.parallel.zero < 2 or self.run.parallel.pipeline > 1

    def gathered(self, units: int) -> dict[str, int]:
        """Weights gathered in the compute dtype: all of them, or at zero 3 the stage's ends and `units` blocks."""
        if not self.fsdp:
            return {}
        if self.run.parallel.zero == 3:
            return {"gathered": self.size.width * (self.root + units * self.block)}
        return {"gathered": self.size.width * self.numel}

    def boundary(self, done: int) -> dict[str, int]:
        """What the schedule has received and holds: a hidden state for each micro-batch in flight on every chunk but
        the first, one gradient on every chunk but the last; with zero bubble also those that wait for their weight
        gradients, and what a chunk has sent back for them."""
        if self.run.parallel.pipeline == 1:
            return {}
        waiting = min(self.pipeline_rank, self.run.batch.accumulation) if self.zero_bubble else 0
        held = 0
        for stage, most in zip(self.chunks, self.passes, strict=True):
            held += (stage > 0 and stage - 1 not in self.chunks) * (max(0, most - done) + waiting)
            held += (stage < self.final and stage + 1 not in self.chunks) * (1 + waiting)
        return {"boundary": held * self.size.residual}

    def kept(self, done: int) -> dict[str, int]:
        """Activations of all micro-batches in flight but `done`. In a pipeline a chunk's input is the schedule's
        buffer, and its output waits for its gradient."""
        run, size = self.run, self.size
        parts = []
        for stage, layers, most in zip(self.chunks, self.layers, self.passes, strict=True):
            passes = max(0, most - done)
            parts.append(times(blocks(run, size, layers), passes))
            parts.append(times(masks(run, size), passes))
            if stage == 0:
                parts.append(times(embedding(run, size), passes))
            if run.parallel.pipeline > 1:
                parts.append({"activations.norm": ((stage < self.final) - (stage > 0)) * passes * size.residual})
        return total(parts)

    def common(self, done: int | None, accumulated: bool = False) -> dict[str, int]:
        """What is alive while micro-batches are in flight: activations, accumulated gradients, the batch itself (in a
        pipeline a second time, joined). `done`: of as many micro-batches as can be in flight, how many are through;
        None where more come, so that the gradients of earlier ones stand beside a full pipeline; `accumulated`: those
        of this one do already."""
        gradients = self.reduced * (self.numel + self.partial_rows()) if self.whole_gradients else self.state.gradients
        copies = self.run.batch.accumulation * (2 if self.run.parallel.pipeline > 1 else 1)
        return total([
            self.kept(done or 0),
            self.boundary(done or 0),
            self.held_back(),
            {"gradients": 0 if done == 0 and not accumulated else gradients},
            {"batch": (21 + self.size.wide) * self.size.tokens * copies},
        ])  # fmt: skip

    @property
    def zero_bubble(self) -> bool:
        parallel = self.run.parallel
        return parallel.pipeline > 1 and parallel.pipeline_schedule in ("zero_bubble", "zbv")

    def held_back(self) -> dict[str, int]:
        """Zero bubble: where weight gradients are put off, the gradients they come from wait: of each block the MLP's
        inner one, those of queries, keys and values, and two hidden states. As many passes wait as ranks stand
        before."""
        if not self.zero_bubble:
            return {}
        size = self.size
        inner = size.ffn * (2 if self.run.model.gated else 1)
        one = inner + size.query + 2 * size.key + 2 * size.hidden
        passes = min(self.pipeline_rank, self.run.batch.accumulation)
        return {"held back": passes * max(self.layers) * one}

    def waiting(self, done: int) -> dict[str, int]:
        """Gradients of hidden states and head that earlier losses have made and whose backward pass is to come."""
        head = self.size.rows * self.run.model.hidden_size * self.size.width
        before = max(0, self.passes[self.chunks.index(self.final)] - done - 1)
        return {"loss.gradients": before * (self.size.hidden + head)}

    def partial_rows(self) -> int:
        """Rows of the word table that are not this tensor rank's and whose gradient it holds all the same: where the
        table is not the head as well, DTensor keeps the embedding's gradient whole and partial until the last sum."""
        apart = self.final > 0 or not self.run.model.tied_embeddings
        others = self.run.parallel.tensor - 1
        return others * self.size.rows * self.run.model.hidden_size if apart and 0 in self.chunks else 0

    def embedding_backward(self) -> dict[str, int]:
        """The end of a micro-batch's backward pass on the first stage: its blocks are through, and the gradient of the
        whole word table stands in the compute dtype before it is added to the others."""
        run, size = self.run, self.size
        through = {name: -value for name, value in blocks(run, size, self.layers[0]).items()}
        table = run.parallel.tensor * size.rows * run.model.hidden_size * size.width
        return total([through, self.gathered(0), {"backward": table + size.hidden}])

    def lingering(self) -> dict[str, int]:
        """What FSDP's collectives leave until the next one: the last block's gather, unless an earlier micro-batch did
        all of them, and the last reduction's input."""
        run, micro = self.run, self.run.batch.accumulation
        if not self.fsdp or run.parallel.pipeline > 1:
            return {}
        gather = (run.parallel.zero == 3 or micro == 1) * self.size.width * self.block
        return {"communication": gather + (not self.whole_gradients and micro > 1) * self.reduced * self.root}

    def backward(self) -> dict[str, int]:
        """The last block's backward pass: everything is still kept, and the gradients of a hidden state, of the MLP's
        inner ones and of one weight exist; with attention dropout, those of its score matrices."""
        run, size = self.run, self.size
        inner = size.ffn * (2 if run.model.gated else 1)
        if run.model.attention_dropout:
            pairs = run.batch.micro_batch_size * size.heads * run.model.seq_length**2
            inner = max(inner, pairs * (size.wide + 2 * size.width))
        weight = run.model.hidden_size * run.model.ffn_hidden_size // run.parallel.tensor * size.width
        head = self.root * size.width if self.last and self.fsdp else 0
        return total([
            self.gathered(2),
            {"recomputed": again(run, size, max(self.layers))},
            {"backward": size.hidden + inner + weight, "loss.gradients": head},
        ])  # fmt: skip

    def reduction(self) -> dict[str, int]:
        """FSDP reduces the first block that is through: its activations are gone, and its gradients lie in a buffer of
        the reduction's dtype. With one micro-batch they are still there in the compute dtype, which takes the place of
        its weights. At zero 3 another block is gathered, and one has its shard already."""
        run, size = self.run, self.size
        full = run.recompute.mode == "full"
        one = {} if full else {name: -value for name, value in kept(run, size).items()}
        shards = run.parallel.shard if run.parallel.zero else 1
        sharded_one = self.reduced * self.block // shards if run.parallel.zero == 3 else 0
        freed = size.width * self.block if run.batch.accumulation > 1 and self.whole_gradients else 0
        return total([
            one, self.gathered(2), {"gathered": -freed}, self.lingering(),
            {"communication": self.reduced * self.block, "gradients": sharded_one, "backward": size.hidden},
        ])  # fmt: skip

    def dropout(self) -> dict[str, int]:
        """The hash of a dropout mask: three int64 tensors of the mask's shape, in the last block's forward pass."""
        run, size = self.run, self.size
        widest = 24 * size.residual_tokens * run.model.hidden_size
        before = {}
        if run.model.attention_dropout:
            pairs = run.batch.micro_batch_size * size.heads * run.model.seq_length**2
            # beside what the block will keep of its scores: the masked scores and the softmax in the compute dtype
            widest = max(widest, pairs * (23 + (size.width if size.width < size.wide else 0)))
            one = block(run, size)
            before = {"activations.mlp": -one["activations.mlp"], "activations.norm": -one["activations.norm"] // 2}
            if run.recompute.mode == "full":
                before = {"recomputed": sum(one.values()) - one["activations.mlp"] - one["activations.norm"] // 2}
        return total([self.gathered(2), before, {"dropout": widest}])

    def end(self) -> dict[str, int]:
        """The last unit's gradients: whole in the compute dtype and in the reduction's, beside the shards; in a
        pipeline all gradients whole, as the first unit is reduced."""
        if not self.fsdp:
            # DTensor makes the word table's gradient whole before each rank takes its rows
            tensor = self.run.parallel.tensor
            table = tensor * self.size.rows * self.run.model.hidden_size if tensor > 1 and 0 in self.chunks else 0
            return {"gradients": self.state.gradients, "backward": (self.root + table) * self.size.width}
        if self.run.parallel.pipeline > 1:
            unit = max(self.root, self.block)
            return total(
                [self.gathered(0), {"gradients": self.reduced * self.numel, "communication": self.reduced * unit}]
            )
        last = self.root * (self.size.width + self.reduced)
        return {"gradients": self.state.gradients, "gathered": self.size.width * self.root, "communication": last}

    def optimizer(self) -> dict[str, int]:
        return {"gradients": self.state.gradients}
