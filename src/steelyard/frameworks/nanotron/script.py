"""A nanotron configuration (YAML) -> the values of a run file.

Source: nanotron `src/nanotron/config/`, at the end of 2024.
"""

from typing import Any

from steelyard.frameworks.settings import Settings, Table

NAME = "nanotron"
MODEL = "model.model_config"
RATE = "optimizer.learning_rate_scheduler"
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
# LlamaConfig's own: a key that is missing means Llama 7B
LLAMA = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
         "vocab_size": 32000, "max_position_embeddings": 2048}  # fmt: skip

TABLE = Table(
    translated={
        f"{MODEL}.num_hidden_layers": "model.num_layers", f"{MODEL}.hidden_size": "model.hidden_size",
        f"{MODEL}.intermediate_size": "model.ffn_hidden_size", f"{MODEL}.num_attention_heads":
        "model.num_attention_heads", f"{MODEL}.num_key_value_heads": "model.num_query_groups",
        f"{MODEL}.vocab_size": "model.vocab_size", f"{MODEL}.rope_theta": "model.rotary_base",
        f"{MODEL}.rms_norm_eps": "model.norm_eps", f"{MODEL}.hidden_act": "model.activation",
        f"{MODEL}.tie_word_embeddings": "model.tied_embeddings", "model.make_vocab_size_divisible_by":
        "model.vocab_multiple", "model.dtype": "precision.compute", "model.init_method.std": "model.init_std",
        "tokens.sequence_length": "model.seq_length", "tokens.micro_batch_size": "batch.micro_batch_size",
        "tokens.batch_accumulation_per_replica": "batch.accumulation", "tokens.train_steps": "length.steps",
        "tokens.val_check_interval": "evaluation.every_steps", "tokens.limit_val_batches": "evaluation.steps",
        "parallelism.dp": "parallel.data", "parallelism.tp": "parallel.tensor", "parallelism.pp": "parallel.pipeline",
        "parallelism.context_parallel_size": "parallel.context", "parallelism.tp_mode": "parallel.sequence",
        "parallelism.pp_engine": "parallel.pipeline_schedule", "parallelism.recompute_layer": "recompute.mode",
        "optimizer.zero_stage": "parallel.zero", "optimizer.accumulate_grad_in_fp32": "precision.gradients",
        "optimizer.clip_grad": "optimizer.clip_grad", "optimizer.weight_decay": "optimizer.weight_decay",
        "optimizer.optimizer_factory.name": "optimizer.name", "optimizer.optimizer_factory.adam_beta1":
        "optimizer.betas", "optimizer.optimizer_factory.adam_beta2": "optimizer.betas",
        "optimizer.optimizer_factory.adam_eps": "optimizer.eps", "optimizer.adam_beta1": "optimizer.betas",
        "optimizer.adam_beta2": "optimizer.betas", "optimizer.adam_eps": "optimizer.eps",
        f"{RATE}.learning_rate": "learning_rate.peak", f"{RATE}.min_decay_lr": "learning_rate.minimum",
        f"{RATE}.lr_decay_style": "learning_rate.decay", f"{RATE}.lr_warmup_steps": "learning_rate.warmup_steps",
        f"{RATE}.lr_decay_steps": "learning_rate.decay_steps", "general.seed": "seed",
        "checkpoints.checkpoint_interval": "checkpoint.every_steps",
    },
    irrelevant={
        "where files are": "general.project general.run general.step general.consumed_train_samples "
        "general.benchmark_csv_path checkpoints tokenizer lighteval s3_upload",
        "what is logged": "logging profiler general.ignore_sanity_checks",
        "how data are read": "data_stages tokens.limit_test_batches data",
        "which kernel computes the same": "model.ddp_bucket_cap_mb parallelism.tp_linear_async_communication "
        "parallelism.tp_recompute_allgather parallelism.expert_parallel_size "
        "optimizer.optimizer_factory.torch_adam_is_fused "
        f"optimizer.torch_adam_is_fused {MODEL}._attn_implementation {MODEL}.use_cache {MODEL}.pretraining_tp "
        f"{MODEL}.rope_interleaved",
        "of the tokenizer": f"{MODEL}.bos_token_id {MODEL}.eos_token_id {MODEL}.pad_token_id",
        "the sequence length of training rules": f"{MODEL}.max_position_embeddings",
        "it is what a Llama has": f"{MODEL}.is_llama_config {MODEL}.initializer_range",
        "linear and constant are all it has": f"{RATE}.lr_warmup_style {RATE}.lr_decay_starting_step",
    },
    refused={
        f"{MODEL}.rope_scaling": "rotary frequencies are not rescaled",
        f"{MODEL}.attention_bias": "write model.qkv_bias",
        "model.init_method": "weights start from a normal distribution",
    },
    harmless={
        f"{MODEL}.rope_scaling": [None], f"{MODEL}.attention_bias": [False],
        "optimizer.optimizer_factory": [None], "data_stages": [None],
    },
)  # fmt: skip


def is_mine(given: Settings) -> bool:
    return "parallelism.dp" in given.given and "tokens.micro_batch_size" in given.given


def table(given: Settings) -> Table:
    return TABLE


def world(given: Settings) -> int | None:
    return int(given.get("parallelism.dp", 1)) * _ranks(given)


def _ranks(given: Settings) -> int:
    sizes = [given.get(f"parallelism.{n}", 1) for n in ("tp", "pp", "context_parallel_size")]
    return int(sizes[0] * sizes[1] * sizes[2])


def values(given: Settings, world: int | None) -> dict[str, Any]:
    get = given.get
    tensor, pipeline = get("parallelism.tp", 1), get("parallelism.pp", 1)
    wide = bool(get("optimizer.accumulate_grad_in_fp32", True))
    compute = DTYPES.get(str(get("model.dtype", "bfloat16")), "bf16")
    multiple = get("model.make_vocab_size_divisible_by", 1) * tensor
    every = get("tokens.val_check_interval", -1)
    return {
        "seed": get("general.seed", 42),
        "model": {
            "kind": "llama", "num_layers": _llama(given, "num_hidden_layers"),
            "hidden_size": _llama(given, "hidden_size"), "ffn_hidden_size": _llama(given, "intermediate_size"),
            "num_attention_heads": _llama(given, "num_attention_heads"),
            "num_query_groups": get(f"{MODEL}.num_key_value_heads", _llama(given, "num_attention_heads")),
            "vocab_size": _llama(given, "vocab_size"), "vocab_multiple": multiple,
            "seq_length": get("tokens.sequence_length"), "max_position_embeddings": get("tokens.sequence_length"),
            "rotary_base": float(get(f"{MODEL}.rope_theta", 10000.0)),
            "norm_eps": float(get(f"{MODEL}.rms_norm_eps", 1e-6)),
            "tied_embeddings": bool(get(f"{MODEL}.tie_word_embeddings", False)), "padding_in_softmax": True,
            "init_std": float(get("model.init_method.std", 0.02)),
        },
        "parallel": {
            "tensor": tensor, "pipeline": pipeline, "context": get("parallelism.context_parallel_size", 1),
            "sequence": "REDUCE_SCATTER" in str(get("parallelism.tp_mode", "")) and tensor > 1,
            "pipeline_schedule": "1f1b" if get("parallelism.pp_engine") == "1f1b" else "gpipe",
            "zero": get("optimizer.zero_stage", 0),
        },
        "batch": {
            "micro_batch_size": get("tokens.micro_batch_size"),
            "accumulation": get("tokens.batch_accumulation_per_replica", 1), "loss_mean": "micro_batches",
        },
        "precision": {"compute": compute, "gradients": "fp32" if wide else compute},
        "recompute": {"mode": "full" if get("parallelism.recompute_layer") else "none"},
        "optimizer": {
            "betas": [_adam(given, "adam_beta1", 0.9), _adam(given, "adam_beta2", 0.95)],
            "eps": _adam(given, "adam_eps", 1e-8), "weight_decay": float(get("optimizer.weight_decay", 0.0)),
            "clip_grad": float(get("optimizer.clip_grad", 0.0)),
        },
        "learning_rate": _rate(given),
        "length": {"steps": get("tokens.train_steps")},
        "evaluation": {"every_steps": max(0, every), "steps": get("tokens.limit_val_batches", 0) if every > 0 else 0},
        "checkpoint": {"every_steps": max(0, get("checkpoints.checkpoint_interval", 0))},
        "engine": {"framework": "nanotron"},
    }  # fmt: skip


def _llama(given: Settings, key: str) -> Any:
    return given.get(f"{MODEL}.{key}", LLAMA[key])


def _adam(given: Settings, key: str, default: float) -> float:
    return float(given.get(f"optimizer.optimizer_factory.{key}", given.get(f"optimizer.{key}", default)))


def _rate(given: Settings) -> dict[str, Any]:
    """A missing minimum is the peak itself; the decay begins after the warm-up and takes the rest of the run."""
    peak = float(given.get(f"{RATE}.learning_rate", 1e-3))
    warmup, steps = given.get(f"{RATE}.lr_warmup_steps", 0), given.get("tokens.train_steps")
    length = given.get(f"{RATE}.lr_decay_steps", steps - warmup)
    start = given.get(f"{RATE}.lr_decay_starting_step", warmup)
    style = str(given.get(f"{RATE}.lr_decay_style", "linear"))
    minimum = given.get(f"{RATE}.min_decay_lr")
    found: dict[str, Any] = {"peak": peak, "minimum": peak if minimum is None else float(minimum),
                             "decay_steps": start + length}  # fmt: skip
    if warmup:
        found["warmup_steps"] = warmup
    if start > warmup:
        tails = {"linear": "linear", "cosine": "cosine", "1-sqrt": "minus_sqrt"}
        return found | {
            "decay": "wsd",
            "wsd_decay": tails.get(style, "linear"),
            "wsd_decay_fraction": length / (start + length),
        }
    return found | {"decay": style if style in ("linear", "cosine") else "linear"}
