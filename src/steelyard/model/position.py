"""Where tokens stand: positions, documents, and what attention derives from them (rotary angles, biases, masks)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from steelyard.spec.model import Model


@dataclass(frozen=True)
class Place:
    """Where the tokens of one micro-batch stand, worked out once per forward pass and read by every block.

    samples [batch]: global sample numbers and `step` feed the dropout hash, nothing else. A mask or bias of None means
    plain causal attention.
    """

    samples: Tensor | None = None
    step: int = 0
    rotary: tuple[Tensor, Tensor] | None = None  # cos, sin, each [batch or 1, 1, sequence, rotated / 2]
    mask: Tensor | None = None  # bool [batch, 1, sequence, sequence], true where a query may look
    alibi: Tensor | None = None  # [1, heads, sequence, sequence], added to the scores


def place(
    spec: Model,
    length: int,
    device: torch.device,
    positions: Tensor | None = None,
    documents: Tensor | None = None,
    samples: Tensor | None = None,
    step: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Place:
    """positions [batch, sequence] default to 0, 1, ...; documents [batch, sequence] confine attention to equal ids."""
    if positions is None:
        positions = torch.arange(length, device=device)[None]  # [1, sequence]
    angles = rotary_angles(spec, positions, dtype) if spec.position == "rotary" else None
    return Place(
        samples=samples,
        step=step,
        rotary=angles,
        mask=document_mask(documents) if documents is not None else None,
        alibi=alibi_bias(spec.num_attention_heads, length, device, dtype) if spec.position == "alibi" else None,
    )


def rotary_angles(spec: Model, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of position x frequency, [batch or 1, 1, sequence, rotated / 2]. Source: Su et al. 2021."""
    rotated = int(spec.head_dim * spec.rotary_fraction)
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    channels = torch.arange(0, rotated, 2, device=positions.device, dtype=exact)
    frequencies = spec.rotary_base ** (-channels / rotated)  # [rotated / 2]
    angles = positions[:, None, :, None].to(exact) * frequencies  # [batch or 1, 1, sequence, rotated / 2]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(heads: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Turn channel i with channel i + rotated/2 (the half-split layout of Llama and Megatron).

    heads [batch, heads, sequence, head_dim]; channels beyond the rotated ones pass unchanged.
    """
    cos, sin = angles
    half = cos.shape[-1]
    first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def document_mask(documents: Tensor) -> Tensor:
    """[batch, sequence] ids -> bool [batch, 1, sequence, sequence]: causal, within the query's own document."""
    same = documents[:, :, None] == documents[:, None, :]  # [batch, sequence, sequence]
    return (same & causal_mask(documents.shape[1], documents.device))[:, None]


def causal_mask(length: int, device: torch.device) -> Tensor:
    """bool [sequence, sequence], true on and below the diagonal."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


def alibi_bias(heads: int, length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[1, heads, sequence, sequence]: slope x (key - query). Source: Press et al. 2021; head counts that are no power
    of two interleave the slopes of the next one."""
    slopes = torch.tensor(alibi_slopes(heads), device=device, dtype=torch.float64)
    steps = torch.arange(length, device=device)
    distance = steps[None, :] - steps[:, None]  # [query, key], negative towards the past
    return (slopes[:, None, None] * distance)[None].to(dtype)


def alibi_slopes(heads: int) -> list[float]:
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (n + 1) / power) for n in range(power)]
    return slopes + [2 ** (-4 * (2 * n + 1) / power) for n in range(heads - power)]
