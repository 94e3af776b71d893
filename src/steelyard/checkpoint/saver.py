"""Saving while training goes on: copy to the host, then write, sync and seal from a thread.

Training is held for the copy alone, and for an earlier save that is not sealed yet, so that no two are ever in flight.
The ranks report to each other through the rendezvous store and not through collectives, which belong to training; the
first rank seals when all have reported.
"""

import json
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from steelyard.checkpoint import shards, store
from steelyard.parallel.mesh import Mesh

POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Saved:
    """How a save ended. `blocked_seconds` is what it took from training, `seconds` how long it took to be sealed, both
    on this rank; `problem` is why there is no checkpoint, "" where there is. `unequal`: tensors of which ranks held
    unequal copies, known to the first rank."""

    step: int
    path: Path
    bytes: int
    seconds: float
    blocked_seconds: float
    problem: str = ""
    unequal: tuple[str, ...] = ()


class Saver:
    """The saves of one run, one at a time. All ranks call `begin` and `wait` together.

    `patience_seconds`: how long a rank waits for others that write nothing. `beat` is called while a wait progresses.
    `before_sealing` is called on the first rank, off the training's path.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        mesh: Mesh,
        patience_seconds: float = 600.0,
        beat: Callable[[], None] = lambda: None,
        before_sealing: Callable[[], None] = lambda: None,
    ):
        self._folder, self._keep, self._mesh = folder, keep, mesh
        self._patience, self._beat, self._before_sealing = patience_seconds, beat, before_sealing
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._talk: _Talk | None = None
        self._before_last: _Talk | None = None
        self._thread: threading.Thread | None = None
        self._staging = shards.Staging()
        self.outcome: Saved | None = None  # of the last save, once it is known here

    def begin(
        self, step: int, tensors: Mapping[str, Tensor], texts: dict[str, str], copy: bool = True,
        since: float | None = None,
    ) -> None:  # fmt: skip
        """Copy the tensors and go on; writing and sealing happen behind. An earlier save is waited for first.

        Without `copy` the tensors are written from where they are, and the caller waits before it changes them. A disk
        that fails is told by `outcome`, not raised. `since`: the `time.perf_counter()` from which training waits.
        """
        began = time.perf_counter() if since is None else since
        self.wait()
        self.outcome = None
        mine = shards.owned(tensors, self._mesh)
        whole = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        save = _Save(step, store.final_path(self._folder, step), texts, began, whole)
        token, problem = self._agree(save)
        if problem:
            self.outcome = save.ended(problem)
            return
        staged = self._staging.copy(mine) if copy else shards.in_place(mine)
        copies = shards.copies(tensors, self._mesh)
        self._before_last, self._talk = self._talk, _Talk(token, self._rank, self._world)
        blocked = time.perf_counter() - began if copy else None
        self._thread = threading.Thread(target=self._write, args=(save, staged, copies, blocked), daemon=True)
        self._thread.start()

    def wait(self, patience_seconds: float | None = None) -> Saved | None:
        """Until the last save is sealed or has failed: its outcome, the same on every rank; None before the first.

        Raises TimeoutError where nothing has been written for that long (default: the saver's patience).
        """
        patience = self._patience + 1 if patience_seconds is None else patience_seconds  # the first rank's ends sooner
        if self._thread is None or self._talk is None:
            return self.outcome
        seen, since = -1, time.monotonic()
        began, in_flight = time.perf_counter(), self.outcome is None
        while self.outcome is None:
            self._thread.join(POLL_SECONDS)
            if (now := self._talk.progress()) != seen:
                seen, since = now, time.monotonic()
                self._beat()
            if time.monotonic() - since > patience:
                raise TimeoutError("the rank that seals checkpoints is silent")
        self._thread.join()
        if in_flight:
            blocked = self.outcome.blocked_seconds + time.perf_counter() - began
            self.outcome = replace(self.outcome, blocked_seconds=min(blocked, self.outcome.seconds))
        return self.outcome

    def release(self) -> None:
        """Give back the memory that saves are copied to, at the latest when the one in flight ends; the next one takes
        longer for it."""
        self._staging.release()

    # --- behind the training ------------------------------------------------------------------------------------------

    def _agree(self, save: "_Save") -> tuple[str, str]:
        """A name for this save and why it cannot begin, from the first rank."""
        said = [uuid.uuid4().hex, ""]
        if self._rank == 0:
            if self._before_last:
                self._before_last.forget()  # every rank has written for the last one, so it knows how this one ended
            try:
                store.begin(self._folder, save.step)
            except OSError as failure:
                said[1] = reason(failure)
        if self._world > 1:
            dist.broadcast_object_list(said)
        return said[0], said[1]

    def _write(self, save: "_Save", staged: shards.Staged, copies: dict[str, int], blocked: float | None) -> None:
        assert self._talk is not None
        beside, name = store.beside_path(self._folder, save.step), f"shard-{self._rank:05d}.safetensors"
        try:
            file = shards.write(beside / name, staged, self._talk.tick)
            report: dict[str, Any] = {"name": name, "bytes": file.bytes, "crc32": file.crc32, "copies": copies}
        except Exception as failure:
            report = {"problem": f"{name}: {reason(failure)}"}
        del staged
        try:
            self._talk.report(report)
            problem = self._seal(save, report) if self._rank == 0 else self._talk.verdict(self._patience)
        except Exception as failure:
            problem = reason(failure)
        self.outcome = save.ended(problem, blocked)

    def _seal(self, save: "_Save", own: dict[str, Any]) -> str:
        """On the first rank: make it a checkpoint once every rank has written. Returns why not, "" where it is one."""
        assert self._talk is not None
        beside, problem = store.beside_path(self._folder, save.step), ""
        try:
            reports = self._talk.reports(own, self._patience)
            problem = next((r["problem"] for r in reports if "problem" in r), "")
            if not problem:
                self._before_sealing()
                files = {r["name"]: store.File(r["bytes"], r["crc32"]) for r in reports}
                store.seal(beside, save.path, files, save.texts, _unequal([r["copies"] for r in reports]))
        except Exception as failure:
            problem = reason(failure)
        if problem:
            shutil.rmtree(beside, ignore_errors=True)
        self._talk.tell(problem)
        if not problem:
            store.retain(self._folder, self._keep)
        return problem


@dataclass(frozen=True)
class _Save:
    """One save: what to write where, since when, and the bytes of all its tensors."""

    step: int
    path: Path
    texts: dict[str, str]
    began: float
    whole: int

    def ended(self, problem: str, blocked: float | None = None) -> Saved:
        """`blocked`: seconds that training waited; None where it waits until now."""
        seconds = time.perf_counter() - self.began
        size, unequal = self.whole, tuple[str, ...]()
        if not problem:
            with suppress(OSError, ValueError):
                size, unequal = sum(f.bytes for f in store.files(self.path).values()), tuple(store.unequal(self.path))
        return Saved(self.step, self.path, size, seconds, seconds if blocked is None else blocked, problem, unequal)


def _unequal(copies: list[dict[str, int]]) -> list[str]:
    """Which tensors have copies that differ, and on which ranks, from every rank's checksums of what it holds."""
    first: dict[str, tuple[int, int]] = {}
    found: dict[str, str] = {}
    for rank, held in enumerate(copies):
        for place, crc in held.items():
            known, other = first.setdefault(place, (crc, rank))
            if crc != known:
                found.setdefault(place.partition(" at ")[0], f"rank {other} and rank {rank}")
    return [f"{name}: {ranks}" for name, ranks in found.items()]


class _Talk:
    """What the ranks tell each other about one save, through the rendezvous store; nothing where there is one rank."""

    def __init__(self, token: str, rank: int, world: int):
        self._rank, self._world = rank, world
        self._store = dist.PrefixStore(f"save/{token}", dist.distributed_c10d._get_default_store())
        self._alone, self._ticks, self._ticked = world == 1, 0, 0.0

    def tick(self) -> None:
        """Something was written; told to the others about once a second."""
        self._ticks += 1
        if not self._alone and time.monotonic() - self._ticked > 1:
            self._ticked = time.monotonic()
            self._store.add("progress", 1)

    def progress(self) -> int:
        """A number that grows while any rank writes."""
        return self._ticks if self._alone else self._ticks + self._store.add("progress", 0)

    def report(self, report: dict[str, Any]) -> None:
        if not self._alone:
            self._store.set(f"report/{self._rank}", json.dumps(report))
            self._store.add("progress", 1)

    def reports(self, own: dict[str, Any], patience: float) -> list[dict[str, Any]]:
        """Of all ranks, in rank order. Raises TimeoutError where some are silent."""
        if self._alone:
            return [own]
        keys = [f"report/{rank}" for rank in range(self._world)]
        self._until(keys, patience, "did not report its part of the checkpoint")
        return [json.loads(self._store.get(key)) for key in keys]

    def tell(self, problem: str) -> None:
        if not self._alone:
            self._store.set("verdict", problem or "sealed")

    def verdict(self, patience: float) -> str:
        """What the first rank told: "" for a sealed checkpoint."""
        self._until(["verdict"], patience, "did not say whether the checkpoint is sealed")
        said = self._store.get("verdict").decode()
        return "" if said == "sealed" else said

    def _until(self, keys: list[str], patience: float, complaint: str) -> None:
        """Poll: a blocking wait would hold the connection that heartbeats use too."""
        seen, since = -1, time.monotonic()
        while not self._store.check(keys):
            if (now := self.progress()) != seen:
                seen, since = now, time.monotonic()
            if time.monotonic() - since > patience:
                missing = [key for key in keys if not self._store.check([key])]
                ranks = ", ".join(key.removeprefix("report/") for key in missing).replace("verdict", "0")
                raise TimeoutError(f"rank {ranks} {complaint} within {patience:g} s")
            time.sleep(POLL_SECONDS)

    def forget(self) -> None:
        """Remove what was told."""
        for key in ["progress", "verdict", *(f"report/{rank}" for rank in range(self._world))]:
            with suppress(Exception):  # a store that cannot delete keeps a few bytes
                self._store.delete_key(key)


def reason(caught: BaseException) -> str:
    """A failure in the operating system's words, with the file it is about."""
    if isinstance(caught, OSError) and caught.strerror:
        name = Path(str(caught.filename)).name if caught.filename else ""
        return f"{name}: {caught.strerror}" if name else caught.strerror
    return str(caught).strip().splitlines()[-1] if str(caught).strip() else type(caught).__name__
