"""What is written is read back; what was abandoned or cut does not count."""

import json
import math

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from steelyard.record.read import read_folder, read_line
from steelyard.record.schema import Checkpoint, Event, Step, Validation
from steelyard.record.writer import RunFolder
from steelyard.spec import UserError, resolve, write


def step(number, loss=2.0, **fields):
    values = dict(
        step=number, samples=8 * number, tokens=512 * number, loss=loss, grad_norm=1.0, learning_rate=1e-3,
        loss_scale=None, skipped=0, nan=0, seconds=0.5, tokens_per_second=1024.0, memory={"rss": 10}, batch_size=8,
    )  # fmt: skip
    return Step(**{**values, **fields})


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / "run", tensorboard=True)
    folder.write_text("run.toml", write.dumps(resolve({}).run))
    folder.write_json("environment.json", {"schema": 1})
    yield folder
    folder.close()


def test_round_trip(folder):
    lines = [
        Event(0, "start"), *[step(n) for n in range(1, 6)], Validation(5, 40, "validation", 2.5, 1024, 0.1),
        Checkpoint(5, "checkpoints/step-5", 100, 0.2, 0.1),
    ]  # fmt: skip
    for line in lines:
        folder.append(line)
    record = read_folder(folder.path)
    assert record.steps == lines[1:6] and record.validations == [lines[6]] and record.checkpoints == [lines[7]]
    assert record.memory == {"rss": 10} and record.config["model"]["num_layers"] == 12
    assert record.speed == {"seconds_per_step": 0.5, "tokens_per_second": 1024.0, "samples_per_second": 16.0}


def test_a_number_json_cannot_say_is_null_and_counted(folder):
    folder.append(step(1, loss=math.nan, grad_norm=math.inf, nan=1))
    raw = (folder.path / "metrics.jsonl").read_text()
    assert json.loads(raw, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))["loss"] is None
    assert read_folder(folder.path).steps[0].nan == 1


def test_losses_keep_full_precision(folder):
    folder.append(step(1, loss=0.1 + 0.2))
    assert read_folder(folder.path).steps[0].loss == 0.1 + 0.2


def test_a_restart_takes_back_the_steps_after_its_checkpoint(folder):
    for line in [Event(0, "start"), step(1), step(2), step(3), Event(2, "start"), step(3, loss=9.0)]:
        folder.append(line)
    assert [(s.step, s.loss) for s in read_folder(folder.path).steps] == [(1, 2.0), (2, 2.0), (3, 9.0)]


def test_a_cut_last_line_is_dropped_and_overwritten(folder):
    folder.append(step(1))
    folder.close()
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "ste')
    assert len(read_folder(folder.path).steps) == 1
    again = RunFolder(folder.path)
    again.append(step(2))
    again.close()
    assert [s.step for s in read_folder(folder.path).steps] == [1, 2]


@pytest.mark.parametrize("bad", ["{]", "[1]", '{"kind": "step"}', '{"kind": "tea"}', "null", "[" * 5000])
def test_a_bad_line_is_an_error_at_its_place(folder, bad):
    (folder.path / "metrics.jsonl").write_text(bad + '\n{"kind": "event", "step": 1, "what": "x"}\n')
    with pytest.raises(UserError) as failure:
        read_folder(folder.path)
    assert failure.value.problems[0].code == "R002" and failure.value.problems[0].place.endswith("metrics.jsonl:1")


def test_a_newer_schema_and_a_stranger_are_refused(folder, tmp_path):
    folder.write_json("environment.json", {"schema": 99})
    for path, code in [(folder.path, "R003"), (tmp_path, "R001")]:
        with pytest.raises(UserError) as failure:
            read_folder(path)
        assert failure.value.problems[0].code == code


def test_one_run_at_a_time(folder):
    with pytest.raises(UserError) as failure:
        RunFolder(folder.path)
    assert failure.value.problems[0].code == "R004"


def test_tensorboard_has_megatrons_names(folder):
    folder.append(step(1, loss_scale=4096.0, timers={"forward-backward": 0.4}))
    folder.append(Validation(1, 8, "validation", 2.0, 512, 0.1))
    folder.close()
    events = EventAccumulator(str(folder.path / "tensorboard"))
    events.Reload()
    names = set(events.Tags()["scalars"])
    assert {
        "lm loss", "learning-rate", "grad-norm", "batch-size", "loss-scale", "iteration-time", "lm loss validation",
        "lm loss validation ppl", "lm loss vs samples", "lm loss vs tokens", "forward-backward-time",
    } <= names  # fmt: skip
    assert events.Scalars("lm loss vs samples")[0].step == 8
    assert events.Scalars("lm loss validation ppl")[0].value == pytest.approx(math.exp(2.0))


def test_the_smallest_record():
    record = read_line(
        '{"framework": "libai", "config": {"batch": {"micro_batch_size": 2}}, "memory": {"device_bytes": 123}, '
        '"speed": {"samples_per_second": 16.5}}',
        "typed",
    )
    assert (record.framework, record.memory, record.speed) == ("libai", {"device": 123}, {"samples_per_second": 16.5})


@pytest.mark.parametrize("text", ["", "[]", "{", '{"config": 3}', '{"memory": {"device_bytes": "x"}}', '{"speed": 3}'])
def test_a_bad_smallest_record_is_a_user_error(text):
    with pytest.raises(UserError):
        read_line(text, "typed")
