"""What a run leaves behind, version 1.

A run folder holds
  run.toml          the resolved run, each value with its origin
  plan.json         what was predicted before launch
  environment.json  {"schema", "steelyard", "python", "torch", "device", "devices", "host", "command", "started", ...}
  metrics.jsonl     one JSON object a line, each with a "kind": step, validation, checkpoint or event
  checkpoints/      one folder per saved step
  report.html       what it came to

The smallest record is one line of JSON: {"framework", "config": {run-file keys}, "memory": {...}, "speed": {...}}.

JSON has no NaN or infinity: a value that is not finite is null, and the line's "nan" is 1.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

SCHEMA = 1

Kind = Literal["step", "validation", "checkpoint", "event"]


@dataclass(frozen=True)
class Step:
    """One optimizer step, written after it. Amounts are totals after the step; `seconds` is this step's wall time.
    Our own runs know every amount; another framework's log may not, and then it is None.

    loss: mean over all valid tokens of the step's global batch, in nats. grad_norm: over all parameters, before
    clipping. learning_rate, loss_scale: those the step used. skipped: 1 where the weights were not updated. nan: 1
    where loss or gradient norm was not finite. tokens_per_second: of the whole run. memory: bytes by kind, largest over
    the ranks: `allocated_peak`, `reserved_peak`, `device` on GPUs; `rss`, `rss_peak` on CPUs.
    """

    step: int
    samples: int | None
    tokens: int | None
    loss: float | None
    grad_norm: float | None
    learning_rate: float | None
    loss_scale: float | None
    skipped: int
    nan: int
    seconds: float | None
    tokens_per_second: float | None
    memory: dict[str, int] = field(default_factory=dict)
    model_flops_per_second: float | None = None
    mfu: float | None = None
    batch_size: int | None = None
    timers: dict[str, float] = field(default_factory=dict)
    batch_hash: str | None = None


@dataclass(frozen=True)
class Validation:
    """Mean loss over `tokens` valid tokens of one validation set, after `step` steps. Not part of any step's time."""

    step: int
    samples: int
    name: str
    loss: float | None
    tokens: int
    seconds: float


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint. `blocked_seconds` is what it took from training."""

    step: int
    path: str
    bytes: int
    seconds: float
    blocked_seconds: float


@dataclass(frozen=True)
class Event:
    """Anything else. `what` = "start": training begins after `step` steps; lines of later steps that stand above it
    belong to an abandoned stretch of the run."""

    step: int
    what: str
    detail: dict[str, Any] = field(default_factory=dict)


Line = Step | Validation | Checkpoint | Event
KINDS: dict[str, type[Line]] = {"step": Step, "validation": Validation, "checkpoint": Checkpoint, "event": Event}


@dataclass(frozen=True)
class Record:
    """A run as read back. `config` has run-file keys; a key that is not known is absent.

    memory: bytes by kind, at most over ranks, after the first completed step; `tensors_peak`, the most that all tensors
    of a CPU run's rank take during a step. speed: `samples_per_second` and
    `tokens_per_second` of the whole run, `seconds_per_step`, medians. source: the file or folder it was read from.

    What another framework's log adds. sources: `file:line` or a reason for each dotted key of config, memory and
    printed. lines: the line of each entry of steps. ranks: memory of every rank that reported. printed: figures as the
    framework prints them (parameter counts, its own rates). conventions: what `loss`, `seconds`, `memory` mean there.
    notes: what a reader should know before trusting a figure.
    """

    framework: str
    source: str
    config: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    speed: dict[str, float] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    validations: list[Validation] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    lines: list[int] = field(default_factory=list)
    ranks: dict[int, dict[str, int]] = field(default_factory=dict)
    printed: dict[str, Any] = field(default_factory=dict)
    conventions: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
