"""`steelyard checkpoint` as a user types it; in a process that has loaded torch already."""

import json
import shutil
from pathlib import Path

import pytest

from steelyard.checkpoint import store
from tests.train.conftest import T1
from tests.train.running import train


def typed(*arguments):
    """On a rank: (exit code, output) of the command, with user errors printed as `steelyard` prints them."""
    from typer.testing import CliRunner

    from steelyard.cli.main import app
    from steelyard.spec import UserError

    done = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
    if isinstance(done.exception, UserError):
        return 2, str(done.exception)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


@pytest.fixture
def steelyard(pools):
    return lambda *arguments: pools(1).run(typed, *arguments)[0]


@pytest.fixture(scope="module")
def saved(pools, corpus, tmp_path_factory):
    """Two checkpoints of two ranks: steps 2 and 4."""
    folder = tmp_path_factory.mktemp("saved")
    path = folder / "t1.toml"
    path.write_text(T1.format(data=corpus, folder=folder))
    options = ("evaluation.steps=0", "length.steps=4", "checkpoint.every_steps=2", "parallel.zero=3")
    train(pools(2), path, *options)
    return folder / "run"


@pytest.fixture
def run(saved, tmp_path):
    """A copy of it, which a test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "run"))


def test_inspect_says_what_is_in_it(steelyard, run):
    code, text = steelyard("inspect", run)
    assert code == 0
    for expected in ("step-0000004: t1, 228,736 parameters in float32", "4 steps, 32 samples, 2,048 tokens, 4 updates",
                     "2 ranks: tensor 1 x pipeline 1 x data 2; zero 3", "weights   52 tensors, 228,736 numbers",
                     "shard-00001.safetensors", "also "):  # fmt: skip
        assert expected in text
    code, text = steelyard("inspect", run / "checkpoints" / "step-0000002", "--json")
    found = json.loads(text)
    assert found["steps"] == 2 and found["groups"]["mean"]["numel"] == 228_736 and found["others"] == []
    assert found["bytes"] == sum(found["files"].values())


def test_verify_reads_every_byte(steelyard, run):
    code, text = steelyard("verify", run)
    assert code == 0 and text.count("all as they were saved") == 2
    shard = run / "checkpoints" / "step-0000002" / "shard-00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[100] ^= 1
    shard.write_bytes(content)
    code, text = steelyard("verify", run, "--json")
    assert code == 1 and [shard.name in one["problem"] for one in json.loads(text)] == [False, True]
    assert steelyard("verify", run / "checkpoints" / "step-0000009")[0] == 2
    assert steelyard("verify", run / "checkpoints")[0] == 1


def test_diff_lists_settings_state_and_tensors(steelyard, pools, t1, run, tmp_path):
    assert steelyard("diff", run, run)[0] == 0
    code, text = steelyard("diff", run / "checkpoints" / "step-0000002", run)
    assert code == 1 and "state     step: 2 | 4" in text and "0 tensors are bit-equal, 156 are not" in text
    options = ("evaluation.steps=0", "length.steps=4", "learning_rate.peak=1e-3", "parallel.tensor=2")
    train(pools(2), t1, *options, folder=tmp_path / "other")
    code, text = steelyard("diff", run, tmp_path / "other", "--json")
    found = json.loads(text)
    assert {"key": "parallel.tensor", "a": 1, "b": 2} in found["settings"] and found["state"] == []
    assert all(one["largest"] < 1e-5 for one in found["tensors"]), "other layouts round otherwise, no more"


def test_convert_there_and_back(steelyard, run, tmp_path):
    code, text = steelyard("convert", run, tmp_path / "hf", "--to", "huggingface")
    assert code == 0 and "logits of transformers and of this model differ by at most" in text
    code, text = steelyard("convert", tmp_path / "hf", tmp_path / "back", "--from", "huggingface")
    assert code == 0 and "step-0000000" in text and "differ by at most" in text
    assert steelyard("convert", tmp_path / "hf", tmp_path / "back", "--from", "huggingface")[0] == 0, "once more"
    state = store.read_state(store.found(tmp_path / "back"))
    assert state["source"] == str(tmp_path / "hf") and state["state"] == {}


def test_converted_weights_do_not_go_among_a_runs_checkpoints(steelyard, run, tmp_path):
    """There they would be its newest, and the run would begin anew and write over what it had."""
    assert steelyard("convert", run, tmp_path / "hf", "--to", "huggingface")[0] == 0
    code, text = steelyard("convert", tmp_path / "hf", run, "--from", "huggingface")
    assert code == 2 and "error[C013]" in text and "step-0000004" in text
    assert store.found(run).name == "step-0000004"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["RUN", "x", "--to", "gguf"], "C006"), (["RUN", "x"], "C006"), (["RUN", "x", "--from", "megatron"], "C012"),
     (["RUN", "x", "--to", "huggingface", "--from", "megatron"], "C006"), (["x", "y", "--to", "huggingface"], "C002"),
     (["x", "y", "--from", "huggingface"], "F001"), (["RUN", "x", "--to", "huggingface", "--dtype", "fp8"], "S005")],
)  # fmt: skip
def test_what_cannot_be_converted_is_one_error(steelyard, tmp_path, arguments, code):
    given = [str(tmp_path / a) if a in ("RUN", "x", "y") else a for a in arguments]
    status, text = steelyard("convert", *given)
    assert status == 2 and f"error[{code}]" in text
