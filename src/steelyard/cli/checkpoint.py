"""`steelyard checkpoint`: weights in from other systems."""

from pathlib import Path
from typing import Annotated

import typer

HELP = "Convert checkpoints."

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def _root() -> None:
    """Convert checkpoints."""


@app.command("convert")
def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A safetensors file with Megatron's names.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Folder to write; give it to checkpoint.load.")],
    run_file: Annotated[Path, typer.Option("--run", metavar="RUN.toml", help="The run the weights are for.")],
    framework: Annotated[str, typer.Option("--from", help="Whose names the weights have: megatron.")] = "megatron",
) -> None:
    """Weights of another system as step 0 of a run."""
    from steelyard.checkpoint.convert import megatron, weights
    from steelyard.spec import error, load

    if framework != "megatron":
        raise error("C006", place="--from", framework=framework)
    run = load(run_file).run
    print(weights.write_start(megatron.read(source, run.model), run, source, target))
