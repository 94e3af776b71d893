"""What a script starts: programs, the shell's own commands, files written by redirection."""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, cast

from steelyard.spec.errors import error
from steelyard.translate.conditions import Test
from steelyard.translate.expand import Expander, node_text
from steelyard.translate.state import Budget, Command, Source, State, Written, unknown
from steelyard.translate.text import Value, Word, joined, literal, quoted, shown

if TYPE_CHECKING:
    from tree_sitter import Node

MOST_COMMANDS = 2_000
SHELLS = {"bash", "sh", "zsh", "dash"}
# set by a batch system or a launcher, so that a test of them cannot be decided from the script
OUTSIDE = re.compile(
    r"SLURM|PBS_|LSB_|OMPI_|PMI|CUDA_|NCCL_|HOME$|USER$|PWD$|PATH$|HOST|RANDOM$|SECONDS$|RANK$|LOCAL_RANK$|WORLD_SIZE$|"
    r"MASTER_|CONDA|VIRTUAL_ENV|.*PATH$"
)


class Left(Exception):
    """`exit`, `return`, `break` or `continue`, which leave what they stand in."""

    def __init__(self, how: str, line: int):
        self.how, self.line = how, line


class Commands(Expander, ABC):
    """Follows commands; the statements around them are followed by the shell that is made of it."""

    def __init__(self, place: str, state: State, budget: Budget):
        super().__init__(place, state, budget)
        self.commands: list[Command] = []
        self.notes: list[str] = []
        self.uncertain: list[str] = []
        self.outer: tuple[Word, ...] = ()

    @abstractmethod
    def program(self, source: Source) -> None:
        """Follow a whole text."""

    @abstractmethod
    def statement(self, node: "Node", source: Source) -> bool | None:
        """Follow one statement. Whether it would succeed; None where that cannot be known."""

    def note(self, text: str) -> None:
        if text not in self.notes and len(self.notes) < 50:
            self.notes.append(text)

    def tested(self, value: Value) -> str | None:
        """The text of a value in a test: a variable that no script sets is empty there."""
        text = ""
        for piece in value:
            if piece.unknown is None:
                text += piece.text
            elif not piece.unknown.name or piece.unknown.choices or OUTSIDE.match(piece.unknown.name):
                return None
        return text

    def _redirected_statement(self, node: "Node", source: Source, line: int) -> bool | None:
        inner = node.child_by_field_name("body")
        document: Value | None = None
        target: Node | None = None
        for redirect in _redirects(node):
            if redirect.type == "heredoc_redirect":
                document = self._document(redirect, source)
            elif redirect.type == "file_redirect" and any(c.type in (">", ">|", "&>") for c in redirect.children):
                descriptor = redirect.child_by_field_name("descriptor")
                if descriptor is None or node_text(descriptor) == "1":
                    target = redirect.child_by_field_name("destination")
            elif redirect.type == "file_redirect" and any(c.type == ">>" for c in redirect.children):
                target = redirect.child_by_field_name("destination")
        status = self.statement(inner, source) if inner is not None else True
        if target is not None:
            self._write(target, inner, document, source, line)
        elif document is not None and inner is not None and inner.type == "command":
            command = self._command_words(inner, source)
            if command and _base(command[0]) in SHELLS:
                self._nested(document)
            elif command and _base(command[0]) == "tee":
                for word in command[1:]:
                    self.state.files[word.text] = Written(document, line)
        return status

    def _write(self, target: "Node", inner: "Node | None", document: Value | None, source: Source, line: int) -> None:
        path = shown(self.value(target, source))
        if path == "/dev/null":
            return
        value = unknown(path, line, f"line {line} would have to be run")
        if inner is not None and inner.type == "command":
            command = self._command_words(inner, source)
            name = _base(command[0]) if command else ""
            if document is not None and name == "cat":
                value = document
            elif name == "echo" and not any(w.text in ("-e", "-n") for w in command[1:2]):
                value = joined([word.pieces for word in command[1:]])
        self.state.files[path] = Written(value, line)

    def _document(self, node: "Node", source: Source) -> Value:
        """A here-document's text, with its expansions."""
        start = next((child for child in node.children if child.type == "heredoc_start"), None)
        end = next((child for child in node.children if child.type == "heredoc_end"), None)
        inner = next((child for child in node.children if child.type == "heredoc_body"), None)
        if start is None or inner is None:
            return ()
        first = source.data.find(b"\n", start.end_byte) + 1
        last = end.start_byte if end is not None else inner.end_byte
        if re.search(rb"['\"\\]", start.text or b""):
            text = source.data[first:last].decode(errors="replace")
            return literal(text, source.line(first))
        return quoted(self.between(inner, source, first, last, "heredoc"), False)

    def _command_words(self, node: "Node", source: Source) -> list[Word]:
        found: list[Word] = []
        for child in node.children:
            if child.is_named and child.type not in ("variable_assignment", "comment", "herestring_redirect",
                                                     "file_redirect", "heredoc_redirect"):  # fmt: skip
                found += self.words(child, source)
        return found

    def _command_name(self, node: "Node", source: Source, line: int) -> None:
        return None

    def _command(self, node: "Node", source: Source, line: int) -> bool | None:
        own = [child for child in node.children if child.type == "variable_assignment"]
        found = self._command_words(node, source)
        if not found:
            for child in own:
                self.statement(child, source)
            return True
        before = self.state.variables
        if own:  # NAME=value command: the value holds for this command alone
            self.state.variables = dict(before)
            for child in own:
                self.statement(child, source)
        try:
            return self.run(found, line)
        finally:
            if own:
                self.state.variables = before

    def run(self, found: list[Word], line: int) -> bool | None:
        name = _base(found[0])
        builtin = getattr(self, f"_run_{name}", None) if name.isidentifier() else None
        if name in self.state.functions:
            return self._call(name, found[1:], line)
        if name in ("true", ":"):
            return True
        if name == "false":
            return False
        if name in ("[", "test"):
            tokens: list[str | Value] = []
            for word in found[1:]:
                text = self.tested(word.pieces)
                operator = text is not None and re.fullmatch(r"-\w+|=|==|!=|!|\]", text)
                tokens += (
                    []
                    if text == "]"
                    else [text if operator and text else word.pieces if text is None else literal(text, 0)]
                )
            return Test(tokens[::-1], False).choice()
        if builtin is not None:
            return cast("bool | None", builtin(found, line))
        if name == ".":
            return self._run_source(found, line)
        inner = _inner_script(found)
        if inner is not None:
            before, self.outer = self.outer, (*self.outer, *found[:inner])
            self._nested(found[inner].pieces)
            self.outer = before
            return None
        self._record(found, line)
        return None

    def _record(self, found: Sequence[Word], line: int) -> None:
        if len(self.commands) >= MOST_COMMANDS:
            raise error("F012", place=f"{self.place}:{line}", detail=f"more than {MOST_COMMANDS:,} programs started")
        # a launch that a script puts together from variables stands in their lines; it starts in this one
        variables = {name: value for name, value in self.state.variables.items() if isinstance(value, tuple)}
        self.commands.append(Command(tuple(found), line, "; ".join(self.uncertain), variables, self.outer))

    def _nested(self, value: Value) -> None:
        """A text that a shell of its own would read."""
        before = self.state
        self.state = before.copy()
        with suppress(Left):
            self.program(self.as_source(value))
        before.files = self.state.files
        self.state = before

    def _call(self, name: str, arguments: list[Word], line: int) -> bool | None:
        inner, source = self.state.functions[name]
        self.budget.enter(line)
        before = self.state.positional
        self.state.positional = [quoted(word.pieces, False) for word in arguments]
        status: bool | None = None
        try:
            status = self.statement(inner, source)
        except Left as left:
            if left.how != "return":
                raise
        self.state.positional = before
        self.budget.leave()
        return status

    def _run_eval(self, found: list[Word], line: int) -> bool | None:
        self.program(self.as_source(joined([word.pieces for word in found[1:]])))
        return None

    def _run_exit(self, found: list[Word], line: int) -> bool:
        raise Left("exit", line)

    def _run_return(self, found: list[Word], line: int) -> bool:
        raise Left("return", line)

    def _run_break(self, found: list[Word], line: int) -> bool:
        raise Left("break", line)

    def _run_continue(self, found: list[Word], line: int) -> bool:
        raise Left("continue", line)

    def _run_shift(self, found: list[Word], line: int) -> bool:
        count = found[1].text if len(found) > 1 else "1"
        if count.isdigit() and int(count) <= len(self.state.positional):
            self.state.positional = self.state.positional[int(count) :]
            return True
        return False

    def _run_set(self, found: list[Word], line: int) -> bool:
        texts = [word.text for word in found]
        if "--" in texts:
            self.state.positional = [quoted(word.pieces, False) for word in found[texts.index("--") + 1 :]]
        return True

    def _run_read(self, found: list[Word], line: int) -> bool | None:
        for word in found[1:]:
            if word.text.isidentifier():
                why = f"line {line} reads it while the script runs"
                self.state.variables[word.text] = unknown(f"${word.text}", line, why, word.text)
        return None

    def _run_getopts(self, found: list[Word], line: int) -> bool:
        """One more option of the positional arguments; False behind the last."""
        if len(found) < 3:
            return False
        known_letters, name, state = found[1].text, found[2].text, self.state
        at = int(shown(state.scalar("OPTIND") or literal("1", line)))
        given = shown(state.positional[at - 1]) if at <= len(state.positional) else ""
        if len(given) < 2 or given[0] != "-" or given == "--":
            return False
        letter, value = given[1], given[2:]
        takes = f"{letter}:" in known_letters
        state.variables[name] = literal(letter if letter in known_letters else "?", line)
        if takes:
            at += not value
            value = value or (shown(state.positional[at - 1]) if at <= len(state.positional) else "")
            state.variables["OPTARG"] = literal(value, 0)
        state.variables["OPTIND"] = literal(str(at + 1), line)
        return True

    def _run_let(self, found: list[Word], line: int) -> bool | None:
        for word in found[1:]:
            name, equals, right = word.text.partition("=")
            if equals and name.isidentifier():
                self.state.variables[name] = self.computed(literal(right, line), word.text, line)
        return True

    def _run_source(self, found: list[Word], line: int) -> bool | None:
        path = found[1].text if len(found) > 1 else ""
        self.note(f"line {line} takes in {path}, which is not read here; what it sets is unknown")
        return None


def _redirects(node: "Node") -> "list[Node]":
    """Every redirect of a statement; the one to a file may stand inside that of a here-document."""
    found = [child for child in node.children if child.type.endswith("_redirect")]
    return found + [inner for child in found for inner in child.children if inner.type == "file_redirect"]


def _inner_script(found: Sequence[Word]) -> int | None:
    """Which word is a script for `bash -c`, or for `sbatch --wrap`."""
    if _base(found[0]) == "sbatch":
        return next((n + 1 for n, word in enumerate(found[:-1]) if word.text == "--wrap"), None)
    for number, word in enumerate(found[:-1]):
        if _base(word) in SHELLS and number + 1 < len(found):
            for later in range(number + 1, len(found) - 1):
                option = found[later].text
                if not option.startswith("-"):
                    break
                if re.fullmatch(r"-[a-z]*c", option):
                    return later + 1
    return None


def _base(word: Word) -> str:
    return word.text.rsplit("/", 1)[-1]
