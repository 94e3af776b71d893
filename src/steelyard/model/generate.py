"""Sampling from a whole model on one device, with a key-value cache."""

from collections.abc import Iterator

import torch
from torch import Tensor

from steelyard.model.attention import Cache
from steelyard.model.gpt import GPT


@torch.no_grad()
def generate(
    model: GPT,
    prompt: Tensor,
    count: int,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    stop: int | None = None,
) -> Iterator[int]:
    """Yield up to `count` token ids that follow `prompt` [length].

    temperature 0 takes the most likely token; top_k 0 samples from all. Padding rows are never sampled. Ends at the
    token `stop`, or where the model has no position left.
    """
    model.eval()
    cache, generator = Cache(), torch.Generator(prompt.device).manual_seed(seed)
    tokens = prompt[None]  # [1, length]
    limit = model.spec.max_position_embeddings if model.spec.position == "learned" else None
    for _ in range(count):
        if limit is not None and cache.length + tokens.shape[1] > limit:
            return
        logits = model(tokens, cache=cache)[0, -1, : model.spec.vocab_size].float()  # [vocab]
        token = _pick(logits, temperature, top_k, generator)
        if token == stop:
            return
        yield token
        tokens = torch.tensor([[token]], device=prompt.device)


def _pick(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    logits = logits / temperature
    if top_k:
        lowest = logits.topk(min(top_k, logits.numel())).values[-1]
        logits = logits.masked_fill(logits < lowest, -torch.inf)
    return int(torch.multinomial(logits.softmax(0), 1, generator=generator))
