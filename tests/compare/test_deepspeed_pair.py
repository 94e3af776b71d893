"""The same 52 B model with DeepSpeed on and off: excerpts of two real logs of June 2021.

Source: BigScience, experiments/gpt2-meg-ds-3d: configuration, parameter counts, memory of all 64 ranks, and the first
eight training lines of each.
"""

import pytest

from steelyard.frameworks import detect
from tests.compare.conftest import GOLDEN, compared

ON, OFF = GOLDEN / "52b-on.out", GOLDEN / "52b-off.out"


@pytest.fixture(scope="module")
def found():
    return compared(ON, OFF)


def test_same_loss_at_the_first_two_steps_only(found):
    assert found["loss"]["equal_points"] == 2
    parted = found["loss"]["first_divergence"]
    assert (parted["step_a"], parted["a"], parted["b"]) == (3, 41.03157, 44.24266)
    assert found["loss"]["first_difference"] == parted


def test_placeholders_are_ignored():
    on, off = detect.read(ON), detect.read(OFF)
    assert {(s.grad_norm, s.loss_scale) for s in on.steps} == {(None, None)}
    assert off.steps[0].grad_norm == 67.593 and off.steps[0].loss_scale == 12.0


def test_memory_of_every_rank(found):
    assert {len(ranks) for ranks in found["memory"]["ranks"].values()} == {64}
    assert found["memory"]["ranks"]["b"]["43"] == 18738 * 2**20
    assert found["memory"]["kind"] == "reserved_peak"


def test_parameter_counts_are_reproduced(found):
    texts = [i["text"] for i in found["inferred"] if "reproduced" in i["text"]]
    assert "52,453,507,072" in texts[0] and "52,004,716,544" in texts[0] and "64 ranks" in texts[0]
    assert "64 ranks of 805,560,320 to 917,757,952" in texts[1]
    assert not any("not those of this" in i["text"] for i in found["inferred"])


def test_what_differs_is_the_engine(found):
    assert [d["knob"] for d in found["differences"]] == ["engine.framework"]
    assert found["a"]["notes"] == [] and "zero_stage = 1 has no effect: deepspeed = False" in found["b"]["notes"]
