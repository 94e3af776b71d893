"""`steelyard bench` with real arms: our runs, and programs that work, hang, fail and print rubbish."""

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from steelyard.bench import arm, matrix, peak, process, summary, window
from steelyard.cli.main import app
from steelyard.predict import flops
from steelyard.record.read import read_folder
from steelyard.record.schema import Step
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


@pytest.fixture
def no_peak(monkeypatch):
    """The peak is measured in a process that imports torch; not where nobody looks at it."""
    monkeypatch.setattr(peak, "measure", lambda dtype: None)


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
        "--arm", "absent=/no/such/program", "--arm", "nul=tr\0ue",
    ]  # fmt: skip
    done = bench(*options)
    assert done.exit_code == 0, done.output
    found = {one["name"]: one for one in json.loads((folder / "bench.json").read_text())["arms"]}
    assert {name: one["status"] for name, one in found.items()} == {
        "data2": "ok", "tensor3": "refused", "other": "ok", "fails": "failed",
        "rubbish": "unreadable", "hungry": "out of memory", "absent": "failed", "nul": "failed",
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
    assert again.output.count("(from an earlier call)") == len(found) - 1 and time.monotonic() - began < 20
    assert "refused" in again.output


def test_what_hangs_is_ended_with_its_children(t1, tmp_path, no_peak):
    t1.write_text(t1.read_text() + '[bench.arms]\nnone = ["model.num_layers=0"]\n')
    hangs = f"hangs={program(tmp_path, 'hangs', SLEEPS)}"
    done = bench(t1, "--rounds", 1, "--timeout", 0.05, "--folder", tmp_path / "bench", "--arm", hangs)
    assert done.exit_code == 1 and "timed out: it did not end within 0.05 minutes" in done.output
    assert gone(int((tmp_path / "bench" / "rounds" / "hangs-1" / "output.log").read_text().split()[1]))


def test_rounds_take_turns(t1, tmp_path, no_peak):
    commands = [f"--arm={name}={program(tmp_path, name, GOOD)}" for name in ("a", "b")]
    text = t1.read_text() + '[bench.arms]\nwrong = ["model.num_layers=0"]\n'
    t1.write_text(text)
    done = bench(t1, "--warmup", 2, "--steps", 3, "--rounds", 2, "--folder", tmp_path / "bench", *commands)
    order = [line.partition(":")[0] for line in done.output.splitlines() if ", round " in line]
    assert order == ["wrong, round 1", *(f"{name}, round {n}" for n in (1, 2) for name in ("a", "b"))]
    found = json.loads((tmp_path / "bench" / "bench.json").read_text())["arms"]
    assert [one["status"] for one in found] == ["refused", "ok", "ok"]
    assert found[1]["seconds"]["n"] == 6


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


ESCAPES = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("child", child.pid, flush=True)
time.sleep(600)
"""


def test_children_in_sessions_of_their_own_end_too(tmp_path):
    """torchrun starts its ranks so; the shell above it ends at once and must not hide them."""
    path, log = tmp_path / "escapes.py", tmp_path / "log"
    path.write_text(ESCAPES)
    ended = process.run(["bash", "-c", f"{sys.executable} {path}; true"], log, 0.05, lambda: True)
    assert ended.timed_out and gone(int(log.read_text().split()[1]))
    assert ended.sampled["rss"] > 2**20


def test_a_bench_that_is_asked_to_end_ends_its_program(tmp_path):
    log = tmp_path / "log"
    text = (
        "import sys; from pathlib import Path; from steelyard.bench import process\n"
        f"process.run([sys.executable, '-c', {SLEEPS!r}], Path({str(log)!r}), 1, lambda: True)"
    )
    bench = subprocess.Popen([sys.executable, "-c", text], stderr=subprocess.DEVNULL)
    while not (log.exists() and "child" in log.read_text()):
        time.sleep(0.1)
    bench.send_signal(signal.SIGTERM)
    assert bench.wait(30) != 0 and gone(int(log.read_text().split()[1]))


def test_what_a_program_prints_is_in_the_log_at_once(tmp_path):
    """Its warm-up ends where its steps are seen to; Python writes into files by the block."""
    seen = []
    log = tmp_path / "log"
    text = "import time; print('here'); time.sleep(2.5)"
    process.run([sys.executable, "-c", text], log, 1, lambda: seen.append(log.read_text()) or True)
    assert "here" in seen[0]


def test_a_device_that_does_not_say_how_busy_it_is_still_says_its_memory(monkeypatch):
    class Absent(Exception):
        pass

    def busy(handle):
        if handle == 1:
            raise Absent
        return SimpleNamespace(gpu=40)

    fake = SimpleNamespace(
        NVMLError=Absent, nvmlInit=lambda: None, nvmlDeviceGetCount=lambda: 2, nvmlDeviceGetHandleByIndex=lambda n: n,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=100 + handle), nvmlDeviceGetUtilizationRates=busy,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    assert process._gpus()() == {"device": 101, "gpu_rate": 40}


def lines(*numbers):
    return [Step(n, *[None] * 5, None, 0, 0, 0.5, None) for n in numbers]


@pytest.mark.parametrize(
    ("numbers", "counted"),
    [
        ([1, 2, 3, 4, 5, 6, 7], [4, 5, 6, 7]),
        ([0, 1, 2, 3, 4], [3, 4]),
        ([10, 20, 30, 40], [20, 30]),  # a line for ten steps
        ([100, 200, 300], [200]),
        ([1, 10, 20], [20]),  # TorchTitan's first line
        ([5010, 5020, 5030], [5020, 5030]),  # resumed
        ([5001, 5002, 5003, 5004], [5004]),
        ([20], []),
        ([], []),
    ],
)
def test_the_window_counts_steps_not_lines(numbers, counted):
    """A warm-up of three steps and at most 14 behind it."""
    assert [line.step for line in window._timed(lines(*numbers), 3, 14)] == counted
    assert window.has_begun(lines(*numbers), 3) == (bool(numbers) and numbers[-1] - window._start(lines(*numbers)) >= 3)


def again(folder, run_file, *options):
    """Another call of the same bench: its lines of rounds."""
    done = bench(run_file, "--rounds", 1, "--warmup", 2, "--steps", 3, "--folder", folder, *options)
    return [line for line in done.output.splitlines() if ", round " in line]


def test_what_is_kept_of_an_earlier_call(t1, tmp_path, no_peak):
    """A name with a dot is found again, also in a folder that was moved; a program that was written anew, a limit that
    was changed, a lost log and a file that is no result are measured again."""
    t1.write_text(t1.read_text() + '[bench.arms]\nnone = ["model.num_layers=0"]\n')
    good = f"v1.5={program(tmp_path, 'good', GOOD)}"
    slow = f"slow={program(tmp_path, 'slow', SLEEPS)}"
    first = again(tmp_path / "a", t1, "--arm", good, "--arm", slow, "--timeout", 0.04)
    assert "timed out" in first[2] and not any("earlier" in line for line in first)
    (tmp_path / "a").rename(tmp_path / "b")
    kept = again(tmp_path / "b", t1, "--arm", good, "--arm", slow, "--timeout", 0.04)
    assert ["earlier" in line for line in kept] == [False, True, True]  # what is refused is asked again
    assert "earlier" not in again(tmp_path / "b", t1, "--arm", good, "--arm", slow, "--timeout", 0.03)[2]

    program(tmp_path, "good", GOOD + "#")
    assert "earlier" not in again(tmp_path / "b", t1, "--arm", good)[1]
    (tmp_path / "b" / "rounds" / "v1.5-1" / "output.log").unlink()
    assert "earlier" not in again(tmp_path / "b", t1, "--arm", good)[1]
    (tmp_path / "b" / "rounds" / "v1.5-1.json").write_text("[]")
    assert "earlier" not in again(tmp_path / "b", t1, "--arm", good)[1]


def test_the_first_steps_never_count(t1, tmp_path, no_peak):
    """B06: also where no warm-up is asked for."""
    t1.write_text(t1.read_text() + '[bench.arms]\nnone = ["model.num_layers=0"]\n')
    options = ("--rounds", 1, "--warmup", 0, "--steps", 20, "--arm", f"good={program(tmp_path, 'good', GOOD)}")
    done = bench(t1, "--json", "--folder", tmp_path / "bench", *options)
    sheet = json.loads(done.stdout)
    seconds = sheet["arms"][1]["seconds"]
    assert sheet["warmup"] == 2 and seconds["n"] == 4 and seconds["p10"] > 0.1 > seconds["p90"] - 0.01


def test_the_reason_is_the_programs_own_and_not_its_launchers(tmp_path):
    log = tmp_path / "log"
    log.write_text("[rank1]: ValueError: wrong shape\nChildFailedError:\n=====\nexitcode  : 1 (pid: 7)\n=====\n")
    status, reason = matrix._failure(process.Ended(1, False, 1.0), log, 1)
    assert (status, reason) == ("failed", "exit code 1: [rank1]: ValueError: wrong shape")


def test_a_run_that_ends_before_its_window_is_refused(t1):
    found = arm.own("short", t1, ["length.steps=4"], None, Bench(warmup=2, steps=3))
    assert found.ours and "4 steps" in found.refusal and "5" in found.refusal


def test_a_table_of_cases(tmp_path):
    path = tmp_path / "cases"
    path.write_text("""\ufeff
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
        ("\ufeffnodes gpus\n", "no case"), ("nodes colour\n1 red\n", "colour"), ("nodes gpus\n1\n", "1 cells"),
        ("nodes gpus\n1 x\n", "gpus is x, not"),
        ("nodes,gpus\n,1\n", "nodes is empty"), ("micro\n0\n", "micro is 0"), ("fp16\nperhaps\n", "perhaps"),
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
    assert summary.spread([1.0, 2.0, 3.0, 4.0, 11.0]) == {"median": 3.0, "p10": 1.4, "p90": 8.2, "n": 5}
    assert summary.spread([2.0]) == {"median": 2.0, "p10": 2.0, "p90": 2.0, "n": 1}
