"""The rules that span keys and sections, and the notes on what is legal but suspicious.

Each check names the sections it reads; it runs when those are valid by themselves, so that one wrong value does not
hide the others.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from steelyard.spec import progress
from steelyard.spec.batch import Batch
from steelyard.spec.data import Data
from steelyard.spec.errors import Problem, divisors, limited, problem
from steelyard.spec.model import Model
from steelyard.spec.optimizer import LearningRate
from steelyard.spec.parallel import Parallel
from steelyard.spec.precision import Precision, Recompute
from steelyard.spec.run import Engine, Length, Run


def problems(sections: dict[str, Any]) -> list[Problem]:
    """Every broken rule among the given sections (name -> validated section)."""
    found: list[Problem] = []
    for needs, check in CHECKS:
        if all(name in sections for name in needs):
            found += check(*(sections[name] for name in needs))
    return found


def _model(model: Model) -> Iterator[Problem]:
    hidden, heads = model.hidden_size, model.num_attention_heads
    if hidden % heads and model.head_dim == max(1, hidden // heads):
        yield problem("S101", "model.num_attention_heads", hidden=hidden, heads=heads, legal=limited(divisors(hidden)))
    if heads % model.num_query_groups:
        yield problem(
            "S102", "model.num_query_groups", heads=heads, groups=model.num_query_groups, legal=limited(divisors(heads))
        )
    if model.position == "rotary":
        channels = model.head_dim * model.rotary_fraction
        if channels != int(channels) or int(channels) % 2:
            yield problem(
                "S103", "model.rotary_fraction", head_dim=model.head_dim, fraction=model.rotary_fraction,
                channels=f"{channels:g}",
            )  # fmt: skip
    if model.position == "learned" and model.seq_length > model.max_position_embeddings:
        yield problem("S112", "model.seq_length", seq_length=model.seq_length, positions=model.max_position_embeddings)


def _tensor(model: Model, parallel: Parallel, engine: Engine) -> Iterator[Problem]:
    tensor = parallel.tensor
    both = [d for d in divisors(model.num_attention_heads) if model.num_query_groups % d == 0]
    if model.num_attention_heads % tensor:
        legal = both if engine.framework == "steelyard" else divisors(model.num_attention_heads)
        yield problem("S104", "parallel.tensor", heads=model.num_attention_heads, tensor=tensor, legal=limited(legal))
    elif model.num_query_groups % tensor and engine.framework == "steelyard":
        yield problem("S105", "parallel.tensor", groups=model.num_query_groups, tensor=tensor, legal=limited(both))
    if model.ffn_hidden_size % tensor:
        legal = divisors(model.ffn_hidden_size)
        yield problem("S106", "parallel.tensor", ffn=model.ffn_hidden_size, tensor=tensor, legal=limited(legal))
    if model.padded_vocab_size(tensor) % tensor:
        yield problem("S110", "model.vocab_multiple", vocab=model.padded_vocab_size(tensor), tensor=tensor)
    if parallel.sequence and model.seq_length % tensor:
        legal = divisors(model.seq_length)
        yield problem("S107", "parallel.tensor", seq_length=model.seq_length, tensor=tensor, legal=limited(legal))
    if model.seq_length % parallel.context:
        legal = divisors(model.seq_length)
        yield problem(
            "S122", "parallel.context", seq_length=model.seq_length, context=parallel.context, legal=limited(legal)
        )


def _pipeline(model: Model, parallel: Parallel) -> Iterator[Problem]:
    layers, stages = model.num_layers, parallel.num_stages
    if layers < stages:
        yield problem(
            "S109", "parallel.pipeline", layers=layers, stages=stages, pipeline=parallel.pipeline,
            virtual=parallel.virtual,
        )  # fmt: skip
    elif parallel.stages != "balanced" and (len(parallel.stages) != stages or sum(parallel.stages) != layers):
        example = [layers // stages + (n < layers % stages) for n in range(stages)]
        given = f"{sum(parallel.stages)} layers in {len(parallel.stages)} stages"
        yield problem("S108", "parallel.stages", given=given, layers=layers, stages=stages, example=example)


def _layout(parallel: Parallel) -> Iterator[Problem]:
    if parallel.sequence and parallel.tensor == 1:
        yield problem("S113", "parallel.sequence")
    if parallel.data % parallel.replicate:
        legal = limited(divisors(parallel.data))
        yield problem("S115", "parallel.replicate", data=parallel.data, replicate=parallel.replicate, legal=legal)
    schedule, virtual = parallel.pipeline_schedule, parallel.virtual
    if parallel.pipeline == 1:
        return
    if schedule in ("gpipe", "1f1b") and virtual != 1:
        yield problem(
            "S114", "parallel.virtual", schedule=schedule, virtual=virtual, needs="runs one model chunk per rank",
            advice="parallel.virtual = 1, or parallel.pipeline_schedule = \"interleaved\"",
        )  # fmt: skip
    if schedule in ("interleaved", "zero_bubble") and virtual < 2:
        yield problem(
            "S114", "parallel.virtual", schedule=schedule, virtual=virtual, needs="needs two or more model chunks",
            advice="parallel.virtual = 2, or parallel.pipeline_schedule = \"1f1b\"",
        )  # fmt: skip
    if schedule == "zbv" and virtual != 2:
        yield problem(
            "S114", "parallel.virtual", schedule=schedule, virtual=virtual, needs="needs exactly two model chunks",
            advice="parallel.virtual = 2",
        )  # fmt: skip
    if parallel.zero == 2:
        yield problem("S117", "parallel.zero")


def _zero_bubble(parallel: Parallel, precision: Precision) -> Iterator[Problem]:
    if parallel.puts_off_weights and parallel.zero == 3 and parallel.sharded(precision):
        yield problem("S120", "parallel.zero", schedule=parallel.pipeline_schedule)


def _recompute(parallel: Parallel, recompute: Recompute, engine: Engine) -> Iterator[Problem]:
    if parallel.puts_off_weights and recompute.mode == "full":
        yield problem("S118", "recompute.mode", schedule=parallel.pipeline_schedule)
    if recompute.shard and recompute.mode != "full" and engine.framework == "steelyard":
        advice = 'set recompute.mode = "full" or recompute.shard = false'
        yield problem("S119", "recompute.shard", why_not="nothing is recomputed in full", advice=advice)
    if recompute.mode == "selective" and not recompute.modules:
        yield problem("S121", "recompute.modules")


def _batch(batch: Batch, parallel: Parallel, engine: Engine) -> Iterator[Problem]:
    total, micro, accumulation, data = (
        batch.global_batch_size, batch.micro_batch_size, batch.accumulation, parallel.data,
    )  # fmt: skip
    if total % data:
        below = total // data * data
        legal = limited([n for n in (below, below + data, below + 2 * data) if n > 0])
        yield problem("S202", "batch.global_batch_size", global_batch=total, data=data, legal=f"{legal}, ...")
    elif micro * accumulation * data != total:
        per_rank = total // data
        yield problem(
            "S201", "batch.micro_batch_size", micro=micro, accumulation=accumulation, data=data, global_batch=total,
            product=micro * accumulation * data,
            advice=f"micro_batch_size may be {limited(divisors(per_rank))} with accumulation = {per_rank} / micro; or "
            f"leave one of the three out",
        )  # fmt: skip
    elif (
        parallel.pipeline > 1 and parallel.virtual > 1 and accumulation % (engine.microbatch_group or parallel.pipeline)
    ):
        per_rank = total // data
        legal = limited([d for d in divisors(per_rank) if d % parallel.pipeline == 0])
        yield problem(
            "S206", "batch.accumulation", pipeline=parallel.pipeline, accumulation=accumulation,
            legal=legal or f"none at global batch {total}: use a multiple of {data * parallel.pipeline}",
        )  # fmt: skip
    if ramp := batch.ramp_rule:
        grows = total - ramp.start
        if grows <= 0:
            yield problem("S205", "batch.ramp", start=ramp.start, global_batch=total)
        elif grows % ramp.increment:
            yield problem(
                "S203", "batch.ramp", start=ramp.start, global_batch=total, increment=ramp.increment,
                legal=limited(divisors(grows)),
            )  # fmt: skip
        else:
            unit = micro * data
            bad = [n for n in range(ramp.start, total, ramp.increment) if n % unit]
            if bad:
                yield problem("S204", "batch.ramp", micro=micro, data=data, unit=unit, bad=limited(bad))


def _length(length: Length, batch: Batch, model: Model) -> Iterator[Problem]:
    given = [name for name in ("steps", "samples", "tokens") if getattr(length, name) is not None]
    if len(given) != 1:
        yield problem("S301", "length", count=len(given), names=", ".join(given) or "none")
    elif length.tokens is not None and length.tokens < (
        per_step := progress.batch_size_at(batch, 0) * model.seq_length
    ):
        yield problem("S307", "length.tokens", tokens=length.tokens, per_step=per_step)


def _learning_rate(rule: LearningRate, length: Length, batch: Batch, model: Model) -> Iterator[Problem]:
    warmups = [n for n in ("warmup_fraction", "warmup_steps", "warmup_samples") if getattr(rule, n) is not None]
    if rule.minimum > rule.peak:
        yield problem("S305", "learning_rate.minimum", minimum=rule.minimum, peak=rule.peak)
    if len(warmups) > 1:
        yield problem("S302", f"learning_rate.{warmups[1]}", count=len(warmups), names=", ".join(warmups))
    if rule.decay_steps is not None and rule.decay_samples is not None:
        yield problem("S303", "learning_rate.decay_samples")
    lengths = [n for n in (length.steps, length.samples, length.tokens) if n is not None]
    if len(warmups) > 1 or len(lengths) != 1 or _ramp_is_broken(batch):
        return
    curve = progress.schedule(rule, length, batch, model.seq_length)
    if rule.decay != "constant" and warmups and curve.warmup >= curve.decay:
        decay_key = next((n for n in ("decay_steps", "decay_samples") if getattr(rule, n) is not None), None)
        yield problem(
            "S304", f"learning_rate.{warmups[0]}", warmup=round(curve.warmup), decay=curve.decay,
            warmup_origin=f"{warmups[0]} = {getattr(rule, warmups[0]):g}",
            decay_origin=f"{decay_key} = {getattr(rule, decay_key)}" if decay_key else "the run's length",
            decay_steps=sum(level.steps for level in progress.levels(batch, curve.decay)),
        )  # fmt: skip


def _ramp_is_broken(batch: Batch) -> bool:
    ramp = batch.ramp_rule
    if ramp is None:
        return False
    grows = batch.global_batch_size - ramp.start
    return grows <= 0 or grows % ramp.increment != 0


def _data(data: Data) -> Iterator[Problem]:
    weights = re.findall(r"[.0-9]+", data.split)
    try:
        numbers = [float(w) for w in weights]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 3 or sum(numbers) <= 0 or re.sub(r"[.0-9,\s/:]", "", data.split):
        yield problem("S306", "data.split", split=data.split)


CHECKS: list[tuple[tuple[str, ...], Callable[..., Iterator[Problem]]]] = [
    (("model",), _model),
    (("model", "parallel", "engine"), _tensor),
    (("model", "parallel"), _pipeline),
    (("parallel",), _layout),
    (("parallel", "precision"), _zero_bubble),
    (("parallel", "recompute", "engine"), _recompute),
    (("batch", "parallel", "engine"), _batch),
    (("length", "batch", "model"), _length),
    (("learning_rate", "length", "batch", "model"), _learning_rate),
    (("data",), _data),
]


@dataclass(frozen=True)
class Note:
    """Legal, but probably not what was meant."""

    key: str
    text: str


def notes(run: Run) -> list[Note]:
    return [
        *_rate_notes(run),
        *_batch_notes(run),
        *_layout_notes(run),
        *_precision_notes(run.precision),
        *_engine_notes(run.engine),
    ]


def _rate_notes(run: Run) -> Iterator[Note]:
    rule, batch = run.learning_rate, run.batch
    curve = progress.schedule(rule, run.length, batch, run.model.seq_length)
    total = progress.total_samples(run.length, batch, run.model.seq_length)
    steps = progress.total_steps(run.length, batch, run.model.seq_length)
    if rule.peak == 0:
        yield Note("learning_rate.peak", "the learning rate is 0: nothing will be learned")
        return
    if curve.warmup >= total:
        share = curve.at(total) / rule.peak
        yield Note(
            "learning_rate",
            f"the rate is still warming up when the run ends: warm-up {curve.warmup:,.0f} samples, run {total:,}; it "
            f"reaches {share:.1%} of the peak",
        )
    elif rule.decay not in ("constant", "inverse_sqrt") and curve.at(total) > 0.95 * rule.peak > rule.minimum:
        yield Note(
            "learning_rate",
            f"the rate never decays: the decay ends after {curve.decay:,} samples, the run after {total:,}; the last "
            f"rate is {curve.at(total):.3g} of a peak of {rule.peak:.3g}",
        )
    if rule.decay != "constant" and curve.decay < total:
        yield Note(
            "learning_rate",
            f"the decay ends after {curve.decay:,} of {total:,} samples; the rest runs at {rule.minimum:g}",
        )
    if rule.first_update == "zero" and curve.warmup > 0 and steps == 1:
        yield Note("learning_rate.first_update", "the only update has rate 0 and changes no weight")


def _batch_notes(run: Run) -> Iterator[Note]:
    total = progress.total_samples(run.length, run.batch, run.model.seq_length)
    levels = progress.levels(run.batch, total)
    if unused := [level.global_batch_size for level in levels if level.steps == 0]:
        yield Note(
            "batch.ramp",
            f"the run ends before the ramp reaches global batch {unused[0]}"
            + (f" to {unused[-1]}" * (len(unused) > 1)),
        )
    consumed = sum(level.samples for level in levels)
    if consumed != total:
        yield Note("length", f"whole steps consume {consumed:,} samples, {consumed - total:,} more than asked for")


def _layout_notes(run: Run) -> Iterator[Note]:
    parallel, layers = run.parallel, run.model.num_layers
    if parallel.pipeline == 1 and (parallel.virtual > 1 or parallel.stages != "balanced"):
        yield Note("parallel", "virtual and stages have no effect: there is no pipeline")
    if parallel.pipeline > 1 and layers % parallel.num_stages and parallel.stages == "balanced":
        yield Note(
            "parallel.pipeline",
            f"{layers} layers over {parallel.num_stages} stages are not equal; the plan shows the split",
        )
    if parallel.pipeline > 1 and run.batch.accumulation < parallel.pipeline:
        yield Note(
            "batch.accumulation",
            f"{run.batch.accumulation} micro-batches cannot keep {parallel.pipeline} pipeline ranks busy",
        )
    if run.recompute.shard and (parallel.tensor == 1 or parallel.sequence):
        why = "there is one tensor rank" if parallel.tensor == 1 else "sequence parallelism shards them already"
        yield Note("recompute.shard", f"sharding the saved inputs has no effect: {why}")
    if parallel.compile:
        yield Note("parallel.compile", "the plan's memory is that of blocks that are not compiled")
    covered = run.recompute.layers
    if run.recompute.mode == "full" and covered != "all" and covered > layers:
        yield Note("recompute.layers", f"the model has {layers} layers, fewer than {covered}: all are recomputed")


def _engine_notes(engine: Engine) -> Iterator[Note]:
    given = sorted(engine.model_fields_set - {"framework", "version"})
    if engine.framework == "steelyard" and given:
        keys = ", ".join(f"engine.{key}" for key in given)
        yield Note("engine", f"without effect on steelyard's own engine: {keys}")


def _precision_notes(precision: Precision) -> Iterator[Note]:
    if precision.compute != "fp16" and "loss_scale" in precision.model_fields_set:
        yield Note("precision.loss_scale", f"the loss scale has no effect with {precision.compute}; only fp16 uses it")
