"""Token files: Megatron's `.bin/.idx` pair, read and written byte for byte.

`PREFIX.bin` holds token ids back to back. `PREFIX.idx` holds, little endian and without padding: the magic, a version,
a dtype code, the number of sequences N and of document boundaries M, N lengths (int32, tokens), N offsets (int64,
bytes) and M boundaries (int64, sequence numbers from 0 to N). Source: Megatron-LM's `IndexedDataset`, since 2020.
"""

import hashlib
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from steelyard.spec.errors import error

MAGIC = b"MMIDIDX\x00\x00"
OLD_MAGIC = b"TNTIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document boundaries
CODES: dict[int, np.dtype] = {
    code: np.dtype(name).newbyteorder("<")
    for code, name in enumerate(["u1", "i1", "i2", "i4", "i8", "f8", "f4", "u2"], start=1)
}
LONGEST = 2**31 - 1  # tokens of a sequence: lengths are int32
COPY_BYTES = 1 << 24


def bin_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.idx")


class Dataset:
    """A token file, memory-mapped. `len` is the number of sequences.

    `lengths` int32 [sequences], `offsets` int64 [sequences] (bytes), `documents` int64 [documents + 1] (sequence
    numbers) and `tokens` [all tokens, as they lie in the file] are read-only views of the files.
    Raises UserError D001 (a file is missing), D002 (damaged or foreign index), D003 (index and tokens do not belong
    together).
    """

    def __init__(self, prefix: str | Path):
        self.prefix = str(prefix)
        _require(self.prefix)
        index = _mapped(idx_path(prefix))
        header = _header(index, idx_path(prefix))
        count, boundaries = header.sequences, header.boundaries
        self.lengths: NDArray[np.int32] = np.frombuffer(index, "<i4", count, HEADER.size)
        self.offsets: NDArray[np.int64] = np.frombuffer(index, "<i8", count, HEADER.size + 4 * count)
        self.documents: NDArray[np.int64] = np.frombuffer(index, "<i8", boundaries, HEADER.size + 12 * count)
        bin_bytes = bin_path(prefix).stat().st_size
        self.dtype = self._dtype(header.code, bin_bytes)
        self._check_ends(bin_bytes)
        self.tokens: NDArray = np.frombuffer(_mapped(bin_path(prefix)), self.dtype)

    def _dtype(self, code: int, bin_bytes: int) -> np.dtype:
        """Code 7 is float32 today and was float64 in 2021: the size of the token file tells which."""
        if code == 7 and len(self.lengths) and int(self.offsets[-1]) + 8 * int(self.lengths[-1]) == bin_bytes:
            return CODES[6]
        return CODES[code]

    def _check_ends(self, bin_bytes: int) -> None:
        """Offsets are a running sum, so first and last tell whether tokens and index belong together."""
        index = idx_path(self.prefix)
        if self.documents[0] != 0 or self.documents[-1] != len(self.lengths):
            raise error("D002", place=str(index), detail="its document boundaries do not span its sequences")
        if not len(self.lengths):
            expected = 0
        elif self.offsets[0] != 0 or self.lengths[0] < 0 or self.lengths[-1] < 0:
            raise error("D002", place=str(index), detail="its offsets do not start at 0 or a length is negative")
        else:
            expected = int(self.offsets[-1]) + int(self.lengths[-1]) * self.dtype.itemsize
        if expected != bin_bytes:
            raise error("D003", place=self.prefix, found=bin_bytes, expected=expected)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, sequence: int) -> NDArray:
        """All tokens of one sequence: [length]."""
        return self.read(sequence)

    def read(self, sequence: int, offset: int = 0, length: int | None = None) -> NDArray:
        """`length` tokens (to the end without it) of a sequence from `offset` on: a read-only view [length]."""
        whole = int(self.lengths[sequence])
        start = int(self.offsets[sequence]) // self.dtype.itemsize
        end = whole if length is None else offset + length
        if not 0 <= offset <= end <= whole:
            raise IndexError(f"tokens {offset} to {end} of sequence {sequence}, which has {whole}")
        return self.tokens[start + offset : start + end]

    @property
    def num_documents(self) -> int:
        return len(self.documents) - 1

    def document(self, number: int) -> NDArray:
        """All tokens of one document, its sequences joined: [tokens]."""
        first, last = int(self.documents[number]), int(self.documents[number + 1])
        return np.concatenate([self.read(s) for s in range(first, last)] or [np.empty(0, self.dtype)])

    def document_of(self, sequence: int) -> int:
        """The number of the document that a sequence is part of."""
        return int(np.searchsorted(self.documents, sequence, side="right")) - 1


@dataclass(frozen=True)
class _Header:
    code: int
    sequences: int
    boundaries: int


def _require(prefix: str) -> None:
    missing = [str(path) for path in (bin_path(prefix), idx_path(prefix)) if not path.is_file()]
    if not missing:
        return
    if Path(f"{prefix}.bin.partial").exists():
        hint = "a prepare that did not finish left a .partial file there; run the same command again to go on with it"
    elif prefix.endswith((".bin", ".idx")) and Path(prefix).exists():
        hint = f"give the prefix without its ending: {prefix[:-4]}"
    elif near := sorted(str(p)[:-4] for p in Path(prefix).parent.glob(Path(prefix).name + "*.idx")):
        hint = f"did you mean {near[0]}?"
    else:
        hint = "make it with `steelyard data prepare`, or correct the path (it is relative to the current folder)"
    raise error("D001", place=prefix, missing=" and ".join(missing), advice=hint)


def _mapped(path: Path) -> mmap.mmap | bytes:
    if path.stat().st_size == 0:
        return b""
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _header(index: mmap.mmap | bytes, path: Path) -> _Header:
    def refuse(detail: str) -> Exception:
        return error("D002", place=str(path), detail=detail)

    start = bytes(index[: HEADER.size])
    if start.startswith(OLD_MAGIC):
        raise refuse("it is of Megatron's old lazy or cached kind (TNTIDX); only the mmap kind is read")
    if len(start) < HEADER.size or not start.startswith(MAGIC):
        raise refuse(f"it starts with {start[:9]!r}, a token index with {MAGIC!r}")
    _, version, code, sequences, boundaries = HEADER.unpack(start)
    if version != 1:
        raise refuse(f"it is of version {version}; only version 1 is known")
    if code not in CODES:
        raise refuse(f"dtype code {code} is unknown; codes are 1 to 8")
    if boundaries < 1:
        raise refuse("it has no document boundaries")
    size = HEADER.size + 12 * sequences + 8 * boundaries
    if len(index) not in (size, size + sequences):  # the longer one: modes of multimodal files, not used here
        raise refuse(
            f"it has {len(index):,} bytes; {sequences:,} sequences in {boundaries - 1:,} documents take {size:,}"
        )
    return _Header(code, sequences, boundaries)


def dtype_for(vocab_size: int) -> np.dtype:
    """The dtype Megatron's preprocess chooses: uint16 below 65,500 ids, else int32."""
    return CODES[8] if vocab_size < 65500 else CODES[4]


class Writer:
    """Writes a token file; used as a context manager.

    Everything goes to `PREFIX.*.partial` first. A clean exit flushes to disk, calls `before_index` and renames, the
    index last; anything else (an exception, a kill) leaves no index, so that nothing half-written reads as good.
    While `keep` is true the partial files outlive an exception, for a Writer that goes on at a `position()`.
    """

    def __init__(self, prefix: str | Path, dtype: DTypeLike, resume_at: "Position | None" = None):
        self.prefix, self.dtype = str(prefix), np.dtype(dtype).newbyteorder("<")
        self._code = next(code for code, known in CODES.items() if known == self.dtype)
        self._highest = np.iinfo(self.dtype).max if self.dtype.kind in "iu" else None
        self.keep = resume_at is not None
        Path(prefix).parent.mkdir(parents=True, exist_ok=True)
        at = resume_at or Position(0, 0, 0)
        self._tokens = _opened(f"{prefix}.bin.partial", at.tokens * self.dtype.itemsize)
        self._lengths = _opened(f"{prefix}.lengths.partial", 4 * at.sequences)
        self._documents = _opened(f"{prefix}.documents.partial", 8 * at.documents)
        self.num_tokens, self.num_sequences, self.num_documents = at.tokens, at.sequences, at.documents
        self.before_index: Callable[[], None] = lambda: None
        self._sha256, self.highest_id = hashlib.sha256(), -1
        for block in _blocks(self._tokens):
            self._note(np.frombuffer(block, self.dtype))

    @property
    def sha256(self) -> str:
        """Of all tokens written so far."""
        return self._sha256.hexdigest()

    def _write_tokens(self, tokens: NDArray) -> None:
        self._tokens.write(np.ascontiguousarray(tokens).view(np.uint8).data)
        self._note(tokens)
        self.num_tokens += len(tokens)

    def _note(self, tokens: NDArray) -> None:
        """What a manifest says about all tokens."""
        self._sha256.update(np.ascontiguousarray(tokens).view(np.uint8).data)
        self.highest_id = max(self.highest_id, int(tokens.max(initial=0)) if len(tokens) else -1)

    def add_document(self, sequences: Iterable[ArrayLike]) -> None:
        """Append one document of any number of sequences, each a list or array of token ids [length].

        Raises UserError D005 for an id that the dtype cannot hold.
        """
        for sequence in sequences:
            ids = np.asarray(sequence)
            if ids.size and self._highest is not None:
                self._check(ids)
            tokens = ids.astype(self.dtype, copy=False)
            self.add_sequences(tokens, np.array([len(tokens)]))
        self.end_documents(np.array([0]))

    def _check(self, ids: NDArray) -> None:
        low, high = int(ids.min()), int(ids.max())
        lowest = int(np.iinfo(self.dtype).min) if self.dtype.kind == "i" else 0
        if low < lowest or high > (self._highest or 0):
            bad = low if low < lowest else high
            raise error("D005", place=self.prefix, id=bad, document=self.num_documents, dtype=self.dtype.name)

    def add_sequences(self, tokens: NDArray, lengths: NDArray) -> None:
        """Append sequences whose tokens [sum of lengths] already have the file's dtype; lengths [sequences]."""
        if len(lengths) and int(lengths.max()) > LONGEST:
            raise error("D018", place=self.prefix, document=self.num_documents, tokens=int(lengths.max()))
        self._write_tokens(tokens)
        self._lengths.write(np.asarray(lengths, "<i4").tobytes())
        self.num_sequences += len(lengths)

    def end_documents(self, before_end: NDArray) -> None:
        """Mark boundaries: document i of these ends `before_end[i]` sequences before the last one written."""
        self._documents.write((self.num_sequences - np.asarray(before_end, "<i8")).astype("<i8").tobytes())
        self.num_documents += len(before_end)

    def add_dataset(self, source: Dataset, first: int = 0, end: int | None = None) -> None:
        """Append documents `first` to `end` of another file of the same dtype."""
        end = source.num_documents if end is None else end
        bounds = source.documents[first : end + 1]
        begin, stop = int(bounds[0]), int(bounds[-1])
        if stop > begin:
            start = int(source.offsets[begin]) // self.dtype.itemsize
            last = int(source.offsets[stop - 1]) // self.dtype.itemsize + int(source.lengths[stop - 1])
            step = COPY_BYTES // self.dtype.itemsize
            for at in range(start, last, step):
                self._write_tokens(source.tokens[at : min(at + step, last)])
            self._lengths.write(source.lengths[begin:stop].tobytes())
            self.num_sequences += stop - begin
        self.end_documents(stop - bounds[1:])

    def position(self) -> "Position":
        """What is on disk once this returns; a later Writer can go on from it."""
        for file in (self._tokens, self._lengths, self._documents):
            _synced(file)
        return Position(self.num_tokens, self.num_sequences, self.num_documents)

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        partial = [Path(f"{self.prefix}.{part}.partial") for part in ("bin", "lengths", "documents", "idx")]
        try:
            if kind is None:
                self.position()
                self._write_index(partial[3])
        finally:
            for file in (self._tokens, self._lengths, self._documents):
                file.close()
            if kind is not None and not self.keep:
                for path in partial:
                    path.unlink(missing_ok=True)
        if kind is None:
            idx_path(self.prefix).unlink(missing_ok=True)  # an old index must never meet the new tokens
            os.replace(partial[0], bin_path(self.prefix))
            self.before_index()
            os.replace(partial[3], idx_path(self.prefix))
            sync_folder(Path(self.prefix).parent)
            partial[1].unlink()
            partial[2].unlink()

    def _write_index(self, path: Path) -> None:
        with open(path, "wb") as index:
            index.write(HEADER.pack(MAGIC, 1, self._code, self.num_sequences, self.num_documents + 1))
            for block in _blocks(self._lengths):
                index.write(block)
            offset = 0
            for block in _blocks(self._lengths):
                ends = offset + np.cumsum(np.frombuffer(block, "<i4"), dtype=np.int64) * self.dtype.itemsize
                index.write(np.concatenate(([offset], ends[:-1])).astype("<i8").tobytes())
                offset = int(ends[-1])
            index.write(struct.pack("<q", 0))
            for block in _blocks(self._documents):
                index.write(block)
            _synced(index)


@dataclass(frozen=True)
class Position:
    """How far a Writer has come, in whole tokens, sequences and documents."""

    tokens: int
    sequences: int
    documents: int


def can_resume(prefix: str | Path, dtype: DTypeLike, at: Position) -> bool:
    """Whether the partial files of a Writer that was stopped hold all that `at` says.

    One stopped between its last renames has no partial tokens any more; they are taken back from their new name.
    """
    tokens = Path(f"{prefix}.bin.partial")
    if not tokens.exists() and bin_path(prefix).exists() and not idx_path(prefix).exists():
        os.replace(bin_path(prefix), tokens)
    needed = {"bin": at.tokens * np.dtype(dtype).itemsize, "lengths": 4 * at.sequences, "documents": 8 * at.documents}
    partial = {name: Path(f"{prefix}.{name}.partial") for name in needed}
    return all(path.exists() and path.stat().st_size >= needed[name] for name, path in partial.items())


def _opened(path: str, at: int) -> BinaryIO:
    """A file to append to, cut to its first `at` bytes."""
    file = open(path, "r+b" if at else "w+b")  # noqa: SIM115  closed by the Writer
    file.truncate(at)
    file.seek(at)
    return file


def _synced(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make the renames in a folder last."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    """The whole of a file, in blocks whose size every item size divides."""
    file.seek(0)
    while block := file.read(COPY_BYTES):
        yield block
