"""Checkpoint folders without any training: what a kill can leave, and what is found then."""

import itertools
import json
import os
import shutil

import pytest

from steelyard.checkpoint import store
from steelyard.spec import UserError


def make(folder, step, content=b"weights"):
    beside = store.begin(folder, step)
    file = store.write_file(beside / "shard-00000.safetensors", content)
    return store.seal(beside, store.final_path(folder, step), {"shard-00000.safetensors": file}, {"state.json": "{}"})


def content(path):
    return (path / "shard-00000.safetensors").read_bytes()


def test_every_state_that_a_kill_can_leave_has_a_whole_checkpoint(tmp_path, monkeypatch):
    """A save of the same step again, cut at every change it makes to the disk: old or new is found, never neither."""
    calls = itertools.count()

    class Killed(BaseException):
        pass

    def cut(at):
        count = itertools.count()

        def counted(function):
            def call(*arguments, **options):
                if next(count) == at:
                    raise Killed
                return function(*arguments, **options)

            return call

        return counted

    def save(at, folder):
        with monkeypatch.context() as patch:
            counted = cut(at)
            for owner, name in ((os, "fsync"), (type(folder), "rename"), (type(folder), "replace"),
                                (type(folder), "mkdir"), (shutil, "rmtree")):  # fmt: skip
                patch.setattr(owner, name, counted(getattr(owner, name)))
            make(folder, 2, b"new")
            store.retain(folder, 1)

    done = False
    while not done:
        at = next(calls)
        folder = tmp_path / str(at)
        make(folder, 1, b"first")
        make(folder, 2, b"old")
        try:
            save(at, folder)
            done = True
        except Killed:
            pass
        store.recover(folder)
        found, skipped = store.find(folder)
        assert found.name == "step-0000002" and content(found) in (b"old", b"new") and not skipped, at
        named = folder / (folder / store.LATEST).read_text().strip()
        assert not store.problem(named) and not store.damage(named)
        assert not list(folder.glob(".step-*"))
    assert at > 10 and content(found) == b"new"


@pytest.mark.parametrize(
    ("harm", "why"),
    [("truncate", "has 3 bytes instead of 7"), ("flip", "checksum"), ("remove", "is missing"), ("empty", "has 0 bytes"),
     ("marker", "complete.json is missing"), ("garbage", "complete.json cannot be read")],
)  # fmt: skip
def test_d02_a_broken_checkpoint_is_passed_over_and_refused_by_name(tmp_path, harm, why):
    make(tmp_path, 2)
    broken = make(tmp_path, 4)
    damage(broken, harm)
    found, skipped = store.find(tmp_path)
    assert found.name == "step-0000002"
    assert [(entry.path, why in entry.why) for entry in skipped] == [(broken, True)]
    assert ("shard-00000.safetensors" in skipped[0].why) == (harm not in ("marker", "garbage"))
    with pytest.raises(UserError, match="C001") as caught:
        store.find(broken)
    assert why in str(caught.value)


def damage(path, harm):
    shard, marker = path / "shard-00000.safetensors", path / store.COMPLETE
    if harm == "truncate":
        shard.write_bytes(shard.read_bytes()[:3])
    elif harm == "flip":
        data = bytearray(shard.read_bytes())
        data[3] ^= 1
        shard.write_bytes(data)
    elif harm == "remove":
        shard.unlink()
    elif harm == "empty":
        shard.write_bytes(b"")
    elif harm == "marker":
        marker.unlink()
    else:
        marker.write_text("[" * 2000)


def test_newest_is_what_was_sealed_last(tmp_path):
    for step in (3, 6, 9):
        make(tmp_path, step)
    back = make(tmp_path, 4)  # a run that went back to step 3
    assert store.find(tmp_path)[0] == back
    assert (tmp_path / store.LATEST).read_text() == "step-0000004\n"
    store.retain(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-0000004", "step-0000009"]


def test_retention_counts_only_whole_checkpoints(tmp_path):
    paths = [make(tmp_path, step) for step in (1, 2, 3)]
    damage(paths[2], "remove")
    store.retain(tmp_path, 1)
    assert store.find(tmp_path)[0] == paths[1]


def test_one_part_of_several_finds_the_damage(tmp_path):
    beside = store.begin(tmp_path, 1)
    names = [f"shard-{rank:05d}.safetensors" for rank in range(5)]
    files = {name: store.write_file(beside / name, name.encode()) for name in names}
    path = store.seal(beside, store.final_path(tmp_path, 1), files, {"state.json": "{}"})
    (path / names[3]).write_bytes(names[2].encode())
    whys = [store.damage(path, part, 3) for part in range(3)]
    assert [why != "" for why in whys].count(True) == 1 and names[3] in "".join(whys)


def test_a_checkpoint_of_before_checksums_still_counts(tmp_path):
    path = make(tmp_path, 1)
    marker = json.loads((path / store.COMPLETE).read_text())
    for file in marker["files"].values():
        file["crc32"] = None
    (path / store.COMPLETE).write_text(json.dumps(marker))
    assert store.find(tmp_path)[0] == path


def test_where_a_run_begins(tmp_path):
    own, other = tmp_path / "own", tmp_path / "other"
    first = make(own / "checkpoints", 1)
    assert store.sources(own, None) == [own]
    assert store.sources(own, other) == [own, other]  # started again with the same command, it goes on
    assert store.sources(own, first) == [first]  # it goes back
