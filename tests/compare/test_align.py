"""Losses on one axis, and what a version of Megatron-LM prints on its second line."""

import pytest

from steelyard.compare.align import losses, side
from steelyard.frameworks import detect

LINE = (
    " [2026-11-30 10:58:5{n}.560210] iteration {n:8d}/       9 | consumed samples: {samples:12d} | elapsed time per "
    "iteration (ms): 198.7 | learning rate: 1.000000E-03 | global batch size: {batch:5d} | lm loss: {loss:.6E} | "
    "number of skipped iterations:   0 | number of nan iterations:   0 |\n"
)


def log(path, losses_, batch=8, stamp=True):
    rows = [LINE.format(n=n, samples=n * batch, batch=batch, loss=loss) for n, loss in losses_]
    path.write_text("".join(row if stamp else row[row.index("iteration") - 1 :] for row in rows))
    return side("A", detect.read(path))


def test_the_second_line_holds_the_first(tmp_path):
    """A resume that looks broken and is not: 6.137612 is printed where the loss is 6.130004."""
    resumed = log(tmp_path / "a.log", [(3, 6.145221), (4, 6.137612), (5, 6.12)])
    whole = log(tmp_path / "b.log", [(3, 6.145221), (4, 6.130004), (5, 6.12)], stamp=False)
    axis, points = losses(resumed, whole)
    assert axis == "samples"
    assert [p.a for p in points] == pytest.approx([6.145221, 6.130003, 6.12])
    assert all(p.relative < 1e-6 for p in points)
    assert resumed.record.steps[1].loss == 6.137612  # the record keeps what is printed


def test_aligned_on_data_not_on_steps(tmp_path):
    small = log(tmp_path / "a.log", [(n, 7 - n / 10) for n in range(1, 9)], batch=8, stamp=False)
    large = log(tmp_path / "b.log", [(n, 7 - n / 5) for n in range(1, 5)], batch=16, stamp=False)
    axis, points = losses(small, large)
    assert axis == "samples"
    assert [(p.at, p.step_a, p.step_b) for p in points] == [(16, 2, 1), (32, 4, 2), (48, 6, 3), (64, 8, 4)]
    assert all(p.relative < 1e-9 for p in points)
