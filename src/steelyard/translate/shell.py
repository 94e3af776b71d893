"""A launch script -> the programs it would start and the files it would write.

The script is parsed with tree-sitter's grammar of bash and followed with values for its variables; nothing is run and
nothing is read or written. What only a run could tell (a command's output, the environment) is an unknown value; a test
that cannot be decided is followed both ways, and what differs afterwards is unknown.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from steelyard.spec.errors import error
from steelyard.translate.commands import OUTSIDE, Commands, Left
from steelyard.translate.conditions import Test, fits
from steelyard.translate.expand import node_text, short
from steelyard.translate.state import Budget, Command, Source, State, merged, unknown
from steelyard.translate.text import Piece, Unknown, Value, Word, after, joined, known, literal, quoted, shown

if TYPE_CHECKING:
    from tree_sitter import Node

MOST_BYTES = 128 * 1024
# what an example leaves to its reader: <PATH TO THE DATA>, <Specify path>; never a redirect of one lower-case word
PLACEHOLDER = re.compile(r"(?<![<\w])<(?:[A-Z][\w-]*|[A-Za-z][\w./,-]*(?: [\w./,-]+)+)>")
RUNS = {"&&": True, "||": False}


@dataclass(frozen=True)
class Script:
    """What following a script gave. `left` is the line at which it leaves by itself, 0 where it comes to its end."""

    source: str
    commands: Sequence[Command]
    state: State
    notes: Sequence[str]
    left: int = 0


def follow(
    text: str, source: str, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Script:
    """Raises UserError F011 (not a script that can be read), F012 (it would not end, or grow without end)."""
    if len(text) > MOST_BYTES:
        size = f"it has {len(text):,} characters, and launch scripts have at most {MOST_BYTES:,}"
        raise error("F011", place=source, detail=size)
    state = State(
        {name: literal(value, 0) for name, value in (environment or {}).items()}, [literal(a, 0) for a in arguments]
    )
    shell = Shell(source, state, Budget(source))
    whole = Source.script(shell.with_placeholders(re.sub("[\ue000\ue001\0]", "?", text.replace("\r\n", "\n"))))
    line = 0
    try:
        shell.program(whole)
    except Left as left:
        line = left.line
    except RecursionError:
        raise error("F012", place=source, detail="nesting deeper than can be followed") from None
    return Script(source, tuple(shell.commands), shell.state, tuple(shell.notes), line)


def parse(source: Source) -> "Node":
    """The syntax tree."""
    import tree_sitter
    import tree_sitter_bash

    parser = tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))
    return parser.parse(source.data).root_node


class Shell(Commands):
    def with_placeholders(self, text: str) -> str:
        """A script in which every placeholder is a mark of an unknown piece."""

        def mark(found: re.Match[str]) -> str:
            line = text.count("\n", 0, found.start()) + 1
            why = "it is left for the reader of the script to fill in"
            self.marks.append(Piece(found.group(), line, True, Unknown(why)))
            return f"\ue000{len(self.marks) - 1}\ue001"

        return PLACEHOLDER.sub(mark, text)

    def program(self, source: Source) -> None:
        line = source.line(0)
        self.budget.enter(line)
        root = parse(source)
        if root.has_error:
            self._refuse_errors(root, source)
        self.body(root, source)
        self.budget.leave()

    def _refuse_errors(self, root: "Node", source: Source) -> None:
        """Text that the grammar cannot read must not lose anything: only what holds no flag is passed over."""
        waiting = [root]
        while waiting:
            node = waiting.pop()
            if node.is_missing or node.type == "ERROR":
                text = node_text(node)
                line = source.line(node.start_byte)
                if "--" in text or node.is_missing or node is root:
                    detail = f"line {line} is not shell: {short(text) or 'something is missing'}"
                    raise error("F011", place=f"{self.place}:{line}", detail=detail)
                self.note(f"line {line} is not read as shell: {short(text)}")
            elif node.has_error:
                waiting += node.children

    # --- statements --------------------------------------------------------------------------------------------------
    def body(self, node: "Node", source: Source, skip: int = 0) -> bool | None:
        status: bool | None = True
        for child in node.children[skip:]:
            if child.is_named and child.type != "comment":
                status = self.statement(child, source)
        return status

    def statement(self, node: "Node", source: Source) -> bool | None:
        """Follow one statement. Whether it would succeed; None where that cannot be known."""
        line = source.line(node.start_byte)
        self.budget.step(line)
        handler = getattr(self, f"_{node.type}", None)
        if handler is not None:
            return cast("bool | None", handler(node, source, line))
        if node.type not in ("ERROR", "comment"):
            self.note(f"line {line}: {node.type.replace('_', ' ')} is not followed")
        return None

    def _variable_assignment(self, node: "Node", source: Source, line: int) -> bool:
        name, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        adds = any(child.type == "+=" for child in node.children)
        key = node_text(name) if name else ""
        found: Value | list[Value]
        if value is None:
            found = ()
        elif value.type == "array":
            items = [child for child in value.children if child.is_named and child.type != "comment"]
            found = [quoted(word.pieces, False) for child in items for word in self.words(child, source)]
        else:
            if not OUTSIDE.match(key):  # `x="$x more"` begins from nothing
                self.state.variables.setdefault(key, ())
            found = self.value(value, source)
        if "[" in key:
            self._element(key, found, line)
            return True
        before = self.state.variables.get(key)
        if adds and before is not None:
            if isinstance(found, list) or isinstance(before, list):
                lists = [side if isinstance(side, list) else [side] for side in (before, found)]
                found = lists[0] + lists[1]
            else:
                found = before + found
        self.budget.grown(joined(found) if isinstance(found, list) else found, line)
        self.state.variables[key] = found
        return True

    def _element(self, key: str, value: Value | list[Value], line: int) -> None:
        name, _, index = key.rstrip("]").partition("[")
        before = self.state.variables.get(name, [])
        values = list(before) if isinstance(before, list) else [before]
        if index.isdigit() and int(index) <= len(values) and isinstance(value, tuple):
            self.state.variables[name] = [*values[: int(index)], value, *values[int(index) + 1 :]]
        else:
            self.state.variables[name] = unknown(f"${name}", line, f"line {line} sets one element of it")

    def _variable_assignments(self, node: "Node", source: Source, line: int) -> bool:
        self.body(node, source)
        return True

    def _declaration_command(self, node: "Node", source: Source, line: int) -> bool:
        for child in node.children:
            if child.type == "variable_assignment":
                self.statement(child, source)
            elif child.is_named and child.type in ("string", "concatenation"):  # export "NAME=value"
                name, equals, _ = shown(self.value(child, source)).partition("=")
                if equals and name.isidentifier():
                    self.state.variables[name] = after(self.value(child, source), len(name) + 1)
        return True

    def _unset_command(self, node: "Node", source: Source, line: int) -> bool:
        for child in node.children[1:]:
            self.state.variables.pop(node_text(child), None)
        return True

    def _program(self, node: "Node", source: Source, line: int) -> bool | None:
        return self.body(node, source)

    def _do_group(self, node: "Node", source: Source, line: int) -> bool | None:
        return self.body(node, source)

    def _compound_statement(self, node: "Node", source: Source, line: int) -> bool | None:
        if node.children and node.children[0].type == "((":
            return self._numeric(node, source)
        return self.body(node, source)

    def _subshell(self, node: "Node", source: Source, line: int) -> bool | None:
        before = self.state
        self.state = before.copy()
        try:
            return self.body(node, source)
        finally:
            before.files = self.state.files
            self.state = before

    def _pipeline(self, node: "Node", source: Source, line: int) -> None:
        for child in node.children:
            if child.is_named:
                self.statement(child, source)

    def _list(self, node: "Node", source: Source, line: int) -> bool | None:
        left, operator, right = node.children[0], node.children[1].type, node.children[-1]
        status = self.statement(left, source)
        if status is None and left.type in ("test_command", "negated_command"):
            self._both(f"line {line}: {short(node_text(left))}", lambda: self.statement(right, source), lambda: None)
            return None
        # a program is taken to succeed
        if (status is not False) == RUNS.get(operator, True):
            return self.statement(right, source)
        return status

    def _negated_command(self, node: "Node", source: Source, line: int) -> bool | None:
        status = self.statement(node.children[-1], source)
        return None if status is None else not status

    def _function_definition(self, node: "Node", source: Source, line: int) -> bool:
        name, inner = node.child_by_field_name("name"), node.child_by_field_name("body")
        if name is not None and inner is not None:
            self.state.functions[node_text(name)] = (inner, source)
        return True

    def _if_statement(self, node: "Node", source: Source, line: int) -> bool | None:
        """`if`, its `elif`s and `else` as a list of branches, the first one with a true condition is followed."""
        branches = [_branch(node)]
        branches += [_branch(child) for child in node.children if child.type in ("elif_clause", "else_clause")]
        self._branches(branches, source)
        return None

    def _branches(self, branches: "list[tuple[list[Node], list[Node]]]", source: Source) -> None:
        if not branches:
            return
        (conditions, statements), *rest = branches
        status: bool | None = True
        for condition in conditions:
            status = self.statement(condition, source)

        def chosen() -> None:
            for child in statements:
                self.statement(child, source)

        if status is None:
            first = conditions[0]
            text = " ".join(node_text(first).split())
            self._both(
                f"line {source.line(first.start_byte)}: if {short(text)}", chosen, lambda: self._branches(rest, source)
            )
        elif status:
            chosen()
        else:
            self._branches(rest, source)

    def _both(self, why: str, yes: Callable[[], object], no: Callable[[], object]) -> None:
        """Follow both ways on copies. A way that ends the script does not count for what comes after."""
        before = self.state
        ends: list[State] = []
        left: Left | None = None
        self.uncertain.append(why)
        for way in (yes, no):
            self.state = before.copy()
            try:
                way()
                ends.append(self.state)
            except Left as exit_:
                left = exit_
        self.uncertain.pop()
        self.state = before
        if not ends:
            assert left is not None
            raise left
        merged(before, ends[0], ends[-1], f"{why} cannot be decided before it runs")

    def _case_statement(self, node: "Node", source: Source, line: int) -> bool | None:
        value = node.child_by_field_name("value")
        text = self.tested(self.value(value, source)) if value is not None else None
        items = [child for child in node.children if child.type == "case_item"]
        if text is None:
            self._cases(items, source, line)
            return None
        for item in items:
            patterns = [
                child for number, child in enumerate(item.children) if item.field_name_for_child(number) == "value"
            ]
            if any(fits(text, shown(self.value(pattern, source))) for pattern in patterns):
                self._item(item, source)
                break
        return True

    def _cases(self, items: "list[Node]", source: Source, line: int) -> None:
        if items:
            why = f"line {line}: case"
            self._both(why, lambda: self._item(items[0], source), lambda: self._cases(items[1:], source, line))

    def _item(self, item: "Node", source: Source) -> None:
        for number, child in enumerate(item.children):
            if child.is_named and item.field_name_for_child(number) not in ("value", "termination"):
                self.statement(child, source)

    def _for_statement(self, node: "Node", source: Source, line: int) -> bool | None:
        name, inner = node.child_by_field_name("variable"), node.child_by_field_name("body")
        values: list[Word] = []
        given = [child for number, child in enumerate(node.children) if node.field_name_for_child(number) == "value"]
        for child in given:
            values += self.words(child, source)
        if not given and not any(child.type == "in" for child in node.children):
            values = [Word(value) for value in self.state.positional]
        for word in values:
            self.state.variables[node_text(name) if name else ""] = quoted(word.pieces, False)
            if inner is not None and self._round(inner, source):
                break
        return True

    def _c_style_for_statement(self, node: "Node", source: Source, line: int) -> bool | None:
        fields = {node.field_name_for_child(number): child for number, child in enumerate(node.children)}
        self._compute(fields.get("initializer"), source)
        while self._compute(fields.get("condition"), source):
            if self._round(fields["body"], source):
                break
            self._compute(fields.get("update"), source)
        return True

    def _while_statement(self, node: "Node", source: Source, line: int) -> bool | None:
        inner = node.child_by_field_name("body")
        conditions = [child for number, child in enumerate(node.children)
                      if node.field_name_for_child(number) == "condition" and child.is_named]  # fmt: skip
        until = bool(node.children) and node.children[0].type == "until"
        while True:
            self.budget.step(line)
            status: bool | None = None
            for condition in conditions:
                status = self.statement(condition, source)
            if status is None:
                self._both(
                    f"line {line}: while", lambda: inner is not None and self._round(inner, source), lambda: None
                )
                return None
            if status is until or inner is None or self._round(inner, source):
                return True

    def _round(self, inner: "Node", source: Source) -> bool:
        """One round of a loop; True where `break` ends it."""
        try:
            self.statement(inner, source)
        except Left as left:
            if left.how in ("break", "continue"):
                return left.how == "break"
            raise
        return False

    # --- conditions --------------------------------------------------------------------------------------------------
    def _test_command(self, node: "Node", source: Source, line: int) -> bool | None:
        if node.children and node.children[0].type == "((":
            return self._numeric(node, source)
        tokens = list(self._tokens(node, source))
        double = bool(node.children) and node.children[0].type == "[["
        return Test(tokens[::-1], double).choice()

    def _tokens(self, node: "Node", source: Source) -> "list[str | Value]":
        found: list[str | Value] = []
        for child in node.children:
            if child.type in (
                "binary_expression",
                "unary_expression",
                "parenthesized_expression",
                "ternary_expression",
            ):
                found += self._tokens(child, source)
            elif child.type in ("test_operator", "(", ")", "!", "&&", "||", "==", "=", "!=", "=~", "<", ">"):
                found.append(node_text(child))
            elif child.is_named:
                value = self.value(child, source)
                text = self.tested(value)
                operator = text in ("-a", "-o", "!", "=", "-eq") and child.type == "word"
                found.append(text if operator and text is not None else literal(text, 0) if text is not None else value)
        return found

    def _numeric(self, node: "Node", source: Source) -> bool | None:
        return self._compute(node, source, 2)

    def _compute(self, node: "Node | None", source: Source, trim: int = 0) -> bool | None:
        """`((...))` and the parts of a counting loop: a value, or an assignment such as i++ or x=3."""
        if node is None:
            return True
        line = source.line(node.start_byte)
        self.budget.step(line)
        inner = self.between(node, source, node.start_byte + trim, node.end_byte - trim, "bare")
        text = shown(inner).strip()
        change = re.fullmatch(r"(?:(\w+)\s*(\+\+|--)|(\+\+|--)(\w+)|(\w+)\s*([-+*/%]?)=(?!=)\s*(.+))", text, re.DOTALL)
        if change is None:
            value = known(self.computed(inner, text, line))
            return None if value is None else value != "0"
        name = change[1] or change[4] or change[5]
        step = change[2] or change[3]
        right = f"{name} {step[0]} 1" if step else f"{name} {change[6]} ({change[7]})" if change[6] else change[7]
        self.state.variables[name] = self.computed(literal(right, line), text, line)
        return True


def _branch(node: "Node") -> "tuple[list[Node], list[Node]]":
    """The conditions and the statements of an `if`, `elif` or `else`."""
    conditions: list[Node] = []
    statements: list[Node] = []
    begun = node.type == "else_clause"
    for child in node.children:
        if child.type == "then":
            begun = True
        elif child.type in ("elif_clause", "else_clause"):
            break
        elif child.is_named and child.type != "comment":
            (statements if begun else conditions).append(child)
    return conditions, statements
