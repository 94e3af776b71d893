"""Configuration files of other frameworks as dotted keys with their lines: YAML and TOML, read as data."""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from steelyard.frameworks.fates import Fate, Row
from steelyard.spec.errors import error
from steelyard.spec.load import key_lines

MOST_KEYS = 5_000
FLOAT = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+")  # YAML 1.1 takes 3e-4 for a text


@dataclass(frozen=True)
class Settings:
    """`given` maps dotted keys to values, `lines` to the lines they stand on."""

    place: str
    given: Mapping[str, Any]
    lines: Mapping[str, int] = field(default_factory=dict)

    def get(self, key: str, default: Any = None) -> Any:
        value = self.given.get(key)
        return default if value is None else value

    def where(self, key: str) -> str:
        return f"{self.place}:{self.lines[key]}" if key in self.lines else self.place

    def table(self, key: str) -> dict[str, Any]:
        """What stands below a key."""
        start = f"{key}."
        return {name.removeprefix(start): value for name, value in self.given.items() if name.startswith(start)}


def toml(text: str, place: str) -> Settings:
    """Raises UserError F018."""
    try:
        values = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as failure:
        raise error(
            "F018", place=place, path=place, detail=f"it is no TOML: {failure}", advice="give a TOML file"
        ) from None
    return Settings(place, dict(_flat("", values)), dict(key_lines(text)))


def yaml(text: str, place: str) -> Settings:
    """Plain mappings, lists and values; a tag or an alias of a whole mapping is followed within bounds. Raises F018."""
    import yaml as library

    def bad(detail: str) -> Any:
        return error("F018", place=place, path=place, detail=detail, advice="give a plain YAML file")

    loader = library.SafeLoader(text)
    try:
        root = loader.get_single_node()
        given: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key, node in _nodes("", root, bad, [0]):
            given[key] = _scalars(loader, node)
            lines[key] = node.start_mark.line + 1
    except library.YAMLError as failure:
        mark = getattr(failure, "problem_mark", None)
        raise bad(f"it is no YAML{f' (line {mark.line + 1})' if mark else ''}") from None
    except RecursionError:
        raise bad("it is nested too deeply") from None
    finally:
        loader.dispose()
    return Settings(place, given, lines)


def _nodes(prefix: str, node: Any, bad: Any, count: list[int]) -> Iterator[tuple[str, Any]]:
    """(dotted key, node) of everything that is no mapping."""
    if type(node).__name__ != "MappingNode":
        if not prefix:
            raise bad("it is no mapping of keys")
        _weigh(node, bad, count)
        yield prefix[:-1], node
        return
    if not node.value and prefix:
        yield prefix[:-1], node
    for key, value in node.value:
        yield from _nodes(f"{prefix}{key.value}.", value, bad, count)


def _weigh(node: Any, bad: Any, count: list[int]) -> None:
    """Count every value below a node, aliases as often as they are used: a small file may stand for a huge one."""
    count[0] += 1
    if count[0] > MOST_KEYS:
        raise bad(f"it has more than {MOST_KEYS:,} values")
    if isinstance(node.value, list):
        for inner in node.value:
            for each in inner if isinstance(inner, tuple) else (inner,):
                _weigh(each, bad, count)


def _scalars(loader: Any, node: Any) -> Any:
    value = loader.construct_object(node, deep=True)
    return float(value) if isinstance(value, str) and FLOAT.fullmatch(value) else value


def _flat(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", value


@dataclass(frozen=True)
class Table:
    """What the keys of a framework's file mean. Irrelevant and refused ones are given by their first words."""

    translated: Mapping[str, str]
    irrelevant: Mapping[str, str]  # why -> keys
    refused: Mapping[str, str]  # key -> why
    harmless: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def row(self, key: str, value: Any, place: str) -> Row:
        shown = str(value) if len(str(value)) <= 60 else str(value)[:57] + "..."
        fate: Fate = "refused"
        if key in self.harmless and value in self.harmless[key]:
            return Row(key, shown, "irrelevant", "", f"with {shown} it changes nothing", place)
        if key in self.translated:
            return Row(key, shown, "translated", self.translated[key], "", place)
        for start, why in self.refused.items():
            if key == start or key.startswith(f"{start}."):
                return Row(key, shown, fate, "", why, place)
        for why, keys in self.irrelevant.items():
            if any(key == start or key.startswith((f"{start}.", f"{start}_")) for start in keys.split()):
                return Row(key, shown, "irrelevant", "", why, place)
        return Row(key, shown, fate, "", "no table here knows this key", place)

    def rows(self, settings: Settings) -> list[Row]:
        return [self.row(key, value, settings.where(key)) for key, value in settings.given.items()]
