"""The order of samples is Megatron's, and every token comes once per epoch."""

import json
import os
import time
from pathlib import Path

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.data import compiled, order
from steelyard.data.order import SPLITS, Order, Shuffle, sample_index_dtype, size, split_bounds

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "sample_order.json").read_text())["cases"]


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["case"])
def test_the_indices_are_megatrons(case, write_dataset, lengths_by_formula, digest, tmp_path):
    lengths = case.get("lengths") or lengths_by_formula(**case["lengths_formula"])
    dataset = write_dataset(
        case["case"], lengths, case["vocab_size"], case["file_dtype"], case.get("sequences_per_document")
    )
    bounds = dict(zip(SPLITS, split_bounds(case["split"], len(dataset)), strict=True))
    assert case["splits"]
    for name, facts in case["splits"].items():
        assert list(bounds[name]) == facts["elements"]
        built = Order(
            dataset, bounds[name], case["sequence_length"], case["seed"], facts["requested"], tmp_path / "cache", True
        )
        assert built.size.epochs == facts["epochs"] and len(built) == built.size.samples == facts["samples"]
        assert built.size.separate_last_epoch == facts["separate_last_epoch"]
        for index in ("document_index", "sample_index", "shuffle_index"):
            array, expected = getattr(built, index), facts[index]
            assert (array.dtype, array[:4].tolist()) == (expected["dtype"], expected["first"])
            assert digest(array) == expected["sha256"]
        sample = np.empty(case["sequence_length"] + 1, np.int64)
        for tokens in facts["sample_tokens"]:
            built.read(tokens["i"], sample)
            assert digest(sample) == tokens["sha256"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3000), min_size=1, max_size=4), st.integers(0, 2**32 - 1))
def test_the_shuffle_is_numpys(sizes, seed):
    expected, ours = np.random.RandomState(seed), Shuffle(seed)
    for count in sizes:  # one generator for all, as its state is carried on
        array = np.arange(count, dtype=np.int32)
        copy = array.copy()
        expected.shuffle(copy)
        ours(array)
        assert np.array_equal(array, copy)


def test_the_shuffle_hands_over_to_numpy_beyond_32_bits(monkeypatch):
    monkeypatch.setattr(order, "WIDEST_SHUFFLE", 1000)
    expected, ours = np.random.RandomState(5), Shuffle(5)
    for count in (900, 1000, 5000, 17):
        array = np.arange(count)
        copy = array.copy()
        expected.shuffle(copy)
        ours(array)
        assert np.array_equal(array, copy)


lengths_and_more = st.tuples(
    st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any),
    st.integers(1, 33),
    st.integers(0, 99),
    st.integers(1, 60),
)


@settings(max_examples=60, deadline=None)
@given(lengths_and_more)
def test_every_token_is_used_once_per_epoch(tmp_path_factory, given_values):
    """In the stream of all epochs, sample j is tokens j S to j S + S, and the samples are a permutation of all j."""
    lengths, seq_length, seed, samples = given_values
    folder = tmp_path_factory.mktemp("order")
    needed = size(sum(lengths), seq_length, samples)
    order.build_indices(folder, np.array(lengths, np.int32), (0, len(lengths)), needed, seq_length, seed)
    documents, rows, shuffle = (np.load(folder / f"{n}_index.npy") for n in ("document", "sample", "shuffle"))
    assert len(shuffle) == needed.samples >= samples and sorted(shuffle) == list(range(len(shuffle)))
    copies = np.bincount(documents, minlength=len(lengths))
    assert (copies == needed.epochs).all()
    ends = np.cumsum(np.array(lengths)[documents])
    starts = seq_length * np.arange(len(rows))
    places = np.searchsorted(ends, starts, side="right")  # the definition of the sample index, vectorised
    expected = np.stack([places, starts - (ends[places] - np.array(lengths)[documents[places]])], axis=1)
    expected[0] = 0
    assert np.array_equal(rows[1:], expected[1:]) and starts[-1] + 1 <= ends[-1] < starts[-1] + 1 + seq_length


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 400), st.integers(1, 50), st.integers(0, 300))
def test_epochs_are_the_fewest_that_hold_the_samples(tokens, seq_length, samples):
    found = size(tokens, seq_length, samples)
    assert found.epochs == next(e for e in range(1, 10**6) if e * tokens >= samples * seq_length + 1)
    assert found.samples == (found.epochs * tokens - 1) // seq_length >= samples
    if found.separate_last_epoch:
        last = samples - found.first_part
        assert found.epochs > 1 and last < int(0.80 * ((tokens - 1) // seq_length))
    else:
        assert found.first_part == found.samples


@pytest.mark.parametrize(
    ("documents", "bounds"),
    [
        *((n, [n, 0, 0]) for n in range(1, 10)),
        (10, [9, 1, 0]),
        (11, [10, 1, 0]),
        (20, [19, 1, 0]),
        (30, [28, 2, 0]),
        (501, [475, 25, 1]),
    ],
)
def test_the_split_rounds_as_megatron(documents, bounds):
    """Field report F07. (10 documents have boundaries at 9.49 and 9.99; Megatron of 2021, which rounded the sizes of
    the parts, gave 10, 0, 0.)"""
    assert [end - first for first, end in split_bounds("949,50,1", documents)] == bounds


@pytest.mark.parametrize(("split", "parts"), [("1", [7, 0, 0]), ("0.5 / 0.5", [4, 3, 0]), ("0,1,1", [0, 4, 3])])
def test_split_strings(split, parts):
    """7 / 2 = 3.5 rounds to the even 4."""
    assert [end - first for first, end in split_bounds(split, 7)] == parts


def test_nothing_wraps_at_32_bits():
    """Field report F02."""
    assert sample_index_dtype(2**31 - 1, 1) is np.int32
    assert sample_index_dtype(2**31 + 10, 1) is sample_index_dtype(5, 2**31) is np.int64
    needed = size(1000, 64, 3_000_000_000)
    assert needed.epochs == 192_000_001 and needed.samples == 3_000_000_015
    assert needed.index_bytes(10) > 2**33


def test_rows_beyond_32_bits():
    """Eight samples of nearly 2^30 tokens: the stream passes 2^31 and 2^32 tokens."""
    lengths, documents, seq_length = np.array([2**31 - 1, 3], np.int32), np.array([0, 1] * 6, np.int32), 2**30 - 5
    rows = np.empty((8, 2), np.int64)
    last = order._fill_rows(lengths, documents, seq_length, 0, 0, rows)
    ends = np.cumsum(lengths[documents], dtype=np.int64)
    starts = seq_length * np.arange(1, 9)
    places = np.searchsorted(ends, starts, side="right")
    assert rows.tolist() == [[p, s - (ends[p] - lengths[documents[p]])] for p, s in zip(places, starts, strict=True)]
    assert tuple(rows[-1]) == last and starts[-1] > 2**32


def test_an_absurd_number_of_epochs_is_refused(write_dataset, tmp_path, code_of):
    """Field report F02."""
    dataset = write_dataset("small", [100] * 10)
    code, text = code_of(Order, dataset, (0, 10), 64, 1, 3_000_000_000, tmp_path / "cache", True)
    assert code == "D014" and "192,000,001 epochs" in text and not (tmp_path / "cache").exists()


@pytest.fixture
def dataset(write_dataset):
    return write_dataset("data", [30, 5, 17, 40, 8])


def test_the_cache_is_built_once_and_read_without_building(dataset, tmp_path, monkeypatch, code_of):
    cache = tmp_path / "cache"
    code, text = code_of(Order, dataset, (0, 5), 8, 1, 10, cache, False)
    assert code == "D015" and str(cache) in text
    first = Order(dataset, (0, 5), 8, 1, 10, cache, True)
    monkeypatch.setattr(order, "build_indices", None)
    for build in (True, False):
        again = Order(dataset, (0, 5), 8, 1, 10, cache, build)
        assert np.array_equal(again.shuffle_index, first.shuffle_index)
    assert len(list(cache.iterdir())) == 1


def test_everything_that_determines_the_order_is_in_the_key(dataset, write_dataset, tmp_path):
    cache = tmp_path / "cache"
    Order(dataset, (0, 5), 8, 1, 10, cache, True)
    for bounds, seq_length, seed, samples in [
        ((0, 4), 8, 1, 10),
        ((0, 5), 9, 1, 10),
        ((0, 5), 8, 2, 10),
        ((0, 5), 8, 1, 20),
    ]:
        before = len(list(cache.iterdir()))
        Order(dataset, bounds, seq_length, seed, samples, cache, True)
        assert len(list(cache.iterdir())) == before + 1
    # made anew at the same path with other lengths: Megatron reads the stale indices here
    changed = write_dataset("data", [30, 5, 17, 41, 7])
    before = len(list(cache.iterdir()))
    Order(changed, (0, 5), 8, 1, 10, cache, True)
    assert len(list(cache.iterdir())) == before + 1


def test_a_build_that_fails_leaves_nothing_to_read(dataset, tmp_path, monkeypatch, code_of):
    cache = tmp_path / "cache"
    old, young = cache / "x.building-old", cache / "x.building-young"
    old.mkdir(parents=True)
    young.mkdir()
    os.utime(old, (time.time() - 10**6,) * 2)

    def fail(folder, *_):
        (folder / "document_index.npy").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(order, "build_indices", fail)
        code, text = code_of(Order, dataset, (0, 5), 8, 1, 10, cache, True)
    assert code == "D016" and "No space left" in text and sorted(cache.iterdir()) == [old, young]
    Order(dataset, (0, 5), 8, 1, 10, cache, True)
    assert young.exists() and not old.exists(), "only what a killed build left long ago is removed"


def test_pieces_say_where_a_sample_comes_from(dataset, tmp_path):
    built = Order(dataset, (0, 5), 8, 1, 10, tmp_path / "cache", True)
    sample = np.empty(9, np.int64)
    for number in range(len(built)):
        built.read(number, sample)
        pieces = [dataset.read(sequence, offset, count) for sequence, offset, count in built.pieces(number)]
        assert np.concatenate(pieces).tolist() == sample.tolist()


def test_a_part_too_small_for_one_sample(write_dataset, tmp_path):
    """One epoch of 5 tokens holds no sample of 8."""
    built = Order(write_dataset("tiny", [5]), (0, 1), 8, 1, None, tmp_path / "cache", True)
    assert len(built) == 0


def test_loops_compile_where_nothing_can_be_kept(monkeypatch):
    """A read-only installation of a user without a home."""

    def njit(cache=False, **options):
        if cache:
            raise RuntimeError("no locator available")
        return numba.njit(**options)

    monkeypatch.setattr(compiled, "njit", njit)
    assert compiled.compiled(lambda a: a + 1)(2) == 3
