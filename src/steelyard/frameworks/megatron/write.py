"""A run -> Megatron-LM's arguments. What Megatron does not have at all is an error; smaller differences show when the
result is read back."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from steelyard.predict import stages
from steelyard.spec import progress
from steelyard.spec.errors import Problem, UserError, problem
from steelyard.spec.run import Run

NAME = "Megatron-LM"
POSITIONS = {"learned": "learned_absolute", "rotary": "rope", "none": "none"}
NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
DECAYS = {
    "constant": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "inverse_sqrt": "inverse-square-root",
    "wsd": "WSD",
}
MODULES = {"attention": "core_attn", "mlp": "mlp", "norm": "layernorm"}
STRATEGIES = {2: "optim_grads", 3: "optim_grads_params"}

Argument = tuple[str, ...]  # a flag and its values


@dataclass(frozen=True)
class Groups:
    """Arguments under the headings of a script."""

    model: list[Argument]
    parallel: list[Argument]
    training: list[Argument]
    data: list[Argument]
    output: list[Argument]


def groups(run: Run) -> Groups:
    """Raises UserError F020 with everything that Megatron-LM cannot say."""
    problems = list(unsayable(run))
    if problems:
        raise UserError(problems)
    trained = [*batch(run), *training(run), *_precision(run)]
    return Groups([*model(run), *vocabulary(run)], list(_parallel(run)), trained, list(data(run)), list(output(run)))


def cannot(target: str, run: Run, key: str, advice: str) -> Problem:
    section, _, name = key.partition(".")
    value = getattr(getattr(run, section), name)
    return problem("F020", key, target=target, name=key, value=value, advice=advice)


def unsayable(run: Run) -> Iterator[Problem]:
    """What the network, the layout and the precision ask for and Megatron-LM does not have."""
    model, parallel = run.model, run.parallel

    def no(key: str, advice: str) -> Problem:
        return cannot(NAME, run, key, advice)

    if model.position not in POSITIONS:
        yield no("model.position", f"it has {', '.join(POSITIONS)}")
    if model.activation in ("geglu", "relu"):
        yield no("model.activation", "it has gelu, gelu_tanh, relu2, swiglu")
    if model.embedding_norm:
        yield no("model.embedding_norm", "translate to megatron-deepspeed")
    if model.bias and not model.qkv_bias:
        yield no("model.qkv_bias", "with biases it has them in queries, keys and values too")
    if not model.rotary_base.is_integer() and model.position == "rotary":
        yield no("model.rotary_base", "a whole number")
    if isinstance(model.vocab_multiple, int) and model.vocab_multiple % parallel.tensor:
        yield no("model.vocab_multiple", f"it pads to a multiple of tensor = {parallel.tensor}")
    if parallel.pipeline > 1 and parallel.pipeline_schedule not in ("1f1b", "interleaved"):
        yield no("parallel.pipeline_schedule", "it has 1f1b and interleaved")
    if parallel.replicate > 1:
        yield no("parallel.replicate", "write it without replicas")
    if parallel.pipeline > 1 and ends(run) is None:
        yield no("parallel.stages", "it has equal stages, or a first and a last one of their own size")
    yield from common(run, NAME)


def common(run: Run, target: str) -> Iterator[Problem]:
    """What neither Megatron-LM nor its forks have."""
    precision, recompute = run.precision, run.recompute
    if precision.compute == "fp64":
        yield cannot(target, run, "precision.compute", "it has fp32, bf16 and fp16")
    if precision.gradients not in ("fp32", precision.compute):
        yield cannot(target, run, "precision.gradients", "fp32, or that of precision.compute")
    if recompute.mode == "full" and recompute.layers != "all" and recompute.every > 1:
        yield cannot(target, run, "recompute.layers", "groups of layers, or the first layers of each stage, not both")
    if run.parallel.world_size % min(run.parallel.world_size, run.hardware.devices_per_node):
        yield cannot(target, run, "hardware.devices_per_node", "the ranks must fill whole nodes")


def model(run: Run) -> Iterator[Argument]:
    spec = run.model
    yield "--num-layers", str(spec.num_layers)
    yield "--hidden-size", str(spec.hidden_size)
    yield "--ffn-hidden-size", str(spec.ffn_hidden_size)
    yield "--num-attention-heads", str(spec.num_attention_heads)
    if spec.head_dim * spec.num_attention_heads != spec.hidden_size:
        yield "--kv-channels", str(spec.head_dim)
    if spec.num_query_groups != spec.num_attention_heads:
        yield ("--group-query-attention",)
        yield "--num-query-groups", str(spec.num_query_groups)
    yield "--seq-length", str(spec.seq_length)
    yield "--max-position-embeddings", str(spec.max_position_embeddings)
    yield "--position-embedding-type", POSITIONS[spec.position]
    if spec.position == "rotary":
        yield "--rotary-base", str(int(spec.rotary_base))
        yield "--rotary-percent", repr(spec.rotary_fraction)
    yield "--normalization", NORMS[spec.norm]
    yield "--norm-epsilon", repr(spec.norm_eps)
    yield from activation(run)
    if not spec.bias:
        yield ("--disable-bias-linear",)
        if spec.qkv_bias:
            yield ("--add-qkv-bias",)
    if spec.qk_norm:
        yield ("--qk-layernorm",)
    if not spec.tied_embeddings:
        yield ("--untie-embeddings-and-output-weights",)
    yield from initial(run)


def activation(run: Run) -> Iterator[Argument]:
    """The fused bias and GELU is the tanh form, the plain one is exact."""
    spec = run.model
    flag = {"swiglu": "--swiglu", "relu2": "--squared-relu", "gelu": "--no-bias-gelu-fusion"}.get(spec.activation)
    if spec.activation == "gelu_tanh" and not spec.bias:
        flag = "--openai-gelu"
    if flag:
        yield (flag,)


def initial(run: Run) -> Iterator[Argument]:
    yield "--attention-dropout", repr(run.model.attention_dropout)
    yield "--hidden-dropout", repr(run.model.hidden_dropout)
    yield "--init-method-std", repr(run.model.init_std)


def vocabulary(run: Run) -> Iterator[Argument]:
    spec = run.model
    multiple = 128 if spec.vocab_multiple == "megatron" else spec.vocab_multiple // run.parallel.tensor
    yield "--make-vocab-size-divisible-by", str(multiple)
    yield from tokenizer(run)


def tokenizer(run: Run) -> Iterator[Argument]:
    name = run.data.tokenizer
    if run.model.vocab_size == 50257 and not name.endswith(".json") and name != "byte":
        folder = "" if name.startswith("ids:") else f"{name.rstrip('/')}/"
        yield "--tokenizer-type", "GPT2BPETokenizer"
        yield "--vocab-file", f"{folder}vocab.json" if folder else "gpt2-vocab.json"
        yield "--merge-file", f"{folder}merges.txt" if folder else "gpt2-merges.txt"
        return
    if name.endswith(".json"):
        yield "--tokenizer-type", "HuggingFaceTokenizer"
        yield "--tokenizer-model", name
    else:
        yield "--tokenizer-type", "NullTokenizer"
    yield "--vocab-size", str(run.model.vocab_size)


def ends(run: Run) -> tuple[int | None, int | None] | None:
    """Layers of the first and last pipeline rank where they differ from the others; (None, None) where all are equal;
    None where Megatron cannot say the split."""
    parallel = run.parallel
    split = stages.split(run.model, parallel)
    per_rank = [sum(split[rank :: parallel.pipeline]) for rank in range(parallel.pipeline)]
    if len(set(split)) == 1:
        return None, None
    if parallel.virtual > 1 or len(per_rank) < 3:
        return (per_rank[0], None) if parallel.virtual == 1 and len(per_rank) == 2 else None
    return (per_rank[0], per_rank[-1]) if len(set(per_rank[1:-1])) == 1 else None


def _parallel(run: Run) -> Iterator[Argument]:
    parallel = run.parallel
    yield "--tensor-model-parallel-size", str(parallel.tensor)
    yield "--pipeline-model-parallel-size", str(parallel.pipeline)
    if parallel.context > 1:
        yield "--context-parallel-size", str(parallel.context)
    if parallel.sequence:
        yield ("--sequence-parallel",)
    if parallel.pipeline > 1 and parallel.virtual > 1:
        yield "--num-layers-per-virtual-pipeline-stage", str(run.model.num_layers // parallel.num_stages)
    first, last = ends(run) or (None, None) if parallel.pipeline > 1 else (None, None)
    if first:
        yield "--decoder-first-pipeline-num-layers", str(first)
    if last:
        yield "--decoder-last-pipeline-num-layers", str(last)
    if parallel.zero:
        yield ("--use-distributed-optimizer",)
    if parallel.zero > 1:
        yield ("--use-megatron-fsdp",)
        yield "--data-parallel-sharding-strategy", STRATEGIES[parallel.zero]
    if run.engine.microbatch_group:
        yield "--microbatch-group-size-per-virtual-pipeline-stage", str(run.engine.microbatch_group)
    yield from _recompute(run)


def _recompute(run: Run) -> Iterator[Argument]:
    recompute = run.recompute
    if recompute.mode == "none":
        return
    yield "--recompute-granularity", recompute.mode
    if recompute.mode == "selective":
        yield "--recompute-modules", *(MODULES[name] for name in recompute.modules)
        return
    block = recompute.layers != "all"
    yield "--recompute-method", "block" if block else "uniform"
    yield "--recompute-num-layers", str(recompute.layers if block else recompute.every)
    if recompute.shard:
        yield ("--distribute-saved-activations",)


def batch(run: Run) -> Iterator[Argument]:
    yield "--micro-batch-size", str(run.batch.micro_batch_size)
    yield "--global-batch-size", str(run.batch.global_batch_size)
    if run.batch.ramp:
        yield "--rampup-batch-size", *(str(n) for n in run.batch.ramp)
    if run.batch.loss_mean == "tokens":
        yield ("--calculate-per-token-loss",)


def training(run: Run) -> Iterator[Argument]:
    """Optimizer, rate and length. Megatron counts in steps or in samples, never in both."""
    rate, optimizer = run.learning_rate, run.optimizer
    yield "--optimizer", "adam"
    yield "--adam-beta1", repr(optimizer.betas[0])
    yield "--adam-beta2", repr(optimizer.betas[1])
    yield "--adam-eps", repr(optimizer.eps)
    yield "--weight-decay", repr(optimizer.weight_decay)
    yield "--clip-grad", repr(optimizer.clip_grad)
    yield "--lr", repr(rate.peak)
    yield "--min-lr", repr(rate.minimum)
    yield "--lr-decay-style", DECAYS[rate.decay]
    yield from amounts(run)
    if rate.decay == "wsd":
        yield "--lr-wsd-decay-style", rate.wsd_decay
        unit, whole = (
            ("samples", rate.decay_samples or run.length.samples)
            if in_samples(run)
            else ("iters", rate.decay_steps or run.length.steps)
        )
        if whole:
            yield f"--lr-wsd-decay-{unit}", str(round(rate.wsd_decay_fraction * whole))
    yield "--seed", str(run.seed)


def in_samples(run: Run) -> bool:
    """Whether the amounts of a run are said in samples: one of them is, or the batch grows."""
    rate = run.learning_rate
    amounts = (rate.warmup_samples, rate.decay_samples, run.batch.ramp)
    return run.length.steps is None or any(amount is not None for amount in amounts)


def amounts(run: Run) -> Iterator[Argument]:
    rate, length, sequence = run.learning_rate, run.length, run.model.seq_length
    if in_samples(run):
        yield "--train-samples", str(progress.total_samples(length, run.batch, sequence))
        decay = rate.decay_samples
        if rate.decay_steps is not None:
            decay = progress.samples_after(run.batch, rate.decay_steps)
        if decay is not None:
            yield "--lr-decay-samples", str(decay)
        warmup = rate.warmup_samples
        if rate.warmup_steps is not None:
            warmup = progress.samples_after(run.batch, rate.warmup_steps)
        if warmup is not None:
            yield "--lr-warmup-samples", str(warmup)
    else:
        yield "--train-iters", str(length.steps)
        if rate.decay_steps is not None:
            yield "--lr-decay-iters", str(rate.decay_steps)
        if rate.warmup_steps is not None:
            yield "--lr-warmup-iters", str(rate.warmup_steps)
    if rate.warmup_fraction is not None:
        yield "--lr-warmup-fraction", repr(rate.warmup_fraction)


def _precision(run: Run) -> Iterator[Argument]:
    precision = run.precision
    if precision.compute == "fp32":
        return
    yield (f"--{precision.compute}",)
    if precision.compute == "bf16" and precision.gradients == "bf16":
        yield ("--grad-reduce-in-bf16",)
    if precision.compute == "fp16":
        if precision.gradients == "fp32":
            yield ("--accumulate-allreduce-grads-in-fp32",)
        yield from _scale(run)


def _scale(run: Run) -> Iterator[Argument]:
    scale = run.precision.loss_scale
    if scale.static is not None:
        yield "--loss-scale", repr(scale.static)
        return
    yield "--initial-loss-scale", str(2**scale.initial_power)
    yield "--min-loss-scale", repr(scale.minimum)
    yield "--loss-scale-window", str(scale.window)
    yield "--hysteresis", str(scale.hysteresis)


def data(run: Run) -> Iterator[Argument]:
    given: Any = run.data
    if given.validation or given.test:
        for flag, sources in (("train", given.train), ("valid", given.validation), ("test", given.test)):
            if sources and not isinstance(sources, dict):
                yield f"--{flag}-data-path", *_sources(sources)
    elif given.train:
        yield "--data-path", *_sources(given.train)
        yield "--split", given.split
    for flag, on in (("--eod-mask-loss", given.mask_loss_at_eod), ("--reset-position-ids", given.reset_positions),
                     ("--reset-attention-mask", given.reset_attention)):  # fmt: skip
        if on:
            yield (flag,)


def _sources(sources: Any) -> Iterator[str]:
    for source in sources:
        if isinstance(source, str):
            yield source
        else:
            yield repr(source[0])
            yield source[1]


def output(run: Run) -> Iterator[Argument]:
    if run.evaluation.every_steps:
        yield "--eval-interval", str(run.evaluation.every_steps)
    yield "--eval-iters", str(run.evaluation.steps)
    if run.checkpoint.every_steps:
        yield "--save-interval", str(run.checkpoint.every_steps)
    yield "--save", f"checkpoints/{run.name}"
    yield "--load", f"checkpoints/{run.name}"
    if run.stop.step_multiple:
        yield "--exit-interval", str(run.stop.step_multiple)
    if run.stop.minutes:
        yield "--exit-duration-in-mins", f"{run.stop.minutes:g}"
    yield "--log-interval", str(run.record.every_steps)
