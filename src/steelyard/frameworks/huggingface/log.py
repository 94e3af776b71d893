"""Logs of the Hugging Face Trainer: dicts in the console, and `trainer_state.json`, which is the better source.

The loss is the mean over the steps since the entry before, over all processes. A loss that is not finite may have been
replaced by the mean of the others (`logging_nan_inf_filter`, on by default). Source: transformers 4.38 to 5.24,
`trainer.py`.
"""

import json
import re
from itertools import islice
from pathlib import Path
from typing import Any

from steelyard.frameworks.lines import lines, literal, number, whole
from steelyard.frameworks.reading import GIB, Reading
from steelyard.record.schema import Record, Validation

NAME = "Hugging Face Trainer"

MARKS = (
    re.compile(r"\{'(?:loss|eval_loss|grad_norm)': .*'epoch': "),
    re.compile(r"\*{5} Running training \*{5}|\*{5} train metrics \*{5}"),
    re.compile(r"Total train batch size \(w\. parallel"),
    re.compile(r"\{'train_runtime': "),
    re.compile(r"\"log_history\": \["),
)
DICT = re.compile(r"\{'[a-z][^{}]{1,4000}\}")
SETTINGS = {
    "Instantaneous batch size per device": "batch.micro_batch_size",
    "Total train batch size (w. parallel, distributed & accumulation)": "batch.global_batch_size",
    "Gradient Accumulation steps": "batch.accumulation",
    "Total optimization steps": "length.steps",
}
SETTING = re.compile(r"(?:>>|^)\s{1,6}([A-Z][A-Za-z &.,()]{3,70}) = ([\d,]{1,20})\s*$")
BAR = re.compile(r"\|\s*(\d{1,12})/(\d{1,12}) \[")
MEMORY = {
    "memory/max_mem_active(gib)": "active_peak", "memory/max_active (GiB)": "active_peak",
    "memory/max_mem_allocated(gib)": "allocated_peak", "memory/max_allocated (GiB)": "allocated_peak",
    "memory/device_mem_reserved(gib)": "reserved", "memory/device_reserved (GiB)": "reserved",
}  # fmt: skip
CONVENTIONS = {
    "loss": "mean over the steps since the entry before, all processes; a value that is not finite may be replaced",
    "seconds": "not printed per step; the total includes evaluations and saves",
    "memory": "not printed",
}


class Reader:
    def __init__(self, source: str):
        self.reading = Reading(NAME, source)
        self.reading.conventions = dict(CONVENTIONS)
        self.entries: list[tuple[int, dict[str, Any], int | None]] = []
        self.bar: int | None = None

    def feed(self, line: int, text: str) -> None:
        if "{'" in text:
            for found in DICT.finditer(text):
                entry = _literal(found.group())
                if entry is not None and (entry.keys() & {"loss", "eval_loss", "train_runtime"}):
                    self.entries.append((line, entry, self.bar))
        if "/" in text and (bar := BAR.search(text)):
            self.bar = int(bar.group(1))
        elif " = " in text and (found_setting := SETTING.search(text)):
            self._setting(line, found_setting.group(1), found_setting.group(2))

    def _setting(self, line: int, name: str, text: str) -> None:
        if name in SETTINGS:
            self.reading.set(SETTINGS[name], whole(text), line)
        elif name == "Number of trainable parameters":
            self.reading.print("parameters", whole(text), line)

    def finish(self) -> None:
        """The console does not print step numbers: entries are evenly spaced, and the last one is the last step."""
        reading = self.reading
        logged = [(line, entry) for line, entry, _ in self.entries if "loss" in entry]
        total, spacing = reading.config.get("length.steps"), None
        if total and logged and not total % len(logged):
            spacing = total // len(logged)
        epochs = [number(str(entry.get("epoch"))) for _, entry in logged]
        if spacing is None and logged:
            reading.note("the log prints no step numbers: its entries are counted instead")
        at = 0
        for line, entry, _ in self.entries:
            if "loss" in entry:
                at += 1
                _step(reading, line, at * (spacing or 1), entry)
            elif "eval_loss" in entry:
                _validation(reading, at * (spacing or 1), entry)
            else:
                _end(reading, line, entry, len(epochs))
        follow(reading)


def follow(reading: Reading) -> None:
    """The data ranks that follow from batch, micro-batch and accumulation; the mean time of a step."""
    micro, whole_batch = reading.config.get("batch.micro_batch_size"), reading.config.get("batch.global_batch_size")
    accumulation = reading.config.get("batch.accumulation")
    if micro and whole_batch and accumulation and not whole_batch % (micro * accumulation):
        reading.default("parallel.data", whole_batch // (micro * accumulation), "global / (micro x accumulation)")


def trainer_state(path: Path) -> Record | None:
    """A trainer_state.json as a record; None where the file is none. Its train_batch_size is per device."""
    if path.stat().st_size > 1 << 28:
        return None
    try:
        state = json.loads(path.read_text("utf-8", errors="replace"))
        history = state["log_history"]
        assert isinstance(history, list)
    except (ValueError, TypeError, KeyError, AssertionError, RecursionError):
        return None
    reading = Reading(NAME, str(path))
    reading.conventions = dict(CONVENTIONS)
    for key, name in (("train_batch_size", "batch.micro_batch_size"), ("max_steps", "length.steps")):
        value = state.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            reading.set(name, value, 1)
    _beside(reading, path)
    for entry in history:
        step = entry.get("step") if isinstance(entry, dict) else None
        if not isinstance(step, int):
            continue
        if "loss" in entry:
            _step(reading, 1, step, entry)
        elif "eval_loss" in entry:
            _validation(reading, step, entry)
        elif "train_runtime" in entry:
            _end(reading, 1, entry, 0)
    follow(reading)
    return reading.record()


def _beside(reading: Reading, path: Path) -> None:
    """The `Running training` block of a console log next to trainer_state.json: the file itself has no global batch."""
    for other in sorted(path.parent.glob("*.txt")) + sorted(path.parent.glob("*.log")):
        console = Reader(str(other))
        for line, text in islice(lines(other), 5000):
            console.feed(line, text)
        for key, value in console.reading.config.items():
            reading.default(key, value, console.reading.attempts[-1].sources[key])
        for name, value in console.reading.printed.items():
            reading.print(name, value, 1)


def _literal(text: str) -> dict[str, Any] | None:
    value = literal(re.sub(r"(?<=: )(nan|-?inf)(?=[,}])", r"'\1'", text))
    return value if isinstance(value, dict) and all(isinstance(key, str) for key in value) else None


def _step(reading: Reading, line: int, step: int, entry: dict[str, Any]) -> None:
    sizes = {kind: size for key, kind in MEMORY.items() if (size := _number(entry.get(key))) is not None}
    memory = {kind: round(size * GIB) for kind, size in sizes.items() if 0 <= size < 1e6}
    if memory:
        reading.conventions["memory"] = "PyTorch's allocator, GiB, by a plug-in"
    reading.step(
        line,
        step,
        loss=_number(entry["loss"]),
        grad_norm=_number(entry.get("grad_norm")),
        learning_rate=_number(entry.get("learning_rate")),
        memory=memory,
    )


def _validation(reading: Reading, step: int, entry: dict[str, Any]) -> None:
    seconds = _number(entry.get("eval_runtime")) or 0.0
    reading.validations.append(Validation(step, 0, "validation", _number(entry["eval_loss"]), 0, seconds))


def _end(reading: Reading, line: int, entry: dict[str, Any], count: int) -> None:
    for key in ("train_runtime", "train_samples_per_second", "train_steps_per_second", "total_flos"):
        if (value := _number(entry.get(key))) is not None:
            reading.print(key, value, line)
    rate = _number(entry.get("train_samples_per_second"))
    if rate:
        reading.print("samples_per_second", rate, line)
    runtime, steps = _number(entry.get("train_runtime")), reading.steps
    if runtime and steps and not reading.events:
        reading.mean_seconds = runtime / steps[-1].step


def _number(value: Any) -> float | None:
    """v4 has numbers, v5 texts."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value) if abs(value) < 1e300 or value != value else None
    return number(value) if isinstance(value, str) else None
