"""Memory in the plan: the JSON contract, one rank, whether it fits, and what would make it fit."""

import json

import pytest
from typer.testing import CliRunner

from steelyard.cli.main import app
from steelyard.plan import memory, sheet
from steelyard.spec import UserError, resolve

ARGUMENTS = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 "
    "--micro-batch-size 2 --global-batch-size 32 --lr 1e-4 --train-iters 10 --bf16 "
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
)


def plan(*arguments, code=0):
    done = CliRunner().invoke(app, ["plan", *arguments], catch_exceptions=False)
    assert done.exit_code == code
    return done.stdout


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "pretrain.args"
    path.write_text(ARGUMENTS)
    return str(path)


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[model]\nnum_layers = 24\nhidden_size = 2048\nnum_attention_heads = 16\n"
                    '[precision]\ncompute = "bf16"\n[batch]\nglobal_batch_size = 64\n'
                    "micro_batch_size = 8\n")  # fmt: skip
    return str(path)


@pytest.mark.parametrize("form", ["text", "json"])
def test_contract_on_arguments(tmp_path, script, form):
    if form == "json":
        words = ARGUMENTS.split()
        pairs = {w: True if n + 1 == len(words) or words[n + 1].startswith("--") else words[n + 1]
                 for n, w in enumerate(words) if w.startswith("--")}  # fmt: skip
        path = tmp_path / "arguments.json"
        path.write_text(json.dumps(pairs))
        script = str(path)
    found = json.loads(plan(script, "--world", "8", "hardware.chip=A100-SXM4-80GB", "--json"))["memory"]
    assert found["framework"] == "Megatron-LM" and found["chip"] == "A100-SXM4-80GB" and found["fits"] is True
    assert [(r["stage"], r["tensor"], r["count"]) for r in found["ranks"]] == [
        (0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2),
    ]  # fmt: skip
    for rank in found["ranks"]:
        assert set(rank["states"]) == {"weights", "gradients", "master", "optimizer"}
        assert rank["peak"] == sum(rank["states"].values()) + sum(rank["terms"].values())
        assert rank["steady"] <= rank["peak_first_step"] <= rank["peak"] <= rank["reserved"] < rank["device"]
        assert all(isinstance(value, int) for value in rank["terms"].values())


def test_one_rank(script):
    whole = json.loads(plan(script, "--world", "8", "--json"))["memory"]["ranks"]
    for rank, place in ((0, 0), (3, 1), (4, 2), (7, 3)):
        only = json.loads(plan(script, "--world", "8", "--rank", str(rank), "--json"))["memory"]["ranks"]
        assert [r["peak"] for r in only] == [whole[place]["peak"]]
    with pytest.raises(UserError, match="M001"):
        plan(script, "--world", "8", "--rank", "8")


def test_four_numbers_and_unknown(run_file):
    """Without a chip nothing is assumed: no device figure, and no verdict."""
    found = json.loads(plan(run_file, "--world", "8", "--json"))["memory"]
    assert (found["chip"], found["fits"]) == (None, None)
    assert all(rank["device"] is None for rank in found["ranks"])
    assert "chip unknown" in plan(run_file, "--world", "8")


def test_does_not_fit_and_what_would(run_file):
    """Ranked by cost in FLOPs; every one of them fits and is a single change."""
    text = plan(run_file, "--world", "8", "hardware.chip=V100-SXM2-16GB", code=1)
    assert "does NOT fit on V100-SXM2-16GB" in text and "would fit" in text
    run = resolve({
        "model": {"num_layers": 24, "hidden_size": 2048, "num_attention_heads": 16}, "precision": {"compute": "bf16"},
        "batch": {"global_batch_size": 64, "micro_batch_size": 8}, "hardware": {"chip": "V100-SXM2-16GB"},
    }, world=8).run  # fmt: skip
    found = memory.changes(run)
    assert [c["more_flops"] for c in found] == sorted(c["more_flops"] for c in found)
    assert len({c["set"] for c in found}) == len(found) > 1
    assert all(c["need"] <= 16 * 2**30 for c in found)
    assert any(c["set"].startswith("recompute") and c["more_flops"] > 0 for c in found)


def test_bar_adds_up(run_file):
    from steelyard.report.memory import parts

    run = resolve({"model": {"num_layers": 4}}, world=1).run
    rank = sheet.as_json(run)["memory"]["ranks"][0]
    assert sum(parts(rank).values()) == rank["peak"]


def test_a_framework_without_a_model():
    assert sheet.as_json(resolve({"engine": {"framework": "nanogpt"}}).run)["memory"] is None


def test_rehearse(run_file):
    shown = plan(run_file, "--world", "8", "--rehearse", "--rank", "3", "model.num_layers=2", "model.hidden_size=256")
    assert "rank 3 of 8" in shown and "+0.00%" in shown
    with pytest.raises(UserError, match="M003"):
        plan(run_file, "--rehearse", "engine.framework=megatron")
