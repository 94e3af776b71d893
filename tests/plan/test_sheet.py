"""The plan as a document: its contract, its golden files, and the sums that must hold inside it."""

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings

from steelyard.plan import sheet
from steelyard.spec import UserError, resolve

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "tests" / "golden"), str(ROOT / "tests" / "predict")]

from generated import runs  # noqa: E402
from regenerate import PLANS, printed  # noqa: E402

RECIPES = sorted((ROOT / "recipes").glob("*.toml"))


def plan(**config):
    return sheet.as_json(resolve(config).run)


def exact(text):
    """JSON with floats to 12 digits: the cosine of the schedule may differ in the last one between machines."""
    return json.loads(text, parse_float=lambda digits: f"{float(digits):.12g}")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_golden_plans(recipe):
    """A difference here changes what people are told before launch: see tests/golden/regenerate.py."""
    golden = PLANS / f"{recipe.stem}.json"
    assert golden.exists(), "python tests/golden/regenerate.py"
    assert exact(printed(recipe)) == exact(golden.read_text())


def test_every_golden_plan_has_a_recipe():
    assert {path.stem for path in PLANS.glob("*.json")} == {path.stem for path in RECIPES}


def test_the_contract():
    """The keys that other programs read. Taking one away needs a new version."""
    found = plan()
    assert (found["schema"], found["version"]) == ("steelyard.plan", 1)
    assert set(found) >= {
        "name", "size_in_name", "model", "layout", "batch", "length", "learning_rate", "parameters", "flops",
        "recompute", "hardware", "notes",
    }  # fmt: skip
    assert set(found["parameters"]) >= {
        "unique", "unique_unpadded", "padding", "without_embeddings", "sum_over_ranks", "per_stage", "ranks",
        "tensors", "as_printed", "says",
    }  # fmt: skip
    assert set(found["parameters"]["ranks"][0]) >= {
        "stage", "tensor", "count", "stored", "held", "sharded", "replicated", "tied_copy", "embedding", "position",
        "norm", "padding",
    }  # fmt: skip
    assert set(found["parameters"]["as_printed"]) >= {
        "megatron_ranks", "megatron_deepspeed_estimated_billions", "megatron_deepspeed_without_embeddings_billions",
        "deepspeed_stage", "deepspeed_total", "deepspeed_unique", "huggingface_trainable", "nanogpt_without_positions",
    }  # fmt: skip
    assert set(found["flops"]) >= {
        "model_per_step", "model_per_step_full_attention", "hardware_per_step", "hardware_per_step_full_attention",
        "model_per_token", "model_per_run", "forward_per_sequence", "views", "says",
    }  # fmt: skip
    assert set(found["learning_rate"][0]) == {"step", "samples", "global_batch_size", "rate", "event"}


def test_every_number_has_its_convention():
    found = plan()
    for part in ("parameters", "flops"):
        numbers = set(found[part]) - {"as_printed", "views", "says"}
        numbers |= set(found[part].get("as_printed", ())) | set(found[part].get("views", ()))
        assert numbers == set(found[part]["says"])


@settings(max_examples=60, deadline=None)
@given(runs())
def test_sums(run):
    """The parts of a sheet add up, and it survives JSON in both spellings."""
    found = sheet.as_json(run)
    counts, layout = found["parameters"], found["layout"]
    assert json.loads(json.dumps(found)) == json.loads(sheet.dumps(found))
    assert counts["unique"] == counts["unique_unpadded"] + counts["padding"]
    assert sum(rank["count"] for rank in counts["ranks"]) == layout["world_size"]
    assert all(rank["held"] == rank["sharded"] + rank["replicated"] for rank in counts["ranks"])
    assert counts["unique"] == sum(entry["parameters"] * entry["times"] for entry in counts["tensors"])
    assert sum(layout["stages"]) == found["model"]["num_layers"]
    sequences = found["batch"]["global_batch_size"]
    assert sum(layout["stage_flops_per_sequence"]) * sequences == found["flops"]["model_per_step"]
    assert found["flops"]["model_per_token"] * found["batch"]["tokens_per_step"] == found["flops"]["model_per_step"]
    products = found["flops"]["forward_per_sequence"].values()
    forward = sum(entry["flops"] * entry["times"] for entry in products)
    assert 3 * sequences * forward == found["flops"]["model_per_step_full_attention"]


GIANT = {
    "num_layers": 32,
    "hidden_size": 16384,
    "num_attention_heads": 64,
    "seq_length": 2048,
    "ffn_hidden_size": 20480,
}


def test_the_size_beside_the_name():
    """A 104B model that was launched with the MLP of a 13B one."""
    found = plan(name="tr8-104B-wide", model=GIANT)
    assert found["size_in_name"]["claimed"] == 104_000_000_000
    assert found["parameters"]["unique_unpadded"] == 56_696_946_688
    assert found["size_in_name"]["difference"] == pytest.approx(-0.4548, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "claimed"),
    [
        ("gpt-345m", 345_000_000),
        ("gpt3-175b", 175_000_000_000),
        ("tr1-1B3-pile", 1_300_000_000),
        ("llama-1.1B", 1_100_000_000),
        ("run", None),
        ("8bit-test", None),
        ("v2", None),
        ("0b", None),
    ],
)
def test_sizes_in_names(name, claimed):
    found = plan(name=name)["size_in_name"]
    assert (found and found["claimed"]) == claimed


def test_learning_rate_at_its_events():
    found = plan(
        batch={"global_batch_size": 8, "micro_batch_size": 2, "ramp": [2, 2, 60]},
        learning_rate={"peak": 1.0, "warmup_samples": 40, "decay_samples": 200},
        length={"samples": 400},
    )
    rows = {row["event"]: row for row in found["learning_rate"]}
    assert rows["first update"]["rate"] == pytest.approx(2 / 40)
    assert rows["warm-up ends"]["rate"] == 1.0
    assert rows["decay ends"]["rate"] == 0.0
    assert [row["step"] for row in found["learning_rate"]] == sorted(row["step"] for row in found["learning_rate"])
    levels = found["batch"]["levels"]
    assert [level["global_batch_size"] for level in levels] == [2, 4, 6, 8]
    assert levels[0]["first_step"] == 1
    for level in levels[1:]:
        row = rows.get(f"global batch {level['global_batch_size']}")
        assert row is None or (row["step"], row["samples"]) == (level["first_step"], level["first_sample"])
    assert rows["last update"]["step"] == found["length"]["steps"]


def test_a_warm_up_shorter_than_a_step():
    found = plan(learning_rate={"peak": 1.0, "warmup_fraction": 1e-6}, length={"steps": 4})["learning_rate"]
    assert [row["step"] for row in found] == [1, 3, 4]
    assert found[0]["event"] == "warm-up ends"


def test_a_first_update_of_zero():
    config = {"peak": 1.0, "warmup_steps": 4, "first_update": "zero"}
    found = plan(learning_rate=config, batch={"global_batch_size": 2}, length={"steps": 20})
    rates = {row["event"]: (row["step"], row["rate"]) for row in found["learning_rate"]}
    assert rates["first update"] == (1, 0.0)
    assert rates["warm-up ends"] == (5, 1.0)


def test_an_unknown_chip_stays_unknown():
    assert plan()["hardware"] == {"chip": None, "dtype": "fp32", "peak_flops": None, "peak_source": None}
    with pytest.raises(UserError, match="H001"):
        plan(hardware={"chip": "Z9"})


def test_padding_is_a_stated_quantity():
    """Field report A05: real vocabulary, padded vocabulary and the difference stand beside each other."""
    found = plan(model={"vocab_size": 32002, "vocab_multiple": "megatron"}, parallel={"tensor": 2})["model"]
    assert (found["vocab_size"], found["padded_vocab_size"], found["padding_rows"]) == (32002, 32256, 254)
