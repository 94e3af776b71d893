"""The shares add up, and no order of switching is preferred."""

from itertools import permutations

import pytest

from steelyard.compare.attribute import shapley

WORTH = {(): 0.0, ("a",): 5.0, ("b",): 1.0, ("c",): 2.0, ("a", "b"): 9.0, ("a", "c"): 6.0, ("b", "c"): 3.0,
         ("a", "b", "c"): 20.0}  # fmt: skip


def value(chosen):
    return WORTH[tuple(sorted(chosen))]


def test_average_over_every_order():
    expected = dict.fromkeys("abc", 0.0)
    for order in permutations("abc"):
        before = frozenset()
        for player in order:
            expected[player] += (value(before | {player}) - value(before)) / 6
            before |= {player}
    assert shapley("abc", value) == pytest.approx(expected)
    assert sum(expected.values()) == pytest.approx(20)


def test_one_configuration_that_cannot_be_predicted():
    assert shapley("abc", lambda chosen: None if chosen == {"b"} else value(chosen)) is None


def test_a_setting_without_effect():
    assert shapley(["a", "idle"], lambda chosen: 3.0 if "a" in chosen else 0.0) == {"a": 3.0, "idle": 0.0}
