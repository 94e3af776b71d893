"""The flags of Megatron-LM, 2020 to 2026, and what each means in a run file.

One table for everything that reads them: scripts, argument dumps in logs, records. A flag is `translated` (`key` is the
run-file key it decides, alone or with others), `irrelevant` to what a run computes and costs (`why`), or `refused`:
it changes the run in a way that a run file cannot say. A flag that is not listed is reported, never guessed at.
Source: Megatron-LM `arguments.py` at v2.0 (2020) to d98e8a64 (August 2026).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

Kind = Literal["switch", "int", "float", "text", "list"]
Meaning = Literal["translated", "irrelevant", "refused"]


@dataclass(frozen=True)
class Flag:
    """`name` without dashes in front. `older` are names of the same flag in earlier versions. `default` is that of
    today; None where it depends on other flags. `until` is the last year that knows the flag, "" if it still exists.

    A refused flag that is `plannable` changes what is trained but no size, layout or cost, so a plan can be made.
    `harmless` are values with which a refused flag changes nothing. `trap` is what a user of the flag should know."""

    name: str
    kind: Kind
    meaning: Meaning
    key: str = ""
    why: str = ""
    default: Any = None
    older: tuple[str, ...] = ()
    until: str = ""
    plannable: bool = False
    harmless: tuple[str, ...] = ()
    trap: str = ""


def translated(text: str) -> list[Flag]:
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


TRANSLATED = translated("""
num-layers int - model.num_layers <encoder-num-layers
hidden-size int - model.hidden_size
ffn-hidden-size int - model.ffn_hidden_size
num-attention-heads int - model.num_attention_heads
kv-channels int - model.head_dim
group-query-attention switch - model.num_query_groups
num-query-groups int 1 model.num_query_groups
seq-length int - model.seq_length <encoder-seq-length
max-position-embeddings int - model.max_position_embeddings
position-embedding-type text learned_absolute model.position
use-rotary-position-embeddings switch - model.position !2024
no-position-embedding switch - model.position
rotary-percent float 1.0 model.rotary_fraction
rotary-base float 10000 model.rotary_base
normalization text LayerNorm model.norm
norm-epsilon float 1e-5 model.norm_eps <layernorm-epsilon
swiglu switch - model.activation
squared-relu switch - model.activation
openai-gelu switch - model.activation
no-bias-gelu-fusion switch - model.activation
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
min-loss-scale float 1.0 precision.loss_scale <min-scale
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
lr-wsd-decay-iters int - learning_rate.wsd_decay_fraction
lr-wsd-decay-samples int - learning_rate.wsd_decay_fraction
train-iters int - length.steps
train-samples int - length.samples
seed int 1234 seed
data-path list - data.train
train-data-path list - data.train
valid-data-path list - data.validation
test-data-path list - data.test
split text - data.split
vocab-file text - data.tokenizer
merge-file text - data.tokenizer
tokenizer-model text - data.tokenizer
eod-mask-loss switch - data.mask_loss_at_eod
reset-position-ids switch - data.reset_positions
reset-attention-mask switch - data.reset_attention
eval-interval int 1000 evaluation.every_steps
eval-iters int 100 evaluation.steps
save-interval int - checkpoint.every_steps <persistent-save-interval
exit-interval int - stop.step_multiple
exit-duration-in-mins float - stop.minutes
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
fp8-hybrid switch - engine.fp8 !2024
fp8-e4m3 switch - engine.fp8 !2024
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

# Of many flags the first words say what they are about; a whole name below goes before these.
FAMILIES = {
    "of mixtures of experts, which a dense model is not": "moe- expert- shared-expert",
    "of latent attention": "mla- q-lora kv-lora qk-head-dim qk-pos-emb-head-dim v-head-dim rotary-scaling-factor "
    "mscale",
    "of state-space models": "mamba-",
    "of other tasks than GPT pretraining": "rl- grpo- inference- retro- vision- bert- biencoder ict- dino- mask- "
    "retriever- "
    "indexer- block- titles- evidence- faiss- qa- recompute-vision swin- t5- decoder-seq decoder-num iter-per-epoch "
    "patch-dim image- num-classes img- num-channels class-fraction classes-fraction data-per-class short-seq "
    "sample-rate "
    "query- val-av- distill- export- langchain- hybrid-mtp",
    "what is logged": "log- tensorboard- wandb- otel- one-logger- enable-one-logger no-one-logger app-tag- no-log- "
    "mlflow- "
    "timing- profile- pytorch-profiler- nvtx- memory-snapshot nsys record-memory straggler- disable-straggler "
    "memory-profil report-",
    "how faults are found and survived": "inprocess- ft- fault-injector- flight-recorder- calc-ft enable-ft "
    "error-injection rerun- check-for- no-check-for- check-weight-hash disable-vp check-optimizer gpu-sniff adlr-",
    "how checkpoints are written": "ckpt- dist-ckpt- no-ckpt- non-persistent- async- save- no-save- no-load- "
    "replication "
    "auto-detect-ckpt use-checkpoint- use-mp-args use-dist-ckpt verify-integrity override-ckpt override-opt dist-",
    "how ranks talk": "tp-comm- nccl- overlap- no-overlap- ddp- megatron-fsdp-version distributed- sharp- use-sharp "
    "high-priority gloo- disable-gloo pipeline-model-parallel-comm local-rank",
    "which kernel computes the same": "no-rope-fusion cuda-graph te-",
    "of YaRN positions, which are refused by name": "yarn- mscale beta-fast beta-slow original-max-position",
    "of weight shards that are refused by name": "gtp-remat- gtp-weight-remat",
    "of an optimizer that is refused by name": "muon- soap- lion-",
}

IRRELEVANT = {
    "where files are": "deepspeed-config "
    "load save data-cache-path tensorboard-dir wandb-project wandb-entity "
    "wandb-exp-name wandb-save-dir pretrained-checkpoint ckpt-step "
    "object-storage-cache-path tp-comm-overlap-cfg memory-snapshot-path per-dataset-sequences-path "
    "yaml-cfg exp-name save-tokenizer-assets config-logger-dir aml-data-download-path metadata-path "
    "result-rejected-tracker-filename use-tokenizer-model-from-checkpoint-args hf-checkpoint",
    "what is logged": "log-interval log-memory-to-tensorboard log-num-zeros-in-grad log-params-norm log-throughput "
    "log-timers-to-tensorboard log-validation-ppl-to-tensorboard log-progress log-loss-scale-to-tensorboard "
    "log-learning-rate-to-tensorboard log-batch-size-to-tensorboard log-world-size-to-tensorboard log-straggler "
    "log-memory-interval log-device-memory-used log-energy log-max-attention-logit timing-log-level timing-log-option "
    "no-log-learnig-rate-to-tensorboard no-log-loss-scale-to-tensorboard "
    "tensorboard-log-interval tensorboard-queue-size no-barrier-with-level-1-timing barrier-with-L1-time profile "
    "profile-step-start straggler-ctrlr-port straggler-minmax-count disable-straggler-on-startup nvtx-ranges "
    "profile-step-end profile-ranks use-pytorch-profiler record-memory-history test-mode logging-level "
    "one-logger-project one-logger-run-name enable-one-logger no-one-logger "
    "app-tag-run-name app-tag-run-version otel-enabled otel-span-groups validation-set-names "
    "run-workload-inspector-server",
    "how checkpoints are written": "ckpt-format async-save ckpt-assume-constant-structure ckpt-fully-parallel-load "
    "no-ckpt-fully-parallel-save dist-ckpt-strictness dist-ckpt-optim-fully-reshardable use-persistent-ckpt-worker "
    "verify-integrity auto-detect-ckpt-format no-save-optim no-save-rng no-load-optim no-load-rng finetune "
    "use-checkpoint-args override-opt-param-scheduler use-dist-ckpt dist-ckpt-format "
    "exit-on-missing-checkpoint use-checkpoint-opt-param-scheduler use-mp-args-from-checkpoint-args "
    "override-lr-scheduler use-checkpoint-lr-scheduler async-strategy ckpt-fully-parallel-save "
    "non-persistent-save-interval non-persistent-ckpt-type non-persistent-global-ckpt-dir "
    "non-persistent-local-ckpt-dir "
    "save-retain-interval save-params-interval save-activations-interval save-wgrads-interval save-dgrads-interval "
    "ckpt-convert-format ckpt-convert-save ckpt-convert-update-legacy-dist-opt-format override-ckpt-iteration "
    "replication replication-jump replication-factor load-main-params-from-ckpt no-async-save "
    "distrib-optim-fully-reshardable-mem-efficient no-ckpt-assume-constant-structure",
    "when the process ends": "exit-signal-handler exit-signal adlr-autoresume exit-signal-handler-for-dataloader "
    "adlr-autoresume-interval manual-gc manual-gc-interval manual-gc-eval distributed-timeout-minutes "
    "check-for-nan-in-loss-and-grad distributed-timeout-seconds-after-init no-manual-gc-eval "
    "no-check-for-nan-in-loss-and-grad rerun-mode error-injection-rate error-injection-type check-for-large-grads "
    "check-for-spiky-loss enable-ft-package calc-ft-timeouts empty-unused-memory-level train-sync-interval "
    "gpu-sniff-test-interval check-weight-hash-across-dp-replicas-interval",
    "how ranks talk": "distributed-backend overlap-grad-reduce overlap-param-gather ddp-bucket-size ddp-num-buckets "
    "ddp-average-in-collective ddp-pad-buckets-for-high-nccl-busbw no-align-param-gather align-param-gather "
    "overlap-param-gather-with-optimizer-step tp-comm-bulk-dgrad tp-comm-bulk-wgrad tp-comm-split-ag tp-comm-split-rs "
    "overlap-p2p-communication-warmup-flush no-overlap-p2p-communication overlap-p2p-communication "
    "delay-grad-reduce delay-param-gather no-delay-grad-reduce overlap-dispatch-backward-with-experts "
    "use-tp-pp-dp-mapping use-sharp nccl-communicator-config-path local-rank lazy-mpu-init rank world-size "
    "use-ring-exchange-p2p scatter-gather-tensors-in-pipeline no-scatter-gather-tensors-in-pipeline cp-comm-type "
    "hierarchical-context-parallel-sizes master-addr master-port node-rank rdzv-endpoint nccl-ub "
    "no-async-tensor-model-parallel-allreduce async-tensor-model-parallel-allreduce "
    "use-contiguous-buffers-in-local-ddp sharp-enabled-group tp-comm-bootstrap-backend tp-comm-overlap-ag "
    "tp-comm-overlap-rs tp-comm-overlap-rs-dgrad pipeline-model-parallel-comm-backend no-gradient-reduce-div-fusion "
    "no-contiguous-buffers-in-local-ddp high-priority-stream-groups disable-gloo-process-groups "
    "enable-gloo-process-groups DDP-impl fsdp-double-buffer suggested-communication-unit-size megatron-fsdp-version "
    "delay-wgrad-compute defer-embedding-wgrad-compute wgrad-deferral-limit use-nccl-ub batch-p2p-comm "
    "create-all-gather-group disable-symmetric-registration tp-only-amax-red "
    "keep-fp8-weight-transpose-cache ddp-reduce-scatter-with-fp32-accumulation",
    "how data are read": "data-impl use-one-sent-docs num-bucket-build-workers use-hf-tokenizer "
    "tokenizer-prompt-format sft-tokenizer-prompt-format patch-tokenizer-type fim-rate fim-spm-rate fim-split-sample "
    "fim-fragment-rate fim-no-prefix dynamic-loss-scale num-workers mmap-warmup no-mmap-bin-files mock-data "
    "num-dataset-builder-threads dataloader-fast-cache-load append-eod tiktoken-pattern trust-remote-code "
    "dataloader-defer-npy-index-mmap enable-msc mid-level-dataset-surplus no-data-sharding data-sharding "
    "s3-cache-path tokenizer-special-tokens tiktoken-num-special-tokens tiktoken-special-tokens "
    "full-validation multiple-validation-sets allow-ambiguous-pad-tokens vocab-extra-ids",
    "which kernel computes the same": "no-gradient-accumulation-fusion gradient-accumulation-fusion "
    "no-masked-softmax-fusion masked-softmax-fusion bias-gelu-fusion no-bias-swiglu-fusion bias-swiglu-fusion "
    "no-bias-dropout-fusion bias-dropout-fusion no-rope-fusion no-persist-layer-norm apply-rope-fusion "
    "scaled-upper-triang-masked-softmax-fusion scaled-masked-softmax-fusion apply-query-key-layer-scaling "
    "no-query-key-layer-scaling attention-softmax-in-fp32 use-mcore-models use-legacy-models disable-jit-fuser "
    "cuda-graph-impl enable-cuda-graph external-cuda-graph use-cpu-initialization no-initialization "
    "perform-initialization optimizer-cuda-graph cuda-graph-scope cuda-graph-warmup-steps "
    "fp8-recipe fp8-margin fp8-interval fp8-amax-history-len fp8-amax-compute-algo first-last-layers-bf16 "
    "num-layers-at-start-in-bf16 num-layers-at-end-in-bf16 no-fp8-wgrad fp8-wgrad flash-attention-version "
    "batch-invariant-mode spec te-rng-tracker inference-rng-tracker legacy-tokenizer tokenizer-metadata "
    "attention-dropout-fusion onnx-safe use-te flash-decode enable-experimental fused-swiglu-mlp "
    "no-fp8-weight-transpose-cache reuse-grad-buf-for-mxfp8-param-ag fp4-param add-position-embedding add-bias-linear "
    "fused-padded-mla-attention bias-activation-fusion "
    "use-fused-weighted-squared-relu "
    "use-te-activation-func init-model-with-meta-device memory-efficient-layer-norm use-transformer-engine-op-fuser "
    "fp8-transpose-cache",
    "it has no effect without another flag": "mtp-loss-scaling-factor fp4-recipe linear-conv-kernel-dim ds-inference "
    "hidden-size-teacher num-layers-teacher num-attention-heads-teacher kd-alpha-ce kd-beta-ce kd-temp load-teacher "
    "decoupled-min-lr start-weight-decay end-weight-decay "
    "expert-model-parallel-size expert-tensor-parallel-size window-attn-skip-freq min-offloaded-tensor-size "
    "offload-modules optimizer-offload-fraction overlap-cpu-optimizer-d2h-h2d activation-offload-fraction "
    "eval-micro-batch-size eval-global-batch-size",
    "of other tasks than GPT pretraining": "mask-prob short-seq-prob decoder-seq-length no-bert-binary-head "
    "bert-no-binary-head encoder-tensor-model-parallel-size encoder-pipeline-model-parallel-size "
    "ict-head-size task epochs keep-last valid-data train-data inference inference-max-requests",
}

# What changes the network, its layout or its memory in a way that a run file cannot say.
REFUSED = {
    "num-experts": "mixtures of experts cannot be planned",
    "multi-latent-attention": "latent attention cannot be planned",
    "mtp-num-layers": "multi-token prediction cannot be planned",
    "pipeline-model-parallel-layout": "write the layers of each stage as parallel.stages",
    "pipeline-model-parallel-split-rank": "encoder and decoder models cannot be planned",
    "cpu-offloading-num-layers": "offloaded activations cannot be planned",
    "optimizer-cpu-offload": "an offloaded optimizer cannot be planned here",
    "fine-grained-activation-offloading": "offloaded activations cannot be planned",
    "heterogeneous-layers-config-path": "layers that differ cannot be planned",
    "heterogeneous-layers-config-encoded-json": "layers that differ cannot be planned",
    "attention-output-gate": "gated attention output cannot be planned",
    "window-size": "sliding-window attention cannot be planned",
    "hybrid-layer-pattern": "layers that differ cannot be planned",
    "hybrid-override-pattern": "layers that differ cannot be planned",
    "hybrid-attention-ratio": "layers that differ cannot be planned",
    "hybrid-mlp-ratio": "layers that differ cannot be planned",
    "is-hybrid-model": "layers that differ cannot be planned",
    "tensor-parallel-num-weight-shards": "weight shards over the tensor ranks cannot be planned",
    "no-pad-vocab-size": "write model.vocab_multiple = 1",
    "fp4-format": "fp4 cannot be planned",
    "hybrid-context-parallel": "context ranks of different sizes cannot be planned",
    "output-logit-dtype": "logits of another type cannot be planned",
    "outer-dp-sharding-strategy": "write parallel.replicate for hybrid sharding",
    "standalone-embedding-stage": "a stage without a layer cannot be planned",
    "num-unique-layers": "layers that share weights cannot be planned",
    "enable-zbh1-pipeline": "write parallel.pipeline_schedule",
    "enable-zbh1-exact-semantics": "write parallel.pipeline_schedule",
    "linear-attention-type": "linear attention cannot be planned",
    "experimental-attention-variant": "another attention cannot be planned",
    "lora-rank": "low-rank adapters cannot be planned",
}

# What changes what is learned, but no size, layout or cost: (why, values with which it changes nothing).
UNTRAINED = {
    "decoupled-lr": ("one learning rate holds for all tensors", ()),
    "head-lr-mult": ("one learning rate holds for all tensors", ("1.0", "1")),
    "lr-warmup-init": ("the warm-up starts from 0", ("0", "0.0")),
    "weight-decay-incr-style": ("the weight decay is constant", ("constant",)),
    "dataloader-type": ("samples come in Megatron's one shuffled order", ("single",)),
    "apply-residual-connection-post-layernorm": ("the residual is taken before the norm", ()),
    "apply-layernorm-1p": ("the norm's weight is not centred at 1", ()),
    "embedding-init-method-std": ("one standard deviation holds for all weights", ()),
    "init-method-xavier-uniform": ("weights start from a normal distribution", ()),
    "data-parallel-random-init": ("all data ranks start with the same weights", ()),
    "use-rope-scaling": ("rotary frequencies are not rescaled", ()),
    "rope-scaling-factor": ("rotary frequencies are not rescaled", ("1.0", "1")),
    "rotary-seq-len-interpolation-factor": ("rotary positions are not interpolated", ("1",)),
    "rotary-interleaved": ("rotary pairs are halves, not neighbours", ()),
    "no-rope-freq": ("every layer has positions", ()),
    "qk-l2-norm": ("write model.qk_norm for an RMS norm of queries and keys", ()),
    "softmax-type": ("the softmax has no sink", ("vanilla",)),
    "fp16-lm-cross-entropy": ("the loss is computed in fp32", ()),
    "fim-data": ("documents are read as they are", ()),
    "sft": ("this is pretraining", ()),
    "step-batch-size-schedule": ("write the ramp as batch.ramp", ()),
    "decrease-batch-size-if-needed": ("the global batch is the one that is asked for", ()),
    "data-args-path": ("the data sets stand in another file: write them as data.train", ()),
    "per-split-data-args-path": (
        "the data sets stand in another file: write data.train, data.validation, data.test",
        (),
    ),
    "use-mup": ("the maximal-update rules of initialisation and rate are not known here", ()),
    "mup-base-hidden-size": ("the maximal-update rules of initialisation and rate are not known here", ()),
    "dataloader-inter-document-masking": ("write data.reset_attention = true", ()),
    "iterations-to-skip": ("no step is left out", ()),
    "skip-train": ("the run trains", ()),
    "phase-transition-iterations": ("a run has one phase", ()),
    "start-eval-at-iter": ("evaluation begins with the first interval", ("0",)),
    "te-precision-config-file": ("the precision of single modules stands in another file", ()),
    "megatron-fsdp-main-params-dtype": ("master weights are fp32", ("fp32", "float32")),
    "megatron-fsdp-main-grads-dtype": ("write precision.gradients", ()),
    "megatron-fsdp-grad-comm-dtype": ("gradients are reduced in precision.gradients", ()),
    "torch-fsdp2-no-reshard-after-forward": ("write parallel.zero = 2", ()),
    "ddp-param-name-patterns-for-fp32-local-accumulation": ("all gradients have one dtype", ()),
    "glu-linear-offset": ("the gate has no offset", ("0", "0.0")),
    "activation-func-clamp-value": ("activations are not clamped", ("None",)),
    "param-sharing-style": ("layers do not share weights", ("grouped",)),
    "max-seqlen-per-dp-cp-rank": ("sequences have one length", ()),
    "fake-process-group": ("the run trains on all its ranks", ()),
    "sgd-momentum": ("the optimizer is AdamW", ("0.9",)),
    "decoupled-weight-decay": ("the weight decay is decoupled", ("true", "True", "1")),
    "no-decoupled-weight-decay": ("the weight decay is decoupled", ()),
    "no-weight-decay-cond-type": ("norms and biases are not decayed, everything else is", ()),
}

# What a user of a flag should know, whatever it is translated into.
TRAPS = {
    "rampup-batch-size": "Megatron-LM of 2026 accepts --rampup-batch-size and ignores it; earlier versions follow it",
    "checkpoint-activations": "Megatron-LM since 2022 stops at --checkpoint-activations: --recompute-granularity is "
    "its "
    "name now",
    "zero-stage": "--zero-stage only decides how the model is built; the stage that works stands in DeepSpeed's JSON",
    "finetune": "--finetune starts the count of steps and the data anew from loaded weights",
}


@cache
def table() -> dict[str, Flag]:
    """Every known flag under every name it ever had, with `_` and `-` alike in favour of `-`."""
    return named([*TRANSLATED, *told(IRRELEVANT, REFUSED, UNTRAINED)])


def told(
    irrelevant: Mapping[str, str], refused: Mapping[str, str], untrained: Mapping[str, tuple[str, tuple[str, ...]]]
) -> list[Flag]:
    """Rows of the flags that are not translated."""
    rows = [Flag(name, "text", "irrelevant", why=why) for why, names in irrelevant.items() for name in names.split()]
    rows += [Flag(n, "text", "refused", why=why, harmless=ABSENT.get(n, ())) for n, why in refused.items()]
    rows += [Flag(n, "text", "refused", why=why, plannable=True, harmless=h) for n, (why, h) in untrained.items()]
    return rows


# values of refused flags that ask for nothing; one expert or one weight shard is the whole
NOTHING = ("0", "0.0", "None", "none")
ABSENT = {
    **dict.fromkeys(("num-experts", "tensor-parallel-num-weight-shards"), ("1", *NOTHING)),
    **dict.fromkeys(
        ("mtp-num-layers", "hybrid-attention-ratio", "hybrid-mlp-ratio", "cpu-offloading-num-layers"), NOTHING
    ),
}


def named(rows: Iterable[Flag], traps: Mapping[str, str] = TRAPS) -> dict[str, Flag]:
    """Rows under every name, those of 2020 to 2022 dated."""
    found: dict[str, Flag] = {}
    for row in rows:
        row = replace(row, until="2022" if row.name in DATED else row.until, trap=traps.get(row.name, ""))
        for name in (row.name, *row.older):
            found[plain(name)] = row
    return found


def plain(name: str) -> str:
    """A flag's name as the table has it: no dashes in front, `-` for `_`."""
    return name.lstrip("-").replace("_", "-")


def find(name: str) -> Flag | None:
    return table().get(plain(name)) or family(name)


def family(name: str) -> Flag | None:
    """What the first words of a flag's name say where no table has the whole."""
    word = plain(name)
    for why, starts in FAMILIES.items():
        if word.startswith(tuple(starts.split())):
            return Flag(word, "text", "irrelevant", why=why)
    return None
