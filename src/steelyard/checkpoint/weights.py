"""The whole model of a checkpoint on one device, whatever layout saved it."""

from pathlib import Path

import torch

from steelyard.checkpoint import shards, store
from steelyard.model.gpt import GPT
from steelyard.spec import Loaded, load


def load_model(path: Path, device: torch.device) -> tuple[GPT, Loaded]:
    """The model in float32 and the run that saved it. `path` is a run folder or one checkpoint.

    Raises UserError C001, C002, C003.
    """
    found = store.found(path)
    saved = load(found / "run.toml")
    with torch.device("meta"):
        model = GPT(saved.run.model, saved.run.padded_vocab_size)
    model.to_empty(device=device)
    shards.load(found, {f"weights.{name}": parameter.detach() for name, parameter in model.named_parameters()})
    return model.eval(), saved
