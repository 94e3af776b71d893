"""Scripts of the shapes that people have, written for these tests, and how to translate them."""

from pathlib import Path

import pytest

from steelyard.spec import resolve
from steelyard.translate import into

SCRIPTS = Path(__file__).parent / "scripts"


class Translated:
    """A translation and the run it comes to."""

    def __init__(self, found, overrides=(), world=None):
        self.found = found
        assert not found.problems, [p.render() for p in found.problems]
        self.run = resolve(dict(found.values), {}, list(overrides), world or found.world).run

    def row(self, flag):
        (row,) = [row for row in self.found.rows if row.flag == flag]
        return row

    def fates(self):
        return {
            fate: [r.flag for r in self.found.rows if r.fate == fate]
            for fate in ("translated", "irrelevant", "refused")
        }


@pytest.fixture
def script():
    def translate(name, *arguments, world=None, overrides=(), **environment):
        return Translated(into.read(SCRIPTS / name, arguments, environment), overrides, world)

    return translate


@pytest.fixture
def text(tmp_path):
    """A script given as text."""

    def translate(body, *arguments, name="run.sh", **environment):
        path = tmp_path / name
        path.write_text(body)
        return into.read(path, arguments, environment)

    return translate
