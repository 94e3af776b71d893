"""LiBai's configuration keys -> run-file keys. Nothing is executed: a config.yaml and overrides are read as text.

Source: LiBai `configs/common/train.py`, `configs/common/models/gpt.py`, `libai/engine/default.py`.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from steelyard.frameworks.lines import lines, number, whole
from steelyard.frameworks.reading import Reading

# LiBai's dotted key -> (our key, kind). `model.cfg.num_layers` became `hidden_layers` on 2022-12-22.
KEYS = {
    "train.train_micro_batch_size": ("batch.micro_batch_size", "int"),
    "train.global_batch_size": ("batch.global_batch_size", "int"),
    "train.num_accumulation_steps": ("batch.accumulation", "int"),
    "train.train_iter": ("length.steps", "int"),
    "train.dist.data_parallel_size": ("parallel.data", "int"),
    "train.dist.tensor_parallel_size": ("parallel.tensor", "int"),
    "train.dist.pipeline_parallel_size": ("parallel.pipeline", "int"),
    "train.seed": ("seed", "int"),
    "model.cfg.num_layers": ("model.num_layers", "int"),
    "model.cfg.hidden_layers": ("model.num_layers", "int"),
    "model.cfg.vocab_size": ("model.vocab_size", "int"),
    "model.cfg.hidden_size": ("model.hidden_size", "int"),
    "model.cfg.ffn_hidden_size": ("model.ffn_hidden_size", "int"),
    "model.cfg.num_attention_heads": ("model.num_attention_heads", "int"),
    "model.cfg.max_seq_length": ("model.seq_length", "int"),
    "model.cfg.attention_dropout_prob": ("model.attention_dropout", "float"),
    "model.cfg.output_dropout_prob": ("model.hidden_dropout", "float"),
    "model.cfg.layernorm_epsilon": ("model.norm_eps", "float"),
    "model.cfg.initializer_range": ("model.init_std", "float"),
    "optim.lr": ("learning_rate.peak", "float"),
    "optim.weight_decay": ("optimizer.weight_decay", "float"),
    "optim.eps": ("optimizer.eps", "float"),
    "train.warmup_ratio": ("learning_rate.warmup_fraction", "float"),
}
ENTRY = re.compile(r"( {0,60})(?:- )?([A-Za-z_][\w]{0,80}):(?: (.{0,400}))?$")
DEFAULT = "default of LiBai"


def apply(reading: Reading, key: str, text: str, line: int) -> None:
    """One key with its value as text. Unknown keys are passed over: LiBai has many that decide nothing here."""
    value = text.strip().strip("'\"")
    if key == "train.activation_checkpoint.enabled":
        reading.set("recompute.mode", "full" if _on(value) else "none", line)
    elif key == "train.amp.enabled":
        reading.set("precision.compute", "fp16" if _on(value) else "fp32", line)
    elif key == "train.zero_optimization.enabled":
        reading.environment["zero_enabled"] = _on(value)
        if not _on(value):
            reading.set("parallel.zero", 0, line)
        else:
            reading.set("parallel.zero", reading.environment.get("zero_stage", 1), line)
    elif key == "train.zero_optimization.stage" and value in ("1", "2", "3"):
        reading.environment["zero_stage"] = int(value)
        if reading.environment.get("zero_enabled"):
            reading.set("parallel.zero", int(value), line)
    elif key == "train.input_placement_device":
        reading.set("engine.inputs_on_device", value != "cpu", line)
    elif key in KEYS:
        ours, kind = KEYS[key]
        found = whole(value) if kind == "int" else number(value)
        reading.set(ours, found, line)


def _on(value: str) -> bool:
    return value.lower() in ("true", "1", "yes", "on")


def complete(reading: Reading) -> None:
    """What the configuration implies: the third of batch, accumulation and data ranks, and LiBai's own defaults."""
    axes = [reading.config.get(f"parallel.{axis}", 1) for axis in ("tensor", "pipeline")]
    world = reading.environment.get("world_size")
    if world and "parallel.data" not in reading.config and axes[0] * axes[1]:
        reading.set("parallel.data", max(1, world // (axes[0] * axes[1])), why="world size / (tensor x pipeline)")
    for key, value in {
        "parallel.tensor": 1, "parallel.pipeline": 1, "model.hidden_dropout": 0.0, "model.vocab_multiple": "megatron",
    }.items():  # fmt: skip
        reading.default(key, value, DEFAULT)


def read_yaml(reading: Reading, path: Path) -> None:
    """The resolved configuration that LiBai writes beside its log; it has the last word, and alone shows ZeRO."""
    log, reading.source = reading.source, str(path)
    for line, key, text in yaml_entries(lines(path)):
        apply(reading, key, text, line)
    reading.source = log


def yaml_entries(rows: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str, str]]:
    """(line, dotted key, text) of the plain mappings of a config.yaml. Lists and references are passed over."""
    path: list[tuple[int, str]] = []
    for line, text in rows:
        found = ENTRY.match(text.rstrip())
        if found is None:
            continue
        indent, key, value = len(found.group(1)), found.group(2), found.group(3)
        while path and path[-1][0] >= indent:
            path.pop()
        path.append((indent, key))
        if value and not value.startswith(("&", "!", "|", ">")):
            yield line, ".".join(name for _, name in path), value
