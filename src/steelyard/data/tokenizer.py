"""Text to token ids and back.

A tokenizer is named as run files name it: "byte"; "ids:500" for text that is token ids already (500 ends a document);
a tokenizer.json; or a folder with GPT-2's vocab.json and merges.txt.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from steelyard.spec.errors import error

# What tokenizers call the token that ends a document, the surest first.
END_NAMES = (
    "<|endoftext|>", "<|end_of_text|>", "<eod>", "<|eod|>", "[EOD]", "<EOD>", "</s>", "<eos>", "<|eos|>", "[EOS]",
)  # fmt: skip


class Tokenizer(Protocol):
    """`eod` is the id that ends a document, None where the tokenizer has none. `hash` is of what determines the ids."""

    @property
    def name(self) -> str: ...
    @property
    def hash(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def eod(self) -> int | None: ...

    def encode(self, text: str) -> NDArray[np.int32]:
        """Token ids [tokens] of a text. No EOD is added."""

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """The same for many texts at once, which is faster."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids; ids that are no text on their own show as replacement characters."""


def load(name: str) -> Tokenizer:
    """The tokenizer of that name. Raises UserError D007 when there is none or it cannot be read."""
    path = Path(name)
    if name == "byte":
        return Bytes()
    if name.startswith("ids:"):
        return Ids(name)
    if path.is_dir() and (path / "tokenizer.json").is_file():
        return _from_json(name, path / "tokenizer.json")
    if path.is_dir():
        return _from_gpt2(name, path)
    if path.is_file():
        return _from_json(name, path)
    raise error("D007", "data.tokenizer", place=name, name=name, detail="there is no such file or folder")


class Bytes:
    """UTF-8 bytes are their own ids; 256 ends a document."""

    name, vocab_size, eod = "byte", 257, 256
    hash = hashlib.sha256(b"byte").hexdigest()

    def encode(self, text: str) -> NDArray[np.int32]:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if 0 <= i < 256).decode("utf-8", errors="replace")


class Ids:
    """ "ids:EOD" or "ids:EOD:VOCAB": documents are lists of token ids already. VOCAB is EOD + 1 where not given."""

    def __init__(self, name: str):
        numbers = name.split(":")[1:]
        if not all(n.isdecimal() for n in numbers) or not 1 <= len(numbers) <= 2:
            detail = 'write the id that ends a document, as in "ids:500" or, with the vocabulary size, "ids:2:32000"'
            raise error("D007", "data.tokenizer", place=name, name=name, detail=detail)
        self.name, self.eod = name, int(numbers[0])
        self.vocab_size = int(numbers[1]) if len(numbers) == 2 else self.eod + 1
        if self.vocab_size <= self.eod:
            detail = f"the id {self.eod} is outside a vocabulary of {self.vocab_size}"
            raise error("D007", "data.tokenizer", place=name, name=name, detail=detail)
        self.hash = hashlib.sha256(f"ids:{self.eod}:{self.vocab_size}".encode()).hexdigest()

    def encode(self, text: str) -> NDArray[np.int32]:
        raise error("D007", "data.tokenizer", place=self.name, name=self.name, detail="it takes token ids, not text")

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(str(i) for i in ids)


class Trained:
    """A tokenizer of the `tokenizers` library. The ids are those of its `encode(..., add_special_tokens=False)`."""

    def __init__(self, name: str, engine: Any, digest: str):
        vocabulary = engine.get_vocab(with_added_tokens=True)
        self.name, self.hash, self._engine = name, digest, engine
        self.vocab_size = max(vocabulary.values()) + 1
        self.eod: int | None = next((vocabulary[word] for word in END_NAMES if word in vocabulary), None)
        self._parts = _Parts(engine) if _splits_like_gpt2(engine) else None

    def encode(self, text: str) -> NDArray[np.int32]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        if self._parts:
            return self._parts.encode(texts)
        return [np.array(e.ids, np.int32) for e in self._engine.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        return self._engine.decode([int(i) for i in ids], skip_special_tokens=False)


# GPT-2 cuts text into pieces before it merges bytes. A text may be cut at the same places, or fewer, and each part
# encoded on its own: the ids are the same, and most parts have been seen before. ASCII text is cut by GPT-2's pattern.
# In other text letters and numbers are those of some version of Unicode; it is cut only at white space, which no piece
# crosses but for one leading blank. (Python's own \s has four characters more than Unicode's white space.)
_ASCII_SPACE = r"\t-\r "
_ASCII_PARTS = re.compile(
    rf"'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[0-9]+| ?[^{_ASCII_SPACE}A-Za-z0-9]+"
    rf"|[{_ASCII_SPACE}]+(?![^{_ASCII_SPACE}])|[{_ASCII_SPACE}]+"
)
_SPACE = _ASCII_SPACE + r"\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_PARTS = re.compile(rf" ?[^{_SPACE}]+|[{_SPACE}]+(?![^{_SPACE}])|[{_SPACE}]+")
_MOST_PARTS = 1 << 17
_LONGEST_KEPT = 64


def _splits_like_gpt2(engine: Any) -> bool:
    """Whether every part of a text (see above) may be encoded on its own."""
    from tokenizers import models, pre_tokenizers

    before = engine.pre_tokenizer
    return (
        isinstance(before, pre_tokenizers.ByteLevel)
        and before.use_regex
        and not before.add_prefix_space
        and isinstance(engine.model, models.BPE)
        and not engine.model.dropout
        and engine.normalizer is engine.truncation is engine.padding is None
    )


class _Parts:
    """Encodes parts of texts, each once: a dictionary from part to ids (as bytes), emptied when it is full."""

    def __init__(self, engine: Any):
        added = [token.content for token in engine.get_added_tokens_decoder().values()]
        self._added = re.compile("|".join(map(re.escape, added))) if added else None
        self._engine = engine
        self._known: dict[str, bytes] = {}

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        if len(self._known) > _MOST_PARTS:
            self._known.clear()
        parts = [(_ASCII_PARTS if text.isascii() else _PARTS).findall(text) for text in texts]
        passing = self._learn(list(set(chain.from_iterable(parts)).difference(self._known)))
        ids = [np.frombuffer(b"".join(map(self._known.__getitem__, each)), np.int32) for each in parts]
        for part in passing:
            del self._known[part]
        for i, text in enumerate(texts):
            if self._added and self._added.search(text):  # cut at it first, by rules of the token's own
                ids[i] = np.array(self._engine.encode(text, add_special_tokens=False).ids, np.int32)
        return ids

    def _learn(self, new: list[str]) -> list[str]:
        """Encode new parts. Returns the long ones, which rarely come again and would make the dictionary large."""
        encoding = self._engine.encode(new, is_pretokenized=True, add_special_tokens=False)
        ids = np.array(encoding.ids, np.int32).tobytes()
        starts = 4 * np.searchsorted(np.array(encoding.word_ids, np.int64), np.arange(len(new) + 1))
        for part, (start, end) in zip(new, pairwise(starts.tolist()), strict=True):
            self._known[part] = ids[start:end]
        return [part for part in new if len(part) > _LONGEST_KEPT]


def _from_json(name: str, path: Path) -> Trained:
    from tokenizers import Tokenizer as Engine

    try:
        content = path.read_bytes()
        engine = Engine.from_str(content.decode("utf-8"))
    except Exception as failure:  # the library raises plain Exception for a file it cannot use
        raise error("D007", "data.tokenizer", place=str(path), name=name, detail=_first_line(failure)) from None
    return Trained(name, engine, hashlib.sha256(content).hexdigest())


def _from_gpt2(name: str, folder: Path) -> Trained:
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Engine

    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    if missing := [path.name for path in (vocab, merges) if not path.is_file()]:
        detail = f"the folder has no {' and no '.join(missing)} (and no tokenizer.json)"
        raise error("D007", "data.tokenizer", place=name, name=name, detail=detail)
    try:
        engine = Engine(models.BPE.from_file(str(vocab), str(merges)))
    except Exception as failure:  # as above
        raise error("D007", "data.tokenizer", place=name, name=name, detail=_first_line(failure)) from None
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    if engine.token_to_id(END_NAMES[0]) is not None:
        engine.add_special_tokens([AddedToken(END_NAMES[0], special=True, normalized=False)])
    return Trained(name, engine, hashlib.sha256(vocab.read_bytes() + b"\0" + merges.read_bytes()).hexdigest())


def _first_line(failure: Exception) -> str:
    return (str(failure).splitlines() or [type(failure).__name__])[0]


def train_bpe(texts: Iterable[str | Path], vocab_size: int, path: str | Path) -> Tokenizer:
    """Train a byte-level BPE of `vocab_size` ids, one of them <|endoftext|>, and write it to `path` (tokenizer.json).

    `texts` are texts, or Paths of UTF-8 text files, which are read one at a time.
    """
    from tokenizers import Tokenizer as Engine
    from tokenizers import decoders, models, pre_tokenizers, trainers

    engine = Engine(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_NAMES[0]], show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    engine.train_from_iterator(_texts(texts), trainer)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    engine.save(str(path))
    return load(str(path))


def _texts(texts: Iterable[str | Path]) -> Iterator[str]:
    for text in texts:
        yield text.read_text("utf-8", errors="replace") if isinstance(text, Path) else text
