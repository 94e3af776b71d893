"""From blocks of input to documents, and what is wrong with the ones that cannot be used."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steelyard.data import inputs
from steelyard.data.inputs import Block, Cursor, Input
from steelyard.data.tokenizer import Ids, Tokenizer

Document = str | NDArray[np.int64]  # text, or token ids [tokens]


@dataclass(frozen=True)
class Bad:
    """A document that cannot be used; `line` counts from 1 in its file, 0 for a whole file. Reasons may end in a detail
    behind a colon."""

    path: str
    line: int
    reason: str


class _Refused(Exception):
    """The reason why a document cannot be used."""


def texts(files: list[Input], field: str) -> Iterator[str]:
    """The texts of all documents that can be used, for training a tokenizer on them."""
    reader = Reader(field)
    for block in inputs.blocks(files, Cursor()):
        yield from reader.read(block)[0]  # without a tokenizer of ids, all are texts


class Reader:
    """Reads the `field` of JSON lines, and whole text files; lists of ids where the tokenizer takes them."""

    def __init__(self, field: str, tokenizer: Tokenizer | None = None):
        self.field = field
        self.takes_ids = isinstance(tokenizer, Ids)
        self._vocab_size = tokenizer.vocab_size if tokenizer else 0

    def read(self, block: Block) -> tuple[list[Any], list[Bad]]:
        """(documents, bad ones) of a block in order. Blank lines are neither."""
        documents: list[Document] = []
        bad: list[Bad] = []
        for path, before, content in block.parts:
            for line, document in self._lines(content) if block.lines else [(0, _text(content))]:
                if isinstance(document, _Refused):
                    bad.append(Bad(path, before + line if line else 0, str(document)))
                else:
                    documents.append(document)
        return documents, bad

    def _lines(self, content: bytes) -> Iterator[tuple[int, Document | _Refused]]:
        try:
            lines: Sequence[str | bytes] = content.decode("utf-8").split("\n")
        except UnicodeDecodeError:
            lines = content.split(b"\n")
        for number, line in enumerate(lines, 1):
            if line and not line.isspace():
                try:
                    yield number, self._document(line)
                except _Refused as refused:
                    yield number, refused

    def _document(self, line: str | bytes) -> Document:
        try:
            text = line if isinstance(line, str) else line.decode("utf-8")
            record = json.loads(text.removeprefix("\ufeff"))
        except UnicodeDecodeError as failure:
            byte = failure.object[failure.start]
            raise _Refused(f"not UTF-8: byte {byte:#04x} at column {failure.start + 1}") from None
        except json.JSONDecodeError as failure:
            raise _Refused(f"not JSON: {failure.msg.removesuffix(' at')} at column {failure.colno}") from None
        except (RecursionError, ValueError) as failure:
            raise _Refused(f"not JSON: {failure}") from None
        if not isinstance(record, dict):
            raise _Refused("not an object with a field for the text")
        if self.field not in record:
            raise _Refused(f"no field {self.field!r}")
        return self._ids(record[self.field]) if self.takes_ids else self._string(record[self.field])

    def _ids(self, value: Any) -> NDArray[np.int64]:
        if not isinstance(value, list) or any(type(i) is not int for i in value):
            raise _Refused(f"field {self.field!r} is not a list of token ids")
        outside = next((i for i in value if not 0 <= i < self._vocab_size), None)
        if outside is not None:
            raise _Refused(f"token id outside the vocabulary of {self._vocab_size:,}: {outside}")
        return np.array(value, np.int64)

    def _string(self, value: Any) -> str:
        if not isinstance(value, str):
            kinds = {type(None): "null", bool: "true or false", int: "a number", float: "a number", list: "a list"}
            raise _Refused(f"field {self.field!r} is {kinds.get(type(value), 'an object')}, not text")
        if not value.isascii():
            try:
                value.encode("utf-8")
            except UnicodeEncodeError:
                raise _Refused("the text holds half of a surrogate pair") from None
        return value


def _text(content: bytes) -> str | _Refused:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as failure:
        return _Refused(f"not UTF-8: byte {content[failure.start]:#04x} at byte {failure.start + 1}")


def is_empty(document: Document) -> bool:
    """Whether there is nothing to learn from: no text but white space, or no ids."""
    return document.isspace() or not document if isinstance(document, str) else not len(document)
