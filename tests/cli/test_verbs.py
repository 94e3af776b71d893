"""Verbs as a newcomer runs them: demo, generate, doctor, and the page of a run."""

import re
import subprocess
import sys

import pytest

from steelyard.report import chart, html
from tests.train.conftest import corpus, t1  # noqa: F401  # fixtures
from tests.train.running import train


def steelyard(*arguments, **options):
    command = [sys.executable, "-m", "steelyard.cli.main", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    return folder, steelyard("demo", "--folder", folder / "demo", "--steps", "3")


def test_demo_says_what_it_did(demo):
    folder, done = demo
    assert done.returncode == 0, done.stderr
    for expected in ("parameters", "bits a byte: this model", "bits a byte: lzma", "validation loss", "report.html"):
        assert expected in done.stdout
    bits = {name: float(value) for value, name in re.findall(r"([\d.]+)  bits a byte: (\w+)", done.stdout)}
    assert 1 < bits["lzma"] < bits["entropy"] < 6
    assert (folder / "demo" / "run" / "report.html").stat().st_size > 10_000


def test_generate_continues_a_checkpoint_and_repeats_itself(demo):
    run = demo[0] / "demo" / "run"
    first, second = (steelyard("generate", run, "--prompt", "import ", "--tokens", 12).stdout for _ in range(2))
    assert first == second and first.startswith("import ") and len(first) > len("import ")
    assert steelyard("generate", demo[0]).returncode == 2


def test_doctor_tests_the_ranks():
    done = steelyard("doctor")
    assert "ranks agree on a sum" in done.stdout or "one GPU" in done.stdout
    for name in ("torch", "fp32 product", "threads"):
        assert name in done.stdout
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr


def test_the_page_lays_predicted_beside_measured_and_escapes(pools, t1, tmp_path):  # noqa: F811
    _, record = train(pools(1), t1, "name=page", folder=tmp_path / "run")
    rows = {row[0]: row[1:] for row in html.predicted_and_measured(record)}
    assert rows["parameters"] == ("228,736", "228,736") and rows["steps"] == ("6", "6")
    page = html.write(tmp_path / "run", [("<script>alert(1)</script>", "a & b")]).read_text()
    assert "<script" not in page and "&lt;script&gt;" in page and "a &amp; b" in page
    assert "http://" not in page and "https://" not in page and page.count("<svg") == 4
    assert page.index("predicted") < page.index("<svg")


def test_charts_survive_what_is_not_a_number():
    nothing = chart.chart("x", "step", [chart.Line("a", [1, 2], [None, float("nan")])])
    assert "no data" in nothing
    gap = chart.chart("x", "step", [chart.Line("a", [1, 2, 3, 4], [1.0, None, 2.0, 3.0])])
    assert gap.count("<polyline") == 2
    assert "<svg" in chart.chart("x", "step", [chart.Line("a", [1], [0.0])], logarithmic=False)
