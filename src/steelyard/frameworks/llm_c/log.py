"""Logs of llm.c: a table of settings, then one line a step, printed from 1. Validation losses have no step number: they
were evaluated before the next printed step. `tok/s` is smoothed, so rates come from the milliseconds. Source: llm.c
`train_gpt2.cu`.
"""

import re

from steelyard.frameworks import devices
from steelyard.frameworks.lines import number, whole
from steelyard.frameworks.reading import MIB, Reading
from steelyard.record.schema import Validation

NAME = "llm.c"
KEY = "llm_c"

MARKS = (
    re.compile(r"step\s+\d+/\d+ \| (?:train )?loss [\d.]+ .*\| lr [\d.e+-]+ \| [\d.]+ ms \|"),
    re.compile(r"^\| (?:micro batch size B|padded_vocab_size Vp|train data pattern|channels C)\s+\|"),
    re.compile(r"=> setting grad_accum_steps=\d+"),
    re.compile(r"device memory usage: \d+ MiB / \d+ MiB"),
)
STEP = re.compile(
    r"step\s+(\d{1,12})/(\d{1,12}) \| (?:train )?loss ([\d.]{1,14}|-?nan|inf) (?:\([^)]{1,20}\))?\s?\| "
    r"norm ([\d.]{1,14}|-?nan|inf) (?:\([^)]{1,20}\))?\s?\| lr ([\d.e+-]{1,14}) \| ([\d.]{1,14}) ms \| "
    r"(?:(-?[\d.]{1,10})% [^|]{0,30}MFU \| )?(\d{1,12}) tok/s"
)
ROW = re.compile(r"^\s*\| ([A-Za-z][\w ()]{2,24}?)\s*\| (.{1,200}?)\s*\|\s*$")
VALIDATION = re.compile(r"^\s*val loss ([\d.]{1,14}|nan)\s*$")
ACCUMULATION = re.compile(r"=> setting grad_accum_steps=(\d{1,9})")
DEVICE = re.compile(r"device memory usage: (\d{1,8}) MiB / (\d{1,8}) MiB")
AVERAGE = re.compile(r"total average iteration time: ([\d.]{1,16}) ms")
WHOLE = {
    "micro batch size B": "batch.micro_batch_size", "sequence length T": "model.seq_length",
    "max_steps": "length.steps",
    "warmup iterations": "learning_rate.warmup_steps", "vocab_size V": "model.vocab_size",
    "num_layers L": "model.num_layers", "num_heads NH": "model.num_attention_heads", "channels C": "model.hidden_size",
    "num_processes": "parallel.data", "zero_stage": "parallel.zero",
    "max_sequence_length T": "model.max_position_embeddings", "val_loss_every": "evaluation.every_steps",
    "val_max_steps": "evaluation.steps",
}  # fmt: skip
CONSTANTS = {
    "model.kind": "gpt2", "model.position": "learned", "model.norm": "layernorm", "model.activation": "gelu_tanh",
    "model.bias": True, "model.tied_embeddings": True, "model.vocab_multiple": 128, "optimizer.name": "adamw",
    "optimizer.betas": [0.9, 0.95], "optimizer.eps": 1e-8, "optimizer.clip_grad": 1.0, "parallel.tensor": 1,
    "parallel.pipeline": 1, "parallel.context": 1, "model.attention_dropout": 0.0, "model.hidden_dropout": 0.0,
}  # fmt: skip


class Reader:
    def __init__(self, source: str):
        self.reading = Reading(NAME, source)
        self.reading.conventions = {
            "loss": "this step, mean over ranks and micro-batches",
            "seconds": "this step, without validation",
            "memory": "device-wide used at allocation, MiB (cudaMemGetInfo)",
        }
        self.tokens: int | None = None
        self.reading.default("engine.framework", KEY, "the log's format")

    def feed(self, line: int, text: str) -> None:
        if "tok/s" in text and (found := STEP.search(text)):
            self._step(line, found)
        elif "val loss" in text and (validation := VALIDATION.match(text)):
            step = self.reading.steps[-1].step if self.reading.steps else 0
            self.reading.validations.append(Validation(step, 0, "validation", number(validation.group(1)), 0, 0.0))
        elif "|" in text and (row := ROW.match(text)):
            self._row(line, row.group(1).strip(), row.group(2).strip())
        elif "grad_accum_steps" in text and (accumulation := ACCUMULATION.search(text)):
            self.reading.set("batch.accumulation", int(accumulation.group(1)), line)
        elif "device memory" in text and (device := DEVICE.search(text)):
            self.reading.memory(line, {"device": int(device.group(1)) * MIB})
        elif "average iteration" in text and (average := AVERAGE.search(text)):
            self.reading.print("milliseconds_per_step", number(average.group(1)), line)

    def _row(self, line: int, name: str, text: str) -> None:
        reading = self.reading
        if name in WHOLE:
            reading.set(WHOLE[name], whole(text), line)
        elif name == "total batch size":
            self.tokens = whole(text)
        elif name == "learning rate (LR)":
            reading.set("learning_rate.peak", number(text), line)
        elif name == "weight decay":
            reading.set("optimizer.weight_decay", number(text), line)
        elif name == "LR scheduler" and text in ("cosine", "linear", "constant", "wsd"):
            reading.set("learning_rate.decay", text, line)
        elif name == "final LR fraction" and (fraction := number(text)) is not None:
            peak = reading.config.get("learning_rate.peak")
            reading.set("learning_rate.minimum", fraction * peak if peak is not None else None, line)
        elif name == "precision":
            reading.set("precision.compute", {"BF16": "bf16", "FP16": "fp16", "FP32": "fp32"}.get(text), line)
        elif name == "device":
            reading.set("hardware.chip", devices.chip(text), line)
            reading.environment["device"] = text
        elif name == "num_parameters":
            reading.print("parameters", whole(text), line)
        elif name == "recompute":
            reading.set("recompute.mode", {"0": "none"}.get(text), line)
            if text not in ("0",):
                reading.note(f"recompute = {text}: only the GeLU (and at 2 the norms) are computed again")
        elif name == "train data pattern":
            reading.set("data.train", [text], line)
        sequence = reading.config.get("model.seq_length")
        if self.tokens and sequence and not self.tokens % sequence:
            reading.set("batch.global_batch_size", self.tokens // sequence, line)
            self.tokens = None

    def _step(self, line: int, found: re.Match[str]) -> None:
        milliseconds, share = number(found.group(6)), number(found.group(7)) if found.group(7) else None
        if share is not None and share >= 0:  # -100 % stands for an unknown device
            self.reading.print("mfu_percent", share, line)
        self.reading.print("tokens_per_second", whole(found.group(8)), line)
        self.reading.step(
            line,
            int(found.group(1)),
            loss=number(found.group(3)),
            grad_norm=number(found.group(4)),
            learning_rate=number(found.group(5)),
            seconds=milliseconds / 1000 if milliseconds else None,
        )

    def finish(self) -> None:
        for key, value in CONSTANTS.items():
            self.reading.default(key, value, "constant of llm.c")
