"""The lines that DeepSpeed's engine prints into the log of whoever uses it. Formats: DeepSpeed 0.3 to 0.16."""

import re

from steelyard.frameworks.lines import number
from steelyard.frameworks.reading import GIB, Reading

NAME = "DeepSpeed"

STAGE = re.compile(
    r"RANK=(\d{1,7}) STAGE=(\d{1,5}) LAYERS=(\d{1,5}) \[(\d{1,5}), (\d{1,5})\)\s*STAGE_PARAMS=(\d{1,18})"
    r"(?: \([\d.]{1,20}M\))?(?:\s*TOTAL_PARAMS=(\d{1,18}) \([\d.]{1,20}M\))?(?:\s*UNIQUE_PARAMS=(\d{1,18}))?"
)
SETTING = re.compile(r"config\.py:\d{1,6}:print\]\s{1,4}([a-z_0-9]{1,60}) \.{0,60} ?(.{0,300})$")
USED = re.compile(
    r"MA ([\d.]{1,12}) GB\s+Max_MA ([\d.]{1,12}) GB\s+CA ([\d.]{1,12}) GB\s+Max_CA ([\d.]{1,12}) GB", re.ASCII
)
VERSION = re.compile(r"DeepSpeed info: version=([\w.+]{1,40})")
STAGED = re.compile(
    r"Creating (?:fp16|bf16|torch\.\w{1,10}) ZeRO stage ([0-3]) optimizer|Initializing ZeRO Stage ([0-3])"
)
STEPS = re.compile(
    r"steps: (\d{1,12}) loss: ([\d.]{1,12}|nan) iter time \(s\): ([\d.]{1,12}) samples/sec: ([\d.]{1,14})"
)


def feed(reading: Reading, line: int, text: str) -> bool:
    """Take what DeepSpeed says in a line; False where it says nothing."""
    if "STAGE_PARAMS" in text:
        for found in STAGE.finditer(text):
            _stage(reading, line, found)
    elif "config.py" in text and (found_setting := SETTING.search(text)):
        _setting(reading, line, found_setting.group(1), found_setting.group(2).strip())
    elif "Max_MA" in text and (found_used := USED.search(text)):
        values = [number(group) for group in found_used.groups()]
        names = ("allocated", "allocated_peak", "reserved", "reserved_peak")
        kinds = {name: round(v * GIB) for name, v in zip(names, values, strict=True) if v is not None}
        reading.printed["deepspeed_memory"] = {"line": line, **kinds}
    elif "DeepSpeed info" in text and (found_version := VERSION.search(text)):
        reading.environment["deepspeed"] = found_version.group(1)
    elif "ZeRO" in text and (found_zero := STAGED.search(text)):
        reading.set("parallel.zero", int(found_zero.group(1) or found_zero.group(2)), line)
    else:
        return False
    return True


def _stage(reading: Reading, line: int, found: re.Match[str]) -> None:
    stages = reading.printed.setdefault("deepspeed_stage", {})
    stages[int(found.group(2))] = int(found.group(6))
    reading.print("deepspeed_stage", stages, line)
    if found.group(7):
        reading.print("deepspeed_total", int(found.group(7)), line)
    if found.group(8):
        reading.print("deepspeed_unique", int(found.group(8)), line)


def _setting(reading: Reading, line: int, name: str, text: str) -> None:
    """One entry of `DeepSpeedEngine configuration`: what really holds, whatever the command line says."""
    if name == "zero_optimization_stage" and text in ("0", "1", "2", "3"):
        reading.set("parallel.zero", int(text), line)
    elif name == "train_batch_size" and text.isdigit():
        reading.default("batch.global_batch_size", int(text), reading.where(line))
    elif name == "train_micro_batch_size_per_gpu" and text.isdigit():
        reading.default("batch.micro_batch_size", int(text), reading.where(line))


MARKS = (
    STEPS,
    STAGE,
    VERSION,
    re.compile(r"\[Rank 0\] step=\d+, skipped=\d+, lr=\["),
    re.compile(r"SamplesPerSec=[\d.]+"),
)
PROGRESS = re.compile(r"\[Rank 0\] step=(\d{1,12}), skipped=(\d{1,12}), lr=\[([\d.e+-]{1,24})")
TIMER = re.compile(r"global_step=(\d{1,12}), RunningAvgSamplesPerSec=([\d.]{1,24}), CurrSamplesPerSec=([\d.]{1,24})")
MEMORY = re.compile(r"MemAllocated=([\d.]{1,12})GB, MaxMemAllocated=([\d.]{1,12})GB")


class Reader:
    """Logs with nothing but the engine's lines: `steps: N loss: ...` of its pipeline, else `step=N, skipped=...`."""

    def __init__(self, source: str):
        self.reading = Reading(NAME, source)
        self.reading.conventions = {
            "loss": "last step, mean over its micro-batches",
            "seconds": "mean over the steps since the line before; the first holds the start-up",
            "memory": "PyTorch's allocator, GB = 2^30, two digits",
        }
        self.skipped = 0

    def feed(self, line: int, text: str) -> None:
        if "iter time" in text and (found := STEPS.search(text)):
            self._pipeline(line, found)
        elif "skipped=" in text and (progress := PROGRESS.search(text)):
            self._progress(line, progress)
        elif "SamplesPerSec" in text and (timer := TIMER.search(text)):
            self.reading.print("samples_per_second", number(timer.group(2)), line)
            if memory := MEMORY.search(text):
                values = (number(group) for group in memory.groups())
                kinds = {k: round(v * GIB) for k, v in zip(("allocated", "allocated_peak"), values, strict=True) if v}
                self.reading.memory(line, kinds)
        else:
            feed(self.reading, line, text)

    def _pipeline(self, line: int, found: re.Match[str]) -> None:
        step, seconds, rate = int(found.group(1)), number(found.group(3)), number(found.group(4))
        batch = round(seconds * rate) if seconds and rate else None
        self.reading.print("samples_per_second", rate, line)
        known = self.reading.config.get("batch.global_batch_size")
        if self.reading.steps and self.reading.steps[-1].step == step:
            return
        self.reading.step(line, step, loss=number(found.group(2)), seconds=seconds, batch_size=known or batch)

    def _progress(self, line: int, found: re.Match[str]) -> None:
        step, skipped = int(found.group(1)), int(found.group(2))
        new, self.skipped = max(0, skipped - self.skipped), skipped
        if step and not (self.reading.steps and self.reading.steps[-1].step == step):
            self.reading.step(line, step, learning_rate=number(found.group(3)), skipped=new)

    def finish(self) -> None:
        """Nothing is held."""
