"""The lines of a log, one at a time, whatever the launcher, the terminal or a crash did to them.

A log is hostile: it may be a gigabyte, hold one endless line, bytes that are no text, colours, progress bars that
overwrite themselves, and the prefix of a launcher on every line.
"""

import gzip
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO

BLOCK = 1 << 20
LONGEST = 1 << 18  # characters of a line that are looked at; the rest of it is passed over
COLOUR = re.compile(r"\x1b(?:\[[0-9;:?]*[ -/]*[@-~]|\][^\x07\x1b]{0,256}(?:\x07|\x1b\\)|[()][0-9A-B])")
# torchelastic --tee, torchrun --role, srun -l and pdsh
PREFIX = re.compile(r"^\s*(?:\[[A-Za-z_-]*(\d+)(?:\|\d+)?\]\s?:?\s?|(\d{1,5}): )")


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """(line number, text) without colours. A carriage return starts a new text of the same line number."""
    for number, raw in enumerate(_raw(path), 1):
        if "\x1b" in raw:
            raw = COLOUR.sub("", raw)
        if "\r" in raw:
            for part in raw.split("\r"):
                if part.strip():
                    yield number, part
        else:
            yield number, raw


def _raw(path: Path) -> Iterator[str]:
    with _opened(path) as file:
        held = ""
        while block := file.read(BLOCK):
            parts = block.split("\n")
            parts[0] = held + parts[0]
            held = parts.pop()
            yield from (part if len(part) <= LONGEST else part[:LONGEST] for part in parts)
            if len(held) > 2 * LONGEST:
                held = held[:LONGEST]
        if held:
            yield held[:LONGEST]


def _opened(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", errors="replace", newline="\n")
    return path.open(encoding="utf-8", errors="replace", newline="\n")


def rank(text: str) -> int | None:
    """The rank in a launcher's prefix: `[default7]:`, `[rank0]:`, `[trainer1|1]:`, `0: `. None without one."""
    found = PREFIX.match(text)
    return int(found.group(1) or found.group(2)) if found else None


NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?\Z")
NOT_FINITE = {"nan", "-nan", "+nan", "inf", "-inf", "+inf"}


def number(text: str) -> float | None:
    """A decimal number, nan and inf included, and nothing else: a cut or mixed-up field is None, never a part of it."""
    text = text.strip()
    if NUMBER.match(text) and len(text) < 40:
        return float(text)
    return float(text) if text.lower() in NOT_FINITE else None


def whole(text: str) -> int | None:
    text = text.strip().replace(",", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None
