"""`steelyard compare`: may these runs be compared, and what explains the difference?"""

from pathlib import Path
from typing import Annotated

import typer

from steelyard.cli import foreign
from steelyard.cli.arguments import Json

HELP = "Say whether runs may be compared, and what their difference comes from: run folders, records, run files, logs."

Runs = Annotated[
    list[str],
    typer.Argument(metavar="A B ...", help="What two or more runs left behind; A is compared with each other one."),
]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print Markdown, to paste into an issue.")]
Page = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Also write one self-contained page.", show_default=False)
]


def compare(
    context: typer.Context,
    runs: Runs,
    json: Json = False,
    markdown: Markdown = False,
    html: Page = None,
    environment: foreign.Environment = None,
) -> None:
    from steelyard.compare import compare as compared
    from steelyard.compare.verdict import as_json
    from steelyard.frameworks import detect
    from steelyard.report import comparison

    arguments = foreign.behind(context)
    found = compared([foreign.record(run, arguments, environment) or detect.read(run) for run in runs])
    if json:
        import json as format

        values = [as_json(pair) for pair in found]
        print(format.dumps(values[0] if len(values) == 1 else values, indent=1, allow_nan=False))
    else:
        write = comparison.markdown if markdown else comparison.terminal
        print("\n\n".join(write(pair) for pair in found))
    if html:
        html.write_text(comparison.page(found), encoding="utf-8")
    if not all(pair.comparable for pair in found):
        raise typer.Exit(1)
