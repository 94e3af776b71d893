"""A run holds itself to its plan: parameters before the first step, memory after the first update, collectives in the
second step, and an MFU that is never impossible. Only a wrong parameter count ends it; the rest is said and recorded.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

import torch
import torch.distributed as dist

from steelyard import hardware
from steelyard.parallel.mesh import Mesh
from steelyard.predict import flops, memory, parameters
from steelyard.record.schema import Event
from steelyard.spec import UserError, error
from steelyard.spec.run import Run
from steelyard.train import measure
from steelyard.train.engine import Engine
from steelyard.train.traffic import TrafficCounter


class Audit:
    """The checks of one rank. All ranks make the same calls in the same order; `note` shows, `record` keeps."""

    def __init__(
        self, run: Run, mesh: Mesh, engine: Engine, note: Callable[[str], None], record: Callable[[Event], None]
    ):
        self._run, self._mesh, self._engine, self._note, self._record = run, mesh, engine, note, record
        self._steps = 0  # of this process
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

    def memory(self, step: int) -> None:
        """Predicted against measured memory; once, after the step that made the optimizer's states."""
        measured = {**measure.memory(self._mesh), "tensors": measure.live_tensors(self._mesh)}
        found = memory.check(self._run, measured, host=self._mesh.device.type == "cpu")
        for entry in found:
            self._note(f"memory, {entry}")
        if "rss" in measured:
            rest = measured["rss"] - measured["tensors"]
            self._note(f"memory not modelled: {rest / 2**20:,.1f} MiB of the process are no live tensors")
        detail = {entry.kind: {**asdict(entry), "error": entry.error} for entry in found}
        ranks = measure.memory_by_rank(self._mesh)
        self._record(Event(step, "memory", {"checked": detail, "measured": measured, "ranks": ranks}))

    @contextmanager
    def traffic(self, step: int, micro_batches: int) -> Iterator[None]:
        """Around a training step: counts what the process's second one sends, and lays it beside the prediction. (The
        first also makes connections; compiled blocks hide their operations.)"""
        self._steps += 1
        if self._steps != 2 or self._run.parallel.compile:
            yield
            return
        counter = TrafficCounter(self._mesh, self._engine.tied.group)
        with counter:
            yield
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
