"""Mutated logs: whatever happens to a log, it is read or refused in words; never a traceback, never a hang."""

# ruff: noqa: E501  (log lines are as long as they are)
import json
import random
import re
import time
import warnings

import pytest

from steelyard.compare.verdict import as_json, compare
from steelyard.frameworks import detect
from steelyard.report import comparison
from steelyard.spec import UserError
from tests.compare.conftest import LIBAI, MEGATRON
from tests.frameworks.test_logs import MEGATRON as ERAS
from tests.frameworks.test_logs import OTHERS

BLOCKS = [path.read_text(encoding="utf-8") for path in (LIBAI, MEGATRON)]
LOGS = MEGATRON.parents[1]
GOLDEN = [
    path.read_text(encoding="utf-8")
    for path in sorted(LOGS.rglob("*"))
    if path.suffix in (".log", ".txt", ".jsonl") and path.parent.name != "seed" and "LibAI" not in path.parent.name
]
SEEDS = [*BLOCKS, *GOLDEN, *(text for text, _ in ERAS.values()), *(text for text, _, _ in OTHERS.values())]
NASTY = ["\x00", "\x1b[31m", "\x1b]0;", "\r", "|", "nan", "1e999", "-" * 60 + " arguments " + "-" * 60, "９", "ß", "[" * 300,
         "{'" * 200, "(", "<script>", "9" * 400, "iteration 1/1 |" * 50, " ... " * 100, "\u202e", "%s%n", "None"]  # fmt: skip
NUMBERS = ["0", "-1", "nan", "inf", "1e308", "9" * 14, "0.5"]
SECONDS = 2.0  # of processor time, for a log of a few kilobytes


def mutated(chance: random.Random) -> str:
    """A log with up to eight wounds."""
    text = chance.choice(SEEDS)
    if len(text) < 2000:
        text = "\n".join([text] * chance.randint(1, 4))
    for _ in range(chance.randint(1, 8)):
        a, b = sorted(chance.randrange(len(text) + 1) for _ in range(2))
        b = min(b, a + chance.choice([1, 5, 80, 400]))
        wound = chance.randrange(8)
        if wound == 0:
            text = text[:a] + text[b:]
        elif wound == 1:
            text = text[:a] + chance.choice(NASTY) + text[a:]
        elif wound == 2:
            text = text[:a] + text[a:b] * chance.randint(2, 5) + text[b:]
        elif wound == 3:
            text = text[:a] + "".join(chance.sample(text[a:b], b - a)) + text[b:]
        elif wound == 4:
            text = text[:a] + "\n" + text[a:]
        elif wound == 5:
            text = text[:a] + "".join(chr(chance.randrange(1, 0x2FF)) for _ in range(chance.randint(1, 20))) + text[a:]
        elif wound == 6:
            figures = list(re.finditer(r"(?<=[ :=(\[])-?\d[\d.e+-]*", text[a : a + 2000]))
            if figures:
                figure = chance.choice(figures)
                text = text[: a + figure.start()] + chance.choice(NUMBERS) + text[a + figure.end() :]
        else:
            other = chance.choice(SEEDS)
            text = text[:a] + other[: chance.randrange(1, 400)] + text[a:]
    return text


def survive(path, chance: random.Random) -> None:
    path.write_bytes(mutated(chance).encode("utf-8", errors="surrogatepass"))
    started = time.process_time()
    warnings.simplefilter("error")  # nor a word on the terminal
    try:
        record = detect.read(path)
    except UserError as failure:
        assert failure.problems
    else:
        pair = compare([record, detect.read(MEGATRON)])[0]
        as_json(pair)
        shown = comparison.terminal(pair)
        assert all(c.isprintable() or c == "\n" for c in shown)
        assert len(shown.splitlines()) <= 40
        assert "<script" not in comparison.page([pair])
    assert time.process_time() - started < SECONDS


@pytest.mark.parametrize("seed", range(10))
def test_mutated_logs(tmp_path, seed):
    chance = random.Random(seed)
    for _ in range(50):
        survive(tmp_path / "mutated.log", chance)


@pytest.mark.slow
def test_a_hundred_thousand_mutated_logs(tmp_path):
    chance = random.Random(2026)
    for _ in range(100_000):
        survive(tmp_path / "mutated.log", chance)


def test_a_model_of_thousands_of_layers(tmp_path):
    """What a damaged figure says; counting it under every layout took a quarter of a minute."""
    text = next(seed for seed in SEEDS if "n_layers=" in seed and "total parameters" in seed)
    before, mesh, after = text.partition("Building 2-D device mesh")
    text = before.replace("'data_parallel_", "\n'", 1) + after.partition("\n")[2]  # no word of the layout
    path = tmp_path / "deep.log"
    path.write_text(re.sub(r"n_layers=\d+", "n_layers=8888", text))
    assert mesh
    started = time.process_time()
    assert compare([detect.read(path), detect.read(MEGATRON)])
    assert time.process_time() - started < 2 * SECONDS


def test_endless_lines(tmp_path):
    """Lines that would take a backtracking pattern for ever."""
    path = tmp_path / "endless.log"
    started = time.process_time()
    for part in ("iteration 1/2 |" + " a: 1 |" * 40_000, "0: " * 200_000, "|" * 500_000, "[" * 500_000, "step:  " * 100_000,
                 "{'a': " * 60_000, " ..." * 120_000, "1" * 600_000, "using world size: 1" + ", a" * 100_000, "iteration 1/1 |" * 30_000, "{'a" * 100_000,
                 f"{'-' * 9} arguments {'-' * 9}\n" + "a  " * 90_000, f"{'-' * 9} arguments {'-' * 9}\n a ." + "." * 250_000,
                 "[batch=1/2]:\n" + " Train a/b: 1" * 20_000, "Running with configs: {\n" + "[" * 200_000):  # fmt: skip
        path.write_text(
            f"{part}\n iteration        1/       2 | consumed samples: 8 | elapsed time per iteration (ms): 1.0 | lm loss: 1.0E+00 |\n"
        )
        assert detect.read(path).steps[-1].loss == 1.0, part[:20]
    assert time.process_time() - started < 20


def test_more_ranks_than_any_cluster_has_are_unknown(tmp_path):
    """A list of stages as long would be made of them."""
    path = tmp_path / "many.log"
    text = (LOGS / "52b-on.out").read_text("utf-8")
    many, count = re.subn(r"(pipeline_model_parallel_size \.+) \d+", rf"\1 {10**14}", text)
    path.write_text(many)
    assert count and detect.read(path).config["parallel"].get("pipeline") != 10**14


@pytest.mark.parametrize("number", [2**63, -(10**400), [1, 10**400]])
def test_a_number_beyond_any_setting_is_unknown(number):
    """Found by the hundred thousand: a torn list of arguments with a number of 700 digits."""
    one = json.dumps({"framework": "megatron", "config": {"model": {"seq_length": number, "num_layers": 2}}})
    pair = compare([detect.read(one), detect.read(MEGATRON)])[0]
    assert "model.seq_length" in {entry["knob"] for entry in pair.unknown}


def test_a_size_beyond_any_memory_is_refused():
    with pytest.raises(UserError, match="R002"):
        detect.read(json.dumps({"memory": {"device_bytes": 10**400}}))
