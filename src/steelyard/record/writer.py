"""The writer of a run folder. One process writes; every line is on disk's side of the process before the next step."""

import fcntl
import json
import math
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from steelyard.record.schema import KINDS, Line, Step, Validation
from steelyard.spec.errors import error

_NAMES = {cls: name for name, cls in KINDS.items()}


class RunFolder:
    """A run folder open for writing. Raises UserError: R004 another run writes there, R005 it cannot be made."""

    def __init__(self, path: str | Path, tensorboard: bool = False):
        self.path = Path(path)
        try:
            (self.path / "checkpoints").mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / ".lock").open("w")
            self._metrics = (self.path / "metrics.jsonl").open("a+b")
        except OSError as failure:
            raise error("R005", "record.folder", path=self.path, detail=failure.strerror) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise error("R004", "record.folder", path=self.path) from None
        self._drop_cut_line()
        self._events = _TensorBoard(self.path / "tensorboard") if tensorboard else None

    def write_text(self, name: str, text: str) -> None:
        """Replace a file of the folder; readers see the old or the new text, never a part."""
        beside = self.path / f".{name}.new"
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self.path / name)

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        self.write_text(name, json.dumps(finite(value), indent=1) + "\n")

    def append(self, line: Line) -> None:
        """Add a line to metrics.jsonl, and its scalars to TensorBoard."""
        fields = {"kind": _NAMES[type(line)], **finite(asdict(line))}
        self._metrics.write(json.dumps(fields).encode() + b"\n")
        self._metrics.flush()
        if self._events:
            self._events.add(line)

    @property
    def position(self) -> int:
        """Bytes of metrics.jsonl so far."""
        return self._metrics.tell()

    def sync(self) -> None:
        """Everything written so far survives a power cut."""
        os.fsync(self._metrics.fileno())

    def close(self) -> None:
        """Sync and unlock; a second call does nothing."""
        if self._metrics.closed:
            return
        self.sync()
        self._metrics.close()
        self._lock.close()
        if self._events:
            self._events.close()

    def _drop_cut_line(self) -> None:
        """A killed run may have left half a line at the end; it held nothing that can be read back."""
        file = self._metrics
        end = file.seek(0, os.SEEK_END)
        keep = end
        while keep > 0:
            file.seek(keep - 1)
            if file.read(1) == b"\n":
                break
            keep -= 1
        if keep != end:
            file.truncate(keep)
        file.seek(0, os.SEEK_END)


def finite(value: Any) -> Any:
    """The value with every number that JSON cannot say replaced by None."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class _TensorBoard:
    """Scalars under the names Megatron-LM users know, against steps, and the losses against samples and tokens too."""

    def __init__(self, folder: Path):
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(folder))

    def add(self, line: Line) -> None:
        if isinstance(line, Step):
            self._step(line)
        elif isinstance(line, Validation):
            self._validation(line)

    def _step(self, line: Step) -> None:
        rate = {"learning-rate": line.learning_rate, "batch-size": line.batch_size, "iteration-time": line.seconds}
        scalars = {"lm loss": line.loss, "grad-norm": line.grad_norm, "loss-scale": line.loss_scale, **rate}
        scalars |= {f"{name}-time": seconds for name, seconds in line.timers.items()}
        for name, value in scalars.items():
            self._scalar(name, value, line.step)
        for name in ("lm loss", "learning-rate", "grad-norm", "batch-size"):
            self._scalar(f"{name} vs samples", scalars[name], line.samples)
            self._scalar(f"{name} vs tokens", scalars[name], line.tokens)

    def _validation(self, line: Validation) -> None:
        name = "lm loss validation" if line.name == "validation" else f"lm loss {line.name}"
        perplexity = None if line.loss is None else math.exp(min(line.loss, 20.0))
        self._scalar(name, line.loss, line.step)
        self._scalar(f"{name} ppl", perplexity, line.step)
        self._scalar(f"{name} vs samples", line.loss, line.samples)

    def _scalar(self, name: str, value: float | None, step: int | None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        if value is None or step is None:
            return
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value)])
        self._writer.add_event(Event(step=step, wall_time=time.time(), summary=summary))

    def close(self) -> None:
        self._writer.close()
