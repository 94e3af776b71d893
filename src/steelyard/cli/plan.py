"""`steelyard plan`: what a run will be, before launch."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steelyard.cli.arguments import Json, Overrides, World

if TYPE_CHECKING:
    from steelyard.spec import Loaded
    from steelyard.spec.run import Run

HELP = "Say what a run will be: parameters, FLOPs, stages, batch and learning rate, exact and before launch."

Planned = Annotated[
    Path,
    typer.Argument(
        metavar="RUN.toml",
        help="The run file, a Hugging Face model's config.json, or a file of Megatron-LM's arguments.",
        show_default=False,
    ),
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
RankNumber = Annotated[
    int | None, typer.Option("--rank", metavar="N", help="Show the memory of one rank.", show_default=False)
]
Rehearse = Annotated[
    bool,
    typer.Option("--rehearse", help="Run one real training step of that rank on fake tensors, beside the prediction."),
]
Explain = Annotated[bool, typer.Option("--explain", help="Show every term of every number.")]


def plan(
    run_file: Planned,
    overrides: Overrides = None,
    world: World = None,
    sets: Sets = None,
    framework: As = None,
    explain: Explain = False,
    rank: RankNumber = None,
    rehearse: Rehearse = False,
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
    if rehearse:
        _rehearse(run, rank or 0, json)
        return
    planned = sheet.as_json(run, rank)
    if counts:
        reported = sheet.as_reported(run, counts)
        print(sheet.dumps(reported) if json else terminal.as_framework(planned, reported))
        return
    too_large = planned["memory"] is not None and planned["memory"]["fits"] is False
    if json:
        print(sheet.dumps(planned))
    else:
        print(terminal.plan(planned))
        if too_large:
            from steelyard.plan import memory

            print(terminal.changes(memory.changes(run)))
        if explain:
            print("\n" + terminal.explained(planned))
    if too_large:
        raise typer.Exit(1)


def _load(path: Path, overrides: list[str], world: int | None) -> "Loaded":
    from steelyard.spec import load, resolve

    if path.suffix == ".toml":
        return load(path, overrides, world)
    from steelyard.spec.load import Origin

    if _is_list(path):
        from steelyard.frameworks.megatron import script

        given = script.read(path)
        if given.unknown:
            typer.echo(f"note: left out, since nobody here knows them: {', '.join(given.unknown)}", err=True)
        values = script.run_file(given, overrides)
    elif path.suffix == ".json":
        from steelyard.frameworks.huggingface import config

        values = config.read(path)
    else:
        return load(path, overrides, world)
    origins = {
        f"{section}.{key}": Origin(str(path))
        for section, table in values.items()
        if isinstance(table, dict)
        for key in table
    }
    return resolve(values, origins, overrides, world, str(path))


def _is_list(path: Path) -> bool:
    """Whether a file holds another framework's arguments."""
    try:
        with path.open(encoding="utf-8") as file:
            start = file.read(200)
    except (OSError, UnicodeDecodeError):
        return False
    from steelyard.frameworks.megatron import script

    return script.is_list(start)


def _rehearse(run: "Run", rank: int, json: bool) -> None:
    from steelyard.plan import sheet
    from steelyard.report import terminal
    from steelyard.spec import error

    if run.engine.framework != "steelyard":
        raise error("M003", "engine.framework", framework=run.engine.framework)
    if not 0 <= rank < run.parallel.world_size:
        raise error("M001", place="--rank", rank=rank, world=run.parallel.world_size, last=run.parallel.world_size - 1)
    from steelyard.train.rehearse import beside_prediction

    found = beside_prediction(run, rank)
    print(sheet.dumps(found) if json else terminal.rehearsed(found))


def _split(text: str) -> list[str]:
    """`a=1,b=[6, 7],c="x,y"` at the commas that separate values. Raises UserError P001."""
    import re

    from steelyard.spec import error

    parts = [part.strip() for part in re.findall(r'(?:\[[^\]]*\]|\{[^}]*\}|"[^"]*"|[^,\[{"])+', text)]
    if not parts or not all("=" in part for part in parts):
        raise error("P001", place="--set", text=text)
    return parts
