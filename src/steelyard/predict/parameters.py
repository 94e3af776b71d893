"""How many parameters a model has, tensor by tensor, and who holds them under a layout. No count walks a module:
everything follows from shapes, so it is known before launch and cannot depend on the layout by accident.

Names and shapes are those of our own network; the trainer asserts them against the live module on every rank.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal

from steelyard.predict import stages
from steelyard.spec.model import Model
from steelyard.spec.parallel import Parallel

Part = Literal["embedding", "position", "layer", "norm", "head"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One named parameter tensor.

    `shape` is the whole tensor's, before any sharding. `cut` is the dimension that the tensor axis cuts; None means
    that every tensor rank holds the whole. `padding_rows` are the rows of dimension 0 that stand for no token. A
    `tied_copy` is the last stage's copy of the word embedding, which is one parameter with the first stage's.
    """

    name: str
    shape: tuple[int, ...]
    part: Part
    cut: int | None = None
    padding_rows: int = 0
    tied_copy: bool = False

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def padding(self) -> int:
        """Parameters in padding rows."""
        return self.padding_rows * prod(self.shape[1:])

    def local_shape(self, tensor: int) -> tuple[int, ...]:
        """Shape on one of `tensor` tensor-parallel ranks: equal blocks, which the spec's rules guarantee."""
        return tuple(size // tensor if dim == self.cut else size for dim, size in enumerate(self.shape))

    def local_numel(self, tensor: int) -> int:
        """Parameters on one of `tensor` tensor-parallel ranks."""
        return self.numel if self.cut is None else self.numel // tensor

    def local_padding(self, tensor: int, rank: int) -> int:
        """Padding parameters in the block of rows of tensor rank `rank`: padding rows are the table's last."""
        if not self.padding_rows:
            return 0
        rows = self.shape[0] // tensor if self.cut == 0 else self.shape[0]
        end = (rank + 1) * rows if self.cut == 0 else rows
        first_padding = self.shape[0] - self.padding_rows
        return max(0, min(rows, end - first_padding)) * prod(self.shape[1:])


@dataclass(frozen=True)
class Count:
    """Parameters of one rank. `total = sharded + replicated`; the other kinds are parts of that total."""

    total: int
    sharded: int
    replicated: int
    tied_copy: int
    embedding: int
    position: int
    norm: int
    padding: int


@dataclass(frozen=True)
class Rank:
    """A class of equal ranks: pipeline rank `pipeline`, tensor rank `tensor`, `count` of them in the world.

    `held` is what the rank's module has, whatever ZeRO does with it; `stored` what stays on the device throughout a
    step: a shard of it under ZeRO 3, all of it otherwise.
    """

    pipeline: int
    tensor: int
    count: int
    held: Count
    stored: int


@lru_cache(maxsize=64)
def tensors(model: Model, tensor: int = 1) -> tuple[Tensor, ...]:
    """Every distinct parameter of the model once, in the order of the network.

    `tensor` matters only for the number of padding rows under `vocab_multiple = "megatron"`.
    Source of the shapes: reference layer of Megatron-LM, L x (12 h^2 + 13 h) for GPT-2; Llama as published.
    """
    layers = (entry for number in range(model.num_layers) for entry in _layer(model, number))
    return (*_first(model, tensor), *layers, *_last(model, tensor, tied_copy=False))


@lru_cache(maxsize=512)
def stage_tensors(model: Model, parallel: Parallel, stage: int) -> tuple[Tensor, ...]:
    """The parameters of pipeline stage `stage` (from 0): the embeddings on the first; the final norm and
    the head on the last, where tied embeddings are a copy of the word embedding called `head.weight`."""
    layers = stages.split(model, parallel)
    start = sum(layers[:stage])
    last = len(layers) - 1
    return (
        *(_first(model, parallel.tensor) if stage == 0 else ()),
        *(entry for number in range(start, start + layers[stage]) for entry in _layer(model, number)),
        *(_last(model, parallel.tensor, tied_copy=last > 0) if stage == last else ()),
    )


def rank_tensors(model: Model, parallel: Parallel, pipeline_rank: int) -> tuple[Tensor, ...]:
    """The parameters of every model chunk on one pipeline rank."""
    chunks = stages.chunks(parallel, pipeline_rank)
    return tuple(entry for stage in chunks for entry in stage_tensors(model, parallel, stage))


def _first(model: Model, tensor: int) -> Iterator[Tensor]:
    rows = model.padded_vocab_size(tensor)
    padding = rows - model.vocab_size
    yield Tensor("embedding.word.weight", (rows, model.hidden_size), "embedding", 0, padding)
    if model.position == "learned":
        yield Tensor("embedding.position.weight", (model.max_position_embeddings, model.hidden_size), "position")
    if model.embedding_norm:
        yield from _norm(model, "embedding.norm", model.hidden_size)


@lru_cache(maxsize=512)
def _layer(model: Model, number: int) -> tuple[Tensor, ...]:
    return tuple(_layer_tensors(model, number))


def _layer_tensors(model: Model, number: int) -> Iterator[Tensor]:
    """Column-parallel: qkv, up, gate (weight and bias cut over rows); row-parallel: out, down (weight cut over columns,
    bias whole on every rank); norms whole on every rank."""
    at, hidden, ffn = f"layers.{number}", model.hidden_size, model.ffn_hidden_size
    rows = model.query_width + 2 * model.key_value_width
    yield from _norm(model, f"{at}.attention_norm", hidden)
    yield from _linear(f"{at}.attention.qkv", rows, hidden, 0, model.qkv_bias)
    if model.qk_norm:
        yield from _norm(model, f"{at}.attention.query_norm", model.head_dim)
        yield from _norm(model, f"{at}.attention.key_norm", model.head_dim)
    yield from _linear(f"{at}.attention.out", hidden, model.query_width, 1, model.bias)
    yield from _norm(model, f"{at}.mlp_norm", hidden)
    yield from _linear(f"{at}.mlp.up", ffn, hidden, 0, model.bias)
    if model.gated:
        yield from _linear(f"{at}.mlp.gate", ffn, hidden, 0, model.bias)
    yield from _linear(f"{at}.mlp.down", hidden, ffn, 1, model.bias)


def _last(model: Model, tensor: int, tied_copy: bool) -> Iterator[Tensor]:
    yield from _norm(model, "norm", model.hidden_size)
    if tied_copy or not model.tied_embeddings:
        rows = model.padded_vocab_size(tensor)
        padding = rows - model.vocab_size
        tied = tied_copy and model.tied_embeddings
        yield Tensor("head.weight", (rows, model.hidden_size), "head", 0, padding, tied)


def _norm(model: Model, name: str, width: int) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (width,), "norm")
    if model.norm == "layernorm":
        yield Tensor(f"{name}.bias", (width,), "norm")


def _linear(name: str, rows: int, columns: int, cut: int, bias: bool) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (rows, columns), "layer", cut)
    if bias:
        yield Tensor(f"{name}.bias", (rows,), "layer", 0 if cut == 0 else None)


@lru_cache(maxsize=64)
def unique(model: Model, tensor: int = 1) -> int:
    """Each distinct scalar once, padding rows included: sum of numel over `tensors`."""
    return sum(entry.numel for entry in tensors(model, tensor))


@lru_cache(maxsize=64)
def padding(model: Model, tensor: int = 1) -> int:
    """Parameters in padding rows: (padded - real vocabulary) x hidden, twice with an untied head."""
    return sum(entry.padding for entry in tensors(model, tensor))


def unique_unpadded(model: Model) -> int:
    """Each distinct scalar once, without padding rows. Independent of every layout."""
    return unique(model) - padding(model)


@lru_cache(maxsize=64)
def without_embeddings(model: Model) -> int:
    """Blocks and norms: `unique` less word embedding, position table and untied head. An embedding norm stays in."""
    return sum(entry.numel for entry in tensors(model) if entry.part in ("layer", "norm"))


def per_stage(model: Model, parallel: Parallel) -> tuple[int, ...]:
    """Distinct parameters of each pipeline stage. Their sum is `unique` plus the tied copy."""
    count = len(stages.split(model, parallel))
    return tuple(sum(entry.numel for entry in stage_tensors(model, parallel, stage)) for stage in range(count))


def sum_over_ranks(model: Model, parallel: Parallel) -> int:
    """Parameters held by the tensor x pipeline ranks of one model replica, added up: counts every replicated tensor
    `tensor` times and tied embeddings on both ends of the pipeline. Not the size of the model."""
    return sum(
        entry.local_numel(parallel.tensor) * parallel.tensor
        for rank in range(parallel.pipeline)
        for entry in rank_tensors(model, parallel, rank)
    )


def counts(held: Iterable[Tensor], tensor: int) -> list[Count]:
    """Parameters of `held` on each of `tensor` tensor ranks, by kind. The ranks differ in their padding rows only."""
    kinds: Counter[str] = Counter()
    padding = [0] * tensor
    for entry in held:
        local = entry.local_numel(tensor)
        kinds["total"] += local
        kinds["sharded" if entry.cut is not None and tensor > 1 else "replicated"] += local
        kinds[entry.part] += local
        if entry.tied_copy:
            kinds["tied_copy"] += local
        if entry.padding_rows:
            padding = [so_far + entry.local_padding(tensor, rank) for rank, so_far in enumerate(padding)]
    same = {name: kinds[name] for name in Count.__dataclass_fields__ if name != "padding"}
    return [Count(**same, padding=rows) for rows in padding]


def ranks(model: Model, parallel: Parallel) -> tuple[Rank, ...]:
    """Every class of equal ranks, pipeline rank outermost. The counts add up to the world size."""
    found: list[Rank] = []
    for pipeline_rank in range(parallel.pipeline):
        held = rank_tensors(model, parallel, pipeline_rank)
        stored = stored_per_shard(held, parallel)
        for tensor_rank, here in enumerate(counts(held, parallel.tensor)):
            for amount, shards in stored.items():
                copies = shards * parallel.context * (parallel.data // stored.total())
                found.append(Rank(pipeline_rank, tensor_rank, copies, here, amount))
    return tuple(found)


def stored_per_shard(held: Iterable[Tensor], parallel: Parallel) -> Counter[int]:
    """Parameters that stay on a rank throughout a step -> number of shard indices with that amount. ZeRO 3 cuts them
    over `data / replicate` ranks; below ZeRO 3 every rank keeps all."""
    shapes = Counter(entry.local_shape(parallel.tensor) for entry in held)
    classes = shard_classes(shapes, parallel.shard if parallel.zero == 3 else 1)
    return Counter({amount: count for amount, (_, count) in classes.items()})


def on_shard(shapes: Mapping[tuple[int, ...], int], shards: int, index: int) -> int:
    """Parameters of shard `index` of tensors of these shapes (-> how many): PyTorch's `fully_shard` cuts dimension 0
    into blocks of ceil(rows / shards) rows, the last ones shorter or empty."""
    found = 0
    for shape, times in shapes.items():
        rows = -(-shape[0] // shards)
        found += times * max(0, min(rows, shape[0] - index * rows)) * prod(shape[1:])
    return found


def shard_classes(shapes: Mapping[tuple[int, ...], int], shards: int) -> dict[int, tuple[int, int]]:
    """Parameters -> (index of the first shard that keeps so many, how many do). A tensor's full blocks are followed by
    the rest of its rows and then by nothing, so only these places are looked at, not every shard."""
    changes = {0}
    for shape in shapes:
        full = shape[0] // -(-shape[0] // shards)
        changes |= {place for place in (full, full + 1) if place < shards}
    starts = sorted(changes)
    found: dict[int, tuple[int, int]] = {}
    for start, end in zip(starts, [*starts[1:], shards], strict=True):
        amount = on_shard(shapes, shards, start)
        first, count = found.get(amount, (start, 0))
        found[amount] = (first, count + end - start)
    return found
