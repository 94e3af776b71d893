"""kill -9 while data are prepared or ordered: nothing half-made ever reads as good, and the next call finishes it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from steelyard.data import manifest as manifests
from steelyard.data import prepare as preparing
from steelyard.data.inspect import verify
from steelyard.data.order import Order
from steelyard.data.prepare import prepare
from steelyard.data.store import Dataset, Writer
from steelyard.spec.errors import UserError

# Kills itself at the n-th call of one function of the operating system.
KILLED = """
import os, signal, sys
from steelyard.data import inputs, prepare
name, count, path, prefix = sys.argv[1], int(sys.argv[2]), *sys.argv[3:]
real, calls = getattr(os, name), 0
def deadly(*arguments):
    global calls
    calls += 1
    if calls == count:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*arguments)
setattr(os, name, deadly)
inputs.BLOCK_BYTES, prepare.SAVE_SECONDS = 2000, 0.0
prepare.prepare([path], prefix, "byte", workers=1)
"""


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {i} " * (i % 9 + 1)}) + "\n" for i in range(100)))
    return path


def state(prefix):
    """The bytes of a data set that can be opened, None for one that is refused."""
    try:
        Dataset(prefix)
    except UserError as failure:
        assert failure.problems[0].code == "D001"
        return None
    assert not list(verify(prefix))
    return [Path(f"{prefix}.{ending}").read_bytes() for ending in ("bin", "idx")]


@pytest.mark.parametrize(
    ("function", "count", "there"),
    [("fsync", 1, "nothing"), ("fsync", 7, "an older one"), ("replace", 1, "nothing"), ("replace", 4, "an older one"),
     ("fsync", -1, "nothing"), ("fsync", 0, "an older one"), *(("replace", -n, "an older one") for n in range(3))],
)  # fmt: skip
def test_a_killed_prepare_leaves_the_old_or_nothing_or_the_whole(function, count, there, corpus, tmp_path, monkeypatch):
    """Negative counts are from the last call backwards, where files are renamed."""
    whole = tmp_path / "whole"
    calls = []
    real = getattr(os, function)
    with monkeypatch.context() as patched:
        patched.setattr(preparing, "SAVE_SECONDS", 0.0)
        patched.setattr("steelyard.data.inputs.BLOCK_BYTES", 2000)
        patched.setattr(os, function, lambda *arguments: (calls.append(1), real(*arguments))[1])
        prepare([corpus], whole, "byte", workers=1)
    prefix, before = tmp_path / "out", None
    if there == "an older one":
        with Writer(prefix, np.uint16) as writer:
            writer.add_document([[1, 2, 3]])
        before = state(prefix)
    at = count if count > 0 else len(calls) + count
    command = [sys.executable, "-c", KILLED, function, str(at), str(corpus), str(prefix)]
    assert subprocess.run(command, timeout=60).returncode == -signal.SIGKILL
    assert state(prefix) in (None, before, state(whole))
    made = prepare([corpus], prefix, "byte")
    assert state(prefix) == state(whole) and made == manifests.read(whole)
    assert not list(tmp_path.glob("out*partial*"))


def test_a_killed_worker_ends_the_call_with_a_message(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(preparing, "BYTES_PER_WORKER", 1)
    monkeypatch.setattr("steelyard.data.inputs.BLOCK_BYTES", 200)
    import multiprocessing

    others = set(multiprocessing.active_children())

    def kill_one(_):
        for child in set(multiprocessing.active_children()) - others:
            os.kill(child.pid, signal.SIGKILL)

    with pytest.raises(UserError) as raised:
        prepare([corpus], tmp_path / "out", "byte", workers=2, progress=kill_one)
    assert raised.value.problems[0].code == "D024" and not (tmp_path / "out.idx").exists()


def test_workers_end_with_a_killed_parent(corpus, tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import multiprocessing, sys, time\nfrom steelyard.data import inputs, prepare\n"
        "def wait(_):\n"
        "    print(*[child.pid for child in multiprocessing.active_children()], flush=True)\n    time.sleep(60)\n"
        "if __name__ == '__main__':\n    prepare.BYTES_PER_WORKER, inputs.BLOCK_BYTES = 1, 200\n"
        "    prepare.prepare([sys.argv[1]], sys.argv[2], 'byte', workers=2, progress=wait)\n"
    )
    command = [sys.executable, str(script), str(corpus), str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        children = [int(pid) for pid in parent.stdout.readline().split()]
        parent.kill()
    assert children
    deadline = time.monotonic() + 20
    while any(alive(pid) for pid in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in children)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


ORDERING = """
import os, signal, sys
import numpy as np
from steelyard.data import cache, order
from steelyard.data.store import Dataset
place, prefix, folder = sys.argv[1:]
def deadly(*_):
    os.kill(os.getpid(), signal.SIGKILL)
if place == "rename":
    os.rename = deadly
elif place == "rows":
    order._fill_rows = deadly
else:
    real, calls = np.save, []
    def save(*arguments):
        calls.append(1)
        if len(calls) == int(place):
            open(arguments[0], "wb").write(b"half of it")
            deadly()
        real(*arguments)
    np.save = save
dataset = Dataset(prefix)
order.Order(dataset, (0, len(dataset)), 8, 1, 50, folder, True)
"""


@pytest.mark.parametrize("place", ["1", "rows", "2", "rename"])
def test_a_killed_build_of_the_order_is_built_again(place, tmp_path):
    with Writer(tmp_path / "data", np.uint16) as writer:
        for length in range(1, 40):
            writer.add_document([np.arange(length)])
    dataset = Dataset(tmp_path / "data")

    def order(folder, build):
        return Order(dataset, (0, len(dataset)), 8, 1, 50, tmp_path / folder, build)

    command = [sys.executable, "-c", ORDERING, place, str(tmp_path / "data"), str(tmp_path / "cache")]
    assert subprocess.run(command, timeout=60).returncode == -signal.SIGKILL
    assert list((tmp_path / "cache").glob("*.building-*"))
    with pytest.raises(UserError, match="D015"):
        order("cache", False)
    again, expected = order("cache", True), order("fresh", True)
    for name in ("document_index", "sample_index", "shuffle_index"):
        assert np.array_equal(getattr(again, name), getattr(expected, name))
