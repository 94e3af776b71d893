"""A run -> a LiBai configuration in Python, on top of LiBai's common files."""

from collections.abc import Iterator
from typing import Any

from steelyard.frameworks.libai import memory
from steelyard.predict import stages
from steelyard.spec import progress
from steelyard.spec.errors import Problem, UserError, problem
from steelyard.spec.run import Run

NAME = "LiBai"
HEAD = """from .common.data.gpt_dataset import dataloader, tokenization
from .common.models.gpt import pretrain_model as model
from .common.models.graph import graph
from .common.optim import optim
from .common.train import train

"""
# the one value that LiBai's GPT has of each: (key, value)
ALWAYS: tuple[tuple[str, Any], ...] = (
    ("model.position", "learned"), ("model.norm", "layernorm"), ("model.bias", True),
    ("model.qkv_bias", True), ("model.tied_embeddings", True), ("model.embedding_norm", False),
    ("model.qk_norm", False), ("parallel.context", 1), ("parallel.sequence", False), ("parallel.replicate", 1),
    ("batch.ramp", None), ("learning_rate.decay", "cosine"), ("recompute.every", 1), ("recompute.layers", "all"),
    ("recompute.shard", False),
)  # fmt: skip


def text(run: Run) -> str:
    """Raises UserError F020 with everything that LiBai cannot say."""
    found = list(unsayable(run))
    if found:
        raise UserError(found)
    return HEAD + "".join(f"{key} = {value!r}\n" for key, value in settings(run))


def unsayable(run: Run) -> Iterator[Problem]:
    for key, only in ALWAYS:
        section, _, name = key.partition(".")
        value = getattr(getattr(run, section), name)
        if value != only and not (section == "recompute" and run.recompute.mode == "none"):
            yield problem("F020", key, target=NAME, name=key, value=value, advice=f"it has {only}")
    model, parallel = run.model, run.parallel
    if model.activation not in ("gelu", "gelu_tanh"):
        yield _no("model.activation", model.activation, "it has gelu")
    if model.num_query_groups != model.num_attention_heads:
        yield _no("model.num_query_groups", model.num_query_groups, "every head has its own keys and values there")
    if model.head_dim * model.num_attention_heads != model.hidden_size:
        yield _no("model.head_dim", model.head_dim, "hidden_size / num_attention_heads")
    if model.max_position_embeddings != model.seq_length:
        yield _no("model.max_position_embeddings", model.max_position_embeddings, "that of the sequence length")
    if (
        model.padded_vocab_size(parallel.tensor)
        != -(-model.vocab_size // (128 * parallel.tensor)) * 128 * parallel.tensor
    ):
        yield _no("model.vocab_multiple", model.vocab_multiple, "it pads to 128 x tensor")
    if run.precision.compute not in ("fp16", "fp32"):
        yield _no("precision.compute", run.precision.compute, "it has fp16 and fp32")
    if parallel.zero == 3:
        yield _no("parallel.zero", 3, "it has stages 0, 1 and 2")
    if parallel.pipeline > 1 and parallel.pipeline_schedule != "1f1b":
        yield _no(
            "parallel.pipeline_schedule", parallel.pipeline_schedule, "its graph schedules micro-batches itself: 1f1b"
        )
    if run.recompute.mode == "selective":
        yield _no("recompute.mode", "selective", "it has none and full")
    if _warmup(run) > 1:
        yield _no("learning_rate.warmup_fraction", f"{_warmup(run):g} of the run", "it warms up within the run")
    if run.length.steps is None:
        yield _no("length.steps", None, "a length in steps")


def _no(key: str, value: Any, advice: str) -> Problem:
    return problem("F020", key, target=NAME, name=key, value=value, advice=advice)


def settings(run: Run) -> Iterator[tuple[str, Any]]:
    """Keys and values in the order of LiBai's own files."""
    model, parallel, rate = run.model, run.parallel, run.learning_rate
    for name, value in (
        ("hidden_layers", model.num_layers), ("vocab_size", model.vocab_size), ("hidden_size", model.hidden_size),
        ("ffn_hidden_size", model.ffn_hidden_size), ("num_attention_heads", model.num_attention_heads),
        ("max_seq_length", model.seq_length), ("embedding_dropout_prob", model.hidden_dropout),
        ("attention_dropout_prob", model.attention_dropout), ("output_dropout_prob", model.hidden_dropout),
        ("layernorm_epsilon", model.norm_eps), ("initializer_range", model.init_std),
    ):  # fmt: skip
        yield f"model.cfg.{name}", value
    yield "train.train_micro_batch_size", run.batch.micro_batch_size
    yield "train.global_batch_size", run.batch.global_batch_size
    yield "train.train_iter", run.length.steps
    yield "train.warmup_ratio", _warmup(run)
    yield "train.seed", run.seed
    yield "train.amp.enabled", run.precision.compute == "fp16"
    yield "train.activation_checkpoint.enabled", run.recompute.mode == "full"
    yield "train.zero_optimization.enabled", parallel.zero > 0
    yield "train.zero_optimization.stage", max(1, parallel.zero)
    yield "train.dist.data_parallel_size", parallel.data
    yield "train.dist.tensor_parallel_size", parallel.tensor
    yield "train.dist.pipeline_parallel_size", parallel.pipeline
    if parallel.pipeline > 1:
        yield "train.dist.pipeline_num_layers", model.num_layers
        split = stages.split(model, parallel)
        if split != memory.stages(model.num_layers, parallel.pipeline):
            yield (
                "train.dist.custom_pipeline_stage_id",
                [stage for stage, count in enumerate(split) for _ in range(count)],
            )
    yield "train.checkpointer.period", run.checkpoint.every_steps or 10**9
    yield "train.checkpointer.max_to_keep", run.checkpoint.keep
    yield "train.evaluation.enabled", run.evaluation.steps > 0
    yield "train.evaluation.eval_period", run.evaluation.every_steps or 10**9
    yield "train.evaluation.eval_iter", run.evaluation.steps
    yield "train.scheduler.alpha", rate.minimum / rate.peak if rate.peak else 0.0
    yield "optim.lr", rate.peak
    yield "optim.weight_decay", run.optimizer.weight_decay
    yield "optim.betas", run.optimizer.betas
    yield "optim.eps", run.optimizer.eps
    yield "optim.params.clip_grad_max_norm", run.optimizer.clip_grad
    if run.data.train and isinstance(run.data.train[0], str):
        yield "dataloader.train.dataset[0].data_prefix", run.data.train[0]


def _warmup(run: Run) -> float:
    """Warm-up as a share of the run's steps, as LiBai counts it."""
    curve = progress.schedule(run.learning_rate, run.length, run.batch, run.model.seq_length)
    total = progress.total_samples(run.length, run.batch, run.model.seq_length)
    return curve.warmup / total
