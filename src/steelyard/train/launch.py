"""Starting a run: its own ranks on this machine, or joining those of torchrun or srun."""

import contextlib
import ctypes
import logging
import os
import re
import signal
import subprocess
import time
import traceback
import uuid
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from steelyard.parallel import mesh
from steelyard.spec import Loaded, UserError, error
from steelyard.spec.errors import Reported
from steelyard.train.loop import Display, Loop, Result
from steelyard.train.ready import outer_world
from steelyard.train.watch import Heartbeat, StopSignal, Watch, kill_silent, leave_soon

RANKS_PER_CORE = 8


def launch(loaded: Loaded, display: Callable[[], Display]) -> Result:
    """Train and return how it ended. `display` makes the display of the first rank.

    Raises UserError where the run cannot start or a rank failed; by then no process of the run is left.
    """
    world = loaded.run.parallel.world_size
    if outer_world() is not None:
        _from_slurm()
        return _joined(loaded, display)
    _check_devices(world)
    if world == 1:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
        return _joined(loaded, display)
    return _started(loaded, display, world)


def _check_devices(world: int) -> None:
    devices, kind = (torch.cuda.device_count(), "GPUs") if torch.cuda.is_available() else (os.cpu_count() or 1, "cores")
    limit = devices if kind == "GPUs" else devices * RANKS_PER_CORE
    if world > limit:
        raise error("L001", place="--world", world=world, devices=devices, kind=kind)


def _started(loaded: Loaded, display: Callable[[], Display], world: int) -> Result:
    """Start `world` ranks on this machine with torch's elastic launcher, on a free port."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    quiet_launcher()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        # a forked rank has torch loaded already; CUDA cannot be forked once it is initialised
        start_method="spawn" if torch.cuda.is_available() else "fork",
    )
    try:
        results = elastic_launch(config, _rank)(loaded, display)
    except ChildFailedError as failure:
        raise _first_failure(failure) from None
    except SignalException as caught:
        return Result(f"stopped by {caught.sigval.name}", 130, 0, None)
    return Result(**results[0])


def quiet_launcher() -> None:
    """Silence the launcher's own account of a failure, a stack of its own frames; ours is in `_first_failure`."""
    for name in list(logging.root.manager.loggerDict):  # each of torch's loggers has a level of its own
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)


def _rank(loaded: Loaded, display: Callable[[], Display]) -> dict[str, Any]:
    """What every started rank runs. Its exit leaves a small report for the launcher, also when it fails."""
    from torch.distributed.elastic.multiprocessing.errors import record

    return record(lambda: asdict(_joined(loaded, display, launched=True)))()  # type: ignore[return-value]


def _first_failure(failure: Any) -> UserError:
    """The error of the rank that failed first, as the user should read it."""
    rank, first = failure.get_first_failure()
    if first.exitcode < 0:
        name = signal.Signals(-first.exitcode).name
        return error("L005", place=f"rank {rank}", rank=rank, signal=name)
    text = first.message.get("message", "") if isinstance(first.message, dict) else first.message
    return Reported(str(text).removeprefix(f"{Reported.__name__}: ").removeprefix(f"{UserError.__name__}: "))


def _joined(loaded: Loaded, display: Callable[[], Display], launched: bool = False) -> Result:
    """This process as one rank of a run whose ranks exist."""
    run = loaded.run
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = _device(int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    _meet(device, rank, world, run.stop.hang_seconds)
    watch = Watch(dist.distributed_c10d._get_default_store(), rank, world)
    if launched:
        watch.end_with_launcher()
    signals = StopSignal(watch, launched=world > 1)
    shown = display() if rank == 0 else Silent()
    try:
        loop = Loop(loaded, mesh.build(run.parallel, device, run.stop.hang_seconds), watch, signals, shown)
        loop.resume()
        result = loop.train()
    except (Exception, CheckpointException) as failure:
        shown.end()
        raise _told(failure, watch) from None
    dist.barrier()
    dist.destroy_process_group()
    if launched and result.code == 130:
        leave_soon()
    return result


def _told(failure: BaseException, watch: Watch) -> BaseException:
    """The failure as this rank tells it: a user's error as it is, anything else with the place in the run, and, where
    this rank only waited, with the ranks it waited for."""
    if watch.world == 1 or isinstance(failure, UserError):
        return failure
    waiting = isinstance(failure, dist.DistError) or "gloo" in str(failure) or "NCCL" in str(failure)
    silent = _silent(watch) if waiting else []
    if any(beat.gone for beat in silent):
        time.sleep(2)  # the launcher knows better how that rank ended, and takes the first report it gets
    if silent:
        kill_silent(silent)
        before, detail = "", "it waited in vain for " + "; ".join(map(str, silent))
        advice = "see what those ranks were doing; stop.hang_seconds sets how long a rank waits"
    else:
        before, detail = "".join(traceback.format_exception(failure)), f"{type(failure).__name__}: {failure}"
        advice = "the traceback stands above"
    place = f"rank {watch.rank}, step {watch.step}, {watch.phase}"
    return Reported(before + str(error("L004", place=place, rank=watch.rank, step=watch.step, phase=watch.phase,
                                       detail=detail, advice=advice)))  # fmt: skip


def _silent(watch: Watch) -> list[Heartbeat]:
    """The ranks that hold this one up. One that is killed closes its connections a moment before it counts as ended."""
    until = time.monotonic() + 1.0
    found = watch.silent()
    while not any(beat.gone for beat in found) and time.monotonic() < until:
        time.sleep(0.05)
        found = watch.silent()
    return found


def _device(local_rank: int, local_world: int) -> torch.device:
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    if "OMP_NUM_THREADS" not in os.environ or local_world > 1:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_world))
    give_back_tensors()
    return torch.device("cpu")


def give_back_tensors() -> None:
    """Have glibc return every freed block of 4 MiB or more to the system at once. Left alone it keeps blocks up to 32
    MiB for itself, and the holes between activations come to a tenth of a run's memory. Nothing on other systems."""
    M_MMAP_THRESHOLD = -3  # of malloc.h
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 4 * 2**20)


def _meet(device: torch.device, rank: int, world: int, timeout_seconds: float) -> None:
    """Initialise the process group: NCCL between GPUs, gloo between CPUs. Raises UserError L003."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_seconds)
    if world == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    try:
        dist.init_process_group(backend, rank=rank, world_size=world, timeout=timeout)
    except (dist.DistError, RuntimeError, ValueError) as failure:
        endpoint = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise error("L003", endpoint=endpoint, detail=str(failure).splitlines()[0]) from None


def _from_slurm() -> None:
    """The variables torchrun would set, from srun's."""
    if "RANK" in os.environ:
        return
    given = os.environ
    first = subprocess.run(
        ["scontrol", "show", "hostnames", given["SLURM_STEP_NODELIST"]], capture_output=True, text=True, check=True
    ).stdout.split()[0]
    local_world = re.match(r"\d+", given.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    given.update(
        RANK=given["SLURM_PROCID"],
        WORLD_SIZE=given["SLURM_STEP_NUM_TASKS"],
        LOCAL_RANK=given.get("SLURM_LOCALID", "0"),
        LOCAL_WORLD_SIZE=local_world.group() if local_world else "1",
        MASTER_ADDR=given.get("MASTER_ADDR", first),
        MASTER_PORT=given.get("MASTER_PORT", str(20000 + int(given["SLURM_JOB_ID"]) % 20000)),
    )


class Silent:
    """The display of ranks that show nothing."""

    def begin(self, *_: object) -> None: ...
    def step(self, *_: object) -> None: ...
    def validation(self, *_: object) -> None: ...
    def note(self, *_: object) -> None: ...
    def end(self) -> None: ...
