"""Going on from a checkpoint: the same run on any layout, and what may change (field reports A05, C02, D01, D02)."""

import json
import shutil
import time
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from steelyard.checkpoint import inspect, shards, store
from steelyard.spec import error, load
from tests.train.running import losses, on_rank, train

QUIET = ("evaluation.steps=0",)


def newest(folder):
    return store.find(folder)[0]


def test_ten_steps_are_three_and_three_and_four_bit_for_bit(pools, t1, tmp_path):
    """Losses, weights, moments and state, with saves behind the training and with saves it waits for."""
    _, straight = train(pools(1), t1, *QUIET, "length.steps=10", folder=tmp_path / "straight")
    for asynchronous in ("true", "false"):
        options, folder = (
            (*QUIET, "length.steps=10", f"checkpoint.asynchronous={asynchronous}"),
            tmp_path / asynchronous,
        )
        for stop in (3, 6, 10):
            _, parts = train(pools(1), t1, *options, f"stop.step_multiple={stop}", folder=folder)
        assert losses(parts) == losses(straight)
        assert [s.grad_norm for s in parts.steps] == [s.grad_norm for s in straight.steps]
        found = inspect.diff(tmp_path / "straight", folder)
        assert not inspect.is_different(found) and found["equal"] == 3 * 52


def test_d01_the_data_position_is_of_no_layout(pools, t1, tmp_path):
    """Saved at data 2; resumed at data 1 and 4: the same samples at every step, and the same loss."""
    _, unbroken = train(pools(2), t1, *QUIET, folder=tmp_path / "unbroken")
    train(pools(2), t1, *QUIET, "stop.step_multiple=3", folder=tmp_path / "half")
    for world in (1, 4):
        folder = shutil.copytree(tmp_path / "half", tmp_path / str(world))
        _, resumed = train(pools(world), t1, *QUIET, folder=folder)
        assert [s.batch_hash for s in resumed.steps] == [s.batch_hash for s in unbroken.steps]
        assert losses(resumed) == pytest.approx(losses(unbroken), abs=2e-6)


def test_a05_vocabulary_padding_follows_the_layout(pools, t1, tmp_path):
    """257 tokens are 384 rows at tensor 1 and 512 at tensor 2; there and back, real rows and losses stay."""
    options = ("model.vocab_multiple=megatron", "evaluation.steps=2", "checkpoint.keep=9")
    _, straight = train(pools(1), t1, *options, folder=tmp_path / "straight")
    for tensor, stop in ((1, 2), (2, 4), (1, 6)):
        layout = (f"parallel.tensor={tensor}", f"stop.step_multiple={stop}")
        _, record = train(pools(tensor), t1, *options, *layout, folder=tmp_path / "run")
    assert losses(record) == pytest.approx(losses(straight), abs=1e-6)
    assert record.validations[-1].loss == pytest.approx(straight.validations[-1].loss, abs=1e-6)
    tables = {step: dict(shards.read_whole(tmp_path / f"run/checkpoints/step-000000{step}", "weights.embedding.word"))
              for step in (2, 4, 6)}  # fmt: skip
    rows = {step: table["weights.embedding.word.weight"].shape[0] for step, table in tables.items()}
    assert rows == {2: 384, 4: 512, 6: 384}


def test_a05_the_real_rows_are_the_same_bits_on_load(pools, t1, tmp_path):
    options = ("model.vocab_multiple=megatron", *QUIET, "length.steps=2")
    train(pools(1), t1, *options, folder=tmp_path / "run")
    whole = dict(shards.read_whole(newest(tmp_path / "run")))
    for name in ("weights", "mean", "variance"):
        name = f"{name}.embedding.word.weight"
        wider = {name: torch.full((512, 64), 7.0)}
        shards.load(newest(tmp_path / "run"), wider, vocab_size=257)
        assert torch.equal(wider[name][:384], whole[name]) and (wider[name][384:] == 7).all()
        narrower = {name: torch.zeros(260, 64)}
        shards.load(newest(tmp_path / "run"), narrower, vocab_size=257)
        assert torch.equal(narrower[name], whole[name][:260])


def test_a05_another_vocabulary_is_refused_with_both_sizes(pools, t1, tmp_path):
    train(pools(1), t1, *QUIET, "length.steps=1", folder=tmp_path / "run")
    with pytest.raises(AssertionError, match=r"C003.*vocab_size is 257 there, 259 here"):
        train(pools(1), t1, *QUIET, "model.vocab_size=259", folder=tmp_path / "run")


# --- what may change -------------------------------------------------------------------------------------------------


@pytest.fixture
def begun(pools, t1, tmp_path):
    """A run of two steps; called with options it goes on to the fourth."""
    folder = tmp_path / "run"
    train(pools(1), t1, *QUIET, "length.steps=4", "stop.step_multiple=2", folder=folder)
    return lambda *options: train(pools(1), t1, *QUIET, "length.steps=4", *options, folder=folder)[1]


def test_free_changes_are_listed(begun):
    record = begun("learning_rate.peak=1e-4", "batch.micro_batch_size=4")
    (event,) = [e for e in record.events if e.what == "changed"]
    assert event.detail["learning_rate.peak"] == [1e-3, 1e-4]
    assert event.detail["batch.micro_batch_size"] == [2, 4]
    assert len(record.steps) == 4


@pytest.mark.parametrize(
    ("option", "key"),
    [("seed=7", "seed"), ("model.activation=relu", "model.activation"), ("data.split='100,0,0'", "data.train"),
     ("model.attention_dropout=0.1", "model.attention_dropout"),
     ("data.mask_loss_at_eod=true", "data.mask_loss_at_eod")],
)  # fmt: skip
def test_another_network_or_order_needs_a_word(begun, option, key):
    with pytest.raises(AssertionError, match=rf"C007.*{key}"):
        begun(option)
    assert len(begun(option, f'checkpoint.accept=["{key}"]').steps) == 4


def test_other_data_under_the_same_name_is_noticed(begun, t1):
    """What counts is which tokens stand where the last batch was, not what the files are called."""
    prefix = load(t1).run.data.train[0]
    with open(f"{prefix}.bin", "r+b") as file:
        content = bytearray(file.read())
        kept = bytes(content)
        content[0::2] = bytes(byte ^ 1 for byte in content[0::2])
        file.seek(0)
        file.write(content)
    try:
        with pytest.raises(AssertionError, match=r"C007.*data.train"):
            begun()
    finally:
        with open(f"{prefix}.bin", "wb") as file:
            file.write(kept)
    assert len(begun().steps) == 4


def test_another_size_cannot_be_accepted(begun):
    with pytest.raises(AssertionError, match=r"C003.*num_layers is 4 there, 2 here"):
        begun("model.num_layers=2", 'checkpoint.accept=["model.num_layers"]')


# --- which checkpoint ------------------------------------------------------------------------------------------------


def test_d02_a_damaged_newest_is_passed_over_and_said(pools, t1, tmp_path):
    options = (*QUIET, "checkpoint.every_steps=2")
    train(pools(2), t1, *options, "stop.step_multiple=4", folder=tmp_path / "run")
    broken = newest(tmp_path / "run")
    shard = broken / "shard-00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 255
    shard.write_bytes(content)
    _, record = train(pools(2), t1, *options, folder=tmp_path / "run")
    assert [e.step for e in record.events if e.what == "start"] == [0, 2]
    (passed,) = [e for e in record.events if e.what == "passed_over"]
    assert passed.detail["checkpoint"] == str(broken) and shard.name in passed.detail["why"]
    assert len(record.steps) == 6 and newest(tmp_path / "run").name == "step-0000006"
    shard.write_bytes(content)  # step 4 was saved again by the second run; break that one too
    with pytest.raises(AssertionError, match=rf"C001.*{shard.name}"):
        train(pools(2), t1, *options, f"checkpoint.load='{broken}'", folder=tmp_path / "other")


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(pools, t1, tmp_path):
    train(pools(1), t1, *QUIET, "length.steps=1", folder=tmp_path / "run")
    (newest(tmp_path / "run") / "state.json").write_text("{}")
    with pytest.raises(AssertionError, match=r"C002.*step-0000001 was passed over: state.json has 2 bytes"):
        train(pools(1), t1, *QUIET, folder=tmp_path / "run")
    _, other = train(pools(1), t1, *QUIET, "length.steps=1", folder=tmp_path / "other")
    load = f"checkpoint.load='{tmp_path / 'other'}'"
    _, record = train(pools(1), t1, *QUIET, load, "length.steps=2", folder=tmp_path / "run")
    assert [s.loss for s in record.steps][-1] and losses(record)[0] == losses(other)[0]


def test_a_run_that_went_back_stays_on_its_new_way(pools, t1, tmp_path):
    options, folder = (*QUIET, "checkpoint.every_steps=2", "checkpoint.keep=9"), tmp_path / "run"
    train(pools(1), t1, *options, folder=folder)
    second = folder / "checkpoints" / "step-0000002"
    back = ("learning_rate.peak=5e-3", f"checkpoint.load='{second}'", "stop.step_multiple=4")
    _, there = train(pools(1), t1, *options, *back, folder=folder)
    _, on = train(pools(1), t1, *options, "learning_rate.peak=5e-3", folder=folder)
    assert [e.step for e in on.events if e.what == "start"] == [0, 2, 4]
    assert losses(on)[:4] == losses(there)[:4]


# --- saving behind the training --------------------------------------------------------------------------------------


def test_saving_behind_is_recorded(pools, t1, tmp_path):
    for world, layout in ((1, ()), (2, ("parallel.zero=3",))):
        options = (*QUIET, *layout, "checkpoint.every_steps=2", "checkpoint.keep=9")
        _, record = train(pools(world), t1, *options, folder=tmp_path / str(world))
        assert [c.step for c in record.checkpoints] == [2, 4, 6]
        for saved in record.checkpoints:
            assert 0 < saved.blocked_seconds < saved.seconds
            assert saved.bytes > 3 * 4 * 228_736
            assert len(list((tmp_path / str(world)).glob("checkpoints/step-0000002/shard-*"))) == world


@pytest.mark.parametrize(
    ("overlap", "order"),
    [(1, "step 2, saved 2, step 3"), (2, "step 3, saved 2, step 4"), (9, "step 3, step 4, saved 2, saved 4")],
)
def test_a_step_counts_only_while_no_more_than_promised_can_be_lost(pools, t1, tmp_path, overlap, order):
    """However slow the disk, a kill loses at most every_steps + overlap_steps - 1 of the recorded steps. Two saves are
    never in flight."""
    for spans in pools(2).run(_with_a_slow_disk, t1, False, overlap):
        assert len(spans) == 2 and spans[0][1] <= spans[1][0]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    said = {"step": "step", "checkpoint": "saved"}
    assert order in ", ".join(f"{said[line['kind']]} {line['step']}" for line in lines if line["kind"] in said)
    save = next(line for line in lines if line["kind"] == "checkpoint")
    assert 0.25 < save["blocked_seconds"] <= save["seconds"]


def test_a_run_that_fails_leaves_the_save_it_had_begun(pools, t1, tmp_path):
    with pytest.raises(AssertionError, match="D012"):
        pools(1).run(_with_a_slow_disk, t1, True)
    assert newest(tmp_path / "run").name == "step-0000002"


def _with_a_slow_disk(path, fails=False, overlap=9):
    """When each file was written, where writing takes half a second longer than it does; `fails` in step 3."""
    true, spans = shards.write, []

    def spoil(loop):
        read = loop.splits["train"].order.read

        def spoiled(number, out):
            if number >= 16 and fails:
                raise error("D012", "data.train", asked=number, held=16)
            read(number, out)

        loop.splits["train"].order.read = spoiled

    def slow(*arguments):
        began = time.monotonic()
        time.sleep(0.5)
        file = true(*arguments)
        spans.append((began, time.monotonic()))
        return file

    shards.write = slow
    try:
        options = ("checkpoint.every_steps=2", f"checkpoint.overlap_steps={overlap}", "length.steps=4")
        on_rank(path, (*QUIET, *options), spoil)
    finally:
        shards.write = true
    return spans


def test_pytorch_reads_the_files_too(pools, t1, tmp_path):
    """Written by sharded ranks, read by torch's own reader: every tensor is the same."""
    train(pools(4), t1, *QUIET, "parallel.tensor=2", "parallel.zero=3", "length.steps=1", folder=tmp_path / "run")
    path = newest(tmp_path / "run")
    whole = dict(shards.read_whole(path))
    theirs = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(theirs, storage_reader=dcp.HuggingFaceStorageReader(str(path)), no_dist=True)
    assert all(torch.equal(theirs[name], tensor) for name, tensor in whole.items()) and len(whole) == 156


def test_ranks_that_hold_one_block_write_it_once(pools, t1):
    owned = pools(4).run(_owned, t1)
    every = [block for blocks in owned for block in blocks]
    assert len(every) == len(set(every)) and len({name for name, _ in every}) == 52
    assert all(owned), "some rank has nothing to write"


def _owned(path):
    from steelyard.parallel import mesh
    from steelyard.train.engine import Engine

    run = load(path, ["parallel.tensor=2", "parallel.zero=0"], dist.get_world_size()).run
    where = mesh.build(run.parallel, torch.device("cpu"))
    return [(b.name, b.offsets) for b in shards.owned(Engine(run, where).tensors(False), where)]
