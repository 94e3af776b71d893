"""Finds every framework that says how it counts: the folders that have a `counts.py`."""

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Protocol

from steelyard.frameworks.views import Printed, View
from steelyard.spec.errors import did_you_mean, error
from steelyard.spec.run import Run


class Counts(Protocol):
    """The face of a `counts.py`."""

    NAME: str

    def printed(self, run: Run) -> tuple[Printed, ...]:
        """What it prints about parameters."""

    def views(self, run: Run) -> tuple[View, ...]:
        """Its definitions of FLOPs per step."""


@cache
def frameworks() -> dict[str, Counts]:
    """Folder name -> its counts, in alphabetical order."""
    folders = sorted(path.parent.name for path in Path(__file__).parent.glob("*/counts.py"))
    return {name: import_module(f"steelyard.frameworks.{name}.counts") for name in folders}


def find(name: str) -> Counts:
    """The framework of that name, with - for _ allowed. Raises UserError P002 for one that is not known."""
    key = name.lower().replace("-", "_").replace(".", "_")
    if key not in frameworks():
        raise error("P002", place="--as", name=name, suggestion=did_you_mean(key, list(frameworks())))
    return frameworks()[key]


def printed(run: Run) -> dict[str, Printed]:
    """Everything any framework prints about this run's parameters, by key."""
    return {entry.key: entry for counts in frameworks().values() for entry in counts.printed(run)}


def views(run: Run) -> dict[str, View]:
    """Every definition of this run's FLOPs per step, by key."""
    return {entry.key: entry for counts in frameworks().values() for entry in counts.views(run)}
