"""`steelyard train`: run a run file."""

from typing import Annotated

import typer

from steelyard.cli.arguments import Overrides, RunFile, World

HELP = "Train. Starts its own ranks on this machine; under torchrun or srun it joins theirs."


def train(
    run_file: RunFile,
    overrides: Overrides = None,
    world: World = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print the plan, start nothing.")
    ] = False,
) -> None:
    from steelyard.hardware import find
    from steelyard.spec import error, load

    outer = outer_world()
    if outer is not None and world not in (None, outer):
        raise error("L002", place="--world", world=outer, asked=world)
    loaded = load(run_file, overrides or (), outer or world)
    find(loaded.run.hardware.chip)
    if dry_run:
        show_plan(loaded)
        return
    result = start(loaded)
    raise typer.Exit(result.code)


def outer_world() -> int | None:
    """Number of ranks of the launcher that started this process; None without one."""
    import os

    text = os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_STEP_NUM_TASKS")
    ranked = "RANK" in os.environ or "SLURM_PROCID" in os.environ
    return int(text) if ranked and text else None


def show_plan(loaded):  # type: ignore[no-untyped-def]  # the spec is imported inside verbs only
    """The plan and the notes on one screen."""
    from steelyard.plan import sheet
    from steelyard.report import terminal

    print(terminal.plan(sheet.as_json(loaded.run)))


def start(loaded):  # type: ignore[no-untyped-def]
    """Train with a live display, then write the page."""
    from steelyard.report.live import Live
    from steelyard.train.launch import launch

    return launch(loaded, Live)
