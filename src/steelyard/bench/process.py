"""One arm's program from start to end: a group of processes of its own, bounded in time, watched while warming up."""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

GRACE_SECONDS = 10.0  # between asking a program to end and ending it


@dataclass
class Ended:
    """How a program ended: its exit code (negative: by that signal), whether it was out of time, and the largest
    sample of each kind (bytes; `gpu_rate` in percent) taken before its window began."""

    code: int
    timed_out: bool
    seconds: float
    sampled: dict[str, int] = field(default_factory=dict)


def run(command: Sequence[str], log: Path, minutes: float, warming_up: Callable[[], bool]) -> Ended:
    """Start a program, write what it says into `log`, wait. Its whole group is gone afterwards, also when this process
    is interrupted. `warming_up` is asked every second; samples are taken only while it is true. Raises OSError where
    the program cannot be started."""
    began = time.monotonic()
    with log.open("wb") as output:
        program = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    sampler = Sampler(program.pid, warming_up)
    sampler.start()
    timed_out = False
    try:
        program.wait(minutes * 60)
    except subprocess.TimeoutExpired:
        timed_out = True
    finally:
        sampler.stop()
        _end(program)
    return Ended(program.returncode, timed_out, time.monotonic() - began, sampler.largest)


def _end(program: "subprocess.Popen[bytes]") -> None:
    """Ask the group to end, then make it."""
    if program.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.wait(GRACE_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)
    program.wait()


class Sampler(threading.Thread):
    """Looks at the memory of a group's processes, and of the GPUs where there is a driver to ask, once a second."""

    def __init__(self, group: int, warming_up: Callable[[], bool]):
        super().__init__(daemon=True)
        self.largest: dict[str, int] = {}
        self._group, self._warming_up, self._stopped = group, warming_up, threading.Event()

    def run(self) -> None:
        gpus = _gpus()
        while not self._stopped.wait(1.0) and self._warming_up():
            for kind, size in {**_resident(self._group), **gpus()}.items():
                self.largest[kind] = max(size, self.largest.get(kind, 0))

    def stop(self) -> None:
        self._stopped.set()
        self.join()


def _resident(group: int) -> dict[str, int]:
    """`rss`: resident bytes of the largest process of a group. Nothing where the system has no /proc."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended meanwhile
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(stat[2]) == group:
                found.append(int(stat[21]) * os.sysconf("SC_PAGE_SIZE"))
    return {"rss": max(found)} if found else {}


def _gpus() -> Callable[[], dict[str, int]]:
    """Asks NVML for the fullest device's bytes in use (`device`) and the busiest one's occupancy (`gpu_rate`)."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())]
    except Exception:  # no library, no driver or no device: nothing to ask
        return dict

    def ask() -> dict[str, int]:
        used = [int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles]
        rates = [int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu) for handle in handles]
        return {"device": max(used), "gpu_rate": max(rates)} if handles else {}

    return ask
