"""`steelyard explain`: what an error code means."""

from typing import Annotated

import typer

HELP = "Explain an error code, such as S104."


def explain(code: Annotated[str, typer.Argument(metavar="CODE", help="The code in brackets after `error`.")]) -> None:
    from steelyard.spec import errors

    print(errors.explain(code))
