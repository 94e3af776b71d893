"""The command line: registers the verbs and turns every user error into its document and exit code 2."""

import os
import sys
import traceback

import typer

from steelyard.cli import (
    bench,
    check,
    checkpoint,
    compare,
    data,
    demo,
    doctor,
    explain,
    generate,
    plan,
    train,
    translate,
)
from steelyard.cli.foreign import ScriptCommand

app = typer.Typer(
    name="steelyard",
    help="Plan, train, measure and compare GPT pretraining runs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("check", help=check.HELP)(check.check)
app.command("doctor", help=doctor.HELP)(doctor.doctor)
app.command("explain", help=explain.HELP)(explain.explain)
app.command("demo", help=demo.HELP)(demo.demo)
app.command("train", cls=ScriptCommand, help=train.HELP)(train.train)
app.command("plan", cls=ScriptCommand, help=plan.HELP)(plan.plan)
app.command("bench", help=bench.HELP)(bench.bench)
app.command("compare", cls=ScriptCommand, help=compare.HELP)(compare.compare)
app.command("translate", cls=ScriptCommand, help=translate.HELP)(translate.translate)
app.command("generate", help=generate.HELP)(generate.generate)
app.add_typer(checkpoint.app, name="checkpoint", help=checkpoint.HELP)
app.add_typer(data.app, name="data", help=data.HELP)


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version and stop.")) -> None:
    if version:
        from steelyard import __version__

        typer.echo(f"steelyard {__version__}")
        raise typer.Exit


def main() -> None:
    from steelyard.spec.errors import UserError, error

    try:
        app()
    except UserError as failure:
        sys.stdout.flush()
        print(failure, file=sys.stderr)
        sys.exit(2)
    except OSError as failure:
        if isinstance(failure, BrokenPipeError):  # the reader of our output is gone (`| head`): nothing is wrong
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        if failure.filename is None:
            raise
        print(error("E003", path=failure.filename, detail=failure.strerror), file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception:  # a mistake of ours: shown whole, and not the exit code of an answer
        traceback.print_exc()
        sys.exit(2)


if __name__ == "__main__":
    main()
