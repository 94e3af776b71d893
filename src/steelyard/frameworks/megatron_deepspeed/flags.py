"""The flags that BigScience's and Microsoft's forks add to Megatron-LM's.

Dead flags are those that the forks read nowhere. Source: Megatron-DeepSpeed `megatron/arguments.py` at 8387ae17 (2023,
BigScience) and of 2024 (Microsoft), DeepSpeed `deepspeed/__init__.py`.
"""

from dataclasses import replace
from functools import cache

from steelyard.frameworks.megatron import flags as megatron
from steelyard.frameworks.megatron.flags import Flag, plain, translated

TRANSLATED = translated("""
pad-vocab-size-to int - model.vocab_size
embed-layernorm switch - model.embedding_norm
glu-activation text - model.activation
num-key-value-heads int - model.num_query_groups
train-tokens int - length.tokens
lr-decay-tokens int - learning_rate.decay_samples
lr-warmup-tokens int - learning_rate.warmup_samples
tokenizer-name-or-path text - data.tokenizer
kill-switch-path text - stop.file
pp-partition-method text - parallel.stages
train-weighted-split-paths list - data.train
valid-weighted-split-paths list - data.validation
test-weighted-split-paths list - data.test
deepspeed-activation-checkpointing switch - recompute.mode
ds-sequence-parallel-size int 1 parallel.context
""")

IRRELEVANT = {
    "dead: the fork reads it nowhere": "zero-reduce-scatter zero-contigious-gradients zero-reduce-bucket-size "
    "zero-allgather-bucket-size use-pin-memory memory-centric-tiled-linear tile-factor scattered-embeddings "
    "cpu_torch_adam split-transformers codecarbon-dir",
    "it sets the program's loggers": "log-level log-level-replica log-path log-optimizer-states-to-tensorboard "
    "deepspeed-monitor codecarbon",
    "how checkpoints are written": "universal-checkpoint load-tag no-load-lr-state reset-iteration "
    "checkpoint-validation-mode",
    "how activation memory is laid out": "contigious-checkpointing synchronize-each-layer profile-backward",
    "how ranks talk": "deepspeed_mpi deepscale deepscale_config no-pipeline-parallel "
    "sync-tp-duplicated-parameters create-moe-param-group force-ds-sequence-parallel ds-sequence-parallel-fpdt "
    "use-dist-loss repeated-dataloader",
    "how data are read": "valid-num-workers data-efficiency-curriculum-learning use-dataset-only "
    "train-idx-path train-desc-path train-doc-idx-path train-sample-idx-path train-shuffle-idx-path",
    "which kernel computes the same": "abort-on-unmet-fused-kernel-constraints use-flash-attn-v1 use-flash-attn-v2 "
    "use-flash-attn-triton use-flash-attn-builder disable-mem-efficient-ln use-fused-rmsnorm use-fused-sdpa "
    "no-scaled-init "
    "no-fused-rmsnorm use-fused-sdpa-with-recompute use-tutel",
    "for models without experts": "mlp-type topk noisy-gate-policy disable-moe-token-dropping",
}
REFUSED = {
    "use-bnb-optimizer": "8-bit Adam cannot be planned, and it adds an embedding norm",
    "checkpoint-in-cpu": "offloaded activations cannot be planned",
    "cpu-optimizer": "the fork always stops at it",
    "curriculum-learning": "the sequence length does not grow",
}
UNTRAINED = {
    "skip-train-iteration-range": ("no step is left out", ()),
    "loss-on-targets-only": ("the loss is over all tokens", ()),
    "reweight-loss-based-on-position-frequency": ("every position weighs the same", ()),
    "noise-density": ("this is next-token prediction", ()),
    "mean-noise-span-length": ("this is next-token prediction", ()),
    "train-weighted-split-paths-path": ("the data sets stand in another file: write them as data.train", ()),
    "valid-weighted-split-paths-path": ("the data sets stand in another file: write them as data.validation", ()),
    "test-weighted-split-paths-path": ("the data sets stand in another file: write them as data.test", ()),
    "eval-only": ("the run trains; any value of it, even False, is taken for true", ()),
    "inference": ("the run trains", ()),
    "remote-device": ("the model is built on its device", ("none",)),
    "prefix-lm": ("attention is causal", ()),
    "random-ltd": ("every layer sees every token", ()),
    "compression-training": ("weights are not compressed", ()),
    "custom-token-counting": ("all tokens count", ()),
    "kd": ("there is no teacher", ()),
    "teacher-forward": ("there is no teacher", ()),
}
TRAPS = {
    "embed-layernorm": "until March 2022 the fork gave the last pipeline stage an embedding norm of its own as well: "
    "the "
    "parameter count depends on the code's date",
    "train-tokens": "BigScience's fork reads --train-tokens nowhere; Microsoft's also ends the run after so many "
    "tokens",
    "contigious-checkpointing": "the flag is spelled so",
    "codecarbon-dir": "--codecarbon-dir writes nothing: its function returns at once",
    "glu-activation": "the width is not reduced for the gate: --ffn-hidden-size is that of each of the two projections",
}
# Megatron-LM's traps that the forks do not have: they follow both flags to this day.
OTHERS = ("rampup-batch-size", "checkpoint-activations")


@cache
def table() -> dict[str, Flag]:
    """Megatron-LM's flags and the forks' own."""
    own = [*TRANSLATED, *megatron.told(IRRELEVANT, REFUSED, UNTRAINED)]
    shared = {name: replace(row, trap="") if row.name in OTHERS else row for name, row in megatron.table().items()}
    return shared | megatron.named(own, TRAPS)


def find(name: str) -> Flag | None:
    return table().get(plain(name)) or megatron.family(name)


def added(name: str) -> bool:
    """Whether only the forks know a flag."""
    return plain(name) in table() and plain(name) not in megatron.table()
