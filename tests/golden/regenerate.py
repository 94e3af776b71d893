"""Writes the golden plans again: `python tests/golden/regenerate.py`, then read the difference before committing it.

Each recipe names its plan's command in a comment; its golden file is what that command prints with --json.
"""

import re
import shlex
from pathlib import Path

from typer.testing import CliRunner

from steelyard.cli.main import app

ROOT = Path(__file__).parents[2]
PLANS = Path(__file__).parent / "plans"


def command(recipe: Path) -> list[str]:
    """The arguments behind `# $ steelyard` in a recipe."""
    found = re.search(r"^# \$ steelyard (plan .*)$", recipe.read_text(), re.MULTILINE)
    if not found:
        raise SystemExit(f"{recipe} does not say how it is planned: add a line `# $ steelyard plan {recipe.name} ...`")
    return [str(ROOT / word) if word.startswith("recipes/") else word for word in shlex.split(found.group(1))]


def printed(recipe: Path) -> str:
    done = CliRunner().invoke(app, [*command(recipe), "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


if __name__ == "__main__":
    PLANS.mkdir(exist_ok=True)
    for recipe in sorted((ROOT / "recipes").glob("*.toml")):
        (PLANS / f"{recipe.stem}.json").write_text(printed(recipe))
