"""What the model's parts allocate, keep and free, operation by operation: model/ and parallel/tensor.py in bytes.

Each part is written as there, with sizes for tensors. Played once on a tape (predict/tape.py) it becomes spans, its
forward pass and its backward pass or the halves of it, of which a rank's step is put together (predict/chunk.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

from steelyard.predict.shard import reduces_each
from steelyard.predict.tape import Storage, Tape, Var
from steelyard.spec.precision import BYTES
from steelyard.spec.run import Run

LOSS_CHUNK = 2**24  # elements of a chunk of logits: model/loss.py
INT64, BOOL = 8, 1


@dataclass(frozen=True)
class Sizes:
    """Bytes of one micro-batch's tensors on one rank: a whole hidden state, one between the halves of a block (cut by
    sequence parallelism), and this rank's columns of queries, keys and the MLP."""

    tokens: int
    width: int
    wide: int
    hidden: int
    residual: int
    query: int
    key: int
    ffn: int
    heads: int
    rows: int
    host: bool

    @staticmethod
    def of(run: Run, host: bool = False) -> "Sizes":
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
            query=tokens * model.query_width * width // tensor,
            key=tokens * model.key_value_width * width // tensor,
            ffn=tokens * model.ffn_hidden_size * width // tensor,
            heads=model.num_attention_heads // tensor,
            rows=model.padded_vocab_size(tensor) // tensor,
            host=host,
        )

    @property
    def chunk(self) -> int:
        """Tokens of a chunk of the loss."""
        return min(self.tokens, max(1, LOSS_CHUNK // self.rows))


class Network:
    """The parts of a run's model on one rank, in the order of their operations.

    `keep`: gradients of weights stay where an operation makes them (a first micro-batch's, or until FSDP takes them)
    instead of being added to those that are there.
    """

    def __init__(self, run: Run, host: bool = False, keep: bool = False):
        self.run, self.spec, self.size = run, run.model, Sizes.of(run, host)
        self.tape, self.keep = Tape(), keep
        self.tensor, self.sequence = run.parallel.tensor, run.parallel.sequence
        self._gradients: list[Storage] = []
        self.head: list[Storage] = []  # the head's gradient, from the loss to the word table's
        self.between: Callable[[], None] = lambda: None  # called between the blocks of a group

    # --- operations --------------------------------------------------------------------------------------------------

    def weights(self, *numels: int) -> list[Storage]:
        """Gradients of an operation's weights, in the compute dtype."""
        made = [self.tape.new("gradients" if self.keep else "backward", n * self.size.width) for n in numels if n]
        if self.keep:
            self._gradients += made
        return made

    def grad(self, size: int) -> Storage:
        return self.tape.new("backward", size)

    def linear(self, x: Var, term: str, size: int, weight: int, bias: int) -> Var:
        needed, saved = x.size, self.tape.save(x.storage)
        return self.tape.record(
            [x], self.tape.new(term, size), size, lambda _: [self.grad(needed)], saved,
            partial(self.weights, weight, bias),
        )  # fmt: skip

    def copy(self, x: Var, term: str) -> Var:
        """A view made contiguous; its gradient is a view again."""
        return self.tape.record([x], self.tape.new(term, x.size), x.size, None)

    def add(self, x: Var, y: Var, term: str) -> Var:
        return self.tape.record([x, y], self.tape.new(term, x.size), x.size, None)

    def multiply(self, x: Var, y: Var, term: str) -> Var:
        def backward(grad: Storage) -> list[Storage]:
            return [self.grad(grad.size), self.grad(grad.size)]

        saved = self.tape.save(x.storage, y.storage)
        return self.tape.record([x, y], self.tape.new(term, x.size), x.size, backward, saved)

    def pointwise(self, x: Var, term: str, keeps_result: bool = False, scratch: int = 0) -> Var:
        """An elementwise function that saves its input or its result."""

        def backward(grad: Storage) -> list[Storage]:
            held = self.grad(scratch)
            mine = self.grad(grad.size)
            del held
            return [mine]

        made = self.tape.new(term, x.size) if keeps_result else None
        saved = self.tape.save(made or x.storage)
        return self.tape.record([x], made or self.tape.new(term, x.size), x.size, backward, saved)

    def norm(self, x: Var, term: str = "activations.norm", heads: bool = False) -> Var:
        """LayerNorm, or RMSNorm, which on a CPU comes apart into operations of the wide dtype; over all channels or
        those of each head."""
        tape, size = self.tape, self.size
        width = self.spec.head_dim if heads else self.spec.hidden_size
        rows, simple = x.size // size.width // width, self.spec.norm == "rmsnorm"
        if not (simple and size.host):
            weigh = partial(self.weights, width, 0 if simple else width)
            exact = size.width if size.host else size.wide  # statistics: a CPU's are no wider than the input
            made, statistics = tape.new(term, x.size), tape.new(term, rows * (1 if simple else 2) * exact)
            saved = tape.save(x.storage, statistics)
            return tape.record([x], made, x.size, lambda grad: [self.grad(grad.size)], saved, weigh)
        narrow, wide = x.size, x.size // size.width * size.wide
        if self.sequence and not heads:  # a DTensor, to which the gradients of its two uses come first
            x = tape.record([x], x.storage, x.size, None)
        if narrow != wide:
            x = tape.record([x], tape.new(term, wide), wide, lambda grad: [self.grad(narrow)])

        def through_mean(grad: Storage) -> list[Storage]:
            mean = self.grad(wide)
            tape.touch(wide, wide, wide)
            del mean
            return [self.grad(wide)]

        def through_product(grad: Storage) -> list[Storage]:
            mine = self.grad(wide)
            tape.touch(wide)
            return [mine, self.grad(rows * size.wide)]

        def weigh_channels() -> list[Storage]:
            tape.touch(wide)
            return self.weights(width)

        tape.touch(wide)  # squares
        saved = tape.save(x.storage)
        scale = tape.record([x], tape.new(term, rows * size.wide), rows * size.wide, through_mean, saved)
        normed = tape.new(term, wide)
        product = tape.record([x, scale], normed, wide, through_product, tape.save(scale.storage, x.storage))
        saved = tape.save(normed)
        made_last = tape.record(
            [product], tape.new(term, wide), wide, lambda _: [self.grad(wide)], saved, weigh_channels
        )
        if narrow != wide:
            return tape.record([made_last], tape.new(term, narrow), narrow, lambda grad: [self.grad(wide)])
        return self.copy(made_last, term) if heads else made_last

    # --- tensor parallelism ------------------------------------------------------------------------------------------

    def gathered(self, part: int, term: str) -> Storage:
        """Joined along the sequence, which takes a copy where there are several samples."""
        whole = part * self.tensor
        received = self.tape.new("communication", whole) if self.run.batch.micro_batch_size > 1 else None
        made = self.tape.new(term, whole)
        del received
        return made

    def reduced(self, whole: int, term: str) -> Storage:
        """Summed over the tensor ranks; with sequence parallelism each keeps its part, and the parts that are sent are
        put one after the other."""
        sent = self.tape.new("communication", whole) if self.sequence else None
        made = self.tape.new(term, whole // self.tensor if self.sequence else whole)
        del sent
        return made

    def enter(self, x: Var, term: str = "activations.norm") -> Var:
        """Before column-parallel products. Forward: gathered along the sequence; backward: gradients are summed."""
        if self.tensor == 1:
            return x
        whole = x.size * (self.tensor if self.sequence else 1)
        made = self.gathered(x.size, term) if self.sequence else x.storage
        return self.tape.record([x], made, whole, lambda grad: [self.reduced(whole, "backward")])

    def leave(self, x: Var, term: str = "activations.norm") -> Var:
        """After row-parallel products. Forward: summed over the ranks; backward: gathered along the sequence."""
        if self.tensor == 1:
            return x
        part = x.size // (self.tensor if self.sequence else 1)
        backward = (lambda grad: [self.gathered(part, "backward")]) if self.sequence else None
        return self.tape.record([x], self.reduced(x.size, term), part, backward)

    # --- a block -----------------------------------------------------------------------------------------------------

    def hashed(self, elements: int, last: int) -> Storage:
        """A dropout mask, hashed axis by axis: three int64 tensors of its shape while it is made, and one of that shape
        without its `last` axis."""
        one = INT64 * elements
        before = self.tape.new("dropout", one // last)
        self.tape.touch(one, one, one, term="dropout")
        hashes = self.tape.new("dropout", one)
        del before
        mask = self.tape.new("activations.dropout", BOOL * elements)
        del hashes
        return mask

    def dropout(self, x: Var, term: str = "activations.norm") -> Var:
        if not self.spec.hidden_dropout:
            return x
        mask = self.hashed(x.size // self.size.width, self.spec.hidden_size)
        saved, backward = self.tape.save(mask), lambda grad: [self.grad(grad.size)]
        product = self.tape.record([x], self.tape.new(term, x.size), x.size, backward, saved)
        return self.tape.record([product], self.tape.new(term, x.size), x.size, backward)

    def rotate(self, x: Var, term: str) -> Var:
        """Rotary positions: two products and their sum for each half, and all joined."""
        tape, whole = self.tape, x.size
        half = int(whole * self.spec.rotary_fraction) // 2

        def backward(grad: Storage) -> list[Storage]:
            tape.touch(half, half, half, half, -half, half, -half, -half, half, half, -half)
            parts = self.grad(2 * half)
            mine = self.grad(whole)
            tape.touch(whole)
            del parts
            return [mine]

        halves = []
        for _ in range(2):
            halves.append(tape.new(term, half))
            tape.touch(half, half)
        made = tape.new(term, whole)
        halves.clear()
        return tape.record([x], made, whole, backward)

    def attention(self, x: Var) -> Var:
        spec, size, term = self.spec, self.size, "activations.attention"
        entered = self.enter(x)
        columns, joined = (spec.query_width + 2 * spec.key_value_width) // self.tensor, size.query + 2 * size.key
        qkv = self.linear(entered, term, joined, spec.hidden_size * columns, columns * spec.qkv_bias)
        views = [(qkv.storage, part) for part in (size.query, size.key, size.key)]
        query, key, value = self.tape.split([qkv], views, lambda *grads: [self.grad(joined)])
        groups = spec.num_query_groups // self.tensor
        if spec.heads_per_group > 1 and groups > 1:  # their heads do not lie one after the other
            query = self.copy(query, term)
        if spec.qk_norm:
            query, key = self.norm(query, term, heads=True), self.norm(key, term, heads=True)
        if spec.position == "rotary":
            query, key = self.rotate(query, term), self.rotate(key, term)
        context = self.selected("attention", self.core, query, key, value)
        if spec.attention_dropout or (size.host and (spec.position == "rotary" or spec.qk_norm)):
            context = self.copy(context, term)  # the context lies as the query does
        weight = spec.query_width * spec.hidden_size // self.tensor
        return self.leave(self.linear(context, "activations.norm", size.hidden, weight, spec.hidden_size * spec.bias))

    def core(self, query: Var, key: Var, value: Var) -> Var:
        """A fused kernel: the context and the logarithms of the softmax's sums."""
        tape, size, term = self.tape, self.size, "activations.attention"
        bias = self.bias()
        if self.spec.attention_dropout:
            return self.attention_by_formula(query, key, value, bias)
        sizes = [v.size for v in (query, key, value)]
        made = tape.new(term, query.size), tape.new(term, size.tokens * size.heads * size.wide)
        saved = tape.save(query.storage, key.storage, value.storage, *made, *bias)
        return tape.record([query, key, value], made[0], query.size, lambda grad: [self.grad(v) for v in sizes], saved)

    def bias(self) -> list[Storage]:
        """What a block adds to its scores: ALiBi's bias with the future masked, or a mask in the compute dtype."""
        tape, spec, size = self.tape, self.spec, self.size
        pairs, micro = spec.seq_length**2, self.run.batch.micro_batch_size
        if spec.position == "alibi":
            apart = self.run.data.reset_attention  # each sample has documents of its own
            blocked = tape.new("masks", (micro if apart else 2) * pairs)
            made = tape.new("activations.scores", (micro if apart else 1) * size.heads * pairs * size.width)
            del blocked
            return [made]
        if self.run.data.reset_attention and not spec.attention_dropout:
            return [tape.new("activations.scores", micro * pairs * size.width)]
        return []

    def attention_by_formula(self, query: Var, key: Var, value: Var, bias: list[Storage]) -> Var:
        """With dropout, whose mask is a hash that no fused kernel draws."""
        tape, spec, size, term = self.tape, self.spec, self.size, "activations.scores"
        elements = self.run.batch.micro_batch_size * size.heads * spec.seq_length**2
        pairs, wide = elements * size.width, elements * size.wide
        whole, micro = query.size, self.run.batch.micro_batch_size
        grouped = key.size < whole
        if grouped:  # repeated for each group's heads
            key, value = self.repeated(key, whole), self.repeated(value, whole)
        # a view of the joined product, which a batched one copies
        joined = micro > 1 and spec.position != "rotary" and not spec.qk_norm
        future = tape.new("masks", 0 if bias or self.run.data.reset_attention else spec.seq_length**2)

        def same(grad: Storage) -> list[Storage]:
            return [self.grad(grad.size)]

        def made_contiguous(x: Var, copied: bool) -> Var:
            return self.copy(x, "activations.attention") if copied else x

        def product() -> Var:
            factors = made_contiguous(query, joined), made_contiguous(key, joined and not grouped)
            saved = tape.save(*(x.storage for x in factors))
            return tape.record(
                factors, tape.new(term, pairs), pairs, lambda _: [self.grad(whole), self.grad(whole)], saved
            )

        raw = product()
        scores = tape.record([raw], tape.new(term, pairs), pairs, same)
        del raw
        scores = self.masked(scores, bias, term)
        read = scores
        if size.host and wide != pairs:  # a GPU's kernel casts as it reads and as it writes
            read = tape.record([scores], tape.new(term, wide), wide, lambda _: [self.grad(pairs)])
        needed, kept = read.size, tape.new(term, wide)
        softmax = tape.record([read], kept, wide, lambda _: [self.grad(needed)], tape.save(kept))
        del kept, read
        if wide != pairs:
            softmax = tape.record([softmax], tape.new(term, pairs), pairs, lambda _: [self.grad(wide)])
        mask = self.hashed(elements, spec.seq_length)
        dropped = tape.record([softmax], tape.new(term, pairs), pairs, same, tape.save(mask))
        dropped = tape.record([dropped], tape.new(term, pairs), pairs, same)
        value = made_contiguous(value, micro > 1 and not grouped)
        saved = tape.save(dropped.storage, value.storage)
        del future

        def through_context(grad: Storage) -> list[Storage]:
            mine = self.grad(whole)
            return [self.grad(pairs), mine]

        return tape.record([dropped, value], tape.new("activations.attention", whole), whole, through_context, saved)

    def repeated(self, x: Var, size: int) -> Var:
        small = x.size
        made = self.tape.new("activations.attention", size)
        return self.tape.record([x], made, size, lambda _: [self.grad(small)])

    def masked(self, scores: Var, bias: list[Storage], term: str) -> Var:
        tape, positions = self.tape, self.spec.seq_length**2
        if bias:
            return tape.record([scores], tape.new(term, scores.size), scores.size, None)
        mask = tape.new(term, positions * (self.run.batch.micro_batch_size if self.run.data.reset_attention else 1))
        saved = tape.save(mask)
        return tape.record([scores], tape.new(term, scores.size), scores.size, lambda g: [self.grad(g.size)], saved)

    def mlp(self, x: Var) -> Var:
        spec, size, term = self.spec, self.size, "activations.mlp"
        columns = spec.ffn_hidden_size // self.tensor
        weight, bias = spec.hidden_size * columns, columns * spec.bias
        inner = self.linear(x, term, size.ffn, weight, bias)
        if spec.gated:
            acted = self.pointwise(self.linear(x, term, size.ffn, weight, bias), term)
            acted = self.multiply(acted, inner, term)
        elif spec.activation in ("relu", "relu2"):
            acted = self.pointwise(inner, term, keeps_result=True)
            if spec.activation == "relu2":
                acted = self.pointwise(acted, term, scratch=2 * size.ffn)
        else:
            acted = self.pointwise(inner, term)
        return self.leave(self.linear(acted, "activations.norm", size.hidden, weight, spec.hidden_size * spec.bias))

    def selected(self, name: str, function: Callable[..., Var], *inputs: Var) -> Var:
        """Selective recompute of one part."""
        rule = self.run.recompute
        if rule.mode == "selective" and name in rule.modules:
            return self.tape.checkpoint(function, *inputs)
        return function(*inputs)

    def block(self, hidden: Var) -> Var:
        attended = self.attention(self.selected("norm", self.norm, hidden))
        hidden = self.add(hidden, self.dropout(attended), "activations.norm")
        normed = self.selected("norm", self.norm, hidden)  # here, as in `attention`, the caller holds on to it
        made = self.selected("mlp", self.mlp, self.enter(normed, "activations.mlp"))
        del normed
        return self.add(hidden, self.dropout(made), "activations.norm")

    def group(self, count: int, checkpointed: bool, hidden: Var) -> Var:
        """Blocks one after the other; `checkpointed`: only their input is kept."""

        def through(grad: Storage) -> list[Storage]:
            self.between()
            return [grad]

        def run(hidden: Var) -> Var:
            for number in range(count):
                if number:
                    self.between()
                    hidden = self.tape.record([hidden], hidden.storage, hidden.size, through)
                hidden = self.block(hidden)
            return hidden

        if not checkpointed:
            return run(hidden)
        if self.run.recompute.shard and self.tensor > 1 and not self.sequence:
            return self._checkpoint_of_a_part(run, hidden)
        return self.tape.checkpoint(run, hidden)

    def _checkpoint_of_a_part(self, run: Callable[[Var], Var], hidden: Var) -> Var:
        """Only this tensor rank's part of the input is kept, and joined again before the repeat."""
        tape, whole, term = self.tape, hidden.size, "activations.inputs"
        part = whole // self.tensor
        given = [hidden.storage]

        def joined(term: str) -> Storage:
            parts = tape.new("communication", whole)
            made = tape.new(term, whole)
            del parts
            return made

        def from_part(x: Var) -> Var:
            storage = given.pop() if given else joined(term)
            return run(tape.record([x], storage, whole, lambda _: [self.grad(part)]))

        kept = tape.record([hidden], tape.new(term, part), part, lambda _: [joined("backward")])
        del hidden
        return tape.checkpoint(from_part, kept)

    # --- the ends ----------------------------------------------------------------------------------------------------

    def embedding(self) -> Var:
        """The word table's rows, summed over the ranks that hold them, and what is added; then cut along the
        sequence."""
        tape, spec, size, term = self.tape, self.spec, self.size, "activations.norm"
        whole, positions = size.hidden, spec.seq_length * spec.hidden_size * size.width
        rows = self.size.rows * spec.hidden_size * self.tensor

        def through_rows(grad: Storage) -> list[Storage]:
            if self.tied_here or taken:
                return [self.grad(rows * size.width)]
            self.weights(rows)
            return []

        def own(grad: Storage) -> list[Storage]:
            self.weights(rows // self.tensor)
            return []

        taken = self.tensor > 1 and reduces_each(self.run)
        inputs = []
        if self.tied_here or taken:
            inputs = [tape.record([], Storage(tape.ledger, term, 0), 0, self.table if self.tied_here else own)]
        hidden = tape.record(inputs, tape.new(term, whole), whole, through_rows)
        if self.tensor > 1:
            hidden = tape.record([hidden], tape.new(term, whole), whole, None)
        if spec.position == "learned":

            def through_positions(grad: Storage) -> list[Storage]:
                summed = self.grad(positions)
                self.weights(spec.max_position_embeddings * spec.hidden_size)
                del summed
                return [grad]

            added = tape.new(term, positions)
            hidden = tape.record([hidden], tape.new(term, whole), whole, through_positions)
            del added
        if spec.embedding_norm:
            hidden = self.norm(hidden, term)
        hidden = self.dropout(hidden, term)
        if self.sequence:
            gather = lambda grad: [self.gathered(size.residual, "backward")]  # noqa: E731
            hidden = tape.record([hidden], tape.new(term, size.residual), size.residual, gather)
        return hidden

    @cached_property
    def tied_here(self) -> bool:
        """Whether this rank's head is the word table itself."""
        return self.spec.tied_embeddings and self.run.parallel.pipeline == 1

    def table(self, grad: Storage) -> list[Storage]:
        """The word table's gradient where it is the head as well, whose gradient has waited for it. Cut over ranks it
        is made whole and each takes its rows."""
        rows = self.size.rows * self.spec.hidden_size
        mine = self.grad(rows * self.size.width) if self.tensor > 1 else None
        self.weights(rows)
        del mine
        self.head.clear()
        return []

    def loss(self, hidden: Var) -> Var:
        """The final norm and the chunked loss (model/loss.py): a buffer of logits, a wide one where they are narrow,
        and the gradients of the hidden states and of the head, which are made in the forward pass."""
        tape, size, spec = self.tape, self.size, self.spec
        normed = self.norm(hidden)
        hidden.storage = normed.storage  # the model's name for the two is one
        given = self.enter(normed)
        rows = size.rows * spec.hidden_size
        narrow = 0 if size.width == size.wide else size.width
        chunk = size.chunk * size.rows
        grad_hidden = tape.new("loss.gradients", size.hidden)
        grad_head = tape.new("loss.gradients", rows * size.wide)
        buffers = tape.new("logits", chunk * (size.wide + narrow))
        if narrow:
            tape.touch(narrow * rows, term="logits")
            grad_head, wide = tape.new("loss.gradients", narrow * rows), grad_head
            del wide
        self.head = [grad_head]

        def weigh() -> list[Storage]:
            """The head's gradient is there: it becomes what it is the gradient of."""
            mine = [self.head.pop()]
            mine[0].become("gradients" if self.keep else "backward")
            if self.keep:
                self._gradients += mine
            return mine

        saved = tape.save(grad_hidden)
        del grad_head
        made = tape.record([given], tape.new("logits", 0), 0, lambda _: saved, saved, None if self.tied_here else weigh)
        del buffers
        return made
