"""Event files of TensorBoard, whoever wrote them. They have every step where the console has every tenth, and no
configuration. Read without TensorBoard: records of `length, crc, Event, crc`, an Event being protobuf with a step and
summaries of a tag and a float.

Source: TensorFlow `record_writer.cc`, `event.proto`, `summary.proto`; tags of Megatron-LM, TorchTitan, GPT-NeoX, the
Hugging Face Trainer, MaxText and ours.
"""

import struct
from collections.abc import Iterator
from pathlib import Path

from steelyard.frameworks.reading import GIB, Reading
from steelyard.record.schema import Record, Validation

NAME = "TensorBoard"
TAGS = {
    "lm loss": "loss", "train/lm_loss": "loss", "train/loss": "loss", "loss_metrics/global_avg_loss": "loss",
    "learning/loss": "loss", "learning-rate": "learning_rate", "train/learning_rate": "learning_rate",
    "lr": "learning_rate", "learning/current_learning_rate": "learning_rate", "grad-norm": "grad_norm",
    "grad_norm": "grad_norm", "train/grad_norm": "grad_norm", "learning/grad_norm": "grad_norm",
    "loss-scale": "loss_scale", "train/loss_scale": "loss_scale", "batch-size": "batch_size",
    "iteration-time": "seconds", "runtime/iteration_time": "seconds", "perf/step_time_seconds": "seconds",
}  # fmt: skip
MEMORY = {
    "mem-reserved-bytes": ("reserved", 1), "mem-allocated-bytes": ("allocated", 1),
    "mem-max-allocated-bytes": ("allocated_peak", 1), "memory/max_active(GiB)": ("active_peak", GIB),
    "memory/max_reserved(GiB)": ("reserved_peak", GIB),
}  # fmt: skip
VALIDATION = ("lm loss validation", "validation/lm_loss", "eval/loss", "validation_metrics/global_avg_loss")
LARGEST = 1 << 24  # bytes of an event; a longer one is a broken length
Scalar = tuple[int, str, float]  # step, tag, value


def files(folder: Path) -> list[Path]:
    """Event files of a folder and of the folders in it."""
    return sorted([*folder.glob("*tfevents*"), *folder.glob("*/*tfevents*")])


def read(folder: Path) -> Record:
    """The scalars of a folder as a record; later files take back the steps that they repeat."""
    reading = Reading(NAME, str(folder))
    reading.conventions = {"loss": "as the framework writes it", "seconds": "as the framework writes it"}
    number = 0
    for path in files(folder):
        rows: dict[int, dict[str, float]] = {}
        for step, tag, value in scalars(path):
            rows.setdefault(step, {})[tag] = value
        for step in sorted(rows):
            number += 1
            _row(reading, number, step, rows[step])
    return reading.record()


def _row(reading: Reading, number: int, step: int, tags: dict[str, float]) -> None:
    values = {TAGS[tag]: value for tag, value in tags.items() if tag in TAGS}
    for tag in VALIDATION:
        if tag in tags:
            reading.validations.append(Validation(step, 0, "validation", tags[tag], 0, 0.0))
    memory = {MEMORY[tag][0]: round(value * MEMORY[tag][1]) for tag, value in tags.items() if tag in MEMORY}
    batch = values.get("batch_size")
    if "loss" in values or "seconds" in values:
        size = int(batch) if batch is not None and 0 < batch < 1e9 else None
        reading.step(
            number,
            step,
            loss=values.get("loss"),
            grad_norm=values.get("grad_norm"),
            learning_rate=values.get("learning_rate"),
            loss_scale=values.get("loss_scale"),
            seconds=values.get("seconds"),
            batch_size=size,
            memory=memory,
        )


def scalars(path: Path) -> Iterator[Scalar]:
    """Every scalar of an event file, up to the first record that is cut or broken."""
    with path.open("rb") as file:
        while len(head := file.read(12)) == 12:
            (length,) = struct.unpack("<Q", head[:8])
            if length > LARGEST:
                return
            body = file.read(length)
            if len(body) < length or len(file.read(4)) < 4:
                return
            yield from _event(body)


def _event(body: bytes) -> Iterator[Scalar]:
    step, summary = 0, b""
    for field, value in _fields(body):
        if field == 2 and isinstance(value, int):
            step = value
        elif field == 5 and isinstance(value, bytes):
            summary = value
    if step >= 1 << 62:
        return
    for field, value in _fields(summary):
        if field == 1 and isinstance(value, bytes):
            tag, scalar = "", None
            for inner, content in _fields(value):
                if inner == 1 and isinstance(content, bytes):
                    tag = content.decode("utf-8", errors="replace")
                elif inner == 2 and isinstance(content, float):
                    scalar = content
                elif inner == 8 and isinstance(content, bytes):
                    scalar = _tensor(content)
            if scalar is not None:
                yield step, tag, scalar


def _tensor(body: bytes) -> float | None:
    """The only number of a float tensor (field 5 of TensorProto, or 4 bytes of its content, field 4)."""
    for field, value in _fields(body):
        if field in (4, 5) and isinstance(value, bytes) and len(value) == 4:
            return float(struct.unpack("<f", value)[0])
        if field == 5 and isinstance(value, float):
            return value
    return None


def _fields(body: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """(field number, value) of a protobuf message; ends where the bytes are no message."""
    at = 0
    while at < len(body):
        key, at = _varint(body, at)
        field, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(body, at)
            yield field, value
        elif wire == 1 and at + 8 <= len(body):
            yield field, float(struct.unpack_from("<d", body, at)[0])
            at += 8
        elif wire == 5 and at + 4 <= len(body):
            yield field, float(struct.unpack_from("<f", body, at)[0])
            at += 4
        elif wire == 2:
            length, at = _varint(body, at)
            if at + length > len(body):
                return
            yield field, body[at : at + length]
            at += length
        else:
            return


def _varint(body: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(body) and shift < 70:
        byte = body[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            break
        shift += 7
    return value, at
