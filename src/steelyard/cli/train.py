"""`steelyard train`: run a run file."""

from typing import TYPE_CHECKING, Annotated

import typer

from steelyard.cli import foreign
from steelyard.cli.arguments import Overrides, RunFile, World

if TYPE_CHECKING:
    from steelyard.spec import Loaded
    from steelyard.train.loop import Result

HELP = "Train. Starts its own ranks on this machine; under torchrun or srun it joins theirs."


def train(
    context: typer.Context,
    run_file: RunFile,
    overrides: Overrides = None,
    world: World = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print the plan, start nothing.")
    ] = False,
    environment: foreign.Environment = None,
    launch: foreign.Launch = None,
) -> None:
    from steelyard.spec import error, load
    from steelyard.train import ready

    outer = ready.outer_world()
    if outer is not None and world not in (None, outer):
        raise error("L002", place="--world", world=outer, asked=world)
    if foreign.is_foreign(run_file):
        found = foreign.translation(run_file, foreign.behind(context), environment, launch)
        foreign.refuse_untrained(found)
        loaded = foreign.resolved(foreign.trained_here(found), overrides or [], outer or world)
    else:
        loaded = load(run_file, overrides or (), outer or world)
    ready.check(loaded)
    if dry_run:
        show_plan(loaded)
        return
    result = start(loaded)
    raise typer.Exit(result.code)


def show_plan(loaded: "Loaded") -> None:
    """The plan and the notes on one screen."""
    from steelyard.plan import sheet
    from steelyard.report import terminal

    print(terminal.plan(sheet.as_json(loaded.run)))


def start(loaded: "Loaded") -> "Result":
    """Train with a live display, then write the page."""
    import os

    from steelyard.report import html
    from steelyard.report.live import Live
    from steelyard.train.launch import launch

    result = launch(loaded, Live)
    if os.environ.get("RANK", "0") == "0" and result.steps:
        print(f"page: {html.write(loaded.run.record.folder)}")
    return result
