"""Every log against every other, in every format: nothing raises, and the page fits an issue."""

import json
from itertools import combinations

import pytest

from steelyard.compare.verdict import as_json, compare
from steelyard.frameworks import detect
from steelyard.report import comparison
from tests.compare.conftest import GOLDEN, LIBAI, MEGATRON

LOGS = [
    LIBAI,
    MEGATRON,
    *sorted(GOLDEN.glob("*.log")),
    *sorted(GOLDEN.glob("*.out")),
    GOLDEN / "lingua",
    GOLDEN / "huggingface",
]


@pytest.fixture(scope="module")
def records():
    return [detect.read(path) for path in LOGS]


def test_every_pair(records):
    for a, b in combinations(records, 2):
        pair = compare([a, b])[0]
        json.dumps(as_json(pair), allow_nan=False)
        lines = comparison.terminal(pair).splitlines()
        assert len(lines) <= 40 and max(map(len, lines)) <= 120
        assert lines[0].startswith("A ")
        assert comparison.markdown(pair) and comparison.page([pair]).count("<svg") <= 2


def test_all_at_once(records):
    pairs = compare(records)
    assert [pair.b.name for pair in pairs] == [chr(ord("B") + n) for n in range(len(records) - 1)]
    shown = comparison.terminal(pairs[1])
    assert shown.splitlines()[1].startswith("C ") and "or C with A's" in shown


def test_a_run_and_itself(records):
    for record in records:
        pair = compare([record, record])[0]
        assert not pair.differences and "not_comparable" not in {v.word for v in pair.verdict.values()}
