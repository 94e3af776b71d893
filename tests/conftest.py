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


@pytest.fixture(scope="session")
def pools():
    """pools(world): ranks that stay up for the whole session, one pool per world size."""
    from tests.pool import Pool

    made = {}

    def pool(world):
        if world not in made:
            made[world] = Pool(world)
        return made[world]

    yield pool
    for one in made.values():
        one.close()
