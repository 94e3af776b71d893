"""Arms in turn, A B A B: whatever the machine does meanwhile hits all of them. Every round's result is a file, so a
bench that was cut short goes on where it stood, and a failure is a result with its reason."""

import json
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from steelyard.bench import peak, process, window
from steelyard.bench.arm import Arm
from steelyard.frameworks import detect
from steelyard.record.writer import RunFolder, finite
from steelyard.spec import UserError
from steelyard.spec.bench import Bench

MEMORY = re.compile(r"out of memory|not enough memory|can't allocate memory|cannot allocate memory|bad_alloc", re.I)
# a program's own account of its failure; launchers write their own below it
RAISED = re.compile(r"(\[?(default|rank)\d+\]?:\s*)*[\w.]*(Error|Exception|Interrupt)\b: *\S")
TAIL = 64 * 1024  # bytes of a log in which the reason of a failure is looked for
Result = dict[str, Any]


class Matrix:
    """A bench in its folder: `rounds/` holds a folder and a result for every round of every arm."""

    def __init__(self, folder: Path, arms: Sequence[Arm], rule: Bench, tell: Callable[[Result], None]):
        """Raises UserError R004 where another bench writes there, R005 where it cannot be made."""
        self.folder, self.arms, self.rule, self._tell = folder, arms, rule, tell
        self._lock = RunFolder(folder / "rounds")

    def run(self) -> list[Result]:
        """All rounds of all arms, those that are there already as they are."""
        found: list[Result] = []
        for number in range(self.rule.rounds):
            failed = {result["arm"] for result in found if result["status"] != "ok"}
            due = [arm for arm in self.arms if arm.name not in failed]  # what failed once is not tried again
            if not due:
                break
            beside: dict[str, peak.Peak | None] = {}
            for arm in due:
                result = self._kept(arm, number)
                if result is None:
                    result = self._round(arm, number, beside)
                    self._write(result)
                found.append(result)
                self._tell(result)
        return found

    def _place(self, arm: Arm, number: int) -> Path:
        return self.folder / "rounds" / f"{arm.name}-{number + 1}"

    def _kept(self, arm: Arm, number: int) -> Result | None:
        """The result of an earlier call, if it is of the same arm measured in the same way and what it was read from
        is still there. One that was out of time is kept under the same limit only; what was refused is asked again,
        because what it lacked (data, a device) may be there by now and asking takes no time."""
        folder = self._place(arm, number)
        try:
            found: Result = json.loads((folder.parent / f"{folder.name}.json").read_text("utf-8"))
        except (OSError, ValueError, RecursionError):
            return None
        if not isinstance(found, dict) or found.get("identity") != self._identity(arm):
            return None
        if found["status"] == "refused":
            return None
        if found["status"] == "timed out" and found["timeout_minutes"] != self.rule.timeout_minutes:
            return None
        if found["status"] == "ok" and not arm.record(folder).exists():
            return None
        return {**found, "folder": str(folder), "kept": True}

    def _identity(self, arm: Arm) -> str:
        return f"{arm.identity}-{self.rule.excluded}-{self.rule.steps}"

    def _write(self, result: Result) -> None:
        self._lock.write_text(f"{Path(result['folder']).name}.json", json.dumps(finite(result), indent=1) + "\n")

    def _round(self, arm: Arm, number: int, beside: dict[str, "peak.Peak | None"]) -> Result:
        """One round. The peak is measured beside it, once a round for each dtype."""
        folder = self._place(arm, number)
        result: Result = {
            "arm": arm.name, "round": number + 1, "identity": self._identity(arm), "folder": str(folder),
            "ours": arm.ours, "command": list(arm.command), "status": "ok", "reason": "", "began": time.time(),
            "timeout_minutes": self.rule.timeout_minutes,
        }  # fmt: skip
        if arm.refusal:
            return {**result, "status": "refused", "reason": arm.refusal}
        if folder.exists():
            shutil.rmtree(folder)  # what a round that was cut short has left
        folder.mkdir(parents=True)
        dtype = arm.run.precision.compute if arm.run else "fp32"
        if dtype not in beside:
            beside[dtype] = peak.measure(dtype)
        measured = beside[dtype]
        result["peak"] = asdict(measured) if measured else None
        log, record = folder / "output.log", arm.record(folder)
        command = [*arm.command, f"record.folder={record}"] if arm.ours else list(arm.command)
        try:
            ended = process.run(command, log, self.rule.timeout_minutes, lambda: self._warming_up(arm, record))
        except (OSError, ValueError) as failure:  # a NUL in a word is a ValueError
            reason = f"{command[0]} cannot be started: {getattr(failure, 'strerror', None) or failure}"
            return {**result, "status": "failed", "reason": reason}
        result |= {"exit_code": ended.code, "wall_seconds": ended.seconds, "sampled": ended.sampled}
        if bad := _failure(ended, log, self.rule.timeout_minutes):
            return {**result, **dict(zip(("status", "reason"), bad, strict=True))}
        return {**result, **self._measured(arm, record)}

    def _warming_up(self, arm: Arm, record: Path) -> bool:
        """Whether fewer steps than the warm-up's can be seen."""
        try:
            if arm.ours:
                return (record / "metrics.jsonl").read_text("utf-8").count('"kind": "step"') < self.rule.excluded
            return not window.has_begun(detect.read(record).steps, self.rule.excluded)
        except (OSError, UserError):  # it has said nothing yet
            return True

    def _measured(self, arm: Arm, record: Path) -> Result:
        rule = self.rule
        try:
            if arm.run is not None:
                found = window.of_folder(record, arm.run, rule.excluded, rule.steps)
            else:
                found = window.of_log(record, rule.excluded, rule.steps)
        except UserError as failure:
            return {"status": "unreadable", "reason": failure.problems[0].rule if failure.problems else str(failure)}
        if not found.seconds:
            return {"status": "unreadable", "reason": f"no step after the first {rule.excluded} says how long it took"}
        return found.as_json()


def _failure(ended: process.Ended, log: Path, minutes: float) -> tuple[str, str] | None:
    """(status, reason) of a program that did not end well."""
    if ended.timed_out:
        return "timed out", f"it did not end within {minutes:g} minutes and was killed; see {log}"
    if ended.code == 0:
        return None
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL))
        lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
    said = next((line for line in reversed(lines) if line.startswith("error[")), None)
    if short := next((line for line in reversed(lines) if MEMORY.search(line)), None):
        return "out of memory", short[:300]
    if said and ended.code == 2:
        return ("failed" if said.startswith(("error[L", "error[T")) else "refused"), said[:300]
    raised = next((line for line in reversed(lines) if RAISED.match(line)), None)
    last = (raised or lines[-1])[:300] if lines else "it said nothing"
    how = f"signal {-ended.code}" if ended.code < 0 else f"exit code {ended.code}"
    killed = " (the system's answer to a lack of memory)" if ended.code == -9 else ""
    return "failed", f"{how}{killed}: {last}"
