"""LiBai's configuration keys and what each means in a run file.

Source: LiBai `configs/common/{train,optim}.py`, `configs/common/models/{gpt,graph}.py`, `libai/engine/default.py` at
9dcbe3b2 (2024). LiBai itself adds a key that it does not know without a word; here such a key is refused.
"""

from typing import Any

from steelyard.frameworks.fates import Row
from steelyard.frameworks.libai.config import KEYS

# What the common files set, which `configs/gpt2_pretrain.py` and its like begin from.
DEFAULTS: dict[str, Any] = {
    "train.train_micro_batch_size": 32, "train.train_iter": 10000, "train.train_epoch": 0, "train.warmup_ratio": 0.0,
    "train.seed": 1234, "train.amp.enabled": False, "train.activation_checkpoint.enabled": False,
    "train.zero_optimization.enabled": False, "train.zero_optimization.stage": 1,
    "train.dist.tensor_parallel_size": 1, "train.dist.pipeline_parallel_size": 1,
    "train.checkpointer.period": 5000, "train.checkpointer.max_to_keep": 100,
    "train.evaluation.enabled": True, "train.evaluation.eval_period": 5000, "train.evaluation.eval_iter": 100000,
    "train.scheduler.alpha": 0.01, "train.scheduler.warmup_factor": 0.001, "train.input_placement_device": "cuda",
    "optim.lr": 1e-4, "optim.weight_decay": 0.01, "optim.betas": (0.9, 0.999), "optim.eps": 1e-8,
    "optim.params.clip_grad_max_norm": 1.0,
    "model.cfg.hidden_layers": 6, "model.cfg.vocab_size": 50257, "model.cfg.hidden_size": 384,
    "model.cfg.ffn_hidden_size": 1536, "model.cfg.num_attention_heads": 12, "model.cfg.max_seq_length": 1024,
    "model.cfg.embedding_dropout_prob": 0.0, "model.cfg.attention_dropout_prob": 0.0,
    "model.cfg.output_dropout_prob": 0.0, "model.cfg.layernorm_epsilon": 1e-5, "model.cfg.initializer_range": 0.02,
    "graph.enabled": True,
}  # fmt: skip

TRANSLATED: dict[str, str] = {
    **{key: ours for key, (ours, _) in KEYS.items()},
    "train.amp.enabled": "precision.compute",
    "train.activation_checkpoint.enabled": "recompute.mode",
    "train.zero_optimization.enabled": "parallel.zero",
    "train.zero_optimization.stage": "parallel.zero",
    "train.input_placement_device": "engine.inputs_on_device",
    "train.dist.custom_pipeline_stage_id": "parallel.stages",
    "train.checkpointer.period": "checkpoint.every_steps",
    "train.checkpointer.max_to_keep": "checkpoint.keep",
    "train.evaluation.enabled": "evaluation.every_steps",
    "train.evaluation.eval_period": "evaluation.every_steps",
    "train.evaluation.eval_iter": "evaluation.steps",
    "train.scheduler.alpha": "learning_rate.minimum",
    "optim.betas": "optimizer.betas",
    "optim.params.clip_grad_max_norm": "optimizer.clip_grad",
    "dataloader.train.dataset[0].data_prefix": "data.train",
    "dataloader.train.splits": "data.split",
}

IRRELEVANT = {
    "where files are": "train.output_dir train.load_weight tokenization. dataloader.train.dataset[0].indexed_dataset "
    "train.resume",
    "what is logged": "train.log_period train.evaluation.evaluator train.evaluation.eval_metric "
    "train.evaluation.eval_mode",
    "dead: nothing reads it": "train.consumed_train_samples train.consumed_valid_samples train.train_samples "
    "train.start_iter",
    "how ranks talk": "train.nccl_fusion train.rdma_enabled train.dist.num_nodes train.dist.num_gpus_per_node "
    "train.dist.device_type",
    "LiBai works it out from the world": "train.dist.pipeline_num_layers train.dist.actual_pipeline_stage_id "
    "train.dist.auto_pipeline_stage_id train.test_micro_batch_size",
    "which kernel computes the same": "graph.debug graph.auto_parallel graph.global_mode model.cfg.bias_gelu_fusion "
    "model.cfg.bias_dropout_fusion model.cfg.apply_query_key_layer_scaling model.cfg.amp_enabled "
    "model.cfg.use_scaled_init_for_output_weights model.cfg.multihead_attn_fusion",
    "how data are read": "dataloader.",
    "it is AdamW's own": "optim.do_bias_correction optim.params.clip_grad_norm_type "
    "optim.params.weight_decay_norm optim.params.weight_decay_bias optim.params.base_lr optim.params.overrides "
    "train.scheduler.warmup_method train.scheduler.max_iter train.scheduler.warmup_iter",
    "it has no effect by itself": "train.checkpointer.save_model_after_n_epoch train.evaluation.eval_after_n_epoch "
    "model.cfg.scale_mask_softmax_fusion graph.enabled model.cfg.apply_residual_post_layernorm train.train_epoch "
    "train.scheduler.warmup_factor model.cfg.embedding_dropout_prob",
}

# the one class of each that a run file can say
CLASSES = {"train.scheduler._target_": "WarmupCosineLR", "optim._target_": "AdamW"}
# key -> (value that is harmless, why any other is refused)
CONDITIONS: dict[str, tuple[Any, str]] = {
    "model.cfg.scale_mask_softmax_fusion": (True, "without the fused mask LiBai's attention is not causal"),
    "graph.enabled": (True, "in eager mode LiBai ignores AMP, recomputation, ZeRO and pipeline stages"),
    "model.cfg.apply_residual_post_layernorm": (False, "the residual is taken before the norm"),
    "train.train_epoch": (0, "a length in epochs depends on the data: give train.train_iter"),
}


def row(key: str, value: Any, place: str, dropout: float) -> Row:
    """What becomes of one key. `dropout` is the output dropout, which the embedding's has to be equal to."""
    shown = str(value)
    if key == "model.cfg.embedding_dropout_prob" and value != dropout:
        why = f"hidden_dropout is one for the embedding and the layers, and those have {dropout:g}"
        return Row(key, shown, "refused", "", why, place)
    if key in CONDITIONS and value != CONDITIONS[key][0]:
        return Row(key, shown, "refused", "", CONDITIONS[key][1], place)
    if key.endswith("_target_"):
        if key in CLASSES and value != CLASSES[key]:
            return Row(key, shown, "refused", "", f"only {CLASSES[key]} is known here", place)
        return Row(key, shown, "irrelevant", "", "the class that reads the keys beside it", place)
    if key in TRANSLATED:
        return Row(key, shown, "translated", TRANSLATED[key], "", place)
    for why, names in IRRELEVANT.items():
        if any(key.startswith(name) for name in names.split()):
            return Row(key, shown, "irrelevant", "", why, place)
    return Row(key, shown, "refused", "", "no table here knows this key; LiBai adds it without a word", place)
