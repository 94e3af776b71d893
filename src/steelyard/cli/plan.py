"""`steelyard plan`: what a run will be, before launch."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steelyard.cli import foreign
from steelyard.cli.arguments import Json, Overrides, World

if TYPE_CHECKING:
    from collections.abc import Callable

    from steelyard.spec import Loaded
    from steelyard.spec.run import Run

LARGE = 100_000  # ranks: where building the process groups of a rehearsal begins to take long
HELP = "Say what a run will be: parameters, FLOPs, stages, batch and learning rate, exact and before launch."

Planned = Annotated[
    Path,
    typer.Argument(
        metavar="RUN.toml",
        help="The run file, a Hugging Face model's config.json, or another framework's launch script or arguments; "
        "the script's own arguments stand behind --.",
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
Explain = Annotated[bool, typer.Option("--explain", help="Show every term of every number, as --json always does.")]


def plan(
    context: typer.Context,
    run_file: Planned,
    overrides: Overrides = None,
    world: World = None,
    sets: Sets = None,
    framework: As = None,
    explain: Explain = False,
    rank: RankNumber = None,
    rehearse: Rehearse = False,
    environment: foreign.Environment = None,
    launch: foreign.Launch = None,
    json: Json = False,
) -> None:
    from steelyard.frameworks import counting
    from steelyard.plan import sheet
    from steelyard.report import terminal

    explain = explain and not json  # which has every term
    asked = {"--set": sets, "--as": framework, "--rehearse": rehearse, "--explain": explain, "--rank": rank is not None}
    _exclude([name for name, value in asked.items() if value])
    counts = counting.find(framework) if framework else None
    read = _reader(run_file, foreign.behind(context), environment, launch)
    if sets:
        layouts = [("", read(overrides or [], world))]
        layouts += [(text, read([*(overrides or []), *split(text)], world)) for text in sets]
        sheets = [(title, sheet.as_json(loaded.run)) for title, loaded in layouts]
        print(sheet.dumps([{"set": t, **s} for t, s in sheets]) if json else terminal.side_by_side(sheets))
        return
    run = read(overrides or [], world).run
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
            from steelyard.report.memory import changes

            print(changes(memory.changes(run)))
        if explain:
            print("\n" + terminal.explained(planned))
    if too_large:
        raise typer.Exit(1)


def _exclude(asked: list[str]) -> None:
    """Raises UserError P004 for options of which one would be passed over."""
    from steelyard.spec import error

    together = ({"--rehearse", "--rank"}, {"--explain", "--rank"})
    if len(asked) > 1 and set(asked) not in together:
        raise error("P004", place=asked[0], one=asked[0], other=asked[1])


def _reader(
    path: Path, arguments: list[str], environment: list[str] | None, launch: int | None
) -> "Callable[[list[str], int | None], Loaded]":
    """How the run is read, with overrides and a world: a run file, a launch script or a model's config.json."""
    from functools import partial

    if foreign.is_foreign(path):
        found = foreign.translation(path, arguments, environment, launch)
        foreign.tell(found)
        return partial(foreign.resolved, found)
    return partial(_load, path)


def _load(path: Path, overrides: list[str], world: int | None) -> "Loaded":
    from steelyard.spec import load, resolve

    if path.suffix != ".json":
        return load(path, overrides, world)
    from steelyard.frameworks.huggingface import config
    from steelyard.spec.load import Origin

    values = config.read(path)
    origins = {
        f"{section}.{key}": Origin(str(path))
        for section, table in values.items()
        if isinstance(table, dict)
        for key in table
    }
    return resolve(values, origins, overrides, world, str(path))


def _rehearse(run: "Run", rank: int, json: bool) -> None:
    from steelyard.plan import sheet
    from steelyard.report.memory import rehearsed
    from steelyard.spec import error

    if run.engine.framework != "steelyard":
        raise error("M003", "engine.framework", framework=run.engine.framework)
    if not 0 <= rank < run.parallel.world_size:
        raise error("M001", place="--rank", rank=rank, world=run.parallel.world_size, last=run.parallel.world_size - 1)
    if run.parallel.context > 1:
        raise error(
            "T003", "parallel.context", name="parallel.context", value=run.parallel.context, advice="set it to 1"
        )
    if run.parallel.world_size > LARGE:
        typer.echo(f"rehearsing in a world of {run.parallel.world_size:,} ranks takes minutes", err=True)
    from steelyard.train.rehearse import beside_prediction

    found = beside_prediction(run, rank)
    print(sheet.dumps(found) if json else rehearsed(found))


def split(text: str) -> list[str]:
    """`a=1,b=[6, 7],c="x,y"` at the commas that separate values. Raises UserError P001."""
    import re

    from steelyard.spec import error

    parts = [part.strip() for part in re.findall(r'(?:\[[^\]]*\]|\{[^}]*\}|"[^"]*"|[^,\[{"])+', text)]
    if not parts or not all("=" in part for part in parts):
        raise error("P001", place="--set", text=text)
    return parts
