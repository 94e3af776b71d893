"""Logs of nanochat's base_train. The loss is an exponential mean of rank 0's last micro-batches; `tok/sec` is of the
whole run. Steps count from 0. Validation is in bits per *byte*, which no loss per token is. Source: nanochat
`scripts/base_train.py`.
"""

import re

from steelyard.frameworks.lines import number, whole
from steelyard.frameworks.reading import MIB, Reading

NAME = "nanochat"

MARKS = (
    re.compile(r"step \d{5}/\d+ \([\d.]+%\) \| loss: "),
    re.compile(r"\| lrm: [\d.]+ \| dt: [\d.]+ms"),
    re.compile(r"Validation bpb: [\d.]+"),
)
STEP = re.compile(
    r"step (\d{5,12})/(\d{5,12}) \([\d.]{1,8}%\) \| loss: ([\d.]{1,14}|nan|inf) \| (?:grad norm: ([\d.]{1,14}) \| )?"
    r"lrm: ([\d.]{1,10}) \| dt: ([\d.]{1,14})ms \| tok/sec: ([\d,]{1,18})"
)
BATCH = re.compile(r"Total batch size ([\d,]{1,18}) => gradient accumulation steps: (\d{1,9})")
MICRO = re.compile(r"Tokens / micro-batch / rank: (\d{1,9}) x (\d{1,9}) = ")
PEAK = re.compile(r"Peak memory usage: ([\d.]{1,14})MiB")


class Reader:
    def __init__(self, source: str):
        self.reading = Reading(NAME, source)
        self.reading.zero_based = True
        self.reading.conventions = {
            "loss": "exponential mean (0.9) of the last micro-batch of rank 0",
            "seconds": "that step",
            "memory": "PyTorch's peak allocated, MiB, rank 0, at the end",
        }
        self.tokens: int | None = None

    def feed(self, line: int, text: str) -> None:
        if "tok/sec" in text and (found := STEP.search(text)):
            milliseconds = number(found.group(6))
            self.reading.step(
                line,
                int(found.group(1)),
                loss=number(found.group(3)),
                grad_norm=number(found.group(4)) if found.group(4) else None,
                seconds=milliseconds / 1000 if milliseconds else None,
                tokens_per_second=whole(found.group(7)),
            )
        elif "Total batch size" in text and (batch := BATCH.search(text)):
            self.tokens = whole(batch.group(1))
            self.reading.set("batch.accumulation", int(batch.group(2)), line)
        elif "micro-batch" in text and (micro := MICRO.search(text)):
            self.reading.set("batch.micro_batch_size", int(micro.group(1)), line)
            self.reading.set("model.seq_length", int(micro.group(2)), line)
        elif "Peak memory" in text and (peak := PEAK.search(text)):
            self.reading.memory(line, {"allocated_peak": round((number(peak.group(1)) or 0) * MIB)})

    def finish(self) -> None:
        sequence = self.reading.config.get("model.seq_length")
        if self.tokens and sequence and not self.tokens % sequence:
            self.reading.default("batch.global_batch_size", self.tokens // sequence, "total batch size / sequence")
