"""A TorchTitan job file (TOML, 2024 to February 2026) -> the values of a run file.

Sections moved in 2025; every key is looked for where it ever stood. Source: TorchTitan `config_manager.py` and
`models/llama3` at 82f7387f (January 2025) and b5bcd76c (late 2025).
"""

from typing import Any

from steelyard.frameworks.settings import Settings, Table
from steelyard.spec.errors import error

NAME = "TorchTitan"
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
# flavour -> (layers, width, heads, query groups, ffn, vocabulary): models/llama3/__init__.py
LLAMA3 = {
    "debugmodel": (6, 256, 16, 16, 768, 2048), "8B": (32, 4096, 32, 8, 14336, 128256),
    "70B": (80, 8192, 64, 8, 28672, 128256), "405B": (126, 16384, 128, 8, 53248, 128256),
}  # fmt: skip
DEGREES = {
    "tensor": "tensor_parallel_degree",
    "pipeline": "pipeline_parallel_degree",
    "context": "context_parallel_degree",
}
SCHEDULES = {"1F1B": "1f1b", "GPipe": "gpipe", "Interleaved1F1B": "interleaved", "ZBVZeroBubble": "zbv",
             "InterleavedZeroBubble": "zero_bubble"}  # fmt: skip

CHUNKED = ("interleaved", "zbv", "zero_bubble")

TABLE = Table(
    translated={
        "model.name": "model.kind", "model.flavor": "model.num_layers model.hidden_size",
        "model.norm_type": "model.norm",
        "training.seq_len": "model.seq_length", "training.batch_size": "batch.micro_batch_size",
        "training.local_batch_size": "batch.micro_batch_size", "training.global_batch_size": "batch.global_batch_size",
        "training.steps": "length.steps", "training.max_norm": "optimizer.clip_grad", "training.seed": "seed",
        "debug.seed": "seed", "training.warmup_steps": "learning_rate.warmup_steps", "lr_scheduler.warmup_steps":
        "learning_rate.warmup_steps", "lr_scheduler.decay_type": "learning_rate.decay", "lr_scheduler.min_lr_factor":
        "learning_rate.minimum", "lr_scheduler.lr_min": "learning_rate.minimum", "lr_scheduler.decay_ratio":
        "learning_rate.decay", "lr_scheduler.total_steps": "learning_rate.decay_steps", "optimizer.lr":
        "learning_rate.peak", "optimizer.name": "optimizer.name", "optimizer.beta1": "optimizer.betas",
        "optimizer.beta2": "optimizer.betas", "optimizer.eps": "optimizer.eps", "optimizer.weight_decay":
        "optimizer.weight_decay", "training.mixed_precision_param": "precision.compute",
        "training.mixed_precision_reduce": "precision.gradients", "training.compile": "parallel.compile",
        "compile.enable": "parallel.compile", "activation_checkpoint.mode": "recompute.mode",
        "training.dataset": "data.train",
        "training.dataset_path": "data.train", "checkpoint.interval": "checkpoint.every_steps",
        "checkpoint.enable_checkpoint": "checkpoint.every_steps", "checkpoint.enable": "checkpoint.every_steps",
        "validation.freq": "evaluation.every_steps", "validation.steps": "evaluation.steps", "validation.enable":
        "evaluation.steps",
        **{f"{section}.{key}": f"parallel.{axis}" for section in ("training", "experimental", "parallelism")
           for axis, key in DEGREES.items()},
        **{f"{section}.data_parallel_{kind}_degree": key for section in ("training", "parallelism")
           for kind, key in (("shard", "parallel.zero"), ("replicate", "parallel.replicate"))},
        **{f"{section}.pipeline_parallel_schedule": "parallel.pipeline_schedule"
           for section in ("experimental", "parallelism")},
        "parallelism.fsdp_reshard_after_forward": "parallel.zero",
    },
    irrelevant={
        "where files are": "job checkpoint model.tokenizer_path model.hf_assets_path model.tokenizer",
        "what is logged": "metrics profiling comm logging",
        "how ranks talk": "training.enable_loss_parallel training.disable_loss_parallel "
        "parallelism.disable_loss_parallel "
        "experimental.enable_async_tensor_parallel parallelism.enable_async_tensor_parallel "
        "training.enable_cpu_offload_none parallelism.enable_compiled_autograd experimental.enable_compiled_autograd "
        "parallelism.pipeline_parallel_microbatch_size experimental.pipeline_parallel_microbatches "
        "parallelism.context_parallel_rotate_method parallelism.pipeline_parallel_layers_per_stage "
        "parallelism.expert_parallel_degree parallelism.expert_tensor_parallel_degree",
        "which kernel computes the same": "optimizer.fused optimizer.implementation optimizer.early_step_in_backward "
        "training.deterministic debug compile training.dtype model.print_after_conversion quantize.linear.filter "
        "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns activation_checkpoint.early_stop",
        "how data are read": "training.data_parallel_type training.gc_freq training.gc_debug training.num_workers "
        "validation model.converters",
        "nothing is switched on by it": "memory_estimation fault_tolerance experimental.custom_import "
        "experimental.custom_args_module float8 quantize",
    },
    refused={
        "activation_checkpoint.selective_ac_option": "selective recompute is that of attention here",
        "training.enable_cpu_offload": "offloaded parameters cannot be planned here",
        "float8.enable_float8_linear": "fp8 products are not trained here",
        "float8.enable_fsdp_float8_all_gather": "fp8 products are not trained here",
        "model.converters": "converted layers (fp8) are not trained here",
        "experimental.pipeline_parallel_split_points": "write the layers of each stage as parallel.stages",
        "optimizer.early_step_in_backward": "the optimizer steps once, after the backward pass",
    },
    harmless={
        "training.enable_cpu_offload": [False], "float8.enable_float8_linear": [False],
        "float8.enable_fsdp_float8_all_gather": [False], "model.converters": [[], ""],
        "experimental.pipeline_parallel_split_points": [[], ""], "optimizer.early_step_in_backward": [False],
    },
)  # fmt: skip


def is_mine(given: Settings) -> bool:
    return "model.flavor" in given.given and any(key.startswith("training.") for key in given.given)


def table(given: Settings) -> Table:
    return TABLE


def world(given: Settings) -> int | None:
    """The ranks, where every degree is written; -1 leaves them to the launcher."""
    shard, replicate = (
        _degree(given, "data_parallel_shard_degree", -1),
        _degree(given, "data_parallel_replicate_degree", 1),
    )
    return None if shard < 1 else shard * replicate * _model_ranks(given)


def _degree(given: Settings, key: str, default: int) -> int:
    for section in ("parallelism", "training", "experimental"):
        if f"{section}.{key}" in given.given:
            return int(given.given[f"{section}.{key}"])
    return default


def _model_ranks(given: Settings) -> int:
    sizes = [_degree(given, key, 1) for key in DEGREES.values()]
    return sizes[0] * sizes[1] * sizes[2]


def values(given: Settings, world: int | None) -> dict[str, Any]:
    """Run-file values. Raises UserError F005, F007."""
    get = given.get
    sequence = get("training.seq_len", 2048)
    peak = float(get("optimizer.lr", 8e-4))
    steps = get("training.steps", 10000)
    warmup = get("lr_scheduler.warmup_steps", get("training.warmup_steps", 200))
    data = max(1, (world or _model_ranks(given)) // _model_ranks(given))
    local, whole = (
        get("training.local_batch_size", get("training.batch_size", 8)),
        get("training.global_batch_size", -1),
    )
    mode = get("activation_checkpoint.mode", "selective")
    saves = get("checkpoint.enable", get("checkpoint.enable_checkpoint", False))
    return {
        **({"seed": get("debug.seed", get("training.seed"))} if get("debug.seed", get("training.seed")) else {}),
        "model": _model(given, sequence),
        "parallel": _parallel(given, data),
        "batch": {"micro_batch_size": local, "global_batch_size": whole if whole > 0 else local * data,
                  "loss_mean": "micro_batches"},
        "precision": _precision(given, data),
        "recompute": {"mode": mode} | ({"modules": ["attention"]} if mode == "selective" else {}),
        "optimizer": {
            "betas": [float(get("optimizer.beta1", 0.9)), float(get("optimizer.beta2", 0.95))],
            "eps": float(get("optimizer.eps", 1e-8)), "weight_decay": float(get("optimizer.weight_decay", 0.1)),
            "clip_grad": float(get("training.max_norm", 1.0)),
        },
        "learning_rate": _rate(given, peak, steps, warmup),
        "length": {"steps": steps},
        "data": {"train": [get("training.dataset_path", get("training.dataset"))]} if get("training.dataset") else {},
        "evaluation": {"every_steps": get("validation.freq", 10), "steps": max(0, get("validation.steps", 0))}
        if get("validation.enable") else {"every_steps": 0, "steps": 0},
        "checkpoint": {"every_steps": get("checkpoint.interval", 500) if saves else 0},
        "engine": {"framework": "torchtitan"},
    }  # fmt: skip


def _model(given: Settings, sequence: int) -> dict[str, Any]:
    flavour = str(given.get("model.flavor", ""))
    if not str(given.get("model.name", "llama3")).startswith("llama3") or flavour not in LLAMA3:
        flag = f"model {given.get('model.name')} {flavour}"
        advice = f"known here: llama3 {', '.join(LLAMA3)}; write its sizes as a run file's [model]"
        raise error("F005", "model.flavor", given.where("model.flavor"), flag=flag, advice=advice)
    layers, width, heads, groups, ffn, vocabulary = LLAMA3[flavour]
    if flavour == "debugmodel" and any(key.startswith(("experimental.", "training.batch_size")) for key in given.given):
        layers, vocabulary = 8, 2256  # January 2025
    return {
        "kind": "llama", "num_layers": layers, "hidden_size": width, "num_attention_heads": heads,
        "num_query_groups": groups, "ffn_hidden_size": ffn, "vocab_size": vocabulary, "vocab_multiple": 1,
        "seq_length": sequence, "max_position_embeddings": sequence, "rotary_base": 500000.0, "norm_eps": 1e-5,
        "norm": "layernorm" if given.get("model.norm_type", "rmsnorm") == "layernorm" else "rmsnorm",
    }  # fmt: skip


def _parallel(given: Settings, data: int) -> dict[str, Any]:
    """Sharding over the data ranks is FSDP2: stage 3, or 2 where parameters stay gathered; replicas alone are DDP."""
    tensor, pipeline, context = (_degree(given, key, 1) for key in DEGREES.values())
    replicate = _degree(given, "data_parallel_replicate_degree", 1)
    shard = _degree(given, "data_parallel_shard_degree", -1)
    shard = max(1, data // max(1, replicate)) if shard < 1 else shard
    keeps = given.get("parallelism.fsdp_reshard_after_forward") == "never"
    name = str(
        given.get(
            "parallelism.pipeline_parallel_schedule", given.get("experimental.pipeline_parallel_schedule", "1F1B")
        )
    )
    if name not in SCHEDULES:
        raise error("F005", "pipeline_parallel_schedule", given.place, flag=f"pipeline_parallel_schedule = {name}",
                    advice=f"known here: {', '.join(SCHEDULES)}")  # fmt: skip
    schedule = SCHEDULES[name]
    return {
        "tensor": tensor, "pipeline": pipeline, "context": context, "sequence": tensor > 1, "data": shard * replicate,
        "replicate": replicate if shard > 1 else 1, "zero": (2 if keeps and pipeline == 1 else 3) if shard > 1 else 0,
        "pipeline_schedule": schedule, "virtual": 2 if schedule in CHUNKED and pipeline > 1 else 1,
        "compile": bool(given.get("compile.enable", given.get("training.compile", False))),
    }  # fmt: skip


def _precision(given: Settings, data: int) -> dict[str, Any]:
    """Mixed precision is FSDP's: without it January 2025 computed in fp32."""
    compute = DTYPES.get(str(given.get("training.mixed_precision_param", "bfloat16")), "bf16")
    old = "training.batch_size" in given.given
    if old and data == 1 and _model_ranks(given) == 1:
        return {"compute": "fp32", "gradients": "fp32"}
    reduce = str(given.get("training.mixed_precision_reduce", "float32"))
    return {"compute": compute, "gradients": DTYPES.get(reduce, "fp32")}


def _rate(given: Settings, peak: float, steps: int, warmup: int) -> dict[str, Any]:
    factor = float(given.get("lr_scheduler.min_lr_factor", given.get("lr_scheduler.lr_min", 0.0)))
    style, ratio = str(given.get("lr_scheduler.decay_type", "linear")), given.get("lr_scheduler.decay_ratio")
    total = given.get("lr_scheduler.total_steps", steps)
    found: dict[str, Any] = {"peak": peak, "minimum": factor * peak, "warmup_steps": warmup, "decay_steps": total}
    if isinstance(ratio, int | float) and ratio < 1:
        tails = {"linear": "linear", "cosine": "cosine", "sqrt": "minus_sqrt"}
        return found | {"decay": "wsd", "wsd_decay": tails.get(style, "linear"), "wsd_decay_fraction": float(ratio)}
    return found | {"decay": style if style in ("linear", "cosine") else "linear"}
