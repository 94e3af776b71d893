"""The documents to prepare: files, folders, patterns and standard input as a stream of blocks.

JSON-lines files hold one document a line; every other file is one document. Compressed files (.gz, .zst) are read as
what they hold. The order is that of the arguments, and of names within a folder or pattern.
"""

import glob
import gzip
import io
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from steelyard.spec.errors import error

LINES = (".jsonl", ".ndjson", ".json")
COMPRESSED = (".gz", ".zst")
BLOCK_BYTES = 1 << 20
STDIN = "-"


@dataclass(frozen=True)
class Input:
    """One file, or the part of a JSON-lines file whose lines start in [first, end) (bytes; end None: to its end)."""

    path: str
    size: int
    first: int = 0
    end: int | None = None

    @property
    def has_lines(self) -> bool:
        return self.path == STDIN or _ending(self.path) in LINES

    @property
    def compressed(self) -> bool:
        return Path(self.path).suffix in COMPRESSED


@dataclass(frozen=True)
class Cursor:
    """The place between two blocks: input number, offset in it (bytes, uncompressed), lines of it that are behind."""

    input: int = 0
    offset: int = 0
    line: int = 0


@dataclass(frozen=True)
class Block:
    """Some lines of one JSON-lines file, or some whole text files: (path, lines before it, content).

    `after` is the place behind it, `done` how many bytes of all the inputs (as they lie on disk) are then read.
    """

    lines: bool
    parts: list[tuple[str, int, bytes]]
    after: Cursor
    done: int


def find(arguments: Sequence[str | Path]) -> list[Input]:
    """The files that the arguments name. Raises UserError D013 for an argument that comes to none."""
    found: list[Input] = []
    for argument in map(str, arguments):
        paths = _paths(argument)
        if not paths:
            raise error("D013", place=argument)
        found += [Input(path, Path(path).stat().st_size if path != STDIN else 0) for path in paths]
    if not found:
        raise error("D013", place="(no input)")
    return found


def _paths(argument: str) -> list[str]:
    path = Path(argument)
    if argument == STDIN or path.is_file():
        return [argument]
    if path.is_dir():
        inside = (p for p in path.rglob("*") if p.is_file())
        return sorted(str(p) for p in inside if not any(part.startswith(".") for part in p.relative_to(path).parts))
    return sorted(p for p in glob.glob(argument, recursive=True) if Path(p).is_file())


def shard(inputs: list[Input], index: int, count: int) -> list[Input]:
    """The part of the inputs that shard `index` of `count` takes: consecutive, equal in bytes, together everything.

    Plain JSON-lines files are cut between lines; other files go whole to the shard in which they start.
    """
    if any(i.path == STDIN for i in inputs):
        raise error("D020", place="--shard", rule="standard input cannot be shared between shards",
                    advice="give files, or leave --shard out")  # fmt: skip
    total = sum(i.size for i in inputs)
    low, high = index * total // count, (index + 1) * total // count
    taken, start = [], 0
    for each in inputs:
        stop = start + each.size
        if each.has_lines and not each.compressed:
            first, end = max(low, start) - start, min(high, stop) - start
            if first < end:
                taken.append(Input(each.path, end - first, first, end))
        elif low <= start < high:
            taken.append(each)
        start = stop
    return taken


def blocks(inputs: list[Input], start: Cursor) -> Iterator[Block]:
    """The inputs from `start` on. Raises UserError D023 for a file that cannot be read or decompressed."""
    done = sum(each.size for each in inputs[: start.input])
    texts: list[tuple[str, int, bytes]] = []
    for number in range(start.input, len(inputs)):
        each = inputs[number]
        done += each.size
        try:
            if each.has_lines:
                if texts:
                    yield Block(False, texts, Cursor(number), done - each.size)
                    texts = []
                at = start if number == start.input else Cursor(number)
                yield from _line_blocks(each, number, at, done - each.size)
                continue
            with _opened(each) as (_, stream):
                texts.append((each.path, 0, stream.read()))
        except (OSError, EOFError, zlib.error) as failure:
            raise error("D023", place=each.path, detail=_reason(failure)) from None
        if sum(len(content) for _, _, content in texts) >= BLOCK_BYTES:
            yield Block(False, texts, Cursor(number + 1), done)
            texts = []
    if texts:
        yield Block(False, texts, Cursor(len(inputs)), done)


def _line_blocks(each: Input, number: int, at: Cursor, before: int) -> Iterator[Block]:
    with _opened(each) as (raw, stream):
        offset, line = _seek(each, stream, at.offset), at.line
        while each.end is None or offset < each.end:
            content = stream.read(BLOCK_BYTES if each.end is None else min(BLOCK_BYTES, each.end - offset))
            if not content:
                return
            if not content.endswith(b"\n"):
                content += stream.readline()
            offset += len(content)
            read = min(each.size, (raw.tell() if each.compressed else offset) - each.first) if each.size else 0
            part = (each.path, line, content)
            line += content.count(b"\n")
            yield Block(True, [part], Cursor(number, offset, line), before + read)


def _seek(each: Input, stream: BinaryIO, offset: int) -> int:
    """Go on at `offset`, or at the first line that starts in the input's part of the file."""
    if offset and each.compressed:
        left = offset
        while left and (skipped := stream.read(min(left, BLOCK_BYTES))):
            left -= len(skipped)
    elif offset:
        stream.seek(offset)
    elif each.first:
        stream.seek(each.first - 1)
        offset = each.first - 1 + len(stream.readline())
    return offset


class _opened:
    """(the file, the stream of its content), both closed at the end."""

    def __init__(self, each: Input):
        self.each = each

    def __enter__(self) -> tuple[BinaryIO, BinaryIO]:
        if self.each.path == STDIN:
            self.file = self.stream = cast(BinaryIO, sys.stdin.buffer)
            return self.file, self.stream
        self.file = open(self.each.path, "rb")
        self.stream = _decompressed(self.file, Path(self.each.path).suffix)
        return self.file, self.stream

    def __exit__(self, *_: object) -> None:
        if self.each.path != STDIN:
            self.stream.close()
            self.file.close()


def _decompressed(file: BinaryIO, suffix: str) -> BinaryIO:
    if suffix == ".gz":
        return cast(BinaryIO, gzip.GzipFile(fileobj=file))
    if suffix == ".zst":
        return cast(BinaryIO, io.BufferedReader(_Zstd(file), BLOCK_BYTES))
    return file


class _Zstd(io.RawIOBase):
    """The content of a file of zstd frames. zstandard's own reader takes a file that is cut for a whole one."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self._contents = self._decompress()
        self._ready = memoryview(b"")

    def _decompress(self) -> Iterator[bytes]:
        from zstandard import ZstdDecompressor, ZstdError

        packed = self._file.read(BLOCK_BYTES)
        while packed:
            frame = ZstdDecompressor().decompressobj()
            while not frame.eof:
                if not packed:
                    raise EOFError("it ends in the middle of its compressed stream")
                try:
                    yield frame.decompress(packed)
                except ZstdError as failure:
                    raise OSError(str(failure)) from None
                packed = frame.unused_data or self._file.read(BLOCK_BYTES)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        while not self._ready:
            content = next(self._contents, None)
            if content is None:
                return 0
            self._ready = memoryview(content)
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count


def _ending(path: str) -> str:
    """The ending that says what a file holds."""
    inner = Path(path)
    return Path(inner.stem).suffix if inner.suffix in COMPRESSED else inner.suffix


def _reason(failure: Exception) -> str:
    return getattr(failure, "strerror", None) or str(failure) or type(failure).__name__


def lines_before(each: Input) -> int:
    """Lines of the file before the part that is taken: what a line's number in a shard starts from."""
    if not each.first:
        return 0
    count, left = 0, each.first
    with open(each.path, "rb") as file:
        while left and (content := file.read(min(left, BLOCK_BYTES))):
            left -= len(content)
            count += content.count(b"\n")
        if left == 0 and not content.endswith(b"\n"):
            count += 1
    return count
