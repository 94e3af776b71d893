"""The run: data, model, resume, and steps until there is a reason to stop."""

import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from steelyard.checkpoint import shards, store
from steelyard.checkpoint.saver import Saved, Saver
from steelyard.data.loader import Split, open_data
from steelyard.parallel.mesh import Mesh
from steelyard.plan import sheet
from steelyard.predict import flops
from steelyard.record.schema import Checkpoint, Event, Step, Validation
from steelyard.record.writer import RunFolder
from steelyard.spec import Loaded, UserError, error, progress, write
from steelyard.train import environment, measure, resume
from steelyard.train.audit import Audit
from steelyard.train.clock import Clock
from steelyard.train.engine import Engine, share
from steelyard.train.state import State
from steelyard.train.step import Outcome, step
from steelyard.train.watch import GRACE_SECONDS, StopSignal, Watch


class Display(Protocol):
    """Where a run shows itself while it runs; only the first rank has one that prints."""

    def begin(self, loaded: Loaded, state: State, total_steps: int) -> None: ...
    def step(self, line: Step, state: State, seconds_left: float) -> None: ...
    def validation(self, line: Validation) -> None: ...
    def note(self, text: str) -> None: ...
    def end(self) -> None: ...


@dataclass(frozen=True)
class Result:
    """How a run ended. `code` is the exit code: 0 done or a planned stop, 1 stopped by the NaN rule, 130 a signal."""

    reason: str
    code: int
    steps: int
    loss: float | None


class Loop:
    """A run on this rank. All ranks execute the same calls in the same order."""

    def __init__(self, loaded: Loaded, mesh: Mesh, watch: Watch, signals: StopSignal, display: Display):
        self.loaded, self.run, self.mesh, self.display = loaded, loaded.run, mesh, display
        self.watch, self.signals, self.state = watch, signals, State()
        self.clock = Clock(watch.beat)
        self.folder = self._open_folder()
        self.splits = self._open_data()
        self.total_samples = progress.total_samples(self.run.length, self.run.batch, self.run.model.seq_length)
        self.total_steps = progress.total_steps(self.run.length, self.run.batch, self.run.model.seq_length)
        self.schedule = progress.schedule(
            self.run.learning_rate, self.run.length, self.run.batch, self.run.model.seq_length
        )
        with self.clock.phase("build"):
            self.engine = Engine(self.run, mesh)
        self.audit = Audit(self.run, mesh, self.engine, display.note, self._record)
        self.counted = self.audit.parameters()
        self.last_loss: float | None = None
        self.saver = Saver(
            Path(self.run.record.folder) / "checkpoints", self.run.checkpoint.keep, mesh, self.run.stop.hang_seconds,
            beat=lambda: watch.beat("save"), before_sealing=self.folder.sync if self.folder else lambda: None,
        )  # fmt: skip
        self.told: Saved | None = None
        self.saved_step = -1
        self.last_batch = (0, 0)  # first sample and size
        self.micro_batches = 0  # of the last step
        self.saved_at = time.monotonic()

    # --- before the first step ---------------------------------------------------------------------------------------

    def _open_folder(self) -> RunFolder | None:
        """The run folder on the first rank, locked. What stands in it is not touched before the run can go on."""
        return RunFolder(self.run.record.folder, self.run.record.tensorboard) if self.mesh.is_first else None

    def _describe(self) -> None:
        """What was asked and predicted, and what it runs on; written once nothing can be refused any more."""
        if self.folder:
            self.folder.write_text("run.toml", self._toml)
            self.folder.write_json("plan.json", sheet.as_json(self.run))
            self.folder.write_json("environment.json", environment.describe(self.mesh.device))

    @cached_property
    def _toml(self) -> str:
        return write.dumps(self.run, lambda key: str(self.loaded.origin(key)))

    def _open_data(self) -> dict[str, Split]:
        """Built and cached by the first rank, then opened by the others."""
        with self.clock.phase("open data"):
            splits = open_data(self.run, build=True) if self.mesh.is_first else None
            dist.barrier()
            splits = splits or open_data(self.run, build=False)
        for split in splits.values():
            self.display.note(split.describe())
        return splits

    def resume(self) -> None:
        """Continue from this run's newest complete checkpoint; where it has none, from what `checkpoint.load` names."""
        path = resume.choose(self.run, self.mesh, self.display.note, self._record)
        if path is not None:
            self._load(path)
        self._describe()
        self._record(Event(self.state.step, "start", {"checkpoint": str(path) if path else None}))
        self._record(Event(self.state.step, "parameters", self.counted))

    def _load(self, path: Path) -> None:
        saved = store.read_state(path)
        resume.compare(path, saved, self.run, self.splits["train"], self.mesh, self.display.note, self._record)
        self.state = State(**saved["state"])
        if saved["scaler"]:
            self.engine.scaler.load(saved["scaler"])
        tensors = self.engine.tensors(with_optimizer=self.state.updates > 0, loading=True)
        shards.load(path, tensors, self.run.model.vocab_size)
        self.engine.after_load(self.state.updates)
        self.saved_step = self.state.step
        recorded = saved.get("record") or 0
        if self.folder and store.is_inside(path, self.folder.path) and self.folder.position < recorded:
            self.display.note("warning: metrics.jsonl is shorter than when the checkpoint was saved: lines are lost")
        self.display.note(f"resumed from {path} after {self.state.step} steps, {self.state.samples:,} samples")

    # --- steps -------------------------------------------------------------------------------------------------------

    def train(self) -> Result:
        self.display.begin(self.loaded, self.state, self.total_steps)
        try:
            result = self._steps()
            self._finish()
        except UserError:  # a mistake of this rank: the others live, and a save in flight can still be sealed
            with suppress(TimeoutError):
                self._tell_saved(self.saver.wait(GRACE_SECONDS))
            raise
        self._record(Event(self.state.step, "stop", asdict(result)))
        if self.folder:
            self.folder.close()
        self.display.note(result.reason)
        self.display.end()
        return result

    def _steps(self) -> Result:
        """Steps until there is a reason to stop."""
        result = self._stop_reason(None)
        if not self.state.updates:
            self.audit.before()
        while result is None:
            outcome = self._step()
            if outcome.updated and self.state.updates == 1:
                self.audit.memory(self.state.step, self.micro_batches)
            self._tell_saved(self.saver.outcome)
            self._between_steps()
            result = self._stop_reason(outcome)
        return result

    def _step(self) -> Outcome:
        """One step and its line."""
        state, run = self.state, self.run
        began = time.perf_counter()
        self.watch.step = state.step + 1
        size = progress.batch_size_at(run.batch, state.samples)
        rate = self.schedule.rate(state.samples_updated, size)
        with self.clock.phase("data"):
            batches = share(self.splits["train"], state.samples, size, run, self.mesh)
        self.last_batch, self.micro_batches = (state.samples, size), len(batches)
        if self.audit.watches(state.updates):
            self._wait_for_save()
            self.saver.release()  # its copies would be counted
        with self.audit.step(state.step + 1, self.micro_batches, state.updates, self.clock):
            outcome = step(run, self.engine, batches, rate, state.step, self.clock)
        if state.step + 1 - self.saved_step >= run.checkpoint.overlap_steps:
            self._wait_for_save()  # a step counts only while no more than the promised ones can be lost
        state.advance(size, run.model.seq_length, outcome.updated, outcome.nan)
        seconds = time.perf_counter() - began
        timers = self.clock.lap(seconds)
        self.last_loss = outcome.loss
        if state.step % run.record.every_steps == 0:
            self._show(outcome, rate, size, seconds, timers)
        return outcome

    def _show(self, outcome: Outcome, rate: float, size: int, seconds: float, timers: dict[str, float]) -> None:
        run, state = self.run, self.state
        tokens_per_second = size * run.model.seq_length / seconds
        per_token = flops.model_flops(run.model, run.padded_vocab_size) / run.model.seq_length
        bytes_by_kind = measure.memory(self.mesh)
        rate_of_flops = per_token * tokens_per_second
        line = Step(
            step=state.step, samples=state.samples, tokens=state.tokens, loss=outcome.loss, grad_norm=outcome.grad_norm,
            learning_rate=rate, loss_scale=outcome.loss_scale if run.precision.scales_loss else None,
            skipped=int(not outcome.updated), nan=int(outcome.nan), seconds=seconds,
            tokens_per_second=tokens_per_second, memory=bytes_by_kind,
            model_flops_per_second=rate_of_flops, mfu=self.audit.mfu(state.step, size, seconds), batch_size=size,
            timers=timers, batch_hash=f"{self.engine.fingerprint:x}",
        )  # fmt: skip
        self._record(line)
        self.display.step(line, state, self.clock.remaining(self.total_steps - state.step))

    def _between_steps(self) -> None:
        """Evaluation and checkpoints that are due."""
        every = self.run.evaluation.every_steps
        if every and self.state.step % every == 0:
            self._evaluate(self.state.step // every - 1)
        minutes = self.run.checkpoint.every_minutes
        due = bool(self.run.checkpoint.every_steps) and self.state.step % self.run.checkpoint.every_steps == 0
        late = minutes > 0 and (time.monotonic() - self.saved_at) / 60 >= minutes
        # steps are the same on every rank; only their clocks need to agree
        if due or (minutes > 0 and self._agreed(late)):
            self._save(self.run.checkpoint.asynchronous)

    def _stop_reason(self, outcome: Outcome | None) -> Result | None:
        """Why the run ends here, the same on all ranks; None to go on."""
        state, stop = self.state, self.run.stop
        local_reasons = {
            "signal": bool(self.signals.received),
            "stop file": bool(stop.file) and self.mesh.is_first and Path(stop.file).exists(),
            "minutes": stop.minutes > 0 and self.clock.minutes >= stop.minutes,
        }
        flags = torch.tensor([int(v) for v in local_reasons.values()], device=self.mesh.device)
        flags = self.mesh.all_reduce(flags, ("pipeline", "data", "tensor"), "max")
        agreed = dict(zip(local_reasons, flags.bool().tolist(), strict=True))
        reason, code = "", 0
        if state.samples >= self.total_samples:
            reason = f"done: {state.step:,} steps, {state.samples:,} samples, {state.tokens:,} tokens"
        elif outcome and outcome.nan and (stop.on_nan == "stop" or state.nan_in_a_row >= stop.nan_limit):
            rule = 'stop.on_nan = "stop"' if stop.on_nan == "stop" else f"stop.nan_limit = {stop.nan_limit} in a row"
            reason, code = f"stopped: loss or gradient norm is not finite at step {state.step} ({rule})", 1
        elif agreed["signal"]:
            reason, code = f"stopped by a signal after step {state.step}", 130
        elif agreed["stop file"]:
            reason = f"stopped after step {state.step}: {stop.file} exists"
        elif agreed["minutes"]:
            reason = f"stopped after step {state.step}: stop.minutes = {stop.minutes:g} is over"
        elif outcome and stop.step_multiple and state.step % stop.step_multiple == 0:
            reason = f"stopped after step {state.step}: stop.step_multiple = {stop.step_multiple}"
        return Result(reason, code, state.step, self.last_loss) if reason else None

    def _finish(self) -> None:
        """The last checkpoint, then the closing evaluation unless somebody is waiting for the run to leave."""
        self.audit.unwatched()
        if self._wait_for_save() or self.state.step > self.saved_step:
            self._save(behind=False)
        every, steps = self.run.evaluation.every_steps, self.run.evaluation.steps
        if steps and not self._agreed(bool(self.signals.received)):
            self._evaluate(self.state.step // every if every else 0)
            self._evaluate(0, "test")

    # --- evaluation, checkpoints, records ----------------------------------------------------------------------------

    def _evaluate(self, number: int, kind: str = "validation") -> None:
        """The `number`-th evaluation: the next global batches of each validation set (as Megatron, never rewound)."""
        size = self.run.batch.global_batch_size
        for name, split in self.splits.items():
            if name.partition(".")[0] != kind:
                continue
            began = time.perf_counter()
            total, tokens = 0.0, 0
            with self.clock.phase("evaluate"):
                for batch in range(self.run.evaluation.steps):
                    first = (number * self.run.evaluation.steps + batch) * size
                    sums = self.engine.evaluate(share(split, first, size, self.run, self.mesh))
                    total, tokens = total + sums[0], tokens + sums[1]
                    self.watch.beat("evaluate")
            loss = total / tokens if tokens else None
            line = Validation(self.state.step, self.state.samples, name, loss, tokens, time.perf_counter() - began)
            self._record(line)
            self.display.validation(line)

    def _save(self, behind: bool) -> None:
        """A checkpoint of this moment: begun, if it is written `behind` training, else sealed, or UserError C004."""
        began, (first, size) = time.perf_counter(), self.last_batch
        batch = {"first": first, "size": size, "hash": f"{self.engine.fingerprint:x}"} if size else None
        scaler, record = self.engine.scaler.state(), self.folder.position if self.folder else None
        state = {"schema": 1, "state": self.state.as_json(), "scaler": scaler, "batch": batch, "record": record}
        texts = {"state.json": json.dumps(state, indent=1), "run.toml": self._toml}
        self._wait_for_save()
        with self.clock.phase("save"):
            tensors = self.engine.tensors(with_optimizer=self.state.updates > 0)
            self.saver.begin(self.state.step, tensors, texts, behind, began)
        self.saved_step, self.saved_at = self.state.step, time.monotonic()
        if not behind:
            self._must_be_saved()

    def _wait_for_save(self) -> str:
        """Until no save is in flight; why the last one failed, the same on all ranks, "" where it did not."""
        with self.clock.phase("save"):
            outcome = self.saver.wait()
        self._tell_saved(outcome)
        return outcome.problem if outcome else ""

    def _must_be_saved(self) -> None:
        """Wait for the save and raise UserError C004 on every rank where it failed."""
        if problem := self._wait_for_save():
            assert self.told
            raise error("C004", "record.folder", path=self.told.path, detail=problem, bytes=self.told.bytes)

    def _tell_saved(self, saved: Saved | None) -> None:
        """Record how a save ended, once. A failed one does not end training: earlier checkpoints stand, more follow."""
        if saved is None or saved is self.told:
            return
        self.told = saved
        if saved.problem:
            self._record(Event(self.state.step, "checkpoint_failed", {"step": saved.step, "problem": saved.problem}))
            self.display.note(
                f"warning: no checkpoint of step {saved.step}: {saved.problem} ({saved.bytes:,} bytes are needed in "
                f"{saved.path.parent}); earlier ones are untouched"
            )
            return
        self._record(Checkpoint(saved.step, str(saved.path), saved.bytes, saved.seconds, saved.blocked_seconds))
        if saved.unequal:
            self._record(Event(saved.step, "copies_differ", {"tensors": list(saved.unequal)}))
            self.display.note(f"warning: ranks hold unequal copies of {saved.unequal[0]}: the ranks have diverged")
        behind = saved.blocked_seconds < saved.seconds
        waited = f"; training waited {saved.blocked_seconds:.2f} s" if behind else ""
        self.display.note(f"saved {saved.path} ({saved.bytes / 2**20:,.1f} MiB in {saved.seconds:.1f} s{waited})")

    def _agreed(self, flag: bool) -> bool:
        """Whether any rank says so."""
        value = torch.tensor(int(flag), device=self.mesh.device)
        return bool(self.mesh.all_reduce(value, ("pipeline", "data", "tensor"), "max").item())

    def _record(self, line: Step | Validation | Checkpoint | Event) -> None:
        if self.folder:
            self.folder.append(line)
