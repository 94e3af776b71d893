"""Our own run folders, run files, and what must never be ranked: field reports A03, B05, B06, C01, C05, H03."""

import json

import pytest

from steelyard.predict import engine, flops
from steelyard.record.schema import Step
from steelyard.record.writer import RunFolder
from steelyard.spec import load, resolve, write
from tests.compare.conftest import compared, typed
from tests.frameworks.test_logs import MEGATRON as ERAS

T1 = {
    "model": {
        "num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64, "vocab_size": 257,
        "vocab_multiple": 128,
    },
    "batch": {"global_batch_size": 8, "micro_batch_size": 8},
}  # fmt: skip


@pytest.fixture
def finished(tmp_path):
    """Writes a run folder as `train` does: (overrides, memory, per-step changes) -> its path."""

    def run(name, overrides=(), memory=None, seconds=0.5, **changes):
        spec = resolve(T1, overrides=[f"name={name}", *overrides]).run
        folder = RunFolder(tmp_path / name)
        folder.write_text("run.toml", write.dumps(spec))
        folder.write_json("environment.json", {"schema": 1, "devices": 1})
        per_step = flops.model_flops(spec.model, spec.padded_vocab_size) * 8
        for n in range(1, 21):
            slow = 30.0 if n == 1 else seconds
            fields = dict(
                step=n, samples=8 * n, tokens=512 * n, loss=6 - n / 10, grad_norm=1.0, learning_rate=1e-3,
                loss_scale=None, skipped=0, nan=0, seconds=slow, tokens_per_second=512 / slow,
                memory=memory or {"rss_peak": 10**8},
                batch_size=8, model_flops_per_second=per_step / slow,
            )  # fmt: skip
            folder.append(Step(**(fields | {key: change(n) for key, change in changes.items()})))
        folder.close()
        return folder.path

    return run


def test_equal_runs_are_comparable(finished, verb):
    a, b = finished("a"), finished("b")
    found = compared(a, b)
    assert found["verdict"]["memory"] == found["verdict"]["loss"] == "comparable"
    assert found["loss"]["first_divergence"] is None and found["loss"]["points"] == 20
    code, shown = verb(a, b)
    assert code == 0 and "no known setting differs" in shown


def test_recompute_on_and_off(finished):
    """Field report C01: the difference first, and no plain verdict."""
    found = compared(finished("a", ["recompute.mode=full"]), finished("b"))
    assert found["differences"][0]["knob"] == "recompute.mode"
    assert found["differences"][0]["effect"]["memory_bytes"] > 0
    assert found["verdict"] == {"memory": "not_comparable", "speed": "after_adjustment", "loss": "comparable"}


def test_kinds_of_memory_never_mix(finished):
    """Field report C05."""
    found = compared(finished("a"), finished("b", memory={"allocated_peak": 10**8}))
    assert found["verdict"]["memory"] == "not_comparable"
    assert "different kinds" in found["reasons"]["memory"]
    assert found["memory"]["gap_bytes"] is None


def test_a_run_with_nan_is_not_ranked(finished, verb):
    """Field report H03."""
    a = finished("a")
    b = finished("b", loss=lambda n: float("nan") if n > 10 else 5.0, nan=lambda n: int(n > 10))
    found = compared(a, b)
    assert found["verdict"]["loss"] == "not_comparable"
    assert "B from step 11" in found["reasons"]["loss"]
    assert found["loss"]["not_finite"] == {"a": 0, "b": 10}
    assert verb(a, b)[0] == 1


def test_tied_and_untied_are_different_models(finished):
    """Field report A03."""
    found = compared(finished("a"), finished("b", ["model.tied_embeddings=false"]))
    assert found["verdict"]["speed"] == found["verdict"]["loss"] == "not_comparable"
    assert any("different models" in i["text"] for i in found["inferred"])
    assert any(d["knob"] == "model.tied_embeddings" for d in found["differences"])


def test_one_convention_for_flops(finished):
    """Field report B05: from tokens a second alone, the rate of the record within 2 %."""
    path = finished("a")
    rates = compared(path, path)["speed"]["a"]
    written = [json.loads(line)["model_flops_per_second"] for line in (path / "metrics.jsonl").read_text().splitlines()]
    steady = sorted(written[3:])[len(written[3:]) // 2]
    assert rates["model_flops_per_second_per_device"] == pytest.approx(steady, rel=0.02)


def test_the_first_steps_are_not_the_speed(finished):
    """Field report B06."""
    assert compared(finished("a"), finished("b"))["speed"]["a"]["seconds_per_step"] == 0.5


def test_two_run_files(tmp_path, verb):
    paths = []
    for name, tensor in (("a", 1), ("b", 2)):
        path = tmp_path / f"{name}.toml"
        path.write_text(f"[parallel]\ntensor = {tensor}\ndata = 1\n[batch]\nglobal_batch_size = 8\n")
        paths.append(path)
    found = compared(*paths)
    tensor = found["differences"][0]
    assert (tensor["knob"], tensor["a"], tensor["b"]) == ("parallel.tensor", 1, 2)
    assert tensor["source_b"].endswith("b.toml:2")
    assert found["verdict"] == {"memory": "not_comparable", "speed": "no_data", "loss": "no_data"}
    predicted = [max(m.peak for m in engine.ranks(load(path).run)) for path in paths]
    memory = found["memory"]
    assert [memory[side]["predicted"] for side in "ab"] == predicted and memory["unexplained_bytes"] == 0
    assert memory["explained"] == {"parallel": predicted[1] - predicted[0]}
    assert tensor["effect"]["memory_bytes"] == predicted[1] - predicted[0] < 0


def test_what_is_measured_and_what_is_planned_never_mix(finished):
    """A run file has a predicted memory only beside another one."""
    run = finished("a")
    assert compared(run, run / "run.toml")["verdict"]["memory"] == "no_data"


def test_two_argument_lists(tmp_path):
    shape = "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --micro-batch-size 4"
    paths = [tmp_path / "a.args", tmp_path / "b.args"]
    paths[0].write_text(shape)
    paths[1].write_text(f"{shape} --recompute-granularity full --recompute-method uniform")
    found = compared(*paths)
    assert [d["knob"] for d in found["differences"]] == ["recompute.mode"]
    assert found["differences"][0]["effect"]["memory_bytes"] == found["memory"]["gap_bytes"] < 0


def test_kernels_of_another_age_are_one_cause(tmp_path):
    """`--checkpoint-activations` is of 2021, and so are its attention and its layers; nothing is left unexplained."""
    shape = "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --fp16"
    batch = "--micro-batch-size 4 --global-batch-size 4 --max-position-embeddings 1024 --lr 1e-4 --train-iters 9"
    paths = [tmp_path / "a.args", tmp_path / "b.args"]
    paths[0].write_text(f"{shape} {batch} --checkpoint-activations")
    paths[1].write_text(f"{shape} {batch}")
    memory = compared(*paths)["memory"]
    assert len(memory["explained"]) == 2 and memory["unexplained_bytes"] == 0


def test_one_host_is_not_two_machines(finished):
    """Equal runs of one machine, one of them while it was busy."""
    a, b = finished("a"), finished("b", seconds=5.0)
    for hosts, says in ((("one", "one"), "the machine had other work"), (("one", "two"), "different machines")):
        for path, host in zip((a, b), hosts, strict=True):
            (path / "environment.json").write_text(json.dumps({"schema": 1, "devices": 1, "host": host}))
        assert any(says in i["text"] for i in compared(a, b)["inferred"])


def test_more_devices_that_are_slower():
    config = {**T1, "recompute": {"mode": "none"}}
    one = typed("steelyard", None, 100.0, {**config, "parallel": {"data": 1}})
    eight = typed("steelyard", None, 80.0, {**config, "parallel": {"data": 8}, "batch": {"global_batch_size": 64}})
    assert any("more devices were slower" in i["text"] for i in compared(one, eight)["inferred"])


def test_milliseconds_for_seconds(tmp_path):
    """2048 samples in 384.5 s are 5.33 a second; Megatron-DeepSpeed of December 2021 printed 0.005."""
    path = tmp_path / "a.log"
    path.write_text(ERAS["tokens and ms"][0])
    texts = [i["text"] for i in compared(path, path)["inferred"]]
    assert texts[0] == "prints 0.005 samples/s where batch and time give 5.33: 1000 x too small, ms for s"


def test_a_rate_that_the_chip_cannot_reach():
    shape = {"num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "seq_length": 1024}
    config = {"model": shape, "parallel": {"data": 8}, "precision": {"compute": "fp16"},
              "hardware": {"chip": "V100-SXM2-16GB"}}  # fmt: skip
    found = compared(typed("Megatron-LM", None, 101_170.0, config), typed("Megatron-LM", None, 101.1, config))
    assert any("above the peak of V100" in i["text"] for i in found["inferred"])


def test_a_printed_count_names_the_layout():
    """52,115,456 parameters is what DeepSpeed prints for the 51.5 M model over two tensor ranks."""
    shape = {"num_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "seq_length": 1024, "vocab_size": 50257,
             "vocab_multiple": "megatron"}  # fmt: skip
    from steelyard.compare import inferred
    from steelyard.compare.align import side
    from steelyard.record.schema import Record

    one = side("A", Record("Megatron-DeepSpeed", "log", {"model": shape}, printed={"deepspeed_unique": 52115456}))
    concluded, said = inferred.conclude(one)
    assert concluded.value("parallel.tensor") == 2
    assert "is what tensor 2 prints" in said[0].text


def test_log_text_is_escaped(verb, tmp_path):
    """A log is hostile in every format."""
    config = {"model": {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 8}}
    a = typed("<script>alert(1)</script>\x1b[31m|`*", 100, 1.0, config)
    b = typed("B", 200, 1.0, config | {"recompute": {"mode": "</td><img src=x>"}})
    page = tmp_path / "page.html"
    _, shown = verb(a, b, "--html", page)
    assert "\x1b" not in shown
    text = page.read_text()
    assert "<script" not in text and "<img" not in text and "&lt;script&gt;" in text
    assert "src=" not in text.replace("&lt;img src=x&gt;", "") and "http" not in text
    _, shown = verb(a, b, "--markdown")
    assert "<script" not in shown and "&lt;script&gt;" in shown


def test_json_and_more_than_two(verb):
    config = {"model": {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 8}}
    three = [typed("Megatron-LM", size, 1.0, config) for size in (100, 100, 200)]
    found = json.loads(verb(*three, "--json")[1])
    assert [pair["memory"]["gap_bytes"] for pair in found] == [0, 100 * 2**20]
    keys = {"verdict", "differences", "inferred", "same", "unknown", "memory", "speed", "loss"}
    assert keys <= found[0].keys()
