"""Documents in, token files out: nothing lost unsaid, nothing in another order."""

import fcntl
import gzip
import json
import os
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steelyard.data import inputs as sources
from steelyard.data import manifest as manifests
from steelyard.data import prepare as preparing
from steelyard.data import tokenizer
from steelyard.data.documents import texts
from steelyard.data.merge import divide, merge
from steelyard.data.prepare import prefix_for, prepare
from steelyard.data.store import Dataset

EOD = 256


@pytest.fixture
def jsonl(tmp_path):
    """jsonl(texts, name) -> the path of a JSON-lines file."""

    def write(documents, name="corpus.jsonl", field="text"):
        path = tmp_path / name
        path.write_text("".join(json.dumps({field: d}, ensure_ascii=False) + "\n" for d in documents), "utf-8")
        return path

    return write


def documents_of(prefix):
    return [tokenizer.Bytes().decode(Dataset(prefix).document(i)) for i in range(Dataset(prefix).num_documents)]


def contents(prefix):
    return [Path(f"{prefix}.{ending}").read_bytes() for ending in ("bin", "idx")]


def test_the_end_stands_after_every_document(jsonl, tmp_path):
    """Field report F06."""
    made = prepare([jsonl(["ab", "é"])], tmp_path / "out", "byte")
    data = Dataset(tmp_path / "out")
    assert data.tokens.tolist() == [97, 98, EOD, 0xC3, 0xA9, EOD] and data.lengths.tolist() == [3, 3]
    assert manifests.read(tmp_path / "out") == made and made.eod == EOD
    prepare([jsonl(["ab", "é"])], tmp_path / "bare", "byte", append_eod=False)
    assert Dataset(tmp_path / "bare").tokens.tolist() == [97, 98, 0xC3, 0xA9]


def test_a_tokenizer_without_an_end_is_refused_before_reading(jsonl, tmp_path, code_of):
    """Field report F06."""
    made = tokenizer.train_bpe(["some words"], 300, tmp_path / "t.json")
    ending = tmp_path / "endless.json"
    ending.write_text(Path(made.name).read_text().replace("<|endoftext|>", "<pad>"))
    code, text = code_of(prepare, [tmp_path / "not even there"], tmp_path / "out", str(ending))
    assert code == "D009" and "endless.json" in text
    prepare([jsonl(["some"])], tmp_path / "out", str(ending), append_eod=False)
    assert len(Dataset(tmp_path / "out")) == 1


def test_empty_documents_are_counted_and_left_out(tmp_path):
    """Field report F01: Megatron stops with an IndexError."""
    path = tmp_path / "empty.jsonl"
    path.write_text('{"text":""}\n{"text":"abc"}\n{"text":"   "}\n\n')
    made = prepare([path], tmp_path / "out", "byte")
    assert (made.read, made.empty, made.documents) == (3, 2, 1) and len(Dataset(tmp_path / "out")) == 1
    assert "3 read, 2 empty skipped" in made.describe()
    made = prepare([path], tmp_path / "kept", "byte", keep_empty=True)
    assert (made.read, made.empty, made.documents) == (3, 0, 3)
    assert Dataset(tmp_path / "kept").document(0).tolist() == [EOD]


def test_ids_that_need_more_than_16_bits(tmp_path, code_of, jsonl):
    """Field report F03."""
    ids = [1, 65535, 65536, 70000]
    path = jsonl([ids], field="ids")
    made = prepare([path], tmp_path / "out", "ids:70000", field="ids", append_eod=False)
    assert made.dtype == "int32" and Dataset(tmp_path / "out")[0].tolist() == ids
    code, text = code_of(prepare, [path], tmp_path / "narrow", "ids:70000", field="ids", dtype="uint16")
    assert code == "D022" and "70,001" in text and not list(tmp_path.glob("narrow*"))
    code, text = code_of(prepare, [path], tmp_path / "small", "ids:500", field="ids")
    assert code == "D010" and "corpus.jsonl:1" in text and "65535" in text


BAD = {
    b'{"text": "a"} {"text": "b"}': "not JSON: Extra data at column 15",
    b'{"text": "latin \xe9"}': "not UTF-8: byte 0xe9 at column 17",
    b'{"text": "nul \x00"}': "not JSON: Invalid control character at column 15",
    b'{"tekst": "a"}': "no field 'text'",
    b'{"text": null}': "field 'text' is null, not text",
    b'{"text": 123}': "field 'text' is a number, not text",
    b'{"text": ["a"]}': "field 'text' is a list, not text",
    b'["text"]': "not an object with a field for the text",
    b'{"text": "\\ud800"}': "the text holds half of a surrogate pair",
    b"[" * 100_000: "not JSON: ",
    b'{"text": "cut': "not JSON: Unterminated string starting at column 10",
}
GOOD = [b'{"text": "one"}', b'{"text": "' + b"x" * 2**20 + b'"}', b'{"text": "\\u0000 is fine"}', b'{"text": "two"}\r']


@pytest.mark.parametrize("line", BAD, ids=BAD.values())
def test_a_bad_line_stops_with_its_place_and_reason(line, tmp_path, code_of):
    """Field report F05."""
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b"\n".join([*GOOD, line]))
    code, text = code_of(prepare, [path], tmp_path / "out", "byte")
    assert code == "D010" and f"{path}:5" in text and BAD[line] in text and "--on-bad skip" in text
    assert not list(tmp_path.glob("out*"))


def test_bad_lines_are_skipped_and_counted_exactly(tmp_path):
    """Field report F05. A byte order mark at the start is no part of the text."""
    path = tmp_path / "mixed.jsonl"
    lines = [GOOD[0], *list(BAD)[:5], b"", *GOOD[1:], *list(BAD)[5:]]
    path.write_bytes(b"\xef\xbb\xbf" + b"\n".join(lines))
    made = prepare([path], tmp_path / "out", "byte", on_bad="skip")
    assert (made.read, made.documents, made.num_skipped) == (len(GOOD) + len(BAD), len(GOOD), len(BAD))
    assert made.skipped["not JSON"] == 4 and made.skipped["no field 'text'"] == 1
    assert made.examples[0] == f"{path}:2: not JSON: Extra data at column 15"
    assert made.examples[5].startswith(f"{path}:11: ")
    assert documents_of(tmp_path / "out") == ["one", "x" * 2**20, "\0 is fine", "two"]


def test_kinds_of_input(tmp_path, jsonl, monkeypatch):
    plain = jsonl(["first", "second"], "a.jsonl")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(jsonl(["third"], "x.jsonl").read_bytes()))
    frames = [jsonl([text], "x.jsonl").read_bytes() for text in ("fourth", "fifth")]
    (tmp_path / "c.jsonl.zst").write_bytes(b"".join(zstandard.compress(frame) for frame in frames))
    folder = tmp_path / "folder"
    (folder / "deep" / ".hidden").mkdir(parents=True)
    (folder / "1.txt").write_text("sixth\nwhole file\n")
    (folder / "deep" / "2.md.gz").write_bytes(gzip.compress("\ufeffsevénth".encode()))
    (folder / "deep" / ".hidden" / "no.txt").write_text("never")
    (folder / "empty.txt").write_text("")
    given_inputs = [plain, tmp_path / "[bc].jsonl*", folder]
    made = prepare(given_inputs, tmp_path / "out", "byte")
    expected = ["first", "second", "third", "fourth", "fifth", "sixth\nwhole file\n", "sevénth"]
    assert documents_of(tmp_path / "out") == expected and (made.read, made.empty) == (8, 1)
    monkeypatch.setattr(sources, "BLOCK_BYTES", 7)
    prepare(given_inputs, tmp_path / "blocks", "byte")
    assert contents(tmp_path / "blocks") == contents(tmp_path / "out")
    assert list(texts(sources.find(given_inputs), "text")) == [*expected, ""]


def test_inputs_that_come_to_nothing(tmp_path, code_of):
    """Field report H02."""
    (tmp_path / "hollow").mkdir()
    for nothing in (tmp_path / "missing.jsonl", tmp_path / "hollow", tmp_path / "*.gz"):
        code, text = code_of(prepare, [nothing], tmp_path / "out", "byte")
        assert code == "D013" and str(nothing) in text


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_a_cut_compressed_file_is_refused(ending, tmp_path, jsonl, code_of):
    content = jsonl([os.urandom(50).hex() for _ in range(1000)]).read_bytes()
    packed = gzip.compress(content) if ending == "gz" else zstandard.compress(content)
    for name, broken in (("cut", packed[: len(packed) // 2]), ("foreign", b"no such thing" * 9)):
        path = tmp_path / f"{name}.jsonl.{ending}"
        path.write_bytes(broken)
        code, text = code_of(prepare, [path], tmp_path / "out", "byte", on_bad="skip")
        assert code == "D023" and path.name in text
    assert not list(tmp_path.glob("out*"))


def words(count):
    return [" ".join(str(i * j % 97) for j in range(i % 50 + 1)) for i in range(count)]


def test_several_processes_write_the_same_file(jsonl, tmp_path, monkeypatch, code_of):
    monkeypatch.setattr(preparing, "BYTES_PER_WORKER", 1)
    monkeypatch.setattr(sources, "BLOCK_BYTES", 1000)
    path = jsonl(words(3000))
    alone = prepare([path], tmp_path / "alone", "byte", workers=1)
    seen = []
    together = prepare([path], tmp_path / "together", "byte", workers=3, progress=seen.append)
    assert contents(tmp_path / "alone") == contents(tmp_path / "together")
    assert alone == together and len(seen) > 100
    assert [p.done for p in seen] == sorted(p.done for p in seen) and seen[-1].done == seen[-1].total
    assert (seen[-1].documents, seen[-1].tokens) == (together.documents, together.tokens)
    jsonl([*words(2000), 5, *words(10)])
    code, text = code_of(prepare, [path], tmp_path / "bad", "byte", workers=2)
    assert code == "D010" and "corpus.jsonl:2001" in text


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(count=st.integers(1, 9), documents=st.lists(st.text("ab\u00e9 ", max_size=30), min_size=1, max_size=12))
def test_merged_shards_are_the_whole(count, documents, jsonl, tmp_path):
    """Whichever way the bytes are cut, also in the middle of a line or a character."""
    first, second = jsonl(documents, "1.jsonl"), jsonl(documents[::-1], "2.jsonl")
    (tmp_path / "3.jsonl.gz").write_bytes(gzip.compress(first.read_bytes()))
    inputs = [first, second, tmp_path / "3.jsonl.gz"]
    whole = prepare(inputs, tmp_path / "whole", "byte")
    shards = [tmp_path / f"part-{i}" for i in range(count)]
    for i, shard in enumerate(shards):
        prepare(inputs, shard, "byte", shard=(i, count))
    joined = merge(shards[::-1], tmp_path / "joined")
    assert contents(tmp_path / "joined") == contents(tmp_path / "whole")
    assert (joined.read, joined.empty, joined.bin_sha256) == (whole.read, whole.empty, whole.bin_sha256)


def test_a_line_number_in_a_shard_is_that_of_the_file(jsonl, tmp_path, code_of):
    path = jsonl([*words(200), 5])
    code, text = code_of(prepare, [path], tmp_path / "out", "byte", shard=(2, 3))
    assert code == "D010" and f"{path}:201" in text


def test_shards_that_do_not_belong_together(jsonl, tmp_path, code_of):
    path = jsonl(words(50))
    parts = {n: [tmp_path / f"{i}-of-{n}" for i in range(n)] for n in (2, 3)}
    for n, prefixes in parts.items():
        for i, prefix in enumerate(prefixes):
            prepare([path], prefix, "byte", shard=(i, n))
    out = tmp_path / "out"
    assert "shard 1 of 3 is missing" in code_of(merge, [parts[3][0], parts[3][2]], out)[1]
    assert "shards of 2 and of 3" in code_of(merge, [*parts[2], *parts[3]], out)[1]
    assert "given twice" in code_of(merge, [*parts[2], parts[2][0]], out)[1]
    assert "one of the files" in code_of(merge, [out, *parts[2]], out)[1]
    assert code_of(prepare, [path], out, "byte", shard=(3, 3))[0] == "D020"
    assert code_of(prepare, ["-"], out, "byte", shard=(0, 2))[0] == "D020"
    prepare([path], tmp_path / "wide", "byte", dtype="int32")
    assert "dtypes differ" in code_of(merge, [*parts[2], tmp_path / "wide"], out)[1]
    prepare([path], tmp_path / "endless", "byte", append_eod=False)
    prepare([path], tmp_path / "ended", "byte")
    assert "made differently" in code_of(merge, [tmp_path / "ended", tmp_path / "endless"], out)[1]
    assert not list(tmp_path.glob("out*"))


def test_files_without_manifests_are_merged_in_the_order_given(write_dataset, tmp_path):
    a, b = write_dataset("a", [3, 4], sequences_per_document=[2]), write_dataset("b", [5])
    assert merge([b.prefix, a.prefix], tmp_path / "out") is None
    joined = Dataset(tmp_path / "out")
    assert joined.lengths.tolist() == [5, 3, 4] and joined.documents.tolist() == [0, 1, 3]
    assert joined.tokens.tolist() == [*b.tokens, *a.tokens]


def test_a_split_can_be_written_as_files(jsonl, tmp_path):
    prepare([jsonl(words(40))], tmp_path / "all", "byte")
    assert divide(tmp_path / "all", "50,50", tmp_path / "part") == [
        (f"{tmp_path}/part_train", 20), (f"{tmp_path}/part_validation", 20),
    ]  # fmt: skip
    merge([tmp_path / "part_train", tmp_path / "part_validation"], tmp_path / "again")
    assert contents(tmp_path / "again") == contents(tmp_path / "all")


def test_a_trained_tokenizer(jsonl, tmp_path):
    path = jsonl(words(300))
    made = tokenizer.train_bpe(texts(sources.find([path]), "text"), 300, tmp_path / "t.json")
    manifest = prepare([path], tmp_path / "out", made.name)
    data = Dataset(tmp_path / "out")
    assert manifest.tokenizer_hash == made.hash and manifest.vocab_size == 300
    assert all(made.decode(data[i][:-1]) == text and data[i][-1] == made.eod for i, text in enumerate(words(300)))


def test_names_are_megatrons():
    assert prefix_for("data/corpus", "text") == "data/corpus_text_document"
    assert prefix_for("data/corpus_text_document", "text") == "data/corpus_text_document"
    assert prefix_for("c", "content") == "c_content_document"


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("blocks", [1, 3, 8])
def test_an_interrupted_call_goes_on_where_it_was(blocks, compressed, jsonl, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK_BYTES", 500)
    monkeypatch.setattr(preparing, "SAVE_SECONDS", 0.0)
    path = jsonl([*words(150), "é" * 700, *words(40)])
    if compressed:
        path.with_suffix(".jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
        path = path.with_suffix(".jsonl.gz")
    inputs, seen = [path, jsonl(["a", 7, "b"], "last.jsonl")], []
    expected = prepare(inputs, tmp_path / "whole", "byte", on_bad="skip", progress=seen.append)
    needed = len(seen)
    seen.clear()

    def interrupt(now):
        seen.append(now)
        if len(seen) == blocks:
            raise Interrupted

    with pytest.raises(Interrupted):
        prepare(inputs, tmp_path / "out", "byte", on_bad="skip", progress=interrupt)
    assert not (tmp_path / "out.idx").exists() and (tmp_path / "out.bin.partial").stat().st_size > 0
    with open(tmp_path / "out.bin.partial", "ab") as file:
        file.write(b"written after the last saved point")
    seen.clear()
    made = prepare(inputs, tmp_path / "out", "byte", on_bad="skip", progress=seen.append)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole") and made == expected
    assert len(seen) == needed - blocks > 0 and not list(tmp_path.glob("out*partial*"))


def test_other_work_does_not_go_on_from_it(jsonl, tmp_path, monkeypatch):
    monkeypatch.setattr(preparing, "SAVE_SECONDS", 0.0)
    path = jsonl(words(100))

    def interrupt(_):
        raise Interrupted

    with pytest.raises(Interrupted):
        prepare([path], tmp_path / "out", "byte", progress=interrupt)
    assert (tmp_path / "out.state.partial").exists()
    os.utime(path, (time.time() + 9,) * 2)  # the input may have changed
    jsonl(["other"])
    prepare([path], tmp_path / "out", "byte")
    assert documents_of(tmp_path / "out") == ["other"]


@pytest.mark.parametrize("damage", ["gone", "shorter"])
def test_partial_files_that_do_not_hold_enough_are_not_gone_on_from(damage, jsonl, tmp_path, monkeypatch):
    monkeypatch.setattr(preparing, "SAVE_SECONDS", 0.0)
    path = jsonl(words(100))

    def interrupt(_):
        raise Interrupted

    with pytest.raises(Interrupted):
        prepare([path], tmp_path / "out", "byte", progress=interrupt)
    partial = tmp_path / "out.bin.partial"
    partial.unlink() if damage == "gone" else os.truncate(partial, 10)
    prepare([path], tmp_path / "out", "byte")
    assert documents_of(tmp_path / "out") == [text for text in words(100) if text]


def test_two_writers_of_one_file(jsonl, tmp_path, code_of):
    with open(tmp_path / "out.lock.partial", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert code_of(prepare, [jsonl(["a"])], tmp_path / "out", "byte")[0] == "D021"
    prepare([jsonl(["a"])], tmp_path / "out", "byte")


def test_an_output_that_cannot_be_written(jsonl, tmp_path, code_of):
    (tmp_path / "file").touch()
    assert code_of(prepare, [jsonl(["a"])], tmp_path / "file" / "out", "byte")[0] == "D016"


def test_blocks_have_whole_lines(jsonl, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK_BYTES", 64)
    path = jsonl(words(60))
    blocks = list(sources.blocks(sources.find([path]), sources.Cursor()))
    assert b"".join(block.parts[0][2] for block in blocks) == path.read_bytes()
    assert all(block.parts[0][2].endswith(b"\n") for block in blocks)
    for block, after in pairwise(blocks):
        assert block.after.line == after.parts[0][1]
        again = next(sources.blocks(sources.find([path]), block.after))
        assert again == after
    assert np.all(np.diff([block.done for block in blocks]) > 0)
