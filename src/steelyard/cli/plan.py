"""`steelyard plan`: what a run will be, before launch."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steelyard.cli.arguments import Json, Overrides, World

if TYPE_CHECKING:
    from steelyard.spec import Loaded

HELP = "Say what a run will be: parameters, FLOPs, stages, batch and learning rate, exact and before launch."

Planned = Annotated[
    Path,
    typer.Argument(metavar="RUN.toml", help="The run file, or a Hugging Face model's config.json.", show_default=False),
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE,...",
        help="A layout to lay beside the others, such as parallel.tensor=2,parallel.pipeline=4. Repeatable.",
        show_default=False,
    ),
]
As = Annotated[
    str | None,
    typer.Option("--as", metavar="FRAMEWORK", help="What that framework would print for this run.", show_default=False),
]
Explain = Annotated[bool, typer.Option("--explain", help="Show every term of every number.")]


def plan(
    run_file: Planned,
    overrides: Overrides = None,
    world: World = None,
    sets: Sets = None,
    framework: As = None,
    explain: Explain = False,
    json: Json = False,
) -> None:
    from steelyard.frameworks import counting
    from steelyard.plan import sheet
    from steelyard.report import terminal

    counts = counting.find(framework) if framework else None
    if sets:
        layouts = [("", _load(run_file, overrides or [], world))]
        layouts += [(text, _load(run_file, [*(overrides or []), *_split(text)], world)) for text in sets]
        sheets = [(title, sheet.as_json(loaded.run)) for title, loaded in layouts]
        print(sheet.dumps([{"set": t, **s} for t, s in sheets]) if json else terminal.side_by_side(sheets))
        return
    run = _load(run_file, overrides or [], world).run
    planned = sheet.as_json(run)
    if counts:
        reported = sheet.as_reported(run, counts)
        print(sheet.dumps(reported) if json else terminal.as_framework(planned, reported))
    elif json:
        print(sheet.dumps(planned))
    else:
        print(terminal.plan(planned))
        if explain:
            print("\n" + terminal.explained(planned))


def _load(path: Path, overrides: list[str], world: int | None) -> "Loaded":
    from steelyard.spec import load, resolve

    if path.suffix != ".json":
        return load(path, overrides, world)
    from steelyard.frameworks.huggingface import config
    from steelyard.spec.load import Origin

    values = config.read(path)
    origins = {f"model.{key}": Origin(str(path)) for key in values["model"]}
    return resolve(values, origins, overrides, world, str(path))


def _split(text: str) -> list[str]:
    """`a=1,b=[6, 7],c="x,y"` at the commas that separate values. Raises UserError P001."""
    import re

    from steelyard.spec import error

    parts = [part.strip() for part in re.findall(r'(?:\[[^\]]*\]|\{[^}]*\}|"[^"]*"|[^,\[{"])+', text)]
    if not parts or not all("=" in part for part in parts):
        raise error("P001", place="--set", text=text)
    return parts
