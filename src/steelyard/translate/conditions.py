"""`[ ... ]` and `[[ ... ]]`: true, false, or not decidable before the script runs."""

import re
from fnmatch import translate

from steelyard.translate.text import Value, known, literal


class Test:
    """`[ ... ]` and `[[ ... ]]` over tokens: an operator is text, an operand a value. None: not decidable."""

    def __init__(self, tokens: "list[str | Value]", double: bool):
        self.tokens, self.double = tokens, double

    def choice(self) -> bool | None:
        found = self.both()
        while self.tokens and self.tokens[-1] in ("||", "-o"):
            self.tokens.pop()
            other = self.both()
            found = True if found or other else None if None in (found, other) else False
        return found

    def both(self) -> bool | None:
        found = self.single()
        while self.tokens and self.tokens[-1] in ("&&", "-a"):
            self.tokens.pop()
            other = self.single()
            found = False if False in (found, other) else None if None in (found, other) else True
        return found

    def single(self) -> bool | None:
        if not self.tokens:
            return False
        token = self.tokens.pop()
        if token == "!":
            inner = self.single()
            return None if inner is None else not inner
        if token == "(":
            inner = self.choice()
            if self.tokens and self.tokens[-1] == ")":
                self.tokens.pop()
            return inner
        if isinstance(token, str):
            if not self.tokens:
                return None
            operand = self.tokens.pop()
            text = known(operand) if isinstance(operand, tuple) else operand
            if token in ("-z", "-n") and text is not None:
                return (text == "") == (token == "-z")
            return None  # a test of files and the like
        if self.tokens and isinstance(self.tokens[-1], str) and self.tokens[-1] not in ("&&", "||", "-a", "-o", ")"):
            operator = self.tokens.pop()
            assert isinstance(operator, str)
            right = self.tokens.pop() if self.tokens else ()
            if isinstance(right, str):
                right = literal(right, 0)
            return self.compared(known(token), operator, known(right))
        text = known(token)
        return None if text is None else text != ""

    def compared(self, left: str | None, operator: str, right: str | None) -> bool | None:
        if left is None or right is None:
            return None
        if operator in ("=", "==", "!="):
            equal = fits(left, right) if self.double else left == right
            return equal == (operator != "!=")
        compare = {"-eq": int.__eq__, "-ne": int.__ne__, "-lt": int.__lt__, "-le": int.__le__, "-gt": int.__gt__,
                   "-ge": int.__ge__}.get(operator)  # fmt: skip
        if compare is None:
            return {"<": left < right, ">": left > right}.get(operator)
        try:
            return bool(compare(int(left or "0"), int(right or "0")))
        except ValueError:
            return None


def fits(text: str, pattern: str) -> bool:
    return text == pattern or (len(text) < 10_000 and re.match(translate(pattern), text) is not None)
