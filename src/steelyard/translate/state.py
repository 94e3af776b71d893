"""What a shell knows while its script is followed: variables, functions, files it would write, and the work it took."""

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile
from typing import TYPE_CHECKING, Any

from steelyard.spec.errors import error
from steelyard.translate.text import Piece, Unknown, Value, Word, joined, shown

if TYPE_CHECKING:
    from tree_sitter import Node

MOST_STEPS = 30_000  # nodes of the script that are followed, loops included
MOST_TEXT = 1 << 18  # characters in one variable
DEEPEST = 40  # functions and shells within each other
MARK = re.compile("\ue000(\\d+)\ue001")  # stands for an unknown piece in text that is read as a script again


@dataclass
class Source:
    """Text that is parsed: the script itself, or what `bash -c` and `eval` are given. `lines` are the byte offsets at
    which a new line number begins."""

    data: bytes
    starts: Sequence[int]
    lines: Sequence[int]

    @classmethod
    def script(cls, text: str) -> "Source":
        data = text.encode()
        starts = [0, *(found.end() for found in re.finditer(b"\n", data))]
        return cls(data, starts, range(1, len(starts) + 1))

    def line(self, offset: int) -> int:
        return self.lines[max(0, bisect_right(self.starts, offset) - 1)]


@dataclass(frozen=True)
class Written:
    """A file that the script would write."""

    value: Value
    line: int


@dataclass(frozen=True)
class Command:
    """A program that the script would start. `uncertain` says on what it depends, "" where it is certain; `outer` are
    the words that start the shell it stands in, as in `srun -n 8 bash -c ...`."""

    words: tuple[Word, ...]
    line: int
    uncertain: str = ""
    variables: dict[str, Value] = field(default_factory=dict)
    outer: tuple[Word, ...] = ()


@dataclass
class State:
    variables: dict[str, Value | list[Value]] = field(default_factory=dict)
    positional: list[Value] = field(default_factory=list)
    functions: dict[str, tuple["Node", Source]] = field(default_factory=dict)
    files: dict[str, Written] = field(default_factory=dict)

    def copy(self) -> "State":
        return State(dict(self.variables), list(self.positional), dict(self.functions), dict(self.files))

    def scalar(self, name: str) -> Value | None:
        value = self.variables.get(name)
        return (value[0] if value else ()) if isinstance(value, list) else value


@dataclass
class Budget:
    """Ends a script that would go on for ever, or grow without end. `source` names it in the error."""

    source: str
    steps: int = 0
    depth: int = 0

    def step(self, line: int) -> None:
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise error("F012", place=f"{self.source}:{line}", detail=f"more than {MOST_STEPS:,} steps")

    def grown(self, value: Value, line: int) -> Value:
        if sum(len(piece.text) for piece in value) > MOST_TEXT or len(value) > MOST_STEPS:
            raise error("F012", place=f"{self.source}:{line}", detail=f"a text of more than {MOST_TEXT:,} characters")
        return value

    def enter(self, line: int) -> None:
        self.depth += 1
        if self.depth > DEEPEST:
            raise error("F012", place=f"{self.source}:{line}", detail=f"more than {DEEPEST} calls within each other")

    def leave(self) -> None:
        self.depth -= 1


def merged(before: State, one: State, other: State, why: str) -> None:
    """Into `before`: what both branches of a test that cannot be decided agree on; the rest is unknown."""
    for kind in ("variables", "functions", "files"):
        a, b = getattr(one, kind), getattr(other, kind)
        found: dict[str, Any] = {}
        for name in a.keys() | b.keys():
            if name in a and name in b and a[name] == b[name]:
                found[name] = a[name]
            elif kind == "variables":
                found[name] = _either(name, a.get(name), b.get(name), why)
            else:
                found[name] = a.get(name, b.get(name))
        setattr(before, kind, found)
    before.positional = one.positional


def _either(name: str, one: Any, other: Any, why: str) -> Value | list[Value]:
    """What two ways leave in a variable. What both begin with stays known: of `A+=(--load x)` in one of two branches
    only the added words are undecided."""
    if isinstance(one, list) or isinstance(other, list):
        lists = [side if isinstance(side, list) else [side] if side else [] for side in (one, other)]
        same = _alike(*lists)
        return [*lists[0][:same], _undecided(name, [joined(side[same:]) for side in lists], why)]
    values: list[Value] = [one or (), other or ()]
    same = _alike(*values)
    tails = [value[same:] for value in values]
    begun = values[0][:same]
    if not begun or not all(shown(tail)[:1] in ("", " ", "\t", "\n") for tail in tails):  # within a word
        return _undecided(name, values, why)
    return (*begun, Piece(" ", begun[-1].line), *_undecided(name, tails, why))


def _alike(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many elements two sequences begin with alike."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _undecided(name: str, choices: list[Value], why: str) -> Value:
    flat = tuple(inner for value in choices for inner in _choices(_without_blanks(value)))
    return (Piece(f"${name}", next((p.line for v in flat for p in v), 0), unknown=Unknown(why, name, flat)),)


def _without_blanks(value: Value) -> Value:
    return tuple(dropwhile(lambda piece: not piece.unknown and not piece.text.strip(), value))


def _choices(value: Value) -> Iterator[Value]:
    """The values behind a variable that is undecided already, or the value itself."""
    if len(value) == 1 and value[0].unknown and value[0].unknown.choices and len(value[0].unknown.choices) < 16:
        yield from value[0].unknown.choices
    else:
        yield value


def unknown(text: str, line: int, why: str, name: str = "") -> Value:
    return (Piece(text, line, unknown=Unknown(why, name)),)
