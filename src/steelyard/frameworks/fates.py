"""What becomes of every flag of another framework: the rows of a translation, for all frameworks alike."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from steelyard.spec.errors import Problem

Fate = Literal["translated", "irrelevant", "refused"]


@dataclass(frozen=True)
class Told:
    """One word of an argument list: `place` is where it is written (`pretrain.sh:12`), `unknown` why its value is not
    known before the script runs, with the `variable` that would settle it. `choices` are the argument lists it may
    stand for."""

    text: str
    place: str = ""
    unknown: str = ""
    variable: str = ""
    choices: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Row:
    """`key` is the run-file key that a translated flag decides, alone or with others; `why` says why an irrelevant one
    decides nothing, and why a refused one is refused."""

    flag: str
    value: str
    fate: Fate
    key: str = ""
    why: str = ""
    place: str = ""


@dataclass(frozen=True)
class Translation:
    """A run of another framework in run-file terms.

    `values` are nested run-file values, with an [engine] section of the framework it came from; `origins` say where
    each key (dotted) was written. `world` is the number of ranks that the launcher starts, None where it does not say.
    `notes` are what a reader should know: traps of the framework, values taken without being certain. `problems` are
    errors that leave no run; `values` is then empty.
    """

    framework: str
    source: str
    values: Mapping[str, Any]
    origins: Mapping[str, str]
    rows: tuple[Row, ...] = ()
    world: int | None = None
    notes: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    launch: Mapping[str, str] = field(default_factory=dict)

    @property
    def refused(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.fate == "refused")


def told(words: Iterable[str], place: str = "") -> list[Told]:
    """Plain words, all written in one place."""
    return [Told(str(word), place) for word in words]


def origins(values: Mapping[str, Any], rows: Sequence[Row], default: str) -> dict[str, str]:
    """Where each run-file value came from: the first translated flag that decides its key, else `default`."""
    found: dict[str, str] = {}
    for row in rows:
        if row.fate == "translated":
            for key in row.key.split():
                found.setdefault(key, f"{row.place} {row.flag}".strip())
    keys = [
        f"{name}.{key}" if isinstance(value, Mapping) else name
        for name, value in values.items()
        for key in (value if isinstance(value, Mapping) else [name])
    ]
    return {key: found.get(key) or found.get(key.partition(".")[0]) or default for key in keys}


def named(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Run-file values with a name from the file they were read from; nothing where there are none."""
    if not values:
        return {}
    stem = source.replace("\\", "/").rsplit("/", 1)[-1].rsplit(".", 1)[0]
    name = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in stem).lstrip("._-")
    return {"name": name or "run", **values}
