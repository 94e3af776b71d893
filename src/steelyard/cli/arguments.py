"""Arguments that several verbs share, defined once."""

from pathlib import Path
from typing import Annotated

import typer

RunFile = Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Values to replace, such as parallel.tensor=2.", show_default=False),
]
World = Annotated[
    int | None, typer.Option("--world", metavar="N", help="Number of ranks (one per device).", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
