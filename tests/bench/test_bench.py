"""`steelyard bench` with real arms: our runs, and programs that work, hang, fail and print rubbish."""

import json
import os
import signal
import sys
import time

import pytest
from typer.testing import CliRunner

from steelyard.bench import arm, process, summary
from steelyard.cli.main import app
from steelyard.predict import flops
from steelyard.record.read import read_folder
from steelyard.spec import UserError, load
from steelyard.spec.bench import Bench

GOOD = """
print("Overriding: n_layer = 4"); print("Overriding: n_embd = 64"); print("Overriding: n_head = 4")
print("Overriding: block_size = 64"); print("defaulting to vocab_size of GPT-2 to 257")
print("tokens per iteration will be: 512")
for n in range(6):
    print(f"iter {n}: loss 5.0, time {1000 if n < 2 else 100 + n}.00ms", flush=True)
"""
SLEEPS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
time.sleep(600)
"""

RUBBISH = "print(chr(27) + '[31m<script>' + chr(0x202e) + 'x' * 10000)"
HUNGRY = "raise RuntimeError('CUDA out of memory. Tried to allocate 2.00 GiB')"


def program(tmp_path, name, text):
    path = tmp_path / f"{name}.py"
    path.write_text(text)
    return f"{sys.executable} {path}"


def bench(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)], catch_exceptions=False)


def gone(pid):
    """Within a moment: the system takes one to bury what was killed."""
    for _ in range(50):
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.1)
    return False


def test_a_bench_of_every_kind_of_arm(t1, tmp_path):
    """B05, B06: the window is behind the warm-up, figures agree with the record's, totals are of the whole run; and an
    arm that hangs, fails, prints rubbish or is refused is a result with its reason."""
    folder = tmp_path / "bench"
    options = [
        t1, "--warmup", 2, "--steps", 3, "--rounds", 1, "--world", 2, "--folder", folder, "--timeout", 5,
        "--set", "parallel.data=2", "--set", "parallel.tensor=3",
        "--arm", f"other={program(tmp_path, 'other', GOOD)}",
        "--arm", f"fails={program(tmp_path, 'fails', 'raise SystemExit(3)')}",
        "--arm", f"rubbish={program(tmp_path, 'rubbish', RUBBISH)}",
        "--arm", f"hungry={program(tmp_path, 'hungry', HUNGRY)}",
        "--arm", "absent=/no/such/program",
    ]  # fmt: skip
    done = bench(*options)
    assert done.exit_code == 0, done.output
    found = {one["name"]: one for one in json.loads((folder / "bench.json").read_text())["arms"]}
    assert {name: one["status"] for name, one in found.items()} == {
        "data2": "ok", "tensor3": "refused", "other": "ok", "fails": "failed",
        "rubbish": "unreadable", "hungry": "out of memory", "absent": "failed",
    }  # fmt: skip
    assert "3 ranks" in found["tensor3"]["reason"] and "exit code 3" in found["fails"]["reason"]

    # ours: the steps behind the warm-up, and rates that follow from them
    ours, record = found["data2"], read_folder(found["data2"]["record"])
    seconds = [step.seconds for step in record.steps]
    assert len(seconds) == 5 and ours["rounds"][0]["seconds"] == seconds[2:]
    middle = sorted(seconds[2:])[1]
    run = load(t1, world=2).run
    assert ours["samples_per_second"] == pytest.approx(8 / middle)
    assert ours["tokens_per_second_per_device"] == pytest.approx(8 * 64 / middle / 2)
    per_sample = flops.model_flops(run.model, run.padded_vocab_size)
    assert ours["model_flops_per_second"] == pytest.approx(ours["samples_per_second"] * per_sample)
    step = next(s for s in record.steps if s.seconds == middle)
    assert step.model_flops_per_second == pytest.approx(ours["model_flops_per_second"], rel=0.02)
    assert len(ours["ranks"]) == 2 and ours["memory"]["rss"] == pytest.approx(
        max(rank["rss"] for rank in ours["ranks"]), rel=0.1
    )
    assert ours["predicted"]["tensors"] == pytest.approx(ours["memory"]["tensors"], rel=0.05)
    assert ours["mfu"]["peak_source"].startswith("matrix product")

    # the other: as its log says, its first two steps left out
    assert found["other"]["seconds"]["median"] == pytest.approx(0.103)
    assert found["other"]["tokens_per_second"] == pytest.approx(512 / 0.103)
    pairs = json.loads((folder / "bench.json").read_text())["pairs"]
    assert [(pair["a"], pair["b"]) for pair in pairs] == [("data2", "other")]

    # the page holds no text of an arm as it came
    assert "\x1b" not in (folder / "report.html").read_text()

    # a second call measures nothing again
    began = time.monotonic()
    again = bench(*options)
    assert again.output.count("(from an earlier call)") == len(found) and time.monotonic() - began < 20
    assert "refused" in again.output


def test_what_hangs_is_ended_with_its_children(t1, tmp_path):
    t1.write_text(t1.read_text() + '[bench.arms]\nnone = ["model.num_layers=0"]\n')
    hangs = f"hangs={program(tmp_path, 'hangs', SLEEPS)}"
    done = bench(t1, "--rounds", 1, "--timeout", 0.05, "--folder", tmp_path / "bench", "--arm", hangs)
    assert done.exit_code == 1 and "timed out: it did not end within 0.05 minutes" in done.output
    assert gone(int((tmp_path / "bench" / "rounds" / "hangs-1" / "output.log").read_text().split()[1]))


def test_rounds_take_turns(t1, tmp_path):
    commands = [f"--arm={name}={program(tmp_path, name, GOOD)}" for name in ("a", "b")]
    text = t1.read_text() + '[bench.arms]\nwrong = ["model.num_layers=0"]\n'
    t1.write_text(text)
    done = bench(t1, "--warmup", 2, "--steps", 3, "--rounds", 2, "--folder", tmp_path / "bench", *commands)
    order = [line.partition(":")[0] for line in done.output.splitlines() if ", round " in line]
    assert order == ["wrong, round 1", *(f"{name}, round {n}" for n in (1, 2) for name in ("a", "b"))]
    found = json.loads((tmp_path / "bench" / "bench.json").read_text())["arms"]
    assert [one["status"] for one in found] == ["refused", "ok", "ok"]
    assert found[1]["seconds"]["count"] == 6


def test_an_interrupted_program_leaves_nothing(tmp_path):
    log = tmp_path / "log"

    def interrupt():
        if "child" in log.read_text():
            os.kill(os.getpid(), signal.SIGINT)
            return False
        return True

    with pytest.raises(KeyboardInterrupt):
        process.run([sys.executable, "-c", SLEEPS], log, 1, interrupt)
    assert gone(int(log.read_text().split()[1]))


def test_a_run_that_ends_before_its_window_is_refused(t1):
    found = arm.own("short", t1, ["length.steps=4"], None, Bench(warmup=2, steps=3))
    assert found.ours and "4 steps" in found.refusal and "5" in found.refusal


def test_a_table_of_cases(tmp_path):
    path = tmp_path / "cases"
    path.write_text("""
        | nodes | gpus | tensor | pipeline | fp16  | checkpointing | micro | global |
        |-------|------|--------|----------|-------|---------------|-------|--------|
        | 1     | 8    | 1      | 1        | true  | false         | 4     | 32     |
        2 8 2 4 false true 8 64
    """)
    assert list(arm.cases(path).values()) == [
        (8, ("parallel.tensor=1", "parallel.pipeline=1", "precision.compute=fp16", "recompute.mode=none",
             "batch.micro_batch_size=4", "batch.global_batch_size=32")),
        (16, ("parallel.tensor=2", "parallel.pipeline=4", "precision.compute=fp32", "recompute.mode=full",
              "batch.micro_batch_size=8", "batch.global_batch_size=64")),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nodes gpus\n", "no case"), ("nodes colour\n1 red\n", "colour"), ("nodes gpus\n1\n", "1 cells"),
        ("nodes gpus\n1 x\n", "x"), ("fp16\nperhaps\n", "perhaps"),
    ],
)  # fmt: skip
def test_a_bad_table_is_named(tmp_path, text, says):
    path = tmp_path / "cases"
    path.write_text(text)
    with pytest.raises(UserError, match="B002") as caught:
        arm.cases(path)
    assert says in str(caught.value)


@pytest.mark.parametrize("text", ["no command", "=x", "../up=x", "a=", 'a="open', "a b=x"])
def test_a_bad_arm_is_named(text):
    with pytest.raises(UserError, match="B001"):
        arm.named(text)


def test_names_are_not_shared(t1, tmp_path):
    done = CliRunner().invoke(app, ["bench", str(t1), "--arm", "a=x", "--arm", "a=y", "--folder", str(tmp_path / "b")])
    assert "B004" in str(done.exception)


def test_the_spread_of_values():
    assert summary.spread([1.0, 2.0, 3.0, 4.0, 11.0]) == {"median": 3.0, "p10": 1.4, "p90": 8.2, "count": 5}
    assert summary.spread([2.0]) == {"median": 2.0, "p10": 2.0, "p90": 2.0, "count": 1}
