"""Logs of Meta Lingua: `metrics.jsonl`, which has the mean loss over ranks, and the text log, whose loss is that of the
printing rank. `wps` are tokens a second of one device since the line before. Source: lingua `apps/main/train.py`.
"""

import json
import re
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from steelyard.frameworks import devices
from steelyard.frameworks.lines import lines, number, rank, whole
from steelyard.frameworks.reading import GIB, Reading

NAME = "Lingua"
KEY = "lingua"

MARKS = (
    re.compile(r"step: \d+  acc: \d+  loss:\s+[\d.]+  grad: "),
    re.compile(r"flops: [\d.e+]+  wps: [\d.e+]+  iter:"),
    re.compile(r"^\{\"global_step\": \d+, \"acc_step\""),
    re.compile(r"Running on dp (?:rank|size) : \d+"),
    re.compile(r"GPU capacity: .{3,60} with [\d.]+GiB memory"),
)
STEP = re.compile(
    r"step: (\d{1,12})  acc: (\d{1,6})  loss:\s+([\d.]{1,14}|nan|inf)  grad: (-?[\d.e+-]{1,14}|nan|inf)  "
    r"flops: ([\d.e+-]{1,14})  wps: ([\d.e+-]{1,14})  iter:\s+([\d.]{1,12})  data:\s+([\d.]{1,12})  "
    r"lr: ([\d.e+-]{1,14})  mem: (\d{1,3})%"
)
SIZE = re.compile(r"Model size: ([\d,]{1,24}) total parameters")
DATA = re.compile(r"Running on dp size : (\d{1,7})")
CAPACITY = re.compile(r"GPU capacity: (.{3,60}?) \(\d{1,3}\) with ([\d.]{1,12})GiB memory")


class Reader:
    def __init__(self, source: str):
        self.reading = Reading(NAME, source)
        self.reading.conventions = {
            "loss": "this step, printing rank only",
            "seconds": "from the tokens between two lines",
            "memory": "PyTorch's active peak, share of the device",
        }
        self.printing: int | None = None
        self.capacity: float | None = None
        self.reading.default("engine.framework", KEY, "the log's format")

    def feed(self, line: int, text: str) -> None:
        if text.startswith('{"global_step"'):
            self._metrics(line, text)
        elif "step: " in text and (found := STEP.search(text)):
            self._step(line, text, found)
        elif "Model size" in text and (size := SIZE.search(text)):
            self.reading.print("parameters", whole(size.group(1)), line)
        elif "dp size" in text and (data := DATA.search(text)):
            self.reading.set("parallel.data", int(data.group(1)), line)
        elif "GPU capacity" in text and (capacity := CAPACITY.search(text)):
            self.capacity = number(capacity.group(2))
            self.reading.set("hardware.chip", devices.chip(capacity.group(1), self.capacity), line)
            self.reading.environment["device"] = capacity.group(1)

    def _metrics(self, line: int, text: str) -> None:
        try:
            fields: dict[str, Any] = json.loads(text)
            step, tokens = int(fields["global_step"]), int(fields["optim/total_tokens"])
            values = {key: float(value) for key, value in fields.items() if isinstance(value, int | float)}
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return
        self.reading.conventions["loss"] = "this step, mean over ranks"
        self.reading.conventions["memory"] = "PyTorch's peaks of the printing rank, GiB"
        names = (("active_peak", "memory/max_active_gib"), ("reserved_peak", "memory/max_reserved_gib"))
        memory = {kind: round(values[key] * GIB) for kind, key in names if key in values and 0 < values[key] < 1e6}
        rate = values.get("speed/wps")
        norm = values.get("optim/grad_norm")
        self.reading.print("tokens_per_second_per_device", rate, line)
        self.reading.step(
            line,
            step,
            tokens=tokens,
            loss=values.get("loss/out"),
            grad_norm=norm if norm is not None and norm >= 0 else None,
            learning_rate=values.get("optim/lr"),
            tokens_per_second=rate,  # of one device until `finish`
            memory=memory,
        )

    def _step(self, line: int, text: str, found: re.Match[str]) -> None:
        printing = rank(text)
        if self.printing is None:
            self.printing = printing
        if printing is not None and printing != self.printing:
            return
        norm, share = number(found.group(4)), int(found.group(10))
        memory = {"active_peak": round(share / 100 * self.capacity * GIB)} if self.capacity and share else {}
        self.reading.step(
            line,
            int(found.group(1)),
            loss=number(found.group(3)),
            grad_norm=norm if norm is not None and norm >= 0 else None,
            learning_rate=number(found.group(9)),
            tokens_per_second=number(found.group(6)),  # of one device until `finish`
            memory=memory,
        )

    def finish(self) -> None:
        """Rates of the whole run from those of a device, and seconds from the tokens of a step where it is known."""
        if self.reading.source.endswith(".jsonl") and "parallel.data" not in self.reading.config:
            self._beside(Path(self.reading.source))
        steps, ranks = self.reading.steps, self.reading.config.get("parallel.data")
        each = None
        if steps and steps[-1].tokens and steps[-1].step and not steps[-1].tokens % steps[-1].step:
            each = steps[-1].tokens // steps[-1].step
            self.reading.print("tokens_per_step", each, self.reading.lines[-1])
        for place, step in enumerate(steps):
            rate = step.tokens_per_second * ranks if step.tokens_per_second and ranks else None
            steps[place] = replace(step, tokens_per_second=rate, seconds=each / rate if each and rate else None)

    def _beside(self, path: Path) -> None:
        """What the text log next to metrics.jsonl says before the first step: model size, ranks, device."""
        for other in sorted(path.parent.glob("*.txt")) + sorted(path.parent.glob("*.log")):
            for line, text in islice(lines(other), 2000):
                if STEP.search(text):
                    break
                if not text.startswith("{"):
                    self.feed(line, text)
