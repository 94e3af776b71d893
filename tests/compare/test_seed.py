"""The conversation that this verb exists for: LiBai "takes much more memory" than Megatron-LM "in the same
configuration". Source: github.com/Oneflow-Inc/libai/issues/349, its numbers; field report C01."""

import pytest

from tests.compare.conftest import LIBAI, MEGATRON, compared, typed

MIB = 2**20


def gpt(micro, whole, recompute):
    return {
        "model": {"num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "seq_length": 1024},
        "parallel": {"data": 8},
        "batch": {"micro_batch_size": micro, "global_batch_size": whole},
        "precision": {"compute": "fp16"},
        "recompute": {"mode": recompute},
    }


@pytest.fixture(params=["logs", "records"])
def pair(request):
    if request.param == "logs":
        return LIBAI, MEGATRON
    a = typed("LiBai", 15375, 18.95, gpt(4, 32, "none"), gpu_rate=0.94)
    b = typed("Megatron-LM", 8545, 16.053, gpt(8, 64, "full"), gpu_rate=0.53)
    return a, b


def test_refuses_and_names_the_causes_in_order(pair):
    found = compared(*pair)
    assert found["verdict"]["memory"] == "not_comparable"
    assert not found["comparable"]
    knobs = [d["knob"] for d in found["differences"]]
    assert knobs[:2] == ["recompute.mode", "batch.micro_batch_size"]
    assert knobs.index("parallel.zero") == 3  # after the batch's own second number
    zero = next(d for d in found["differences"] if d["knob"] == "parallel.zero")
    assert zero["source_a"] == "inferred from the memory" and zero["a"] >= 1 and zero["b"] == 0
    assert any("unsharded Adam" in i["text"] for i in found["inferred"])


def test_explains_the_gap_within_a_tenth(pair):
    memory = compared(*pair)["memory"]
    assert memory["gap_bytes"] == (8545 - 15375) * MIB
    assert abs(memory["unexplained_bytes"]) < 0.1 * abs(memory["gap_bytes"])
    assert sum(memory["explained"].values()) + memory["unexplained_bytes"] == memory["gap_bytes"]
    assert memory["explained"]["recompute.mode"] < -10_000 * MIB


def test_every_value_has_its_place():
    found = compared(LIBAI, MEGATRON)
    lines = MEGATRON.read_text().splitlines()
    for difference in found["differences"]:
        path, _, line = difference["source_b"].rpartition(":")
        if path:
            assert path == str(MEGATRON)
            word = {"mode": "checkpoint_activations"}.get(
                difference["knob"].split(".")[1], difference["knob"].split(".")[1]
            )
            assert word in lines[int(line) - 1]
    line = int(found["differences"][0]["source_a"].rpartition(":")[2])
    assert "train.activation_checkpoint.enabled=false" in LIBAI.read_text().splitlines()[line - 1]


def test_gpu_rate_is_occupancy():
    a = typed("LiBai", 15375, 18.95, gpt(4, 32, "none"), gpu_rate=0.94)
    b = typed("Megatron-LM", 8545, 16.053, gpt(8, 64, "full"), gpu_rate=0.53)
    texts = [i["text"] for i in compared(a, b)["inferred"]]
    assert [t for t in texts if "memory occupancy, not utilisation" in t and "GiB of device memory" in t]


def test_the_two_machines(verb):
    """15.82 and 101.17 samples/s for the same work: nobody in the thread asks why."""
    user = typed("LiBai", None, 15.82, gpt(8, 64, "full"))
    maintainer = typed("LiBai", None, 101.17, gpt(8, 64, "full"))
    texts = [i["text"] for i in compared(user, maintainer)["inferred"]]
    assert any("4.60 and 29.4" in t and "6.4 x" in t and "different machines" in t for t in texts)
    code, shown = verb(user, maintainer)
    assert code == 0 and "6.4 x" in shown


def test_once_equal_they_agree(verb):
    """The end of the thread: 34 % against 68 %. The memory is still another setting's doing: ZeRO."""
    whole = 16280 * MIB
    a = typed("LiBai", round(0.34 * whole / MIB), 15.82, gpt(8, 64, "full"), gpu_rate=0.34)
    b = typed("Megatron-LM", round(0.68 * whole / MIB), 15.93, gpt(8, 64, "full"), gpu_rate=0.68)
    found = compared(a, b)
    assert found["verdict"]["memory"] == "not_comparable"
    assert found["differences"][0]["knob"] == "parallel.zero"
    assert abs(found["speed"]["ratio_samples_per_second"] - 1) < 0.01


def test_terminal_page(verb):
    code, shown = verb(LIBAI, MEGATRON)
    lines = shown.splitlines()
    assert code == 1
    assert len(lines) <= 40 and max(map(len, lines)) <= 120
    assert any(line.startswith("memory      not comparable: recompute.mode") for line in lines)
