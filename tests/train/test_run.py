"""The first run: what it computes, records and refuses (field reports B01, B04, C05, D03, E03, G03, G04, H02, H03)."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from steelyard.checkpoint import store
from steelyard.plan import sheet
from steelyard.predict import flops
from steelyard.spec import UserError, load, progress
from tests.train.running import losses, train


def test_the_same_seed_gives_the_same_losses_bit_for_bit(pools, t1, tmp_path):
    _, first = train(pools(1), t1, folder=tmp_path / "a")
    _, second = train(pools(1), t1, folder=tmp_path / "b")
    assert losses(first) == losses(second) and len(first.steps) == 6
    assert [s.grad_norm for s in first.steps] == [s.grad_norm for s in second.steps]
    _, other = train(pools(1), t1, "seed=1", folder=tmp_path / "c")
    assert losses(other) != losses(first)


def test_one_and_two_ranks_agree_to_float32_rounding(pools, t1, tmp_path):
    _, one = train(pools(1), t1, folder=tmp_path / "one")
    for zero in (0, 1, 2, 3):
        _, two = train(pools(2), t1, f"parallel.zero={zero}", folder=tmp_path / f"two{zero}")
        assert losses(two) == pytest.approx(losses(one), abs=2e-6)
        assert [s.batch_hash for s in two.steps] == [s.batch_hash for s in one.steps]


def test_the_loss_falls(pools, t1):
    _, record = train(pools(1), t1, "length.steps=60", "learning_rate.peak=3e-3")
    assert losses(record)[0] == pytest.approx(math.log(257), abs=0.1)
    assert losses(record)[-1] < 3.0


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a02_the_live_count_is_the_planned_one_under_every_sharding(pools, t1, zero, tmp_path):
    _, record = train(pools(2), t1, f"parallel.zero={zero}", "length.steps=1", folder=tmp_path / "run")
    (event,) = [e for e in record.events if e.what == "parameters"]
    assert event.detail == {"unique": 228_736, "planned": 228_736}
    assert record.plan["parameters"]["unique"] == 228_736


def test_a_model_that_is_not_the_planned_one_stops_loudly(pools, t1):
    with pytest.raises(AssertionError, match="T001"):
        pools(1).run(_with_a_wrong_plan, t1)


def _with_a_wrong_plan(path):
    from steelyard.predict import parameters
    from tests.train.running import on_rank

    true = parameters.rank_tensors
    parameters.rank_tensors = lambda *arguments: true(*arguments)[1:]
    try:
        on_rank(path, ())
    finally:
        parameters.rank_tensors = true


# --- B01, B04: units and utilization --------------------------------------------------------------------------------


def test_b01_flops_a_second_follow_from_the_step_time(pools, t1):
    _, record = train(pools(1), t1)
    model = load(t1).run.model
    assert flops.model_flops(model, 384, causal=False) == 97_517_568
    for line in record.steps:
        assert line.model_flops_per_second == pytest.approx(8 * flops.model_flops(model, 384) / line.seconds)
        assert line.model_flops_per_second < 1e12


def test_b04_mfu_is_unknown_without_a_peak_and_an_error_above_one(pools, t1, tmp_path):
    _, unknown = train(pools(1), t1, folder=tmp_path / "unknown")
    assert all(s.mfu is None for s in unknown.steps)
    _, known = train(pools(1), t1, "hardware.peak_flops=1e15", folder=tmp_path / "known")
    assert all(0 < s.mfu < 1e-3 for s in known.steps)
    _, impossible = train(pools(1), t1, "hardware.peak_flops=1e6", folder=tmp_path / "impossible")
    assert all(s.mfu is None for s in impossible.steps)
    assert [e.what for e in impossible.events].count("mfu_impossible") == 1


# --- C05: memory by name ---------------------------------------------------------------------------------------------


def test_c05_memory_is_named(pools, t1):
    _, record = train(pools(1), t1)
    assert set(record.steps[0].memory) == {"rss", "rss_peak"}
    assert 0 < record.memory["rss"] <= record.memory["rss_peak"]


# --- D03, D04: resume ------------------------------------------------------------------------------------------------


def test_d03_a_resumed_run_reads_on_where_it_was(pools, t1, tmp_path):
    _, straight = train(pools(1), t1, "length.steps=10", folder=tmp_path / "straight")
    for steps in (3, 6, 10):
        result, parts = train(pools(1), t1, "length.steps=10", f"stop.step_multiple={steps}", folder=tmp_path / "parts")
        assert result.steps == steps
    assert [s.batch_hash for s in parts.steps] == [s.batch_hash for s in straight.steps]
    assert len({s.batch_hash for s in parts.steps}) == 10
    assert losses(parts) == losses(straight)
    starts = [e.step for e in parts.events if e.what == "start"]
    assert starts == [0, 3, 6]


def test_a_run_resumes_on_another_number_of_ranks(pools, t1, tmp_path):
    _, straight = train(pools(1), t1, "length.steps=6", folder=tmp_path / "straight")
    train(pools(2), t1, "length.steps=6", "stop.step_multiple=3", folder=tmp_path / "parts")
    _, parts = train(pools(1), t1, "length.steps=6", folder=tmp_path / "parts")
    assert losses(parts) == pytest.approx(losses(straight), abs=2e-6)


FP16 = ("precision.compute=fp16", "precision.loss_scale={initial_power=40}")


def test_d04_a_checkpoint_before_the_first_update_is_valid(pools, t1, tmp_path):
    small = ("model.num_layers=1", "model.hidden_size=16", "model.seq_length=16", *FP16)
    _, first = train(pools(1), t1, *small, "length.steps=6", "stop.step_multiple=3", folder=tmp_path / "run")
    assert [s.skipped for s in first.steps] == [1, 1, 1] and first.steps[0].loss_scale == 2.0**40
    state = store.read_state(store.find(tmp_path / "run")[0])
    assert state["state"]["updates"] == 0 and state["state"]["skipped"] == 3
    _, resumed = train(pools(1), t1, *small, "length.steps=6", folder=tmp_path / "run")
    _, straight = train(pools(1), t1, *small, "length.steps=6", folder=tmp_path / "straight")
    assert losses(resumed) == losses(straight)
    assert [s.loss_scale for s in resumed.steps] == [s.loss_scale for s in straight.steps]


# --- E03: accumulation -----------------------------------------------------------------------------------------------


def test_e03_the_mean_is_over_valid_tokens_whatever_the_accumulation(pools, t1, tmp_path):
    eod = ("data.mask_loss_at_eod=true", "length.steps=3")
    runs = [
        train(pools(1), t1, *eod, "batch.micro_batch_size=8", folder=tmp_path / "8")[1],
        train(pools(1), t1, *eod, "batch.micro_batch_size=2", folder=tmp_path / "2x4")[1],
        train(pools(2), t1, *eod, "batch.micro_batch_size=2", folder=tmp_path / "2x2x2")[1],
    ]
    for record in runs[1:]:
        assert losses(record) == pytest.approx(losses(runs[0]), rel=1e-6)
        norms = [s.grad_norm for s in record.steps]
        assert norms == pytest.approx([s.grad_norm for s in runs[0].steps], rel=2e-6)
    _, per_micro = train(
        pools(1), t1, *eod, "batch.micro_batch_size=2", "batch.loss_mean=micro_batches", folder=tmp_path / "mm"
    )
    assert per_micro.steps[1].grad_norm != pytest.approx(runs[0].steps[1].grad_norm, rel=1e-4)


# --- G03, G04: counts and rates --------------------------------------------------------------------------------------


def test_g03_every_step_has_its_whole_batch(pools, t1):
    _, record = train(pools(1), t1, "batch.global_batch_size=32", "length.steps=10")
    assert [s.batch_size for s in record.steps] == [32] * 10
    assert record.steps[-1].samples == 320


def test_g04_the_rate_is_a_function_of_samples(pools, t1, tmp_path):
    layouts = [
        (1, ["batch.micro_batch_size=8"]), (1, ["batch.micro_batch_size=2"]), (2, ["batch.micro_batch_size=2"]),
        (2, ["parallel.pipeline=2"]),
    ]  # fmt: skip
    columns = []
    for number, (world, options) in enumerate(layouts):
        _, record = train(pools(world), t1, *options, "length.steps=8", folder=tmp_path / str(number))
        columns.append([s.learning_rate for s in record.steps])
    run = load(t1, ["length.steps=8"]).run
    curve = progress.schedule(run.learning_rate, run.length, run.batch, run.model.seq_length)
    assert columns == [[curve.rate(8 * n, 8) for n in range(8)]] * 4
    table = {row["step"]: row["rate"] for row in sheet.as_json(run)["learning_rate"]}
    assert all(columns[0][step - 1] == rate for step, rate in table.items())


def test_the_seed_ramp_is_walked_and_resumed(pools, t1, tmp_path):
    ramp = ("batch.global_batch_size=16", "batch.micro_batch_size=1", "batch.ramp=[2,2,40]", "length.steps=14")
    _, straight = train(pools(1), t1, *ramp, folder=tmp_path / "straight")
    train(pools(2), t1, *ramp, "stop.step_multiple=5", folder=tmp_path / "parts")
    _, parts = train(pools(1), t1, *ramp, folder=tmp_path / "parts")
    expected = [
        level.global_batch_size
        for level in progress.levels(load(t1, ramp).run.batch, 10_000)
        for _ in range(level.steps)
    ]
    assert [s.batch_size for s in straight.steps] == expected[:14]
    assert [s.batch_size for s in parts.steps] == expected[:14]


# --- H02: shapes and data that do not fit ----------------------------------------------------------------------------


def test_h02_odd_vocabularies_shard(pools, t1, tmp_path):
    options = ("model.vocab_multiple=1", "length.steps=3")
    _, one = train(pools(1), t1, *options, folder=tmp_path / "one")
    _, two = train(pools(2), t1, *options, "parallel.zero=3", folder=tmp_path / "two")
    assert losses(two) == pytest.approx(losses(one), abs=2e-6)


@pytest.mark.parametrize("make", ["nothing", "only bin", "empty folder"])
def test_h02_missing_data_is_an_error_that_names_the_path(t1, tmp_path, make):
    prefix = tmp_path / "gone"
    if make == "only bin":
        (tmp_path / "gone.bin").write_bytes(b"\0\0")
    elif make == "empty folder":
        prefix.mkdir()
    done = steelyard("train", t1, f"data.train=['{prefix}']")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert str(prefix) in done.stderr and "error[D" in done.stderr


def test_ids_beyond_the_vocabulary_are_refused(t1):
    done = steelyard("train", t1, "model.vocab_size=100")
    assert done.returncode == 2 and "error[D004]" in done.stderr and "Traceback" not in done.stderr


def test_what_train_cannot_run_is_refused_by_name(t1):
    for option, code in (
        ("parallel.context=2", "T003"),
        ("engine.framework=megatron", "T003"),
        ("data.train=[]", "T002"),
    ):
        done = steelyard("train", t1, option)
        assert done.returncode == 2 and f"error[{code}]" in done.stderr, done.stderr


# --- H03: what is not finite -----------------------------------------------------------------------------------------


def test_h03_not_finite_is_shown_counted_and_ends_by_the_rule(pools, t1, tmp_path):
    poison = ("learning_rate.peak=1e30", "learning_rate.warmup_steps=0", "optimizer.clip_grad=0.0", "length.steps=30")
    result, record = train(pools(1), t1, *poison, "stop.nan_limit=4", folder=tmp_path / "run")
    assert result.code == 1 and "nan_limit" in result.reason
    bad = [s for s in record.steps if s.nan]
    assert len(bad) == 4 and all(s.skipped for s in bad)
    assert all(s.loss is None or s.grad_norm is None for s in bad)
    for raw in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(raw, parse_constant=lambda name: pytest.fail(name))
    result, record = train(pools(1), t1, *poison, 'stop.on_nan="stop"', folder=tmp_path / "stop")
    assert result.code == 1 and sum(s.nan for s in record.steps) == 1


# --- stopping --------------------------------------------------------------------------------------------------------


def test_stop_conditions(pools, t1, tmp_path):
    (tmp_path / "halt").touch()
    result, _ = train(pools(1), t1, f"stop.file='{tmp_path / 'halt'}'", folder=tmp_path / "file")
    assert result.steps == 0 and "halt" in result.reason and result.code == 0
    result, _ = train(pools(1), t1, "stop.minutes=1e-9", folder=tmp_path / "minutes")
    assert result.steps == 0 and "minutes" in result.reason
    for length, steps in (("{samples=20}", 3), ("{tokens=1024}", 2)):
        result, _ = train(pools(1), t1, f"length={length}", folder=tmp_path / str(steps))
        assert result.steps == steps


def test_only_kept_checkpoints_stay(pools, t1, tmp_path):
    train(pools(1), t1, "checkpoint.every_steps=1", "checkpoint.keep=2", folder=tmp_path / "run")
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["latest", "step-0000005", "step-0000006"]


def test_dry_run_starts_nothing(t1, tmp_path):
    done = steelyard("train", t1, "--dry-run")
    assert done.returncode == 0 and "228,736" in done.stdout and not (tmp_path / "run").exists()


# --- the loss and the masks by hand ----------------------------------------------------------------------------------


def test_the_first_loss_by_hand(pools, t1, corpus):
    """Step 1 in numpy's order of tokens, the model in plain torch calls, no chunk and no micro-batch."""
    from steelyard.data.loader import open_data
    from steelyard.model.gpt import GPT
    from steelyard.model.init import initial

    _, record = train(pools(1), t1, "length.steps=1", "data.mask_loss_at_eod=true")
    run = load(t1, ["length.steps=1", "data.mask_loss_at_eod=true"]).run
    batch = open_data(run, build=True)["train"].batch(0, 8)
    model = GPT(run.model, 384)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial(run.model, name, tuple(parameter.shape), run.seed))
        logits = model(batch.tokens)[..., :257].double().numpy()
    picked = np.take_along_axis(logits, batch.labels.numpy()[..., None], -1)[..., 0]
    token_losses = np.log(np.exp(logits).sum(-1)) - picked
    mask = batch.tokens.numpy() != 256
    assert mask.sum() < mask.size
    assert record.steps[0].loss == pytest.approx((token_losses * mask).sum() / mask.sum(), rel=1e-6)


def steelyard(*arguments):
    command = [sys.executable, "-m", "steelyard.cli.main", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_errors_are_user_errors_all_the_way(t1):
    with pytest.raises(UserError):
        load(t1, ["parallel.tensor=3"], 3)


LAYOUTS = [
    (1, []), (2, ["parallel.zero=3"]), (2, ["parallel.tensor=2"]), (2, ["parallel.pipeline=2"]),
    (2, ["parallel.pipeline=2", "parallel.virtual=2", "parallel.pipeline_schedule=zbv"]),
    (2, ["parallel.tensor=2", "parallel.sequence=true", "recompute.mode=full"]),
]  # fmt: skip


def test_a_run_continues_on_any_layout_in_float64(pools, t1, tmp_path):
    """Saved at one layout, resumed at the next, round all of them: the losses of an unbroken run to 1e-12."""
    double = ("precision.compute=fp64", f"length.steps={2 * len(LAYOUTS)}")
    _, straight = train(pools(1), t1, *double, folder=tmp_path / "straight")
    for number, (world, options) in enumerate(LAYOUTS, 1):
        stop = f"stop.step_multiple={2 * number}"
        _, parts = train(pools(world), t1, *double, *options, stop, folder=tmp_path / "parts")
    assert losses(parts) == pytest.approx(losses(straight), abs=1e-12)
    assert [s.batch_hash for s in parts.steps] == [s.batch_hash for s in straight.steps]
