"""`steelyard bench`: a measured record with spread."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steelyard.cli.arguments import Json

if TYPE_CHECKING:
    from steelyard.bench.arm import Arm
    from steelyard.bench.matrix import Result
    from steelyard.compare.verdict import Comparison
    from steelyard.spec.bench import Bench

MOST_PAIRED = 8  # arms; beyond, the pairs would fill the page

HELP = (
    "Measure runs, and other people's commands beside them, in turn: medians with spread, MFU, memory, and a verdict."
)

Files = Annotated[
    list[Path], typer.Argument(metavar="RUN.toml ...", help="Run files; each is an arm or has [bench.arms].")
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE,...", help="An arm: the run file under these values. Repeatable."),
]
Commands = Annotated[
    list[str] | None,
    typer.Option("--arm", metavar='NAME="COMMAND"', help="Another program as an arm; its log is read. Repeatable."),
]
Cases = Annotated[
    Path | None,
    typer.Option(
        "--cases", metavar="TABLE",
        help="Arms from a table with columns nodes gpus tensor pipeline fp16 checkpointing micro global.",
    ),
]  # fmt: skip


def bench(
    run_files: Files,
    sets: Sets = None,
    commands: Commands = None,
    cases: Cases = None,
    world: Annotated[int | None, typer.Option("--world", metavar="N", help="Ranks of our arms.")] = None,
    warmup: Annotated[int | None, typer.Option("--warmup", metavar="STEPS", help="Steps that do not count.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", metavar="STEPS", help="Steps that are timed.")] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", metavar="N", help="Turns of each arm.")] = None,
    timeout: Annotated[
        float | None, typer.Option("--timeout", metavar="MINUTES", help="Longest time of a turn.")
    ] = None,
    folder: Annotated[Path | None, typer.Option("--folder", metavar="FOLDER", help="Where results are kept.")] = None,
    json: Json = False,
) -> None:
    from steelyard.bench import summary
    from steelyard.bench.matrix import Matrix
    from steelyard.plan.sheet import dumps
    from steelyard.report import bench as shown
    from steelyard.spec import load

    given = {"warmup": warmup, "steps": steps, "rounds": rounds, "timeout_minutes": timeout, "world": world}
    values = [f"bench.{key}={value}" for key, value in given.items() if value is not None]
    first = load(run_files[0], values).run
    name, rule = first.name, first.bench
    arms = _arms(run_files, sets or [], commands or [], cases, values, rule)
    where = folder or Path("runs") / f"bench-{name}"

    def tell(result: "Result") -> None:
        typer.echo(shown.line(result), err=json)

    results = Matrix(where, arms, rule, tell).run()
    found = summary.as_json(name, arms, results, rule)
    names, pairs = _compared(found)
    found["pairs"] = [
        {"a": a, "b": b, "verdict": {what: verdict.word for what, verdict in pair.verdict.items()}}
        for (a, b), pair in zip(names, pairs, strict=True)
    ]
    (where / "bench.json").write_text(dumps(found) + "\n", encoding="utf-8")
    (where / "report.html").write_text(shown.page(found, names, pairs), encoding="utf-8")
    if json:
        print(dumps(found))
    else:
        print("\n" + shown.table(found))
        if pairs:
            print(shown.verdicts(names, pairs))
        print(f"page: {where / 'report.html'}")
    if not any("seconds" in arm for arm in found["arms"]):
        raise typer.Exit(1)


def _arms(
    files: list[Path], sets: list[str], commands: list[str], cases: Path | None, values: list[str], rule: "Bench"
) -> "list[Arm]":
    """Our arms of every file, then other people's. Raises UserError B001, B002, B004 for a name that stands twice."""
    from steelyard.bench import arm
    from steelyard.cli.plan import split
    from steelyard.spec import error, load

    found = []
    for path in files:
        run = load(path, values).run
        prefix = f"{run.name}-" if len(files) > 1 else ""
        world = rule.world or None
        ours = {name: (world, value) for name, value in run.bench.arms.items()}
        ours |= {_name(text): (world, tuple(split(text))) for text in sets}
        if cases:
            ours |= arm.cases(cases)
        for name, (ranks, overrides) in (ours or {run.name: (world, ())}).items():
            whole = name if name == run.name else f"{prefix}{name}"
            found.append(arm.own(whole, path, (*values, *overrides), ranks, rule))
        found += [arm.foreign(name, text) for name, text in run.bench.commands.items()]
    found += [arm.named(text) for text in commands]
    names = [one.name for one in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise error("B004", place="--arm", name=twice)
    if wrong := next((name for name in names if not arm.NAME.fullmatch(name)), None):
        raise error("B001", place="bench", text=wrong, detail=f"an arm has {arm.NAMES}; give it one in [bench.arms]")
    return found


def _name(text: str) -> str:
    """`parallel.tensor=2,recompute.mode=full` -> `tensor2_mode-full`."""
    import re

    found = []
    for part in text.split(","):
        key, _, value = part.partition("=")
        found.append(key.rpartition(".")[2] + ("" if value.isdigit() else "-") + value)
    return re.sub(r"[^A-Za-z0-9._-]+", "-", "_".join(found)).strip("-_.")


def _compared(found: dict[str, Any]) -> "tuple[list[tuple[str, str]], list[Comparison]]":
    """Every pair of arms that have figures, with what `compare` says of it; of many arms, each with the first."""
    from itertools import combinations

    from steelyard.compare import compare
    from steelyard.frameworks import detect

    good = [arm for arm in found["arms"] if "seconds" in arm]
    records = {arm["name"]: detect.read(arm["record"]) for arm in good}
    names = list(combinations(records, 2))
    if len(records) > MOST_PAIRED:
        names = names[: len(records) - 1]
    return names, [compare([records[a], records[b]])[0] for a, b in names]
