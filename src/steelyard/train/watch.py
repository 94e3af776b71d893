"""Knowing what every rank is doing: heartbeats in the rendezvous store, and what they say when a run fails."""

import contextlib
import ctypes
import os
import signal
import socket
import threading
import time
from dataclasses import dataclass

import torch.distributed as dist

GRACE_SECONDS = 20.0
ALIVE_SECONDS = 2.0


@dataclass(frozen=True)
class Heartbeat:
    """The last thing a rank told: it began `phase` of step `step`, `age` seconds ago; `quiet` seconds ago it still
    told that it lives."""

    rank: int
    step: int
    phase: str
    age: float
    quiet: float
    host: str
    pid: int

    def __str__(self) -> str:
        life = "running" if self.lives else "gone" if self.gone else f"silent for {self.quiet:.0f} s"
        where = f"step {self.step}, {self.phase} for {self.age:.0f} s"
        return f"rank {self.rank} (pid {self.pid} on {self.host}, {life}): {where}"

    @property
    def lives(self) -> bool:
        """Whether the rank still runs, as far as it can be told from here."""
        return self.quiet < 2.5 * ALIVE_SECONDS and not self.gone

    @property
    def gone(self) -> bool:
        """Whether it is known to have ended: a process of this host that is no more, or not yet waited for."""
        if self.host != socket.gethostname() or not os.path.isdir("/proc/self"):
            return False
        try:
            with open(f"/proc/{self.pid}/stat", encoding="utf-8", errors="replace") as file:
                return file.read().rsplit(")", 1)[1].split()[0] == "Z"
        except OSError:
            return True


class Watch:
    """This rank's heartbeat, and the others'. `beat(phase)` is called at the start of every phase of every step."""

    def __init__(self, store: dist.Store, rank: int, world: int):
        self._store, self.rank, self.world = store, rank, world
        self.step, self.phase, self._last = 0, "start", time.monotonic()
        self.beat("start")
        if world > 1:
            threading.Thread(target=self._live, daemon=True).start()

    def _live(self) -> None:
        """Tell that this process runs, whatever its main thread waits for."""
        with contextlib.suppress(Exception):  # the store's host is gone: so is the run
            while True:
                self._store.set(f"alive/{self.rank}", str(time.time()))
                time.sleep(ALIVE_SECONDS)

    def beat(self, phase: str) -> None:
        self.phase, self._last = phase, time.monotonic()
        if self.world > 1:
            text = f"{self.step}\t{phase}\t{time.time()}\t{socket.gethostname()}\t{os.getpid()}"
            self._store.set(f"heartbeat/{self.rank}", text)

    def others(self) -> list[Heartbeat]:
        """What the other ranks told last."""
        found = []
        for rank in range(self.world):
            with contextlib.suppress(Exception):  # a rank that never beat, or a store whose host is gone
                if rank != self.rank and self._store.check([f"heartbeat/{rank}", f"alive/{rank}"]):
                    step, phase, then, host, pid = self._store.get(f"heartbeat/{rank}").decode().split("\t")
                    now, alive = time.time(), float(self._store.get(f"alive/{rank}"))
                    found.append(Heartbeat(rank, int(step), phase, now - float(then), now - alive, host, int(pid)))
        return found

    def silent(self) -> list[Heartbeat]:
        """The ranks that hold the others up: those that no longer run, else those not in this rank's phase."""
        others = self.others()
        dead = [beat for beat in others if not beat.lives]
        return dead or [beat for beat in others if (beat.step, beat.phase) != (self.step, self.phase)]

    def end_with_launcher(self) -> None:
        """Die with the process that started this one, so that a killed launcher leaves nothing behind (Linux)."""
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 = PR_SET_PDEATHSIG

    def end_without_progress(self) -> None:
        """After a request to stop: leave within GRACE_SECONDS of the last sign of progress. A rank whose peer is gone
        may wait in a collective that never returns, and signals do not wake it."""

        def watch() -> None:
            while time.monotonic() - self._last < GRACE_SECONDS:
                time.sleep(0.5)
            os._exit(143)

        threading.Thread(target=watch, daemon=True).start()


def leave_soon() -> None:
    """End this process a moment after its work is done: a launcher that got the signal too waits for its ranks to end,
    and they would wait for it to fetch their result."""
    timer = threading.Timer(1.0, os._exit, (143,))
    timer.daemon = True
    timer.start()


def kill_silent(beats: list[Heartbeat]) -> None:
    """Kill silent ranks on this host: a stopped process does not answer the launcher's polite request."""
    for beat in beats:
        if beat.host == socket.gethostname() and not beat.lives:
            with contextlib.suppress(OSError):
                os.kill(beat.pid, signal.SIGKILL)


class StopSignal:
    """The first SIGTERM, SIGUSR1 or SIGINT asks the loop to stop after its step; it is only noted here."""

    def __init__(self, watch: Watch, launched: bool):
        self.received = 0
        self._watch, self._launched = watch, launched
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        first, self.received = not self.received, self.received or number
        if first and self._launched:
            self._watch.end_without_progress()
