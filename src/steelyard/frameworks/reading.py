"""What a reader has gathered from a log so far, and how it becomes a record.

The rules that hold for every framework stand here: a later attempt in the same file replaces the configuration of an
earlier one; a step that comes again takes back the steps from it on, and the seam is an event; amounts that are not
printed follow from those that are, or stay unknown.
"""

import math
from dataclasses import dataclass, field, replace
from statistics import median, quantiles
from typing import Any

from steelyard.record.schema import Checkpoint, Event, Record, Step, Validation

MOST_STEPS = 1 << 17  # steps kept of one log; of a longer one every second is dropped, again and again
WARMUP_STEPS = 3
MIB, GIB = 2**20, 2**30


@dataclass
class Attempt:
    """One start of the program: its configuration and where each value stands."""

    line: int
    config: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    steps: int = 0


class Reading:
    """Filled by a reader line by line. Keys are dotted run-file keys; `line` is a line number of the log."""

    def __init__(self, framework: str, source: str):
        self.framework, self.source = framework, source
        self.attempts = [Attempt(1)]
        self.steps: list[Step] = []
        self.lines: list[int] = []
        self.stride = 1
        self.seen = 0
        self.unsteady: set[int] = set()
        self.validations: list[Validation] = []
        self.checkpoints: list[Checkpoint] = []
        self.events: list[Event] = []
        self.ranks: dict[int, dict[str, int]] = {}
        self.placed: set[str] = set()  # kinds of memory whose first line is noted
        self.device_bytes = 0
        self.newest = -1
        self.printed: dict[str, Any] = {}
        self.conventions: dict[str, str] = {}
        self.notes: dict[str, None] = {}
        self.environment: dict[str, Any] = {}
        self.smoothed_seconds = False  # the printed time is a mean over the whole run so far
        self.zero_based = False  # the first step is printed as 0
        self.mean_seconds: float | None = None  # of all steps, where no line has a time

    # --- what a reader says ----------------------------------------------------------------------------------------
    @property
    def config(self) -> dict[str, Any]:
        return self.attempts[-1].config

    def where(self, line: int) -> str:
        return f"{self.source}:{line}"

    def set(self, key: str, value: Any, line: int | None = None, why: str = "") -> None:
        """A value of the configuration. `why` in place of a line: a name, a default of that version."""
        if value is None:
            return
        self.config[key] = value
        self.attempts[-1].sources[key] = why or self.where(line or 0)

    def default(self, key: str, value: Any, why: str) -> None:
        """A value that nothing in the log says and that this framework or version implies."""
        if key not in self.config:
            self.set(key, value, why=why)

    def print(self, name: str, value: Any, line: int) -> None:
        """A figure as the framework prints it."""
        self.printed[name] = value
        self.attempts[-1].sources[f"printed.{name}"] = self.where(line)

    def note(self, text: str) -> None:
        self.notes[text] = None

    def begin(self, line: int) -> None:
        """The program starts (again) here."""
        if self.attempts[-1].steps or self.attempts[-1].config:
            self.attempts.append(Attempt(line))
            self.ranks, self.placed = {}, set()
            self.events.append(Event(self.steps[-1].step if self.steps else 0, "attempt", {"line": line}))

    def memory(self, line: int, kinds: dict[str, int], rank: int | None = None) -> None:
        """Bytes by kind of one rank (None: of whichever printed). A later report of a rank replaces its earlier one."""
        self.ranks.setdefault(-1 if rank is None else rank, {}).update(kinds)
        for kind in kinds.keys() - self.placed:
            self.placed.add(kind)
            self.attempts[-1].sources[f"memory.{kind}"] = self.where(line)

    def step(
        self,
        line: int,
        step: int,
        *,
        samples: int | None = None,
        tokens: int | None = None,
        loss: float | None = None,
        grad_norm: float | None = None,
        learning_rate: float | None = None,
        loss_scale: float | None = None,
        skipped: int = 0,
        nan: int = 0,
        seconds: float | None = None,
        tokens_per_second: float | None = None,
        batch_size: int | None = None,
        memory: dict[str, int] | None = None,
        steady: bool = True,
    ) -> None:
        """One printed step. A loss or gradient norm that is not finite counts in `nan`."""
        for value in (loss, grad_norm):
            if value is not None and not math.isfinite(value):
                nan = max(nan, 1)
        loss, grad_norm, learning_rate = _finite(loss), _finite(grad_norm), _finite(learning_rate)
        last = self.steps[-1] if self.steps else None
        if last and step == last.step == self.newest and (loss, samples) == (last.loss, last.samples):
            return  # the same line again: two ranks, or two copies of the output
        if step <= self.newest:
            self._take_back(line, step, loss)
        self.newest = step
        self.attempts[-1].steps += 1
        self.seen += 1
        if self.seen % self.stride and not nan:
            return
        if not steady:
            self.unsteady.add(step)
        self.steps.append(
            Step(
                step=step, samples=samples, tokens=tokens, loss=loss, grad_norm=grad_norm, learning_rate=learning_rate,
                loss_scale=loss_scale, skipped=skipped, nan=nan, seconds=_finite(seconds),
                tokens_per_second=_finite(tokens_per_second), batch_size=batch_size, memory=memory or {},
            )
        )  # fmt: skip
        self.lines.append(line)
        if len(self.steps) >= MOST_STEPS:
            self._thin()

    def passes_over(self, step: int) -> bool:
        """Whether a next step would not be kept, of a log so long that only some are. A reader that sees at a glance
        that nothing is wrong with the line need not read it then; it is counted here."""
        if self.stride == 1 or step <= self.newest or not (self.seen + 1) % self.stride:
            return False
        self.newest = step
        self.attempts[-1].steps += 1
        self.seen += 1
        return True

    def _take_back(self, line: int, step: int, loss: float | None) -> None:
        """A step that comes again: the earlier stretch is abandoned, and the seam says whether both agree there."""
        kept = len(self.steps)
        while kept and self.steps[kept - 1].step >= step:
            kept -= 1
        before = next((s.loss for s in self.steps[kept:] if s.step == step), None)
        self.events.append(
            Event(step, "restart", {
                "line": line, "abandoned": len(self.steps) - kept, "first_line": (*self.lines[kept:], line)[0],
                "loss_before": before, "loss_after": loss,
            })
        )  # fmt: skip
        del self.steps[kept:], self.lines[kept:]
        self.validations = [v for v in self.validations if v.step < step]

    def _thin(self) -> None:
        keep = [i for i, s in enumerate(self.steps) if s.nan or not i or i % 2 or i == len(self.steps) - 1]
        self.steps, self.lines = [self.steps[i] for i in keep], [self.lines[i] for i in keep]
        self.stride *= 2

    # --- the record ------------------------------------------------------------------------------------------------
    def record(self) -> Record:
        attempt = self._last()
        if self.stride > 1:
            self.note(f"{self.seen:,} step lines; 1 of {self.stride} is kept, every one that is not finite among them")
        steps = [_completed(step, attempt.config, self.zero_based) for step in self.steps]
        speed = self._speed(steps)
        memory = _largest([*self.ranks.values(), *(s.memory for s in steps)])
        if self.device_bytes:
            memory["device"] = max(memory.get("device", 0), self.device_bytes)
        return Record(
            framework=self.framework, source=self.source, config=nested(attempt.config), memory=memory, speed=speed,
            steps=steps, validations=self.validations, checkpoints=self.checkpoints, events=self.events,
            environment=self.environment, sources=attempt.sources, lines=self.lines, ranks=self.ranks,
            printed=self.printed, conventions=self.conventions, notes=list(self.notes),
        )  # fmt: skip

    def _last(self) -> Attempt:
        """The last attempt that trained, or the last one where none did. An attempt that printed no configuration, as
        some resumed jobs do, has that of the one before it."""
        trained = [a for a in self.attempts if a.steps] or self.attempts
        last = trained[-1]
        if last.config:
            return last
        before = [a for a in self.attempts[: self.attempts.index(last)] if a.config]
        return Attempt(last.line, before[-1].config, {**before[-1].sources, **last.sources}) if before else last

    def _speed(self, steps: list[Step]) -> dict[str, float]:
        """Medians over the steps after warm-up, with their spread; seconds_per_step recomputed from printed times."""
        if self.smoothed_seconds:
            timed = [s for s in steps if s.seconds][-1:]
        else:
            timed = [s for s in steps if s.seconds and s.step not in self.unsteady]
            timed = timed[WARMUP_STEPS if len(timed) > 2 * WARMUP_STEPS else 1 :] or timed[-1:]
        if not timed:
            return {} if self.mean_seconds is None else {"seconds_per_step": self.mean_seconds}
        seconds = [s.seconds for s in timed if s.seconds]
        found: dict[str, float] = {"seconds_per_step": median(seconds), "steps_counted": len(seconds)}
        if len(seconds) > 2:
            tenths = quantiles(seconds, n=10, method="inclusive")
            found |= {"seconds_per_step_p10": tenths[0], "seconds_per_step_p90": tenths[-1]}
        rates = {
            "samples_per_second": [s.batch_size / s.seconds for s in timed if s.batch_size and s.seconds],
            "tokens_per_second": [s.tokens_per_second for s in timed if s.tokens_per_second],
        }
        return found | {name: median(values) for name, values in rates.items() if values}


def _completed(step: Step, config: dict[str, Any], zero_based: bool) -> Step:
    """The step with the amounts that follow from the printed ones and the configuration."""
    sequence, batch = config.get("model.seq_length"), step.batch_size
    if batch is None and "batch.ramp" not in config:
        batch = config.get("batch.global_batch_size")
    samples, tokens, rate = step.samples, step.tokens, step.tokens_per_second
    if samples is None and tokens and sequence and not tokens % sequence:
        samples = tokens // sequence
    if samples is None and batch and "batch.ramp" not in config:
        samples = (step.step + zero_based) * batch
    if tokens is None and samples is not None and sequence:
        tokens = samples * sequence
    if rate is None and batch and sequence and step.seconds:
        rate = batch * sequence / step.seconds
    if (batch, samples, tokens, rate) == (step.batch_size, step.samples, step.tokens, step.tokens_per_second):
        return step
    return replace(step, batch_size=batch, samples=samples, tokens=tokens, tokens_per_second=rate)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _largest(reports: list[dict[str, int]]) -> dict[str, int]:
    """Bytes by kind, at most over the reports."""
    found: dict[str, int] = {}
    for report in reports:
        for kind, size in report.items():
            found[kind] = max(found.get(kind, 0), size)
    return found


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys as the sections of a run file."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        section, dot, name = key.partition(".")
        if dot:
            tree.setdefault(section, {})[name] = value
        else:
            tree[section] = value
    return tree
