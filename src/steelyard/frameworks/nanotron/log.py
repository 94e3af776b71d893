"""Logs of nanotron, 2024 and from March 2025. Figures have three significant digits with K, M, G or B, T behind.

The time is that of one iteration; `lr` is read after the scheduler's step and belongs to the next. `global_batch_size`
is in samples until 2025-03-25, then in tokens. Source: nanotron `trainer.py`, `logging/base.py`.
"""

import re

from steelyard.frameworks.lines import number, whole
from steelyard.frameworks.reading import MIB, Reading

NAME = "nanotron"
KEY = "nanotron"

MARKS = (
    re.compile(r"iteration: \d+ / \d+ \| consumed_tokens: "),
    re.compile(r"\[(?:INFO|WARNING)\|DP=\d+\|"),
    re.compile(r"tokens_per_sec_per_gpu: "),
    re.compile(r"\[Start training\] datetime: "),
)
PREFIX = re.compile(r"^.{0,40}\[(?:INFO|WARNING|DEBUG|ERROR)\|[^\]]{1,120}\]: ?")
ITERATION = re.compile(r"iteration: (\d{1,12}) / (\d{1,12}) \| ")
HUMAN = re.compile(r"(-?\d{1,9}(?:\.\d{1,6})?(?:e[-+]?\d{1,3})?)([KMGBTPE]?)\Z")
UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
START = re.compile(r"\[Start training\] datetime: [^|]{5,40} \| (.{10,400})")
PAIR = re.compile(r"\b([a-zA-Z_][a-zA-Z_0-9]{1,40})=([^,()\[\]]{1,80})")
MEMORY = re.compile(
    r"Memory usage: ([\d.]{1,12})MiB\. Peak allocated:? ([\d.]{1,12})MiB\. Peak reserved: ([\d.]{1,12})MiB"
)
VOCABULARY = re.compile(r"Padded vocab \(size: (\d{1,9})\) with \d{1,9} dummy tokens \(new size: (\d{1,9})\)")
TOTAL = re.compile(r"Total number of parameters: ([\d.]{1,8})([KMGBT]?) \(([\d.]{1,14})MiB\)")
WHOLE = {
    "hidden_size": "model.hidden_size", "intermediate_size": "model.ffn_hidden_size", "pp": "parallel.pipeline",
    "num_attention_heads": "model.num_attention_heads", "num_hidden_layers": "model.num_layers", "dp": "parallel.data",
    "num_key_value_heads": "model.num_query_groups", "vocab_size": "model.vocab_size", "tp": "parallel.tensor",
    "sequence_length": "model.seq_length", "train_steps": "length.steps", "micro_batch_size": "batch.micro_batch_size",
    "batch_accumulation_per_replica": "batch.accumulation", "zero_stage": "parallel.zero", "seed": "seed",
    "max_position_embeddings": "model.max_position_embeddings", "lr_warmup_steps": "learning_rate.warmup_steps",
    "lr_decay_steps": "learning_rate.decay_steps", "cp": "parallel.context",
    "context_parallel_size": "parallel.context",
    "checkpoint_interval": "checkpoint.every_steps",
}  # fmt: skip
REAL = {
    "rms_norm_eps": "model.norm_eps", "rope_theta": "model.rotary_base", "adam_eps": "optimizer.eps",
    "weight_decay": "optimizer.weight_decay", "clip_grad": "optimizer.clip_grad", "std": "model.init_std",
    "learning_rate": "learning_rate.peak", "min_decay_lr": "learning_rate.minimum",
}  # fmt: skip
START_KEYS = {
    "mbs": "batch.micro_batch_size", "grad_accum": "batch.accumulation", "global_batch_size": "batch.global_batch_size",
    "sequence_length": "model.seq_length", "train_steps": "length.steps", "cp": "parallel.context",
}  # fmt: skip


class Reader:
    def __init__(self, source: str):
        self.reading = Reading(NAME, source)
        self.reading.conventions = {
            "loss": "this step, mean over data ranks, three digits",
            "seconds": "one iteration, three digits",
            "memory": "PyTorch's allocator, MiB, printing rank",
            "learning_rate": "of the next step",
            "digits": "three significant digits: up to 0.5 % off",
        }
        self.betas: dict[str, float] = {}
        self.reading.default("engine.framework", KEY, "the log's format")

    def feed(self, line: int, text: str) -> None:
        if "iteration: " in text and (found := ITERATION.search(text)):
            self._step(line, text, found)
            return
        body = PREFIX.sub("", text, count=1)
        if "Start training" in body and (start := START.search(body)):
            self._start(line, start.group(1))
        elif "Memory usage" in body and (memory := MEMORY.search(body)):
            values = [number(group) for group in memory.groups()]
            kinds = {
                name: round(value * MIB)
                for name, value in zip(("allocated", "allocated_peak", "reserved_peak"), values, strict=True)
                if value is not None
            }
            known = self.reading.ranks.get(-1, {})
            self.reading.memory(line, {name: max(size, known.get(name, 0)) for name, size in kinds.items()})
        elif "Padded vocab" in body and (vocabulary := VOCABULARY.search(body)):
            self._vocabulary(line, vocabulary)
        elif "Total number" in body and (total := TOTAL.search(body)):
            self.reading.print("parameters_millions", _human(total.group(1) + total.group(2)) / 1e6, line)
        elif "=" in body and not self.reading.steps and body != text:
            self._settings(line, body)

    def _step(self, line: int, text: str, found: re.Match[str]) -> None:
        fields: dict[str, float] = {}
        parts = text[found.end() :].split(" | ")
        for place, part in enumerate(parts):
            name, colon, value = part.partition(": ")
            if colon and (read := HUMAN.match(value.strip())) and (place < len(parts) - 1 or not _cut(value)):
                fields.setdefault(name.strip(), float(read.group(1)) * UNITS[read.group(2)])
        elapsed = fields.get("elapsed_time_per_iteration_ms", fields.get("time_per_iteration_ms"))
        if elapsed is None and "lm_loss" not in fields:
            return
        memory = (
            {"reserved_peak": round(fields["cuda_max_memory_reserved"])} if "cuda_max_memory_reserved" in fields else {}
        )
        batch, sequence = (
            self.reading.config.get("batch.global_batch_size"),
            self.reading.config.get("model.seq_length"),
        )
        step = int(found.group(1))
        self.reading.step(
            line,
            step,
            samples=step * batch if batch else None,
            tokens=step * batch * sequence if batch and sequence else None,
            loss=fields.get("lm_loss"),
            grad_norm=fields.get("grad_norm"),
            learning_rate=fields.get("lr"),
            seconds=elapsed / 1000 if elapsed is not None else None,
            tokens_per_second=fields.get("tokens_per_sec"),
            batch_size=batch,
            memory=memory,
        )

    def _start(self, line: int, text: str) -> None:
        if self.reading.steps:
            self.reading.begin(line)
        for part in text.split(" | "):
            name, _, value = part.partition(": ")
            if name.strip() in START_KEYS:
                self.reading.set(START_KEYS[name.strip()], whole(value), line)

    def _vocabulary(self, line: int, found: re.Match[str]) -> None:
        self.reading.set("model.vocab_size", int(found.group(1)), line)
        self.reading.print("padded_vocab_size", int(found.group(2)), line)

    def _settings(self, line: int, text: str) -> None:
        for name, value in PAIR.findall(text):
            value = value.strip(" '\"<>")
            if name in WHOLE:
                self.reading.set(WHOLE[name], whole(value), line)
            elif name in REAL:
                self.reading.set(REAL[name], number(value), line)
            elif name in ("adam_beta1", "adam_beta2") and (beta := number(value)) is not None:
                self.betas[name] = beta
                if len(self.betas) == 2:
                    self.reading.set("optimizer.betas", [self.betas["adam_beta1"], self.betas["adam_beta2"]], line)
            else:
                self._word(line, name, value)

    def _word(self, line: int, name: str, value: str) -> None:
        if name == "dtype" and value in ("torch.bfloat16", "torch.float32", "torch.float16"):
            words = {"torch.bfloat16": "bf16", "torch.float32": "fp32", "torch.float16": "fp16"}
            self.reading.set("precision.compute", words[value], line)
        elif name == "accumulate_grad_in_fp32" and value == "True":
            self.reading.set("precision.gradients", "fp32", line)
        elif name == "tie_word_embeddings":
            self.reading.set("model.tied_embeddings", value == "True", line)
        elif name == "make_vocab_size_divisible_by" and value.isdigit():
            self.reading.set("model.vocab_multiple", int(value), line)
        elif name == "hidden_act" and value == "silu":
            self.reading.set("model.activation", "swiglu", line)
        elif name == "is_llama_config" and value == "True":
            for key, ours in (("kind", "llama"), ("norm", "rmsnorm"), ("position", "rotary"), ("bias", False)):
                self.reading.set(f"model.{key}", ours, line)
        elif name == "tp_mode":
            self.reading.set("parallel.sequence", "REDUCE_SCATTER" in value, line)
        elif name == "lr_decay_style" and value in ("cosine", "linear"):
            self.reading.set("learning_rate.decay", value, line)
        elif name == "name" and value.lower() == "adamw":
            self.reading.set("optimizer.name", "adamw", line)
        elif name == "pp_engine" and "OneForwardOneBackward" in value:
            self.reading.set("parallel.pipeline_schedule", "1f1b", line)
        elif name == "pp_engine" and "AllForwardAllBackward" in value:
            self.reading.set("parallel.pipeline_schedule", "gpipe", line)

    def finish(self) -> None:
        """The vocabulary is padded to a multiple of `make_vocab_size_divisible_by` x tensor."""
        config = self.reading.config
        multiple, tensor = config.get("model.vocab_multiple"), config.get("parallel.tensor")
        padded = self.reading.printed.get("padded_vocab_size")
        if isinstance(multiple, int) and multiple and tensor and padded and not padded % (multiple * tensor):
            config["model.vocab_multiple"] = multiple * tensor


def _human(text: str) -> float:
    found = HUMAN.match(text)
    return float(found.group(1)) * UNITS[found.group(2)] if found else float("nan")


def _cut(value: str) -> bool:
    """Whether the last field of a line may have lost digits: no shape of a whole one."""
    return value.strip()[-1:] in ".e-+"
