"""Whole scripts in: what they say, where each value comes from, and that nothing is lost."""

import json
from pathlib import Path

import pytest

from steelyard.frameworks.megatron import flags as megatron_flags
from steelyard.frameworks.megatron_deepspeed import flags as fork_flags
from steelyard.spec import UserError, resolve
from steelyard.translate import into, launch, shell
from tests.translate.conftest import SCRIPTS


def test_positional_arguments(script):
    """The first seed's shape: layout and batch from the command line."""
    found = script("positional.sh", "8", "1", "1", "8", "64", "100")
    run = found.run
    assert (run.parallel.data, run.parallel.tensor, run.parallel.pipeline, run.parallel.zero) == (8, 1, 1, 0)
    assert (run.model.num_layers, run.model.hidden_size, run.model.num_attention_heads) == (24, 1024, 16)
    assert (run.batch.micro_batch_size, run.batch.global_batch_size, run.batch.accumulation) == (8, 64, 1)
    assert (run.precision.compute, run.precision.gradients, run.recompute.mode) == ("fp16", "fp16", "full")
    rate = run.learning_rate
    assert (rate.peak, rate.minimum, rate.decay, rate.decay_steps) == (1.5e-4, 1e-5, "cosine", 320000)
    assert (rate.warmup_fraction, rate.first_update, run.length.steps) == (0.01, "zero", 100)
    assert (run.data.split, run.data.tokenizer) == ("949,50,1", "/data/gpt")
    # what Megatron does without being asked
    assert (run.model.padding_in_softmax, run.batch.loss_mean, run.model.vocab_multiple) == (
        True,
        "micro_batches",
        "megatron",
    )
    assert (run.model.activation, run.model.hidden_dropout, run.precision.loss_scale.initial_power) == (
        "gelu_tanh",
        0.1,
        32,
    )
    assert run.precision.loss_scale.rule == "megatron"
    assert found.fates()["refused"] == []
    assert found.found.origins["model.num_layers"] == "positional.sh:32 --num-layers"
    assert found.found.origins["model.hidden_dropout"] == "default of Megatron-LM"


def test_positional_arguments_are_used(script):
    found = script("positional.sh", "8", "2", "2", "4", "64", "50")
    run = found.run
    assert (run.parallel.tensor, run.parallel.pipeline, run.parallel.data) == (2, 2, 2)
    assert (run.batch.micro_batch_size, run.batch.accumulation, run.length.steps) == (4, 8, 50)
    by_default = script("positional.sh").run
    assert (by_default.parallel.data, by_default.length.steps) == (8, 100)


def test_a_here_document(script):
    """The second seed's shape: flags in strings, DeepSpeed's JSON written by the script."""
    found = script("heredoc.sh")
    run = found.run
    assert (run.batch.ramp, run.length.samples, run.batch.global_batch_size) == ((2, 2, 1000), 100, 16)
    assert (run.parallel.tensor, run.parallel.data, run.parallel.zero) == (2, 1, 1)
    assert (run.recompute.mode, run.recompute.shard) == ("full", True)
    scale = run.precision.loss_scale
    assert (scale.initial_power, scale.window, scale.hysteresis, scale.minimum, scale.rule) == (
        12,
        500,
        2,
        1.0,
        "deepspeed",
    )
    assert (run.stop.step_multiple, run.seed, run.optimizer.betas) == (200, 42, (0.9, 0.95))
    assert (run.learning_rate.decay, run.learning_rate.warmup_samples) == ("linear", 5)
    assert found.fates()["refused"] == []
    assert found.row("fp16.initial_scale_power").place == "heredoc.sh:83"
    assert found.row("--rampup-batch-size").place == "heredoc.sh:27"
    assert found.found.framework == "Megatron-DeepSpeed"


def test_a_batch_system(script):
    """CMD strings with quotes in them, `bash -c '$LAUNCHER ... $CMD'`, and sizes from #SBATCH lines."""
    found = script("batch.slurm")
    run = found.run
    assert run.parallel.world_size == 64
    assert (run.parallel.tensor, run.parallel.pipeline, run.parallel.data) == (4, 8, 2)
    assert (run.batch.ramp, run.batch.global_batch_size) == ((16, 16, 5_000_000), 1024)
    assert (run.stop.minutes, run.model.init_std) == (1190, 0.0048)
    assert found.row("--pp-partition-method").key == "parallel.stages"
    assert "--loss-scale has no effect" in " ".join(found.found.notes)
    assert found.fates()["refused"] == []


def test_arrays(script):
    """Megatron core's own examples: lists of arguments, a group that depends on the environment."""
    found = script("arrays.sh", "ckpt", "tb", "tokenizer.model", "data/pile_text_document")
    run = found.run
    assert (run.parallel.tensor, run.parallel.pipeline, run.parallel.virtual, run.parallel.data) == (4, 2, 4, 2)
    assert (run.model.position, run.model.norm, run.model.activation, run.model.num_query_groups) == (
        "rotary",
        "rmsnorm",
        "swiglu",
        8,
    )
    assert (run.model.rotary_base, run.model.tied_embeddings, run.model.bias) == (1e6, False, False)
    assert (run.parallel.zero, run.parallel.sequence, run.precision.gradients) == (1, True, "fp32")
    assert run.data.train == ("data/pile_text_document",)
    more = script("arrays.sh", "c", "t", "m", "d", WANDB_API_KEY="x", NUM_NODES="4")
    assert more.run.parallel.data == 4 and more.row("--wandb-project").value == "GPT"


def test_commands_whose_output_matters_nowhere(script):
    """Microsoft's shape: the world from `ssh` and `nvidia-smi`, the JSON from `sed`, tokens for samples."""
    found = script("options.sh", world=64)
    run = found.run
    assert (run.parallel.tensor, run.parallel.data, run.parallel.zero) == (2, 32, 0)
    assert run.learning_rate.warmup_samples == -(-3_000_000_000 // 2048)
    assert run.learning_rate.decay_samples == 260_000_000_000 // 2048
    assert (run.length.samples, run.recompute.mode) == (292_968_750, "full")
    assert run.precision.loss_scale.initial_power == 16  # DeepSpeed's own, its JSON is not at hand
    assert found.found.world is None and "give --world" in " ".join(found.found.notes)


def test_command_put_together_in_a_string(script):
    run = script("args_megatron.sh", "1", "8", "0", "127.0.0.1", "2", "1", "true", "true", "2", "16").run
    assert (run.parallel.tensor, run.parallel.data, run.precision.compute) == (2, 4, "fp16")
    assert (run.recompute.mode, run.recompute.shard, run.batch.accumulation) == ("full", True, 2)
    off = script("args_megatron.sh", "1", "8", "0", "127.0.0.1", "1", "1", "false", "false", "2", "16").run
    assert (off.precision.compute, off.recompute.mode) == ("fp32", "none")


def test_libai(script):
    """A Python configuration, never executed, with overrides behind it."""
    found = script(
        "args_libai.sh", "configs/gpt2_nl24.py", "1", "8", "0", "127.0.0.1", "1", "1", "true", "false", "2", "16"
    )
    run = found.run
    assert (run.model.num_layers, run.model.hidden_size, run.model.ffn_hidden_size) == (24, 1024, 4096)
    assert (run.parallel.data, run.parallel.zero, run.recompute.mode) == (8, 2, "none")
    assert (run.model.attention_dropout, run.model.hidden_dropout) == (0.1, 0.0)
    assert (run.batch.micro_batch_size, run.batch.global_batch_size, run.length.steps) == (2, 16, 220)
    assert (run.learning_rate.peak, run.learning_rate.minimum) == (1.5e-4, pytest.approx(1.5e-6))
    assert run.precision.loss_scale.initial_power == 19  # 65536 x 8 data ranks
    assert found.fates()["refused"] == ["model.cfg.embedding_dropout_prob"]
    assert found.found.origins["model.hidden_size"] == "gpt2_nl24.py:22 model.cfg.hidden_size"
    assert "hidden_layers since December 2022" in " ".join(found.found.notes)


def test_libai_splits_stages_as_it_does(script):
    run = script(
        "args_libai.sh",
        "configs/gpt2_nl24.py",
        "1",
        "8",
        "0",
        "127.0.0.1",
        "1",
        "4",
        "true",
        "true",
        "4",
        "32",
        overrides=["parallel.zero=1"],
    ).run
    assert run.parallel.stages == (6, 7, 7, 4) and run.recompute.mode == "full"


@pytest.mark.parametrize(
    "name", ["positional.sh", "heredoc.sh", "batch.slurm", "arrays.sh", "options.sh", "args_megatron.sh"]
)
def test_every_flag_has_one_fate(name):
    """Every word with dashes that the script hands to its program is a row, with its line."""
    found = into.read(SCRIPTS / name)
    followed = shell.follow((SCRIPTS / name).read_text(), name, (), {"SLURM_NNODES": "16"})
    (started,) = launch.find(followed, name)
    handed = [word.text.partition("=")[0] for word in started.arguments if word.text.startswith("--")]
    rows = [row.flag for row in found.rows]
    assert len(handed) > 20 and all(rows.count(flag) == handed.count(flag) for flag in handed)
    assert all(row.place.startswith(f"{name}:") for row in found.rows)
    assert all(row.key if row.fate == "translated" else row.why for row in found.rows)


def test_contradictions_of_two_sources(text):
    body = (
        (SCRIPTS / "heredoc.sh")
        .read_text()
        .replace('"stage": $STAGE', '"stage": 2')
        .replace('"gradient_clipping": 1.0', '"gradient_clipping": 0.5')
    )
    found = text(body)
    assert [p.code for p in found.problems] == ["F017", "F017"]
    told = "\n".join(p.render() for p in found.problems)
    assert "run.sh:36" in told and "run.sh:73" in told  # both places of the clipping
    assert "1.0 and 0.5" in told and "1.0 and 2" in told
    assert not found.values


def test_json_that_is_none(text):
    with_underscores = (
        (SCRIPTS / "heredoc.sh").read_text().replace('"steps_per_print": 2000', '"steps_per_print": 2_000')
    )
    found = text(with_underscores)
    assert [p.code for p in found.problems] == ["F018"] and "underscores" in found.problems[0].hint
    assert found.problems[0].place == "run.sh:85"


def test_json_in_a_folder_that_only_a_run_could_tell(text, tmp_path):
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}, "gradient_clipping": 2.0}')
    flags = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --lr 1e-3 --train-iters 9"
    found = text(f"here=$(dirname $(realpath $0))\ndeepspeed --num_gpus 2 pretrain_gpt.py {flags} --clip-grad 2.0 "
                 "--deepspeed --deepspeed_config $here/ds.json\n")  # fmt: skip
    assert found.values["parallel"]["zero"] == 3 and not found.problems
    assert next(row.place for row in found.rows if row.flag == "gradient_clipping").endswith("ds.json:1")


def test_traps_are_those_of_the_framework(script):
    """The forks follow the ramp and --checkpoint-activations to this day; Megatron-LM does not."""
    fork = " ".join(script("heredoc.sh").found.notes)
    assert "--zero-stage only decides" in fork and "Megatron-LM" not in fork
    assert "Megatron-LM since 2022 stops" in " ".join(script("positional.sh").found.notes)


def test_two_trainings(text):
    body = "".join(f"python pretrain_gpt.py --num-layers {n} --hidden-size 64\n" for n in (2, 4))
    with pytest.raises(UserError, match=r"F016.*2 different trainings, in the lines 1, 2"):
        text(body)


def test_no_training(text):
    with pytest.raises(UserError, match="F015"):
        text("#!/bin/bash\necho python pretrain_gpt.py\n")


@pytest.mark.parametrize("leave", ["echo usage; exit 1", "cat <<EOT\nusage\nEOT\nexit 2"])
def test_a_script_that_misses_an_argument(text, leave):
    body = f"if [ $# -lt 2 ]; then\n{leave}\nfi\npython pretrain_gpt.py --num-layers $1 --hidden-size $2\n"
    with pytest.raises(UserError, match=r"F013.*1 arguments were given"):
        text(body, "3")
    with pytest.raises(UserError, match=r"F015.*line 1 starts ./other.sh"):
        text("./other.sh; exit 0\n")


def test_every_flag_that_is_written_down_is_in_a_table():
    names = json.loads((Path(__file__).parents[1] / "golden" / "flag_names.json").read_text())
    assert len(names["megatron"]) > 300 and len(names["megatron_deepspeed"]) > 60
    assert [name for name in names["megatron"] if megatron_flags.find(name) is None] == []
    assert [name for name in names["megatron_deepspeed"] if fork_flags.find(name) is None] == []


def test_placeholders_and_a_world_that_does_not_fit(text):
    found = text(
        "#!/bin/bash\n#SBATCH <OPTIONS> --nodes=16 --ntasks-per-node=8\nDATA='<PATH TO DATA>'\n"
        'options=" --num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 '
        "--data-path 0.5 <THE FIRST SET> 0.5 <THE SECOND SET> --save <WHERE IT GOES> --lr 1e-4 --train-iters 10 "
        '--micro-batch-size 1"\n'
        'srun -l --output=x.log sh -c "python -u pretrain_gpt.py $@ ${options}"\n'
    )
    assert found.world == 128 and found.refused == () and not found.problems
    assert found.values["data"]["train"] == [[0.5, "<THE FIRST SET>"], [0.5, "<THE SECOND SET>"]]
    wide = text("torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 8 --hidden-size 64 --num-attention-heads 4 "
                "--seq-length 32 --tensor-model-parallel-size 16\n")  # fmt: skip
    assert wide.world is None and "give --world, a multiple of 16" in " ".join(wide.notes)
    hole = text("python pretrain_gpt.py --num-layers <N LAYERS> --hidden-size 64\n")
    assert [p.code for p in hole.problems] == ["F014"]


def test_forms_of_an_argument_list(text):
    flags = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --bf16"
    pairs = {"--num-layers": 2, "--hidden-size": 64, "--num-attention-heads": 4, "--seq-length": 32, "--bf16": True}
    forms = [
        text(flags, name="a.txt"),
        text(f"python pretrain_gpt.py {flags}\n", name="b.txt"),
        text(json.dumps(flags.split()), name="c.json"),
        text(json.dumps(pairs), name="d.json"),
    ]  # fmt: skip
    assert all(dict(form.values["model"]) == dict(forms[0].values["model"]) for form in forms)
    assert all([row.flag for row in form.rows] == [row.flag for row in forms[0].rows] for form in forms)


def test_a_flag_given_twice(text):
    found = text("python pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
                 "--lr 1e-3 --lr 1e-4 stray --fp16 false\n")  # fmt: skip
    first, last = [row for row in found.rows if row.flag == "--lr"]
    assert (first.fate, last.fate, found.values["learning_rate"]["peak"]) == ("irrelevant", "translated", 1e-4)
    assert [row.flag for row in found.refused] == ["stray"] and found.values["precision"]["compute"] == "fp32"


def test_other_models_are_refused_by_name(text):
    flags = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32"
    found = text(f"python pretrain_bert.py {flags} --mask-prob 0.15\n")
    assert [p.code for p in found.problems] == ["F005"] and "not bert" in found.problems[0].hint and not found.values
    assert len(found.rows) == 5
    libai = text("from .common.models.bert import pretrain_model as model\nmodel.cfg.hidden_layers = 3\n", name="x.py")
    assert [p.code for p in libai.problems] == ["F005"]
    rate = text("train.scheduler = LazyCall(WarmupExponentialLR)(warmup_factor=0.1)\n"
                "optim = LazyCall(flow.optim.AdamW)(lr=3e-4)\n", name="y.py")  # fmt: skip
    assert [row.flag for row in rate.refused] == ["train.scheduler._target_"]
    assert rate.values["learning_rate"]["peak"] == 3e-4


def test_other_python_is_no_configuration(tmp_path):
    path = tmp_path / "other.py"
    path.write_text("import os\nrate = 3\nprint(rate)\n")
    with pytest.raises(UserError, match="F018"):
        into.read(path)


def test_a_pipeline_without_end_breaks_the_rule_of_stages(tmp_path):
    path = tmp_path / "arguments.txt"
    path.write_text("--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 "
                    "--vocab-size 100 --pipeline-model-parallel-size 99999999999999")  # fmt: skip
    with pytest.raises(UserError, match="S109"):
        resolve(dict(into.read(path).values))
