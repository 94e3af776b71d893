"""A GPT-NeoX configuration (YAML) -> the values of a run file.

Source: GPT-NeoX `megatron/neox_arguments/neox_args.py`, `megatron/model/transformer.py` at fc74a0c1 (November 2024).
"""

from typing import Any

from steelyard.frameworks.settings import Settings, Table
from steelyard.spec.errors import error

NAME = "GPT-NeoX"
MARKS = ("num_layers", "hidden_size", "pipe_parallel_size", "model_parallel_size", "train_micro_batch_size_per_gpu")
SIZES = {"GPT2BPETokenizer": 50257}
POSITIONS = {"rotary": "rotary", "learned": "learned", "alibi": "alibi", "none": "none"}
ACTIVATIONS = {"gelu": "gelu", "relu": "relu", "swiglu": "swiglu", "geglu": "geglu"}
ALIASES = {"batch_size": "train_micro_batch_size_per_gpu", "clip_grad": "gradient_clipping",
           "fp16.fp16": "fp16.enabled"}  # fmt: skip

TABLE = Table(
    translated={
        "num_layers": "model.num_layers", "hidden_size": "model.hidden_size", "intermediate_size":
        "model.ffn_hidden_size", "num_attention_heads": "model.num_attention_heads", "num_kv_heads":
        "model.num_query_groups", "seq_length": "model.seq_length", "max_position_embeddings":
        "model.max_position_embeddings", "pos_emb": "model.position", "rotary_pct": "model.rotary_fraction",
        "rotary_emb_base": "model.rotary_base", "norm": "model.norm", "layernorm_epsilon": "model.norm_eps",
        "rms_norm_epsilon": "model.norm_eps", "activation": "model.activation", "no_weight_tying":
        "model.tied_embeddings", "use_bias_in_attn_linear": "model.bias", "use_bias_in_mlp": "model.bias",
        "hidden_dropout": "model.hidden_dropout", "attention_dropout": "model.attention_dropout", "init_method_std":
        "model.init_std", "make_vocab_size_divisible_by": "model.vocab_multiple", "tokenizer_type": "model.vocab_size",
        "padded_vocab_size": "model.vocab_size", "model_parallel_size": "parallel.tensor", "pipe_parallel_size":
        "parallel.pipeline", "sequence_parallel": "parallel.sequence", "context_parallel_size": "parallel.context",
        "zero_optimization.stage": "parallel.zero", "train_batch_size": "batch.global_batch_size",
        "train_micro_batch_size_per_gpu": "batch.micro_batch_size", "gradient_accumulation_steps":
        "batch.accumulation", "precision": "precision.compute", "fp16.enabled": "precision.compute", "bf16.enabled":
        "precision.compute", "fp16.loss_scale": "precision.loss_scale", "fp16.initial_scale_power":
        "precision.loss_scale", "fp16.loss_scale_window": "precision.loss_scale", "fp16.hysteresis":
        "precision.loss_scale", "fp16.min_loss_scale": "precision.loss_scale", "fp32_allreduce": "precision.gradients",
        "checkpoint_activations": "recompute.mode", "checkpoint_num_layers": "recompute.every",
        "partition_activations": "recompute.shard", "optimizer.type": "optimizer.name", "optimizer.params.lr":
        "learning_rate.peak", "lr": "learning_rate.peak", "optimizer.params.betas": "optimizer.betas",
        "optimizer.params.eps": "optimizer.eps", "weight_decay": "optimizer.weight_decay", "gradient_clipping":
        "optimizer.clip_grad", "lr_decay_style": "learning_rate.decay", "min_lr": "learning_rate.minimum", "warmup":
        "learning_rate.warmup_fraction", "lr_decay_iters": "learning_rate.decay_steps", "train_iters": "length.steps",
        "data_path": "data.train", "train_data_paths": "data.train", "train_data_weights": "data.train",
        "valid_data_paths": "data.validation", "valid_data_weights": "data.validation", "test_data_paths": "data.test",
        "test_data_weights": "data.test", "split": "data.split", "eval_interval": "evaluation.every_steps",
        "eval_iters": "evaluation.steps", "checkpoint_factor": "checkpoint.every_steps", "save_interval":
        "checkpoint.every_steps", "seed": "seed", "global_num_gpus": "parallel.data",
    },
    irrelevant={
        "where files are": "vocab_file merge_file save load checkpoint hostfile log_dir tensorboard_dir",
        "what is logged": "log_interval steps_per_print keep_last_n_checkpoints wall_clock_breakdown use_wandb wandb "
        "tensorboard log tee_log flops_profiler comms_logger checkpoint_scale extra_save_iters print_stats",
        "how ranks talk": "distributed_backend zero_optimization launcher deepspeed_mpi deepspeed_slurm use_srun "
        "include exclude num_nodes num_gpus master_addr master_port allreduce_bucket_size detect_nvlink_pairs "
        "communication_data_type prescale_gradients gradient_predivide",
        "which kernel computes the same": "scaled_upper_triang_masked_softmax_fusion scaled_masked_softmax_fusion "
        "bias_gelu_fusion bias_dropout_fusion rope_fusion layernorm_fusion rmsnorm_fusion attention_softmax_in_fp32 "
        "apply_query_key_layer_scaling synchronize_each_layer contiguous_checkpointing use_flashattn "
        "rotary_save_freqs_buffer",
        "how data are read": "data_impl num_workers mmap_warmup dataset_impl",
        "it is the default of Megatron's layout": "output_layer_parallelism pipe_partition_method",
        "it does nothing by itself": "deepspeed_activation_checkpointing activation_checkpointing deepspeed "
        "deepspeed_extra_args autotuning_run fp16 bf16 short_seq_prob user_script text_gen_type temperature top_p "
        "top_k "
        "maximum_tokens recompute sample_input_file sample_output_file",
    },
    refused={
        "gpt_j_residual": "attention and MLP stand one after the other",
        "gpt_j_tied": "attention and MLP stand one after the other",
        "init_method": "weights start from a normal distribution",
        "output_layer_init_method": "output layers start scaled by the depth",
        "attention_config": "only full causal attention is known here",
        "mlp_type": "its width rule changed over the years: give activation and intermediate_size",
        "sliding_window_width": "sliding-window attention cannot be planned",
        "zero_optimization.offload_optimizer": "an offloaded optimizer cannot be planned here",
        "zero_optimization.cpu_offload": "an offloaded optimizer cannot be planned here",
        "checkpoint_in_cpu": "offloaded activations cannot be planned",
        "curriculum_learning": "the sequence length does not grow",
        "moe_num_experts": "mixtures of experts cannot be planned",
        "train_epochs": "a length in epochs depends on the data: give train_iters",
        "finetune": "the run starts from new weights",
        "rotary_ndims": "give rotary_pct",
    },
    harmless={
        "gpt_j_residual": [False], "gpt_j_tied": [False], "init_method": ["normal"], "checkpoint_in_cpu": [False],
        "output_layer_init_method": ["scaled_normal"], "moe_num_experts": [0, 1], "finetune": [False],
        "zero_optimization.cpu_offload": [False], "attention_config": [None],
    },
)  # fmt: skip


def named(given: Settings) -> Settings:
    """Keys with underscores and under today's names."""
    plain = {key.replace("-", "_"): key for key in given.given}
    return Settings(
        given.place,
        {ALIASES.get(key, key): given.given[old] for key, old in plain.items()},
        {ALIASES.get(key, key): given.lines[old] for key, old in plain.items() if old in given.lines},
    )


def is_mine(given: Settings) -> bool:
    return sum(key in given.given for key in MARKS) >= 3


def table(given: Settings) -> Table:
    """Full attention in every layer is what is known here; it may be written out."""
    config = given.get("attention_config")
    full = isinstance(config, list) and all(
        isinstance(row, list)
        and row
        and set(map(str, row[0] if isinstance(row[0], list) else row[:1])) <= {"global", "flash"}
        for row in config
    )
    return Table(
        TABLE.translated,
        TABLE.irrelevant,
        TABLE.refused,
        {**TABLE.harmless, "attention_config": [config] if full else []},
    )


def values(given: Settings, world: int | None) -> dict[str, Any]:
    """Run-file values. Raises UserError F005, F007."""
    get = given.get
    tensor, pipeline = get("model_parallel_size", 1), max(1, get("pipe_parallel_size", 0))
    bias = bool(get("use_bias_in_attn_linear", True))
    fp16 = bool(get("fp16.enabled")) or get("precision") == "fp16"
    bf16 = bool(get("bf16.enabled")) or get("precision") == "bfloat16"
    compute = "bf16" if bf16 else "fp16" if fp16 else "fp32"
    return {
        "seed": get("seed", 1234),
        "model": _model(given, tensor, bias),
        "parallel": {
            "tensor": tensor, "pipeline": pipeline, "sequence": bool(get("sequence_parallel", False)) and tensor > 1,
            "context": get("context_parallel_size", 1), "zero": get("zero_optimization.stage", 0),
        },
        "batch": _batch(given) | {"loss_mean": "micro_batches"},
        "precision": {"compute": compute, "gradients": "fp32" if get("fp32_allreduce") or compute != "fp16" else "fp16"}
        | ({"loss_scale": _scale(given)} if compute == "fp16" else {}),
        "recompute": {"mode": "full" if get("checkpoint_activations") else "none"}
        | ({"every": get("checkpoint_num_layers", 1), "shard": bool(get("partition_activations", False))}
           if get("checkpoint_activations") else {}),
        "optimizer": {
            "betas": list(get("optimizer.params.betas", [0.9, 0.999])), "eps": float(get("optimizer.params.eps", 1e-8)),
            "weight_decay": float(get("weight_decay", 0.1)), "clip_grad": float(get("gradient_clipping", 1.0)),
        },
        "learning_rate": {
            "peak": float(get("optimizer.params.lr", get("lr", 0.001))), "minimum": float(get("min_lr", 0.0)),
            "decay": _known(given, "lr_decay_style", {n: n for n in ("linear", "cosine", "constant")}, "linear"),
            "warmup_fraction": float(get("warmup", 0.01)), "first_update": "zero",
            **({"decay_steps": get("lr_decay_iters")} if get("lr_decay_iters") else {}),
        },
        "length": {"steps": get("train_iters")} if get("train_iters") else {},
        "data": _data(given),
        "evaluation": {"every_steps": get("eval_interval", 1000), "steps": get("eval_iters", 100)},
        "checkpoint": {"every_steps": get("checkpoint_factor", get("save_interval", 0))},
        "engine": {"framework": "gpt_neox"},
    }  # fmt: skip


def _model(given: Settings, tensor: int, bias: bool) -> dict[str, Any]:
    get = given.get
    hidden = _needed(given, "hidden_size")
    activation = _known(given, "activation", ACTIVATIONS, "gelu")
    gated = activation in ("swiglu", "geglu")
    wide = get("intermediate_size", 4 * hidden)
    multiple = get("make_vocab_size_divisible_by", 128)
    size = get("padded_vocab_size") or SIZES.get(get("tokenizer_type", "GPT2BPETokenizer"))
    rms = get("norm", "layernorm") == "rmsnorm"
    return {
        "kind": "gpt2", "num_layers": _needed(given, "num_layers"), "hidden_size": hidden,
        "num_attention_heads": _needed(given, "num_attention_heads"),
        **({"num_query_groups": get("num_kv_heads")} if get("num_kv_heads") else {}),
        # a gate's width is a third of what is written, rounded up to 256
        "ffn_hidden_size": -(-wide // 3 // 256) * 256 if gated else wide,
        "seq_length": _needed(given, "seq_length"),
        "max_position_embeddings": get("max_position_embeddings", _needed(given, "seq_length")),
        "position": _known(given, "pos_emb", POSITIONS, "learned"),
        "rotary_fraction": float(get("rotary_pct", 1.0)), "rotary_base": float(get("rotary_emb_base", 10000)),
        "norm": _known(given, "norm", {"layernorm": "layernorm", "rmsnorm": "rmsnorm"}, "layernorm"),
        "norm_eps": float(get("rms_norm_epsilon", 1e-8) if rms else get("layernorm_epsilon", 1e-5)),
        "activation": activation, "bias": bias, "qkv_bias": bias,
        "tied_embeddings": not get("no_weight_tying", False),
        "hidden_dropout": float(get("hidden_dropout", 0.0)), "attention_dropout": float(get("attention_dropout", 0.0)),
        "init_std": float(get("init_method_std", 0.02)), "padding_in_softmax": True,
        "vocab_multiple": 1 if get("padded_vocab_size") else "megatron" if multiple == 128 else multiple * tensor,
        **({"vocab_size": size} if size else {}),
    }  # fmt: skip


def _batch(given: Settings) -> dict[str, Any]:
    """`train_batch_size` is global; with the micro-batch alone nothing is accumulated."""
    sizes = {
        "global_batch_size": given.get("train_batch_size"),
        "micro_batch_size": given.get("train_micro_batch_size_per_gpu"),
        "accumulation": given.get("gradient_accumulation_steps"),
    }
    said = {name: size for name, size in sizes.items() if size}
    return said | ({"accumulation": 1} if list(said) == ["micro_batch_size"] else {})


def _scale(given: Settings) -> dict[str, Any]:
    """DeepSpeed's, with DeepSpeed's defaults."""
    if given.get("fp16.loss_scale", 0):
        return {"static": float(given.get("fp16.loss_scale"))}
    return {
        "initial_power": given.get("fp16.initial_scale_power", 16), "window": given.get("fp16.loss_scale_window", 1000),
        "hysteresis": given.get("fp16.hysteresis", 2), "minimum": float(given.get("fp16.min_loss_scale", 1)),
        "rule": "deepspeed",
    }  # fmt: skip


def _data(given: Settings) -> dict[str, Any]:
    found: dict[str, Any] = {"split": str(given.get("split", "969, 30, 1")).replace(" ", "")}
    if path := given.get("data_path"):
        found["train"] = [path]
    for theirs, ours in (("train", "train"), ("valid", "validation"), ("test", "test")):
        paths, weights = given.get(f"{theirs}_data_paths"), given.get(f"{theirs}_data_weights")
        if paths:
            pairs = [[float(w), p] for w, p in zip(weights, paths, strict=False)] if weights else list(paths)
            found[ours] = pairs
    return found


def world(given: Settings) -> int | None:
    size = given.get("global_num_gpus")
    return size if isinstance(size, int) and size > 0 else None


def _needed(given: Settings, key: str) -> Any:
    if given.get(key) is None:
        raise error("F007", key, given.place, flag=key)
    return given.get(key)


def _known(given: Settings, key: str, words: dict[str, str], default: str) -> str:
    value = given.get(key, default)
    if value not in words:
        raise error("F005", key, given.where(key), flag=f"{key}: {value}", advice=f"known here: {', '.join(words)}")
    return words[value]
