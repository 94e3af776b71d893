"""A run file plus overrides plus the world -> a legal Run, and where every value came from."""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from steelyard.spec import check
from steelyard.spec.errors import Problem, UserError, did_you_mean, error, problem
from steelyard.spec.run import Identity, Run, complete_batch, complete_record
from steelyard.spec.section import Section

SECTIONS: dict[str, type[Section]] = {
    name: field.annotation
    for name, field in Run.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
}


@dataclass(frozen=True)
class Origin:
    """Where a value was written: `run.toml:12`, `command line`, `--world 8`; "" for a default."""

    where: str = ""
    overrides: str = ""

    def __str__(self) -> str:
        if self.overrides:
            return f"{self.where}, overriding {self.overrides}"
        return self.where or "default"


@dataclass(frozen=True)
class Loaded:
    """A run and the origin of each of its keys (dotted); keys without an entry are defaults."""

    run: Run
    origins: Mapping[str, Origin]
    source: str

    def origin(self, key: str) -> Origin:
        return self.origins.get(key, Origin())

    @property
    def notes(self) -> list[check.Note]:
        return check.notes(self.run)


def load(path: str | Path, overrides: Sequence[str] = (), world: int | None = None) -> Loaded:
    """Read and check a run file.

    `overrides` are dotted `key=value` texts; `world` is the number of ranks, from which `parallel.data = "auto"`
    follows (without it: one data rank). Raises UserError with every error of the file at once.
    """
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as failure:
        detail = getattr(failure, "strerror", None) or "it is not UTF-8 text"
        raise error("S002", place=str(path), detail=detail) from None
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as failure:
        found = re.search(r"line (\d+)", str(failure))
        line = found.group(1) if found else max(1, len(text.splitlines()))
        advice = "true and false are lower case; text needs quotes; a key or table may stand only once"
        raise error("S001", place=f"{path}:{line}", detail=str(failure), advice=advice) from None
    except RecursionError:
        raise error("S001", place=str(path), detail="it is nested too deeply", advice="flatten it") from None
    origins = {key: Origin(f"{path}:{number}") for key, number in key_lines(text)}
    return resolve(values, origins, overrides, world, str(path))


def resolve(
    values: dict[str, Any],
    origins: Mapping[str, Origin] | None = None,
    overrides: Sequence[str] = (),
    world: int | None = None,
    source: str = "",
) -> Loaded:
    """The same from nested values that are already parsed (a record's config, a translated script)."""
    if world is not None and world < 1:
        raise error("E002", place="--world", count=world)
    origins = dict(origins or {})
    values = {name: dict(value) if isinstance(value, dict) else value for name, value in values.items()}
    for text in overrides:
        _override(values, origins, text)
    problems = list(_set_data(values, origins, world))
    sections: dict[str, Any] = {}
    for name, value in _with_derived(values).items():
        try:
            sections[name] = _validated(name, value)
        except _Invalid as invalid:
            problems += invalid.problems
    failed = {p.key.split(".")[0] for p in problems}
    problems += check.problems({k: v for k, v in sections.items() if k not in failed})
    if problems:
        raise UserError([p if p.place else p.at(_place(p.key, origins, values, sections)) for p in problems])
    return Loaded(Run(**sections), origins, source)


class _Invalid(Exception):
    def __init__(self, problems: list[Problem]):
        self.problems = problems


def _with_derived(values: dict[str, Any]) -> dict[str, Any]:
    """Every section, given or not, with the values that follow from other sections."""
    whole = {**{name: {} for name in SECTIONS}, **values}
    return {**whole, "batch": complete_batch(whole), "record": complete_record(whole)}


def _validated(name: str, value: Any) -> Any:
    """One section (or key before the first section) as its validated value. Raises _Invalid."""
    owner = SECTIONS.get(name, Identity)
    if owner is not Identity and not isinstance(value, dict):
        raise _Invalid([problem("S007", name, section=name, found=_kind(value))])
    try:
        valid = owner.model_validate(value if owner is not Identity else {name: value})
    except ValidationError as failure:
        prefix = "" if owner is Identity else f"{name}."
        raise _Invalid([_from_pydantic(prefix, owner, found) for found in _by_key(failure.errors())]) from None
    return getattr(valid, name) if owner is Identity else valid


def _by_key(errors: list[ErrorDetails]) -> list[list[ErrorDetails]]:
    """Errors of one value together: each branch of a union has its own, and any of them would do. An unknown key inside
    a table is a key of its own."""
    found: dict[tuple[Any, ...], list[ErrorDetails]] = {}
    for one in errors:
        key = one["loc"] if one["type"] == "extra_forbidden" else one["loc"][:1]
        found.setdefault(key, []).append(one)
    return list(found.values())


def _expected(found: ErrorDetails) -> str:
    """What pydantic wanted, in a few words: `a whole number`, `greater than 0`."""
    text = found["msg"].replace("Input should be ", "").replace("a valid integer", "a whole number")
    text = text.replace("a valid ", "a ").replace("'", '"')
    return text[0].lower() + text[1:]


def _from_pydantic(prefix: str, section: type[Section], errors: list[ErrorDetails]) -> Problem:
    """Pydantic's errors of one value in our words. Union branches and list positions are cut from the location."""
    found = errors[0]
    location = [str(part) for part in found["loc"]]
    if found["type"] == "extra_forbidden":
        owner: Any = section
        for part in location[:-1]:
            owner = owner.model_fields[part].annotation
        key = ".".join(location)
        known = [*SECTIONS, *owner.model_fields] if owner is Identity else list(owner.model_fields)
        suggestion = did_you_mean(location[-1], known)
        return problem("S003", prefix + key, name=prefix + key, suggestion=suggestion)
    name = location[0] if location else prefix.rstrip(".")
    expected = " or ".join(dict.fromkeys(_expected(one) for one in errors))
    value = found["input"]
    typed = found["type"].endswith(("_type", "_parsing", "_from_float"))
    advice = {"bool_type": "write true or false", "int_type": "write a whole number without quotes"}.get(
        found["type"], ""
    )
    if isinstance(value, str) and typed and found["type"] != "string_type":
        advice = "write it without quotes"
    return problem(
        "S004" if typed else "S005", prefix + name, name=prefix + name, expected=expected,
        found=_kind(value) if typed else repr(value), advice=advice,
    )  # fmt: skip


def _kind(value: Any) -> str:
    names = {
        bool: "true or false",
        int: "the integer",
        float: "the number",
        str: "the text",
        dict: "a table",
        list: "a list",
    }
    name = names.get(type(value), type(value).__name__)
    return f"{name} {value!r}" if isinstance(value, int | float | str) and not isinstance(value, bool) else name


def _override(values: dict[str, Any], origins: dict[str, Origin], text: str) -> None:
    key, equals, right = text.partition("=")
    key = key.strip()
    if not equals or not re.fullmatch(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*", key):
        raise error("S006", place="command line", text=text)
    try:
        value = tomllib.loads(f"value = {right.strip()}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        value = right.strip()
    *path, last = key.split(".")
    table = values
    for part in path:
        below = table.setdefault(part, {})
        if not isinstance(below, dict):
            raise error("S007", part, "command line", section=part, found=_kind(below))
        table[part] = below = dict(below)
        table = below
    table[last] = value
    origins[key] = Origin("command line", origins[key].where if key in origins else "")


def _set_data(values: dict[str, Any], origins: dict[str, Origin], world: int | None) -> Iterator[Problem]:
    """Replace `parallel.data = "auto"` by a number, or check the given number against the world."""
    parallel = values.setdefault("parallel", {})
    if not isinstance(parallel, dict):
        return
    sizes = {name: parallel.get(name, 1) for name in ("tensor", "context", "pipeline")}
    if not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in sizes.values()):
        parallel["data"] = 1 if parallel.get("data", "auto") == "auto" else parallel["data"]
        return
    need = sizes["tensor"] * sizes["context"] * sizes["pipeline"]
    data = parallel.get("data", "auto")
    if data == "auto":
        parallel["data"] = max(1, (world or need) // need)
        if world is not None:
            origins["parallel.data"] = Origin(f"--world {world}")
            if world % need:
                below = world // need * need
                suggestion = f"{need}" if not below else f"{below} or --world {below + need}"
                yield problem("S111", "parallel", "--world", **sizes, need=need, world=world, suggestion=suggestion)
    elif world is not None and isinstance(data, int) and need * data != world:
        product = need * data
        yield problem("S116", "parallel.data", **sizes, data=data, world=world, product=product)


def _place(key: str, origins: Mapping[str, Origin], values: dict[str, Any], sections: dict[str, Any]) -> str:
    """`run.toml:12  parallel.tensor = 3  (overridden on the command line)` for a key, as far as it is known."""
    if not key:
        return ""
    origin = origins.get(key, Origin())
    value: Any = values
    for part in key.split("."):
        value = value.get(part, _MISSING) if isinstance(value, dict) else _MISSING
    if value is _MISSING:  # a default: show what it came to
        section, _, name = key.partition(".")
        value = getattr(sections.get(section), name, _MISSING) if name else _MISSING
    shown = key if value is _MISSING or isinstance(value, dict | Section) else f"{key} = {_toml(value)}"
    if origin.overrides:
        return f"{origin.overrides}  {shown}  (overridden on the command line)"
    return f"{origin.where}  {shown}" if origin.where else f"{shown}  (default)" if "=" in shown else shown


_MISSING = object()


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    return str(value)


def key_lines(text: str) -> Iterator[tuple[str, int]]:
    """(dotted key, line number) of every key and table of a valid TOML text. Lines inside multi-line values are
    skipped."""
    table, until, depth = "", "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if until:
            until = "" if until in line else until
            continue
        if depth > 0:
            depth += _brackets(line)
            continue
        if header := re.match(r"\s*\[+\s*([\w.\-\" ]+?)\s*\]+", line):
            table = header.group(1).replace('"', "").replace(" ", "")
            yield table, number
        elif pair := re.match(r"\s*([\w.\-\" ]+?)\s*=(.*)", line):
            key = pair.group(1).replace('"', "").replace(" ", "")
            yield f"{table}.{key}" if table else key, number
            value = pair.group(2)
            for quote in ('"""', "'''"):
                if value.count(quote) == 1:
                    until = quote
            depth = 0 if until else _brackets(value)


def _brackets(text: str) -> int:
    """Opening minus closing brackets outside strings and comments."""
    bare = re.sub(r'"(\\.|[^"\\])*"|\'[^\']*\'', "", text).split("#")[0]
    return sum(bare.count(c) for c in "[{") - sum(bare.count(c) for c in "]}")
