"""A run's samples: the same tokens at the same numbers, whatever asks for them."""

import json
import tomllib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steelyard.data import manifest
from steelyard.data.loader import _documents, _positions, open_data
from steelyard.data.prepare import prepare
from steelyard.data.splits import open_splits, requested
from steelyard.data.store import Writer
from steelyard.spec import write
from steelyard.spec.load import resolve

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "end_of_document.json").read_text())


@pytest.fixture
def prefix(write_dataset, lengths_by_formula):
    """100 documents, about 2,000 tokens below 500."""
    return write_dataset("data", lengths_by_formula(100, 1, 40, 3), 500).prefix


def same(a, b):
    return all(x is y is None or torch.equal(x, y) for x, y in zip(vars(a).values(), vars(b).values(), strict=True))


def test_a_batch_is_a_shifted_pair(prefix, make_run):
    train = open_data(make_run({"train": [prefix], "split": "1"}), build=True)["train"]
    batch = train.batch(5, 3)
    assert batch.tokens.shape == batch.labels.shape == (3, 16) and batch.samples.tolist() == [5, 6, 7]
    assert batch.tokens.dtype == batch.labels.dtype == torch.int64
    assert torch.equal(batch.tokens[:, 1:], batch.labels[:, :-1])
    assert batch.loss_mask.all() and batch.loss_mask.dtype == torch.bool
    assert batch.positions is None and batch.documents is None


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(0, 24), max_size=6))
def test_any_layout_and_any_resume_reads_the_same_samples(cuts, prefix, make_run):
    """Field report D03: cut 24 samples anywhere, into ranks, micro-batches or restarts: the same rows come out."""
    run = make_run({"train": [prefix], "split": "1"}, steps=6)
    whole = open_data(run, build=True)["train"].batch(0, 24)
    for first, end in pairwise(sorted({0, 24, *cuts})):
        train = open_data(run, build=False)["train"]  # as after a restart
        part = train.batch(first, end - first)
        assert torch.equal(part.tokens, whole.tokens[first:end]) and torch.equal(part.labels, whole.labels[first:end])
    assert len({row.numpy().tobytes() for row in whole.tokens}) == 24, "no sample comes twice within an epoch"


def test_batch_and_layout_do_not_move_the_order(prefix, make_run):
    data = {"train": [[0.3, prefix], [0.7, prefix]], "split": "1"}
    layouts = [{"global_batch_size": 8, "micro_batch_size": m} for m in (1, 2, 8)]
    batches = [open_data(make_run(data, batch=b, samples=24), build=True)["train"].batch(0, 24) for b in layouts]
    assert all(same(batches[0], other) for other in batches[1:])


def test_the_ends_of_documents_are_treated_as_megatron_does(digest):
    tokens = np.array(GOLDEN["tokens"])
    assert digest(tokens) == GOLDEN["tokens_sha256"]
    ended = tokens == GOLDEN["eod"]
    documents = _documents(ended)
    assert digest(_positions(ended)) == GOLDEN["position_ids_sha256"]
    assert digest(~ended) == GOLDEN["loss_mask_sha256"]
    place = np.arange(tokens.shape[1])
    blocked = (documents[:, :, None] != documents[:, None, :]) | (place[None, :] > place[:, None])
    assert digest(blocked[:, None]) == GOLDEN["attention_mask_sha256"]
    assert (~ended).reshape(4, -1).sum(axis=1).tolist() == GOLDEN["loss_tokens_per_micro_batch"]


def test_the_options_at_the_end_of_documents(tmp_path, make_run):
    with Writer(tmp_path / "eod", np.uint16) as writer:
        for document in ([1, 2, 9], [9], [3, 4, 5, 9], [6] * 9):
            writer.add_document([document])
    options = {"mask_loss_at_eod": True, "reset_positions": True, "reset_attention": True}
    data = {"train": [str(tmp_path / "eod")], "split": "1", "tokenizer": "ids:9", **options}
    split = open_data(make_run(data, samples=1), build=True)["train"]
    batch = split.batch(0, 1)
    tokens = batch.tokens[0].tolist()
    document, position = 0, 0
    for i, token in enumerate(tokens):
        assert batch.loss_mask[0, i].item() == (token != 9)
        assert (batch.documents[0, i].item(), batch.positions[0, i].item()) == (document, position)
        document, position = (document + 1, 0) if token == 9 else (document, position + 1)
    assert 9 in tokens and batch.documents.dtype == torch.int32 and batch.positions.dtype == torch.int64


def test_an_unknown_tokenizer_stops_only_a_run_that_needs_it(prefix, make_run, code_of):
    data = {"train": [prefix], "tokenizer": "not-here/tokenizer.json", "split": "1"}
    assert open_data(make_run(data), build=True)["train"].ends.eod is None
    needing = make_run({**data, "mask_loss_at_eod": True})
    code, text = code_of(open_data, needing, build=True)
    assert code == "D008" and "not-here" in text
    made = manifest.Manifest("t", "", 500, 77, True, "text", "uint16")
    manifest.write(prefix, made)
    assert open_data(needing, build=True)["train"].ends.eod == 77
    other = make_run({**data, "tokenizer": "ids:5", "reset_positions": True})
    code, text = code_of(open_data, other, build=True)
    assert code == "D027" and "the id 5" in text and "with 77" in text


def test_an_id_outside_the_vocabulary_is_known_before_the_first_step(tmp_path, make_run, code_of):
    """Field report F03: a manifest tells the highest id."""
    (tmp_path / "ids.jsonl").write_text('{"text": [1, 2, 600]}\n{"text": [3]}\n')
    prepare([tmp_path / "ids.jsonl"], tmp_path / "ids", "ids:700", append_eod=False)
    code, text = code_of(open_data, make_run({"train": [str(tmp_path / "ids")]}), build=True)
    assert code == "D004" and "token id 600" in text and "vocabulary of 500" in text


def test_an_id_outside_the_vocabulary_names_its_document(tmp_path, make_run, code_of):
    """Field report F03: no index crash, no modulo."""
    with Writer(tmp_path / "ids", np.uint16) as writer:
        for document in range(40):
            writer.add_document([[5] * 4, [300 if document == 17 else 6] * 3])
    train = open_data(make_run({"train": [str(tmp_path / "ids")], "split": "1"}, samples=10), build=True)["train"]
    train.batch(0, train.num_samples, 301)
    code, text = code_of(train.batch, 0, train.num_samples, 257)
    assert code == "D004" and "token id 300" in text and "document 17" in text and "257" in text


def test_the_last_sample_is_the_last(prefix, make_run, code_of):
    train = open_data(make_run({"train": [prefix], "split": "1"}), build=True)["train"]
    train.batch(train.num_samples - 1, 1)
    assert code_of(train.batch, train.num_samples - 1, 2)[0] == "D012"


@pytest.mark.parametrize(
    ("length", "evaluation", "expected"),
    [
        ({"steps": 30}, {"every_steps": 10, "steps": 2}, (120, 32, 8)),
        ({"steps": 29}, {"every_steps": 10, "steps": 2}, (116, 24, 8)),
        ({"steps": 30}, {"every_steps": 0, "steps": 2}, (120, 8, 8)),
        ({"steps": 30}, {"every_steps": 10, "steps": 0}, (120, 0, 0)),
        ({"samples": 121}, {"every_steps": 31, "steps": 1}, (121, 8, 4)),
        ({"tokens": 1601}, {"every_steps": 100, "steps": 1}, (101, 4, 4)),
    ],
    ids=str,
)
def test_what_is_asked_of_each_split(length, evaluation, expected, make_run):
    """(steps // every_steps + 1) evaluations of steps x 4 samples."""
    assert tuple(requested(make_run({"train": ["x"]}, evaluation, **length)).values()) == expected


def test_a_length_that_is_no_whole_number_of_batches_can_be_trained(write_dataset, make_run):
    """6 samples are one epoch; the second step of 4 needs 8."""
    prefix = write_dataset("short", [97]).prefix
    train = open_data(make_run({"train": [prefix], "split": "1"}, samples=6), build=True)["train"]
    assert train.num_samples >= 8
    train.batch(4, 4)


def test_a_small_split(write_dataset, make_run, code_of):
    """Field report F07: Megatron hangs here. An empty validation set is refused by name; an empty test set is said."""
    once = {"steps": 1}
    nine, eleven = (write_dataset(f"n{n}", [40] * n).prefix for n in (9, 11))
    code, text = code_of(open_data, make_run({"train": [nine]}, once), build=True)
    assert code == "D006" and "validation" in text and '"949,50,1"' in text and "0 of 9" in text
    assert set(open_data(make_run({"train": [nine]}, {"steps": 0}), build=True)) == {"train"}
    splits = open_data(make_run({"train": [eleven]}, once), build=True)
    assert set(splits) == {"train", "validation"} and splits["validation"].documents == 1
    assert 'test: none; its share of the split "949,50,1"' in splits["train"].describe()
    code, text = code_of(open_data, make_run({"train": [nine], "split": "0.01,0.99"}), build=True)
    assert code == "D006" and "train" in text


def test_a_split_without_tokens_is_refused(tmp_path, make_run, code_of):
    with Writer(tmp_path / "hollow", np.uint16) as writer:
        for _ in range(4):
            writer.add_document([[]])
    assert code_of(open_data, make_run({"train": [str(tmp_path / "hollow")]}), build=True)[0] == "D006"


def test_files_of_their_own_for_each_split(write_dataset, make_run):
    names = {name: write_dataset(name, [50 + i] * 10).prefix for i, name in enumerate(("a", "b", "c", "d"))}
    data = {
        "train": [names["a"]],
        "validation": {"code": [names["b"]], "text": [[1.0, names["c"]]]},
        "test": [names["d"]],
    }
    splits = open_data(make_run(data, {"steps": 1}), build=True)
    assert list(splits) == ["train", "validation.code", "validation.text", "test"]
    assert [split.tokens for split in splits.values()] == [500, 510, 520, 530], "each file is used whole"
    run = make_run(data, {"steps": 1})
    assert resolve(tomllib.loads(write.dumps(run))).run == run, "the resolved run file reads back the same"
    assert list(open_data(make_run({**data, "validation": [names["b"]]}, {"steps": 1}), build=True)) == [
        "train", "validation", "test",
    ]  # fmt: skip


def test_a_mixture_says_what_it_takes(write_dataset, make_run):
    """Field report F04: the realised shares are printed."""
    a, b = write_dataset("a", [40] * 20).prefix, write_dataset("b", [40] * 200).prefix
    train = open_data(make_run({"train": [[0.001, a], [0.999, b]], "split": "1"}, samples=1000), build=True)["train"]
    text = train.describe()
    assert "1 samples (0.1000%) from" in text and "(99.9000%) from" in text and f"{b}: 200 documents" in text
    assert train.documents == 220 and train.tokens == 8800 and train.epochs > 1


def test_data_sets_without_weights_last_one_epoch(write_dataset, make_run, code_of):
    a, b = (write_dataset(name, [33] * 4).prefix for name in "ab")
    assert open_data(make_run({"train": [a, b], "split": "1"}, samples=16), build=True)["train"].num_samples == 16
    code, text = code_of(open_data, make_run({"train": [a, b], "split": "1"}, samples=20), build=True)
    assert code == "D012" and "20 samples" in text and "hold 16" in text and "weights" in text


def test_some_weights_are_no_weights(prefix, make_run, code_of):
    code, text = code_of(open_data, make_run({"train": [prefix, [0.5, prefix]]}), build=True)
    assert code == "D011" and "only some" in text


def test_data_that_are_not_there(make_run, code_of, tmp_path):
    """Field report H02."""
    assert code_of(open_data, make_run({"train": []}), build=True)[0] == "D017"
    code, text = code_of(open_data, make_run({"train": [str(tmp_path / "nowhere")]}), build=True)
    assert code == "D001" and "nowhere" in text


def test_tokens_that_are_floats_are_refused(tmp_path, make_run, code_of):
    with Writer(tmp_path / "floats", np.float32) as writer:
        writer.add_document([[0.5] * 99])
    assert code_of(open_data, make_run({"train": [str(tmp_path / "floats")], "split": "1"}), build=True)[0] == "D002"


def test_other_ranks_only_read(prefix, make_run, code_of):
    run = make_run({"train": [[1.0, prefix]]}, {"steps": 1, "every_steps": 1})
    assert code_of(open_splits, run, build=False)[0] == "D015"
    built, read = open_data(run, build=True), open_data(run, build=False)
    assert built.keys() == read.keys() and len(built) == 2
    assert all(same(built[name].batch(0, 4), read[name].batch(0, 4)) for name in built)
