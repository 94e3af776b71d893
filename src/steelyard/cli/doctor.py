"""`steelyard doctor`: what this machine has, and what is wrong with it."""

import typer

from steelyard.cli.arguments import Json

HELP = "Say what this machine has, test that ranks can talk, and what is wrong. Exit code 1 when anything is."


def doctor(json: Json = False) -> None:
    from dataclasses import asdict
    from json import dumps

    from steelyard.train import doctor

    found = []
    for finding in doctor.examine():
        found.append(finding)
        if not json:
            print(f"{finding.name:<15} {finding.found}", flush=True)
            if finding.advice:
                print(f"{'':<15} -> {finding.advice}", flush=True)
    wrong = [finding for finding in found if finding.advice]
    print(dumps([asdict(f) for f in found], indent=1) if json else f"\n{len(wrong)} to mend" if wrong else "\nall well")
    raise typer.Exit(1 if wrong else 0)
