"""A run's samples as tensors."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard.data import manifest, tokenizer
from steelyard.data.splits import Samples, open_splits, parse
from steelyard.spec.data import Source
from steelyard.spec.errors import UserError, error
from steelyard.spec.run import Run


@dataclass(frozen=True)
class Batch:
    """Consecutive samples of the global order; S = sequence length.

    `loss_mask` is False where the input token ends a document and `mask_loss_at_eod` is on. `positions` restart after
    such a token (None unless `reset_positions`). `documents` numbers the documents within each sample; the token that
    ends a document belongs to it (None unless `reset_attention`). `samples` are the global sample numbers.
    """

    tokens: torch.Tensor  # [count, S] int64
    labels: torch.Tensor  # [count, S] int64
    loss_mask: torch.Tensor  # [count, S] bool
    positions: torch.Tensor | None  # [count, S] int64
    documents: torch.Tensor | None  # [count, S] int32
    samples: torch.Tensor  # [count] int64


@dataclass(frozen=True)
class Ends:
    """What happens at the id that ends a document; `eod` is None where nothing does."""

    eod: int | None = None
    mask_loss: bool = False
    reset_positions: bool = False
    reset_attention: bool = False


NO_ENDS = Ends()


@dataclass(frozen=True)
class Split(Samples):
    """Samples that come as tensors, with what the run does at the end of documents."""

    ends: Ends = NO_ENDS

    def batch(self, first: int, count: int, vocab_size: int | None = None) -> Batch:
        """Samples `first` to `first + count` of the global order.

        Raises UserError D012 beyond the last sample, D004 for an id that a vocabulary of `vocab_size` does not have.
        """
        stream = self.read(first, count, vocab_size)
        tokens = np.ascontiguousarray(stream[:, :-1])
        ended = tokens == self.ends.eod if self.ends.eod is not None else np.zeros_like(tokens, bool)
        return Batch(
            torch.from_numpy(tokens),
            torch.from_numpy(np.ascontiguousarray(stream[:, 1:])),
            torch.from_numpy(~ended) if self.ends.mask_loss else torch.ones(tokens.shape, dtype=torch.bool),
            torch.from_numpy(_positions(ended)) if self.ends.reset_positions else None,
            torch.from_numpy(_documents(ended)) if self.ends.reset_attention else None,
            torch.arange(first, first + count),
        )


def open_data(run: Run, *, build: bool) -> dict[str, Split]:
    """The run's splits (see `splits.open_splits` for the names, `build` and the errors) as tensors.

    Raises UserError D008 where an option needs the id that ends a document and nothing tells it.
    """
    ends = _ends(run)
    opened = open_splits(run, build=build)
    return {name: Split(s.name, s.seq_length, s.order, s.notes, ends) for name, s in opened.items()}


def _documents(ended: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Number of the document of each token within its sample: ended [count, S] -> [count, S]."""
    return (np.cumsum(ended, axis=1) - ended).astype(np.int32)


def _positions(ended: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Position of each token since the last end of a document: ended [count, S] -> [count, S]."""
    place = np.arange(ended.shape[1])
    starts = np.zeros(ended.shape, np.int64)
    starts[:, 1:] = np.where(ended[:, :-1], place[1:], 0)
    return place - np.maximum.accumulate(starts, axis=1)


def _ends(run: Run) -> Ends:
    """The options at the end of documents, with the id that ends them: the tokenizer's, else the manifest's."""
    data = run.data
    if not (data.mask_loss_at_eod or data.reset_positions or data.reset_attention):
        return Ends()
    known, made = _eod_of_tokenizer(data.tokenizer), _eod_in_manifests(data.train)
    if known is not None and made is not None and known != made:
        raise error("D027", "data.tokenizer", name=data.tokenizer, known=known, made=made)
    eod = made if known is None else known
    if eod is None:
        raise error("D008", "data.tokenizer", name=data.tokenizer)
    return Ends(eod, data.mask_loss_at_eod, data.reset_positions, data.reset_attention)


def _eod_of_tokenizer(name: str) -> int | None:
    """None also for a tokenizer that is not here: it is needed only where no manifest tells the id."""
    try:
        return tokenizer.load(name).eod
    except UserError:
        return None


def _eod_in_manifests(sources: tuple[Source, ...]) -> int | None:
    """The id that all data sets with a manifest were made with."""
    _, prefixes = parse(sources, "train")
    ids = {made.eod for prefix in prefixes if (made := manifest.find(prefix)) and made.append_eod}
    return ids.pop() if len(ids) == 1 else None
