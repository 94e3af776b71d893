"""Arguments of the Hugging Face Trainer (run_clm.py and its like) -> the values of a run file.

Source: transformers 4.38 to 5.24, `training_args.py`, `examples/pytorch/language-modeling/run_clm.py`.
"""

from collections.abc import Mapping
from typing import Any

from steelyard.frameworks.fates import Row, Told
from steelyard.frameworks.settings import Settings, Table
from steelyard.spec.errors import Problem, problem

NAME = "Hugging Face Trainer"
MARKS = ("per_device_train_batch_size", "model_name_or_path", "config_name", "output_dir")
DECAYS = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant",
          "inverse_sqrt": "inverse_sqrt"}  # fmt: skip

TABLE = Table(
    translated={
        "model_name_or_path": "model.kind", "config_name": "model.kind",
        "block_size": "model.seq_length", "max_seq_length": "model.seq_length",
        "per_device_train_batch_size": "batch.micro_batch_size",
        "per_gpu_train_batch_size": "batch.micro_batch_size",
        "gradient_accumulation_steps": "batch.accumulation", "max_steps": "length.steps",
        "learning_rate": "learning_rate.peak", "lr_scheduler_type": "learning_rate.decay", "warmup_steps":
        "learning_rate.warmup_steps", "warmup_ratio": "learning_rate.warmup_fraction", "weight_decay":
        "optimizer.weight_decay", "adam_beta1": "optimizer.betas", "adam_beta2": "optimizer.betas", "adam_epsilon":
        "optimizer.eps", "max_grad_norm": "optimizer.clip_grad", "fp16": "precision.compute",
        "bf16": "precision.compute",
        "gradient_checkpointing": "recompute.mode", "seed": "seed", "optim": "optimizer.name", "eval_steps":
        "evaluation.every_steps", "save_steps": "checkpoint.every_steps", "save_total_limit": "checkpoint.keep", "fsdp":
        "parallel.zero", "deepspeed": "parallel.zero", "torch_compile": "parallel.compile", "train_file": "data.train",
    },
    irrelevant={
        "where files are": "output_dir overwrite_output_dir cache_dir logging_dir run_name hub push_to_hub "
        "tokenizer_name "
        "resume_from_checkpoint use_fast_tokenizer model_revision token use_auth_token trust_remote_code",
        "what is logged": "logging report_to disable_tqdm log_level log_on_each_node skip_memory_metrics "
        "include_tokens_per_second include_num_input_tokens_seen prediction_loss_only",
        "how data are read": "dataset_name dataset_config_name dataset_config validation_file "
        "preprocessing_num_workers "
        "overwrite_cache dataloader data_seed streaming keep_linebreaks validation_split_percentage group_by_length "
        "remove_unused_columns",
        "when things are done": "do_train do_eval do_predict evaluation_strategy eval_strategy save_strategy "
        "load_best_model_at_end eval_delay per_device_eval_batch_size eval_accumulation_steps save_safetensors "
        "save_only_model metric_for_best_model greater_is_better auto_find_batch_size",
        "how ranks talk": "local_rank ddp sharded_ddp fsdp_config fsdp_transformer_layer_cls_to_wrap no_cuda use_cpu "
        "average_tokens_across_devices split_batches",
        "which kernel computes the same": "tf32 torch_dtype low_cpu_mem_usage attn_implementation fp16_opt_level "
        "half_precision "
        "fp16_backend bf16_full_eval fp16_full_eval gradient_checkpointing_kwargs full_determinism config_overrides "
        "torch_compile_backend torch_compile_mode",
    },
    refused={
        "num_train_epochs": "a length in epochs depends on the data: give length.steps",
        "max_train_samples": "the data are used whole",
        "label_smoothing_factor": "labels are not smoothed",
        "neftune_noise_alpha": "no noise is added",
        "model_type": "give the sizes of a new model as a config.json with config_name",
    },
    harmless={"label_smoothing_factor": ["0", "0.0"]},
)  # fmt: skip


def arguments(words: list[Told]) -> Settings:
    """`--name value` and `--name` as settings; a switch alone is true."""
    given: dict[str, Any] = {}
    for word in words:
        if word.text.startswith("--"):
            name, equals, value = word.text[2:].partition("=")
            given[name.replace("-", "_")] = value if equals else True
        elif given:
            given[list(given)[-1]] = word.text
    return Settings(words[0].place if words else "", given)


def rows(words: list[Told], settings: Settings) -> list[Row]:
    places = {
        word.text[2:].partition("=")[0].replace("-", "_"): word.place for word in words if word.text.startswith("--")
    }
    found = []
    for key, value in settings.given.items():
        row = TABLE.row(key, value, places.get(key, ""))
        length = key == "num_train_epochs" and settings.given.get("max_steps") not in (None, "-1")
        if length:
            row = Row(key, row.value, "irrelevant", "", "max_steps decides the length", row.place)
        found.append(Row(f"--{key}", row.value, row.fate, row.key, row.why, row.place))
    return found


def problems(words: list[Told]) -> list[Problem]:
    """Values that the run depends on and that only a run of the script would tell."""
    found, flag = [], ""
    for word in words:
        if word.text.startswith("--"):
            flag = word.text[2:].replace("-", "_")
        name = flag.partition("=")[0]
        if word.unknown and TABLE.translated.get(name, "data.train") not in ("data.train", "model.kind"):
            advice = f"give --env {word.variable}=..." if word.variable else "write it into the script"
            found.append(problem("F014", f"--{name}", word.place, flag=f"--{name}", value=word.text, why=word.unknown,
                                 advice=advice))  # fmt: skip
    return found


def is_mine(words: list[Told]) -> bool:
    names = {word.text[2:].partition("=")[0].replace("-", "_") for word in words if word.text.startswith("--")}
    return len(names & set(MARKS)) >= 2


def values(given: Settings, model: Mapping[str, Any], zero: int | None, world: int | None) -> dict[str, Any]:
    """`model` is the [model] table of its config.json; `zero` the stage of a DeepSpeed JSON."""

    def number(key: str, default: float) -> float:
        return float(given.get(key, default))

    def count(key: str, default: int) -> int:
        return int(given.get(key, default))

    def on(key: str) -> bool:
        return str(given.get(key, "False")).lower() in ("true", "1")

    compute = "bf16" if on("bf16") else "fp16" if on("fp16") else "fp32"
    fsdp = str(given.get("fsdp", ""))
    stage = 3 if "full_shard" in fsdp or "hybrid" in fsdp else 2 if "shard_grad_op" in fsdp else 0
    steps, micro = count("max_steps", -1), count("per_device_train_batch_size", count("per_gpu_train_batch_size", 8))
    warmup = count("warmup_steps", 0)
    style = str(given.get("lr_scheduler_type", "linear"))
    sequence = count("block_size", count("max_seq_length", model.get("seq_length", 1024)))
    return {
        "seed": count("seed", 42),
        "model": {**model, "seq_length": sequence},
        "parallel": {"zero": zero if zero is not None else stage, "compile": on("torch_compile")},
        "batch": {"micro_batch_size": micro, "accumulation": count("gradient_accumulation_steps", 1)},
        "precision": {"compute": compute} | ({"loss_scale": {"initial_power": 16, "window": 2000, "hysteresis": 1}}
                                             if compute == "fp16" else {}),
        "recompute": {"mode": "full" if on("gradient_checkpointing") else "none"},
        "optimizer": {
            "betas": [number("adam_beta1", 0.9), number("adam_beta2", 0.999)], "eps": number("adam_epsilon", 1e-8),
            "weight_decay": number("weight_decay", 0.0), "clip_grad": number("max_grad_norm", 1.0),
        },
        "learning_rate": {
            "peak": number("learning_rate", 5e-5), "minimum": 0.0, "decay": DECAYS.get(style, "linear"),
            "first_update": "zero",
            **({"warmup_steps": warmup} if warmup else {"warmup_fraction": number("warmup_ratio", 0.0)}
               if number("warmup_ratio", 0.0) else {}),
        },
        **({"length": {"steps": steps}} if steps > 0 else {}),
        "data": {"train": [given.get("train_file")]} if given.get("train_file") else {},
        "evaluation": {"every_steps": count("eval_steps", 0) if number("eval_steps", 0) >= 1 else 0},
        "checkpoint": {"every_steps": count("save_steps", 500) if number("save_steps", 500) >= 1 else 0},
        "engine": {"framework": "huggingface"},
    }  # fmt: skip
