"""Logs of Megatron-LM, 2020 to 2026, and the parts that its descendants print alike.

The training line is fields between bars. A field counts only where both its bars are there, so a line that was cut in
the middle gives what is whole and nothing else. Formats: Megatron-LM `training.py` from v1.0 to d98e8a64.
"""

import re
from pathlib import Path
from typing import Any

from steelyard.frameworks.lines import number, whole
from steelyard.frameworks.megatron import dump
from steelyard.frameworks.oneautotest import log as oneautotest
from steelyard.frameworks.reading import MIB, Reading
from steelyard.record.schema import Checkpoint, Validation

NAME = "Megatron-LM"
KEY = "megatron"

MARKS = (
    re.compile(r"iteration\s*\d+/\s*\d+ \|.*(?:elapsed time per iteration|lm loss)"),
    re.compile(r"number of parameters on \((?:tensor|model).*model parallel rank"),
    re.compile(r"using world size: \d+"),
    re.compile(r"-{4,} end of arguments -{4,}"),
    re.compile(r"\(after \d+ iterations\) memory \(MB\)"),
)

ITERATION = re.compile(r"iteration\s*(\d{1,12})\s*/\s*(\d{1,12})\s*\|")
MEMORY = re.compile(
    r"(?:\[Rank (\d{1,7})\] )?\(?after (\d{1,12}) iterations\)? memory \(MB\) \| allocated: ([\d.]{1,24}) \| "
    r"max allocated: ([\d.]{1,24}) \| reserved: ([\d.]{1,24}) \| max reserved: ([\d.]{1,24})"
    r"(?: \| total device memory used: ([\d.]{1,24}))?(?=[\s|\[]|$)"
)
MEMORY_KINDS = (("allocated", 3), ("allocated_peak", 4), ("reserved", 5), ("reserved_peak", 6), ("device", 7))
PARAMETERS = re.compile(
    r"number of parameters on \(([a-z_, ]{1,60})\)\s+model parallel rank \(([\d, ]{1,40})\): (\d{1,18})"
)
BILLIONS = re.compile(r"number of parameters on model parallel rank (\d{1,6})\s+([\d.]{1,12}) Billion")
WORLD = re.compile(
    r"using world size: (\d{1,9}), data-parallel[- ]size: (\d{1,9})(?:, context-parallel[- ]size: (\d{1,9}))?.{0,90}?"
    r"tensor-model-parallel size: (\d{1,9}), pipeline-model-parallel size: (\d{1,9})"
)
OLD_WORLD = re.compile(r"using world size: (\d{1,9}) and model-parallel size: (\d{1,9})")
VOCABULARY = re.compile(r"> padded vocab \(size: (\d{1,9})\) with \d{1,9} dummy tokens \(new size: (\d{1,9})\)")
VALIDATION = re.compile(
    r"\s?([\w .-]{1,60}?) (?:loss|results) at (?:iteration (\d{1,12})|the end of training)(.{0,60}?)\| "
    r"*lm[ _-]loss value: ([\d.eE+-]{1,20}|nan)\s*\|"
)
SAVED = re.compile(r"successfully saved checkpoint (?:at|from) iteration\s+(\d{1,12}) to (\S{0,300})")
TIMESTAMP = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(\.\d+)?\]\s+iteration")
THEORY = re.compile(r"(Total number of parameters|Number of parameters in [a-z ]{1,30}) in billions:\s+([\d.]{1,12})")
# a line that starts a record of its own: what stands before it is not continued by it
OTHER = re.compile(
    r"iteration\s*\d|memory \(MB\)|time \(ms\)|loss at|results at|saving checkpoint|-----|datetime|"
    r"Effective Tera|^\s*\["
)
NEXT_FIELD = re.compile(r"\|\s?[A-Za-z][\w \-/()]{2,50}:\s")
CONTINUATIONS = 12
STAMP = 64  # characters before a training line that may hold its time
SOUND = "number of nan iterations:   0 |"

# field names without blanks, hyphens and underscores
FIELDS = {
    "consumedsamples": "samples", "consumedtokens": "tokens", "learningrate": "learning_rate",
    "globalbatchsize": "batch_size", "lmloss": "loss", "lossscale": "loss_scale", "gradnorm": "grad_norm",
    "numberofskippediterations": "skipped", "numberofnaniterations": "nan",
    "elapsedtimeperiteration(ms)": "milliseconds", "elapsedtimeperiteration(s)": "seconds",
    "samplespersecond": "samples_per_second", "tflops": "tflops", "throughputpergpu(tflop/s/gpu)": "tflops",
    "tpt": "tpt", "numzeros": "num_zeros", "paramsnorm": "params_norm", "curriculumseqlen": "curriculum",
    "samples/sec": "samples_per_second", "approxflopspergpu": "tflops_text", "mfu": "mfu_text", "hfu": "hfu_text",
    "powerpergpu(w/gpu)": "power", "energypergpu(j/iter/gpu)": "energy",
}  # fmt: skip
_NAMES: dict[str, str | None] = {}


def name_of(raw: str) -> str | None:
    """Our name of a printed field; None for one that is not read. Remembered, since a log repeats few names."""
    found = _NAMES.get(raw, "")
    if found == "":
        found = FIELDS.get(re.sub(r"[\s_-]", "", raw).lower())
        if len(_NAMES) < 4096:
            _NAMES[raw] = found
    return found


class Reader:
    """Reads Megatron-LM; relatives override what they print otherwise."""

    name = NAME
    key = KEY

    def __init__(self, source: str):
        self.reading = Reading(self.name, source)
        self.reading.conventions = {
            "loss": "mean over the steps since the line before, skipped ones left out",
            "seconds": "mean over the steps since the line before; evaluation and checkpoints outside",
            "memory": "PyTorch's allocator, MiB, after an early step, one line per rank",
        }
        self.block: dump.Entries | None = None
        self.blocks = False  # this attempt's argument block has been seen
        self.held: tuple[int, str, int] | None = None  # a training line that goes on: (line, text, start)
        self.joined = 0
        self.resets = True

    # --- line by line ----------------------------------------------------------------------------------------------
    def feed(self, line: int, text: str) -> None:
        if self.held is not None and self._continue(text):
            return
        if "iteration" in text and (first := ITERATION.search(text)):
            if not (SOUND in text and text.endswith("|") and self._sound(text, first)):
                self._iterations(line, text, first)
        elif self.block is not None:
            self._block(line, text)
        elif len(text) < 20 or self._known(line, text):
            return
        else:
            self.other(line, text)

    def _sound(self, text: str, found: re.Match[str]) -> bool:
        """A whole and finite line of a log so long that this step would not be kept anyway."""
        plain = self.block is None and ": nan" not in text and "memory (MB)" not in text
        return plain and self.reading.passes_over(int(found.group(1)))

    def other(self, line: int, text: str) -> None:
        """Lines that only a relative prints."""

    def finish(self) -> None:
        if self.held is not None:
            self._step(*self.held)
            self.held = None
        if self.block is not None:
            self._close_block()
        oneautotest.from_name(self.reading, Path(self.reading.source))

    def _known(self, line: int, text: str) -> bool:
        if "memory (MB)" in text:
            for found in MEMORY.finditer(text):
                self._memory(line, found)
        elif "arguments" in text and dump.BEGIN.search(text):
            if self.blocks or self.reading.attempts[-1].steps:
                self.reading.begin(line)
            self.blocks, self.block = True, {}
        elif "umber of parameters" in text:
            self._parameters(line, text)
        elif "using world size" in text:
            self._world(line, text)
        elif "padded vocab" in text:
            self._vocabulary(line, text)
        elif "loss value" in text:
            self._validation(line, text)
        elif "successfully saved" in text and (saved := SAVED.search(text)):
            self.reading.checkpoints.append(Checkpoint(int(saved.group(1)), saved.group(2), 0, 0.0, 0.0))
        else:
            return ("MiB" in text or "gpu_rate" in text) and oneautotest.feed(self.reading, line, text)
        return True

    # --- the training line -----------------------------------------------------------------------------------------
    def _iterations(self, line: int, text: str, first: re.Match[str]) -> None:
        """Every training line of a physical line: several ranks may have written into one."""
        if self.block is not None:
            self._close_block()
        if "memory (MB)" in text:
            for report in MEMORY.finditer(text):
                self._memory(line, report)
        found: re.Match[str] | None = first
        while found is not None:
            after: re.Match[str] | None = ITERATION.search(text, found.end())
            if after is not None:
                begin = max(0, found.start() - STAMP)
                self._step(line, text[begin : after.start()], found.start() - begin)
            elif text.rstrip().endswith("|"):
                self._step(line, text, found.start())
            else:
                self.held = (line, text, found.start())
                self.joined = 0
            found = after

    def _continue(self, text: str) -> bool:
        """Whether a text goes on with the held line, which a terminal or an editor has wrapped."""
        assert self.held is not None
        line, before, start = self.held
        self.joined += 1
        if "|" not in text or OTHER.search(text) or self.joined > CONTINUATIONS or not self._fits(before, text):
            self.held = None
            self._step(line, before, start)
            return False
        whole_text = before + text
        if text.rstrip().endswith("|") and ("nan" in text or "TFLOPs" in text or self.joined == CONTINUATIONS):
            self.held = None
            self._step(line, whole_text, start)
        else:
            self.held = (line, whole_text, start)
        return True

    @staticmethod
    def _fits(before: str, text: str) -> bool:
        """A bar at the start of the next line closes a field only where another field of such a line follows."""
        start = text.lstrip()
        return not start.startswith("|") or NEXT_FIELD.match(start) is not None

    def _step(self, line: int, text: str, start: int) -> None:
        found = ITERATION.match(text, start)
        if found is None:
            return
        fields = self.fields(text, found)
        if not fields:
            return
        iteration = int(found.group(1))
        self._era(text, start, fields)
        seconds = fields.get("seconds")
        if "milliseconds" in fields:
            seconds = fields["milliseconds"] / 1000
        if fields.get("loss_scale") == -1:  # DeepSpeed is on and Megatron does not know: placeholders, not data
            for name in ("loss_scale", "grad_norm"):
                if fields.get(name) in (-1, 0):
                    del fields[name]
        self._printed(line, fields)
        batch = _int(fields.get("batch_size"))
        self.reading.step(
            line, iteration, samples=_int(fields.get("samples")), tokens=_int(fields.get("tokens")),
            loss=fields.get("loss"), grad_norm=fields.get("grad_norm"), learning_rate=fields.get("learning_rate"),
            loss_scale=fields.get("loss_scale"), skipped=_int(fields.get("skipped")) or 0,
            nan=_int(fields.get("nan")) or 0, seconds=seconds, batch_size=batch,
        )  # fmt: skip

    def fields(self, text: str, found: re.Match[str]) -> dict[str, float]:
        """The whole fields of a line by our names; the last part has no closing bar and is left out."""
        fields: dict[str, float] = {}
        for part in text[found.end() :].split("|")[:-1]:
            raw, colon, value = part.rpartition(":")
            name = name_of(raw) if colon else None
            if name is not None and name not in fields and (read := number(value)) is not None:
                fields[name] = read
        return fields

    def _era(self, text: str, start: int, fields: dict[str, float]) -> None:
        stamp = TIMESTAMP.search(text, max(0, start - 48), start + 12)
        if stamp is not None and stamp.group(1) and self.resets:
            self.resets = False
            self.reading.conventions["first_window"] = "kept"
            self.reading.note("this version does not reset its means after the first line: the second one contains it")

    def _printed(self, line: int, fields: dict[str, float]) -> None:
        """Rates as printed, for what they betray. Between December 2021 and 2022-01-28 `samples per second` was per
        millisecond."""
        for name in ("tflops", "tpt", "samples_per_second"):
            if name in fields:
                self.reading.print(name, fields[name], line)

    # --- other lines -----------------------------------------------------------------------------------------------
    def _block(self, line: int, text: str) -> None:
        assert self.block is not None
        if dump.END.search(text):
            self._close_block()
        elif found := dump.entry(text):
            self.block[found[0]] = (found[1], line)
        elif len(self.block) > 4000:
            self._close_block()

    def _close_block(self) -> None:
        entries, self.block = self.block or {}, None
        dump.apply(self.reading, entries)
        self.reading.default("engine.framework", self.key, "the log's format")

    def _memory(self, line: int, found: re.Match[str]) -> None:
        kinds = {}
        for name, group in MEMORY_KINDS:
            value = number(found.group(group)) if found.group(group) else None
            if value is not None:
                kinds[name] = round(value * MIB)
        self.reading.memory(line, kinds, int(found.group(1)) if found.group(1) else None)
        self.reading.conventions["memory_after_step"] = found.group(2)

    def _parameters(self, line: int, text: str) -> None:
        for found in PARAMETERS.finditer(text):
            ranks = self.reading.printed.setdefault("megatron_ranks", {})
            names = [name.strip() for name in found.group(1).split(",")]
            place = dict(zip(names, found.group(2).replace(" ", "").split(","), strict=False))
            ranks[f"{place.get('tensor', '0')},{place.get('pipeline', '0')}"] = int(found.group(3))
            self.reading.print("megatron_ranks", ranks, line)
        if billions := BILLIONS.search(text):
            self.reading.print("megatron_billions", number(billions.group(2)), line)
        if theory := THEORY.search(text):
            self.reading.print("theory_" + theory.group(1).lower().replace(" ", "_"), number(theory.group(2)), line)

    def _world(self, line: int, text: str) -> None:
        if found := WORLD.search(text):
            self._started(line)
            world, data, context, tensor, pipeline = (whole(g) if g else None for g in found.groups())
            axes = {"data": data, "context": context, "tensor": tensor, "pipeline": pipeline}
            for axis, size in axes.items():
                self.reading.set(f"parallel.{axis}", size, line)
            self.reading.environment["world_size"] = world
        elif found := OLD_WORLD.search(text):
            self._started(line)
            world, tensor = int(found.group(1)), int(found.group(2))
            self.reading.environment["world_size"] = world
            if tensor:
                self.reading.set("parallel.tensor", tensor, line)
                self.reading.set("parallel.data", world // tensor, line)

    def _started(self, line: int) -> None:
        """The first line of a start; the argument block that follows belongs to it."""
        if self.blocks or self.reading.attempts[-1].steps:
            self.reading.begin(line)
        self.blocks = False

    def _vocabulary(self, line: int, text: str) -> None:
        found = VOCABULARY.search(text)
        if found is None:
            return
        size, padded = int(found.group(1)), int(found.group(2))
        self.reading.set("model.vocab_size", size, line)
        tensor = self.reading.config.get("parallel.tensor", 1)
        if self.reading.config.get("model.vocab_multiple") in (None, 1) and size > 1:
            multiple: Any = "megatron" if padded == -(-size // (128 * tensor)) * 128 * tensor else padded
            self.reading.set("model.vocab_multiple", multiple, line)
        self.reading.print("padded_vocab_size", padded, line)

    def _validation(self, line: int, text: str) -> None:
        found = VALIDATION.search(text)
        if found is None:
            return
        name = found.group(1).strip(" -") or "validation"
        steps = self.reading.steps
        step = int(found.group(2)) if found.group(2) else steps[-1].step if steps else 0
        if "test" in found.group(3):
            name = "test"
        loss = number(found.group(4))
        samples = steps[-1].samples if steps and steps[-1].step == step else None
        self.reading.validations.append(Validation(step, samples or 0, name.rsplit(" ", 1)[-1], loss, 0, 0.0))


def _int(value: float | None) -> int | None:
    return int(value) if value is not None and abs(value) < 1e18 and value == value else None
