"""`steelyard data`: token files, made, joined, looked into, divided and checked."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steelyard.cli.arguments import Json

if TYPE_CHECKING:
    from steelyard.data.prepare import Progress

HELP = "Prepare, merge, inspect, split and verify token files."
app = typer.Typer(no_args_is_help=True, help=HELP)


class OnBad(StrEnum):
    stop = "stop"
    skip = "skip"


Output = Annotated[str, typer.Option("--output", "-o", metavar="PREFIX", help="Where to write.", show_default=False)]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace files that are there already.")]
Prefix = Annotated[str, typer.Argument(metavar="PREFIX", help="The path without .bin or .idx.", show_default=False)]
TokenizerName = Annotated[
    str,
    typer.Option("--tokenizer", help='"byte", a tokenizer.json, a folder with vocab.json and merges.txt, "ids:EOD".'),
]


@app.command()
def prepare(
    inputs: Annotated[
        list[str], typer.Argument(metavar="INPUT...", help="JSON-lines and text files, folders, patterns; - for stdin.")
    ],
    output: Output,
    tokenizer: TokenizerName = "byte",
    train_tokenizer: Annotated[
        int, typer.Option(metavar="IDS", help="First train a BPE of so many ids on the inputs, written to --tokenizer.")
    ] = 0,
    field: Annotated[str, typer.Option(help="The field of a JSON line that is the document.")] = "text",
    append_eod: Annotated[bool, typer.Option(help="End each document with the tokenizer's id for it.")] = True,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; one per core by default.")] = None,
    on_bad: Annotated[OnBad, typer.Option(help="What a bad line does.")] = OnBad.stop,
    keep_empty: Annotated[
        bool, typer.Option("--keep-empty", help="Keep documents without text (as a lone EOD).")
    ] = False,
    dtype: Annotated[str | None, typer.Option(help="uint16 or int32; by the vocabulary if left out.")] = None,
    shard: Annotated[
        str | None, typer.Option(metavar="I/N", help="Only the I-th of N parts, from 0; `merge` joins.")
    ] = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Write PREFIX_text_document.bin and .idx from documents."""
    from dataclasses import asdict
    from json import dumps

    from steelyard.data import prepare as preparing

    part = _shard(shard)
    prefix = preparing.prefix_for(output, field)
    prefix += f"-{part[0]:05d}-of-{part[1]:05d}" if part else ""
    _refuse_existing(prefix, overwrite)
    if train_tokenizer:
        _train_tokenizer(inputs, field, train_tokenizer, tokenizer)
    made = preparing.prepare(
        inputs, prefix, tokenizer, field=field, append_eod=append_eod, workers=workers, on_bad=on_bad.value,
        keep_empty=keep_empty, dtype=dtype, shard=part, progress=_Meter(),
    )  # fmt: skip
    print(
        dumps({"prefix": prefix, **asdict(made)}, indent=2)
        if json
        else f"{made.describe()}\n-> {prefix}.bin, .idx, .json"
    )


@app.command()
def merge(
    prefixes: Annotated[list[str], typer.Argument(metavar="PREFIX...", help="Token files, in order; or all shards.")],
    output: Output,
    overwrite: Overwrite = False,
) -> None:
    """Join token files into one; the shards of one prepare must all be there."""
    from steelyard.data.merge import merge as join
    from steelyard.data.store import Dataset

    _refuse_existing(output, overwrite)
    join(prefixes, output)
    joined = Dataset(output)
    print(f"{joined.num_documents:,} documents, {len(joined.tokens):,} tokens -> {output}.bin, .idx")


@app.command()
def inspect(
    target: Annotated[str, typer.Argument(metavar="PREFIX|RUN.toml", help="A token file, or a run (file or folder).")],
    document: Annotated[list[int] | None, typer.Option(help="Show the text of this document; may be repeated.")] = None,
    samples: Annotated[str, typer.Option(metavar="A:B", help="With a run: what is in its samples A to B - 1.")] = "0:1",
    split: Annotated[str, typer.Option(help="With a run: train, validation (or validation.NAME) or test.")] = "train",
    tokenizer: Annotated[str | None, typer.Option(help="By default the manifest's or the run's.")] = None,
    json: Json = False,
) -> None:
    """What is in a token file, or in some samples of a run."""
    path = Path(target)
    if path.is_dir() and (path / "run.toml").is_file():
        path = path / "run.toml"
    if path.suffix == ".toml":
        _inspect_run(path, split, samples, tokenizer)
    else:
        _inspect_file(target, document or [], tokenizer, json)


@app.command("split")
def split_(
    prefix: Prefix,
    weights: Annotated[str, typer.Argument(metavar="WEIGHTS", help='Such as "949,50,1".', show_default=False)],
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="Write each part: OUTPUT_train and so on.")
    ] = None,
) -> None:
    """What a split comes to in documents and tokens. Exit code 1 when a part that is asked for is empty."""
    from steelyard.data.merge import divide
    from steelyard.data.order import SPLITS, shares, split_bounds
    from steelyard.data.store import Dataset
    from steelyard.spec.errors import error

    if not any(shares(weights)):
        raise error("S306", place="data split", split=weights)
    dataset = Dataset(prefix)
    print(f"{'':10} {'share':>8} {'sequences':>22} {'tokens':>16}")
    hollow = []
    for name, share, (first, end) in zip(SPLITS, shares(weights), split_bounds(weights, len(dataset)), strict=True):
        tokens = int(dataset.lengths[first:end].sum(dtype="int64"))
        print(f"{name:10} {share / sum(shares(weights)):8.3%} {f'[{first:,}, {end:,})':>22} {tokens:16,}")
        hollow += [name] if share and not tokens else []
    if output is not None:
        for part, documents in divide(prefix, weights, output):
            print(f"{documents:,} documents -> {part}.bin, .idx")
    if hollow:
        print(f"empty: {', '.join(hollow)}; {len(dataset):,} sequences are too few for a share that small")
        raise typer.Exit(1)


@app.command()
def verify(
    prefix: Prefix,
    vocab_size: Annotated[
        int | None, typer.Option(help="Ids at or above it are wrong; by default the manifest's.")
    ] = None,
) -> None:
    """Read a token file whole and say what is wrong with it. Exit code 1 when anything is."""
    from steelyard.data.inspect import verify as problems_of
    from steelyard.spec.errors import UserError

    try:
        problems = list(problems_of(prefix, vocab_size))
    except UserError as failure:
        if failure.problems[0].code not in ("D002", "D003", "D019"):
            raise
        problems = [str(failure)]
    for found in problems:
        print(found)
    print(f"{prefix}: {'not sound' if problems else 'sound'}")
    if problems:
        raise typer.Exit(1)


def _shard(text: str | None) -> tuple[int, int] | None:
    from steelyard.spec.errors import error

    if text is None:
        return None
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal()):
        raise error("D020", place=f"--shard {text}", rule="a shard is written I/N", advice="such as --shard 0/8")
    return int(index), int(count)


def _refuse_existing(prefix: str, overwrite: bool) -> None:
    from steelyard.spec.errors import error

    if Path(f"{prefix}.idx").exists() and not overwrite:
        raise error("D025", place=f"{prefix}.idx")


def _train_tokenizer(inputs: list[str], field: str, ids: int, path: str) -> None:
    from steelyard.data import inputs as sources
    from steelyard.data.documents import texts
    from steelyard.data.tokenizer import train_bpe
    from steelyard.spec.errors import error

    if not path.endswith(".json"):
        detail = "--train-tokenizer writes a tokenizer.json, and this is no name of one"
        raise error("D007", place="--tokenizer", name=path, detail=detail)
    if ids < 257:
        raise error("D007", place="--train-tokenizer", name=path, detail="256 bytes and the EOD take 257 ids")
    made = train_bpe(texts(sources.find(inputs), field), ids, path)
    typer.echo(f"trained {made.vocab_size:,} ids -> {path}", err=True)


class _Meter:
    """Progress on stderr: in place on a terminal, else a line now and then."""

    def __init__(self) -> None:
        import sys

        self.terminal = sys.stderr.isatty()
        self.shown = 0.0
        self.first: Progress | None = None

    def __call__(self, now: "Progress") -> None:
        first = self.first = self.first or now  # where an interrupted call went on
        last = now.done == now.total and now.total > 0
        if now.seconds - self.shown < (0.2 if self.terminal else 10.0) and not (last and self.terminal):
            return
        self.shown = now.seconds
        rate = (now.done - first.done) / max(now.seconds - first.seconds, 1e-9)
        left = f"{(now.total - now.done) / rate:,.0f} s left" if now.total and rate else "no end known"
        share = f"{now.done / now.total:4.0%}" if now.total else f"{now.done / 2**20:,.0f} MiB"
        text = f"{share}  {now.documents:,} documents  {now.tokens:,} tokens  {rate / 2**20:.1f} MiB/s  {left}"
        typer.echo(f"\r{text:<100}" if self.terminal else text, err=True, nl=last or not self.terminal)


def _inspect_file(prefix: str, documents: list[int], tokenizer: str | None, json: bool) -> None:
    from dataclasses import asdict
    from json import dumps

    from steelyard.data import manifest as manifests
    from steelyard.data.inspect import statistics
    from steelyard.data.store import Dataset
    from steelyard.spec.errors import error

    dataset, made = Dataset(prefix), manifests.find(prefix)
    for number in documents:
        if not 0 <= number < dataset.num_documents:
            raise error("D026", place=prefix, what=f"document {number}", count=dataset.num_documents, unit="documents")
    found = statistics(dataset)
    name = tokenizer or (made.tokenizer if made else None)
    shown = {number: _text([int(i) for i in dataset.document(number)], name) for number in documents}
    if json:
        print(dumps({**asdict(found), "manifest": asdict(made) if made else None, "text": shown}, indent=2))
        return
    print(f"{found.documents:,} documents in {found.sequences:,} sequences, {found.tokens:,} tokens, {found.dtype}, "
          f"{found.bytes:,} bytes")  # fmt: skip
    print(f"length of a document: {found.shortest:,} to {found.longest:,} tokens, median {found.median:,.1f}, mean "
          f"{found.mean:,.1f}")  # fmt: skip
    most = max(found.histogram.values(), default=1)
    for power, count in found.histogram.items():
        print(f"{power:>13,} {count:>13,} {'#' * -(-50 * count // most)}")
    if made:
        print(f"made with the tokenizer {made.tokenizer} ({made.vocab_size:,} ids, EOD {made.eod}):\n{made.describe()}")
    for number, text in shown.items():
        print(f"--- document {number}\n{text}")


def _inspect_run(path: Path, split: str, samples: str, tokenizer: str | None) -> None:
    from steelyard.data.splits import open_splits
    from steelyard.spec import load
    from steelyard.spec.errors import did_you_mean, error

    run = load(path).run
    splits = open_splits(run, build=True)
    if split not in splits:
        raise error("D026", place=f"--split {split}", what=f"split {split!r}", count=len(splits),
                    unit=f"splits ({did_you_mean(split, list(splits))})")  # fmt: skip
    first, colon, end = samples.partition(":")
    if not (first.isdecimal() and (end.isdecimal() or not colon)):
        raise error("D026", place=f"--samples {samples}", what="range of that form", count=splits[split].num_samples,
                    unit="samples; write A:B")  # fmt: skip
    print("\n".join(each.describe() for each in splits.values()))
    for number in range(int(first), int(end) if colon else int(first) + 1):
        ids = splits[split].read(number, 1)[0]
        order, inside = splits[split].order.at(number)
        print(f"--- sample {number:,} of {split}")
        for sequence, offset, taken in order.pieces(inside):
            document = order.dataset.document_of(sequence)
            piece, ids = ids[:taken], ids[taken:]
            print(f"{order.dataset.prefix} document {document:,} tokens {offset:,} to {offset + taken:,}: "
                  f"{_text([int(i) for i in piece], tokenizer or run.data.tokenizer)!r}")  # fmt: skip


def _text(ids: list[int], tokenizer: str | None) -> str:
    """The text of ids where there is a tokenizer, else the ids."""
    from steelyard.data.tokenizer import load

    return load(tokenizer).decode(ids) if tokenizer else " ".join(map(str, ids))
