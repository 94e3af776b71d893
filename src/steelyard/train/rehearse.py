"""One real training step of any rank of any world, on fake tensors: what the engine would hold, without the machines.

The process group is fake (collectives return at once), the tensors have shapes and no memory, and everything else is
the real engine: its modules, FSDP, pipeline schedules, loss and optimizer. What it allocates is tracked storage by
storage. Nothing is read from a value, so no data are needed.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from steelyard.data.loader import Batch
from steelyard.model.gpt import GPT
from steelyard.parallel import apply, mesh
from steelyard.parallel.norm import local
from steelyard.predict import engine, traffic
from steelyard.spec.run import Run
from steelyard.train.engine import Engine, Micro
from steelyard.train.tracker import Lap, Tracker
from steelyard.train.traffic import TrafficCounter


@dataclass(frozen=True)
class Rehearsal:
    """Bytes of one rank. `states` by category and `steady`, all that is allocated, after the second step; `laps` the
    phases of the first step (`first ...`) and of the second; `traffic` what the second sends, (kind, axis) -> (calls,
    bytes), without the count of valid tokens, which needs data."""

    rank: int
    world: int
    states: dict[str, int]
    steady: int
    laps: dict[str, Lap]
    traffic: dict[tuple[str, str], tuple[int, int]]

    @property
    def peak(self) -> int:
        return max(lap.peak for phase, lap in self.laps.items() if not phase.startswith("first"))

    @property
    def peak_first_step(self) -> int:
        return max(lap.peak for phase, lap in self.laps.items() if phase.startswith("first"))


class FakeTracker(Tracker):
    """Tracks fake tensors, of which two operations do not do what they do to real ones."""

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1  # a fake tensor has no value; the engine reads norms and losses, and 1 is a legal one
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # of fake tensors it would be a new one
        return super().call(func, args, kwargs)


class SlicedMesh(mesh.Mesh):
    """A mesh whose tensor axis is taken out once, at its making: slicing reads values, which fake tensors lack."""

    def __init__(self, built: mesh.Mesh):
        super().__init__(built.device, built.parallel, built.whole)
        self.__dict__["_tensor"] = self.whole["tensor"]

    @property
    def tensor(self) -> DeviceMesh:
        return self.__dict__["_tensor"]


@contextmanager
def fake_world(rank: int, world: int) -> Iterator[None]:
    """A process group of `world` ranks in which this process is `rank` and every collective returns at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        _clear_sharding_prop_cache()  # it remembers this rank's place in the mesh
        dist.destroy_process_group()


def rehearse(run: Run, rank: int = 0) -> Rehearsal:
    """Two steps of rank `rank`: the first makes Adam's moments, the second is what every later one is like."""
    with fake_world(rank, run.parallel.world_size):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a fake group has no time limit to set
            where = SlicedMesh(mesh.build(run.parallel, torch.device("cpu")))
        tracker = FakeTracker()
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        engine = _engine(run, where, mode, tracker)
        with mode, tracker:
            # once for nothing: DTensor works out each operation's sharding on fake tensors of the whole shape
            engine.forward_backward([_micro(run) for _ in range(run.batch.accumulation)], 0)
            engine.end()
            tracker.lap()
            laps: dict[str, Lap] = {}
            laps |= _step(run, engine, tracker, "first ")
            with TrafficCounter(where, engine.tied.group) as counter:
                laps |= _step(run, engine, tracker, "")
            states = _states(engine)
            steady = tracker.current
    return Rehearsal(rank, run.parallel.world_size, states, steady, laps, counter.found())


def _engine(run: Run, where: mesh.Mesh, mode: FakeTensorMode, tracker: Tracker) -> Engine:
    """The real engine, whose weights are fake: the model is assembled without memory as always, and only what would
    then give it memory is replaced."""

    def fill(part: GPT, run: Run, device: torch.device) -> None:
        for module in part.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                with mode, tracker:
                    fake = torch.empty_like(parameter, device=device)
                setattr(module, name, nn.Parameter(fake))

    real, apply.fill = apply.fill, fill
    try:
        return Engine(run, where)
    finally:
        apply.fill = real


def _step(run: Run, engine: Engine, tracker: Tracker, name: str) -> dict[str, Lap]:
    micro_batches = [_micro(run) for _ in range(run.batch.accumulation)]
    engine.forward_backward(micro_batches, 0)
    laps = {f"{name}forward-backward": tracker.lap()}
    engine.loss()
    engine.clip(run.optimizer.clip_grad)
    engine.update(1e-3)
    laps[f"{name}optimizer"] = tracker.lap()
    engine.end()
    return laps


def random_batch(run: Run) -> Batch:
    """One micro-batch of random tokens, all of one document, for a step that needs no data."""
    micro, length = run.batch.micro_batch_size, run.model.seq_length
    tokens = torch.randint(0, run.model.vocab_size, (micro, length))
    positions = torch.arange(length).repeat(micro, 1) if run.data.reset_positions else None
    documents = torch.zeros(micro, length, dtype=torch.int32) if run.data.reset_attention else None
    return Batch(
        tokens, tokens.clone(), torch.ones_like(tokens, dtype=torch.bool), positions, documents, torch.arange(micro)
    )


def _micro(run: Run) -> Micro:
    wide = torch.float64 if run.precision.compute == "fp64" else torch.float32
    batch = random_batch(run)
    return Micro(batch, torch.ones(batch.tokens.shape, dtype=wide))


def _states(engine: Engine) -> dict[str, int]:
    """Bytes of weights and Adam's moments, a shared storage once."""
    moments = [t for _, mean, variance in engine.optimizer.moments() for t in (mean, variance)]
    return {"master": _bytes(engine.parameters), "optimizer": _bytes(moments)}


def _bytes(tensors: Any) -> int:
    storages = {local(t).untyped_storage()._cdata: local(t).untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def beside_prediction(run: Run, rank: int) -> dict[str, Any]:
    """One rank's rehearsal and its closed form, in bytes, as JSON-ready values."""
    parallel = run.parallel
    columns = parallel.data * parallel.context
    pipeline, column = divmod(rank // parallel.tensor, columns)
    closed = engine.in_last_step(run, pipeline, column % parallel.shards, host=True)
    found = rehearse(run, rank)
    transfers = traffic.on_rank(run, pipeline, column % parallel.shards)
    transfers = tuple(entry for entry in transfers if entry.purpose != "valid tokens")
    states = {"master": closed.kept.weights + closed.kept.master, "optimizer": closed.kept.optimizer}
    pairs = {
        **{name: (found.states[name], states[name]) for name in states},
        "steady": (found.steady, closed.steady),
        "peak": (found.peak, closed.peak),
        "peak_first_step": (found.peak_first_step, closed.peak_first_step),
    }
    return {
        "rank": rank,
        "world": found.world,
        "moment": closed.at_peak.name,
        "bytes": {
            name: {"rehearsed": a, "predicted": b, "error": (b - a) / max(a, 1)} for name, (a, b) in pairs.items()
        },
        "laps": {name: lap.peak for name, lap in found.laps.items()},
        "traffic": {
            "calls": sum(calls for calls, _ in found.traffic.values()),
            "bytes": sum(size for _, size in found.traffic.values()),
            "wrong": traffic.differences(transfers, found.traffic),
        },
    }
