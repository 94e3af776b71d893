"""Logs of GPT-NeoX, 2021 to today: Megatron's training line with the rate in front, DeepSpeed's lines between them, and
an argument block whose values end where filler dots or the words `updated` and `default` begin.

DeepSpeed's own `steps: N loss: ... samples/sec` line runs on another clock and is not mixed in. Source: GPT-NeoX
`megatron/logging.py`, `megatron/neox_arguments/arguments.py`.
"""

import re
from typing import Any

from steelyard.frameworks.deepspeed import log as deepspeed
from steelyard.frameworks.lines import literal, number, whole
from steelyard.frameworks.megatron import log as megatron

NAME = "GPT-NeoX"
KEY = "gpt_neox"

MARKS = (
    re.compile(r"samples/sec: [\d.]+ \| iteration\s+\d+/\s*\d+ \|"),
    re.compile(r"approx flops per GPU: [\d.]+[KMGTPE]?FLOPS"),
    re.compile(r"NeoXArgs\."),
    re.compile(r"-{4,} end of arguments -{4,}"),
    re.compile(r"\.{3,}(?:updated|default)\s*$"),
    re.compile(r"validation results at iteration \d+ \| lm_loss value"),
    re.compile(r"STAGE_PARAMS=\d+"),
)
ENTRY = re.compile(r"^\W{0,12}([a-z_A-Z0-9]{1,60}) \.{2,60} ")
WORLD = re.compile(r"using world size: (\d{1,9}) and model-parallel size: (\d{1,9})")
RATE = re.compile(r"samples/sec: ([\d.]{1,16}) \|\s*$")
TOTAL = re.compile(r"> total params: ([\d,]{1,24})")
WHOLE = {
    "num_layers": "model.num_layers", "hidden_size": "model.hidden_size", "seq_length": "model.seq_length",
    "num_attention_heads": "model.num_attention_heads", "num_kv_heads": "model.num_query_groups",
    "max_position_embeddings": "model.max_position_embeddings", "intermediate_size": "model.ffn_hidden_size",
    "model_parallel_size": "parallel.tensor", "pipe_parallel_size": "parallel.pipeline",
    "train_micro_batch_size_per_gpu": "batch.micro_batch_size", "train_batch_size": "batch.global_batch_size",
    "gradient_accumulation_steps": "batch.accumulation", "train_iters": "length.steps", "zero_stage": "parallel.zero",
    "lr_decay_iters": "learning_rate.decay_steps", "seed": "seed",
    "eval_interval": "evaluation.every_steps", "eval_iters": "evaluation.steps",
    "checkpoint_factor": "checkpoint.every_steps",
}  # fmt: skip
REAL = {
    "attention_dropout": "model.attention_dropout", "hidden_dropout": "model.hidden_dropout",
    "weight_decay": "optimizer.weight_decay", "clip_grad": "optimizer.clip_grad", "gradient_clipping":
    "optimizer.clip_grad", "lr": "learning_rate.peak", "min_lr": "learning_rate.minimum",
    "warmup": "learning_rate.warmup_fraction", "rotary_pct": "model.rotary_fraction",
    "rotary_emb_base": "model.rotary_base", "layernorm_epsilon": "model.norm_eps",
}  # fmt: skip
WORDS = {
    "pos_emb": ("model.position", {"rotary": "rotary", "learned": "learned", "alibi": "alibi", "none": "none"}),
    "norm": ("model.norm", {"layernorm": "layernorm", "rmsnorm": "rmsnorm"}),
    "activation": ("model.activation", {"gelu": "gelu", "swiglu": "swiglu", "relu": "relu", "geglu": "geglu"}),
    "precision": ("precision.compute", {"fp16": "fp16", "bfloat16": "bf16", "fp32": "fp32"}),
    "lr_decay_style": ("learning_rate.decay", {n: n for n in ("cosine", "linear", "constant")}),
}


class Reader(megatron.Reader):
    name = NAME
    key = KEY

    def __init__(self, source: str):
        super().__init__(source)
        self.reading.conventions["loss"] = "mean over the steps since the line before, skipped ones left out"
        self.reading.default("engine.framework", KEY, "the log's format")

    def other(self, line: int, text: str) -> None:
        if not deepspeed.feed(self.reading, line, text) and (found := TOTAL.search(text)):
            self.reading.print("parameters", whole(found.group(1)), line)

    def _block(self, line: int, text: str) -> None:
        assert self.block is not None
        if "end of arguments" in text:
            self._close_block()
        elif (found := ENTRY.match(text)) and text.rstrip().endswith(("updated", "default")):
            value = text[found.end() :].rstrip().removesuffix("updated").removesuffix("default")
            self.block[found.group(1)] = (value.rstrip(".").strip(), line)

    def _close_block(self) -> None:
        entries, self.block = self.block or {}, None
        for name, (text, line) in entries.items():
            self._argument(name, text, line)

    def _argument(self, name: str, text: str, line: int) -> None:
        reading = self.reading
        if name in WHOLE:
            value = whole(text)
            reading.set(WHOLE[name], max(1, value) if value is not None and "parallel_size" in name else value, line)
        elif name in REAL:
            reading.set(REAL[name], number(text), line)
        elif name in WORDS:
            key, words = WORDS[name]
            reading.set(key, words.get(text), line)
        elif name == "no_weight_tying":
            reading.set("model.tied_embeddings", text != "True", line)
        elif name == "checkpoint_activations":
            reading.set("recompute.mode", "full" if text == "True" else "none", line)
        elif name == "sequence_parallel":
            reading.set("parallel.sequence", text == "True", line)
        elif name == "data_path":
            reading.set("data.train", [text], line)
        elif name == "make_vocab_size_divisible_by" and whole(text):
            tensor = reading.config.get("parallel.tensor", 1)
            reading.set("model.vocab_multiple", int(text) * tensor, line)
        elif name in ("split", "tokenizer_type"):
            reading.set(
                {"split": "data.split", "tokenizer_type": "data.tokenizer"}[name], text.replace(", ", ","), line
            )
        elif name in ("fp16", "bf16", "optimizer", "zero_optimization") and text.startswith("{"):
            self._table(name, _literal(text), line)

    def _table(self, name: str, table: dict[str, Any], line: int) -> None:
        reading = self.reading
        if name in ("fp16", "bf16") and table.get("enabled", True):
            reading.default("precision.compute", name, reading.where(line))
            if isinstance(power := table.get("initial_scale_power"), int) and table.get("loss_scale") == 0:
                reading.set("precision.loss_scale", {"initial_power": power, "rule": "deepspeed"}, line)
        elif name == "zero_optimization" and table.get("stage") in (0, 1, 2, 3):
            reading.set("parallel.zero", table["stage"], line)
        elif name == "optimizer":
            params = table.get("params")
            params = params if isinstance(params, dict) else {}
            if str(table.get("type", "")).lower() in ("adam", "adamw"):
                reading.set("optimizer.name", "adamw", line)
            for ours, theirs in (("betas", "betas"), ("eps", "eps")):
                reading.set(f"optimizer.{ours}", params.get(theirs), line)

    def _world(self, line: int, text: str) -> None:
        if found := WORLD.search(text):
            world, tensor = int(found.group(1)), int(found.group(2))
            self.reading.environment["world_size"] = world
            axes = max(1, tensor) * self.reading.config.get("parallel.pipeline", 1)
            self.reading.set("parallel.tensor", max(1, tensor), line)
            self.reading.set("parallel.data", world // axes, line)

    def _step(self, line: int, text: str, start: int) -> None:
        if rate := RATE.search(text, 0, start):
            self.reading.print("samples_per_second", number(rate.group(1)), line)
        super()._step(line, text, start)


def _literal(text: str) -> dict[str, Any]:
    value = literal(text)
    return value if isinstance(value, dict) else {}
