"""Logs of LitGPT's pretraining, 2023 to today. `iter` counts micro-batches, `step` optimizer steps; the time is that of
one micro-batch, so a step's time is not known without the accumulation. Source: litgpt `pretrain.py`.
"""

import re

from steelyard.frameworks.lines import number
from steelyard.frameworks.reading import Reading
from steelyard.record.schema import Validation

NAME = "LitGPT"

MARKS = (
    re.compile(r"iter \d+ (?:\| )?step \d+(?: \||:) loss"),
    re.compile(r"iter time: [\d.]+ ?ms"),
    re.compile(r"Measured TFLOPs: [\d.]+"),
)
STEP = re.compile(
    r"iter (\d{1,12}) (?:\| )?step (\d{1,12})(?: \||:) loss(?: train:)? ([\d.]{1,12}|nan|inf),"
    r"(?: val: (n/a|[\d.]{1,12}|nan) \|)? iter time: ([\d.]{1,14}) ?ms"
)
VALIDATION = re.compile(r"iter (\d{1,12}): val loss ([\d.]{1,12}|nan)")


class Reader:
    def __init__(self, source: str):
        self.reading = Reading(NAME, source)
        self.reading.conventions = {
            "loss": "mean over the micro-batches of the step, rank 0",
            "seconds": "not printed: the time is that of one micro-batch",
            "memory": "not printed per step",
        }
        self.last = -1

    def feed(self, line: int, text: str) -> None:
        if "iter time" in text and (found := STEP.search(text)):
            step = int(found.group(2))
            self.reading.print("milliseconds_per_micro_batch", number(found.group(5)), line)
            if step != self.last:  # further micro-batches of one step repeat its number
                self.reading.step(line, step, loss=number(found.group(3)))
            self.last = step
        elif "val loss" in text and (validation := VALIDATION.search(text)):
            step = self.reading.steps[-1].step if self.reading.steps else 0
            self.reading.validations.append(Validation(step, 0, "validation", number(validation.group(2)), 0, 0.0))

    def finish(self) -> None:
        """Nothing is held."""
