"""Records that people type: any JSON is compared or refused in words."""

import json
import random

import pytest

from steelyard.compare.verdict import as_json, compare
from steelyard.frameworks import detect
from steelyard.report import comparison
from steelyard.spec import UserError

SENSIBLE = {
    "model": {"num_layers": [2, 24], "hidden_size": [64, 1024], "num_attention_heads": [4, 16],
              "seq_length": [64, 1024], "vocab_size": [257, 50257], "vocab_multiple": [128, "megatron"],
              "attention_dropout": [0.0, 0.1]},
    "parallel": {"tensor": [1, 2, 3], "pipeline": [1, 2, 4], "data": [1, 8], "zero": [0, 1, 2, 3],
                 "stages": ["balanced"]},
    "batch": {"micro_batch_size": [1, 4], "global_batch_size": [8, 64], "ramp": [[2, 2, 100]]},
    "precision": {"compute": ["fp16", "bf16", "fp32"], "gradients": ["fp32"]},
    "recompute": {"mode": ["none", "full", "selective"], "every": [1, 2]},
    "hardware": {"chip": ["V100-SXM2-16GB", "A100-SXM4-80GB"]},
    "engine": {"framework": ["megatron", "libai"], "version": ["2021"]},
}  # fmt: skip
WEIRD = [None, True, -1, 0, 1.5, "x", "", [], [1, "a"], {}, {"a": {"b": 1}}, 10**30, 1e308, -0.0, [[1]]]
FRAMEWORKS = ["LiBai", "Megatron-LM", "steelyard", "Megatron-DeepSpeed", "torchtitan", "x", 3, None]
SIZES = [8545 * 2**20, 15375 * 2**20, 1, 0, -5, 10**30, "x", 1.5, True]
RATES = [15.8, 101, 0, -1, 1e308, 1e-308, "3", True]


def record(chance: random.Random) -> str:
    config = {}
    for section, keys in SENSIBLE.items():
        if chance.random() < 0.03:
            config[section] = chance.choice(WEIRD)
        elif chance.random() < 0.9:
            kept = {key: values for key, values in keys.items() if chance.random() < 0.85}
            config[section] = {k: chance.choice(v if chance.random() < 0.85 else WEIRD) for k, v in kept.items()}
    found = {"framework": chance.choice(FRAMEWORKS), "config": config}
    if chance.random() < 0.8:
        found["memory"] = {chance.choice(["device_bytes", "allocated_peak_bytes", "rss_bytes"]): chance.choice(SIZES)}
    if chance.random() < 0.8:
        found["speed"] = {chance.choice(["samples_per_second", "seconds_per_step"]): chance.choice(RATES)}
    if chance.random() < 0.3:
        found["gpu_rate"] = chance.choice([0.5, 54, "x", 0, None])
    return json.dumps(found)


@pytest.mark.parametrize("seed", range(4))
def test_typed_records(seed):
    chance = random.Random(seed)
    refused = 0
    for _ in range(200):
        try:
            pair = compare([detect.read(record(chance)), detect.read(record(chance))])[0]
        except UserError:
            refused += 1
            continue
        json.dumps(as_json(pair), allow_nan=False)
        assert len(comparison.terminal(pair).splitlines()) <= 40
        assert comparison.markdown(pair) and comparison.page([pair])
    assert 0 < refused < 150  # both happen


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999", "-1"])
def test_a_rate_that_is_none(value):
    with pytest.raises(UserError, match="R002"):
        detect.read('{"framework": "x", "config": {}, "speed": {"samples_per_second": ' + value + "}}")
