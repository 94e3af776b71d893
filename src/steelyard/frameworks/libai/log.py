"""Logs of LiBai: `output.log`, `log.txt`, `metrics.json`, and the `config.yaml` beside them.

The printed loss is the median of the last 200 steps, the printed time the mean since the second step. Source: LiBai
`libai/utils/events.py`, `libai/engine/default.py`, `configs/common/train.py`.
"""

import json
import re
from pathlib import Path

from steelyard.frameworks.libai import config
from steelyard.frameworks.lines import number
from steelyard.frameworks.oneautotest import log as oneautotest
from steelyard.frameworks.reading import Reading

NAME = "LiBai"
KEY = "libai"

MARKS = (
    re.compile(r"iteration: \d+/\d+ .*consumed_samples: \d+"),
    re.compile(r"libai\.utils|lb\.utils|libai\.engine|lb\.engine|libai\.trainer"),
    re.compile(r"total_throughput: [\d.]+ samples/s|train\.dist\.tensor_parallel_size"),
    re.compile(r"^\{\"data_time\": .*\"iteration\": \d+.*\"total_loss\""),
)

ITERATION = re.compile(r"iteration: (\d{1,12})/(\d{1,12})(?=\s|$)")
SAMPLES = re.compile(r"consumed_samples: (\d{1,15})(?=\s|$)")
LOSS = re.compile(r"(?:total_loss|lm_loss): ([-+\d.eE]{1,20}|nan|inf)\s")
SECONDS = re.compile(r"(?<![_\w])time: ([\d.]{1,14}) s/iter(?=\s|$)")
THROUGHPUT = re.compile(r"total_throughput: ([\d.]{1,14}) samples/s(?=\s|$)")
RATE = re.compile(r"\blr: ([\d.]{1,12}e[-+]\d\d)(?=\s|$)")
WORLD = re.compile(r"Rank of current process: \d{1,7}\. World size: (\d{1,7})")
OVERRIDE = re.compile(r"\b((?:train|model|optim|graph|dataloader)\.[A-Za-z_.]{1,80}) ?= ?([^\s,'\"\]]{1,80})")
OVERALL = re.compile(r"Overall training speed: (\d{1,12}) iterations in .{1,40}\(([\d.]{1,14}) s / it\)")


class Reader:
    name = NAME
    key = KEY

    def __init__(self, source: str):
        self.reading = Reading(NAME, source)
        self.reading.smoothed_seconds = True
        self.reading.conventions = {
            "loss": "median of the last 200 steps",
            "seconds": "mean over all steps since the second",
            "memory": "not printed by LiBai",
        }
        self.yaml: list[tuple[int, str]] | None = None
        oneautotest.from_name(self.reading, Path(source))
        self.reading.default("engine.framework", KEY, "the log's format")

    def feed(self, line: int, text: str) -> None:
        if "iteration: " in text and (found := ITERATION.search(text)):
            self._step(line, text, found)
        elif "World size" in text and (world := WORLD.search(text)):
            if self.reading.steps:
                self.reading.begin(line)
            self.reading.environment["world_size"] = int(world.group(1))
        elif "=" in text and "." in text and (pairs := OVERRIDE.findall(text)):
            for key, value in pairs:
                config.apply(self.reading, key, value, line)
        elif text.startswith('{"') and '"iteration"' in text:
            self._metrics(line, text)
        elif "Overall training" in text and (overall := OVERALL.search(text)):
            self.reading.print("seconds_per_step", number(overall.group(2)), line)
        else:
            oneautotest.feed(self.reading, line, text)

    def _step(self, line: int, text: str, found: re.Match[str]) -> None:
        text += " "
        iteration = int(found.group(1)) + 1  # printed from 0
        samples, loss = _group(SAMPLES, text, found.end()), _group(LOSS, text, found.end())
        if samples is None and loss is None:
            return
        batch = None
        if samples is not None and not int(samples) % iteration:
            batch = int(samples) // iteration
        throughput = _group(THROUGHPUT, text, found.end())
        if throughput is not None:
            self.reading.print("samples_per_second", throughput, line)
        self.reading.step(
            line,
            iteration,
            samples=None if samples is None else int(samples),
            loss=loss,
            learning_rate=_group(RATE, text, found.end()),
            seconds=_group(SECONDS, text, found.end()),
            batch_size=batch,
        )

    def _metrics(self, line: int, text: str) -> None:
        """A line of metrics.json: the same figures, smoothed over 20 steps."""
        try:
            fields = json.loads(text)
            iteration = int(fields["iteration"]) + 1
            values = {key: float(fields[key]) for key in ("total_loss", "time", "lr") if fields.get(key) is not None}
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return
        self.reading.conventions["loss"] = "median of the last 20 steps"
        self.reading.step(
            line,
            iteration,
            loss=values.get("total_loss"),
            learning_rate=values.get("lr"),
            seconds=values.get("time"),
        )

    def finish(self) -> None:
        reading = self.reading
        beside = Path(reading.source).with_name("config.yaml")
        if beside.is_file():
            config.read_yaml(reading, beside)
        if reading.steps and (batch := reading.steps[-1].batch_size):
            reading.default("batch.global_batch_size", batch, reading.where(reading.lines[-1]))
        config.complete(reading)


def _group(pattern: re.Pattern[str], text: str, start: int) -> float | None:
    found = pattern.search(text, start)
    return number(found.group(1)) if found else None
