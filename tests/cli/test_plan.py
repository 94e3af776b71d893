"""The verb: what a person and a program get from `steelyard plan`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from steelyard.cli.main import app
from steelyard.spec import UserError

ROOT = Path(__file__).parents[2]
T1 = """
name = "t1"
[model]
num_layers = 4
hidden_size = 64
num_attention_heads = 4
seq_length = 64
vocab_size = 257
[batch]
global_batch_size = 8
"""


@pytest.fixture
def t1(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(T1)
    return str(path)


def plan(*arguments):
    done = CliRunner().invoke(app, ["plan", *arguments], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def lines(text):
    """Lines with single spaces, so that a test names what stands there and not how wide."""
    return [" ".join(line.split()) for line in text.splitlines()]


def test_ten_seconds():
    """The largest recipe fits on a screen and leads with the number people come for."""
    shown = lines(plan(str(ROOT / "recipes" / "gpt3-175b.toml"), "--world", "1024"))
    assert len(shown) <= 40
    assert shown[0] == "gpt3-175b: 174,604,259,328 parameters, 0.2% smaller than its name says"
    assert "parameters 174,604,259,328 unique, without padding rows" in shown
    assert "layout 1,024 ranks: tensor 8 x pipeline 16 x data 8; zero 1" in shown
    assert "1,359,461,376 on each of 64 ranks of stages 1 to 14" in shown
    assert "6.000e-05 step 4,810: warm-up ends (global batch 64)" in shown


def test_overrides_and_world(t1):
    found = json.loads(plan(t1, "parallel.tensor=2", "model.vocab_multiple=megatron", "--world", "4", "--json"))
    assert found["parameters"]["unique"] == 236928
    assert found["parameters"]["as_printed"]["megatron_ranks"] == [121344, 121344]
    assert found["parameters"]["as_printed"]["deepspeed_total"] == 242688
    assert [rank["count"] for rank in found["parameters"]["ranks"]] == [2, 2]


def test_explain_traces_every_coefficient(t1):
    """Field report B03."""
    shown = lines(plan(t1, "--explain"))
    assert "one layer: linear products 6,291,456; scores and context 1,048,576 in full, 524,288 causal" in shown
    assert "logits 2 s h V 3,145,728 1 3,145,728 3,145,728" in shown
    assert any(line.endswith("full score matrices: 97,517,568 model FLOPs a sequence") for line in shown)
    assert "layers.*.attention.qkv.weight 192 x 64 rows 12,288 4 49,152" in shown
    assert "without_embeddings 200,064 Blocks and norms: no word embedding, no position table, no output head." in shown


def test_explain_names_every_byte(t1):
    """Field report C03: what is at the peak, largest first, adds up to it, and what is not counted is said."""
    shown = lines(plan(t1, "--explain"))
    start = next(n for n, line in enumerate(shown) if line.startswith("memory at the peak of stage 0"))
    end = next(n for n, line in enumerate(shown) if n > start and line.startswith("peak "))
    terms = [int(line.split()[-1].replace(",", "")) for line in shown[start + 1 : end]]
    assert sum(terms) == int(shown[end].split()[1].replace(",", "")) and terms == sorted(terms, reverse=True)
    assert any(line.endswith("not counted: fragmentation, communicators, context") for line in shown)
    assert "not_counted" in plan(t1, "--json", "--explain")


def test_as_a_framework(t1):
    shown = plan(t1, "parallel.pipeline=2", "--as", "megatron-deepspeed")
    assert "estimated model parameters: 0.00025728" in shown
    assert "every stage is taken for the first one" in shown
    shown = plan(t1, "parallel.tensor=2", "--as", "megatron")
    assert " > number of parameters on (tensor, pipeline) model parallel rank (1, 0): 121344" in shown
    found = json.loads(plan(t1, "parallel.tensor=2", "--as", "megatron", "--json"))
    assert found["printed"]["megatron_ranks"]["value"] == [121344, 121344]
    assert found["views"]["megatron"]["flops_per_step"] > 0


def test_layouts_side_by_side(t1):
    sets = [
        "--set",
        "parallel.tensor=2,model.vocab_multiple=megatron",
        "--set",
        "parallel.pipeline=2,parallel.stages=[1,3]",
    ]
    shown = lines(plan(t1, "--world", "4", *sets))
    assert "tensor x pipeline x data 1 x 1 x 4 2 x 1 x 2 1 x 2 x 2" in shown
    assert "unique parameters 228,736 236,928 228,736" in shown
    assert "layers per stage 4 4 1-3" in shown
    found = json.loads(plan(t1, *sets, "--json"))
    assert [entry["set"] for entry in found] == ["", sets[1], sets[3]]
    assert [entry["layout"]["stages"] for entry in found] == [[4], [4], [1, 3]]


def test_a_configuration_of_hugging_face(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gpt2"}))
    assert lines(plan(str(path)))[0].endswith("124,439,808 parameters")


def test_what_is_nested_too_deeply(tmp_path):
    for name in ("config.json", "args.json"):
        (tmp_path / name).write_text("[" * 100_000)
        with pytest.raises(UserError, match=r"nested too deeply|recursion"):
            plan(str(tmp_path / name))


def test_refusals(t1):
    for arguments, code in [
        (["--set", "tensor"], "P001"),
        (["--as", "megatrn"], "P002"),
        (["engine.framework=magatron"], "P002.*did you mean megatron"),
        (["--set", "parallel.zero=3", "--rank", "0"], "P004"),
        (["--set", "parallel.zero=3", "--rehearse"], "P004"),
        (["--as", "megatron", "--rank", "0"], "P004"),
        (["--rehearse", "--explain"], "P004"),
        (["engine.framework=papers"], "P002"),
        (["--world", "2", "parallel.context=2", "--rehearse"], "T003"),
        (["recompute.mode=selective", "recompute.modules=[]"], "S121"),
        (["engine.framework=deepspeed", "--world", "2", "parallel.pipeline=2"], "M004"),
        (["parallel.tensor=3"], "S104"),
    ]:
        with pytest.raises(UserError, match=f"(?s){code}"):
            plan(t1, *arguments)


def test_a_plan_loads_neither_torch_nor_numpy(t1):
    code = (
        "import sys\nfrom steelyard.cli.main import main\nsys.argv = ['steelyard', 'plan', *sys.argv[1:]]\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "loaded = {'torch', 'numpy', 'rich', 'tomlkit'} & set(sys.modules)\nsys.exit(str(loaded) if loaded else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, t1], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
