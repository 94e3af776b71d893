"""An outside witness: from Megatron-LM's own initial weights and data, the same training run.

tests/golden/megatron holds what Megatron-LM core 0.20.0 recorded (see its `source`). Tolerances are twice to four times
what an independent replay in plain torch shows: float32 losses 2e-6, gradient norms 5e-6, weights 4e-6; fp16 5e-4 and
5e-3, every loss scale and every skipped step equal.
"""

import json
from pathlib import Path

import pytest
import torch

from steelyard.checkpoint.convert import megatron, weights
from steelyard.checkpoint.weights import load_model
from steelyard.spec import UserError, load, resolve
from tests.train.running import train

GOLDEN = Path(__file__).parents[1] / "golden" / "megatron"
RECORDED = json.loads((GOLDEN / "runs.json").read_text())["runs"]
RUN = """
seed = 1234
[model]
num_layers = 4
hidden_size = 64
num_attention_heads = 4
seq_length = 64
vocab_size = 501
padding_in_softmax = true
[batch]
global_batch_size = 8
micro_batch_size = 2
loss_mean = "micro_batches"
[optimizer]
betas = [0.9, 0.95]
weight_decay = 0.1
[learning_rate]
peak = 1e-3
minimum = 1e-4
warmup_steps = 5
decay_steps = 30
first_update = "zero"
[length]
steps = 30
[data]
train = ["{data}"]
split = "90,5,5"
tokenizer = "ids:500"
cache = "{folder}/cache"
[evaluation]
every_steps = 10
steps = 2
[checkpoint]
load = "{folder}/start"
[record]
folder = "{folder}/run"
tensorboard = false
"""
EOD = ("data.mask_loss_at_eod=true", "data.reset_positions=true", "data.reset_attention=true")
FP16 = ("precision.compute=fp16", "precision.gradients=fp16")
SCALE = 'precision.loss_scale={{initial_power={},window=5,hysteresis=2,rule="megatron"}}'


@pytest.fixture
def run_path(tmp_path):
    """The run file, with Megatron's weights as its step 0."""
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(data=GOLDEN / "data", folder=tmp_path))
    run = load(path).run
    weights.write_start(megatron.read(GOLDEN / "init.safetensors", run.model), run, Path("init"), tmp_path / "start")
    return path


def differences(record, recorded):
    """Largest differences of loss and gradient norm over the steps; rates and skips must be equal."""
    pairs = list(zip(record.steps, recorded["steps"], strict=True))
    assert [ours.skipped for ours, _ in pairs] == [theirs["skipped"] for _, theirs in pairs]
    assert [ours.learning_rate for ours, _ in pairs] == pytest.approx([t["lr_used"] for _, t in pairs], rel=1e-12)
    loss = max(abs(ours.loss - theirs["lm_loss"]) for ours, theirs in pairs)
    norm = max(abs(o.grad_norm - t["grad_norm"]) for o, t in pairs if t["grad_norm"] is not None)
    return loss, norm


def final_difference(folder, recorded):
    """Largest difference of the recorded positions of every final tensor."""
    model, _ = load_model(folder, torch.device("cpu"))
    held = dict(model.named_parameters())
    worst = 0.0
    for name, stats in recorded["final"].items():
        ours = held[megatron.our_name(name)].detach().flatten()
        for position, value in stats["at"].items():
            worst = max(worst, abs(ours[int(position)].item() - value))
    assert len(recorded["final"]) == len(held)
    return worst


@pytest.mark.parametrize(("name", "options"), [("run1_gpt2", ()), ("run3_gpt2_eod", EOD)])
def test_float32(pools, run_path, name, options):
    _, record = train(pools(1), run_path, *options)
    loss, norm = differences(record, RECORDED[name])
    assert loss < 2e-6 and norm < 5e-6
    evaluations = [(v.step, v.name, v.loss) for v in record.validations]
    theirs = [(e["after_step"], e["set"], e["lm_loss"]) for e in RECORDED[name]["evaluations"]]
    assert [e[:2] for e in evaluations] == [t[:2] for t in theirs]
    assert [e[2] for e in evaluations] == pytest.approx([t[2] for t in theirs], abs=2e-6)
    if RECORDED[name]["final"]:
        assert final_difference(run_path.parent / "run", RECORDED[name]) < 4e-6


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("run7_gpt2_fp16", (*FP16, SCALE.format(16))),
        ("run7b_gpt2_fp16_fp32accum", (FP16[0], SCALE.format(16))),
        ("run7c_gpt2_fp16_high_scale", (*FP16, SCALE.format(22))),
    ],
)
def test_float16_with_every_scale_and_skip(pools, run_path, name, options):
    _, record = train(pools(1), run_path, *options)
    loss, norm = differences(record, RECORDED[name])
    assert loss < 5e-4 and norm < 5e-3
    assert [s.loss_scale for s in record.steps] == [t["loss_scale_used"] for t in RECORDED[name]["steps"]]


@pytest.mark.parametrize(
    "layout",
    [(), ("parallel.zero=3",), ("parallel.tensor=2",),
     pytest.param(("parallel.tensor=2", "parallel.sequence=true"), marks=pytest.mark.slow), ("parallel.pipeline=2",)],
    ids=["dp2", "dp2 zero 3", "tp2", "tp2 sequence", "pp2"],
)  # fmt: skip
def test_two_ranks(pools, run_path, layout):
    _, record = train(pools(2), run_path, *layout)
    loss, _ = differences(record, RECORDED["run1_gpt2"])
    assert loss < 2e-5


@pytest.mark.parametrize(
    ("option", "shows"),
    [("batch.loss_mean=tokens", 7e-5), ("data.reset_positions=false", 4e-3), ("data.reset_attention=false", 1.5e-3),
     ("data.mask_loss_at_eod=false", 1.5e-2), ("model.padding_in_softmax=false", 2e-2),
     ("learning_rate.first_update=warm", 0.1)],
)  # fmt: skip
def test_each_difference_of_meaning_would_show(pools, run_path, option, shows):
    """The recorded sizes of plausible mistakes: the test above can fail."""
    _, record = train(pools(1), run_path, *EOD, option, 'checkpoint.accept=["model.padding_in_softmax"]')
    pairs = zip(record.steps, RECORDED["run3_gpt2_eod"]["steps"], strict=True)
    assert max(abs(ours.loss - theirs["lm_loss"]) for ours, theirs in pairs) > shows / 2


def test_gated_matrices_and_fused_norms_are_placed():
    model = resolve({"model": {"kind": "llama", "num_layers": 1, "hidden_size": 8, "num_attention_heads": 2,
                               "ffn_hidden_size": 4}}).run.model  # fmt: skip
    both = torch.arange(64.0).view(8, 8)
    found = megatron.to_ours(
        {"decoder.layers.0.mlp.linear_fc1.weight": both, "decoder.layers.0.mlp.linear_fc1.layer_norm_weight": both[0],
         "decoder.layers.0.self_attention.linear_qkv._extra_state": both},
        model,
    )  # fmt: skip
    assert torch.equal(found["layers.0.mlp.gate.weight"], both[:4])
    assert torch.equal(found["layers.0.mlp.up.weight"], both[4:])
    assert torch.equal(found["layers.0.mlp_norm.weight"], both[0])


def test_unknown_and_misshapen_tensors_are_refused(run_path):
    run = load(run_path).run
    with pytest.raises(UserError, match="C005"):
        megatron.to_ours({"decoder.layers.0.mlp.router.weight": torch.zeros(1)}, run.model)
    with pytest.raises(UserError, match="C003"):
        weights.check({"norm.weight": torch.zeros(64)}, run, Path("x"))
    (run_path.parent / "bad.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(UserError, match="C001"):
        megatron.read(run_path.parent / "bad.safetensors", run.model)
