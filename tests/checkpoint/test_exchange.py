"""Weights out to Hugging Face and back, and in from Megatron-LM's legacy folders (field reports A05, D06)."""

import argparse
import json
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from steelyard.checkpoint import shards, store
from steelyard.checkpoint.convert import exchange, huggingface, legacy, weights
from steelyard.checkpoint.weights import load_model
from steelyard.record.read import read_folder
from steelyard.spec import UserError, load, resolve
from tests.train.running import on_rank, train

GPT2 = ("length.steps=3", "model.num_layers=2")
LLAMA = (
    *GPT2, "model.kind=llama", "model.vocab_size=257", "model.num_query_groups=2", "model.rotary_base=5000.0",
)  # fmt: skip
KINDS = [
    ("gpt2 tied", 1, GPT2), ("gpt2 tied", 2, GPT2), ("gpt2 untied", 1, (*GPT2, "model.tied_embeddings=false")),
    ("gpt2 untied", 2, (*GPT2, "model.tied_embeddings=false", "model.activation=gelu_tanh")),
    ("llama untied", 2, LLAMA), ("llama tied, biases", 1, (*LLAMA, "model.tied_embeddings=true", "model.bias=true")),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "tensor", "options"), KINDS, ids=[f"{kind}, tp{tensor}" for kind, tensor, _ in KINDS])
def test_a_run_leaves_for_hugging_face_and_comes_back(pools, t1, tmp_path, kind, tensor, options):
    """Saved at tensor 1 and 2: transformers computes the same logits to 1e-5, and the weights return bit-equal."""
    run = tmp_path / "run"
    train(pools(tensor), t1, *options, f"parallel.tensor={tensor}", "evaluation.steps=0", folder=run)
    difference, equal = pools(1).run(_there_and_back, run, tmp_path)[0]
    assert difference <= 1e-5
    assert equal


def _there_and_back(run, folder):
    """On a rank: (difference of logits, whether all real weights came back bit-equal)."""
    from transformers import AutoModelForCausalLM

    exchange.export(run, folder / "hf", "fp32")
    ours, saved = load_model(run, torch.device("cpu"))
    tokens = torch.randint(0, 257, (2, 64), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)
        difference = (theirs(tokens).logits - ours(tokens)[..., :257]).abs().max().item()
    back = weights.write_start(exchange.read(folder / "hf", saved.run), saved.run, folder / "hf", folder / "back")
    exchange.check_import(back, folder / "hf")
    before = dict(shards.read_whole(store.found(run), "weights."))
    after = dict(shards.read_whole(back))
    real = {name: slice(257 if name.partition(".")[2] in shards.TABLES else None) for name in before}
    return difference, before.keys() == after.keys() and all(
        torch.equal(before[name][rows], after[name][rows]) for name, rows in real.items()
    )


def test_the_folder_holds_what_generation_needs(pools, t1, tmp_path):
    train(pools(1), t1, "length.steps=1", "evaluation.steps=0")
    said, text = pools(1).run(_export_and_generate, tmp_path)[0]
    assert "differ by at most" in said[-1]
    assert text.startswith("the run") and len(text) > len("the run")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["vocab_size"] == 257


def _export_and_generate(folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    said = exchange.export(folder / "run", folder / "hf", "bf16")
    codec = AutoTokenizer.from_pretrained(folder / "hf")
    model = AutoModelForCausalLM.from_pretrained(folder / "hf")
    assert codec.encode("the run é") == list("the run é".encode()) and codec.eos_token_id == 256
    given = codec("the run", return_tensors="pt")
    return said, codec.decode(model.generate(**given, max_new_tokens=8, do_sample=False)[0])


@pytest.mark.parametrize(
    ("values", "key"),
    [({"embedding_norm": True}, "embedding_norm"), ({"position": "alibi"}, "position"), ({"bias": False}, "bias"),
     ({"kind": "llama", "qk_norm": True}, "qk_norm"), ({"kind": "llama", "rotary_fraction": 0.5}, "rotary_fraction"),
     ({"kind": "llama", "activation": "gelu"}, "activation"), ({"num_query_groups": 6}, "num_query_groups")],
)  # fmt: skip
def test_what_the_other_side_cannot_say_is_refused_by_name(values, key):
    with pytest.raises(UserError) as caught:
        huggingface.kind_of(resolve({"model": values}).run.model)
    assert next((p.code, p.key) for p in caught.value.problems) == ("C008", f"model.{key}")


def theirs_of(whole, model):
    return {theirs: t.clone() for name, value in whole.items()
            for theirs, t in huggingface.to_theirs(name, value, model)}  # fmt: skip


def test_what_files_of_others_hold_beside_is_understood():
    """Base models without the prefix, mask buffers, a tied head that is stored as well."""
    run = resolve({"model": {**SMALL["gpt2"], "vocab_multiple": 1}}).run
    whole = whole_model(run)
    theirs = {name.removeprefix("transformer."): t for name, t in theirs_of(whole, run.model).items()}
    theirs |= {"h.0.attn.bias": torch.ones(8, 8), "lm_head.weight": whole["embedding.word.weight"]}
    found = huggingface.to_ours(theirs, run.model)
    assert found.keys() == whole.keys() and all(torch.equal(found[name], whole[name]) for name in whole)
    with pytest.raises(UserError, match="C009"):
        huggingface.to_ours({**theirs, "lm_head.weight": theirs["wte.weight"] + 1}, run.model)
    with pytest.raises(UserError, match=r"C005.*h.0.attn.adapter.weight"):
        huggingface.to_ours({**theirs, "h.0.attn.adapter.weight": theirs["wte.weight"]}, run.model)


def test_a_folder_of_several_files_needs_all_of_them(tmp_path):
    run = resolve({"model": SMALL["llama"]}).run
    whole = whole_model(run)
    theirs = theirs_of(whole, run.model)
    names = sorted(theirs)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, held in files.items():
        save_file({name: theirs[name] for name in held}, tmp_path / file)
    index = {"weight_map": {name: file for file, held in files.items() for name in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = exchange.read(tmp_path, run)
    assert all(torch.equal(found[name][:29], whole[name][:29]) for name in whole)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match=r"C011.*is in no file"):
        exchange.read(tmp_path, run)
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"no tensors")
    with pytest.raises(UserError, match=r"C011.*model-00001"):
        exchange.read(tmp_path, run)


def test_a_wrong_conversion_is_refused(pools, t1, tmp_path, monkeypatch):
    train(pools(1), t1, "length.steps=1", "evaluation.steps=0")
    with pytest.raises(AssertionError, match="C010"):
        pools(1).run(_export_wrongly, tmp_path)
    assert pools(1).run(_import_wrongly, tmp_path) == [["C010"]]
    assert store.find(tmp_path / "back") == (None, []), "nothing may begin from what was written"


def _export_wrongly(folder):
    true = huggingface.split_groups
    huggingface.split_groups = lambda rows, model: rows.chunk(3)  # the grouping forgotten
    try:
        exchange.export(folder / "run", folder / "hf", "fp32")
    finally:
        huggingface.split_groups = true


def _import_wrongly(folder):
    exchange.export(folder / "run", folder / "hf", "fp32")
    run = load(folder / "run" / "run.toml").run
    doubled = {name: tensor * 2 for name, tensor in exchange.read(folder / "hf", run).items()}
    path = weights.write_start(doubled, run, folder / "hf", folder / "back")
    try:
        return exchange.check_import(path, folder / "hf")
    except UserError as failure:
        return [problem.code for problem in failure.problems]


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rescaled_rotary_frequencies_are_refused(tmp_path, key):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", key: {"rope_type": "llama3"}}))
    with pytest.raises(UserError, match=r"F002.*llama3"):
        exchange.read(tmp_path, resolve({"model": {"kind": "llama"}}).run)


def test_d06_ranks_that_hold_unequal_copies_are_noticed_and_not_exported(pools, t1, tmp_path):
    pools(2).run(_perturbed, t1)
    (event,) = [e for e in read_folder(tmp_path / "run").events if e.what == "copies_differ"]
    assert event.detail["tensors"] == ["weights.layers.1.mlp_norm.bias: rank 0 and rank 1"]
    with pytest.raises(AssertionError, match=r"C009.*layers.1.mlp_norm.bias differs between rank 0 and rank 1"):
        pools(1).run(exchange.export, tmp_path / "run", tmp_path / "hf", "fp32")


def _perturbed(path):
    def perturb(loop):
        if dist.get_rank() == 1:
            loop.engine.named["layers.1.mlp_norm.bias"].detach()[3] += 1e-6

    options = ("evaluation.steps=0", "length.steps=1", "parallel.tensor=2", "learning_rate.warmup_steps=0",
               "learning_rate.peak=0.0", "learning_rate.minimum=0.0")  # fmt: skip
    on_rank(path, options, resumed=perturb)


# --- Megatron-LM's legacy folders -------------------------------------------------------------------------------------

SMALL = {
    "gpt2": {"num_layers": 4, "hidden_size": 16, "num_attention_heads": 4, "vocab_size": 29, "vocab_multiple": 8,
             "seq_length": 8},
    "llama": {"kind": "llama", "num_layers": 4, "hidden_size": 16, "num_attention_heads": 4, "num_query_groups": 2,
              "vocab_size": 29, "vocab_multiple": 8, "seq_length": 8},
}  # fmt: skip
LEGACY = {
    "attention_norm": "input_layernorm", "attention.qkv": "self_attention.query_key_value",
    "attention.out": "self_attention.dense", "mlp_norm": "post_attention_layernorm", "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}  # fmt: skip


def whole_model(run):
    from steelyard.predict import parameters

    shapes = {t.name: t.shape for t in parameters.tensors(run.model)}
    return {name: torch.randn(shape, generator=torch.Generator().manual_seed(n))
            for n, (name, shape) in enumerate(shapes.items())}  # fmt: skip


def write_legacy(folder, whole, run, tensor, pipeline, virtual=1, version=3.0):
    """The files Megatron-LM's own layout would leave: cut here by hand, independently of the reader."""
    per_chunk = run.model.num_layers // (pipeline * virtual)
    for rank in range(tensor):
        for stage in range(pipeline):
            content = {"args": argparse.Namespace(tensor_model_parallel_size=tensor), "checkpoint_version": version,
                       "iteration": 5, "rng_state": [{"np_rng_state": numpy.random.get_state()}]}  # fmt: skip
            for chunk in range(virtual):
                first = (chunk * pipeline + stage) * per_chunk
                held = _chunk(whole, run, rank, tensor, range(first, first + per_chunk))
                key = "model" if virtual == 1 else f"model{chunk}"
                model = content[key] = {"language_model": {"encoder": held}}
                if first == 0:
                    words = {"weight": whole["embedding.word.weight"].chunk(tensor)[rank].clone()}
                    model["language_model"]["embedding"] = {"word_embeddings": words}
                    if "embedding.position.weight" in whole:
                        positions = {"weight": whole["embedding.position.weight"].clone()}
                        model["language_model"]["embedding"]["position_embeddings"] = positions
                if first + per_chunk == run.model.num_layers:
                    for name in ("norm.weight", "norm.bias"):
                        if name in whole:
                            held[f"final_layer{name}"] = whole[name].clone()
                    if not run.model.tied_embeddings:
                        head = {"weight": whole["head.weight"].chunk(tensor)[rank].clone()}
                        model["language_model"]["output_layer"] = head
                    elif pipeline > 1:
                        copy = whole["embedding.word.weight"].chunk(tensor)[rank].clone()
                        model["word_embeddings_for_head"] = {"weight": copy}
            place = folder / "iter_0000005" / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pipeline > 1 else ""))
            place.mkdir(parents=True)
            torch.save(content, place / legacy.FILE)
    (folder / "latest_checkpointed_iteration.txt").write_text("5")


def _chunk(whole, run, rank, tensor, layers):
    held = {}
    for name, value in whole.items():
        if not name.startswith("layers.") or int(name.split(".")[1]) not in layers:
            continue
        _, number, rest = name.split(".", 2)
        part, _, kind = rest.rpartition(".")
        if part == "mlp.gate":
            continue
        if part == "mlp.up" and run.model.gated:
            gate = whole[name.replace(".up.", ".gate.")]
            value = torch.cat([gate.chunk(tensor)[rank], value.chunk(tensor)[rank]])
        elif part in ("attention.qkv", "mlp.up"):
            value = value.chunk(tensor)[rank]
        elif part in ("attention.out", "mlp.down") and kind == "weight":
            value = value.chunk(tensor, dim=1)[rank]
        held[f"layers.{int(number) - layers[0]}.{LEGACY[part]}.{kind}"] = value.clone()
    return held


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize(("tensor", "pipeline", "virtual"), [(1, 1, 1), (2, 1, 1), (2, 2, 1), (1, 2, 2)])
def test_legacy_folders_of_any_layout_are_one_model(tmp_path, kind, tensor, pipeline, virtual):
    run = resolve({"model": SMALL[kind]}).run
    whole = whole_model(run)
    write_legacy(tmp_path / "megatron", whole, run, tensor, pipeline, virtual)
    found = legacy.read(tmp_path / "megatron", run.model)
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], value) for name, value in whole.items())


@pytest.mark.parametrize("version", [0, 1.0, 2.0])
def test_older_orders_of_the_fused_projection_are_turned(tmp_path, version):
    run = resolve({"model": {**SMALL["gpt2"], "num_layers": 1}}).run
    whole = whole_model(run)
    heads, dim = 4, 4
    old = dict(whole)
    for name in ("layers.0.attention.qkv.weight", "layers.0.attention.qkv.bias"):
        rows = whole[name].unflatten(0, (heads, 3, dim))
        axes = {0: (1, 0, 2), 1.0: (0, 2, 1), 2.0: (0, 1, 2)}[version]
        old[name] = rows.permute(*axes, *range(3, rows.dim())).reshape(whole[name].shape)
    write_legacy(tmp_path / "megatron", old, run, 1, 1, version=version)
    found = legacy.read(tmp_path / "megatron", run.model)
    assert all(torch.equal(found[name], value) for name, value in whole.items())


def change(folder, rank, edit):
    path = folder / "iter_0000005" / rank / legacy.FILE
    content = torch.load(path, weights_only=False)  # written by this test
    edit(content)
    torch.save(content, path)


def test_d06_replicated_tensors_that_differ_are_refused_not_averaged(tmp_path):
    run = resolve({"model": SMALL["gpt2"]}).run
    write_legacy(tmp_path, whole_model(run), run, 2, 1)
    for name in ("layers.1.input_layernorm.weight", "layers.2.self_attention.dense.bias"):

        def perturb(content, name=name, by=1e-6):
            content["model"]["language_model"]["encoder"][name][0] += by

        change(tmp_path, "mp_rank_01", perturb)
        with pytest.raises(UserError, match=r"C009.*mp_rank_00.*mp_rank_01") as caught:
            legacy.read(tmp_path, run.model)
        assert name.split(".")[-1] in str(caught.value)
        change(tmp_path, "mp_rank_01", lambda content, name=name: content["model"]["language_model"]["encoder"].update(
            {name: torch.load(tmp_path / "iter_0000005" / "mp_rank_00" / legacy.FILE, weights_only=False)["model"][
                "language_model"]["encoder"][name]}))  # fmt: skip
    legacy.read(tmp_path, run.model)


class Evil:
    def __reduce__(self):
        return (Path("/nonexistent").write_text, ("x",))


@pytest.mark.parametrize("what", ["code", "truncated", "missing rank", "no model", "unknown tensor"])
def test_a_bad_legacy_folder_is_one_clear_error(tmp_path, what):
    run = resolve({"model": SMALL["gpt2"]}).run
    write_legacy(tmp_path, whole_model(run), run, 2, 1)
    file = tmp_path / "iter_0000005" / "mp_rank_01" / legacy.FILE
    if what == "code":
        change(tmp_path, "mp_rank_01", lambda content: content.update(extra=Evil()))
    elif what == "truncated":
        file.write_bytes(file.read_bytes()[:1000])
    elif what == "missing rank":
        file.parent.rename(tmp_path / "iter_0000005" / "mp_rank_02")
    elif what == "no model":
        torch.save({"iteration": 5}, file)
    else:

        def add(content):
            content["model"]["language_model"]["encoder"]["layers.0.mlp.experts.weight"] = torch.zeros(2)

        change(tmp_path, "mp_rank_00", add)
        change(tmp_path, "mp_rank_01", add)
    with pytest.raises(UserError, match="C005" if what == "unknown tensor" else "C011"):
        legacy.read(tmp_path, run.model)


@pytest.mark.parametrize("rows", [29, 64])
def test_a05_vocabulary_padding_follows_the_run(rows):
    """A table of another padding is trimmed or gets a new run's padding rows; real rows are what they were."""
    run = resolve({"model": SMALL["gpt2"]}).run
    table = torch.randn(rows, 16)
    found = exchange.with_padding("embedding.word.weight", table, run)
    assert found.shape == (32, 16) and torch.equal(found[:29], table[:29])
