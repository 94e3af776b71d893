"""`steelyard generate`: text from a checkpoint."""

from pathlib import Path
from typing import Annotated

import typer

HELP = "Generate text from a checkpoint."


def generate(
    checkpoint: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder or one checkpoint.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "def ",
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens to generate at most.")] = 100,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the most likely token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from the k most likely; 0: from all.")] = 40,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same text.")] = 0,
) -> None:
    import torch

    from steelyard.checkpoint.weights import load_model
    from steelyard.data import tokenizer
    from steelyard.model.generate import generate
    from steelyard.spec import error

    model, saved = load_model(checkpoint, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    codec = tokenizer.load(saved.run.data.tokenizer)
    ids = list(codec.encode(prompt)) or ([codec.eod] if codec.eod is not None else [])
    if not ids or max(ids) >= saved.run.model.vocab_size:
        raise error("G001", place="--prompt", tokenizer=saved.run.data.tokenizer, vocab=saved.run.model.vocab_size)
    given = torch.tensor(ids, device=model.head_weight.device)
    found = list(generate(model, given, tokens, temperature, top_k, seed, codec.eod))
    print(codec.decode(ids + found))
