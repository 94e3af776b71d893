"""The order of a data set's samples: Megatron's, exactly.

The sequences of a split are laid out once per epoch in a shuffled order as one stream of tokens; sample j is the S + 1
tokens from j * S on (inputs, and the label of the last); the samples are shuffled again. Three indices say this:
`document_index` [epochs * sequences], `sample_index` [samples + 1, 2] (place in document_index, offset) and
`shuffle_index` [samples]. Everything follows from the lengths, the seed, the sequence length and the number of samples
asked for, never from the layout of a run. Source: Megatron-LM's `GPTDataset`.
"""

import hashlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steelyard.data import cache
from steelyard.data.compiled import compiled
from steelyard.data.store import Dataset
from steelyard.spec.errors import error

SPLITS = ("train", "validation", "test")
WIDEST_SHUFFLE = 2**32  # NumPy draws 64-bit numbers from here on
ROWS_AT_ONCE = 1 << 18  # of the sample index, so that it is never whole in memory while it is built


def split_bounds(split: str, sequences: int) -> list[tuple[int, int]]:
    """[first, end) of training, validation and test, counted in sequences; a share of 0 gives an empty range.

    Source: Megatron-LM `parse_and_normalize_split` and `_build_megatron_dataset_splits` (rounding half to even).
    """
    weights = [float(w) for w in re.findall(r"[.0-9]+", split)]
    weights += [0.0] * (3 - len(weights))
    total = sum(weights)
    ends = [0.0]
    for share in (weight / total for weight in weights):
        ends.append(ends[-1] + share)
    bounds = [round(end * float(sequences)) for end in ends]
    return list(pairwise(bounds))


def shares(split: str) -> list[float]:
    """The three weights of a split string, not normalised."""
    weights = [float(w) for w in re.findall(r"[.0-9]+", split)]
    return weights + [0.0] * (3 - len(weights))


@dataclass(frozen=True)
class Size:
    """How large an order is, known before it is built.

    `samples` are all that the epochs hold; `first_part` those shuffled among themselves before the last epoch's (all of
    them unless the last epoch is kept separate).
    """

    tokens_per_epoch: int
    epochs: int
    separate_last_epoch: bool
    samples: int
    first_part: int

    def index_bytes(self, sequences: int) -> int:
        """Bytes of the three indices."""
        return self.epochs * sequences * 4 + (self.samples + 1) * 8 + self.samples * 4


def size(tokens_per_epoch: int, seq_length: int, samples: int | None) -> Size:
    """Epochs and samples for `samples` asked for (None: one epoch, whatever it holds).

    epochs: the fewest whose tokens hold samples * S + 1. The last one is kept separate when fewer than 80 % of an
    epoch's samples are asked from it. Source: Megatron-LM `GPTDataset._build_document_sample_shuffle_indices`.
    """
    epochs = 1 if samples is None else max(1, -(-(samples * seq_length + 1) // tokens_per_epoch))
    held = (epochs * tokens_per_epoch - 1) // seq_length
    if epochs == 1 or samples is None:
        return Size(tokens_per_epoch, 1, False, held, held)
    before_last = ((epochs - 1) * tokens_per_epoch - 1) // seq_length
    per_epoch = (tokens_per_epoch - 1) // seq_length
    separate = samples - before_last < int(0.80 * per_epoch)
    return Size(tokens_per_epoch, epochs, separate, held, before_last if separate else held)


def sample_index_dtype(places: int, longest: int) -> type[np.signedinteger]:
    """int32 while places in the document index and offsets fit, else int64."""
    return np.int64 if max(places, longest) > 2**31 - 1 else np.int32


class Order:
    """The samples of one split of one data set. `len` is the number of samples it holds.

    Raises UserError D014 when the indices would not fit in memory, D015 when they are not built and `build` is false.
    """

    def __init__(
        self, dataset: Dataset, bounds: tuple[int, int], seq_length: int, seed: int, samples: int | None,
        folder: str | Path, build: bool,
    ):  # fmt: skip
        self.dataset, self.bounds, self.seq_length = dataset, bounds, seq_length
        lengths = dataset.lengths[bounds[0] : bounds[1]]
        self.size = size(int(lengths.sum(dtype=np.int64)), seq_length, samples)
        facts = {
            "kind": "order", "version": 1, "first": bounds[0], "end": bounds[1],
            "lengths": hashlib.sha256(lengths.data.cast("B") if len(lengths) else b"").hexdigest(),
            "seq_length": seq_length, "seed": seed, "epochs": self.size.epochs,
            "separate_last_epoch": self.size.separate_last_epoch,
        }  # fmt: skip
        _refuse_too_large(dataset, self.size, len(lengths), samples)
        built = cache.arrays(folder, facts, self._builder(seed) if build else None)
        self.document_index, self.sample_index = built["document_index"], built["sample_index"]
        self.shuffle_index = built["shuffle_index"]

    def _builder(self, seed: int) -> Callable[[Path], None]:
        return lambda folder: build_indices(folder, self.dataset.lengths, self.bounds, self.size, self.seq_length, seed)

    def __len__(self) -> int:
        return len(self.shuffle_index)

    @property
    def num_documents(self) -> int:
        first, end = self.bounds
        return self.dataset.document_of(end - 1) + 1 - self.dataset.document_of(first)

    def at(self, number: int) -> "tuple[Order, int]":
        """This order and `number`: an order is a mixture of one."""
        return self, number

    def read(self, number: int, out: NDArray[np.int64]) -> None:
        """Write the tokens of sample `number` into out [S + 1]."""
        place, offset = self.sample_index[self.shuffle_index[number]]
        data = self.dataset
        gather(data.tokens, data.lengths, data.offsets, data.dtype.itemsize, self.document_index, place, offset, out)

    def pieces(self, number: int) -> list[tuple[int, int, int]]:
        """Where sample `number` comes from: (sequence, offset, tokens) in order; the tokens sum to S + 1."""
        place, offset = (int(n) for n in self.sample_index[self.shuffle_index[number]])
        found, left = [], self.seq_length + 1
        while left:
            sequence = int(self.document_index[place])
            taken = min(left, int(self.dataset.lengths[sequence]) - offset)
            if taken:
                found.append((sequence, offset, taken))
            left, place, offset = left - taken, place + 1, 0
        return found


def _refuse_too_large(dataset: Dataset, needed: Size, sequences: int, samples: int | None) -> None:
    """The document index is shuffled in memory; a mistyped length must not take the machine down."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if (need := needed.index_bytes(sequences)) > memory:
        raise error(
            "D014", "length", place=dataset.prefix, samples=samples, epochs=needed.epochs,
            tokens=needed.tokens_per_epoch, need=need / 2**30, memory=memory / 2**30,
        )  # fmt: skip


def build_indices(
    folder: Path, lengths: NDArray[np.int32], bounds: tuple[int, int], needed: Size, seq_length: int, seed: int
) -> None:
    """Write document_index.npy, sample_index.npy and shuffle_index.npy into `folder`.

    One generator of random numbers serves the shuffles in Megatron's order: documents (the last epoch's apart where it
    is separate), then samples. At no time are all three arrays in memory.
    """
    shuffle = Shuffle(seed)
    documents = _document_index(bounds, needed, shuffle)
    np.save(folder / "document_index.npy", documents)
    longest = int(lengths[bounds[0] : bounds[1]].max(initial=0))
    dtype = np.dtype(sample_index_dtype(len(documents), longest))
    _write_sample_index(folder / "sample_index.npy", lengths, documents, needed.samples, seq_length, dtype)
    del documents
    wide = needed.samples >= 2**32 - 2
    samples = np.arange(needed.samples, dtype=np.int64 if wide else np.uint32)
    shuffle(samples[: needed.first_part])
    shuffle(samples[needed.first_part :])
    np.save(folder / "shuffle_index.npy", samples)


def _document_index(bounds: tuple[int, int], needed: Size, shuffle: "Shuffle") -> NDArray:
    """[epochs * sequences] sequence numbers."""
    documents = np.arange(*bounds, dtype=np.int32 if bounds[1] <= 2**31 - 1 else np.int64)
    if needed.epochs == 1:
        shuffle(documents)
        return documents
    documents = np.tile(documents, needed.epochs)
    last = len(documents) - (bounds[1] - bounds[0]) * needed.separate_last_epoch
    shuffle(documents[:last])
    shuffle(documents[last:])
    return documents


def _write_sample_index(
    path: Path, lengths: NDArray[np.int32], documents: NDArray, samples: int, seq_length: int, dtype: np.dtype
) -> None:
    with open(path, "wb") as file:
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (samples + 1, 2)}
        np.lib.format.write_array_header_1_0(file, header)
        file.write(np.zeros((1, 2), dtype).data)
        rows, at = np.empty((min(samples, ROWS_AT_ONCE), 2), dtype), (0, 0)
        for start in range(0, samples, ROWS_AT_ONCE):
            part = rows[: min(ROWS_AT_ONCE, samples - start)]
            at = _fill_rows(lengths, documents, seq_length, at[0], at[1], part)
            file.write(part.data)


@compiled
def _fill_rows(lengths: Any, documents: Any, seq_length: int, place: Any, offset: Any, rows: Any) -> Any:
    """The next rows [n, 2] of the sample index, from (place, offset) on; returns the last of them.

    A row names the document that holds the sample's first token, so a document that is used up is left at once.
    """
    for row in range(len(rows)):
        left = seq_length + offset
        length = np.int64(lengths[documents[place]])
        while left >= length:
            left -= length
            place += 1
            length = np.int64(lengths[documents[place]])
        offset = left
        rows[row, 0], rows[row, 1] = place, offset
    return place, offset


@compiled
def gather(
    tokens: Any, lengths: Any, offsets: Any, itemsize: int, documents: Any, place: Any, offset: Any, out: Any
) -> None:
    """Fill out [n] with the stream's tokens from (place, offset) on."""
    filled: Any = 0
    while filled < len(out):
        sequence = documents[place]
        start = offsets[sequence] // itemsize + offset
        taken = min(len(out) - filled, np.int64(lengths[sequence]) - offset)
        for i in range(taken):
            out[filled + i] = tokens[start + i]
        filled += taken
        place += 1
        offset = 0


class Shuffle:
    """`numpy.random.RandomState(seed).shuffle`, bit for bit and faster: called on one array [n] after another.

    The same Mersenne Twister and the same rejection of numbers above the wanted range; but the numbers of a block are
    drawn before its exchanges, so that the processor waits for neither.
    """

    def __init__(self, seed: int):
        _, key, position, _, _ = np.random.RandomState(seed).get_state(legacy=True)
        self._key, self._position = np.array(key, np.uint32), int(position)
        self._words = np.empty_like(self._key)
        _temper(self._key, self._words)

    def __call__(self, array: NDArray) -> None:
        if len(array) >= WIDEST_SHUFFLE:
            state = np.random.RandomState()
            state.set_state(("MT19937", self._key, self._position, 0, 0.0))
            state.shuffle(array)
            _, key, position, _, _ = state.get_state(legacy=True)
            self._key[:], self._position = key, int(position)
            _temper(self._key, self._words)
        elif len(array) > 1:
            self._position = _shuffle(array, self._key, self._words, self._position)


STATE, SHIFT = 624, 397  # of the Mersenne Twister MT19937 (Matsumoto and Nishimura 1998)


@compiled
def _twist(key: Any) -> None:
    for k in range(STATE):
        y = (key[k] & np.uint32(0x80000000)) | (key[(k + 1) % STATE] & np.uint32(0x7FFFFFFF))
        key[k] = key[(k + SHIFT) % STATE] ^ (y >> np.uint32(1)) ^ ((y & np.uint32(1)) * np.uint32(0x9908B0DF))


@compiled
def _temper(key: Any, words: Any) -> None:
    for k in range(STATE):
        y = key[k]
        y ^= y >> np.uint32(11)
        y ^= (y << np.uint32(7)) & np.uint32(0x9D2C5680)
        y ^= (y << np.uint32(15)) & np.uint32(0xEFC60000)
        words[k] = y ^ (y >> np.uint32(18))


@compiled
def _shuffle(array: Any, key: Any, words: Any, position: int) -> Any:
    chosen = np.empty(STATE, np.int64)
    i = np.int64(len(array) - 1)
    mask = np.int64(1)
    while mask < i:
        mask = 2 * mask + 1
    while i > 0:
        while mask >> 1 >= i:  # numbers are drawn below the next power of two
            mask >>= 1
        if position == STATE:
            _twist(key)
            _temper(key, words)
            position = 0
        top = i
        count: Any = 0
        while position < STATE and i > mask >> 1:
            value = np.int64(words[position]) & mask
            position += 1
            chosen[count] = value
            taken = np.int64(value <= i)
            count += taken
            i -= taken
        for k in range(count):
            j = chosen[k]
            array[top - k], array[j] = array[j], array[top - k]
    return position
