"""`steelyard demo`: the whole job on real text that is already on this machine, in minutes."""

from pathlib import Path
from typing import Annotated

import typer

HELP = "Everything, end to end, on this machine, on real text, in minutes."

RUN = """# Written by `steelyard demo`; train it again with: steelyard train {folder}/demo.toml --world {world}
name = "demo"
seed = 1234

[model]
kind = "gpt2"
num_layers = 4
hidden_size = 192
num_attention_heads = 6
seq_length = 256
vocab_size = {vocab_size}
activation = "gelu_tanh"
position = "rotary"
bias = false

[parallel]
data = {world}
zero = 1

[batch]
global_batch_size = 16

[optimizer]
betas = [0.9, 0.95]
weight_decay = 0.1

[learning_rate]
peak = 3e-3
minimum = 3e-5
decay = "cosine"
warmup_fraction = 0.1

[length]
steps = {steps}

[data]
train = ["{folder}/train_text_document"]
validation = ["{folder}/held_out_text_document"]
tokenizer = "{folder}/tokenizer.json"
cache = "{folder}/cache"

[evaluation]
steps = {evaluation_steps}

[record]
folder = "{folder}/run"
"""
VOCAB_SIZE = 2048
TOKENS_PER_BATCH = 16 * 256
HELD_OUT = 40  # every 40th file is never trained on


def demo(
    folder: Annotated[Path, typer.Option(help="Where everything goes.")] = Path("runs/demo"),
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps; fewer for a quick look.")] = 550,
    world: Annotated[int, typer.Option(min=1, max=2, help="Ranks.")] = 2,
) -> None:
    """Real text: the source and documentation strings of this Python's standard library, split by file."""
    from steelyard.cli.train import start
    from steelyard.plan import sheet
    from steelyard.report import html, terminal
    from steelyard.spec import load

    train_files, held_out = standard_library()
    print(f"text: {len(train_files):,} files of Python's standard library to learn, {len(held_out):,} held out\n")
    tokens = prepare(folder, train_files, held_out)
    path = folder / "demo.toml"
    facts = {"folder": folder, "world": world, "steps": steps, "vocab_size": VOCAB_SIZE}
    path.write_text(RUN.format(**facts, evaluation_steps=max(1, tokens // TOKENS_PER_BATCH)))
    loaded = load(path, world=world)
    print(terminal.plan(sheet.as_json(loaded.run)), flush=True)
    result = start(loaded)
    if result.code:
        raise typer.Exit(result.code)
    learned = how_well(folder / "run", held_out, tokens)
    written = sample(folder / "run")
    page = html.write(folder / "run", [("How well it learned", learned), ("What it writes", written)])
    print(f"\n{learned}\n\nwhat it writes after `def `:\n{written}\n")
    print(f"page        {page}\nrun file    {path}\nrecord      {folder}/run/metrics.jsonl, {folder}/run/tensorboard")
    print(f"more text   steelyard generate {folder}/run --prompt 'class '")


def standard_library() -> tuple[list[Path], list[Path]]:
    """(files to learn, files held out): the .py files of the standard library, its tests left out."""
    import sysconfig

    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = sorted(
        path for path in root.rglob("*.py") if not skipped & set(path.relative_to(root).parts) and path.stat().st_size
    )
    return [f for n, f in enumerate(files) if n % HELD_OUT], files[::HELD_OUT]


def prepare(folder: Path, train_files: list[Path], held_out: list[Path]) -> int:
    """Train the tokenizer on the training part and tokenize both; returns the tokens held out."""
    from steelyard.data import tokenizer
    from steelyard.data.prepare import prepare

    name = str(folder / "tokenizer.json")
    tokenizer.train_bpe(train_files, VOCAB_SIZE, name)
    manifests = [
        prepare(files, folder / f"{part}_text_document", name, on_bad="skip")
        for part, files in (("train", train_files), ("held_out", held_out))
    ]
    for manifest in manifests:
        print(manifest.describe())
    print()
    return manifests[1].tokens


def how_well(run: Path, held_out: list[Path], tokens: int) -> str:
    """Bits per byte of the held-out text, with two yardsticks that learn nothing from the training text."""
    import lzma
    import math
    from collections import Counter

    from steelyard.record.read import read_folder

    text = b"".join(path.read_bytes() for path in held_out)
    counts = Counter(text)
    entropy = -sum(n / len(text) * math.log2(n / len(text)) for n in counts.values())
    packed = 8 * len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) / len(text)
    last = read_folder(run).validations[-1]
    loss, seen = last.loss, last.tokens
    bits = math.nan if loss is None else loss * tokens / len(text) / math.log(2)
    return (
        f"held-out text, never trained on: {len(text):,} bytes, {tokens:,} tokens, {seen:,} of them evaluated\n"
        f"  {bits:6.3f}  bits a byte: this model ({math.nan if loss is None else loss:.4f} nats a token)\n"
        f"  {packed:6.3f}  bits a byte: lzma, extreme, on the held-out text alone\n"
        f"  {entropy:6.3f}  bits a byte: entropy of its single bytes"
    )


def sample(run: Path) -> str:
    """A short continuation of `def `."""
    import torch

    from steelyard.checkpoint.weights import load_model
    from steelyard.data import tokenizer
    from steelyard.model.generate import generate

    model, saved = load_model(run, torch.device("cpu"))
    codec = tokenizer.load(saved.run.data.tokenizer)
    prompt = codec.encode("def ").tolist()
    found = generate(model, torch.tensor(prompt), 120, temperature=0.7, top_k=40, stop=codec.eod)
    return codec.decode([*prompt, *found])
