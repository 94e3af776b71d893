"""A run -> the arguments of BigScience's Megatron-DeepSpeed and DeepSpeed's JSON."""

from collections.abc import Iterator
from typing import Any

from steelyard.frameworks.megatron import write as megatron
from steelyard.frameworks.megatron.write import Argument, Groups, cannot
from steelyard.spec.errors import Problem, UserError
from steelyard.spec.run import Run

NAME = "Megatron-DeepSpeed"
POSITIONS = {"learned": "absolute", "rotary": "rotary", "alibi": "alibi"}


def groups(run: Run) -> Groups:
    """Raises UserError F020 with everything that the fork cannot say."""
    problems = list(unsayable(run))
    if problems:
        raise UserError(problems)
    return Groups([*_model(run), *megatron.vocabulary(run)], list(_parallel(run)),
                  [*megatron.batch(run), *megatron.training(run), *_precision(run)], list(megatron.data(run)),
                  list(megatron.output(run)))  # fmt: skip


def unsayable(run: Run) -> Iterator[Problem]:
    model, parallel, recompute = run.model, run.parallel, run.recompute

    def no(key: str, advice: str) -> Problem:
        return cannot(NAME, run, key, advice)

    if model.position not in POSITIONS:
        yield no("model.position", f"it has {', '.join(POSITIONS)}")
    if model.activation not in ("gelu", "gelu_tanh", "swiglu", "geglu"):
        yield no("model.activation", "it has gelu, gelu_tanh, swiglu, geglu")
    if model.norm != "layernorm":
        yield no("model.norm", "it has layernorm")
    for key, has in (("bias", True), ("qkv_bias", True), ("tied_embeddings", True), ("qk_norm", False)):
        if getattr(model, key) != has:
            yield no(f"model.{key}", f"it is always {str(has).lower()} there")
    if model.num_query_groups != model.num_attention_heads:
        yield no("model.num_query_groups", "every head has its own keys and values there")
    if model.position == "rotary" and (model.rotary_fraction != 1.0 or model.rotary_base != 10000.0):
        yield no("model.rotary_base", "rotary positions have base 10000 and all channels there")
    if isinstance(model.vocab_multiple, int) and model.vocab_multiple % parallel.tensor:
        yield no("model.vocab_multiple", f"it pads to a multiple of tensor = {parallel.tensor}")
    if parallel.context > 1:
        yield no("parallel.context", "it has none")
    if parallel.sequence:
        yield no("parallel.sequence", "it has none")
    if parallel.replicate > 1:
        yield no("parallel.replicate", "write it without replicas")
    if parallel.pipeline > 1:
        if parallel.pipeline_schedule != "1f1b":
            yield no("parallel.pipeline_schedule", "DeepSpeed's pipeline has 1f1b")
        if parallel.zero > 1:
            yield no("parallel.zero", "DeepSpeed's pipeline has stages 0 and 1")
        if megatron.ends(run) != (None, None):
            yield no("parallel.stages", "stages of equal layers")
    if run.batch.loss_mean == "tokens" and run.data.mask_loss_at_eod:
        yield cannot(
            NAME, run, "batch.loss_mean", "it has the mean of micro-batch means, which differs where targets are masked"
        )
    if recompute.mode == "selective":
        yield no("recompute.mode", "it has none and full")
    if recompute.mode == "full" and recompute.layers != "all":
        yield no("recompute.layers", "groups of layers, with recompute.every")
    yield from megatron.common(run, NAME)


def _model(run: Run) -> Iterator[Argument]:
    spec = run.model
    yield "--num-layers", str(spec.num_layers)
    yield "--hidden-size", str(spec.hidden_size)
    yield "--ffn-hidden-size", str(spec.ffn_hidden_size)
    yield "--num-attention-heads", str(spec.num_attention_heads)
    if spec.head_dim * spec.num_attention_heads != spec.hidden_size:
        yield "--kv-channels", str(spec.head_dim)
    yield "--seq-length", str(spec.seq_length)
    if spec.position != "rotary":
        yield "--max-position-embeddings", str(spec.max_position_embeddings)
    yield "--position-embedding-type", POSITIONS[spec.position]
    yield "--layernorm-epsilon", repr(spec.norm_eps)
    if spec.activation in ("swiglu", "geglu"):
        yield "--glu-activation", spec.activation
        yield ("--no-bias-gelu-fusion",)
    elif spec.activation == "gelu":
        yield ("--no-bias-gelu-fusion",)
    if spec.embedding_norm:
        yield ("--embed-layernorm",)
    yield from megatron.initial(run)


def _parallel(run: Run) -> Iterator[Argument]:
    yield "--tensor-model-parallel-size", str(run.parallel.tensor)
    yield "--pipeline-model-parallel-size", str(run.parallel.pipeline)
    if run.recompute.mode == "full":
        yield ("--checkpoint-activations",)
        yield "--checkpoint-num-layers", str(run.recompute.every)
        yield ("--deepspeed-activation-checkpointing",)
        if run.recompute.shard:
            yield ("--partition-activations",)


def _precision(run: Run) -> Iterator[Argument]:
    if run.precision.compute != "fp32":
        yield (f"--{run.precision.compute}",)


def engine(run: Run, path: str) -> list[Argument]:
    """The flags that hand the job to DeepSpeed."""
    return [("--deepspeed",), ("--deepspeed_config", path), ("--zero-stage", str(run.parallel.zero))]


def json(run: Run) -> dict[str, Any]:
    """DeepSpeed's configuration. It repeats what the flags say, as DeepSpeed wants it."""
    precision, scale = run.precision, run.precision.loss_scale
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": run.batch.micro_batch_size,
        "train_batch_size": run.batch.global_batch_size,
        "gradient_clipping": run.optimizer.clip_grad,
        "zero_optimization": {"stage": run.parallel.zero},
        "steps_per_print": 2000,
    }
    if run.engine.reduce_bucket:
        found["zero_optimization"]["reduce_bucket_size"] = run.engine.reduce_bucket
    if run.engine.allgather_bucket:
        found["zero_optimization"]["allgather_bucket_size"] = run.engine.allgather_bucket
    if precision.compute == "bf16":
        found["bf16"] = {"enabled": True}
    if precision.compute == "fp16":
        found["fp16"] = {
            "enabled": True,
            "loss_scale": scale.static or 0,
            "loss_scale_window": scale.window,
            "hysteresis": scale.hysteresis,
            "min_loss_scale": scale.minimum,
            "initial_scale_power": scale.initial_power,
        }
    if precision.compute != "fp32" and precision.gradients != ("fp16" if precision.compute == "fp16" else "fp32"):
        found["data_types"] = {"grad_accum_dtype": precision.gradients}
    return found
