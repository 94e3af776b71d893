"""The flags of Megatron-LM, 2020 to 2026, and what each means in a run file.

One table for everything that reads them: scripts, argument dumps in logs, records. A flag is `translated` (`key` is the
run-file key it decides, alone or with others), `irrelevant` to what a run computes and costs (`why`), or `refused`:
it changes the run in a way that a run file cannot say. A flag that is not listed is reported, never guessed at.
Source: Megatron-LM `arguments.py` at v2.0 (2020) to d98e8a64 (August 2026).
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

Kind = Literal["switch", "int", "float", "text", "list"]
Meaning = Literal["translated", "irrelevant", "refused"]


@dataclass(frozen=True)
class Flag:
    """`name` without dashes in front. `older` are names of the same flag in earlier versions. `default` is that of
    today; None where it depends on other flags. `until` is the last year that knows the flag, "" if it still exists."""

    name: str
    kind: Kind
    meaning: Meaning
    key: str = ""
    why: str = ""
    default: Any = None
    older: tuple[str, ...] = ()
    until: str = ""


def _translated(text: str) -> list[Flag]:
    """Rows `name kind default key`, `-` for no default, older names behind a `<`, the last year behind a `!`."""
    rows = []
    for line in text.strip().splitlines():
        name, kind, default, key, *more = line.split()
        older = tuple(word[1:] for word in more if word.startswith("<"))
        until = next((word[1:] for word in more if word.startswith("!")), "")
        rows.append(Flag(name, kind, "translated", key, "", _value(kind, default), older, until))  # type: ignore[arg-type]
    return rows


def _value(kind: str, default: str) -> Any:
    if kind == "switch":
        return False
    if default == "-":
        return None
    return {"int": int, "float": float}.get(kind, str)(default)


TRANSLATED = _translated("""
num-layers int - model.num_layers
hidden-size int - model.hidden_size
ffn-hidden-size int - model.ffn_hidden_size
num-attention-heads int - model.num_attention_heads
kv-channels int - model.head_dim
group-query-attention switch - model.num_query_groups
num-query-groups int 1 model.num_query_groups
seq-length int - model.seq_length
max-position-embeddings int - model.max_position_embeddings
position-embedding-type text learned_absolute model.position
use-rotary-position-embeddings switch - model.position !2024
rotary-percent float 1.0 model.rotary_fraction
rotary-base int 10000 model.rotary_base
normalization text LayerNorm model.norm
norm-epsilon float 1e-5 model.norm_eps <layernorm-epsilon
swiglu switch - model.activation
squared-relu switch - model.activation
openai-gelu switch - model.activation
quick-geglu switch - model.activation
disable-bias-linear switch - model.bias
add-qkv-bias switch - model.qkv_bias
qk-layernorm switch - model.qk_norm
untie-embeddings-and-output-weights switch - model.tied_embeddings
attention-dropout float 0.1 model.attention_dropout
hidden-dropout float 0.1 model.hidden_dropout
init-method-std float 0.02 model.init_std
vocab-size int - model.vocab_size
padded-vocab-size int - model.vocab_size
make-vocab-size-divisible-by int 128 model.vocab_multiple
tokenizer-type text GPT2BPETokenizer model.vocab_size
tensor-model-parallel-size int 1 parallel.tensor <model-parallel-size <intra-layer-model-parallel-size
sequence-parallel switch - parallel.sequence
context-parallel-size int 1 parallel.context
pipeline-model-parallel-size int 1 parallel.pipeline
num-layers-per-virtual-pipeline-stage int - parallel.virtual
num-virtual-stages-per-pipeline-rank int - parallel.virtual
decoder-first-pipeline-num-layers int - parallel.stages
decoder-last-pipeline-num-layers int - parallel.stages
account-for-embedding-in-pipeline-split switch - parallel.stages
account-for-loss-in-pipeline-split switch - parallel.stages
microbatch-group-size-per-virtual-pipeline-stage int - engine.microbatch_group <microbatch-group-size-per-vp-stage
use-distributed-optimizer switch - parallel.zero
num-distributed-optimizer-instances int 1 engine.optimizer_instances
use-megatron-fsdp switch - parallel.zero <use-custom-fsdp
data-parallel-sharding-strategy text no_shard parallel.zero
use-torch-fsdp2 switch - parallel.zero
micro-batch-size int - batch.micro_batch_size <batch-size
global-batch-size int - batch.global_batch_size
rampup-batch-size list - batch.ramp
calculate-per-token-loss switch - batch.loss_mean
bf16 switch - precision.compute
fp16 switch - precision.compute
accumulate-allreduce-grads-in-fp32 switch - precision.gradients
grad-reduce-in-bf16 switch - precision.gradients
loss-scale float - precision.loss_scale
initial-loss-scale float 4294967296 precision.loss_scale
min-loss-scale float 1.0 precision.loss_scale
loss-scale-window float 1000 precision.loss_scale
hysteresis int 2 precision.loss_scale
recompute-granularity text - recompute.mode
recompute-activations switch - recompute.mode
recompute-method text - recompute.every
recompute-num-layers int 1 recompute.every
recompute-modules list - recompute.modules
distribute-saved-activations switch - recompute.shard <distribute-checkpointed-activations
checkpoint-activations switch - recompute.mode !2022
checkpoint-num-layers int 1 recompute.every !2022
activations-checkpoint-method text - recompute.mode !2022
activations-checkpoint-num-layers int 1 recompute.every !2022
optimizer text adam optimizer.name
adam-beta1 float 0.9 optimizer.betas
adam-beta2 float 0.999 optimizer.betas
adam-eps float 1e-8 optimizer.eps
weight-decay float 0.01 optimizer.weight_decay
clip-grad float 1.0 optimizer.clip_grad
lr float - learning_rate.peak
min-lr float 0.0 learning_rate.minimum
lr-decay-style text linear learning_rate.decay
lr-decay-iters int - learning_rate.decay_steps
lr-decay-samples int - learning_rate.decay_samples
lr-warmup-fraction float - learning_rate.warmup_fraction <warmup
lr-warmup-iters int 0 learning_rate.warmup_steps
lr-warmup-samples int 0 learning_rate.warmup_samples
lr-wsd-decay-style text exponential learning_rate.wsd_decay
train-iters int - length.steps
train-samples int - length.samples
seed int 1234 seed
data-path list - data.train
split text - data.split
eod-mask-loss switch - data.mask_loss_at_eod
reset-position-ids switch - data.reset_positions
reset-attention-mask switch - data.reset_attention
eval-interval int 1000 evaluation.every_steps
eval-iters int 100 evaluation.steps
save-interval int - checkpoint.every_steps
transformer-impl text transformer_engine engine.implementation
attention-backend text auto engine.attention
use-flash-attn switch - engine.attention
deterministic-mode switch - engine.deterministic
fp32-residual-connection switch - engine.fp32_residual
cross-entropy-loss-fusion switch - engine.cross_entropy
cross-entropy-fusion-impl text native engine.cross_entropy
no-create-attention-mask-in-dataloader switch - engine.mask_in_loader
use-precision-aware-optimizer switch - engine.master_dtype
main-grads-dtype text fp32 precision.gradients
main-params-dtype text fp32 engine.master_dtype
exp-avg-dtype text fp32 engine.moment_dtypes
exp-avg-sq-dtype text fp32 engine.moment_dtypes
fp8-format text - engine.fp8
fp8-param-gather switch - engine.fp8_parameters
tp-comm-overlap switch - engine.overlap_buffers
deepspeed switch - engine.framework
zero-stage float 1.0 parallel.zero
partition-activations switch - recompute.shard
""")

# Names that only versions of 2020 to 2022 know: they date a script.
DATED = ("DDP-impl", "data-impl", "checkpoint-activations", "checkpoint-num-layers", "activations-checkpoint-method",
         "activations-checkpoint-num-layers", "scaled-upper-triang-masked-softmax-fusion", "model-parallel-size",
         "intra-layer-model-parallel-size", "scaled-masked-softmax-fusion")  # fmt: skip

IRRELEVANT = {
    "where files are": "deepspeed-config "
    "load save data-cache-path vocab-file merge-file tokenizer-model tensorboard-dir wandb-project "
    "wandb-exp-name wandb-save-dir pretrained-checkpoint ckpt-step data-args-path train-data-path valid-data-path "
    "test-data-path object-storage-cache-path tp-comm-overlap-cfg memory-snapshot-path",
    "what is logged": "log-interval log-memory-to-tensorboard log-num-zeros-in-grad log-params-norm log-throughput "
    "log-timers-to-tensorboard log-validation-ppl-to-tensorboard log-progress log-loss-scale-to-tensorboard "
    "log-learning-rate-to-tensorboard log-batch-size-to-tensorboard log-world-size-to-tensorboard log-straggler "
    "log-memory-interval log-device-memory-used log-energy log-max-attention-logit timing-log-level timing-log-option "
    "tensorboard-log-interval tensorboard-queue-size no-barrier-with-level-1-timing profile profile-step-start "
    "profile-step-end profile-ranks use-pytorch-profiler record-memory-history test-mode",
    "how checkpoints are written": "ckpt-format async-save ckpt-assume-constant-structure ckpt-fully-parallel-load "
    "no-ckpt-fully-parallel-save dist-ckpt-strictness dist-ckpt-optim-fully-reshardable use-persistent-ckpt-worker "
    "verify-integrity auto-detect-ckpt-format no-save-optim no-save-rng no-load-optim no-load-rng finetune "
    "use-checkpoint-args override-opt-param-scheduler "
    "exit-on-missing-checkpoint use-checkpoint-opt-param-scheduler "
    "override-lr-scheduler use-checkpoint-lr-scheduler async-strategy ckpt-fully-parallel-save "
    "non-persistent-save-interval non-persistent-ckpt-type",
    "when the process ends": "exit-interval exit-duration-in-mins exit-signal-handler adlr-autoresume "
    "adlr-autoresume-interval manual-gc manual-gc-interval distributed-timeout-minutes check-for-nan-in-loss-and-grad "
    "no-check-for-nan-in-loss-and-grad rerun-mode error-injection-rate iterations-to-skip",
    "how ranks talk": "distributed-backend overlap-grad-reduce overlap-param-gather ddp-bucket-size ddp-num-buckets "
    "ddp-average-in-collective ddp-pad-buckets-for-high-nccl-busbw no-align-param-gather "
    "overlap-param-gather-with-optimizer-step tp-comm-bulk-dgrad tp-comm-bulk-wgrad "
    "overlap-p2p-communication-warmup-flush no-overlap-p2p-communication overlap-p2p-communication "
    "use-tp-pp-dp-mapping use-sharp nccl-communicator-config-path local-rank lazy-mpu-init "
    "use-ring-exchange-p2p scatter-gather-tensors-in-pipeline no-scatter-gather-tensors-in-pipeline cp-comm-type "
    "hierarchical-context-parallel-sizes "
    "no-async-tensor-model-parallel-allreduce async-tensor-model-parallel-allreduce "
    "use-contiguous-buffers-in-local-ddp "
    "no-contiguous-buffers-in-local-ddp high-priority-stream-groups disable-gloo-process-groups DDP-impl "
    "delay-wgrad-compute defer-embedding-wgrad-compute wgrad-deferral-limit use-nccl-ub",
    "how data are read": "data-impl num-workers mmap-warmup no-mmap-bin-files mock-data dataloader-type "
    "num-dataset-builder-threads dataloader-fast-cache-load append-eod tiktoken-pattern trust-remote-code",
    "which kernel computes the same": "no-gradient-accumulation-fusion gradient-accumulation-fusion "
    "no-masked-softmax-fusion masked-softmax-fusion no-bias-gelu-fusion bias-gelu-fusion no-bias-swiglu-fusion "
    "no-bias-dropout-fusion bias-dropout-fusion no-rope-fusion no-persist-layer-norm "
    "scaled-upper-triang-masked-softmax-fusion scaled-masked-softmax-fusion apply-query-key-layer-scaling "
    "no-query-key-layer-scaling attention-softmax-in-fp32 use-mcore-models use-legacy-models disable-jit-fuser "
    "cuda-graph-impl enable-cuda-graph external-cuda-graph use-cpu-initialization no-initialization "
    "fp8-recipe fp8-margin fp8-interval fp8-amax-history-len fp8-amax-compute-algo first-last-layers-bf16 "
    "batch-invariant-mode spec te-rng-tracker legacy-tokenizer tokenizer-metadata attention-dropout-fusion",
    "another rate for some tensors": "decoupled-lr decoupled-min-lr lr-wsd-decay-iters lr-wsd-decay-samples "
    "lr-warmup-init start-weight-decay end-weight-decay weight-decay-incr-style head-lr-mult",
    "for models without experts": "expert-model-parallel-size expert-tensor-parallel-size",
}

REFUSED = {
    "num-experts": "mixtures of experts cannot be planned",
    "multi-latent-attention": "latent attention cannot be planned",
    "mtp-num-layers": "multi-token prediction cannot be planned",
    "pipeline-model-parallel-layout": "write the layers of each stage as parallel.stages",
    "cpu-offloading-num-layers": "offloaded activations cannot be planned",
    "optimizer-cpu-offload": "an offloaded optimizer cannot be planned here",
    "fine-grained-activation-offloading": "offloaded activations cannot be planned",
    "heterogeneous-layers-config-path": "layers that differ cannot be planned",
    "attention-output-gate": "gated attention output cannot be planned",
    "window-size": "sliding-window attention cannot be planned",
}
# switches among the irrelevant and refused flags are told apart by what follows them, not by this table


@cache
def table() -> dict[str, Flag]:
    """Every known flag under every name it ever had, with `_` and `-` alike in favour of `-`."""
    rows = list(TRANSLATED)
    rows += [Flag(n, "text", "irrelevant", why=why) for why, names in IRRELEVANT.items() for n in names.split()]
    rows += [Flag(name, "text", "refused", why=why) for name, why in REFUSED.items()]
    rows = [replace(row, until="2022") if row.name in DATED else row for row in rows]
    return {plain(name): row for row in rows for name in (row.name, *row.older)}


def plain(name: str) -> str:
    """A flag's name as the table has it: no dashes in front, `-` for `_`."""
    return name.lstrip("-").replace("_", "-")


def find(name: str) -> Flag | None:
    return table().get(plain(name))
