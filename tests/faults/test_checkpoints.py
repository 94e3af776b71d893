"""Checkpoints under fire (field report D05): ranks killed at random moments, full disks, folders without permission.

Nothing that was complete is ever lost, no broken checkpoint is ever loaded, and every resumed run is the unbroken run:
the digest of its whole state is compared with that of a run nobody disturbed.
"""

import contextlib
import hashlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from steelyard.checkpoint import inspect, shards, store
from steelyard.record.read import read_folder
from steelyard.spec import UserError
from tests.faults.test_ranks import of_session, ranks_of, start
from tests.train.conftest import corpus, t1  # noqa: F401  # fixtures
from tests.train.running import losses, on_rank

STEPS, EVERY = 18, 3
SMALL = (
    "model.num_layers=2", "model.hidden_size=32", "model.seq_length=16", "evaluation.steps=0",
    f"length.steps={STEPS}", f"checkpoint.every_steps={EVERY}",
)  # fmt: skip


# --- ranks to kill ---------------------------------------------------------------------------------------------------


def lives(path, folder, world, options, digests=None, limit=None):
    """Start a run on forked ranks of its own; the processes, rank 0 first."""
    context = multiprocessing.get_context("fork")
    meeting = tempfile.mktemp(prefix="meet-")
    arguments = [(rank, world, meeting, path, folder, options, digests, limit) for rank in range(world)]
    ranks = [context.Process(target=_live, args=given, daemon=True) for given in arguments]
    for process in ranks:
        process.start()
    return ranks


def _live(rank, world, meeting, path, folder, options, digests, limit):
    torch.set_num_threads(1)
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", store=dist.FileStore(meeting, world), rank=rank, world_size=world, timeout=timeout)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    code = 0
    try:
        on_rank(path, (*options, f"record.folder='{folder}'"), resumed=lambda loop: _note(loop, digests))
    except UserError as failure:
        Path(f"{folder}.error").write_text(str(failure))
        code = 2
    except Exception:  # its peer was killed
        code = 3
    os._exit(code)


def _note(loop, digests):
    """Append the step a run begins at and the digest of everything it has loaded."""
    if digests is None or loop.state.step == 0:
        return
    tensors = loop.engine.tensors(with_optimizer=loop.state.updates > 0)
    held = hashes((name, t.full_tensor() if isinstance(t, DTensor) else t) for name, t in tensors.items())
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, held)  # stages hold different tensors
    if dist.get_rank() == 0:
        whole = {name: found for part in parts for name, found in part.items()}
        found = digest(whole, {"state": loop.state.as_json(), "scaler": loop.engine.scaler.state()})
        with open(digests, "a") as file:
            file.write(json.dumps([loop.state.step, found]) + "\n")


def hashes(tensors):
    return {name: hashlib.sha256(tensor.numpy(force=True).tobytes()).hexdigest() for name, tensor in tensors}


def digest(whole, state):
    """Of all tensors' hashes and the state, whatever the layout."""
    return hashlib.sha256(json.dumps([whole, state["state"], state["scaler"]], sort_keys=True).encode()).hexdigest()


def wait(ranks, seconds=120):
    for process in ranks:
        process.join(seconds)
    assert not any(process.is_alive() for process in ranks)
    return [process.exitcode for process in ranks]


class Unbroken:
    """A run nobody disturbs, saved at every step: what each step's state and loss must be."""

    def __init__(self, path, folder, world, layout):
        options = (*SMALL, *layout, "checkpoint.every_steps=1", f"checkpoint.keep={STEPS}")
        assert wait(lives(path, folder, world, options)) == [0] * world
        self.losses = losses(read_folder(folder))
        self.digests = {}
        for checkpoint in (folder / "checkpoints").glob("step-*"):
            whole, state = hashes(shards.read_whole(checkpoint)), store.read_state(checkpoint)
            self.digests[state["state"]["step"]] = digest(whole, state)
        assert len(self.losses) == len(set(self.digests.values())) == STEPS


def drill(path, tmp_path, world, layout, kills, seed):
    """Kill a run again and again; it is started again each time, and anew when it is done."""
    unbroken = Unbroken(path, tmp_path / "unbroken", world, layout)
    generator, count, lost, resumes = random.Random(seed), 0, [], 0
    for attempt in range(kills):
        folder, digests = tmp_path / f"run{attempt}", tmp_path / f"run{attempt}.digests"
        asynchronous = attempt % 2 == 0
        options = (*SMALL, *layout, f"checkpoint.asynchronous={str(asynchronous).lower()}")
        while True:
            ranks = lives(path, folder, world, options, digests)
            struck = count < kills and strike(folder, ranks, generator)
            codes = wait(ranks)
            count += struck
            if not struck:
                assert codes == [0] * world
                break
            check(folder, lost, unbroken)
        resumed = [json.loads(line) for line in digests.read_text().splitlines()] if digests.exists() else []
        assert all(unbroken.digests[step] == found for step, found in resumed), "a resumed run is another run"
        resumes += len(resumed)
        assert losses(read_folder(folder)) == unbroken.losses
        shutil.rmtree(folder)
        if count >= kills:
            break
    return count, resumes, max(lost, default=0)


def strike(folder, ranks, generator):
    """Kill one rank or all, at a random moment of the start or up to 8 steps later; whether it was in time."""
    if generator.random() < 0.1:
        time.sleep(generator.random() * 0.5)
    else:
        wait_for(folder, recorded(folder) + generator.randint(1, 8), lambda: all(r.is_alive() for r in ranks))
        time.sleep(generator.random() * 0.06)
    victims = ranks if generator.random() < 0.5 else [generator.choice(ranks)]
    struck = all(process.is_alive() for process in ranks)
    for process in victims:
        process.kill()
    time.sleep(0 if len(victims) == len(ranks) else generator.random() * 0.05)
    for process in ranks:  # what a launcher does to the ones that are left
        process.kill()
    return struck


def wait_for(folder, steps, alive, seconds=60):
    """Until the record has so many steps or nobody is left to write it."""
    deadline = time.monotonic() + seconds
    while recorded(folder) < steps and alive() and time.monotonic() < deadline:
        time.sleep(0.01)


def recorded(folder):
    path = folder / "metrics.jsonl"
    return path.read_text().count('"kind": "step"') if path.exists() else 0


def check(folder, lost, unbroken):
    """After a kill: what was said to be saved is there, it is what an undisturbed run has at that step, and at most an
    interval of steps is lost."""
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []
    said = max((line["step"] for line in lines if line["kind"] == "checkpoint"), default=0)
    begun = max((n for n, line in enumerate(lines) if line["kind"] == "event" and line["what"] == "start"), default=0)
    reached = max((line["step"] for line in lines[begun:] if line["kind"] == "step"), default=0)
    store.recover(folder / "checkpoints")  # as the next start does
    newest, skipped = store.find(folder)
    step = int(newest.name.removeprefix("step-")) if newest else 0
    assert not skipped and step >= said
    if newest:
        assert unbroken.digests[step] == digest(hashes(shards.read_whole(newest)), store.read_state(newest))
    assert reached - step <= EVERY
    lost.append(reached - step)


def test_killed_at_random_moments_a_run_comes_out_the_same(t1, tmp_path):  # noqa: F811
    """This seed kills all ranks in step 8, one in step 9 of the next life, and all of the third as it starts. Behind
    step 6 the save of step 3 is sealed, however slow the machine, so there is something to resume from."""
    kills, resumes, _ = drill(t1, tmp_path, 2, ("parallel.zero=3",), kills=3, seed=21)
    assert kills == 3 and resumes >= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "layout", "kills"),
    [(1, (), 60), (2, ("parallel.zero=3",), 60), (2, ("parallel.tensor=2",), 30), (2, ("parallel.pipeline=2",), 30)],
)
def test_180_kills(t1, tmp_path, world, layout, kills):  # noqa: F811
    done, resumes, lost = drill(t1, tmp_path, world, layout, kills, seed=sum(map(ord, str(layout))))
    print(f"{done} kills, {resumes} resumes compared, at most {lost} steps lost")
    assert done == kills and resumes >= kills // 2


@pytest.mark.slow
def test_20_kills_through_the_launcher(t1, tmp_path):  # noqa: F811
    """The launcher, one rank of it, or all of its session; the next launch goes on."""
    layout, generator, kills = ("parallel.zero=2",), random.Random(5), 0
    unbroken = Unbroken(t1, tmp_path / "unbroken", 2, layout)
    long = f"record.folder='{tmp_path / 'run'}'"
    lost, folder, done = [], tmp_path / "run", 0
    while kills < 20:
        process = start("train", t1, *SMALL, *layout, long, "--world", "2")
        wait_for(folder, recorded(folder) + generator.randint(1, 8), lambda process=process: process.poll() is None)
        time.sleep(generator.random() * 0.1)
        if process.poll() is None and (ranks := ranks_of(process)):
            how = generator.choice(("launcher", "rank", "all"))
            targets = {"launcher": [process.pid], "rank": [generator.choice(ranks)], "all": [process.pid, *ranks]}[how]
            for pid in targets:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            kills += 1
        process.communicate(timeout=60)
        deadline = time.monotonic() + 15
        while of_session(process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        check(folder, lost, unbroken)
        if recorded_last(folder) >= STEPS:
            assert losses(read_folder(folder)) == unbroken.losses
            shutil.rmtree(folder)
            done += 1
    assert done
    print(f"20 kills through the launcher, at most {max(lost)} steps lost")


def recorded_last(folder):
    return max((s.step for s in read_folder(folder).steps), default=0)


# --- disks and folders -----------------------------------------------------------------------------------------------


def test_d05_a_full_disk_costs_that_save_and_nothing_else(t1, tmp_path):  # noqa: F811
    """Files may not grow beyond 100 kB: each save fails and is said, training goes on, the end is an error."""
    folder = tmp_path / "run"
    assert wait(lives(t1, folder, 2, (*SMALL, "stop.step_multiple=6"))) == [0, 0]
    before = {path: store.checksum(path) for path in sorted(folder.glob("checkpoints/step-*/*"))}
    options = (*SMALL, "stop.step_multiple=12")
    assert wait(lives(t1, folder, 1, options, limit=100_000)) == [2]
    text = Path(f"{folder}.error").read_text()
    assert "error[C004]" in text and "step-0000012" in text
    assert "File too large" in text and "shard-0000" in text and "bytes" in text
    record = read_folder(folder)
    failed = [e.detail["step"] for e in record.events if e.what == "checkpoint_failed"]
    assert failed == [9, 12, 12]  # the last is tried twice
    assert record.steps[-1].step == 12
    assert {path: store.checksum(path) for path in sorted(folder.glob("checkpoints/step-*/*"))} == before
    assert (folder / "checkpoints" / store.LATEST).read_text() == "step-0000006\n"
    assert not list(folder.glob("checkpoints/.step-*"))
    assert wait(lives(t1, folder, 1, (*SMALL, "stop.step_multiple=9"))) == [0]
    assert [e.step for e in read_folder(folder).events if e.what == "start"] == [0, 6, 6]


def test_a_save_that_is_waited_for_ends_the_run_where_it_fails(t1, tmp_path):  # noqa: F811
    folder = tmp_path / "run"
    options = (*SMALL, "checkpoint.asynchronous=false")
    assert wait(lives(t1, folder, 2, options, limit=60_000)) == [2, 2]
    text = Path(f"{folder}.error").read_text()
    assert "error[C004]" in text and "step-0000003" in text and "File too large" in text
    assert read_folder(folder).steps[-1].step == 3


def test_a_folder_that_cannot_be_written_is_named(corpus, tmp_path_factory):  # noqa: F811
    """Read-only from the second run on: its saves fail, the first run's checkpoint stays, the error names the path."""
    with tempfile.TemporaryDirectory(prefix="readonly-") as name:
        place = Path(name)
        place.chmod(0o777)
        for file in corpus.parent.glob(f"{corpus.name}*"):
            shutil.copy(file, place / file.name)
        from tests.train.conftest import T1

        path = place / "t1.toml"
        path.write_text(T1.format(data=place / corpus.name, folder=place))
        assert _unprivileged(path, place, (*SMALL, "stop.step_multiple=3")) == 0
        (place / "run" / "checkpoints").chmod(0o555)
        code = _unprivileged(path, place, (*SMALL, "stop.step_multiple=6"))
        text = (place / "run.error").read_text()
        (place / "run" / "checkpoints").chmod(0o755)
        assert code == 2 and "error[C004]" in text and "Permission denied" in text and "step-0000006" in text
        assert store.find(place / "run")[0].name == "step-0000003"


def _unprivileged(path, place, options):
    """Exit code of the run in a process that no permission is waived for."""
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_as_nobody, args=(path, place, options), daemon=True)
    process.start()
    process.join(60)
    return process.exitcode


def _as_nobody(path, place, options):
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    _live(0, 1, str(place / f"meet{os.getpid()}"), path, place / "run", options, None, None)


def test_two_runs_in_one_folder_do_not_touch_each_others_saves(t1, tmp_path):  # noqa: F811
    """The second is refused before it tidies anything: an unfinished save of the first is left alone."""
    folder = tmp_path / "run"
    first = lives(t1, folder, 1, (*SMALL, "length.steps=100000", "checkpoint.every_steps=1"))
    while recorded(folder) < 3:
        time.sleep(0.01)
    assert wait(lives(t1, folder, 1, SMALL)) == [2]
    assert "error[R004]" in Path(f"{folder}.error").read_text()
    assert first[0].is_alive()
    first[0].kill()
    wait(first)
    found = inspect.verify(folder)
    assert found and not any(one["problem"] for one in found)


def test_a_flipped_bit_is_never_loaded(t1, tmp_path):  # noqa: F811
    folder = tmp_path / "run"
    assert wait(lives(t1, folder, 1, (*SMALL, "stop.step_multiple=6"))) == [0]
    shard = folder / "checkpoints" / "step-0000006" / "shard-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 4
    shard.write_bytes(content)
    assert wait(lives(t1, folder, 2, (*SMALL, f"checkpoint.load='{shard.parent}'"))) == [2, 2]
    text = Path(f"{folder}.error").read_text()
    assert "error[C001]" in text and f"the content of {shard.name} is not what was saved" in text
    assert wait(lives(t1, folder, 2, (*SMALL, "stop.step_multiple=6"))) == [0, 0]
    passed = [e.detail for e in read_folder(folder).events if e.what == "passed_over"]
    assert passed == [{"checkpoint": str(shard.parent), "why": text.split("checkpoint: ")[1].splitlines()[0]}]
