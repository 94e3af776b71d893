"""Ranks that fail, are killed or hang (field reports H04, H05, H06): the run ends soon, says which rank and where, and
leaves no process behind."""

import os
import resource
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from steelyard.data.store import Writer
from tests.train.conftest import T1, corpus, t1  # noqa: F401  # fixtures

LONG = ("length.steps=100000", "evaluation.steps=0")


def start(*arguments, limit=None, **environment):
    """Start the program in a session of its own; `limit`: bytes that a file of it may have."""
    command = [sys.executable, "-m", "steelyard.cli.main", *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, **environment},
        preexec_fn=limit and (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))),
    )  # fmt: skip


def finish(process, seconds):
    """(exit code, stdout, stderr) within the given time, and no process of its session left."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        pytest.fail(f"still running after {seconds} s")
    assert not of_session(process.pid), "processes were left behind"
    return process.returncode, out, err


def of_session(session):
    """Live processes of a session."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                fields = file.read().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(name))
    return found


def wait_for_steps(folder, steps=3, seconds=90):
    """Until the run has recorded some steps."""
    deadline = time.monotonic() + seconds
    path = folder / "metrics.jsonl"
    while time.monotonic() < deadline:
        if path.exists() and path.read_text().count('"kind": "step"') >= steps:
            return
        time.sleep(0.1)
    pytest.fail("the run did not start")


def ranks_of(process):
    """The rank processes under a launcher: its children."""
    with open(f"/proc/{process.pid}/task/{process.pid}/children") as file:
        return [int(pid) for pid in file.read().split()]


def test_h06_a_killed_rank_loses_its_connections_before_it_has_ended(monkeypatch):
    """The other ranks see a reset connection while the system still counts the killed one as running."""
    from steelyard.train import launch
    from steelyard.train.watch import Heartbeat

    ended = Heartbeat(1, 5, "forward-backward", 0.1, 0.1, socket.gethostname(), 2**31 - 1)

    class Late:
        world, rank, step, phase = 2, 0, 5, "forward-backward"
        asked = 0

        def silent(self):
            self.asked += 1
            return [ended] if self.asked > 3 else []

    monkeypatch.setattr(launch.time, "sleep", lambda seconds: None)
    told = str(launch._told(RuntimeError("gloo: connection reset by peer"), Late()))
    assert "it waited in vain for rank 1" in told and "gone" in told and "reset" not in told


def test_h06_a_killed_rank_ends_the_run(t1, tmp_path):  # noqa: F811
    process = start("train", t1, *LONG, "--world", "2")
    wait_for_steps(tmp_path / "run")
    os.kill(ranks_of(process)[-1], signal.SIGKILL)
    code, _, err = finish(process, 30)
    assert code == 2 and "error[L005]" in err and "SIGKILL" in err and "Traceback" not in err


def test_h06_a_stopped_rank_ends_the_run_within_the_timeout(t1, tmp_path):  # noqa: F811
    process = start("train", t1, *LONG, "stop.hang_seconds=6", "--world", "2")
    wait_for_steps(tmp_path / "run")
    victim = ranks_of(process)[-1]
    os.kill(victim, signal.SIGSTOP)
    code, _, err = finish(process, 6 + 30)
    assert code == 2
    assert "waited in vain" in err and f"pid {victim}" in err and "step" in err


def test_h06_a_bad_sample_on_one_rank_is_the_error_that_is_shown(tmp_path):
    with Writer(tmp_path / "bad_text_document", np.dtype(np.uint16)) as writer:
        for number in range(60):
            tokens = np.arange(64 * 2, dtype=np.uint16) % 250
            if number == 40:
                tokens[5] = 300
            writer.add_document([tokens])
    path = tmp_path / "t1.toml"
    path.write_text(T1.format(data=tmp_path / "bad_text_document", folder=tmp_path))
    code, _, err = finish(start("train", path, "length.steps=14", "--world", "2"), 60)
    assert code == 2 and "error[D004]" in err and "300" in err and "Traceback" not in err


def test_a_killed_launcher_leaves_nothing(t1, tmp_path):  # noqa: F811
    process = start("train", t1, *LONG, "--world", "2")
    wait_for_steps(tmp_path / "run")
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    deadline = time.monotonic() + 15
    while of_session(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not of_session(process.pid)


@pytest.mark.parametrize("world", ["1", "2"])
def test_a_signal_saves_and_leaves(t1, tmp_path, world):  # noqa: F811
    process = start("train", t1, *LONG, "--world", world)
    wait_for_steps(tmp_path / "run")
    os.kill(process.pid, signal.SIGTERM)
    began = time.monotonic()
    code, _, _ = finish(process, 30)
    assert code == 130 and time.monotonic() - began < 15  # and not when the grace of a hung rank is over
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


def test_h04_two_runs_at_once_find_their_own_ports(t1, tmp_path):  # noqa: F811
    both = [start("train", t1, f"record.folder='{tmp_path}/{n}'", "--world", "2") for n in "ab"]
    assert [finish(process, 120)[0] for process in both] == [0, 0]


def test_h04_a_taken_port_is_named(t1):  # noqa: F811
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        code, _, err = finish(start("train", t1, "stop.hang_seconds=5", **place), 30)
    assert code == 2 and "error[L003]" in err and port in err and "Traceback" not in err


def test_one_run_at_a_time_in_a_folder(t1, tmp_path):  # noqa: F811
    first = start("train", t1, *LONG)
    wait_for_steps(tmp_path / "run")
    code, _, err = finish(start("train", t1), 60)
    assert code == 2 and "error[R004]" in err
    os.kill(first.pid, signal.SIGTERM)
    finish(first, 30)


@pytest.mark.parametrize(
    ("world", "options", "code"),
    [("1", ["parallel.tensor=2"], "S111"), ("0", [], "E002"), ("64", ["batch.global_batch_size=128"], "L001")],
)
def test_h05_a_world_that_does_not_fit(t1, world, options, code):  # noqa: F811
    if code == "L001" and (os.cpu_count() or 1) * 8 >= 64:
        pytest.skip("this machine has room for 64 ranks")
    status, _, err = finish(start("train", t1, *options, "--world", world), 60)
    assert status == 2 and f"error[{code}]" in err and "Traceback" not in err
