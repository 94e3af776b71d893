"""Initial weights, drawn per parameter from the seed and the parameter's name, so that no layout changes them."""

import hashlib
import math

import torch
from torch import Tensor

from steelyard.spec.model import Model


def initial(spec: Model, name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """The whole float32 initial value of a parameter of the model, on the CPU.

    Megatron's scheme: matrices and embeddings N(0, init_std), the output matrices of attention and MLP N(0, init_std /
    sqrt(2 num_layers)), biases 0, norm weights 1. A vocabulary table is drawn for the real rows; padding rows come from
    a stream of their own, so that padding never moves the real rows. A tied head is the embedding under another name.
    """
    if name == "head.weight" and spec.tied_embeddings:
        name = "embedding.word.weight"
    if name.endswith("bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    std = spec.init_std
    if name.endswith(("attention.out.weight", "mlp.down.weight")):
        std /= math.sqrt(2 * spec.num_layers)
    if name in ("embedding.word.weight", "head.weight"):
        real = min(spec.vocab_size, shape[0])
        padding = (shape[0] - real, *shape[1:])
        return torch.cat([_normal((real, *shape[1:]), std, seed, name), _normal(padding, std, seed, f"{name}/padding")])
    return _normal(shape, std, seed, name)


def _normal(shape: tuple[int, ...], std: float, seed: int, name: str) -> Tensor:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.empty(shape).normal_(0.0, std, generator=generator)
