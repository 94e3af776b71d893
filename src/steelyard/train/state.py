"""What determines the rest of a run besides weights and optimizer: a few numbers, the same for every layout."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class State:
    """Progress after `step` steps.

    samples, tokens: consumed by all steps. updates: steps that moved the weights; samples_updated: the samples of
    those (the learning rate is a function of it). skipped: steps that did not; nan: those with a non-finite loss or
    norm not answered by the loss scale; nan_in_a_row: of them, the unbroken run up to now.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    updates: int = 0
    samples_updated: int = 0
    skipped: int = 0
    nan: int = 0
    nan_in_a_row: int = 0

    def advance(self, batch_size: int, seq_length: int, updated: bool, nan: bool) -> None:
        self.step += 1
        self.samples += batch_size
        self.tokens += batch_size * seq_length
        self.updates += updated
        self.samples_updated += batch_size if updated else 0
        self.skipped += not updated
        self.nan += nan
        self.nan_in_a_row = self.nan_in_a_row + 1 if nan else 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)
