"""Configuration files of other frameworks: GPT-NeoX, TorchTitan, nanotron, Hugging Face's arguments."""

import random

import pytest

from steelyard.spec import UserError, resolve
from steelyard.translate import into
from tests.translate.conftest import SCRIPTS


def test_gpt_neox(script):
    """Dashes for underscores, JSON-like YAML, DeepSpeed's blocks."""
    found = script("configs/neox_1b.yml", world=16)
    run = found.run
    assert (run.model.num_layers, run.model.hidden_size, run.model.rotary_fraction, run.model.bias) == (
        24,
        2048,
        0.25,
        True,
    )
    assert (run.parallel.tensor, run.parallel.pipeline, run.parallel.data, run.parallel.zero) == (2, 1, 8, 1)
    assert (run.batch.micro_batch_size, run.batch.global_batch_size) == (8, 128)
    assert (run.learning_rate.peak, run.learning_rate.minimum, run.learning_rate.warmup_fraction) == (2e-4, 2e-5, 0.01)
    assert (run.recompute.mode, run.recompute.shard, run.precision.loss_scale.initial_power) == ("full", True, 12)
    assert (run.data.split, run.model.tied_embeddings, run.checkpoint.every_steps) == ("969,30,1", False, 1000)
    assert found.fates()["refused"] == [] and found.row("num_layers").place == "neox_1b.yml:6"


def test_gpt_neox_gate_is_a_third_as_wide(text):
    body = "num_layers: 32\nhidden_size: 4096\nnum_attention_heads: 32\nseq_length: 2048\nmodel_parallel_size: 1\n"
    found = text(body + "intermediate_size: 32768\nactivation: swiglu\npipe_parallel_size: 0\n", name="x.yml")
    assert found.values["model"]["ffn_hidden_size"] == 11008 and found.values["parallel"]["pipeline"] == 1
    refused = text(
        body + "gpt_j_residual: true\nno_such: 1\nattention_config: [[[sparse], 32]]\n", name="y.yml"
    ).refused
    assert [row.flag for row in refused] == ["gpt_j_residual", "no_such", "attention_config"]


def test_torchtitan(script):
    found = script("configs/titan_8b.toml")
    run = found.run
    assert (run.model.num_layers, run.model.hidden_size, run.model.ffn_hidden_size) == (32, 4096, 14336)
    assert (run.parallel.data, run.parallel.tensor, run.parallel.zero, run.parallel.sequence) == (32, 2, 3, True)
    assert (run.batch.global_batch_size, run.model.seq_length, run.learning_rate.warmup_steps) == (32, 8192, 200)
    assert (run.precision.compute, run.precision.gradients, run.recompute.mode) == ("bf16", "fp32", "selective")
    assert run.learning_rate.first_update == "warm" and run.model.padding_in_softmax is False
    assert found.fates()["refused"] == ["activation_checkpoint.selective_ac_option"]


def test_nanotron(script):
    found = script("configs/nanotron_tiny.yaml")
    run = found.run
    assert (run.model.num_layers, run.model.tied_embeddings, run.model.seq_length) == (8, True, 512)
    assert (run.parallel.data, run.parallel.tensor, run.parallel.pipeline, run.parallel.sequence) == (2, 2, 2, True)
    assert (run.batch.global_batch_size, run.batch.accumulation, run.padded_vocab_size) == (16, 4, 50264)
    rate = run.learning_rate
    assert (rate.peak, rate.minimum, rate.warmup_steps, rate.decay_steps) == (3e-4, 1e-5, 10, 100)
    assert found.fates()["refused"] == []


def test_hugging_face(script):
    found = script("trainer.sh")
    run = found.run
    assert (run.model.num_layers, run.model.seq_length, run.model.activation) == (4, 512, "gelu_tanh")
    assert (run.batch.micro_batch_size, run.batch.global_batch_size, run.parallel.zero) == (4, 64, 3)
    assert (run.learning_rate.warmup_fraction, run.learning_rate.decay, run.length.steps) == (0.05, "cosine", 1000)
    assert (run.precision.compute, run.recompute.mode) == ("bf16", "full")
    assert found.fates()["refused"] == []


@pytest.mark.parametrize(("name", "body"), [
    ("bomb.yml", "x0: &x0 [x, x]\n" + "".join(f"x{n + 1}: &x{n + 1} [*x{n}, *x{n}]\n" for n in range(40))),
    ("bomb2.yml", "num_layers: 1\nhidden_size: 1\nmodel_parallel_size: 1\nx0: &x0 [x, x]\n"
     + "".join(f"x{n + 1}: &x{n + 1} [*x{n}, *x{n}]\n" for n in range(40))),
    ("tag.yml", "num_layers: !!python/object/apply:os.system ['true']\nhidden_size: 1\nmodel_parallel_size: 1\n"),
    ("deep.yml", "[" * 30_000),
    ("broken.yml", "a: [1\nb: }"),
    ("list.yml", "- 1\n- 2\n"),
    ("other.yml", "a: 1\n"),
    ("bad.py", "model.cfg.hidden_size = (((\n"),
    ("deep.py", "train.seed = " + "(" * 3_000 + "1" + ")" * 3_000),
])  # fmt: skip
def test_hostile_files(text, name, body):
    with pytest.raises(UserError, match=r"F0(15|18)"):
        text(body, name=name)


def test_a_libai_file_is_never_executed(text, tmp_path):
    mark = tmp_path / "mark"
    body = f"import os\nos.system('touch {mark}')\nmodel.cfg.hidden_size = os.cpu_count() * 64\ntrain.seed = 10**9**9\n"
    found = text(body, name="x.py")
    assert not mark.exists()
    assert [p.code for p in found.problems] == ["F014", "F014"] and not found.values


def test_libai_forms(text):
    """update(), dict(), get_config, subscripts, references, overrides behind the file."""
    found = text(
        "train = get_config('common/train.py').train\n"
        "cfg = dict(hidden_layers=12, hidden_size=64 * 4, num_attention_heads=4, max_seq_length=128)\n"
        "model = LazyCall(GPTForPreTraining)(cfg=cfg)\n"
        "train.update(dict(train_micro_batch_size=2, amp=dict(enabled=True), train_iter=50))\n"
        "train['zero_optimization']['enabled'] = True\n"
        "model.cfg.ffn_hidden_size = 4 * model.cfg.hidden_size\n",
        "train.global_batch_size=16", "train.dist.pipeline_parallel_size=2", "--resume", "nonsense", name="x.py",
    )  # fmt: skip
    assert found.values["model"]["ffn_hidden_size"] == 1024 and found.values["model"]["num_layers"] == 12
    assert (found.values["batch"]["micro_batch_size"], found.values["batch"]["global_batch_size"]) == (2, 16)
    assert (found.values["parallel"]["zero"], found.values["parallel"]["stages"]) == (1, [6, 6])
    assert [row.flag for row in found.refused] == ["nonsense"]


def test_mangled_files_end_in_an_error_of_ours():
    """Bits of every sample taken out, doubled or put in: a translation, or a UserError, never anything else."""
    generator = random.Random(0)
    kinds = (".sh", ".slurm", ".py", ".yml", ".yaml", ".toml")
    names = [path for path in sorted(SCRIPTS.rglob("*")) if path.suffix in kinds]
    bits = [
        '"',
        "'",
        "$",
        "${",
        "}",
        "(",
        "((",
        "\\",
        "\n",
        "<<EOF\n",
        "|",
        "=",
        "--x",
        "[",
        "{",
        " nan ",
        " 1e999 ",
        ": ",
    ]
    read = 0
    for number in range(600):
        path = names[number % len(names)]
        text = path.read_text()
        for _ in range(generator.randint(1, 5)):
            at = generator.randrange(len(text))
            cut = generator.choice([0, generator.randint(1, 30)])
            text = text[:at] + generator.choice(["", *bits]) + text[at + cut :]
        try:
            found = into.of_text(text, path, ["configs/gpt2_nl24.py", "8"] if path.name == "args_libai.sh" else ["8"])
            resolve(dict(found.values), {}, ["model.vocab_size=50257"], found.world)
            read += 1
        except UserError:
            pass
    assert read > 100
