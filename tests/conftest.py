"""What all tests share."""

import os

import pytest

os.environ.setdefault("COLUMNS", "120")


@pytest.fixture
def run_file(tmp_path):
    """Write a run file: run_file(text) -> its path."""

    def write(text: str):
        path = tmp_path / "run.toml"
        path.write_text(text)
        return path

    return write
