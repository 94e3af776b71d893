"""Logs of nanoGPT, 2023 to today.

The loss is the last micro-batch of rank 0; the time is that of one iteration and contains the evaluation and the
checkpoint where there are any. Iterations count from 0: `iter` N has N updates before it. What the log
does not override is set in train.py of that commit. Source: nanoGPT `train.py`.
"""

import re

from steelyard.frameworks.lines import number, whole
from steelyard.frameworks.reading import Reading
from steelyard.record.schema import Checkpoint, Validation

NAME = "nanoGPT"
KEY = "nanogpt"

MARKS = (
    re.compile(r"iter \d+: loss (?:[\d.]+|nan), time [\d.]+ms"),
    re.compile(r"step \d+: train loss [\d.]+, val loss [\d.]+"),
    re.compile(r"tokens per iteration will be: [\d,]+"),
    re.compile(r"Overriding(?: config with .*|: \w+ = .*)"),
)
ITERATION = re.compile(
    r"\biter (\d{1,12}): loss ([\d.]{1,14}|nan|inf), time ([\d.]{1,14})ms(?:, mfu (-?[\d.]{1,10})%)?(?=\s|$)"
)
EVALUATION = re.compile(r"\bstep (\d{1,12}): train loss ([\d.]{1,14}|nan), val loss ([\d.]{1,14}|nan)(?=\s|$)")
TOKENS = re.compile(r"tokens per iteration will be: ([\d,]{1,18})(?=\s|$)")
PARAMETERS = re.compile(r"number of parameters: ([\d.]{1,10})M")
SETTING = re.compile(r"^(?:Overriding: )?([a-z_0-9]{3,40}) = (\S.{0,80})$")
VOCABULARY = re.compile(r"defaulting to vocab_size of GPT-2 to (\d{1,9})")
KEYS = {
    "batch_size": "batch.micro_batch_size", "block_size": "model.seq_length", "n_layer": "model.num_layers",
    "n_head": "model.num_attention_heads", "n_embd": "model.hidden_size", "max_iters": "length.steps",
    "lr_decay_iters": "learning_rate.decay_steps", "warmup_iters": "learning_rate.warmup_steps",
    "eval_interval": "evaluation.every_steps", "eval_iters": "evaluation.steps",
}  # fmt: skip
REAL = {
    "learning_rate": "learning_rate.peak", "min_lr": "learning_rate.minimum", "weight_decay": "optimizer.weight_decay",
    "grad_clip": "optimizer.clip_grad",
}  # fmt: skip


class Reader:
    def __init__(self, source: str):
        self.reading = Reading(NAME, source)
        self.reading.zero_based = True
        self.reading.conventions = {
            "loss": "last micro-batch of rank 0",
            "seconds": "that iteration, evaluation and checkpoint included where there are any",
            "memory": "not printed",
        }
        self.repeats = 0
        self.tokens: int | None = None
        self.evaluated: set[int] = set()
        self.reading.default("engine.framework", KEY, "the log's format")

    def feed(self, line: int, text: str) -> None:
        if "iter " in text and (found := ITERATION.search(text)):
            self._step(line, found)
        elif "train loss" in text and (evaluation := EVALUATION.search(text)):
            step, loss = int(evaluation.group(1)), number(evaluation.group(3))
            self.evaluated.add(step)
            self.reading.validations.append(Validation(step, 0, "validation", loss, 0, 0.0))
        elif "tokens per iteration" in text and (tokens := TOKENS.search(text)):
            self.repeats += 1
            self.tokens = whole(tokens.group(1))
            self.reading.print("tokens_per_step", self.tokens, line)
        elif "number of parameters" in text and (count := PARAMETERS.search(text)):
            self.reading.print("parameters_without_positions_millions", number(count.group(1)), line)
        elif "vocab_size" in text and (vocabulary := VOCABULARY.search(text)):
            self.reading.set("model.vocab_size", int(vocabulary.group(1)), line)
        elif " = " in text and (setting := SETTING.match(text.strip())):
            self._setting(line, setting.group(1), setting.group(2).split("#")[0].strip())
        elif text.startswith("saving checkpoint to "):
            last = self.reading.steps[-1].step if self.reading.steps else 0
            self.reading.checkpoints.append(Checkpoint(last, text[21:].strip(), 0, 0.0, 0.0))

    def _setting(self, line: int, name: str, text: str) -> None:
        if name in KEYS:
            self.reading.set(KEYS[name], _product(text), line)
        elif name in REAL:
            self.reading.set(REAL[name], number(text), line)
        elif name == "dropout":
            for kind in ("attention", "hidden"):
                self.reading.set(f"model.{kind}_dropout", number(text), line)
        elif name in ("bias", "compile"):
            key = "model.bias" if name == "bias" else "parallel.compile"
            self.reading.set(key, {"True": True, "False": False}.get(text), line)
        elif name == "dtype":
            words = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
            self.reading.set("precision.compute", words.get(text.strip("'\"")), line)

    def _step(self, line: int, found: re.Match[str]) -> None:
        step, milliseconds = int(found.group(1)), number(found.group(3))
        batch, sequence = (
            self.reading.config.get("batch.global_batch_size"),
            self.reading.config.get("model.seq_length"),
        )
        if batch is None and self.tokens and sequence and not self.tokens % sequence:
            batch = self.tokens // sequence
            self.reading.set("batch.global_batch_size", batch, why="tokens per iteration / block_size")
        seconds = milliseconds / 1000 if milliseconds else None
        mfu = number(found.group(4)) if found.group(4) else None
        if mfu is not None and mfu >= 0:  # -100 % stands for "not yet measured"
            self.reading.print("mfu_percent", mfu, line)
        self.reading.step(
            line,
            step,
            loss=number(found.group(2)),
            seconds=seconds,
            tokens_per_second=self.tokens / seconds if self.tokens and seconds else None,
            steady=step not in self.evaluated,
        )

    def finish(self) -> None:
        if self.repeats > 1:
            self.reading.note(f"the lines that every process prints come {self.repeats} times: {self.repeats} ranks")
            self.reading.default("parallel.data", self.repeats, f"{self.repeats} processes print each line")


def _product(text: str) -> int | None:
    """`5 * 8`, as configuration files have it; nothing is executed."""
    found = [whole(part) for part in text.split("*")]
    if any(part is None for part in found) or len(found) > 4:
        return None
    value = 1
    for part in found:
        value *= part or 0
    return value if 0 < value < 1 << 60 else None
