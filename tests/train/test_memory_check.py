"""A run checks its own prediction of memory after the first step (field report C03)."""

import pytest

from tests.train.running import train


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_says_predicted_against_measured(pools, t1, tmp_path, world):
    """Live tensors are the states and the few bytes beside them: the loader's batch, losses, Adam's counts."""
    _, record = train(pools(world), t1, folder=tmp_path / "run")
    lines = [event for event in record.events if event.what == "memory"]
    assert len(lines) == 1 and lines[0].step == 1
    found = lines[0].detail["checked"]["tensors"]
    assert abs(found["error"]) < 0.1
    measured = lines[0].detail["measured"]
    assert measured["rss"] > measured["tensors"] == found["measured"]
