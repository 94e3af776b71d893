"""Out and in again: what a framework can say comes back as it was, the rest is an error or stated."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.spec import UserError, load, resolve
from steelyard.spec.load import Loaded
from steelyard.translate import into, outof
from tests.predict.generated import runs
from tests.translate.conftest import SCRIPTS

SECTIONS = ("seed", "model", "parallel", "batch", "precision", "recompute", "optimizer", "learning_rate", "length")
SOURCES = [["a/b_text_document"], [[0.25, "a b"], [0.75, "it's $HOME"]]]
RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))


def numbers(low, high):
    return st.floats(low, high, allow_nan=False, allow_infinity=False)


@st.composite
def lengths(draw):
    """Length, warm-up and decay, all in steps or all in samples."""
    unit = draw(st.sampled_from(["steps", "samples"]))
    length = draw(st.integers(200, 10**6))
    rate = {
        "peak": draw(numbers(1e-4, 1e-2)),
        "minimum": draw(numbers(0, 1e-5)),
        "decay": draw(st.sampled_from(["constant", "linear", "cosine", "inverse_sqrt"])),
        "first_update": "zero",
        draw(st.sampled_from(["warmup_fraction", f"warmup_{unit}"])): None,
    }
    if "warmup_fraction" in rate:
        rate["warmup_fraction"] = draw(numbers(0.001, 0.5))
    else:
        rate[f"warmup_{unit}"] = draw(st.integers(1, 150))
    if draw(st.booleans()):
        rate[f"decay_{unit}"] = draw(st.integers(10_000, 10**7))
    return {unit: length}, rate


@st.composite
def sayable(draw, target):
    """A run of which the target has a word for everything."""
    tensor, pipeline, data = (
        draw(st.sampled_from([1, 2])),
        draw(st.sampled_from([1, 2, 4])),
        draw(st.sampled_from([1, 2, 4])),
    )
    heads, width = tensor * draw(st.integers(1, 3)), 2 * draw(st.integers(1, 8))
    length, rate = draw(lengths())
    core, fork, libai = (target == name for name in ("megatron", "megatron-deepspeed", "libai"))
    bias = draw(st.booleans()) if core else True
    layers = pipeline * draw(st.integers(1, 3))
    positions = {
        "megatron": ["learned", "rotary", "none"],
        "megatron-deepspeed": ["learned", "alibi"],
        "libai": ["learned"],
    }
    activations = {
        "megatron": ["gelu", "gelu_tanh", "swiglu", "relu2"],
        "megatron-deepspeed": ["gelu", "gelu_tanh", "swiglu", "geglu"],
        "libai": ["gelu"],
    }
    compute = draw(st.sampled_from(["fp16", "fp32"] if libai else ["fp16", "bf16", "fp32"]))
    gradients = compute if libai else draw(st.sampled_from(["fp32", compute])) if core or compute != "bf16" else "fp32"
    scale = {
        "initial_power": draw(st.integers(1, 32)), "window": draw(st.integers(1, 2000)),
        "hysteresis": draw(st.integers(1, 4)), "minimum": draw(st.sampled_from([1.0, 2.0])),
        "rule": "deepspeed" if fork else "megatron",
    }  # fmt: skip
    if libai:
        scale = {"initial_power": 16 + data.bit_length() - 1, "window": 2000, "hysteresis": 1, "rule": "megatron"}
        length = {"steps": next(iter(length.values()))}
        rate = {"peak": rate["peak"], "decay": "cosine", "first_update": "zero", "warmup_fraction": 0.25}
    full = draw(st.booleans())
    every = draw(st.integers(1, 3)) if full and not libai else 1
    dropout = draw(numbers(0, 0.5))
    micro, accumulation = draw(st.integers(1, 4)), pipeline * draw(st.integers(1, 3))
    return resolve({
        "seed": draw(st.integers(0, 2**31)),
        "model": {
            "num_layers": layers, "num_attention_heads": heads, "hidden_size": heads * width, "head_dim": width,
            "num_query_groups": draw(st.sampled_from([tensor, heads])) if core else heads,
            "ffn_hidden_size": tensor * draw(st.integers(1, 64)), "seq_length": 16, "max_position_embeddings": 16,
            "vocab_size": draw(st.sampled_from([50257, 1000])),
            "vocab_multiple": "megatron" if libai else draw(st.sampled_from(["megatron", 64 * tensor])),
            "padding_in_softmax": True, "position": draw(st.sampled_from(positions[target])),
            "norm": draw(st.sampled_from(["layernorm", "rmsnorm"])) if core else "layernorm",
            "norm_eps": draw(numbers(1e-6, 1e-4)),
            "activation": draw(st.sampled_from(activations[target])), "bias": bias,
            "qkv_bias": bias or draw(st.booleans()), "tied_embeddings": draw(st.booleans()) if core else True,
            "embedding_norm": draw(st.booleans()) if fork else False, "qk_norm": draw(st.booleans()) if core else False,
            "attention_dropout": dropout, "hidden_dropout": dropout, "init_std": draw(numbers(0.001, 0.1)),
        },
        "parallel": {
            "tensor": tensor, "pipeline": pipeline, "data": data, "zero": draw(st.sampled_from([0, 1])),
            "sequence": draw(st.booleans()) and tensor > 1 and core,
            **({"stages": [layers // pipeline] * pipeline} if pipeline > 1 else {}),
        },
        "batch": {"micro_batch_size": micro, "accumulation": accumulation, "loss_mean": "micro_batches"},
        "precision": {"compute": compute, "gradients": gradients}
        | ({"loss_scale": scale} if compute == "fp16" else {}),
        "recompute": {"mode": "full" if full else "none", "every": every, "shard": full and not libai},
        "optimizer": {"betas": [draw(numbers(0.5, 0.99)), 0.95], "eps": draw(numbers(1e-9, 1e-6)),
                      "weight_decay": draw(numbers(0, 0.5)), "clip_grad": draw(numbers(0.1, 2))},
        "learning_rate": rate, "length": length,
        "data": {"train": ["a/b_text_document"] if libai else draw(st.sampled_from(SOURCES)),
                 "tokenizer": "ids:50256"},
        "evaluation": {"every_steps": draw(st.integers(1, 1000)), "steps": draw(st.integers(1, 20))},
        "stop": {"step_multiple": 0 if libai else draw(st.integers(0, 500))},
    }, source="generated").run  # fmt: skip


@pytest.mark.parametrize("target", ["megatron", "megatron-deepspeed", "libai"])
def test_what_both_can_say_comes_back(target):
    @settings(max_examples=30, deadline=None, derandomize=True)
    @given(sayable(target))
    def property_(run):
        written = outof.write(Loaded(run, {}, ""), target)
        assert written.differences == ()
        back = into.of_text(written.text, Path("back.py" if target == "libai" else "back.sh"))
        world = run.parallel.world_size
        values = {name: value for name, value in back.values.items() if name != "engine"}
        assert not back.problems and not back.refused and back.world in (world, None)
        again = resolve(values, world=world).run
        assert [getattr(again, name) for name in SECTIONS] == [getattr(run, name) for name in SECTIONS]
        assert again.data.train == run.data.train and again.evaluation == run.evaluation
        assert again.stop == run.stop

    property_()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(runs(), st.sampled_from(["megatron", "megatron-deepspeed", "libai"]))
def test_any_run_is_refused_or_its_differences_are_stated(run, target):
    """The shape of the network is never a difference: a framework that does not have it refuses."""
    try:
        written = outof.write(Loaded(run, {}, ""), target)
    except UserError as refused:
        assert all(p.code == "F020" and p.key for p in refused.problems)
        return
    allowed = ("model.padding_in_softmax", "model.activation")
    for difference in written.differences:
        assert not difference.key.startswith("model.") or difference.key in allowed, str(difference)
        assert f"{difference.key}: " in written.text


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
@pytest.mark.parametrize("target", ["torchrun", "slurm"])
def test_our_own_scripts_hold_the_whole_run(path, target):
    from steelyard.translate import shell
    from steelyard.translate.text import shown

    loaded = load(path)
    text = outof.write(loaded, target).text
    followed = shell.follow(text, "run.sh")
    (written,) = followed.state.files.values()
    import tomllib

    again = resolve(tomllib.loads(shown(written.value))).run
    assert again == loaded.run
    ends = [word.text for word in followed.commands[-1].words[-4:]]
    assert ends == ["-m", "steelyard.cli.main", "train", f"{loaded.run.name}.toml"]


@pytest.mark.parametrize("name", ["positional.sh", "heredoc.sh"])
@pytest.mark.parametrize("target", ["megatron", "megatron-deepspeed"])
def test_seeds_shapes_in_and_out_and_in(name, target):
    found = into.read(SCRIPTS / name)
    run = resolve(dict(found.values), world=found.world).run
    written = outof.write(Loaded(run, {}, ""), target)
    same = (name == "heredoc.sh") == (target == "megatron-deepspeed")
    keys = [difference.key for difference in written.differences]
    assert keys == ([] if same else keys) and set(keys) <= {"precision.loss_scale.rule", "parallel.zero"}
    assert written.text.startswith("#!/bin/bash\n")
