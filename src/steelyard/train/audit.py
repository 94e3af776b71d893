"""A run holds itself to its plan: parameters before the first step, memory after the first update, collectives and
peaks of memory in the step after it, and an MFU that is never impossible. Only a wrong parameter count ends it; the
rest is said and recorded.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from steelyard import hardware
from steelyard.parallel.mesh import Mesh
from steelyard.predict import engine as closed_form
from steelyard.predict import flops, memory, parameters
from steelyard.predict.memory import Checked, Memory
from steelyard.record.schema import Event
from steelyard.spec import UserError, error
from steelyard.spec.run import Run
from steelyard.train import measure
from steelyard.train.clock import Clock
from steelyard.train.engine import Engine
from steelyard.train.tracker import Lap, Tracker
from steelyard.train.traffic import TrafficCounter


class Audit:
    """The checks of one rank. All ranks make the same calls in the same order; `note` shows, `record` keeps."""

    def __init__(
        self, run: Run, mesh: Mesh, engine: Engine, note: Callable[[str], None], record: Callable[[Event], None]
    ):
        self._run, self._mesh, self._engine, self._note, self._record = run, mesh, engine, note, record
        self._steps = 0  # of this process
        self._watched = False
        self._before = 0  # bytes of tensors before the first step; 0: not known
        self._mfu_is_impossible = False

    def parameters(self) -> dict[str, int]:
        """The live modules hold exactly the tensors that were predicted, on every rank. Returns both counts; raises
        UserError T001."""
        parallel = self._run.parallel
        held = parameters.rank_tensors(self._run.model, parallel, self._mesh.pipeline_rank)
        expected = {tensor.name: tensor.local_shape(parallel.tensor) for tensor in held}
        live = self._engine.shapes_on_tensor_rank()
        if live != expected:
            wrong = sorted(set(live.items()) ^ set(expected.items()))[:6]
            raise error("T001", place=f"rank {dist.get_rank()}", difference=wrong)
        here = torch.tensor(self._engine.unique_numel(), device=self._mesh.device)
        unique = int(self._mesh.all_reduce(here, ("pipeline",)).item())
        planned = parameters.unique(self._run.model, parallel.tensor)
        if unique != planned:
            raise error("T001", difference=f"{unique:,} parameters live, {planned:,} planned")
        self._note(f"parameters: {unique:,} unique, counted on the live model and equal to the plan")
        return {"unique": unique, "planned": planned}

    def before(self) -> None:
        """Before the first step of a run that starts anew."""
        self._before = measure.live_bytes(self._mesh.device)

    def memory(self, step: int, micro_batches: int) -> None:
        """Predicted against measured memory; once, after the step that made the optimizer's states."""
        predicted = self._predicted(micro_batches)
        here = {"tensors": measure.live_bytes(self._mesh.device)}
        here |= {"tensors_before": self._before} if self._before else {}
        tensors, largest = self._by_pipeline_rank(here)
        self._say(tensors, predicted)
        measured = {**measure.memory(self._mesh), **largest}
        found = memory.check(predicted, measured, hardware.of(self._run.hardware))
        for entry in found:
            if entry.kind not in largest:
                self._note(f"memory, {entry}")
        if "rss" in measured:
            rest = measured["rss"] - measured["tensors"]
            self._note(f"memory not modelled: {rest / 2**20:,.1f} MiB of the process are no live tensors")
        detail, ranks = {entry.kind: _entry(entry) for entry in found}, measure.memory_by_rank(self._mesh)
        self._record(Event(step, "memory", {"checked": detail, "measured": measured, "ranks": ranks}))

    def watches(self, updates: int) -> bool:
        """Whether the next step is the one that is watched."""
        return not self._watched and self._steps > 0 and updates > 0 and not self._run.parallel.compile

    def unwatched(self) -> None:
        """At the end of a process: says what was never checked, and why."""
        if self._watched or not self._steps:
            return
        why = "no two steps, the first of them an update"
        why = "compiled blocks hide their operations" if self._run.parallel.compile else why
        self._note(f"peaks of memory and traffic were not checked: {why}")

    @contextmanager
    def step(self, step: int, micro_batches: int, updates: int, clock: Clock) -> Iterator[None]:
        """Around a training step: counts what it sends and the tensors that are alive, and lays both beside the
        prediction. Once, in the first step that is like all later ones: the process's first makes connections, and the
        first update makes the optimizer's states. (Compiled blocks hide their operations.)"""
        watches = self.watches(updates)
        self._steps += 1
        if not watches:
            yield
            return
        self._watched = True
        counter, laps = TrafficCounter(self._mesh, self._engine.tied.group), list[Lap]()
        with ExitStack() as watching:
            watching.enter_context(counter)
            if self._on_host:  # where no allocator knows the peak
                tracker = watching.enter_context(Tracker(measure.live_tensors(self._mesh.device)))
                watching.enter_context(clock.told(lambda _: laps.append(tracker.lap())))  # a phase ends the one before
            yield
            laps += [tracker.lap()] if self._on_host else []
        self._traffic(step, counter, micro_batches)
        if laps:
            peaks = {"tensors_forward_backward": laps[-2].peak, "tensors_update": laps[-1].peak}
            self._peaks(step, peaks, self._predicted(micro_batches))

    def _traffic(self, step: int, counter: TrafficCounter, micro_batches: int) -> None:
        wrong = counter.wrong_by_rank(self._run, micro_batches)
        for place, (planned, counted) in wrong.items():
            self._note(f"traffic, {place}: planned (calls, bytes) {planned}, counted {counted}")
        if not wrong:
            calls, size = counter.calls.total(), counter.bytes.total()
            self._note(
                f"traffic: {calls:,} collectives and messages, {size / 2**20:,.2f} MiB a step on this rank, "
                "counted on every rank and equal to the plan"
            )
        rows = [
            {"kind": kind, "axis": axis, "calls": calls, "bytes": size}
            for (kind, axis), (calls, size) in sorted(counter.found().items())
        ]
        self._record(Event(step, "traffic", {"first_rank": rows, "wrong": wrong}))

    def _peaks(self, step: int, here: dict[str, int], predicted: Sequence[Memory]) -> None:
        by_rank, largest = self._by_pipeline_rank(here)
        rows = [{entry.kind: _entry(entry) for entry in entries} for entries in self._say(by_rank, predicted)]
        measured = {**largest, "tensors_peak": max(largest.values())}
        self._record(Event(step, "memory_peaks", {"pipeline_ranks": rows, "measured": measured}))

    def _predicted(self, micro_batches: int) -> tuple[Memory, ...]:
        """All ranks in a step of so many micro-batches."""
        return closed_form.ranks(closed_form.in_step_of(self._run, micro_batches), self._on_host)

    @property
    def _on_host(self) -> bool:
        return self._mesh.device.type == "cpu"

    def _by_pipeline_rank(self, here: dict[str, int]) -> tuple[list[dict[str, int]], dict[str, int]]:
        """The most bytes by kind of the ranks of each pipeline rank, and of all; on all ranks."""
        everywhere: list[tuple[int, dict[str, int]]] = [(0, {}) for _ in range(dist.get_world_size())]
        dist.all_gather_object(everywhere, (self._mesh.pipeline_rank, here))
        found: list[dict[str, int]] = [{} for _ in range(self._run.parallel.pipeline)]
        for rank, sizes in everywhere:
            found[rank] = {kind: max(size, found[rank].get(kind, 0)) for kind, size in sizes.items()}
        return found, {kind: max(sizes[kind] for sizes in found) for kind in here}

    def _say(self, measured: list[dict[str, int]], predicted: Sequence[Memory]) -> list[list[Checked]]:
        """What was measured on each pipeline rank beside its prediction."""
        chip, found = hardware.of(self._run.hardware), list[list[Checked]]()
        for rank, sizes in enumerate(measured):
            found.append(memory.check([m for m in predicted if m.stage == rank], sizes, chip))
            place = f"memory of pipeline rank {rank}" if len(measured) > 1 else "memory"
            for entry in found[-1]:
                self._note(f"{place}, {entry}")
        return found

    def mfu(self, step: int, batch_size: int, seconds: float) -> float | None:
        """Model FLOPs (causal) of `batch_size` sequences in `seconds` over the chip's dense peak; None where the chip
        is unknown or the figure impossible."""
        run = self._run
        model_flops = flops.model_flops(run.model, run.padded_vocab_size) * batch_size
        try:
            use = flops.utilization(
                model_flops, seconds, run.parallel.world_size, hardware.of(run.hardware), run.precision.compute, "model"
            )
        except UserError as impossible:  # the figure is wrong, the training is not
            if not self._mfu_is_impossible:
                self._note(str(impossible))
                self._record(Event(step, "mfu_impossible", {"problem": impossible.problems[0].rule}))
            self._mfu_is_impossible = True
            return None
        return use.value if use else None


def _entry(one: Checked) -> dict[str, Any]:
    return {**asdict(one), "error": one.error}
