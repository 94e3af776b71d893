"""Tensors in a checkpoint: which block of which tensor a rank writes, and reading any block back on any layout.

One safetensors file per rank, with the place of each block within its tensor in the header, as PyTorch's distributed
checkpoints write it (`DCP_SHARDING_INFO`), so that `torch.distributed.checkpoint.HuggingFaceStorageReader` reads the
folder too. A rank needs no other to know what it writes: it follows from the placements.
"""

import json
import math
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from steelyard.checkpoint.store import BLOCK, File
from steelyard.parallel.mesh import Mesh
from steelyard.spec.errors import error

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
AXES = ("replicate", "shard", "tensor")  # over which ranks of one pipeline stage may hold the same block
READ_BYTES = 16 << 20
TABLES = ("embedding.word.weight", "head.weight")  # one row a token, padding rows behind


@dataclass(frozen=True)
class Block:
    """A block of a whole tensor: where it begins in it, and its values."""

    name: str
    offsets: tuple[int, ...]
    values: Tensor

    @property
    def bytes(self) -> int:
        return self.values.numel() * self.values.element_size()


def blocks(name: str, tensor: Tensor) -> list[Block]:
    """What this process holds of a tensor; nothing of it is copied."""
    if not isinstance(tensor, DTensor):
        return [Block(name, (0,) * tensor.dim(), tensor)]
    local = tensor.to_local()
    return [Block(name, tuple(chunk.offsets), local) for chunk in tensor.__create_chunk_list__() if local.numel()]


def owned(tensors: Mapping[str, Tensor], mesh: Mesh) -> list[Block]:
    """The blocks this rank writes. Of ranks that hold the same block one does, in turn by the tensor's name."""
    axes = {axis: (mesh.whole.get_local_rank(axis), mesh.whole[axis].size()) for axis in AXES}
    found = [
        block
        for name, tensor in tensors.items()
        if all(_is_cut(tensor, axis) or rank == zlib.crc32(name.encode()) % size for axis, (rank, size) in axes.items())
        for block in blocks(name, tensor)
    ]
    # wide ones first, so that every block is aligned in the file
    return sorted(found, key=lambda block: (-block.values.element_size(), block.name))


def _is_cut(tensor: Tensor, axis: str) -> bool:
    """Whether the ranks of a mesh axis hold different blocks of a tensor."""
    if not isinstance(tensor, DTensor):
        return False
    names = tensor.device_mesh.mesh_dim_names or ()
    return axis in names and not tensor.placements[names.index(axis)].is_replicate()


def copies(tensors: Mapping[str, Tensor], mesh: Mesh) -> dict[str, int]:
    """CRC-32 of every block that the tensor ranks all hold, by name and place; nothing where there is one such rank."""
    if mesh.whole["tensor"].size() == 1:
        return {}
    shared = [b for name, t in tensors.items() if not _is_cut(t, "tensor") for b in blocks(name, t)]
    return {f"{b.name} at {list(b.offsets)}": zlib.crc32(_bytes(b.values)) for b in shared}


def _bytes(values: Tensor) -> memoryview:
    return values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


# --- writing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Staged:
    """The bytes of a safetensors file: its header, and the values of its blocks in order, each on the host."""

    header: bytes
    values: list[memoryview]

    @property
    def bytes(self) -> int:
        return len(self.header) + sum(len(part) for part in self.values)


class Staging:
    """Host memory that blocks are copied to, kept from save to save: fresh memory costs several times the copy."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def copy(self, mine: Sequence[Block]) -> Staged:
        """Copies of the blocks, which may then change. They stand until the next copy."""
        total, on_gpu = sum(block.bytes for block in mine), any(block.values.is_cuda for block in mine)
        if self._buffer.numel() < total:
            self._buffer = torch.empty(total, dtype=torch.uint8, pin_memory=on_gpu)
        start = 0
        for block in mine:
            place = self._buffer[start : start + block.bytes].view(block.values.dtype).view(block.values.shape)
            place.copy_(block.values, non_blocking=True)
            start += block.bytes
        if on_gpu:
            torch.cuda.synchronize()
        return Staged(_header(mine), [self._buffer[:total].numpy().data])

    def release(self) -> None:
        """Give the memory back; copies that are still referred to stand."""
        self._buffer = self._buffer.new_empty(0)


def in_place(mine: Sequence[Block]) -> Staged:
    """The blocks themselves where they are on the host, for a caller that waits until they are written."""
    return Staged(_header(mine), [_bytes(block.values) for block in mine])


def _header(mine: Sequence[Block]) -> bytes:
    entries, start = {}, 0
    for block in mine:
        dtype, shape, end = NAMES[block.values.dtype], list(block.values.shape), start + block.bytes
        entries[block.name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        start = end
    offsets = {block.name: {"saved_offsets": list(block.offsets)} for block in mine}
    metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
    text = json.dumps({"__metadata__": metadata, **entries}).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write(path: Path, staged: Staged, progress: Callable[[], None] = lambda: None) -> File:
    """Write a staged file through to the disk; `progress` is called after every block of bytes. Raises OSError.

    Neither writing nor the checksum, taken beside it, holds the interpreter's lock: training goes on meanwhile.
    """
    parts = [memoryview(staged.header), *staged.values]
    with ThreadPoolExecutor(1) as beside, path.open("wb", buffering=0) as file:
        crc = beside.submit(_checksum, parts)
        for part in parts:
            for start in range(0, len(part), BLOCK):
                _write_all(file, part[start : start + BLOCK])
                progress()
        os.fsync(file.fileno())
        return File(staged.bytes, crc.result())


def _checksum(parts: Sequence[memoryview]) -> int:
    value = 0
    for part in parts:
        for start in range(0, len(part), BLOCK):
            value = zlib.crc32(part[start : start + BLOCK], value)
    return value


def _write_all(file: Any, content: memoryview) -> None:
    while content:
        content = content[file.write(content) :]


# --- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A block in a file, whose values begin at byte `start`."""

    file: Path
    start: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


def index(path: Path) -> dict[str, list[Entry]]:
    """Every tensor of a checkpoint folder by name, with its blocks. Raises UserError C001 for a damaged file."""
    found: dict[str, list[Entry]] = {}
    for file in sorted(path.glob("*.safetensors")):
        try:
            for name, entry in _entries(file):
                found.setdefault(name, []).append(entry)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError):
            raise error("C001", place=str(file), path=path, detail=f"{file.name} cannot be read") from None
    return found


def _entries(file: Path) -> Iterator[tuple[str, Entry]]:
    """The blocks of a safetensors file. Raises ValueError and its like for a header that is none."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        header = json.loads(opened.read(min(length, size)))
    places = json.loads(header.pop("__metadata__", {}).get("DCP_SHARDING_INFO", "{}"))
    for name, of in header.items():
        shape, dtype, (start, end) = tuple(of["shape"]), DTYPES[of["dtype"]], of["data_offsets"]
        offsets = tuple(places[name]["saved_offsets"]) if name in places else (0,) * len(shape)
        if end - start != math.prod(shape) * dtype.itemsize or 8 + length + end > size or len(offsets) != len(shape):
            raise ValueError(name)
        yield name, Entry(file, 8 + length + start, offsets, shape, dtype)


def whole_shape(entries: Sequence[Entry]) -> tuple[int, ...]:
    """Shape of the tensor that the blocks make up."""
    ends = [[o + s for o, s in zip(entry.offsets, entry.shape, strict=True)] for entry in entries]
    return tuple(max(sizes) for sizes in zip(*ends, strict=True))


def load(path: Path, tensors: Mapping[str, Tensor], vocab_size: int | None = None) -> None:
    """Fill the given tensors in place from a checkpoint saved in any layout, a block at a time.

    Vocabulary tables may have another number of padding rows behind their `vocab_size` real ones: what is too many is
    left out, what is missing keeps the value it has. Raises UserError C001 for a damaged file, C003 for tensors of
    another model.
    """
    held = index(path)
    with ExitStack() as stack:
        files: dict[Path, FileIO] = {}
        for name, tensor in tensors.items():
            _check(path, name, tuple(tensor.shape), held.get(name, []), vocab_size)
            for block, entry in product(blocks(name, tensor), held[name]):
                try:
                    if entry.file not in files:
                        files[entry.file] = stack.enter_context(entry.file.open("rb", buffering=0))
                    _copy_common(files[entry.file], entry, block)
                except (OSError, EOFError) as failure:
                    detail = f"{entry.file.name} cannot be read ({failure})"
                    raise error("C001", place=str(entry.file), path=path, detail=detail) from None


def _check(path: Path, name: str, here: tuple[int, ...], entries: list[Entry], vocab_size: int | None) -> None:
    if not entries:
        raise error("C003", "checkpoint.load", path=path, detail=f"{name} is not in it")
    there = whole_shape(entries)
    table = name.partition(".")[2] in TABLES and vocab_size is not None
    rows_fit = table and there[1:] == here[1:] and min(there[0], here[0]) >= (vocab_size or 0)
    if there != here and not rows_fit:
        raise error("C003", "checkpoint.load", path=path, detail=f"{name} is {there} there, {here} here")
    if sum(math.prod(entry.shape) for entry in entries) != math.prod(there):
        raise error("C001", place=str(path), path=path, detail=f"a part of {name} is in no file")


def _copy_common(file: FileIO, entry: Entry, block: Block) -> None:
    """Copy what a block in a file and a block in memory have in common, some rows at a time.

    Read, not mapped: mapped pages would count as this process's memory beside the tensors.
    """
    there, here = [], []
    for first, size, begin, length in zip(entry.offsets, entry.shape, block.offsets, block.values.shape, strict=True):
        start, end = max(first, begin), min(first + size, begin + length)
        if start >= end:
            return
        there.append(slice(start - first, end - first))
        here.append(slice(start - begin, end - begin))
    rows, target = (there[0], block.values[tuple(here)]) if there else (slice(0, 1), block.values[None])
    width = math.prod(entry.shape[1:]) * entry.dtype.itemsize
    at_once = max(1, READ_BYTES // max(1, width))
    for row in range(rows.start, rows.stop, at_once):
        count = min(at_once, rows.stop - row)
        values = torch.empty((count, *entry.shape[1:]), dtype=entry.dtype)
        file.seek(entry.start + row * width)
        _read_all(file, values.view(-1).view(torch.uint8).numpy().data)
        done = row - rows.start
        target[done : done + count].copy_(values[(slice(None), *there[1:])])


def _read_all(file: FileIO, target: memoryview) -> None:
    while target:
        count = file.readinto(target)
        if not count:
            raise EOFError("it ends too early")
        target = target[count:]


def read_whole(path: Path, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor whose name begins with `prefix`, whole, on the CPU, in its saved dtype, one at a time."""
    for name, entries in index(path).items():
        if name.startswith(prefix):
            tensor = torch.empty(whole_shape(entries), dtype=entries[0].dtype)
            load(path, {name: tensor})
            yield name, tensor
