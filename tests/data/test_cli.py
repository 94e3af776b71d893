"""`steelyard data`, as a user types it."""

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from steelyard.cli.main import main
from steelyard.data import inspect
from steelyard.data.store import Dataset, Writer


@pytest.fixture
def steelyard(monkeypatch, capsys, tmp_path):
    """steelyard("data", ...) in an empty folder -> (exit code, stdout, stderr)"""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["steelyard", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return ended.value.code or 0, out, err

    return call


@pytest.fixture
def corpus(tmp_path):
    lines = [json.dumps({"text": f"document number {i} says: {'bla ' * i}"}) + "\n" for i in range(40)]
    (tmp_path / "corpus.jsonl").write_text("".join(lines))
    return lines


def test_prepare_inspect_verify(steelyard, corpus):
    code, out, _ = steelyard("data", "prepare", "corpus.jsonl", "--output", "data/corpus")
    assert code == 0 and "40 read, 0 empty skipped, 0 bad skipped: 40 documents" in out
    assert "data/corpus_text_document.bin" in out
    code, out, _ = steelyard("data", "inspect", "data/corpus_text_document", "--document", 3)
    assert (
        code == 0 and "40 documents in 40 sequences" in out and out.endswith("document number 3 says: bla bla bla \n")
    )
    code, out, _ = steelyard("data", "inspect", "data/corpus_text_document", "--document", 0, "--json")
    found = json.loads(out)
    assert sum(found["histogram"].values()) == found["documents"] == found["manifest"]["documents"] == 40
    assert steelyard("data", "inspect", "data/corpus_text_document", "--document", 40)[0] == 2
    code, out, _ = steelyard("data", "verify", "data/corpus_text_document")
    assert (code, out) == (0, "data/corpus_text_document: sound\n")


def test_nothing_finished_is_replaced_unasked(steelyard, corpus):
    assert steelyard("data", "prepare", "corpus.jsonl", "-o", "c")[0] == 0
    code, _, err = steelyard("data", "prepare", "corpus.jsonl", "-o", "c")
    assert code == 2 and "error[D025]" in err and "--overwrite" in err
    assert steelyard("data", "prepare", "corpus.jsonl", "-o", "c", "--overwrite")[0] == 0
    assert steelyard("data", "merge", "c_text_document", "c_text_document", "-o", "c_text_document")[0] == 2


def test_shards_and_merge(steelyard, corpus):
    steelyard("data", "prepare", "corpus.jsonl", "-o", "whole")
    for i in range(3):
        code, out, _ = steelyard("data", "prepare", "corpus.jsonl", "-o", "c", "--shard", f"{i}/3")
        assert code == 0 and f"c_text_document-0000{i}-of-00003" in out
    shards = [f"c_text_document-0000{i}-of-00003" for i in range(3)]
    code, out, _ = steelyard("data", "merge", *shards, "-o", "joined")
    assert code == 0 and "40 documents" in out
    joined, whole = Dataset("joined"), Dataset("whole_text_document")
    assert np.array_equal(joined.tokens, whole.tokens) and np.array_equal(joined.lengths, whole.lengths)
    assert steelyard("data", "verify", "joined")[0] == 0
    for text in ("3/3", "x/2", "1"):
        assert "error[D020]" in steelyard("data", "prepare", "corpus.jsonl", "-o", "d", "--shard", text)[2]


def test_standard_input_and_json(steelyard, corpus, monkeypatch):
    class Stdin:
        buffer = io.BytesIO("".join(corpus).encode())

    monkeypatch.setattr(sys, "stdin", Stdin)
    code, out, _ = steelyard("data", "prepare", "-", "-o", "s", "--json")
    made = json.loads(out)
    assert code == 0 and made["documents"] == 40 and made["prefix"] == "s_text_document" and made["inputs"] == ["-"]


def test_a_tokenizer_trained_on_the_way(steelyard, corpus):
    arguments = ["data", "prepare", "corpus.jsonl", "-o", "c", "--tokenizer", "t.json", "--train-tokenizer"]
    code, _, err = steelyard(*arguments, 300)
    assert code == 0 and "trained 300 ids -> t.json" in err
    _, out, _ = steelyard("data", "inspect", "c_text_document", "--document", 1)
    assert "tokenizer t.json (300 ids, EOD 0)" in out and "document number 1 says: bla <|endoftext|>" in out
    assert steelyard(*arguments, 10)[0] == 2


def test_split(steelyard, write_dataset):
    """Field report F07: nothing hangs; an empty part is named."""
    write_dataset("eleven", [10] * 11)
    code, out, _ = steelyard("data", "split", "eleven", "949,50,1")
    assert code == 1 and "[10, 11)" in out and "empty: test" in out
    code, out, _ = steelyard("data", "split", "eleven", "9,1,1", "-o", "part")
    assert code == 0 and len(Dataset("part_train")) == 9 and len(Dataset("part_test")) == 1
    assert "error[S306]" in steelyard("data", "split", "eleven", "nothing")[2]


def test_what_was_in_some_samples_of_a_run(steelyard, corpus, tmp_path):
    steelyard("data", "prepare", "corpus.jsonl", "-o", "c")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.toml").write_text(
        'length.steps = 2\nbatch.global_batch_size = 2\nmodel.seq_length = 64\n[data]\ntrain = ["c_text_document"]\n'
        'split = "80,20"\n[evaluation]\nsteps = 1\n'
    )
    code, out, _ = steelyard("data", "inspect", "run", "--samples", "0:2")
    assert code == 0 and "train: 32 documents" in out and "validation: 8 documents" in out
    assert out.count("--- sample") == 2 and "c_text_document document" in out and "bla " in out
    assert (
        "sample 1 of validation"
        in steelyard("data", "inspect", "run/run.toml", "--samples", "1", "--split", "validation")[1]
    )
    assert "error[D026]" in steelyard("data", "inspect", "run", "--split", "test")[2]
    assert "error[D012]" in steelyard("data", "inspect", "run", "--samples", "999999:1000000")[2]
    assert "error[D026]" in steelyard("data", "inspect", "run", "--samples", "x")[2]


def damage(kind, dataset):
    prefix = dataset.prefix
    content = bytearray(Path(f"{prefix}.bin").read_bytes())
    index = bytearray(Path(f"{prefix}.idx").read_bytes())
    if kind == "an id":
        content[0:2] = b"\xff\xff"
    elif kind == "a lost end":
        content[-2:] = b"\x05\x00"
    elif kind == "an offset":
        at = 34 + 4 * len(dataset) + 8 * 3
        index[at] ^= 2
    elif kind == "a boundary":
        at = 34 + 12 * len(dataset) + 8 * 3
        index[at] = 1
    elif kind == "cut":
        content = content[:-2]
    for ending, what in (("bin", content), ("idx", index)):
        with open(f"{prefix}.{ending}", "wb") as file:
            file.write(what)


FINDINGS = {
    "an id": "document 0 holds token id 65535, outside a vocabulary of 257",
    "a lost end": "document 39 does not end with the id 256",
    "an offset": "sequence 3 lies at byte",
    "a boundary": "document 2 ends before it starts",
    "cut": "error[D003]",
}


@pytest.mark.parametrize("kind", FINDINGS)
def test_verify_finds(kind, steelyard, corpus):
    steelyard("data", "prepare", "corpus.jsonl", "-o", "c")
    damage(kind, Dataset("c_text_document"))
    code, out, _ = steelyard("data", "verify", "c_text_document")
    assert code == 1 and FINDINGS[kind] in out and "not sound" in out
    if kind in ("an id", "a lost end"):
        assert "SHA-256" in out


def test_verify_without_a_manifest(steelyard, write_dataset):
    with Writer("m", np.uint16) as writer:
        writer.add_document([[65535, 3]])
    assert steelyard("data", "verify", "m")[0] == 0
    assert "token id 65535" in steelyard("data", "verify", "m", "--vocab-size", 500)[1]
    assert steelyard("data", "verify", "nowhere")[0] == 2


def test_the_histogram_counts_by_powers_of_two(write_dataset):
    dataset = write_dataset("h", [0, 1, 2, 3, 4, 7, 8, 2], sequences_per_document=[1, 1, 1, 1, 1, 1, 2])
    found = inspect.statistics(dataset)
    assert found.histogram == {0: 1, 1: 1, 2: 2, 4: 2, 8: 1}
    assert (found.documents, found.sequences, found.shortest, found.longest) == (7, 8, 0, 10)


def test_the_verb_loads_no_torch(tmp_path, corpus):
    code = (
        "import sys\nfrom steelyard.cli.main import main\n"
        "sys.argv = ['steelyard', 'data', 'prepare', 'corpus.jsonl', '-o', 'c']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\nsys.exit(77 if 'torch' in sys.modules else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, timeout=60).returncode == 0
    assert (tmp_path / "c_text_document.idx").exists()
