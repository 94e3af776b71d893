"""Megatron's arguments in all their forms, and the table of flags behind them."""

import json

import pytest

from steelyard.frameworks.megatron import flags, script
from steelyard.spec import UserError, resolve
from steelyard.spec.load import SECTIONS

BASE = {
    "--num-layers": 4, "--hidden-size": 64, "--num-attention-heads": 4, "--seq-length": 32,
    "--max-position-embeddings": 32, "--micro-batch-size": 2, "--global-batch-size": 16, "--lr": "1e-4",
    "--train-iters": 10, "--bf16": True,
}  # fmt: skip


def run_of(more=None, world=8):
    return resolve(script.values(script.arguments({**BASE, **(more or {})})), world=world).run


def as_words(given):
    return [word for name, value in given.items() for word in ([name] if value is True else [name, str(value)])]


def test_every_form_is_the_same_run(tmp_path):
    words = as_words(BASE)
    path = tmp_path / "arguments.txt"
    path.write_text("python pretrain_gpt.py " + " ".join(words) + "\n")
    forms = [
        script.arguments(BASE),
        script.arguments(words),
        script.arguments([f"{name}={value}" if value is not True else name for name, value in BASE.items()]),
        script.parse(json.dumps(BASE)),
        script.parse(json.dumps(words)),
        script.read(path),
    ]
    assert all(script.values(form) == script.values(forms[0]) for form in forms)
    assert [script.is_list(text) for text in (json.dumps(BASE), json.dumps(words), " ".join(words), "[model]\n")] == [
        True, True, True, False,
    ]  # fmt: skip


def test_names_of_other_years():
    old = {"--model-parallel-size": 2, "--distribute-checkpointed-activations": True, "--layernorm-epsilon": 1e-6}
    run = run_of({**old, "--checkpoint-activations": True, "--checkpoint-num-layers": 2})
    assert (run.parallel.tensor, run.model.norm_eps) == (2, 1e-6)
    assert (run.recompute.mode, run.recompute.every, run.recompute.shard) == ("full", 2, True)
    assert run.engine.version == "2021" and run.engine.attention == "unfused"
    newer = run_of({"--use-rotary-position-embeddings": True, "--no-position-embedding": True})
    assert newer.engine.version == "" and newer.model.position == "rotary"


def test_deepspeed_takes_its_own_engine():
    run = run_of({"--deepspeed": True, "--zero-stage": 1, "--deepspeed_config": "ds.json"})
    assert (run.engine.framework, run.parallel.zero) == ("megatron_deepspeed", 1)


def test_what_megatron_fills_in():
    run = run_of({"--swiglu": True, "--hidden-size": 512})
    assert run.model.ffn_hidden_size == 1344  # floor(8 x 512 / 3 / 64) x 64
    assert (run.model.attention_dropout, run.model.hidden_dropout) == (0.1, 0.1)
    assert run.padded_vocab_size == 50304 and run.precision.gradients == "fp32"
    assert run_of({"--tensor-model-parallel-size": 1, "--sequence-parallel": True}).parallel.sequence is False
    alone = {name: value for name, value in BASE.items() if name != "--global-batch-size"}
    assert resolve(script.values(script.arguments(alone)), world=8).run.batch.global_batch_size == 16
    half = {name: value for name, value in BASE.items() if name != "--bf16"}
    assert resolve(script.values(script.arguments({**half, "--fp16": True})), world=8).run.precision.gradients == "fp16"


def test_stages():
    def stages(more):
        return run_of({"--num-layers": 12, "--pipeline-model-parallel-size": 4, **more}).parallel

    assert stages({}).stages == (3, 3, 3, 3)
    uneven = {"--decoder-first-pipeline-num-layers": 2, "--decoder-last-pipeline-num-layers": 2}
    assert stages(uneven).stages == (2, 4, 4, 2)
    chunks = stages({"--num-layers-per-virtual-pipeline-stage": 1, "--global-batch-size": 16})
    assert (chunks.virtual, chunks.stages, chunks.pipeline_schedule) == (3, (1,) * 12, "interleaved")
    counted = {"--num-layers": 14, "--account-for-embedding-in-pipeline-split": True,
               "--account-for-loss-in-pipeline-split": True}  # fmt: skip
    assert stages(counted).stages == (3, 4, 4, 3)


@pytest.mark.parametrize(("more", "code"), [
    ({"--num-experts": 8}, "F005"),
    ({"--mtp-num-layers": 1}, "F005"),
    ({"--cpu-offloading-num-layers": 1}, "F005"),
    ({"--hidden-size": "wide"}, "F004"),
    ({"--optimizer": "sgd"}, "F005"),
    ({"--position-embedding-type": "relative"}, "F005"),
])  # fmt: skip
def test_refusals(more, code):
    with pytest.raises(UserError, match=code):
        run_of(more)


def test_what_asks_for_nothing_is_legal():
    assert run_of({"--num-experts": 1, "--mtp-num-layers": 0, "--cpu-offloading-num-layers": 0})


def test_a_vocabulary_in_a_file_must_be_said():
    given = script.arguments({**BASE, "--tokenizer-type": "SentencePieceTokenizer"})
    assert "vocab_size" not in script.values(given)["model"]


def test_a_missing_shape_is_named():
    with pytest.raises(UserError, match=r"F007.*--num-layers"):
        script.values(script.arguments({name: v for name, v in BASE.items() if name != "--num-layers"}))


def test_unknown_flags_are_reported():
    assert script.arguments({**BASE, "--no-such-flag": 3}).unknown == ("--no-such-flag",)


def test_the_table():
    """Every name once; every translated flag names a key of the run file."""
    irrelevant = [name for names in flags.IRRELEVANT.values() for name in names.split()]
    rows = [*flags.TRANSLATED, *irrelevant, *flags.REFUSED, *flags.UNTRAINED]
    names = [flags.plain(row.name if isinstance(row, flags.Flag) else row) for row in rows]
    assert len(names) == len(set(names))
    for row in flags.TRANSLATED:
        section, _, key = row.key.partition(".")
        assert section == "seed" or key in SECTIONS[section].model_fields, row
    assert all(row.why for row in flags.table().values() if row.meaning != "translated")
