"""Logs of Composer and LLM-Foundry: `[batch=N/M]:` and one indented line a metric. `time/batch` is one less than the
bracket. The loss is rank 0's own; throughput is a rolling mean and absent before its window is full; memory is decimal
GB with five digits. Source: Composer `loggers/console_logger.py`, `callbacks/speed_monitor.py`, `memory_monitor.py`.
"""

import re

from steelyard.frameworks.lines import number, whole
from steelyard.frameworks.reading import Reading
from steelyard.record.schema import Validation

NAME = "Composer / LLM-Foundry"

MARKS = (
    re.compile(r"^\s*(?:\[epoch=\d+\])?\[batch=\d+/\d+\]:\s*$"),
    re.compile(r"^\s+Train (?:time/batch|loss/train/total|throughput/|memory/)"),
    re.compile(r"\[Eval batch=\d+/\d+\] Eval on"),
)
HEADER = re.compile(r"^\s*(?:\[epoch=\d{1,9}\])?\[batch=(\d{1,12})/(\d{1,12})\]:\s*$")
METRIC = re.compile(r"^\s+(Train|Eval) ([\w/.-]{3,100}): (-?[\d.]{1,24}(?:e[-+]?\d{1,3})?|nan|inf)\s*$")
SETTING = re.compile(r"^(\s{0,12})([a-z_]{2,40}): (\S.{0,200})$")
MEMORY = {
    "memory/peak_allocated_mem": "allocated_peak", "memory/peak_reserved_mem": "reserved_peak",
    "memory/peak_active_mem": "active_peak", "memory/allocated_mem": "allocated", "memory/reserved_mem": "reserved",
}  # fmt: skip
SETTINGS = {
    "d_model": "model.hidden_size", "n_heads": "model.num_attention_heads", "n_layers": "model.num_layers",
    "max_seq_len": "model.seq_length", "vocab_size": "model.vocab_size",
    "global_train_batch_size": "batch.global_batch_size", "seed": "seed",
}  # fmt: skip


class Reader:
    def __init__(self, source: str):
        self.reading = Reading(NAME, source)
        self.reading.conventions = {
            "loss": "this step, rank 0 only",
            "seconds": "from a rolling mean of batches a second",
            "memory": "PyTorch's allocator, decimal GB, five digits",
        }
        self.open: tuple[int, int] | None = None
        self.metrics: dict[str, float] = {}

    def feed(self, line: int, text: str) -> None:
        if "batch=" in text and (header := HEADER.match(text)):
            self._close()
            self.open = (line, int(header.group(1)))
        elif ": " in text and (metric := METRIC.match(text)):
            value = number(metric.group(3))
            if metric.group(1) == "Eval":
                self._evaluation(metric.group(2), value)
            elif value is not None and self.open is not None:
                self.metrics[metric.group(2)] = value
        elif not self.reading.steps and (setting := SETTING.match(text)):
            self._setting(line, setting.group(2), setting.group(3).strip())

    def _setting(self, line: int, name: str, text: str) -> None:
        if name in SETTINGS:
            self.reading.set(SETTINGS[name], whole(text), line)
        elif name == "n_params":
            self.reading.print("parameters", whole(text), line)
        elif name == "n_gpus":
            self.reading.set("parallel.data", whole(text), line)
        elif name == "precision" and text in ("amp_bf16", "amp_fp16", "fp32"):
            self.reading.set("precision.compute", text.removeprefix("amp_"), line)

    def _evaluation(self, name: str, loss: float | None) -> None:
        if name.endswith("LanguageCrossEntropy"):
            step = self.open[1] if self.open else self.reading.steps[-1].step if self.reading.steps else 0
            self.reading.validations.append(Validation(step, 0, "validation", loss, 0, 0.0))

    def _close(self) -> None:
        if self.open is None:
            return
        metrics, (line, step) = self.metrics, self.open
        self.metrics, self.open = {}, None
        pace = metrics.get("throughput/batches_per_sec")
        samples, tokens = metrics.get("time/sample"), metrics.get("time/token")
        rate = next((metrics[name] for name in metrics if name.startswith("lr-") and name.endswith("group0")), None)
        memory = {kind: round(metrics[name] * 1e9) for name, kind in MEMORY.items() if 0 <= metrics.get(name, -1) < 1e6}
        batch = self.reading.config.get("batch.global_batch_size")
        self.reading.step(
            line,
            step,
            samples=_after(samples, step),
            tokens=_after(tokens, step),
            loss=metrics.get("loss/train/total"),
            grad_norm=metrics.get("l2_norm/grad/global"),
            learning_rate=rate,
            seconds=1 / pace if pace else None,
            tokens_per_second=metrics.get("throughput/tokens_per_sec"),
            batch_size=batch,
            memory=memory,
        )

    def finish(self) -> None:
        self._close()


def _after(before: float | None, step: int) -> int | None:
    """Amounts are printed as they were before the step: what equal steps have come to after it."""
    if before is None or step < 2 or before % (step - 1):
        return None
    return int(before) // (step - 1) * step
