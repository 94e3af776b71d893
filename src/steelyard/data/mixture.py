"""Several data sets as one: Megatron's blends, exactly.

Each data set keeps its own shuffled order; the mixture says from which one the next sample is taken. Source:
Megatron-LM's `BlendedMegatronDatasetBuilder`, `BlendedDataset` and their compiled helpers.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steelyard.data import cache
from steelyard.data.compiled import compiled
from steelyard.data.order import Order
from steelyard.spec.errors import error

SURPLUS = 0.005  # Megatron's --mid-level-dataset-surplus
MOST = 32767  # data sets, whose numbers are int16


def normalised(weights: Sequence[float]) -> list[float]:
    """Shares that sum to 1, by NumPy's order of summation, which is part of the result."""
    given = np.array(weights, np.float64)
    return [float(share) for share in given / given.sum()]


def asked_of_each(weights: Sequence[float], samples: int) -> list[int]:
    """Samples asked of each data set for `samples` of the mixture: its share, rounded up, and a surplus on top."""
    return [math.ceil(math.ceil(samples * share) * (1 + SURPLUS)) for share in normalised(weights)]


def length(weights: Sequence[float], samples: int) -> int:
    """Samples of the mixture: the shares, each rounded up, so a few more than asked for."""
    return sum(math.ceil(samples * share) for share in normalised(weights))


def choices(weights: Sequence[float], samples: int) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """(data set, its own sample number) of each sample of a mixture, both [samples].

    The next sample comes from the data set furthest behind its share, the first among equals. The weights are
    normalised here once more, as Megatron does: it decides ties.
    """
    shares = np.array(normalised(normalised(weights)), np.float64)
    dataset, sample = np.empty(samples, np.int16), np.empty(samples, np.int64)
    _choose(shares, np.full(len(shares), samples, np.int64), dataset, sample)
    return dataset, sample


def choices_until_used_up(sizes: Sequence[int], samples: int) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """The same without weights: data sets of `sizes` samples, each taken once, spread evenly; [samples] of them."""
    shares = np.array(sizes, np.float64) / sum(sizes)
    dataset, sample = np.empty(samples, np.int16), np.empty(samples, np.int64)
    _choose(shares, np.array(sizes, np.int64), dataset, sample)
    return dataset, sample


class Mixture:
    """The samples of several orders as one. `len` is the number of samples.

    `weights` None takes every sample of the parts' one epoch, spread evenly. `parts` are made by `order(i, samples)`,
    with the number of samples asked of data set i; where Megatron's surplus would not cover what is taken from one (it
    stops with an IndexError then), that many are asked for instead.
    Raises UserError D011 for a weight that is not above 0 and for too many data sets.
    """

    def __init__(
        self, weights: Sequence[float] | None, samples: int, count: int, order: Callable[[int, int | None], Order],
        folder: str | Path, build: bool,
    ):  # fmt: skip
        if count > MOST or any(not weight > 0 for weight in weights or ()):
            raise error("D011", "data", weights=list(weights or ()), most=MOST)
        self.weights = weights
        if weights is None:
            self.parts = [order(i, None) for i in range(count)]
            sizes = [len(part) for part in self.parts]
            wanted = min(samples, sum(sizes))
        else:
            sizes, wanted = [], length(weights, samples)
        facts = {"kind": "mixture", "version": 1, "weights": weights, "sizes": sizes, "samples": wanted}
        built = cache.arrays(folder, facts, _builder(weights, sizes, wanted) if build else None)
        self.dataset, self.sample, self.taken = built["dataset"], built["sample"], built["taken"]
        if weights is not None:
            asked = asked_of_each(weights, samples)
            self.parts = [order(i, max(asked[i], int(self.taken[i]))) for i in range(count)]

    def __len__(self) -> int:
        return len(self.dataset)

    def at(self, number: int) -> tuple[Order, int]:
        """The order that sample `number` comes from, and its number there."""
        return self.parts[self.dataset[number]], int(self.sample[number])


def _builder(weights: Sequence[float] | None, sizes: Sequence[int], samples: int) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        chosen = choices_until_used_up(sizes, samples) if weights is None else choices(weights, samples)
        np.save(folder / "dataset.npy", chosen[0])
        np.save(folder / "sample.npy", chosen[1])
        np.save(folder / "taken.npy", np.bincount(chosen[0], minlength=len(weights or sizes)))

    return build


@compiled
def _choose(shares: Any, sizes: Any, dataset: Any, sample: Any) -> None:
    taken = np.zeros(len(shares))
    left = np.where(sizes > 0, shares, -np.inf)  # a data set that is used up is never behind
    for k in range(len(dataset)):
        place = max(float(k), 1.0)
        best, behind = 0, left[0] * place - taken[0]
        for i in range(1, len(left)):
            here = left[i] * place - taken[i]
            if here > behind:
                best, behind = i, here
        dataset[k], sample[k] = best, taken[best]
        taken[best] += 1.0
        if taken[best] == sizes[best]:
            left[best] = -np.inf
