"""The lines of a log, one at a time, whatever the launcher, the terminal or a crash did to them.

A log is hostile: it may be a gigabyte, hold one endless line, bytes that are no text, colours, progress bars that
overwrite themselves, and the prefix of a launcher on every line.
"""

import ast
import gzip
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

BLOCK = 1 << 20
LONGEST = 1 << 18  # characters of a line that are looked at; the rest of it is passed over
COLOUR = re.compile(r"\x1b(?:\[[0-9;:?]*[ -/]*[@-~]|\][^\x07\x1b]{0,256}(?:\x07|\x1b\\)|[()][0-9A-B])")
# torchelastic --tee, torchrun --role, srun -l and pdsh
PREFIX = re.compile(r"^\s*(?:\[[A-Za-z_-]*(\d+)(?:\|\d+)?\]\s?:?\s?|(\d{1,5}): )")


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """(line number, text) without colours. A carriage return starts a new text of the same line number."""
    number = 0
    for block in _blocks(path):
        for text in block:
            number += 1
            if len(text) > LONGEST:
                text = text[:LONGEST]
            if "\x1b" in text:
                text = COLOUR.sub("", text)
            if "\r" in text:
                for part in text.split("\r"):
                    if part.strip():
                        yield number, part
            else:
                yield number, text


def _blocks(path: Path) -> Iterator[list[str]]:
    """Lists of whole lines; of a line longer than a block only the beginning."""
    with _opened(path) as file:
        held = ""
        while block := file.read(BLOCK):
            parts = block.split("\n")
            parts[0] = held + parts[0]
            held = parts.pop()
            yield parts
            if len(held) > 2 * LONGEST:
                held = held[:LONGEST]
        if held:
            yield [held]


def _opened(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", errors="replace", newline="\n")
    return path.open(encoding="utf-8", errors="replace", newline="\n")


def rank(text: str) -> int | None:
    """The rank in a launcher's prefix: `[default7]:`, `[rank0]:`, `[trainer1|1]:`, `0: `. None without one."""
    found = PREFIX.match(text)
    return int(found.group(1) or found.group(2)) if found else None


def number(text: str) -> float | None:
    """A decimal number, nan and inf included, and nothing else: a cut or mixed-up field is None, never a part of it."""
    if len(text) > 48 or "_" in text or not text.isascii():  # float() takes more than what a log prints
        return None
    try:
        return float(text)
    except ValueError:
        return None


def literal(text: str) -> Any:
    """A Python value as a program prints it; None for anything else. Python's own remarks about it stay unsaid."""
    try:
        with warnings.catch_warnings(action="ignore"):
            return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def whole(text: str) -> int | None:
    text = text.strip().replace(",", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None
