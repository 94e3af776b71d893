"""A run checks its own prediction of memory after the first step, and a resumed one needs no more (field reports C02,
C03)."""

import subprocess
import sys

import pytest

from steelyard.predict import parameters
from steelyard.record.read import read_folder
from steelyard.spec import load


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_says_predicted_against_measured(t1, tmp_path, world):
    """Live tensors are the states and the few bytes beside them: the loader's batch, losses, Adam's counts. In
    processes of its own: ranks that other tests have used hold tensors of theirs."""
    command = [sys.executable, "-m", "steelyard.cli.main", "train", str(t1), "--world", str(world)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    record = read_folder(tmp_path / "run")
    lines = [event for event in record.events if event.what == "memory"]
    assert len(lines) == 1 and lines[0].step == 1
    found = lines[0].detail["checked"]["tensors"]
    assert abs(found["error"]) < 0.1
    measured = lines[0].detail["measured"]
    assert measured["rss"] > measured["tensors"] == found["measured"]


def peak_of(path, folder, steps):
    """Peak resident bytes of a training process of its own, by its record."""
    command = [sys.executable, "-m", "steelyard.cli.main", "train", str(path), f"record.folder={folder}",
               f"length.steps={steps}", "evaluation.every_steps=0", "evaluation.steps=0"]  # fmt: skip
    wide = [
        "model.hidden_size=512",
        "model.num_attention_heads=8",
        "model.vocab_size=8192",
        "batch.global_batch_size=2",
    ]
    done = subprocess.run([*command, *wide], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return max(step.memory["rss_peak"] for step in read_folder(folder).steps[-3:])


@pytest.mark.slow
def test_resuming_needs_no_second_copy(t1, tmp_path):
    """Field report C02: three steps after a resume peak within one copy of the weights of three fresh ones."""
    folder = tmp_path / "run"
    fresh = peak_of(t1, folder, 3)
    resumed = peak_of(t1, folder, 6)
    run = load(t1, ["model.hidden_size=512", "model.num_attention_heads=8", "model.vocab_size=8192"]).run
    weights = 4 * parameters.unique(run.model)
    assert weights > 60e6
    assert resumed < fresh + weights
