"""Legacy definitions of FLOPs against the figures that people published with them."""

import json
from pathlib import Path

import pytest

from steelyard.frameworks import counting
from steelyard.predict import flops
from steelyard.spec import resolve
from steelyard.spec.precision import Recompute

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "flops_ratios.json").read_text())
COLUMNS = list(GOLDEN["columns"])


def plan(model, batch=1, recompute="none", **parallel):
    """The vocabulary is given as padded; the run is one of Megatron's kind, so nothing pads it again."""
    config = {
        "model": {**model, "vocab_multiple": 1},
        "batch": {"global_batch_size": batch},
        "recompute": {"mode": recompute},
        "parallel": parallel,
        "engine": {"framework": "megatron"},
    }
    return resolve(config).run


def views(run):
    return {key: view.flops_per_step for key, view in counting.views(run).items()}


def exact(run, causal):
    return run.batch.global_batch_size * flops.model_flops(run.model, run.padded_vocab_size, causal)


@pytest.mark.parametrize("column", COLUMNS)
def test_exact_model_flops(column):
    entry = GOLDEN["columns"][column]
    assert exact(plan(entry["model"], entry["batch"]), False) == pytest.approx(entry["exact_full_attention"], rel=1e-6)


RATIOS = [
    (row, column, ratio)
    for row, ratios in GOLDEN["rows"].items()
    for column, ratio in zip(COLUMNS, ratios, strict=True)
    if ratio != "not run"
]


@pytest.mark.parametrize(("row", "column", "expected"), RATIOS)
def test_ratios_to_exact(row, column, expected):
    entry = GOLDEN["columns"][column]
    run = plan(entry["model"], entry["batch"], "full")
    if row == "hardware":
        per_sequence = flops.hardware_flops(
            run.model, run.padded_vocab_size, Recompute(mode="full"), (run.model.num_layers,), False
        )
        found = run.batch.global_batch_size * per_sequence
    else:
        found = views(run)[row]
    if expected is None:
        assert found is None
    else:
        assert found / exact(run, False) == pytest.approx(expected, abs=5.1e-4)


@pytest.mark.parametrize("name", [key for key in GOLDEN["per_token"] if key != "what"])
def test_the_same_model_in_every_framework(name):
    expected = GOLDEN["per_token"][name]
    model = {"num_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "seq_length": 2048, "vocab_size": 50304}
    kind = {"tied_embeddings": name.endswith("_tied"), "position": "learned" if name.endswith("_tied") else "none"}
    if name == "nanotron_gated":  # as many parameters as the ungated MLP has
        kind |= {"activation": "swiglu", "ffn_hidden_size": 2048}
    if "llm_foundry" in name:
        kind |= {"bias": False, "norm": "rmsnorm"}
    run = plan({**model, **kind}, recompute="full" if name == "gpt_neox" else "none")
    key = name.removesuffix("_tied").removesuffix("_gated")
    assert views(run)[key] / run.model.seq_length / 1e6 == pytest.approx(expected, rel=1.5e-3)


OTHERS = {
    "345M": ({"num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "seq_length": 1024}, "full"),
    "6.7B": ({"num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "seq_length": 8192}, "none"),
    "104B": ({"num_layers": 64, "hidden_size": 11600, "num_attention_heads": 80, "seq_length": 2048}, "full"),
}


@pytest.mark.parametrize("name", [key for key in GOLDEN["to_exact_causal"] if key != "what"])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_ratios_to_causal(name, number):
    model, recompute = list(OTHERS.values())[number]
    run = plan({**model, "vocab_size": 50304}, recompute=recompute)
    expected = GOLDEN["to_exact_causal"][name][number]
    assert views(run)[name] / exact(run, True) == pytest.approx(expected, abs=1.1e-3 if expected != 1.14 else 5e-3)


def test_one_bloom_iteration_has_five_speeds():
    """105.22 s on 384 devices at batch 2048: 149.0 (its log), 146.4, 112.3, 111.1 or 109.8 "TFLOPs"."""
    bloom = GOLDEN["columns"]["BLOOM B2048"]
    run = plan(bloom["model"], 2048, "full")
    rate = 105.22 * 384 * 1e12
    found = views(run)
    assert [
        round(value / rate, 2)
        for value in (
            found["megatron_deepspeed_2022_06"],
            found["8n"],
            exact(run, False),
            exact(run, True),
            found["6n"],
        )
    ] == [149.02, 146.37, 112.33, 111.05, 109.78]


def test_effective_tera_flops_of_spring_2021():
    """`Effective Tera Flops per GPU: 41.31 and total parameters 52.005 B`: 48 samples in 123.74 s on 4 devices."""
    model = GOLDEN["columns"]["52B B1024"]["model"]
    run = plan(model, 48, "full", tensor=4)
    assert round(views(run)["megatron_deepspeed_2021_spring"] / 123.74 / 4 / 1e12, 2) == 41.31


def test_megatron_example():
    """24 x 1024, s = 1024, V = 50304, B = 16: 37.224 TFLOP today, 51.243 and 38.432 by the 2021 paper."""
    model = GOLDEN["columns"]["345M B64"]["model"]
    found = views(plan(model, 16))
    assert round(found["megatron"] / 1e12, 3) == 37.224
    assert round(found["narayanan_2021_factor_4"] / 1e12, 3) == 51.243
    assert round(found["narayanan_2021_factor_3"] / 1e12, 3) == 38.432
    # Written as 60 B s L h^2 (1 + g / 5a + s / 5h + V / 10Lh) in the code of 2023-11.
    layers, h, s, vocabulary = 24, 1024, 1024, 50304
    bracket = 1 + 1 / 5 + s / (5 * h) + vocabulary / (10 * layers * h)
    assert found["megatron_before_2025_03"] == pytest.approx(60 * 16 * s * layers * h * h * bracket, rel=1e-12)


def test_megatron_today_is_our_model_flops():
    """Grouped queries, a gate and any width: the same products, counted the same way."""
    model = {"kind": "llama", "num_layers": 3, "hidden_size": 96, "num_attention_heads": 6, "num_query_groups": 2}
    run = plan({**model, "head_dim": 20, "ffn_hidden_size": 200, "seq_length": 32, "vocab_size": 640}, 4)
    assert views(run)["megatron"] == exact(run, True)
    assert views(run)["maxtext"] == exact(run, True)
    assert views(run)["maxtext_before_2025_07"] == views(run)["nanotron"] == exact(run, False)


def test_llama_3_8b_at_8192():
    """Published tokens/s and TFLOP/s fit only the causal count for Megatron and the full one for TorchTitan."""
    model = {
        "kind": "llama",
        "num_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_query_groups": 8,
        "ffn_hidden_size": 14336,
        "seq_length": 8192,
        "vocab_size": 128256,
    }
    found = views(plan(model))
    assert found["megatron"] / 8192 == pytest.approx(744e12 / 14451, rel=1e-3)
    assert 5856 * found["torchtitan"] / 8192 == pytest.approx(339.16e12, rel=1e-3)
