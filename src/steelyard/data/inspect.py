"""What is in a token file, and whether it is sound."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from steelyard.data import manifest as manifests
from steelyard.data.manifest import Manifest
from steelyard.data.store import COPY_BYTES, Dataset


@dataclass(frozen=True)
class Statistics:
    """Lengths are of documents, in tokens. `histogram` counts documents by the power of two below their length:
    {0: empty ones, 1: of 1, 2: of 2 to 3, 4: of 4 to 7, ...}."""

    documents: int
    sequences: int
    tokens: int
    dtype: str
    bytes: int
    shortest: int
    median: float
    mean: float
    longest: int
    histogram: dict[int, int]


def document_lengths(dataset: Dataset) -> NDArray[np.int64]:
    """Tokens of each document: [documents]."""
    ends = np.concatenate(([0], np.cumsum(dataset.lengths, dtype=np.int64)))
    return np.diff(ends[dataset.documents])


def statistics(dataset: Dataset) -> Statistics:
    lengths = document_lengths(dataset)
    some = lengths if len(lengths) else np.zeros(1, np.int64)
    powers, counts = np.unique(
        np.where(lengths > 0, 2 ** np.floor(np.log2(np.maximum(lengths, 1))), 0), return_counts=True
    )
    return Statistics(
        len(lengths), len(dataset), int(lengths.sum()), dataset.dtype.name, dataset.tokens.nbytes, int(some.min()),
        float(np.median(some)), float(some.mean()), int(some.max()),
        {int(power): int(count) for power, count in zip(powers, counts, strict=True)},
    )  # fmt: skip


def verify(prefix: str | Path, vocab_size: int | None = None) -> Iterator[str]:
    """Everything that is wrong with a token file; nothing for a sound one. Reads all of it once.

    `vocab_size` defaults to the manifest's. Raises UserError D001 to D003 where it cannot be opened at all, D019 where
    there is a manifest that cannot be read.
    """
    dataset = Dataset(prefix)
    manifest = manifests.read(prefix) if manifests.path(prefix).exists() else None
    yield from _index_problems(dataset)
    yield from _id_problems(dataset, vocab_size or (manifest.vocab_size if manifest else None))
    if manifest:
        yield from _manifest_problems(dataset, manifest)


def _index_problems(dataset: Dataset) -> Iterator[str]:
    lengths = dataset.lengths.astype(np.int64)
    if len(negative := np.flatnonzero(lengths < 0)):
        yield f"sequence {negative[0]:,} has the negative length {lengths[negative[0]]:,}"
    expected = (np.cumsum(lengths) - lengths) * dataset.dtype.itemsize
    if len(wrong := np.flatnonzero(dataset.offsets != expected)):
        at = int(wrong[0])
        yield f"sequence {at:,} lies at byte {dataset.offsets[at]:,}, by the lengths before it at {expected[at]:,}"
    if len(falling := np.flatnonzero(np.diff(dataset.documents) < 0)):
        yield f"document {falling[0]:,} ends before it starts"


def _id_problems(dataset: Dataset, vocab_size: int | None) -> Iterator[str]:
    if dataset.dtype.kind not in "iu":
        yield f"the tokens are {dataset.dtype.name}, not integers"
        return
    most = vocab_size or int(np.iinfo(dataset.dtype).max) + 1
    for start in range(0, len(dataset.tokens), COPY_BYTES):
        block = dataset.tokens[start : start + COPY_BYTES]
        if block.min() < 0 or block.max() >= most:
            at = start + int(np.flatnonzero((block < 0) | (block >= most))[0])
            sequence = int(np.searchsorted(dataset.offsets, at * dataset.dtype.itemsize, side="right")) - 1
            document = dataset.document_of(sequence)
            yield f"document {document:,} holds token id {dataset.tokens[at]}, outside a vocabulary of {most:,}"
            return


def _manifest_problems(dataset: Dataset, manifest: Manifest) -> Iterator[str]:
    if (dataset.num_documents, len(dataset.tokens)) != (manifest.documents, manifest.tokens):
        yield (f"the manifest says {manifest.documents:,} documents and {manifest.tokens:,} tokens, the index "
               f"{dataset.num_documents:,} and {len(dataset.tokens):,}")  # fmt: skip
    digest = hashlib.sha256(dataset.tokens.data.cast("B") if len(dataset.tokens) else b"").hexdigest()
    if digest != manifest.bin_sha256:
        yield "the tokens are not those that were prepared (their SHA-256 is not the manifest's)"
    if manifest.append_eod:
        ends = np.cumsum(document_lengths(dataset))
        last = dataset.tokens[np.maximum(ends, 1) - 1]
        if len(open_ones := np.flatnonzero((ends < 1) | (last != manifest.eod))):
            yield f"document {open_ones[0]:,} does not end with the id {manifest.eod}"
