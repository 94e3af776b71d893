"""Reads logs and compares them, as the verb does."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from steelyard.cli.main import app
from steelyard.compare.verdict import as_json, compare
from steelyard.frameworks import detect

GOLDEN = Path(__file__).parents[1] / "golden" / "logs"
SEED = GOLDEN / "seed"
LIBAI = next(SEED.glob("LibAI*")) / "output.log"
MEGATRON = next(SEED.glob("megatron_lm*"))


@pytest.fixture
def verb():
    """(exit code, output) of `steelyard compare`."""

    def run(*arguments):
        done = CliRunner().invoke(app, ["compare", *map(str, arguments)], catch_exceptions=False)
        return done.exit_code, done.stdout

    return run


def compared(*paths):
    """The JSON contract of a pair."""
    return json.loads(json.dumps(as_json(compare([detect.read(path) for path in paths])[0]), allow_nan=False))


def typed(framework, memory_mib=None, samples_per_second=None, config=None, **more):
    """A one-line record as a person writes it."""
    record = {"framework": framework, "config": config or {}, **more}
    if memory_mib is not None:
        record["memory"] = {"device_bytes": memory_mib * 2**20}
    if samples_per_second is not None:
        record["speed"] = {"samples_per_second": samples_per_second}
    return json.dumps(record)
