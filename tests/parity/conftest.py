"""One pool of ranks per world size, for the whole session."""

import pytest

from tests.parity.pool import Pool


@pytest.fixture(scope="session")
def pools():
    made = {}

    def pool(world):
        if world not in made:
            made[world] = Pool(world)
        return made[world]

    yield pool
    for one in made.values():
        one.close()
