"""Runs that are written as another framework's launch script: the one way in for every verb that takes a run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from steelyard.frameworks.fates import Translation
    from steelyard.record.schema import Record
    from steelyard.spec import Loaded

BEHIND = "steelyard.script_arguments"

Environment = Annotated[
    list[str] | None,
    typer.Option("--env", metavar="NAME=VALUE", help="A variable that a script takes from its environment. Repeatable.",
                 show_default=False),
]  # fmt: skip
Launch = Annotated[
    int | None,
    typer.Option("--launch", metavar="N", help="Which training, where a script starts several.", show_default=False),
]


class ScriptCommand(TyperCommand):
    """A verb whose words behind `--` are the arguments of the script it is given."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            ctx.meta[BEHIND] = args[at + 1 :]
            args = args[:at]
        return super().parse_args(ctx, args)


def behind(context: typer.Context) -> list[str]:
    """The words behind `--`."""
    return list(context.meta.get(BEHIND, []))


def is_foreign(path: Path) -> bool:
    """Whether a file is what another framework is started with."""
    if not path.is_file():
        return False
    if path.suffix == ".toml":  # a run file, all but always: what reads scripts need not be loaded for it
        with path.open("rb") as file:
            if b"flavor" not in file.read(4096):
                return False
    from steelyard.translate import into

    return into.is_foreign(path)


def translation(path: Path, arguments: list[str], environment: list[str] | None, choice: int | None) -> "Translation":
    """Raises UserError F011 to F018, S006."""
    from steelyard.translate import into

    return into.read(path, arguments, _variables(environment), choice)


def resolved(found: "Translation", overrides: list[str], world: int | None) -> "Loaded":
    """The run that a translation comes to. Raises UserError with everything that forbids it."""
    from dataclasses import replace

    from steelyard.spec import UserError, resolve
    from steelyard.spec.load import Origin
    from steelyard.translate import into

    missing = into.needs_vocabulary(found, overrides)
    if found.problems or missing:
        raise UserError([*found.problems, *([missing] if missing else [])])
    origins = {key: Origin(where) for key, where in found.origins.items()}
    loaded = resolve(dict(found.values), origins, overrides, world or found.world, found.source)
    ranks = next((row for row in found.rows if row.key == "world"), None)
    if world is None and ranks is not None and found.world:
        loaded = replace(loaded, origins={**loaded.origins, "parallel.data": Origin(f"{ranks.place} {ranks.flag}")})
    return loaded


def trained_here(found: "Translation") -> "Translation":
    """The same run without what only the other framework's engine knows."""
    from dataclasses import replace

    return replace(found, values={name: value for name, value in found.values.items() if name != "engine"})


def refuse_untrained(found: "Translation") -> None:
    """Raises UserError F019 for flags that training here would ignore."""
    from steelyard.spec import error

    if found.refused:
        flags = ", ".join(f"{row.flag} ({row.place})" for row in found.refused)
        raise error("F019", place=found.source, count=len(found.refused), flags=flags)
    tell(found)


def tell(found: "Translation") -> None:
    """Refused flags and notes, on standard error."""
    for row in found.refused:
        typer.echo(f"refused: {row.flag} {row.value}".rstrip() + f" ({row.place}): {row.why}", err=True)
    for note in found.notes:
        typer.echo(f"note: {note}", err=True)


def record(text: str, arguments: list[str], environment: list[str] | None) -> "Record | None":
    """A script as what `compare` takes: its configuration before launch. `text` may be a path with the script's own
    arguments behind it. None for anything else."""
    import shlex

    if text.lstrip().startswith("{"):
        return None
    path, own = Path(text), arguments
    if not path.exists():
        words = shlex.split(text) if len(text) < 4096 and " " in text and "\n" not in text else []
        if not words or not Path(words[0]).is_file():
            return None
        path, own = Path(words[0]), words[1:]
    if not is_foreign(path):
        return None
    found = translation(path, own, environment, None)
    return _record(found, path)


def _record(found: "Translation", path: Path) -> "Record":
    from steelyard.record.schema import Record
    from steelyard.spec import write

    run = resolved(found, [], None).run
    config: dict[str, Any] = write.as_config(run)
    given = {name: set(value) if isinstance(value, dict) else set() for name, value in found.values.items()}
    given.setdefault("parallel", set()).update({"data"} if found.world else set())
    given.setdefault("batch", set()).update({"global_batch_size", "micro_batch_size"})
    config = {
        name: {k: v for k, v in value.items() if k in given.get(name, ())} if isinstance(value, dict) else value
        for name, value in config.items()
        if name in given
    }
    if config["model"].get("activation") == "gelu_tanh" and found.origins.get("model.activation", "").startswith(
        "default"
    ):
        config["model"]["activation"] = "gelu"  # as logs have it: their form of GELU is not printed
    notes = [f"{row.flag} ({row.place}) is left out: {row.why}" for row in found.refused] + list(found.notes)
    here = f"{path.name}:"
    sources = {
        key: str(path.parent / where.split()[0]) if where.startswith(here) else where
        for key, where in found.origins.items()
    }
    return Record(found.framework, str(path), config, sources=sources, notes=notes)


def _variables(environment: list[str] | None) -> dict[str, str]:
    from steelyard.spec import error

    found = {}
    for text in environment or []:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise error("S006", place="--env", text=text)
        found[name] = value
    return found
