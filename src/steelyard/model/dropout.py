"""Dropout whose masks are a hash of what is dropped, so that no layout, order of work or recompute changes them."""

import hashlib

import torch
from torch import Tensor, nn

from steelyard.model.position import Place

_LOW = 0xFFFFFFFF


class Dropout(nn.Module):
    """Drop channels of a hidden state with probability p.

    The mask is a hash of (seed, step, site, sample, position, channel). `site` names the layer and branch;
    `first_position` is set from outside where a rank holds only part of the sequence.
    """

    def __init__(self, probability: float, seed: int, site: str):
        super().__init__()
        self.probability, self.seed, self.site = probability, seed, site
        self.first_position = 0

    def forward(self, hidden: Tensor, place: Place) -> Tensor:  # [batch, sequence, channels]
        if self.probability == 0 or not self.training:
            return hidden
        positions = torch.arange(hidden.shape[1], device=hidden.device) + self.first_position
        channels = torch.arange(hidden.shape[2], device=hidden.device)
        keep = keep_mask(self.probability, self.seed, self.site, place, (positions[:, None], channels[None, :]))
        return hidden * keep / (1 - self.probability)


def keep_mask(probability: float, seed: int, site: str, place: Place, axes: tuple[Tensor, ...]) -> Tensor:
    """bool mask, true with probability 1 - p. Shape: batch, then the broadcast shape of `axes` (coordinates within a
    sample: position and channel, or head, query and key)."""
    assert place.samples is not None, "dropout needs the global sample numbers"
    samples = place.samples.view(-1, *[1] * axes[0].dim())
    mixed = _mix(samples ^ _key(seed, place.step, site))
    for axis in axes:
        mixed = _mix(mixed ^ axis)
    return mixed >= int(probability * 2**32)


def _key(seed: int, step: int, site: str) -> int:
    """32 bits from what is constant over a call."""
    digest = hashlib.blake2b(f"{seed}/{step}/{site}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def _mix(values: Tensor) -> Tensor:
    """A bijection of 32-bit integers held in int64 in which every input bit moves every output bit. Source: the
    `lowbias32` constants found by C. Wellons' search for low-bias integer hashes (2018)."""
    values = (values + 0x9E3779B9) & _LOW
    values = ((values ^ (values >> 16)) * 0x7FEB352D) & _LOW
    values = ((values ^ (values >> 15)) * 0x846CA68B) & _LOW
    return values ^ (values >> 16)
