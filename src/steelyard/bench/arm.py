"""What is measured: a run of ours under some values, or another program's command."""

import csv
import hashlib
import json
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from steelyard.spec import UserError, error, load, progress
from steelyard.spec.bench import Bench
from steelyard.spec.run import Run

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
NAMES = "a name of at most 100 letters, digits, `.`, `_` and `-`"
# columns of a table of cases -> the value of the run file that a cell sets
COLUMNS = {
    "tensor": "parallel.tensor", "pipeline": "parallel.pipeline", "micro": "batch.micro_batch_size",
    "global": "batch.global_batch_size", "fp16": "precision.compute", "checkpointing": "recompute.mode",
}  # fmt: skip


@dataclass(frozen=True)
class Arm:
    """`command` starts it, without the folder it writes into. `run` is ours; None for another program, and for a run
    that is refused, whose `refusal` says why."""

    name: str
    command: tuple[str, ...]
    run: Run | None = None
    refusal: str = ""

    @property
    def ours(self) -> bool:
        return self.run is not None or bool(self.refusal)

    def record(self, folder: Path) -> Path:
        """What it leaves in the folder of a round: our run folder, or another program's log."""
        return folder / ("run" if self.ours else "output.log")

    @property
    def identity(self) -> str:
        """The same for arms that would run the same; a result is only kept for its own arm. Another program is the same
        while the files that its command names are."""
        files = [] if self.ours else [_version(Path(word)) for word in self.command]
        what = json.dumps([self.command, self.run.model_dump_json() if self.run else "", self.refusal, files])
        return hashlib.sha256(what.encode()).hexdigest()[:16]


def _version(path: Path) -> list[int]:
    """What changes when a file is written; nothing where there is none."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return []
    return [found.st_size, found.st_mtime_ns] if path.is_file() else []


def own(name: str, path: Path, values: Sequence[str], world: int | None, rule: Bench) -> Arm:
    """A run file under some values. One that is no legal run, or ends before its window does, becomes a refused arm."""
    last = rule.excluded + rule.steps
    # the window is of training steps alone
    values = (
        *values, "evaluation.every_steps=0", "evaluation.steps=0", "checkpoint.every_steps=0",
        "checkpoint.every_minutes=0", "record.every_steps=1", "record.tensorboard=false", f"stop.step_multiple={last}",
    )  # fmt: skip
    command = (sys.executable, "-m", "steelyard.cli.main", "train", str(path), *values)
    try:
        run = load(path, values, world).run
        steps = progress.total_steps(run.length, run.batch, run.model.seq_length)
        if steps < last:
            raise error("B003", "length", steps=steps, needed=last, warmup=rule.excluded)
    except UserError as refused:
        return Arm(name, command, None, "; ".join(p.rule for p in refused.problems) or str(refused))
    return Arm(name, (*command, "--world", str(run.parallel.world_size)), run)


def foreign(name: str, text: str) -> Arm:
    """Another program's command, started as it stands and not by a shell. Raises UserError B001."""
    try:
        words = shlex.split(text)
    except ValueError as failure:
        raise error("B001", place="--arm", text=text, detail=str(failure)) from None
    if not words:
        raise error("B001", place="--arm", text=text, detail="no command")
    return Arm(name, tuple(words))


def named(text: str) -> Arm:
    """`NAME=command`. Raises UserError B001."""
    name, _, command = text.partition("=")
    if not NAME.fullmatch(name.strip()):
        raise error("B001", place="--arm", text=text, detail=f"{NAMES} comes first")
    return foreign(name.strip(), command)


def cases(path: Path) -> dict[str, tuple[int, tuple[str, ...]]]:
    """A table of cases: name -> (world, values). Columns: nodes, gpus (a node), tensor, pipeline, fp16, checkpointing,
    micro, global; separated by commas, tabs, bars or blanks. Raises UserError B002."""
    try:
        lines = [line.strip().strip("|") for line in path.read_text("utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as failure:
        raise error("B002", place=str(path), detail=getattr(failure, "strerror", None) or "not UTF-8 text") from None
    lines = [line for line in lines if line and not line.startswith("#") and set(line) - set("|-: ")]
    rows = [[cell.strip() for cell in next(csv.reader([re.sub(r"\s*[|\t,;]\s*|\s+", ",", line.strip())]))]
            for line in lines]  # fmt: skip
    if len(rows) < 2:
        raise error("B002", place=str(path), detail="it has no case under a line of column names")
    head = [name.lower() for name in rows[0]]
    if unknown := [name for name in head if name not in {"nodes", "gpus", *COLUMNS}]:
        raise error("B002", place=f"{path}:1", detail=f"unknown column {', '.join(unknown)}")
    found = {}
    for number, row in enumerate(rows[1:], 2):
        if len(row) != len(head):
            raise error("B002", place=f"{path}: row {number}", detail=f"{len(row)} cells under {len(head)} columns")
        case = dict(zip(head, row, strict=True))
        try:
            world = _whole("nodes", case.get("nodes", "1")) * _whole("gpus", case.get("gpus", "1"))
            values = tuple(f"{COLUMNS[name]}={_cell(name, text)}" for name, text in case.items() if name in COLUMNS)
        except ValueError as failure:
            raise error("B002", place=f"{path}: row {number}", detail=str(failure)) from None
        found["_".join(f"{name}{text}" for name, text in case.items())] = (world, values)
    return found


def _cell(name: str, text: str) -> str:
    """A cell as the value of a run file. Raises ValueError."""
    if name in ("fp16", "checkpointing"):
        yes = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
        if text.lower() not in yes:
            raise ValueError(f"{name} is {text}, not true or false")
        on = yes[text.lower()]
        return ("fp16" if on else "fp32") if name == "fp16" else ("full" if on else "none")
    return str(_whole(name, text))


def _whole(name: str, text: str) -> int:
    """Raises ValueError."""
    if not re.fullmatch(r"[1-9][0-9]{0,8}", text):
        raise ValueError(f"{name} is {text or 'empty'}, not a positive whole number")
    return int(text)
