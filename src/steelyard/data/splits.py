"""A run's splits: which samples it trains on and evaluates, by number in one global order.

The position in the data is the number of consumed samples and nothing else, so every layout and every resume sees the
same tokens. Which samples exist and in which order follows from the data, the seed, the sequence length and how many
samples the whole run asks for (see `order` and `mixture`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from steelyard.data import manifest as manifests
from steelyard.data.mixture import Mixture
from steelyard.data.order import SPLITS, Order, shares, split_bounds
from steelyard.data.store import Dataset
from steelyard.spec import progress
from steelyard.spec.data import Source
from steelyard.spec.errors import error
from steelyard.spec.run import Run


@dataclass(frozen=True)
class Samples:
    """The samples of training, of one validation set or of test."""

    name: str
    seq_length: int
    order: Order | Mixture
    notes: list[str] = field(default_factory=list)

    @property
    def parts(self) -> list[Order]:
        """The order of each data set."""
        return self.order.parts if isinstance(self.order, Mixture) else [self.order]

    @property
    def num_samples(self) -> int:
        """Samples that can be read."""
        return len(self.order)

    @property
    def epochs(self) -> int:
        """Times the samples go through the data; of the data set that is used most."""
        return max(part.size.epochs for part in self.parts)

    @property
    def documents(self) -> int:
        return sum(part.num_documents for part in self.parts)

    @property
    def tokens(self) -> int:
        """Tokens of one epoch."""
        return sum(part.size.tokens_per_epoch for part in self.parts)

    def describe(self) -> str:
        """A line for people, one more for each data set of a mixture with its share of the samples, and the notes."""
        epochs = f"{self.epochs:,} epoch" + "s" * (self.epochs > 1)
        lines = [f"{self.name}: {self.documents:,} documents, {self.tokens:,} tokens, {self.num_samples:,} samples in "
                 f"{epochs}"]  # fmt: skip
        if isinstance(self.order, Mixture):
            for part, taken in zip(self.order.parts, self.order.taken, strict=True):
                share = f"{taken:,} samples ({taken / len(self.order):.4%})"
                lines.append(f"  {share} from {part.dataset.prefix}: {part.num_documents:,} documents, "
                             f"{part.size.tokens_per_epoch:,} tokens, epochs {part.size.epochs}")  # fmt: skip
        return "\n".join([*lines, *self.notes])

    def read(self, first: int, count: int, vocab_size: int | None = None) -> NDArray[np.int64]:
        """Tokens [count, S + 1] of samples `first` to `first + count`: S inputs and the label of the last.

        Raises UserError D012 beyond the last sample, D004 for an id that a vocabulary of `vocab_size` does not have.
        """
        if first + count > self.num_samples:
            raise error("D012", "data", place=self.name, asked=first + count, held=self.num_samples)
        stream = np.empty((count, self.seq_length + 1), np.int64)
        for row in range(count):
            order, number = self.order.at(first + row)
            order.read(number, stream[row])
        if vocab_size is not None and count and not 0 <= stream.min() <= stream.max() < vocab_size:
            self._refuse(first, stream, vocab_size)
        return stream

    def _refuse(self, first: int, stream: NDArray[np.int64], vocab_size: int) -> None:
        row, column = (int(n) for n in np.argwhere((stream < 0) | (stream >= vocab_size))[0])
        bad = int(stream[row, column])
        order, number = self.order.at(first + row)
        sequences = [sequence for sequence, _, taken in order.pieces(number) for _ in range(taken)]
        document = order.dataset.document_of(sequences[column])
        place = f"{order.dataset.prefix}, document {document}"
        raise error("D004", "data", place=place, id=bad, vocab_size=vocab_size)


def requested(run: Run) -> dict[str, int]:
    """Samples the run asks of each split. They fix the epochs and with them the order.

    train: the run's length; validation: (steps // every_steps + 1) * evaluation steps * global batch, one evaluation
    where every_steps is 0; test: one evaluation. Source: Megatron-LM `get_train_valid_test_num_samples`.
    """
    steps = progress.total_steps(run.length, run.batch, run.model.seq_length)
    once = run.evaluation.steps * run.batch.global_batch_size
    every = run.evaluation.every_steps
    times = steps // every + 1 if every else 1
    return {
        "train": progress.total_samples(run.length, run.batch, run.model.seq_length),
        "validation": times * once,
        "test": once,
    }


def open_splits(run: Run, *, build: bool) -> dict[str, Samples]:
    """The run's splits: "train", and "validation" and "test" where there are any and evaluations ask for them.

    Named validation sets come as "validation.NAME". `build` makes the indices where they are not cached yet; one rank
    does so first, the others then only read.
    Raises UserError: D001 to D003 (files), D006 (an empty split), D011 (weights), D012 (too few samples), D014 (too
    many epochs), D015 (not built), D017 (no data named).
    """
    if not run.data.train:
        raise error("D017", "data.train")
    asked, notes = requested(run), []
    splits: dict[str, Samples] = {}
    for name, sources, share in _wanted(run):
        samples = asked[name.partition(".")[0]]
        if not samples:
            continue
        opener = _Opener(run, name, sources, share, build)
        if name == "test" and opener.empty:
            notes.append(f'test: none; its share of the split "{run.data.split}" comes to no document')
            continue
        splits[name] = Samples(name, run.model.seq_length, opener.covering(samples))
    splits["train"].notes.extend(notes)
    return splits


def _wanted(run: Run) -> Iterator[tuple[str, tuple[Source, ...], int | None]]:
    """(name, sources, which share of them by the split string, None for the whole)."""
    data = run.data
    if not data.validation and not data.test:
        for share, name in enumerate(SPLITS):
            if shares(data.split)[share]:
                yield name, data.train, share
        return
    yield "train", data.train, None
    if isinstance(data.validation, dict):
        for name, sources in data.validation.items():
            yield f"validation.{name}", sources, None
    elif data.validation:
        yield "validation", data.validation, None
    if data.test:
        yield "test", data.test, None


def _consumed(run: Run) -> int:
    """Samples that the run's whole steps take: a length that is no whole number of batches is rounded up."""
    total = progress.total_samples(run.length, run.batch, run.model.seq_length)
    return sum(level.samples for level in progress.levels(run.batch, total))


class _Opener:
    """The data sets of one split, and their order for a number of samples."""

    def __init__(self, run: Run, name: str, sources: tuple[Source, ...], share: int | None, build: bool):
        self.run, self.name, self.build = run, name, build
        self.weights, prefixes = parse(sources, name)
        self.datasets = [_opened(prefix, run.model.vocab_size) for prefix in prefixes]
        self.bounds = [
            (0, len(dataset)) if share is None else split_bounds(run.data.split, len(dataset))[share]
            for dataset in self.datasets
        ]

    @property
    def empty(self) -> bool:
        return any(first == end for first, end in self.bounds)

    def covering(self, samples: int) -> Order | Mixture:
        """The order for `samples`, or for what the steps of the run really take where that is more than it holds."""
        needed = _consumed(self.run) if self.name == "train" else samples
        order = self.order(samples)
        if len(order) < needed:
            order = self.order(needed)
        if len(order) < needed:
            raise error("D012", f"data.{self.name}", asked=needed, held=len(order))
        return order

    def order(self, samples: int) -> Order | Mixture:
        cache = self.run.data.cache
        if self.weights is None and len(self.datasets) == 1:
            return self._of(0, samples)
        return Mixture(self.weights, samples, len(self.datasets), self._of, cache, self.build)

    def _of(self, number: int, samples: int | None) -> Order:
        dataset, (first, end) = self.datasets[number], self.bounds[number]
        if not dataset.lengths[first:end].any():
            raise error(
                "D006", "data.split", place=dataset.prefix, name=self.name, split=self.run.data.split,
                sequences=len(dataset), part=end - first,
            )  # fmt: skip
        run = self.run
        return Order(dataset, (first, end), run.model.seq_length, run.seed, samples, run.data.cache, self.build)


def parse(sources: tuple[Source, ...], name: str) -> tuple[list[float] | None, list[str]]:
    """(weights or None, prefixes) of a list of sources. Raises UserError D011 when only some have a weight."""
    weights = [source[0] for source in sources if not isinstance(source, str)]
    prefixes = [source if isinstance(source, str) else source[1] for source in sources]
    if weights and len(weights) < len(sources):
        raise error("D011", f"data.{name}", weights="only some of the data sets have one", most=len(sources))
    return weights or None, prefixes


def _opened(prefix: str, vocab_size: int) -> Dataset:
    """The data set, refused at once where it is known to hold an id that the model does not have."""
    dataset, made = Dataset(prefix), manifests.find(prefix)
    if made and made.highest_id >= vocab_size:
        raise error("D004", "data", place=prefix, id=made.highest_id, vocab_size=vocab_size)
    if dataset.dtype.kind not in "iu":
        detail = f"its dtype is {dataset.dtype.name}; token ids are integers"
        raise error("D002", place=f"{prefix}.idx", detail=detail)
    return dataset
