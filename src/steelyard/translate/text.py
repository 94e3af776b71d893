"""What a shell variable or word holds: pieces of text, each with the line it was written on or the reason why it is
not known before the script runs."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Unknown:
    """Why a piece is not known. `name` is the variable that would settle it, if there is one; `choices` are the values
    it can have where a test that cannot be decided chose between known ones."""

    why: str
    name: str = ""
    choices: tuple["Value", ...] = ()


@dataclass(frozen=True)
class Piece:
    """`text` is what stands in the script where the value is unknown. `line` counts from 1; 0 is the command line.
    A `quoted` piece is not divided at blanks."""

    text: str
    line: int
    quoted: bool = False
    unknown: Unknown | None = None


Value = tuple[Piece, ...]
BREAK = Piece("\n", -1)  # between the elements of "${list[@]}"


@dataclass(frozen=True)
class Word:
    """One argument of a command, as the program would see it."""

    pieces: Value

    @property
    def text(self) -> str:
        return shown(self.pieces)

    @property
    def line(self) -> int:
        return next((piece.line for piece in self.pieces if piece.text), self.pieces[0].line if self.pieces else 0)

    @property
    def unknown(self) -> Unknown | None:
        return next((piece.unknown for piece in self.pieces if piece.unknown), None)


def shown(value: Value) -> str:
    """The text, unknown parts as they stand in the script."""
    return "".join(piece.text for piece in value)


def known(value: Value) -> str | None:
    """The text, or None where a part is unknown."""
    return None if any(piece.unknown for piece in value) else shown(value)


def literal(text: str, line: int, quoted: bool = False) -> Value:
    """Text of the script, one piece a line, so that every word of it keeps its own line."""
    pieces = []
    for part in text.splitlines(keepends=True):
        pieces.append(Piece(part, line, quoted))
        line += part.endswith("\n")
    return tuple(pieces) or (Piece("", line, quoted),)


def quoted(value: Value, on: bool) -> Value:
    return tuple(replace(piece, quoted=on) if piece is not BREAK else piece for piece in value)


def words(parts: Iterable[Piece]) -> list[Word]:
    """Pieces as words: divided at blanks outside quotes and at BREAK."""
    found: list[Word] = []
    open_: list[Piece] = []
    begun = False

    def close() -> None:
        nonlocal begun
        if begun:
            found.append(Word(tuple(open_)))
        open_.clear()
        begun = False

    for piece in parts:
        if piece is BREAK:
            close()
        elif piece.quoted or piece.unknown:
            open_.append(piece)
            begun = True
        else:
            for blank, text in re.findall(r"([ \t\r\n]+)|([^ \t\r\n]+)", piece.text):
                if blank:
                    close()
                else:
                    open_.append(replace(piece, text=text))
                    begun = True
    close()
    return found


def joined(values: Sequence[Value]) -> Value:
    """Values with a blank between each two."""
    pieces: list[Piece] = []
    for number, value in enumerate(values):
        if number:
            pieces.append(Piece(" ", value[0].line if value else 0))
        pieces += value
    return tuple(pieces)


def after(value: Value, count: int) -> Value:
    """A value without its first characters."""
    found: list[Piece] = []
    for piece in value:
        if count >= len(piece.text):
            count -= len(piece.text)
        else:
            found.append(Piece(piece.text[count:], piece.line, piece.quoted, piece.unknown))
            count = 0
    return tuple(found)
