"""Ids are those of the tokenizers library, however they are found."""

import json
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.data import tokenizer

TEXT = """The quick brown fox's tail isn't 42 metres long; it's 3.14!  We'll see.
    def function(argument: int) -> str:\n\t\treturn f"{argument!r}"  # naïve Ünïcödé — ½ Ⅷ ٣ 漢字 🙂
\r\n\n   \u00a0\u2003x\u2028y\u0085z\x1cq\x1f 'S 're''ve "quoted" <|endoftext|>after _under_score__ 1e-4 ۱۲ x² """


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    return tokenizer.train_bpe([TEXT * 20, "more words of many kinds " * 30], 400, path)


@pytest.fixture(scope="module")
def library(trained):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(trained.name)


def test_training_includes_every_byte_and_an_end(trained):
    assert trained.vocab_size == 400 and trained.eod == 0
    assert trained.decode([trained.eod]) == "<|endoftext|>"
    text = "".join(map(chr, range(1, 300))) + "\U0001f642"
    assert trained.decode(trained.encode(text)) == text


def test_ids_are_the_librarys(trained, library):
    for text in (TEXT, *TEXT.split("\n"), "", " ", "\n", "  a", "a  ", "x" * 1000):
        assert trained.encode(text).tolist() == library.encode(text, add_special_tokens=False).ids, text
    assert trained._parts, "the fast way is not taken"


def test_ids_are_the_librarys_next_to_every_kind_of_character(trained, library):
    """White space, numbers and marks: whichever a version of Unicode takes them for."""
    special = [chr(c) for c in range(sys.maxunicode + 1) if unicodedata.category(chr(c)) in ("Zs", "Zl", "Zp", "Cc")]
    special += ["½", "Ⅷ", "²", "①", "๓", "\u0301", "_", "‿", "\u200b", "\u180e", "\ufeff", "\u02bc", "ª"]
    texts = [pattern.replace("?", c) for c in special for pattern in ("a?b", "a ?b", "a? b", " ?1?.? ?", "?", "a??b")]
    for text, ids in zip(texts, trained.encode_batch(texts), strict=True):
        assert ids.tolist() == library.encode(text, add_special_tokens=False).ids, repr(text)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.text(st.sampled_from(list(" \n\t\r'sStrevemld.,_-09azé½\u00a0\u2028\x1c漢<|")), max_size=30), max_size=3
    )
)
def test_ids_are_the_librarys_for_any_text(trained, library, texts):
    found = [ids.tolist() for ids in trained.encode_batch(texts)]
    assert found == [library.encode(text, add_special_tokens=False).ids for text in texts]


def test_forgetting_changes_nothing(trained, library, monkeypatch):
    monkeypatch.setattr(tokenizer, "_MOST_PARTS", 3)
    monkeypatch.setattr(tokenizer, "_LONGEST_KEPT", 2)
    fresh = tokenizer.load(trained.name)
    for _ in range(3):
        assert fresh.encode(TEXT).tolist() == library.encode(TEXT, add_special_tokens=False).ids
        assert all(len(part) <= 2 for part in fresh._parts._known)


def test_a_gpt2_folder(trained, library, tmp_path):
    library.model.save(str(tmp_path))
    loaded = tokenizer.load(str(tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["merges.txt", "vocab.json"]
    assert loaded.eod == 0 and loaded.vocab_size == 400
    assert loaded.encode(TEXT).tolist() == trained.encode(TEXT).tolist()


def other_kinds():
    from tokenizers import Regex, models, normalizers, pre_tokenizers

    split = pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}{1,3}|[^\s\p{L}\p{N}]+[\r\n]*|\s+"), "isolated")
    return {
        "its own pattern": lambda e: setattr(
            e, "pre_tokenizer", pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
        ),
        "prefix space": lambda e: setattr(e, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        "normalised": lambda e: setattr(e, "normalizer", normalizers.NFKC()),
        "another model": lambda e: setattr(e, "model", models.WordLevel({"[UNK]": 0, "Ġthe": 1}, unk_token="[UNK]")),
    }


@pytest.mark.parametrize("kind", other_kinds())
def test_a_tokenizer_that_cuts_otherwise_is_not_cut(kind, library, tmp_path):
    from tokenizers import Tokenizer

    engine = Tokenizer.from_str(library.to_str())
    other_kinds()[kind](engine)
    engine.save(str(tmp_path / "t.json"))
    engine = Tokenizer.from_file(str(tmp_path / "t.json"))
    loaded = tokenizer.load(str(tmp_path / "t.json"))
    assert loaded._parts is None
    for text in (TEXT, "ﬁ½ the the"):
        assert loaded.encode(text).tolist() == engine.encode(text, add_special_tokens=False).ids


def test_the_end_is_found_by_its_name_or_unknown(library, tmp_path):
    content = library.to_str()
    (tmp_path / "s.json").write_text(content.replace("<|endoftext|>", "</s>"))
    (tmp_path / "none.json").write_text(content.replace("<|endoftext|>", "<pad>"))
    assert tokenizer.load(str(tmp_path / "s.json")).eod == 0
    assert tokenizer.load(str(tmp_path / "none.json")).eod is None


def test_the_hash_is_of_the_content(trained, library, tmp_path):
    (tmp_path / "same.json").write_bytes(Path(trained.name).read_bytes())
    (tmp_path / "other.json").write_text(library.to_str().replace("<|endoftext|>", "</s>"))
    assert tokenizer.load(str(tmp_path / "same.json")).hash == trained.hash
    assert tokenizer.load(str(tmp_path / "other.json")).hash != trained.hash


def test_bytes():
    loaded = tokenizer.load("byte")
    assert (loaded.vocab_size, loaded.eod) == (257, 256)
    assert loaded.encode("aé").tolist() == [97, 0xC3, 0xA9]
    assert loaded.decode([97, 0xC3, 0xA9, 256, 0xFF]) == "aé\ufffd"


def test_ids():
    loaded = tokenizer.load("ids:500")
    assert (loaded.eod, loaded.vocab_size) == (500, 501)
    assert tokenizer.load("ids:2:32000").vocab_size == 32000
    assert loaded.decode([3, 4]) == "3 4"


@pytest.mark.parametrize("name", ["ids:", "ids:x", "ids:-1", "ids:1:2:3", "ids:9:9", "nowhere.json", "gpt2"])
def test_a_name_that_is_no_tokenizer(name, code_of):
    assert code_of(tokenizer.load, name)[0] == "D007"


def test_files_that_are_no_tokenizer(tmp_path, code_of):
    (tmp_path / "bad.json").write_text("{}")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "vocab.json").write_text(json.dumps({"a": 0}))
    for name in ("bad.json", "binary.json", "half"):
        code, text = code_of(tokenizer.load, str(tmp_path / name))
        assert code == "D007" and name in text
    assert "merges.txt" in text
