"""`steelyard translate`: another framework's launch script as a run file, and a run file as another framework's."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steelyard.cli import foreign
from steelyard.cli.arguments import Json, Overrides, World

if TYPE_CHECKING:
    from steelyard.frameworks.fates import Translation
    from steelyard.spec import Loaded

HELP = "Translate a launch script into a run file, or a run into another framework's script. Nothing is run."

Given = Annotated[
    Path | None,
    typer.Argument(
        metavar="FILE",
        help="A launch script, an argument list or a configuration of another framework, or a run file. The script's "
        "own "
        "arguments stand behind --.",
        show_default=False,
    ),
]
To = Annotated[
    str, typer.Option("--to", metavar="TARGET", help="toml, megatron, megatron-deepspeed, libai, torchrun, slurm.")
]
Output = Annotated[
    Path | None,
    typer.Option("--output", metavar="FILE", help="Write there, not to standard output.", show_default=False),
]
Flags = Annotated[
    str | None,
    typer.Option(
        "--flags", metavar="FRAMEWORK", help="Print the table of a framework's flags and stop.", show_default=False
    ),
]
Engine = Annotated[
    bool, typer.Option("--engine", help="Keep the [engine] section: a run file to plan with, not to train from.")
]


def translate(
    context: typer.Context,
    given: Given = None,
    overrides: Overrides = None,
    to: To = "toml",
    output: Output = None,
    world: World = None,
    environment: foreign.Environment = None,
    launch: foreign.Launch = None,
    engine: Engine = False,
    flags: Flags = None,
    json: Json = False,
) -> None:
    from steelyard.translate import listing, outof

    if flags is not None:
        print(listing.table(flags))
        return
    if given is None:
        raise typer.BadParameter("a file is needed, or --flags FRAMEWORK")
    target = outof.target(to)
    found, loaded = _read(given, overrides or [], world, foreign.behind(context), environment, launch, json)
    written = outof.write(loaded, target, keep_engine=engine)
    if output is not None:
        output.write_text(written.text, "utf-8")
    if json:
        import json as format

        print(format.dumps(_document(found, loaded, written, output), indent=1, allow_nan=False))
    elif output is None:
        print(written.text, end="")
    if not json:
        _tell(found, written.differences, output)
    if found is not None and found.refused:
        raise typer.Exit(1)


def _read(
    path: Path, overrides: list[str], world: int | None, arguments: list[str], environment: list[str] | None,
    launch: int | None, json: bool,
) -> "tuple[Translation | None, Loaded]":  # fmt: skip
    from steelyard.spec import UserError, load

    if path.suffix == ".toml" and not foreign.is_foreign(path):
        return None, load(path, overrides, world)
    if foreign.is_foreign(path) or not path.is_file():
        found = foreign.translation(path, arguments, environment, launch)
    else:
        from steelyard.translate import into

        found = into.of_log(path)
    try:
        return found, foreign.resolved(found, overrides, world)
    except UserError as failure:
        if json:
            import json as format

            print(format.dumps(_told(found) | {"problems": [_problem(p) for p in failure.problems]}, indent=1))
        else:
            foreign.tell(found)
        raise


def _told(found: "Translation | None") -> dict[str, Any]:
    if found is None:
        return {}
    fates = [row.fate for row in found.rows]
    return {
        "framework": found.framework, "source": found.source, "world": found.world, "launch": dict(found.launch),
        "counts": {fate: fates.count(fate) for fate in ("translated", "irrelevant", "refused")},
        "rows": [vars(row) for row in found.rows], "notes": list(found.notes),
    }  # fmt: skip


def _problem(problem: Any) -> dict[str, str]:
    return {"code": problem.code, "rule": problem.rule, "place": problem.place or problem.key, "hint": problem.hint}


def _document(found: "Translation | None", loaded: "Loaded", written: Any, output: Path | None) -> dict[str, Any]:
    from steelyard.spec import write

    config = write.as_config(loaded.run)
    engine = config.pop("engine", {})
    origins = {key: str(origin) for key, origin in loaded.origins.items()}
    return _told(found) | {
        "config": config, "engine": engine, "origins": origins, "problems": [],
        "differences": [{"key": d.key, "here": d.here, "there": d.there, "why": d.why} for d in written.differences],
        "output": str(output) if output else written.text,
    }  # fmt: skip


def _tell(found: "Translation | None", differences: Any, output: Path | None) -> None:
    if found is not None:
        fates = [row.fate for row in found.rows]
        parts = ", ".join(f"{fates.count(fate)} {fate}" for fate in ("translated", "irrelevant", "refused"))
        typer.echo(f"{found.framework}: {len(fates)} flags: {parts}" if fates else found.framework, err=True)
        foreign.tell(found)
    for difference in differences:
        typer.echo(f"differs: {difference}", err=True)
    if output is not None:
        typer.echo(f"written: {output}", err=True)
