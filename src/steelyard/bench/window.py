"""The timed window of one round: which steps count, and what they come to."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from steelyard.frameworks import detect
from steelyard.predict import flops
from steelyard.record.read import read_folder
from steelyard.record.schema import Record, Step
from steelyard.spec import UserError, resolve
from steelyard.spec.run import Run


@dataclass(frozen=True)
class Window:
    """The steps after warm-up: `seconds` of each, samples and tokens of one step over the whole run (None where a log
    does not say), `devices`, model FLOPs of one step (causal, nothing recomputed), bytes by kind after the first
    completed step (largest rank, and each rank where known), and what was predicted for them."""

    seconds: list[float]
    samples: float | None
    tokens: float | None
    devices: int | None
    model_flops: int | None
    dtype: str | None
    memory: dict[str, int] = field(default_factory=dict)
    ranks: list[dict[str, int]] = field(default_factory=list)
    predicted: dict[str, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def has_begun(steps: Sequence[Step], warmup: int) -> bool:
    """Whether the first `warmup` steps of a program are done, as far as its log goes."""
    return bool(steps) and steps[-1].step - _start(steps) >= warmup


def _start(steps: Sequence[Step]) -> int:
    """The number before a program's first step: steps count from 0 or from 1, a line may stand for many, and a run may
    have resumed."""
    if steps[0].step <= 1 or len(steps) == 1:
        return min(0, steps[0].step - 1)
    return steps[0].step - (steps[1].step - steps[0].step)


def _timed(steps: Sequence[Step], warmup: int, count: int) -> list[Step]:
    """The lines that stand for the `count` steps after the first `warmup`. Where a line stands for several steps, the
    window begins with the first one that holds no step of the warm-up; what the first line holds nobody knows."""
    first = _start(steps) + warmup if steps else 0
    behind = [(before.step, line) for before, line in pairwise(steps) if before.step >= first]
    return [line for before, line in behind if before < behind[0][0] + count and line.seconds]


def of_folder(folder: Path, run: Run, warmup: int, count: int) -> Window:
    """The window of a run of ours. Raises UserError R001 to R003."""
    record = read_folder(folder)
    told: dict[str, Any] = next((e.detail for e in record.events if e.what == "memory"), {})
    timed, ranks = _timed(record.steps, warmup, count), list(told.get("ranks", []))
    return _window(record, run, timed, run.parallel.world_size, ranks, told.get("checked", {}))


def of_log(log: Path, warmup: int, count: int) -> Window:
    """The window of another program's log. Raises UserError K001 to K003 where nobody can read it."""
    record = detect.read(log)
    try:
        run = resolve(record.config).run
    except UserError:
        run = None  # a log that does not say its shapes has no FLOPs
    devices = run.parallel.world_size if run else None
    ranks = [record.ranks[rank] for rank in sorted(record.ranks)]
    return _window(record, run, _timed(record.steps, warmup, count), devices, ranks, {})


def _window(
    record: Record, run: Run | None, counted: list[Step], devices: int | None,
    ranks: list[dict[str, int]], checked: dict[str, dict[str, int]],
) -> Window:  # fmt: skip
    size = _batch(counted, record, run)
    length = run.model.seq_length if run else record.config.get("model", {}).get("seq_length")
    tokens = size * length if size and isinstance(length, int) else _tokens(counted)
    per_sequence = flops.model_flops(run.model, run.padded_vocab_size) if run else None
    return Window(
        seconds=[step.seconds for step in counted if step.seconds],
        samples=size,
        tokens=tokens,
        devices=devices,
        model_flops=round(per_sequence * size) if per_sequence and size else None,
        dtype=run.precision.compute if run else None,
        memory={**record.memory, **{kind: entry["measured"] for kind, entry in checked.items()}},
        ranks=ranks,
        predicted={kind: entry["predicted"] for kind, entry in checked.items()},
    )


def _batch(counted: list[Step], record: Record, run: Run | None) -> float | None:
    """Samples of one step: as each step says, else as configured."""
    sizes = [step.batch_size for step in counted if step.batch_size]
    if counted and len(sizes) == len(counted):
        return sum(sizes) / len(sizes)
    stated = record.config.get("batch", {}).get("global_batch_size")
    return stated or (run.batch.global_batch_size if run and "batch" in record.config else None)


def _tokens(counted: list[Step]) -> float | None:
    """Tokens of one step from the rate that the log states."""
    rates = [step.tokens_per_second * step.seconds for step in counted if step.tokens_per_second and step.seconds]
    return sum(rates) / len(rates) if rates else None
