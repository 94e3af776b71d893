"""Words of a shell: quotes, `$name`, `${name...}`, `$((...))`, `{1..8}`. A command substitution is not run; what `expr`
and `echo` would print is computed, everything else stays unknown."""

import re
from collections.abc import Iterator
from fnmatch import translate
from typing import TYPE_CHECKING

from steelyard.spec.errors import error
from steelyard.translate import arithmetic
from steelyard.translate.state import MARK, Budget, Source, State, unknown
from steelyard.translate.text import BREAK, Piece, Value, Word, joined, known, literal, quoted, shown, words

if TYPE_CHECKING:
    from tree_sitter import Node

INNER = {"simple_expansion", "expansion", "command_substitution", "arithmetic_expansion", "process_substitution",
         "string", "raw_string", "ansi_c_string", "translated_string", "brace_expression"}  # fmt: skip
PARAMETER = re.compile(r"([#!]?)([A-Za-z_]\w*|\d+|[@*#?$!-])(?:\[([^\]]*)\])?", re.DOTALL)
BARE = re.compile(r"\\(\n?)(.?)", re.DOTALL)
ESCAPES = {"bare": BARE, "operand": BARE, "double": re.compile(r'\\(\n?)([$`"\\]?)'),
           "heredoc": re.compile(r"\\(\n?)([$`\\]?)")}  # fmt: skip
LONG = 10_000  # characters of a text that patterns are matched against
BLANK, BLANKS = re.compile(r"(?:\s|\\\n)*"), re.compile(rb"(?:\s|\\\n)*")
ENVIRONMENT = "it is set where the script runs, not in the script"
ANSI = {"n": "\n", "t": "\t", "\\": "\\", "'": "'", '"': '"'}


class Expander:
    """`state` changes while the script is followed; `place` is the script's name for errors."""

    def __init__(self, place: str, state: State, budget: Budget):
        self.place, self.state, self.budget = place, state, budget
        self.marks: list[Piece] = []

    # --- nodes -------------------------------------------------------------------------------------------------------
    def words(self, node: "Node", source: Source) -> list[Word]:
        """A word of a command as the words it becomes."""
        return words(self.parts(node, source))

    def value(self, node: "Node", source: Source) -> Value:
        """A word where nothing is divided, as in an assignment."""
        parts = self.parts(node, source)
        lines = [Piece(" ", piece.line) if piece is BREAK else piece for piece in parts]
        return self.budget.grown(quoted(tuple(lines), False), source.line(node.start_byte))

    def parts(self, node: "Node", source: Source, inside: bool = False) -> Value:
        """Pieces, those that are not to be divided marked as quoted. `inside` double quotes nothing is."""
        line = source.line(node.start_byte)
        self.budget.step(line)
        kind = node.type
        if kind in ("string", "translated_string"):
            start = node.start_byte + (2 if kind == "translated_string" else 1)
            return self.between(node, source, start, node.end_byte - 1, "double") or (Piece("", line, True),)
        if kind == "raw_string":
            return self._plain(source, node.start_byte + 1, node.end_byte - 1, "raw", True) or (Piece("", line, True),)
        if kind == "ansi_c_string":
            raw = source.data[node.start_byte + 2 : node.end_byte - 1].decode(errors="replace")
            return literal(re.sub(r"\\(.)", lambda m: ANSI.get(m.group(1), m.group(0)), raw), line, True)
        if kind in ("simple_expansion", "expansion"):
            return self._parameter(node, source, inside)
        if kind == "arithmetic_expansion":
            return self._arithmetic(node, source)
        if kind == "command_substitution":
            return quoted(self.substitution(node, source), inside)
        if kind == "process_substitution":
            return unknown(node_text(node), line, "it would have to be run")
        if kind == "brace_expression":
            return self._range(node, line)
        if kind == "concatenation":
            return tuple(piece for child in node.children for piece in self.parts(child, source, inside))
        return self.between(node, source, node.start_byte, node.end_byte, "double" if inside else "bare")

    def between(self, node: "Node", source: Source, start: int, end: int, mode: str) -> Value:
        """Text with expansions in it. What lies between the expansions is taken from the text itself: the grammar drops
        blanks in places. `mode` says which escapes count; in double quotes and here-documents nothing is divided."""
        found: list[Piece] = []
        inside = mode in ("double", "heredoc")
        at = start
        for child in _inner(node, start, end, inside):
            found += self._plain(source, at, _begin(child, source), mode, mode != "operand")
            found += self.parts(child, source, inside)
            at = child.end_byte
        found += self._plain(source, at, end, mode, mode != "operand")
        return tuple(found)

    def _plain(self, source: Source, start: int, end: int, mode: str, quote: bool) -> Value:
        """Literal text, its escapes resolved and marks of unknown pieces turned back."""
        if end <= start:
            return ()
        found: list[Piece] = []
        at = start
        for row in source.data[start:end].split(b"\n"):
            text = row.decode(errors="replace")
            stop = at + len(row) < end
            joins = stop and mode != "raw" and _odd(text)
            if joins:
                text = text[:-1]
            elif stop:
                text += "\n"
            if mode != "raw":
                text = ESCAPES[mode].sub(lambda m: m.group(2) if m.group(2) else m.group(0), text)
            found += self._marked(text, source.line(at), quote)
            at += len(row) + 1
        return tuple(found)

    def _marked(self, text: str, line: int, quote: bool) -> Iterator[Piece]:
        at = 0
        for found in MARK.finditer(text):
            if found.start() > at:
                yield Piece(text[at : found.start()], line, quote)
            yield self.marks[int(found.group(1))]
            at = found.end()
        if at < len(text):
            yield Piece(text[at:], line, quote)

    def as_source(self, value: Value) -> Source:
        """Text that was put together, to be read as a script of its own; every piece keeps its line."""
        data, starts, lines = b"", [], []
        chunks: list[bytes] = []
        size = 0
        for piece in value:
            text = piece.text
            if piece.unknown:
                self.marks.append(piece)
                text = f"\ue000{len(self.marks) - 1}\ue001"
            starts.append(size)
            lines.append(piece.line)
            chunks.append(text.encode())
            size += len(chunks[-1])
        data = b"".join(chunks)
        return Source(data, starts or [0], lines or [0])

    # --- parameters --------------------------------------------------------------------------------------------------
    def _parameter(self, node: "Node", source: Source, inside: bool) -> Value:
        begin, text = _begin(node, source), node_text(node)
        line = source.line(begin)
        braces = text.startswith("${")
        found = PARAMETER.match(text, 2 if braces else 1)
        if found is None or (found.group(1) == "#" and found.end() == 0):
            return unknown(text, line, "this form of expansion is not read here")
        prefix, name, index = found.groups() if braces else ("", found.group(2) or found.group(0), None)
        if not braces:
            index = None
        rest = text[found.end() : -1] if braces else ""
        if prefix == "#" and not name:
            prefix, name = "", "#"
        every = index in ("@", "*") or name in ("@", "*")
        if prefix == "!":
            return self._indirect(name, text, line, inside)
        values = self._elements(name, index, text, line)
        if prefix == "#":
            return self._length(values, every, text, line)
        if rest:
            operand = begin + len(text[: found.end()].encode())
            values = self._operated(node, source, values, rest, operand, name)
            if values is None:
                return unknown(text, line, "this form of expansion is not read here", name)
        elif values is None:
            return unknown(text, line, self._why_unset(name), name)
        if every and inside and "*" not in (index, name):
            return tuple(
                piece for n, v in enumerate(values) for piece in ((BREAK,) * (n > 0) + (quoted(v, True) or _EMPTY))
            )
        whole = joined(values)
        return whole if not inside else quoted(whole, True) or (Piece("", line, True),)

    def _why_unset(self, name: str) -> str:
        if name.isdigit():
            return f"the script's argument {name} is not given: write it behind --"
        return ENVIRONMENT

    def _elements(self, name: str, index: str | None, text: str, line: int) -> list[Value] | None:
        """The values of a parameter, one or many; None where it is not set."""
        positional = self.state.positional
        if name in ("@", "*"):
            return list(positional)
        if name == "#":
            return [literal(str(len(positional)), line)]
        if name == "0":
            return [unknown(text, line, "the script's own path")]
        if name.isdigit():
            return [positional[int(name) - 1]] if int(name) <= len(positional) else None
        if not (name[0].isalpha() or name[0] == "_"):
            return [unknown(text, line, ENVIRONMENT)]
        value = self.state.variables.get(name)
        if value is None:
            return [] if index in ("@", "*") else None
        if not isinstance(value, list):
            return [value] if index in (None, "@", "*", "0") else None
        if index in ("@", "*"):
            return list(value)
        try:
            number = arithmetic.evaluate(index or "0", self.plain_variable)
            return [value[number]] if -len(value) <= number < len(value) else None
        except arithmetic.Undecided:
            return [unknown(text, line, "its index is not known")]

    def _indirect(self, name: str, text: str, line: int, inside: bool) -> Value:
        target = known(self.state.scalar(name) or ())
        value = self.state.scalar(target) if target else None
        return quoted(value, inside) if value else unknown(text, line, "it names a variable that is not known")

    def _length(self, values: list[Value] | None, every: bool, text: str, line: int) -> Value:
        if every:
            return literal(str(len(values or [])), line)
        whole = known(joined(values or []))
        return unknown(text, line, "its length is not known") if whole is None else literal(str(len(whole)), line)

    def _operated(
        self, node: "Node", source: Source, values: list[Value] | None, rest: str, at: int, name: str
    ) -> list[Value] | None:
        """`${name:-word}` and the other operators; None for one that is not read here."""
        found = re.match(r":?[-+=?]|##?|%%?|//?|:|\^\^?|,,?|@", rest)
        if found is None:
            return None
        operator = found.group(0)
        operand = self.between(node, source, at + len(operator), node.end_byte - 1, "operand")
        if operator[-1] in "-+=?" and operator[0] in ":-+=?":
            return self._defaulted(operator, values, operand, name)
        if values is None:
            return [unknown(node_text(node), source.line(node.start_byte), self._why_unset(name), name)]
        word = known(operand)
        if (
            word is None
            or len(word) > LONG
            or any(known(value) is None or len(shown(value)) > LONG for value in values)
        ):
            return [unknown(node_text(node), source.line(node.start_byte), "it is cut from an unknown value", name)]
        if operator == ":":
            return self._sliced(values, word, node)
        return [literal(_cut(operator, shown(value), word), value[0].line if value else 0) for value in values]

    def _defaulted(self, operator: str, values: list[Value] | None, operand: Value, name: str) -> list[Value] | None:
        whole = joined(values) if values is not None else ()
        empty = values is None or (operator[0] == ":" and known(whole) == "")
        kind = operator[-1]
        if kind == "+":
            return [()] if empty else [operand]
        if not empty:
            return values
        if kind == "=":
            self.state.variables[name] = quoted(operand, False)
        return None if kind == "?" else [operand]

    def _sliced(self, values: list[Value], word: str, node: "Node") -> list[Value] | None:
        try:
            start, *length = (arithmetic.evaluate(part, self.plain_variable) for part in word.split(":"))
        except arithmetic.Undecided:
            return None
        stop = start + length[0] if length else None
        if re.match(r"\$\{(?:[@*]|\w+\[[@*]\])", node_text(node)):
            begin = start - 1 if node_text(node)[2] in "@*" and start else start
            return values[begin : None if stop is None else begin + length[0]]
        text = shown(joined(values))
        return [literal(text[start:stop], values[0][0].line if values and values[0] else 0)]

    # --- arithmetic --------------------------------------------------------------------------------------------------
    def _arithmetic(self, node: "Node", source: Source) -> Value:
        begin, text = _begin(node, source), node_text(node)
        line = source.line(begin)
        start, end = (2, 1) if text.startswith("$[") else (3, 2)
        inner = self.between(node, source, begin + start, node.end_byte - end, "bare")
        return self.computed(inner, text, line)

    def computed(self, inner: Value, text: str, line: int) -> Value:
        """The number an arithmetic expression comes to."""
        if (lost := Word(inner).unknown) is not None:
            return unknown(text, line, lost.why, lost.name)
        try:
            return literal(str(arithmetic.evaluate(shown(inner), self.plain_variable)), line)
        except arithmetic.Undecided as reason:
            name = str(reason)
            return unknown(text, line, self._why_unset(name) if name else "it cannot be computed", name)

    def plain_variable(self, name: str) -> str:
        """A variable's text for arithmetic; raises Undecided with its name where it is not known."""
        value = self.state.scalar(name)
        text = known(value) if value is not None else None
        if text is None:
            raise arithmetic.Undecided(name)
        return text

    def _range(self, node: "Node", line: int) -> Value:
        found = re.fullmatch(r"\{(-?\d{1,9})\.\.(-?\d{1,9})\}", node_text(node))
        if found is None:
            return literal(node_text(node), line)
        first, last = int(found.group(1)), int(found.group(2))
        numbers = range(first, last + 1) if last >= first else range(first, last - 1, -1)
        if len(numbers) > 10_000:
            raise error("F012", place=f"{self.place}:{line}", detail=f"{len(numbers):,} words from one range")
        return joined([literal(str(number), line) for number in numbers])

    # --- substitutions -----------------------------------------------------------------------------------------------
    def substitution(self, node: "Node", source: Source) -> Value:
        """What a command would print, for the two commands whose output is a plain function of their arguments."""
        line, text = source.line(_begin(node, source)), node_text(node).strip()
        inner = [child for child in node.children if child.is_named]
        why = f"{short(text)} would have to be run"
        if len(inner) != 1:
            return unknown(text, line, why)
        commands = [inner[0]] if inner[0].type == "command" else []
        if inner[0].type == "pipeline":
            commands = [child for child in inner[0].children if child.is_named]
        if not commands or len(commands) > 2 or any(child.type != "command" for child in commands):
            return unknown(text, line, why)
        lists = [
            [word for child in command.children if child.is_named for word in self.words(child, source)]
            for command in commands
        ]
        name = lists[0][0].text if lists[0] else ""
        printed = joined([word.pieces for word in lists[0][1:]])
        if len(lists) == 2:
            computes = name == "echo" and lists[1] and lists[1][0].text == "bc"
            return self.computed(printed, text, line) if computes else unknown(text, line, why)
        if name == "expr":
            return self.computed(printed, text, line)
        if name == "echo" and not (len(lists[0]) > 1 and lists[0][1].text.startswith("-")):
            return quoted(printed, False)
        return unknown(text, line, why)


_EMPTY = (Piece("", 0, True),)


def _inner(node: "Node", start: int, end: int, inside: bool) -> Iterator["Node"]:
    """The outermost expansions within a range, in order."""
    for child in node.children:
        if child.end_byte <= start or child.start_byte >= end:
            continue
        if (
            child.type in INNER
            and child.start_byte >= start
            and not (inside and child.type in ("string", "raw_string"))
        ):
            yield child
        elif child.child_count:
            yield from _inner(child, start, end, inside)


def node_text(node: "Node") -> str:
    return BLANK.sub("", (node.text or b"").decode(errors="replace"), count=1)


def _begin(node: "Node", source: Source) -> int:
    """Where a node's own text begins: the grammar counts blanks before an expansion into it."""
    found = BLANKS.match(source.data, node.start_byte)
    return found.end() if found and found.end() < node.end_byte else node.start_byte


def short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:57] + "..."


def _odd(text: str) -> bool:
    """Whether a line ends with a backslash that is not escaped itself."""
    return (len(text) - len(text.rstrip("\\"))) % 2 == 1


def _cut(operator: str, text: str, word: str) -> str:
    """`${x#a}`, `${x%a}`, `${x/a/b}`, `${x^^}`, `${x,,}`."""
    if operator[0] == "^":
        return text.upper() if operator == "^^" else text[:1].upper() + text[1:]
    if operator[0] == ",":
        return text.lower() if operator == ",," else text[:1].lower() + text[1:]
    if operator[0] == "/":
        pattern, _, replacement = word.partition("/")
        found = re.compile(translate(pattern).removesuffix(r"\Z").removesuffix(r"\z"))
        return found.sub(lambda _: replacement, text, count=0 if operator == "//" else 1) if pattern else text
    fitting = re.compile(translate(word))
    ends = range(len(text) + 1)
    if operator[0] == "#":
        fits = [n for n in ends if fitting.match(text[:n])]
        return text[(fits[-1] if operator == "##" else fits[0]) :] if fits else text
    fits = [n for n in ends if fitting.match(text[n:])]
    return text[: (fits[0] if operator == "%%" else fits[-1])] if fits else text
