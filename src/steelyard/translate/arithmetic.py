"""The shell's integer arithmetic: `$((...))`, `((...))`, `expr`."""

import re
from collections.abc import Callable

TOKEN = re.compile(r"\s*(0[xX][0-9a-fA-F]+|\d+|[A-Za-z_]\w*|\*\*|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%()<>!~&|^?:=])")
LEVELS = (("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!=", "="), ("<", ">", "<=", ">="), ("<<", ">>"), ("+", "-"),
          ("*", "/", "%"))  # fmt: skip
MOST = 2**63


class Undecided(Exception):
    """The expression has no value here: a variable is unknown, or it is not arithmetic."""


def evaluate(text: str, variable: Callable[[str], str], depth: int = 0) -> int:
    """The value of an expression. `variable(name)` is the text of a variable, and may raise Undecided itself.

    Raises Undecided.
    """
    if len(text) > 2000 or depth > 20:
        raise Undecided
    tokens, at = [], 0
    text = text.rstrip()
    while at < len(text):
        found = TOKEN.match(text, at)
        if found is None:
            raise Undecided
        tokens.append(found.group(1))
        at = found.end()
    reader = _Reader(tokens, variable, depth)
    value = reader.choice()
    if reader.tokens:
        raise Undecided
    return value


class _Reader:
    def __init__(self, tokens: list[str], variable: Callable[[str], str], depth: int):
        self.tokens, self.variable, self.depth = tokens[::-1], variable, depth

    def take(self, *wanted: str) -> str | None:
        return self.tokens.pop() if self.tokens and self.tokens[-1] in wanted else None

    def choice(self) -> int:
        value = self.binary(0)
        if self.take("?"):
            yes = self.choice()
            if not self.take(":"):
                raise Undecided
            no = self.choice()
            return yes if value else no
        return value

    def binary(self, level: int) -> int:
        if level == len(LEVELS):
            return self.power()
        value = self.binary(level + 1)
        while operator := self.take(*LEVELS[level]):
            value = _apply(operator, value, self.binary(level + 1))
        return value

    def power(self) -> int:
        base = self.single()
        return _apply("**", base, self.power()) if self.take("**") else base

    def single(self) -> int:
        if not self.tokens:
            raise Undecided
        token = self.tokens.pop()
        if token == "(":
            value = self.choice()
            if not self.take(")"):
                raise Undecided
            return value
        if token in "+-!~":
            value = self.single()
            return {"+": value, "-": -value, "!": int(not value), "~": ~value}[token]
        if token[0].isdigit():
            octal = len(token) > 1 and token[0] == "0" and token.isdigit()
            return int(token, 8 if octal else 0)
        if token[0].isalpha() or token[0] == "_":
            text = self.variable(token).strip()
            return evaluate(text, self.variable, self.depth + 1) if text else 0
        raise Undecided


def _apply(operator: str, a: int, b: int) -> int:
    if operator in ("/", "%"):
        if b == 0:
            raise Undecided
        quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)  # towards zero, as in C
        return quotient if operator == "/" else a - quotient * b
    if operator in ("**", "<<", ">>"):
        if not 0 <= b < 64:
            raise Undecided
        value = {"**": lambda: a**b, "<<": lambda: a << b, ">>": lambda: a >> b}[operator]()
    else:
        value = {
            "+": lambda: a + b, "-": lambda: a - b, "*": lambda: a * b, "<": lambda: int(a < b),
            ">": lambda: int(a > b), "<=": lambda: int(a <= b), ">=": lambda: int(a >= b),
            "==": lambda: int(a == b), "=": lambda: int(a == b), "!=": lambda: int(a != b),
            "&&": lambda: int(bool(a and b)), "||": lambda: int(bool(a or b)), "&": lambda: a & b,
            "|": lambda: a | b, "^": lambda: a ^ b,
        }[operator]()  # fmt: skip
    if abs(value) >= MOST:
        raise Undecided
    return value
