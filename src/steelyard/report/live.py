"""A run while it runs: one aligned line a step, units in the header; the last lines stay live on a terminal."""

import sys
from typing import Any, TextIO

from steelyard.record.schema import Step, Validation
from steelyard.spec import Loaded

HEADER_EVERY = 40


class Live:
    """Plain lines on `out`, good for a file; on a terminal a status line below them shows the time left."""

    def __init__(self, out: TextIO | None = None):
        self.out = out or sys.stdout
        self.terminal = self.out.isatty()
        self.total = self.lines = 0
        self.scales = False

    def begin(self, loaded: Loaded, state: Any, total_steps: int) -> None:
        """`state` has the counts of train/state.py."""
        run = loaded.run
        self.total, self.scales = total_steps, run.precision.scales_loss
        self._line(
            f"{run.name}: steps {state.step + 1:,} to {total_steps:,}, global batch {run.batch.global_batch_size} = "
            f"micro {run.batch.micro_batch_size} x accumulation {run.batch.accumulation} x data {run.parallel.data}, "
            f"{run.precision.compute}, record in {run.record.folder}"
        )

    def step(self, line: Step, state: Any, seconds_left: float) -> None:
        if self.lines % HEADER_EVERY == 0:
            self._line(self._header(line))
        self.lines += 1
        width = len(f"{self.total:,}")
        cells = [
            f"{line.step:>{width},}/{self.total:,}", f"{line.samples:>10,}", _number(line.loss, "9.4f"),
            _number(line.grad_norm, "9.3f"), f"{line.learning_rate:>10.3e}",
        ]  # fmt: skip
        if self.scales:
            cells.append(f"{line.loss_scale or 0:>11,.0f}")
        cells += [f"{(line.seconds or 0) * 1000:>9,.0f}", f"{line.tokens_per_second:>11,.0f}"]
        cells.append(f"{(line.model_flops_per_second or 0) / 1e12:>10.4f}")
        if line.mfu is not None:
            cells.append(f"{line.mfu:>7.1%}")
        kind, size = _memory(line.memory)
        cells += [f"{size / 2**20:>{max(10, len(kind) + 6)},.0f}", f"{_clock(seconds_left):>9}"]
        self._line("  ".join(cells) + _warning(line, state))

    def _header(self, line: Step) -> str:
        width = 2 * len(f"{self.total:,}") + 1
        cells = [f"{'step':>{width}}", f"{'samples':>10}", f"{'loss nats':>9}", f"{'grad norm':>9}", f"{'rate':>10}"]
        if self.scales:
            cells.append(f"{'loss scale':>11}")
        cells += [f"{'step ms':>9}", f"{'tokens/s':>11}", f"{'model TF/s':>10}"]
        if line.mfu is not None:
            cells.append(f"{'MFU':>7}")
        kind, _ = _memory(line.memory)
        return "  ".join([*cells, f"{kind + ' MiB':>{max(10, len(kind) + 6)}}", f"{'time left':>9}"])

    def validation(self, line: Validation) -> None:
        loss = "no tokens" if line.loss is None else f"{line.loss:.4f} nats"
        self._line(
            f"{line.name} loss {loss} over {line.tokens:,} tokens after step {line.step:,} ({line.seconds:.1f} s)"
        )

    def note(self, text: str) -> None:
        self._line(text)

    def end(self) -> None:
        self.out.flush()

    def _line(self, text: str) -> None:
        print(text, file=self.out, flush=True)


def _number(value: float | None, form: str) -> str:
    """A number that is shown whatever it is: nan and inf included."""
    return f"{float('nan') if value is None else value:>{form}}"


def _memory(memory: dict[str, int]) -> tuple[str, int]:
    """The kind that limits: reserved on GPUs, peak resident on CPUs, by its name."""
    for kind in ("reserved_peak", "rss_peak"):
        if kind in memory:
            return kind.replace("_", " "), memory[kind]
    return next(iter(memory.items()), ("memory", 0))


def _warning(line: Step, state: Any) -> str:
    if line.nan:
        return f"  NOT FINITE, not updated ({state.nan} so far)"
    return f"  overflow, not updated ({state.skipped} so far)" if line.skipped else ""


def _clock(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours:d}:{rest // 60:02d}:{rest % 60:02d}"
