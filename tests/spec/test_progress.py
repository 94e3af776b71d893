"""Batch size and learning rate as functions of samples, against hand values and a step-by-step simulation."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from steelyard.spec import progress, resolve
from steelyard.spec.batch import Batch
from steelyard.spec.optimizer import LearningRate
from steelyard.spec.run import Length


def batch(size=8, ramp=None):
    return Batch(global_batch_size=size, micro_batch_size=1, accumulation=size, ramp=ramp)


def test_the_seed_ramp_level_by_level():
    """`--rampup-batch-size 2 2 1_000`, micro 1, global 16, 100 samples (Megatron-DeepSpeed pull request 204)."""
    run = resolve(
        {"batch": {"global_batch_size": 16, "micro_batch_size": 1, "ramp": [2, 2, 1000]}, "length": {"samples": 100}}
    ).run
    found = progress.levels(run.batch, 100)
    assert [(lv.global_batch_size, lv.steps) for lv in found] == [
        (2, 50), (4, 0), (6, 0), (8, 0), (10, 0), (12, 0), (14, 0), (16, 0),
    ]  # fmt: skip
    assert progress.total_steps(run.length, run.batch, run.model.seq_length) == 50


def test_a_ramp_that_is_used():
    found = progress.levels(batch(6, (2, 2, 20)), 40)
    # levels end at samples 10 and 20: 5 steps of 2, 3 of 4 (10 -> 22), then 6 until 40
    assert [(lv.global_batch_size, lv.first_step, lv.steps, lv.first_sample) for lv in found] == [
        (2, 0, 5, 0), (4, 5, 3, 10), (6, 8, 3, 22),
    ]  # fmt: skip


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 6), st.integers(1, 300), st.integers(1, 400))
def test_levels_agree_with_walking_the_steps(start, increment, increments, ramp_samples, total):
    rule = batch(start + increment * increments, (start, increment, ramp_samples))
    walked, consumed = [], 0
    while consumed < total:
        size = progress.batch_size_at(rule, consumed)
        walked.append(size)
        consumed += size
    told = [lv.global_batch_size for lv in progress.levels(rule, total) for _ in range(lv.steps)]
    assert told == walked
    assert progress.samples_after(rule, len(walked)) == consumed


def test_megatron_schedule_of_a_recorded_run():
    """Megatron-LM core 0.20.0, 30 steps of 8 samples, warm-up 40 samples, decay 240, 1e-3 to 1e-4: n <= 40 gives
    1e-3 n/40, else 1e-4 + 0.5 (cos(pi (n - 40)/200) + 1) 9e-4; the first update has rate 0, the sixth the peak."""
    rule = LearningRate(peak=1e-3, minimum=1e-4, warmup_samples=40, decay_samples=240, first_update="zero")
    curve = progress.schedule(rule, Length(steps=30), batch(8), 64)
    for step in range(1, 31):
        n = 8 * (step - 1)
        expected = 1e-3 * n / 40 if n <= 40 else 1e-4 + 0.5 * (math.cos(math.pi * (n - 40) / 200) + 1) * 9e-4
        assert curve.rate(n, 8) == pytest.approx(expected, rel=1e-14)
    assert curve.rate(0, 8) == 0 and curve.rate(40, 8) == 1e-3


def test_warm_first_update_moves():
    rule = LearningRate(peak=1e-3, warmup_steps=4)
    curve = progress.schedule(rule, Length(steps=20), batch(8), 64)
    assert [curve.rate(8 * s, 8) for s in range(4)] == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3])
    assert curve.rate(8 * 19, 8) == 0


@pytest.mark.parametrize(
    ("decay", "at", "expected"),
    [
        ("constant", 100, 1.0), ("linear", 50, 0.55), ("linear", 100, 0.1), ("cosine", 50, 0.55), ("cosine", 101, 0.1),
        ("inverse_sqrt", 40, 0.5), ("wsd", 89, 1.0), ("wsd", 95, 0.55), ("wsd", 100, 0.1),
    ],
)  # fmt: skip
def test_shapes(decay, at, expected):
    warmup = 10 if decay == "inverse_sqrt" else 0
    rule = LearningRate(peak=1.0, minimum=0.1, decay=decay, decay_samples=100, warmup_samples=warmup)
    assert progress.schedule(rule, Length(samples=100), batch(1), 64).at(at) == pytest.approx(expected)


@given(
    st.sampled_from(["constant", "linear", "cosine", "inverse_sqrt", "wsd"]),
    st.sampled_from(["linear", "cosine", "exponential", "minus_sqrt"]),
    st.floats(0, 0.9), st.integers(1, 10_000), st.floats(0, 1.5),
)  # fmt: skip
def test_the_rate_stays_between_minimum_and_peak(decay, wsd_decay, fraction, total, where):
    assume(fraction * total < total)
    rule = LearningRate(peak=1e-3, minimum=1e-5, decay=decay, warmup_fraction=fraction, wsd_decay=wsd_decay)
    curve = progress.schedule(rule, Length(samples=total), batch(1), 64)
    rate = curve.at(where * total)
    assert 0 <= rate <= 1e-3 * (1 + 1e-12)
    if where * total > curve.warmup:
        assert rate >= 1e-5 * (1 - 1e-9)
