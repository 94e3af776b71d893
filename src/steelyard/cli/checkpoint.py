"""`steelyard checkpoint`: look into checkpoints, check them, compare them, and exchange weights with other systems."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from steelyard.spec import Run

HELP = "Inspect, verify, compare and convert checkpoints."

app = typer.Typer(no_args_is_help=True, add_completion=False)

Source = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder or one checkpoint.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.callback()
def _root() -> None:
    """Inspect, verify, compare and convert checkpoints."""


@app.command("inspect")
def inspect(path: Source, as_json: Json = False) -> None:
    """What is in a checkpoint (of a run folder: the newest)."""
    from steelyard.checkpoint import inspect

    found = inspect.inspect(path)
    if as_json:
        print(json.dumps(found, indent=1))
        return
    state, layout = found["state"], found["layout"]
    print(f"{found['path']}: {found['name']}, {found['parameters']:,} parameters in {', '.join(found['dtype'])}")
    amounts = [(state.get(key, 0), key) for key in ("step", "samples", "tokens", "updates", "skipped")]
    print("state     " + ", ".join(f"{amount:,} {key}{'s' if key == 'step' else ''}" for amount, key in amounts))
    if found["loss_scale"] is not None:
        print(f"          loss scale {found['loss_scale']:,.0f}")
    axes = " x ".join(f"{key} {layout[key]}" for key in ("tensor", "pipeline", "data"))
    ranks = "1 rank" if layout["world"] == 1 else f"{layout['world']} ranks"
    print(f"saved by  {ranks}: {axes}; zero {layout['zero']}. It loads on any other layout")
    for name, group in found["groups"].items():
        print(f"{name:9} {group['tensors']:,} tensors, {group['numel']:,} numbers, {group['bytes']:,} bytes")
    for name, size in found["files"].items():
        print(f"          {size:14,}  {name}")
    for other in found["others"]:
        print(f"also      {other['path']}{': ' + other['problem'] if other['problem'] else ''}")


@app.command("verify")
def verify(path: Source, as_json: Json = False) -> None:
    """Read every byte of every checkpoint and compare it with the checksums; exit 1 where one is damaged."""
    from steelyard.checkpoint import inspect

    found = inspect.verify(path)
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        for one in found:
            whole = f"whole: {one['files']} files, {one['bytes']:,} bytes, all as they were saved"
            if one["without_checksum"]:
                whole = f"of the right size: {one['files']} files; there are no checksums to compare with"
            print(f"{one['path']}: {one['problem'] or whole}")
    raise typer.Exit(int(any(one["problem"] for one in found)))


@app.command("diff")
def diff(
    first: Annotated[Path, typer.Argument(metavar="A", help="A run folder or one checkpoint.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another.")],
    as_json: Json = False,
) -> None:
    """Settings, state and tensors that differ between two checkpoints; exit 1 where state or tensors do."""
    from steelyard.checkpoint import inspect

    found = inspect.diff(first, second)
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        print(f"A  {found['a']}\nB  {found['b']}")
        for kind in ("settings", "state"):
            for one in found[kind]:
                print(f"{kind:9} {one['key']}: {one['a']} | {one['b']}")
        for side in ("a", "b"):
            for name in found[f"only_{side}"]:
                print(f"only in {side.upper()} {name}")
        for one in found["tensors"]:
            print(f"tensor    {one['name']}: {_apart(one)}")
        print(f"{found['equal']} tensors are bit-equal, {len(found['tensors'])} are not")
    raise typer.Exit(int(inspect.is_different(found)))


def _apart(one: dict[str, Any]) -> str:
    if "shapes" in one:
        (a, b), (c, d) = one["shapes"], one["dtypes"]
        return f"{a} {c} | {b} {d}"
    if one["largest"] is None:
        return "not finite on one side"
    relative = "" if one["relative"] is None else f", {one['relative']:.2g} of the largest value"
    return f"{one['largest']:.3g} apart at most{relative}"


@app.command("convert")
def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="What to convert: a run, a folder, a file.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Folder to write.")],
    to: Annotated[str, typer.Option("--to", help="Write a run's weights for another system: huggingface.")] = "",
    framework: Annotated[
        str, typer.Option("--from", help="Read another system's weights as step 0 of a run: huggingface, megatron.")
    ] = "",
    run_file: Annotated[
        Path | None, typer.Option("--run", metavar="RUN.toml", help="With --from: the run the weights are for.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="With --to: fp32, bf16 or fp16.")] = "fp32",
) -> None:
    """Weights to and from other systems; both sides' logits are compared on the spot.

    --to huggingface writes a folder with config, weights and tokenizer. --from writes step 0 of a run into DST, for
    checkpoint.load; from huggingface the run follows from the configuration unless --run gives one. From megatron SRC
    is a folder of mp_rank_* or a safetensors file with Megatron core's names.
    """
    from steelyard.spec import error

    if to == "huggingface" and not framework:
        from steelyard.checkpoint.convert import exchange

        if dtype not in exchange.NAMES:
            raise error("S005", place="--dtype", name="--dtype", expected="fp32, bf16 or fp16", found=dtype, advice="")
        print("\n".join(exchange.export(source, target, dtype)))
    elif to or framework not in ("megatron", "huggingface"):
        raise error("C006", place="--to" if to else "--from", way="to" if to else "from", framework=to or framework)
    else:
        _convert_in(source, target, framework, run_file)


def _convert_in(source: Path, target: Path, framework: str, run_file: Path | None) -> None:
    from steelyard.checkpoint.convert import exchange, legacy, megatron, weights
    from steelyard.spec import error

    if run_file is None and framework == "megatron":
        raise error("C012", place="--run")
    run = _run_of(source, run_file)
    if framework == "huggingface":
        print(path := weights.write_start(exchange.read(source, run), run, source, target))
        print(exchange.check_import(path, source))
        return
    read = legacy.read if legacy.is_legacy(source) else megatron.read
    found = read(source, run.model)
    whole = {name: exchange.with_padding(name, tensor, run) for name, tensor in found.items()}
    print(weights.write_start(whole, run, source, target))


def _run_of(source: Path, run_file: Path | None) -> "Run":
    """The run that is given, or the one a Hugging Face configuration describes."""
    from steelyard.frameworks.huggingface import config
    from steelyard.spec import load, resolve

    if run_file is not None:
        return load(run_file).run
    tokenizer = {"tokenizer": str(source)} if (source / "tokenizer.json").is_file() else {}
    return resolve({**config.read(source / "config.json"), "data": tokenizer}, source=str(source)).run
