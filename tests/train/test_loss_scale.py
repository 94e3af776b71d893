"""The loss scale, step by step, against the two systems' rules written out."""

from hypothesis import given
from hypothesis import strategies as st

from steelyard.spec.precision import LossScale, Precision
from steelyard.train.loss_scale import Scaler


def scaler(**rule):
    return Scaler.of(Precision.model_validate({"compute": "fp16", "loss_scale": rule}))


def deepspeed(overflows, power, window, hysteresis, minimum):
    """DeepSpeed's dynamic scaler as its documentation states it: counters of iterations."""
    scale, left, last = 2.0**power, hysteresis, -1
    for number, overflow in enumerate(overflows):
        if overflow:
            if left == 1:
                scale = max(scale / 2, minimum)
            else:
                left -= 1
            last = number
        elif (number - last) % window == 0:
            scale, left = scale * 2, hysteresis
        yield scale


def megatron(overflows, power, window, hysteresis, minimum):
    """Megatron's dynamic scaler: a growth count and a hysteresis count."""
    scale, good, left = 2.0**power, 0, hysteresis
    for overflow in overflows:
        if overflow:
            good, left = 0, left - 1
            if left <= 0:
                scale = max(scale / 2, minimum)
        else:
            good += 1
            if good == window:
                scale, good, left = scale * 2, 0, hysteresis
        yield scale


@given(
    st.lists(st.booleans(), max_size=60),
    st.integers(0, 20),
    st.integers(1, 6),
    st.integers(1, 4),
    st.sampled_from([1.0, 64.0]),
)
def test_both_rules_move_the_scale_alike(overflows, power, window, hysteresis, minimum):
    ours = scaler(initial_power=power, window=window, hysteresis=hysteresis, minimum=minimum)
    found = []
    for overflow in overflows:
        ours.update(overflow)
        found.append(ours.scale)
    rule = (overflows, power, window, hysteresis, minimum)
    assert found == list(megatron(*rule)) == list(deepspeed(*rule))


def test_static_and_none():
    fixed = scaler(static=1024.0)
    fixed.update(True)
    assert fixed.scale == 1024.0 and fixed.at_minimum
    plain = Scaler.of(Precision.model_validate({"compute": "bf16"}))
    plain.update(True)
    assert plain.scale == 1.0 and LossScale().initial == 65536.0


def test_state_round_trip():
    first = scaler(initial_power=8, window=3, hysteresis=2)
    for overflow in (False, True, False, False):
        first.update(overflow)
    second = scaler(initial_power=8, window=3, hysteresis=2)
    second.load(first.state())
    for overflow in (True, False, False, False, True):
        first.update(overflow)
        second.update(overflow)
        assert first.state() == second.state()
