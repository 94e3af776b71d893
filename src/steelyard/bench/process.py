"""One arm's program from start to end: a group of processes of its own, bounded in time, watched while warming up."""

import contextlib
import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GRACE_SECONDS = 10.0  # between asking a program to end and ending it
MARK = "STEELYARD_BENCH_ARM"  # in the environment of a program and of whatever it starts


@dataclass
class Ended:
    """How a program ended: its exit code (negative: by that signal), whether it was out of time, and the largest
    sample of each kind (bytes; `gpu_rate` in percent) taken before its window began."""

    code: int
    timed_out: bool
    seconds: float
    sampled: dict[str, int] = field(default_factory=dict)


def run(command: Sequence[str], log: Path, minutes: float, warming_up: Callable[[], bool]) -> Ended:
    """Start a program, write what it says into `log`, wait. Nothing it started is left afterwards, also when this
    process is interrupted or asked to end. `warming_up` is asked every second; samples are taken only while it is
    true. Raises OSError where the program cannot be started."""
    mark = uuid.uuid4().hex
    # what Python programs print must be in the log at once: their steps are counted there
    environment = {**os.environ, MARK: mark, "PYTHONUNBUFFERED": "1"}
    began = time.monotonic()
    timed_out = False
    with _interruptible(), log.open("wb") as output:
        program = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            env=environment,
        )  # fmt: skip
        family = Family(program.pid, mark)
        sampler = Sampler(family, warming_up)
        try:
            sampler.start()
            program.wait(minutes * 60)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            sampler.stop()
            _end(program, family)
    return Ended(program.returncode, timed_out, time.monotonic() - began, sampler.largest)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """A request to end this process interrupts it as Ctrl-C does: its program must not outlive it."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    here = threading.current_thread() is threading.main_thread()  # elsewhere signals cannot be caught
    asked = [n for n in (signal.SIGTERM, signal.SIGHUP) if here and signal.getsignal(n) is signal.SIG_DFL]
    for number in asked:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in asked:
            signal.signal(number, signal.SIG_DFL)


@dataclass(frozen=True)
class Family:
    """A program's processes: its group, and what it started outside of it (torchrun gives every rank a session of its
    own), known by the mark in its environment. The group alone where the system has no /proc."""

    group: int
    mark: str

    def resident(self) -> dict[int, int]:
        """Resident bytes of each process that lives, by its id."""
        found = {}
        mark = f"{MARK}={self.mark}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended meanwhile, or is another user's
                stat = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
                ours = int(stat[2]) == self.group or mark in (folder / "environ").read_bytes().split(b"\0")
                if ours and stat[0] not in "ZX":
                    found[int(folder.name)] = int(stat[21]) * os.sysconf("SC_PAGE_SIZE")
        return found

    def send(self, number: int) -> None:
        """A signal to all of them."""
        with contextlib.suppress(OSError):
            os.killpg(self.group, number)
        for process in self.resident():
            with contextlib.suppress(OSError):
                os.kill(process, number)


def _end(program: "subprocess.Popen[bytes]", family: Family) -> None:
    """Ask the family to end, then make it."""

    def killed() -> bool:
        family.send(signal.SIGKILL)
        return not family.resident()

    try:
        if program.poll() is None:
            family.send(signal.SIGTERM)
            _wait(lambda: program.poll() is not None and not family.resident())
    finally:  # also when interrupted while waiting
        _wait(killed)  # again for what was being started meanwhile
        program.wait()


def _wait(done: Callable[[], bool]) -> None:
    """Until it is done, or time for it is over."""
    until = time.monotonic() + GRACE_SECONDS
    while not done() and time.monotonic() < until:
        time.sleep(0.1)


class Sampler(threading.Thread):
    """Looks once a second at the memory of a program's largest process, and of the GPUs where a driver can be asked."""

    def __init__(self, family: Family, warming_up: Callable[[], bool]):
        super().__init__(daemon=True)
        self.largest: dict[str, int] = {}
        self._family, self._warming_up, self._stopped = family, warming_up, threading.Event()

    def run(self) -> None:
        gpus = _gpus()
        while not self._stopped.wait(1.0) and self._warming_up():
            sizes = self._family.resident().values()
            for kind, size in {**({"rss": max(sizes)} if sizes else {}), **gpus()}.items():
                self.largest[kind] = max(size, self.largest.get(kind, 0))

    def stop(self) -> None:
        self._stopped.set()
        self.join()


def _gpus() -> Callable[[], dict[str, int]]:
    """Asks NVML for the fullest device's bytes in use (`device`) and the busiest one's occupancy (`gpu_rate`)."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())]
    except Exception:  # no library, no driver or no device: nothing to ask
        return dict

    def each(question: Callable[[Any], int]) -> list[int]:
        """The answers of the devices that have one: some do not know how busy a part of them is."""
        found = []
        for handle in handles:
            with contextlib.suppress(pynvml.NVMLError):
                found.append(int(question(handle)))
        return found

    def ask() -> dict[str, int]:
        used = each(lambda handle: pynvml.nvmlDeviceGetMemoryInfo(handle).used)
        rates = each(lambda handle: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        return {kind: max(found) for kind, found in (("device", used), ("gpu_rate", rates)) if found}

    return ask
