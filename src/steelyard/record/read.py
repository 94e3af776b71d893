"""Reads run folders and one-line records. Other frameworks' logs are read in frameworks/."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from steelyard.record.schema import KINDS, SCHEMA, Checkpoint, Event, Line, Record, Step, Validation
from steelyard.spec.errors import UserError, error

STATED = ("gpu_rate", "parameters")  # figures that a one-line record may state as somebody printed them
WARMUP_STEPS = 3  # left out of the medians: first-touch allocation, caches, compilation


def is_run_folder(path: str | Path) -> bool:
    return (Path(path) / "metrics.jsonl").is_file()


def read_folder(path: str | Path) -> Record:
    """A run folder as a record. Raises UserError R001 (not a run folder), R002 (bad line), R003 (newer schema)."""
    folder = Path(path)
    for name in ("run.toml", "environment.json", "metrics.jsonl"):
        if not (folder / name).is_file():
            raise error("R001", place=str(folder), path=folder, missing=name)
    environment = _json(folder / "environment.json")
    if environment.get("schema", 0) > SCHEMA:
        raise error("R003", place=str(folder), path=folder, found=environment["schema"], known=SCHEMA)
    lines = standing(list(metrics(folder / "metrics.jsonl")))
    steps = [line for line in lines if isinstance(line, Step)]
    plan = folder / "plan.json"
    return Record(
        framework="steelyard",
        source=str(folder),
        config=_config(folder / "run.toml"),
        memory=_memory(steps) | _peaks(lines),
        speed=speed(steps),
        steps=steps,
        validations=[line for line in lines if isinstance(line, Validation)],
        checkpoints=[line for line in lines if isinstance(line, Checkpoint)],
        events=[line for line in lines if isinstance(line, Event)],
        environment=environment,
        plan=_json(plan) if plan.is_file() else {},
    )


def metrics(path: Path) -> Iterator[Line]:
    """The lines of a metrics.jsonl as they were written. A cut last line is passed over; unknown keys are too, so that
    a newer writer of the same schema version stays readable."""
    text = path.read_text("utf-8", errors="replace")
    lines = text.split("\n")
    for number, raw in enumerate(lines, 1):
        if not raw.strip():
            continue
        try:
            fields = json.loads(raw)
            kind = KINDS[fields.pop("kind")]
            yield kind(**{key: value for key, value in fields.items() if key in kind.__dataclass_fields__})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as failure:
            if number == len(lines):
                return
            detail = f"{type(failure).__name__}: {failure}"
            raise error("R002", place=f"{path}:{number}", path=path, line=number, detail=detail) from None


def standing(lines: list[Line]) -> list[Line]:
    """Without the stretches that a later start took back: lines of steps after the one it started from."""
    kept: list[Line] = []
    for line in lines:
        if isinstance(line, Event) and line.what == "start":
            kept = [old for old in kept if old.step <= line.step]
        kept.append(line)
    return kept


def speed(steps: list[Step]) -> dict[str, float]:
    """Medians over the steps after warm-up: seconds_per_step, tokens_per_second, samples_per_second (whole run)."""
    counted = [(s, s.seconds) for s in steps[WARMUP_STEPS:] or steps[-1:] if s.seconds is not None and s.seconds > 0]
    if not counted:
        return {}
    found = {"seconds_per_step": median(seconds for _, seconds in counted)}
    rates = [s.tokens_per_second for s, _ in counted if s.tokens_per_second is not None]
    if rates:
        found["tokens_per_second"] = median(rates)
    if all(s.batch_size for s, _ in counted):
        found["samples_per_second"] = median((s.batch_size or 0) / seconds for s, seconds in counted)
    return found


def _memory(steps: list[Step]) -> dict[str, int]:
    """Bytes by kind after the first step that updated the weights (before it, optimizer states may not exist)."""
    return next((dict(s.memory) for s in steps if not s.skipped and s.memory), {})


def _peaks(lines: list[Line]) -> dict[str, int]:
    """On CPUs the peak of all tensors, which a run measures once (train/audit.py)."""
    found = next((line.detail for line in lines if isinstance(line, Event) and line.what == "memory_peaks"), {})
    peak = found.get("measured", {}).get("tensors_peak")
    return {"tensors_peak": peak} if isinstance(peak, int) else {}


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as failure:
        raise error("R002", place=str(path), path=path, line=1, detail=str(failure)) from None
    if not isinstance(value, dict):
        raise error("R002", place=str(path), path=path, line=1, detail="it is not a JSON object")
    return value


def _config(path: Path) -> dict[str, Any]:
    """run.toml as nested values. It was legal when it was written; only its syntax is judged here."""
    import tomllib

    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as failure:
        raise error("S001", place=str(path), detail=str(failure), advice="restore the file") from None


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def read_line(text: str, source: str) -> Record:
    """The smallest record, one line of JSON. Raises UserError R002."""
    try:
        fields = json.loads(text, parse_constant=_no_number)
        if not isinstance(fields, dict) or not isinstance(fields.get("config", {}), dict):
            raise ValueError("it is not an object with a config")
        memory = {k.removesuffix("_bytes"): int(v) for k, v in fields.get("memory", {}).items() if v is not None}
        rates = {k: float(v) for k, v in fields.get("speed", {}).items() if v is not None}
        if not all(0 <= size < 2**63 for size in memory.values()):
            raise ValueError("a size in it is negative or beyond any memory")
        if not all(0 <= rate < math.inf for rate in rates.values()):
            raise ValueError("a rate in it is negative or not finite")
        printed = {k: fields[k] for k in STATED if k in fields}
    except UserError:
        raise
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as failure:
        raise error("R002", place=source, path=source, line=1, detail=str(failure)) from None
    return Record(
        framework=str(fields.get("framework", "unknown")),
        source=source,
        config=fields.get("config", {}),
        memory=memory,
        speed=rates,
        printed=printed,
    )
