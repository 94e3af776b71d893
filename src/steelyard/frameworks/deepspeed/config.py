"""DeepSpeed's JSON configuration -> run-file values, a row for every key, and what it leaves to the program's flags.

Source: DeepSpeed `runtime/config.py`, `runtime/constants.py`, `runtime/fp16/loss_scaler.py`.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from steelyard.frameworks.fates import Row
from steelyard.spec.errors import error

TRANSLATED = {
    "train_batch_size": "batch.global_batch_size",
    "train_micro_batch_size_per_gpu": "batch.micro_batch_size",
    "gradient_accumulation_steps": "batch.accumulation",
    "gradient_clipping": "optimizer.clip_grad",
    "zero_optimization.stage": "parallel.zero",
    "zero_optimization.reduce_bucket_size": "engine.reduce_bucket",
    "zero_optimization.allgather_bucket_size": "engine.allgather_bucket",
    "zero_optimization.cpu_offload": "engine.offload",
    "zero_optimization.offload_optimizer.device": "engine.offload",
    "zero_optimization.offload_param.device": "engine.offload",
    "fp16.enabled": "precision.compute",
    "bf16.enabled": "precision.compute",
    "bfloat16.enabled": "precision.compute",
    "fp16.loss_scale": "precision.loss_scale",
    "fp16.initial_scale_power": "precision.loss_scale",
    "fp16.loss_scale_window": "precision.loss_scale",
    "fp16.hysteresis": "precision.loss_scale",
    "fp16.min_loss_scale": "precision.loss_scale",
    "data_types.grad_accum_dtype": "precision.gradients",
}
IRRELEVANT = {
    "what is logged": "steps_per_print wall_clock_breakdown dump_state tensorboard wandb csv_monitor comet "
    "monitor_config "
    "flops_profiler comms_logger memory_breakdown",
    "how ranks talk": "zero_optimization.overlap_comm zero_optimization.contiguous_gradients "
    "zero_optimization.reduce_scatter zero_optimization.allgather_partitions zero_optimization.sub_group_size "
    "zero_optimization.round_robin_gradients zero_optimization.stage3_prefetch_bucket_size "
    "zero_optimization.load_from_fp32_weights "
    "zero_optimization.stage3_param_persistence_threshold zero_optimization.stage3_max_live_parameters "
    "zero_optimization.stage3_max_reuse_distance zero_optimization.ignore_unused_parameters "
    "zero_optimization.offload_optimizer zero_optimization.offload_param zero_optimization.zero_hpz_partition_size "
    "prescale_gradients gradient_predivide_factor communication_data_type pipeline disable_allgather sparse_gradients "
    "zero_optimization.stage3_gather_16bit_weights_on_model_save "
    "zero_optimization.stage3_gather_fp16_weights_on_model_save "
    "zero_optimization.elastic_checkpoint",
    "the program's own flags decide it in Megatron-DeepSpeed": "activation_checkpointing optimizer scheduler "
    "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer",
    "how checkpoints are written": "checkpoint data_parallel_write_pipeline nebula",
    "what Megatron-DeepSpeed does itself": "fp16.auto_cast fp16.consecutive_hysteresis "
    "fp16.fp16_master_weights_and_grads "
    "bf16.immediate_grad_update bf16.check_overflow bf16.check_grad_overflow aio hybrid_engine use_node_local_storage "
    "fp16.type compile dataloader_drop_last zero_optimization.memory_efficient_linear graph_harvesting",
}
REFUSED = {
    "curriculum_learning": "the sequence length does not grow", "data_efficiency": "all tokens are trained on",
    "elasticity": "the world does not change while a run lasts", "autotuning": "a run has one configuration",
    "compression_training": "weights are not compressed", "progressive_layer_drop": "no layer is dropped",
    "sparse_attention": "attention is not sparse", "amp": "precision.compute says the precision",
    "zero_optimization.zero_quantized_weights": "weights are gathered as they are",
    "zero_optimization.zero_quantized_gradients": "gradients are reduced as they are",
    "zero_optimization.mics_shard_size": "write parallel.replicate for hybrid sharding",
    "sequence_parallel_size": "DeepSpeed's sequence parallelism is not known here",
    "tensor_parallel": "the program's flags say the tensor ranks",
}  # fmt: skip
SWITCHES = ("curriculum_learning", "data_efficiency", "elasticity", "autotuning", "amp", "progressive_layer_drop",
            "compression_training", "sparse_attention")  # fmt: skip
DTYPES = {"fp32": "fp32", "float32": "fp32", "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16"}
# DeepSpeed's own where fp16 is on and the JSON is silent
LOSS_SCALE = {"initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}


@dataclass(frozen=True)
class Config:
    """The JSON as nested values, and where a key stands in it."""

    given: Mapping[str, Any]
    where: Callable[[str], str]

    def get(self, key: str, default: Any = None) -> Any:
        """A value by its dotted key; "auto" counts as not given."""
        value: Any = self.given
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return default if value is None or value == "auto" else value


def parse(text: str, place: str, lines: Sequence[int] = ()) -> Config:
    """`lines` are the numbers, in the file that `place` names, of the lines of the text. Raises UserError F018."""
    try:
        given = json.loads(text)
    except RecursionError:
        raise error(
            "F018", place=place, path="DeepSpeed's JSON", detail="it is nested too deeply", advice="flatten it"
        ) from None
    except json.JSONDecodeError as failure:
        line = lines[failure.lineno - 1] if failure.lineno <= len(lines) else failure.lineno
        around = text.splitlines()[failure.lineno - 1 : failure.lineno] or [""]
        underscore = re.search(r"\d_\d", around[0])
        advice = (
            "JSON has no underscores in numbers" if underscore else "JSON needs double quotes and no comma at the end"
        )
        raise error(
            "F018",
            place=f"{place}:{line}",
            path="DeepSpeed's JSON",
            detail=f"{failure.msg}: {around[0].strip()[:60]}",
            advice=advice,
        ) from None
    if not isinstance(given, dict):
        raise error(
            "F018", place=place, path="DeepSpeed's JSON", detail="it is no JSON object", advice="give its {...}"
        )
    rows = text.splitlines()

    def where(key: str) -> str:
        leaf = f'"{key.rpartition(".")[2]}"'
        number = next((n for n, row in enumerate(rows) if leaf in row), 0)
        return f"{place}:{lines[number] if number < len(lines) else number + 1}"

    return Config(given, where)


def rows(config: Config) -> Iterator[Row]:
    """What becomes of every key."""
    for key, value in _leaves("", config.given):
        shown = json.dumps(value) if not isinstance(value, str) else value
        yield _row(key, value, shown if len(shown) <= 60 else shown[:57] + "...", config.where(key))


def _row(key: str, value: Any, shown: str, place: str) -> Row:
    if value == "auto":
        return Row(key, shown, "irrelevant", TRANSLATED.get(key, ""), "the program's flags fill it in", place)
    if key in TRANSLATED:
        return Row(key, shown, "translated", TRANSLATED[key], "", place)
    for why, names in IRRELEVANT.items():
        if any(key == name or key.startswith(name + ".") for name in names.split()):
            return Row(key, shown, "irrelevant", "", why, place)
    top = next((name for name in REFUSED if key == name or key.startswith(name + ".")), "")
    if top:
        return Row(key, shown, "refused", "", REFUSED[top], place)
    return Row(key, shown, "refused", "", "no table here knows this key of DeepSpeed", place)


def _leaves(prefix: str, given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in given.items():
        key = f"{prefix}{name}"
        if key in SWITCHES and (not value or (isinstance(value, Mapping) and not value.get("enabled", True))):
            continue
        if isinstance(value, Mapping) and value and key.count(".") < 6:
            yield from _leaves(f"{key}.", value)
        else:
            yield key, value


def stage(config: Config) -> int:
    value = config.get("zero_optimization.stage", 0)
    if config.get("zero_optimization") is True:
        return 1
    if value not in (0, 1, 2, 3) or isinstance(value, bool):
        raise error(
            "F004",
            place=config.where("zero_optimization.stage"),
            flag="zero_optimization.stage",
            kind="0 to 3",
            value=value,
        )
    return int(value)


def loss_scale(config: Config) -> dict[str, Any]:
    """fp16's scale. `loss_scale` 0 is dynamic."""
    fixed = config.get("fp16.loss_scale", 0)
    if fixed:
        return {"static": float(fixed)}
    scale = {name: config.get(f"fp16.{name}", default) for name, default in LOSS_SCALE.items()}
    return {
        "initial_power": scale["initial_scale_power"],
        "window": scale["loss_scale_window"],
        "hysteresis": scale["hysteresis"],
        "minimum": float(scale["min_loss_scale"]),
        "rule": "deepspeed",
    }


def engine(config: Config) -> dict[str, Any]:
    """What only DeepSpeed's engine knows."""
    zero = "zero_optimization"
    optimizer = config.get(f"{zero}.offload_optimizer.device", "none") not in ("none", None)
    optimizer = optimizer or bool(config.get(f"{zero}.cpu_offload"))
    parameters = config.get(f"{zero}.offload_param.device", "none") not in ("none", None)
    offload = "optimizer+parameters" if parameters else "optimizer" if optimizer else None
    buckets = {
        "reduce_bucket": config.get(f"{zero}.reduce_bucket_size"),
        "allgather_bucket": config.get(f"{zero}.allgather_bucket_size"),
    }
    return {"offload": offload, **{name: int(size) for name, size in buckets.items() if isinstance(size, int | float)}}
