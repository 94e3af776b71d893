"""Logs of TorchTitan: 2024 (`wps`), from November 2024 (`tps`), from June 2025 (`grad_norm`).

The rate is per device and covers the steps since the line before; the memory is the peak *reserved* since then. Until
2025-01-16 the loss is the mean of that window, later that of the step. Ranks that are not on the last pipeline stage
print a loss of -1. Source: TorchTitan `components/metrics.py`, `train.py`, at 82f7387f and b5bcd76c.
"""

import ast
import re
from typing import Any

from steelyard.frameworks import devices
from steelyard.frameworks.lines import number, rank, whole
from steelyard.frameworks.reading import GIB, Reading
from steelyard.record.schema import Validation

NAME = "TorchTitan"
KEY = "torchtitan"

MARKS = (
    re.compile(r"step:\s+\d+\s+loss:\s+-?[\d.]+.*memory:\s+[\d.]+GiB\([\d.]+%\)\s+(?:tps|wps): "),
    re.compile(r"Peak FLOPS used for computing MFU"),
    re.compile(r"size: [\d,]+ total parameters"),
    re.compile(r"Applied (?:FSDP|HSDP|DDP|Tensor Parallelism|\w+ activation checkpointing)"),
    re.compile(r"Training starts at step \d+"),
    re.compile(r"\[titan\]|torchtitan"),
)
STEP = re.compile(
    r"(?<!validate )step:\s+(\d{1,12})\s+loss:\s+(-?[\d.]{1,14}|nan|inf)\s+(?:grad_norm:\s+([\d.]{1,14}|nan|inf)\s+)?"
    r"memory:\s+([\d.]{1,10})GiB\(([\d.]{1,8})%\)\s+(tps|wps): ([\d,]{1,18})"
    r"(?:\s+tflops: ([\d,.]{1,14}))?(?:\s+mfu: (?:([\d.]{1,10})%|N/A))?(?=\s|$)"
)
VALIDATE = re.compile(r"validate step:\s+(\d{1,12})\s+loss:\s+([\d.]{1,14}|nan)\s")
CAPACITY = re.compile(r"(?:CUDA|\w{2,6}) capacity: (.{3,60}?)(?: with| \(\d+\) with) ([\d.]{1,10})GiB memory")
PEAK = re.compile(r"Peak FLOPS used for computing MFU: ([\d.e+]{1,14})")
SIZE = re.compile(r"[Mm]odel .{0,60}size: ([\d,]{1,24}) total parameters")
OLD_MESH = re.compile(r"Building \d-D device mesh with (\[[^\]]{0,120}\]), (\[[\d, ]{0,60}\])")
MESH = re.compile(r"\b(pp|dp_replicate|dp_shard|cp|tp)=(\d{1,6})\b")
START = re.compile(
    r"local batch size (\d{1,9}), global batch size (\d{1,9}),(?: gradient accumulation steps (\d{1,9}),)? "
    r"sequence length (\d{1,9}), total steps (\d{1,12})(?: \(warmup (\d{1,12})\))?"
)
MODEL = re.compile(r"ModelArgs\((.{1,2000})\)")
PAIR = re.compile(r"(\w{1,40})=([^,()]{1,80})")
ARGUMENTS = re.compile(r"Running with args: (\{.{1,60000}\})\s*$")
CHECKPOINTING = re.compile(r"Applied (full|selective) activation checkpointing")
SHAPES = {
    "dim": "model.hidden_size", "n_layers": "model.num_layers", "n_heads": "model.num_attention_heads",
    "n_kv_heads": "model.num_query_groups", "vocab_size": "model.vocab_size", "max_seq_len": "model.seq_length",
}  # fmt: skip
OLD_BETAS = "constants of TorchTitan before 2025"


class Reader:
    def __init__(self, source: str):
        self.reading = Reading(NAME, source)
        self.reading.conventions = {
            "loss": "this step, all data ranks",
            "seconds": "from the rate a device since the line before",
            "memory": "PyTorch's peak reserved since the line before, GiB, printing rank",
        }
        self.printing: int | None = None
        self.last = 0
        self.reading.default("engine.framework", KEY, "the log's format")

    def feed(self, line: int, text: str) -> None:
        if "step:" in text:
            for found in STEP.finditer(text):
                self._step(line, text, found)
            if "validate" in text and (validation := VALIDATE.search(text)):
                loss = number(validation.group(2))
                self.reading.validations.append(Validation(int(validation.group(1)), 0, "validation", loss, 0, 0.0))
        elif "batch size" in text and (start := START.search(text)):
            self._start(line, start)
        elif "ModelArgs(" in text and (shapes := MODEL.search(text)):
            self._shapes(line, shapes.group(1))
        elif "total parameters" in text and (size := SIZE.search(text)):
            self.reading.print("parameters", whole(size.group(1)), line)
        elif "device mesh" in text:
            self._mesh(line, text)
        elif "capacity" in text and (capacity := CAPACITY.search(text)):
            self.reading.set("hardware.chip", devices.chip(capacity.group(1), number(capacity.group(2))), line)
            self.reading.environment["device"] = capacity.group(1)
        elif "Peak FLOPS" in text and (peak := PEAK.search(text)):
            self.reading.print("peak_flops", number(peak.group(1)), line)
        elif "Applied" in text and (checkpointing := CHECKPOINTING.search(text)):
            self.reading.set("recompute.mode", checkpointing.group(1), line)
        elif "Running with args" in text and (arguments := ARGUMENTS.search(text)):
            self._arguments(line, arguments.group(1))

    def _step(self, line: int, text: str, found: re.Match[str]) -> None:
        printing = rank(text)
        if self.printing is None:
            self.printing = printing
        loss = number(found.group(2))
        if (printing is not None and printing != self.printing) or loss == -1:
            return  # every rank prints: one speaks for all; -1 stands for "not on the last stage"
        step, rate = int(found.group(1)), whole(found.group(7))
        reserved = number(found.group(4))
        memory = {"reserved_peak": round(reserved * GIB)} if reserved else {}
        if found.group(6) == "wps":
            self.reading.note("`wps` of 2024 may not be divided by the model-parallel ranks")
        devices_, batch = self._world(), self.reading.config.get("batch.global_batch_size")
        sequence = self.reading.config.get("model.seq_length")
        tokens = rate * devices_ if rate and devices_ else None
        seconds = batch * sequence / tokens if tokens and batch and sequence else None
        if found.group(9):
            self.reading.print("mfu_percent", number(found.group(9)), line)
        self.reading.print("tokens_per_second_per_device", rate, line)
        self.reading.step(
            line,
            step,
            loss=loss,
            grad_norm=number(found.group(3)) if found.group(3) else None,
            seconds=seconds,
            tokens_per_second=tokens,
            memory=memory,
            steady=step != 1,
        )
        self.last = step

    def _world(self) -> int | None:
        config = self.reading.config
        data = config.get("parallel.data")
        axes = [config.get(f"parallel.{axis}", 1) for axis in ("tensor", "pipeline", "context")]
        return data * axes[0] * axes[1] * axes[2] if data else None

    def _start(self, line: int, found: re.Match[str]) -> None:
        if self.reading.steps:
            self.reading.begin(line)
        micro, batch, accumulation, sequence, steps, warmup = (whole(g) if g else None for g in found.groups())
        keys = {
            "batch.micro_batch_size": micro, "batch.global_batch_size": batch, "batch.accumulation": accumulation,
            "model.seq_length": sequence, "length.steps": steps, "learning_rate.warmup_steps": warmup,
        }  # fmt: skip
        for key, value in keys.items():
            self.reading.set(key, value, line)
        data = self.reading.config.get("parallel.data")
        if accumulation is None and micro and batch and data and not batch % (micro * data):
            self.reading.default("batch.accumulation", batch // (micro * data), "global / (local x data)")
        if data is None and micro and batch and not batch % (micro * (accumulation or 1)):
            self.reading.default(
                "parallel.data", batch // (micro * (accumulation or 1)), "global / (local x accumulation)"
            )

    def _shapes(self, line: int, text: str) -> None:
        given = {key: value.strip(" '\"") for key, value in PAIR.findall(text)}
        for name, key in SHAPES.items():
            self.reading.set(key, whole(given.get(name, "")), line)
        heads = self.reading.config.get("model.num_attention_heads")
        if given.get("n_kv_heads") == "None":
            self.reading.set("model.num_query_groups", heads, line)
        if (width := whole(given.get("dim", ""))) and given.get("multiple_of"):
            self.reading.set("model.ffn_hidden_size", _ffn(width, given), line)
        self.reading.set("model.norm_eps", number(given.get("norm_eps", "")), line)
        self.reading.set("model.rotary_base", number(given.get("rope_theta", "")), line)
        sequence = self.reading.config.get("model.seq_length")
        self.reading.default("model.max_position_embeddings", sequence, "the sequence length")
        norm = given.get("norm_type", "rmsnorm")
        llama = {
            "kind": "llama", "position": "rotary", "norm": norm if norm in ("rmsnorm", "layernorm") else None,
            "activation": "swiglu", "bias": False, "tied_embeddings": False, "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
        }  # fmt: skip
        for name, value in llama.items():
            self.reading.default(f"model.{name}", value, "TorchTitan's Llama")

    def _mesh(self, line: int, text: str) -> None:
        sizes: dict[str, int] = {}
        if found := OLD_MESH.search(text):
            names = re.findall(r"\w+", found.group(1))
            sizes = dict(zip(names, map(int, re.findall(r"\d+", found.group(2))), strict=False))
        elif "parallelism" in text:
            sizes = {name: int(size) for name, size in MESH.findall(text)}
        if not sizes:
            return
        data = max(1, sizes.get("dp_shard", 1)) * max(1, sizes.get("dp_replicate", 1)) * max(1, sizes.get("dp", 1))
        for axis, size in (("tensor", "tp"), ("pipeline", "pp"), ("context", "cp")):
            self.reading.set(f"parallel.{axis}", sizes.get(size, 1), line)
        self.reading.set("parallel.data", data, line)
        self.reading.set("parallel.sequence", sizes.get("tp", 1) > 1, line)
        if sizes.get("dp_shard", 1) > 1:
            self.reading.set("parallel.zero", 3, line)

    def _arguments(self, line: int, text: str) -> None:
        try:
            table = ast.literal_eval(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return
        if not isinstance(table, dict):
            return
        training, optimizer = _table(table, "training"), _table(table, "optimizer")
        self.reading.conventions["loss"] = "mean over the steps since the line before"  # this line is of January 2025
        self.reading.set("learning_rate.peak", _float(optimizer.get("lr")), line)
        self.reading.set("optimizer.clip_grad", _float(training.get("max_norm")), line)
        self.reading.set("length.steps", training.get("steps"), line)
        if optimizer.get("name") == "AdamW":
            self.reading.set("optimizer.name", "adamw", line)
            self.reading.default("optimizer.betas", [0.9, 0.95], OLD_BETAS)
            self.reading.default("optimizer.weight_decay", 0.1, OLD_BETAS)
        self.reading.set("precision.compute", _DTYPES.get(str(training.get("mixed_precision_param"))), line)
        self.reading.set("precision.gradients", _DTYPES.get(str(training.get("mixed_precision_reduce"))), line)
        self.reading.set("parallel.compile", training.get("compile"), line)
        checkpointing = _table(table, "activation_checkpoint")
        if checkpointing.get("mode") in ("none", "full", "selective"):
            self.reading.set("recompute.mode", checkpointing["mode"], line)
            option = str(checkpointing.get("selective_ac_option", ""))
            if checkpointing["mode"] == "selective" and option.isdigit():
                self.reading.set("recompute.every", int(option), line)
        self.reading.set("parallel.pipeline", _table(table, "experimental").get("pipeline_parallel_degree"), line)
        self.reading.set("data.train", [training["dataset"]] if training.get("dataset") else None, line)
        self.reading.set("learning_rate.decay", "linear", why="TorchTitan's schedule of January 2025")
        self.reading.set("learning_rate.minimum", 0.0, why="TorchTitan's schedule of January 2025")

    def finish(self) -> None:
        for axis in ("tensor", "pipeline", "context"):
            if "parallel.data" in self.reading.config:
                self.reading.default(f"parallel.{axis}", 1, "only degrees above 1 are printed")


_DTYPES = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}


def _table(table: dict[str, Any], name: str) -> dict[str, Any]:
    found = table.get(name)
    return found if isinstance(found, dict) else {}


def _float(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _ffn(width: int, given: dict[str, str]) -> int | None:
    """TorchTitan's Llama MLP: 8/3 of the width, times a multiplier, rounded up."""
    multiple, factor = whole(given["multiple_of"]), number(given.get("ffn_dim_multiplier", ""))
    if not multiple:
        return None
    hidden = int(2 * 4 * width / 3)
    hidden = int(factor * hidden) if factor else hidden
    return -(-hidden // multiple) * multiple
