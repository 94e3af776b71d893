"""Files that a script names: those it would write itself, and those that stand beside it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from steelyard.spec.errors import error
from steelyard.translate.shell import Script
from steelyard.translate.text import Value, Word, shown

MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class Text:
    """A file's text; `lines` are the numbers of its lines in `place`, empty where it is a file of its own."""

    text: str
    place: str
    lines: Sequence[int] = ()


def named(path: str, script: Script | None, beside: Path) -> Text | None:
    """The file of that name; None where the script does not write it from text and it is not found either.

    Raises UserError F014 for one whose text is not wholly known."""
    if script is not None:
        for name in (path, path.removeprefix("./"), f"./{path}"):
            if name in script.state.files:
                value = script.state.files[name].value
                if len(value) != 1 or not value[0].unknown:  # else a program would write it
                    return _written(path, value, script.source)
    folder, _, name = path.rpartition("/")
    # a folder that only a run could tell, as in $(dirname $0)/ds_config.json, is taken for the script's own
    names = (path, name) if "$" in folder or "`" in folder else (path,)
    for found in (folder / name for name in names for folder in (beside, beside.parent, Path())):
        if found.is_file():
            return Text(read(found), str(found))
    return None


def read(path: Path) -> str:
    """Raises UserError F018."""
    place = {"place": str(path), "path": str(path), "advice": "give a text file"}
    try:
        if not path.is_file():
            raise error("F018", detail="there is no such file", **place)
        if path.stat().st_size > MOST_BYTES:
            raise error(
                "F018", detail=f"it has {path.stat().st_size:,} bytes; at most {MOST_BYTES:,} are read", **place
            )
        return path.read_text("utf-8")
    except OSError as failure:
        raise error("F018", detail=failure.strerror or str(failure), **place) from None
    except UnicodeDecodeError:
        raise error("F018", detail="it is not UTF-8 text", **place) from None


def _written(path: str, value: Value, source: str) -> Text:
    lost = Word(value).unknown
    if lost is not None:
        line = next(piece.line for piece in value if piece.unknown)
        advice = (
            f"give --env {lost.name}=..."
            if lost.name and not lost.name.isdigit()
            else "write its value into the script"
        )
        raise error(
            "F014", path, f"{source}:{line}", flag=path, value=Word(value).text[:40], why=lost.why, advice=advice
        )
    lines, at_start = [], True
    for piece in value:
        for row in piece.text.splitlines(keepends=True):
            if at_start:
                lines.append(piece.line)
            at_start = row.endswith("\n")
    return Text(shown(value), source, lines)
