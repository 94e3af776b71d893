"""Logs of TorchTitan: 2024 (`wps`), from November 2024 (`tps`), from June 2025 (`grad_norm`).

The rate is per device and covers the steps since the line before; the memory is the peak *reserved* since then. Until
2025-01-16 the loss is the mean of that window, later that of the step. Ranks that are not on the last pipeline stage
print a loss of -1. Source: TorchTitan `components/metrics.py`, `train.py`, at 82f7387f and b5bcd76c.
"""

import json
import re
from typing import Any

from steelyard.frameworks import devices
from steelyard.frameworks.lines import PREFIX, literal, number, rank, whole
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
TOKENS = re.compile(
    r"initialized with (\d{1,12}) tokens per DP rank, (\d{1,15}) tokens per train step, gradient accumulation steps "
    r"(\d{1,9}), maximum context length (\d{1,9}), total steps (\d{1,12}) \(warmup (\d{1,12})\)"
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
        self.json: list[str] = []  # the lines of a configuration that is printed over many
        self.json_line = 0
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
        elif "tokens per DP rank" in text and (tokens := TOKENS.search(text)):
            self._tokens(line, tokens)
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
            self._arguments(line, _literal(arguments.group(1)))
        elif "Running with configs: {" in text:
            self.json, self.json_line = ["{"], line
        elif self.json:
            self._gather(text)

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

    def _tokens(self, line: int, found: re.Match[str]) -> None:
        """The same from August 2026 on, in tokens."""
        rank_tokens, step_tokens, accumulation, sequence, steps, warmup = map(int, found.groups())
        keys = {"batch.accumulation": accumulation, "model.seq_length": sequence, "length.steps": steps,
                "learning_rate.warmup_steps": warmup}  # fmt: skip
        if sequence and not step_tokens % sequence and not rank_tokens % sequence:
            keys |= {
                "batch.global_batch_size": step_tokens // sequence,
                "batch.micro_batch_size": rank_tokens // sequence,
            }
        for key, value in keys.items():
            self.reading.set(key, value, line)

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

    def _gather(self, text: str) -> None:
        """The next line of `Running with configs`, which ends with a brace in the first column."""
        body = PREFIX.sub("", text, count=1)
        self.json.append(body)
        if body.rstrip() == "}" or len(self.json) > 3000:
            try:
                table = json.loads("\n".join(self.json))
            except (ValueError, RecursionError):
                table = {}
            self.json = []
            self._arguments(self.json_line, table if isinstance(table, dict) else {})

    def _arguments(self, line: int, table: dict[str, Any]) -> None:
        """The job's configuration; sections moved in 2025, so each key is looked for where it ever stood."""
        training, optimizer, schedule = (_table(table, name) for name in ("training", "optimizer", "lr_scheduler"))
        if not training:
            return
        if not schedule:  # January 2025
            self.reading.conventions["loss"] = "mean over the steps since the line before"
        set_ = self.reading.set
        set_("learning_rate.peak", _float(optimizer.get("lr")), line)
        set_("optimizer.clip_grad", _float(training.get("max_norm")), line)
        set_("length.steps", _count(training.get("steps")), line)
        warmup = schedule.get("warmup_steps", training.get("warmup_steps"))
        set_("learning_rate.warmup_steps", warmup if isinstance(warmup, int) else None, line)
        set_("batch.micro_batch_size", _count(training.get("local_batch_size", training.get("batch_size"))), line)
        set_("model.seq_length", _count(training.get("seq_len")), line)
        set_("precision.compute", _DTYPES.get(str(training.get("mixed_precision_param"))), line)
        set_("precision.gradients", _DTYPES.get(str(training.get("mixed_precision_reduce"))), line)
        compiled = training.get("compile", _table(table, "compile").get("enable"))
        set_("parallel.compile", compiled if isinstance(compiled, bool) else None, line)
        set_("data.train", [training["dataset"]] if isinstance(training.get("dataset"), str) else None, line)
        self._optimizer(line, optimizer, schedule)
        self._recompute(line, _table(table, "activation_checkpoint"))
        layout = _table(table, "parallelism") or {**training, **_table(table, "experimental")}
        for axis in ("tensor", "pipeline", "context"):
            set_(f"parallel.{axis}", _count(layout.get(f"{axis}_parallel_degree")), line)

    def _optimizer(self, line: int, optimizer: dict[str, Any], schedule: dict[str, Any]) -> None:
        if optimizer.get("name") != "AdamW":
            return
        self.reading.set("optimizer.name", "adamw", line)
        betas = [_float(optimizer.get(name)) for name in ("beta1", "beta2")]
        if None not in betas:
            self.reading.set("optimizer.betas", betas, line)
        self.reading.set("optimizer.eps", _float(optimizer.get("eps")), line)
        self.reading.set("optimizer.weight_decay", _float(optimizer.get("weight_decay")), line)
        self.reading.default("optimizer.betas", [0.9, 0.95], OLD_BETAS)
        self.reading.default("optimizer.weight_decay", 0.1, OLD_BETAS)
        decay = schedule.get("decay_type") if schedule else "linear"
        if decay in ("linear", "cosine"):
            self.reading.set("learning_rate.decay", decay, line)
        peak, factor = self.reading.config.get("learning_rate.peak"), _float(schedule.get("min_lr_factor", 0.0))
        if peak is not None and factor is not None:
            self.reading.set("learning_rate.minimum", factor * peak, line)

    def _recompute(self, line: int, table: dict[str, Any]) -> None:
        if table.get("mode") in ("none", "full", "selective"):
            self.reading.set("recompute.mode", table["mode"], line)
            option = str(table.get("selective_ac_option", ""))
            if table["mode"] == "selective" and option.isdigit():
                self.reading.set("recompute.every", int(option), line)

    def finish(self) -> None:
        for axis in ("tensor", "pipeline", "context"):
            if "parallel.data" in self.reading.config:
                self.reading.default(f"parallel.{axis}", 1, "only degrees above 1 are printed")


_DTYPES = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}


def _table(table: dict[str, Any], name: str) -> dict[str, Any]:
    found = table.get(name)
    return found if isinstance(found, dict) else {}


def _literal(text: str) -> dict[str, Any]:
    table = literal(text)
    return table if isinstance(table, dict) else {}


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


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
