"""The plan of a run as one document: everything that is known before launch. Its JSON is a contract (docs/plan.md):
keys are added, never changed, within one VERSION. It stands in every run folder as plan.json.
"""

import re
from math import ceil
from typing import Any

from steelyard import hardware
from steelyard.frameworks import counting
from steelyard.plan import memory, traffic
from steelyard.predict import flops, parameters, pipeline, stages
from steelyard.spec import check, progress
from steelyard.spec.run import Run

SCHEMA, VERSION = "steelyard.plan", 1


def as_json(run: Run, rank: int | None = None) -> dict[str, Any]:
    """The plan of a run as JSON-ready values. Counts are integers; FLOPs are per global batch unless the key says
    otherwise; what is unknown is null. `rank` narrows `memory` to one rank. Raises UserError H001 for an unknown chip,
    M001 for a rank outside the world."""
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "name": run.name,
        "size_in_name": size_in_name(run),
        "model": model(run),
        "layout": layout(run),
        "batch": batch(run),
        "length": length(run),
        "learning_rate": learning_rate(run),
        "parameters": parameter_counts(run),
        "flops": flop_counts(run),
        "recompute": recompute(run),
        "hardware": chip(run),
        "memory": memory.as_json(run, rank),
        "traffic": traffic.as_json(run),
        "notes": [{"key": note.key, "text": note.text} for note in check.notes(run)],
    }


def size_in_name(run: Run) -> dict[str, Any] | None:
    """The size that the run's name claims ("tr8-104B", "1B3", "345m") and how far the truth is from it, as a share of
    the claim; None where the name claims none. The truth is the count without padding rows."""
    found = re.search(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)([mMbBtT])(\d?)(?![A-Za-z0-9])", run.name)
    if not found:
        return None
    number, unit, behind = found.groups()
    digits = f"{number}.{behind}" if behind and "." not in number else number
    claimed = round(float(digits) * {"m": 1e6, "b": 1e9, "t": 1e12}[unit.lower()])
    if claimed == 0:
        return None
    return {"claimed": claimed, "difference": parameters.unique_unpadded(run.model) / claimed - 1}


def model(run: Run) -> dict[str, Any]:
    """The shape of the network, with the vocabulary as stored and as it is."""
    names = (
        "kind", "num_layers", "hidden_size", "num_attention_heads", "head_dim", "num_query_groups", "ffn_hidden_size",
        "seq_length", "vocab_size", "position", "norm", "activation", "tied_embeddings",
    )  # fmt: skip
    shape = {name: getattr(run.model, name) for name in names}
    padded = run.padded_vocab_size
    return {**shape, "padded_vocab_size": padded, "padding_rows": padded - run.model.vocab_size}


def recompute(run: Run) -> dict[str, Any]:
    """What is recomputed, as asked."""
    asked = run.recompute
    return {"mode": asked.mode, "every": asked.every, "layers": asked.layers, "modules": list(asked.modules)}


def layout(run: Run) -> dict[str, Any]:
    """The mesh, the layers of each stage, each stage's model FLOPs for one sequence, and the pipeline's bubble."""
    names = (
        "world_size", "tensor", "sequence", "context", "pipeline", "pipeline_schedule", "virtual", "data", "replicate",
        "shard", "zero",
    )  # fmt: skip
    bubble = pipeline.bubble(run.model, run.parallel, run.batch.accumulation)
    return {
        **{name: getattr(run.parallel, name) for name in names},
        "stages": list(stages.split(run.model, run.parallel)),
        "stage_flops_per_sequence": list(stages.costs(run.model, run.parallel)),
        "imbalance": stages.imbalance(run.model, run.parallel),
        "bubble": bubble.fraction,
        "bubble_of_schedule": bubble.schedule,
    }


def batch(run: Run) -> dict[str, Any]:
    """The batch at its full size, and the levels of the ramp towards it (one level without a ramp)."""
    total = progress.total_samples(run.length, run.batch, run.model.seq_length)
    return {
        "global_batch_size": run.batch.global_batch_size,
        "micro_batch_size": run.batch.micro_batch_size,
        "accumulation": run.batch.accumulation,
        "tokens_per_step": run.tokens_per_step,
        "levels": [{**vars(level), "first_step": level.first_step + 1} for level in progress.levels(run.batch, total)],
    }


def length(run: Run) -> dict[str, int]:
    """What the run consumes in whole steps."""
    steps = progress.total_steps(run.length, run.batch, run.model.seq_length)
    samples = progress.samples_after(run.batch, steps)
    return {"steps": steps, "samples": samples, "tokens": samples * run.model.seq_length}


def learning_rate(run: Run) -> list[dict[str, Any]]:
    """The rate at the steps where something changes, if no step is skipped. Steps count from 1; `samples` are those
    consumed before the step."""
    curve = progress.schedule(run.learning_rate, run.length, run.batch, run.model.seq_length)
    last = length(run)["steps"]
    late = run.learning_rate.first_update == "zero"

    def step_at(sample: float) -> int:
        """The step whose update uses the rate at that sample of the curve."""
        return max(1, sum(level.steps for level in progress.levels(run.batch, ceil(sample))) + late)

    events = {1: "first update"}
    for level in batch(run)["levels"][1:]:
        if level["steps"]:
            events.setdefault(level["first_step"], f"global batch {level['global_batch_size']}")
    if curve.warmup > 0:
        events[step_at(curve.warmup)] = "warm-up ends"
    if run.learning_rate.decay != "constant":
        events.setdefault(step_at((curve.warmup + curve.decay) / 2), "half of the decay")
        events.setdefault(step_at(curve.decay), "decay ends")
    events.setdefault(last, "last update")
    rows = []
    for step in sorted(number for number in events if number <= last):
        before = progress.samples_after(run.batch, step - 1)
        size = progress.batch_size_at(run.batch, before)
        rate = curve.rate(before, size)
        rows.append({"step": step, "samples": before, "global_batch_size": size, "rate": rate, "event": events[step]})
    return rows


def parameter_counts(run: Run) -> dict[str, Any]:
    """Totals, stages, classes of equal ranks, and what other systems would print; `says` words what each counts."""
    spec, parallel = run.model, run.parallel
    printed = counting.printed(run)
    return {
        "unique": parameters.unique(spec, parallel.tensor),
        "unique_unpadded": parameters.unique_unpadded(spec),
        "padding": parameters.padding(spec, parallel.tensor),
        "without_embeddings": parameters.without_embeddings(spec),
        "sum_over_ranks": parameters.sum_over_ranks(spec, parallel),
        "per_stage": list(parameters.per_stage(spec, parallel)),
        "ranks": [_rank(rank) for rank in parameters.ranks(spec, parallel)],
        "tensors": _tensors(run),
        "as_printed": {key: entry.value for key, entry in printed.items()},
        "says": {**PARAMETERS_SAY, **{key: entry.says for key, entry in printed.items()}},
    }


def _tensors(run: Run) -> list[dict[str, Any]]:
    """The tensors of the model, those that are equal in every layer once with how often they occur."""
    found: dict[str, dict[str, Any]] = {}
    for entry in parameters.tensors(run.model, run.parallel.tensor):
        name = re.sub(r"^layers\.\d+\.", "layers.*.", entry.name)
        if name not in found:
            place = {"name": name, "part": entry.part, "shape": list(entry.shape), "cut": entry.cut}
            found[name] = {**place, "parameters": entry.numel, "times": 0}
        found[name]["times"] += 1
    return list(found.values())


def _rank(rank: parameters.Rank) -> dict[str, int]:
    """A class of equal ranks. `stage` is its place along the pipeline; with virtual stages it holds several chunks."""
    held = dict(vars(rank.held))
    total = held.pop("total")
    place = {"stage": rank.pipeline, "tensor": rank.tensor, "count": rank.count}
    return {**place, "stored": rank.stored, "held": total, **held}


PARAMETERS_SAY = {
    "unique": "Each distinct scalar once, padding rows included.",
    "unique_unpadded": "Each distinct scalar once, without the rows that stand for no token: the size of the model.",
    "padding": "Parameters in padding rows.",
    "without_embeddings": "Blocks and norms: no word embedding, no position table, no output head.",
    "sum_over_ranks": "Parameters held by the tensor x pipeline ranks of one replica, added up: replicated tensors "
    "count once per tensor rank and tied embeddings twice with a pipeline. Not the size of the model.",
    "per_stage": "Distinct parameters of each pipeline stage; the last holds a copy of tied word embeddings.",
    "tensors": "Every tensor, those of a layer once with `times` layers; `cut` is the dimension that the tensor axis "
    "divides, null where every tensor rank holds the whole.",
    "ranks": "Classes of equal ranks: `count` ranks hold `held` parameters each and keep `stored` on the device "
    "throughout a step (a shard under ZeRO 3).",
}


def flop_counts(run: Run) -> dict[str, Any]:
    """FLOPs per global batch, per token and per run, per product, and by other definitions; `says` words each."""
    spec, vocabulary = run.model, run.padded_vocab_size
    layers = stages.split(spec, run.parallel)
    sequences, views = run.batch.global_batch_size, counting.views(run)
    model = flops.model_flops(spec, vocabulary)
    full = flops.model_flops(spec, vocabulary, causal=False)
    return {
        "model_per_step": sequences * model,
        "model_per_step_full_attention": sequences * full,
        "hardware_per_step": sequences * flops.hardware_flops(spec, vocabulary, run.recompute, layers),
        "hardware_per_step_full_attention": sequences
        * flops.hardware_flops(spec, vocabulary, run.recompute, layers, causal=False),
        "model_per_token": model // spec.seq_length,
        "model_per_run": model * length(run)["samples"],
        "forward_per_sequence": {
            entry.name: {"formula": entry.formula, "flops": entry.flops, "times": entry.times, "masked": entry.masked}
            for entry in flops.products(spec, vocabulary)
        },
        "views": {key: view.flops_per_step for key, view in views.items()},
        "says": {**FLOPS_SAY, **{key: view.says for key, view in views.items()}},
    }


FLOPS_SAY = {
    "model_per_step": "Forward and backward of one full global batch: matrix products of the actual shapes, half of "
    "each score matrix (causal), padded vocabulary, nothing recomputed.",
    "model_per_step_full_attention": "The same with the whole score matrices.",
    "hardware_per_step": "model_per_step plus the forward of what is recomputed, block by block; the logits never are.",
    "hardware_per_step_full_attention": "The same with the whole score matrices.",
    "model_per_token": "model_per_step over its tokens.",
    "model_per_run": "Model FLOPs of every sample the run consumes.",
    "forward_per_sequence": "The matrix products of one forward pass over one sequence, `times` times in the model; "
    "`masked` ones count half in the causal figures. Forward and backward together are three times as much.",
}


def as_reported(run: Run, counts: counting.Counts) -> dict[str, Any]:
    """What one framework would print about this run and how it counts its FLOPs per step."""
    return {
        "framework": counts.NAME,
        "printed": {
            entry.key: {"value": entry.value, "says": entry.says, "lines": list(entry.lines)}
            for entry in counts.printed(run)
        },
        "views": {view.key: {"flops_per_step": view.flops_per_step, "says": view.says} for view in counts.views(run)},
    }


def chip(run: Run) -> dict[str, Any]:
    """The device and its dense peak in the compute dtype; null where unknown."""
    found = hardware.of(run.hardware)
    dtype = run.precision.compute
    return {
        "chip": found.name if found else None,
        "dtype": dtype,
        "peak_flops": found.peak.get(dtype) if found else None,
        "peak_source": found.source if found else None,
    }


def dumps(value: Any, indent: str = "") -> str:
    """JSON with one line for a list of plain values and for a short object: tables stay readable and diffable."""
    from json import dumps as plain

    line = plain(value)
    nested = isinstance(value, list) and any(isinstance(entry, dict | list) for entry in value)
    if not isinstance(value, dict | list) or not (nested or isinstance(value, dict)):
        return line
    if isinstance(value, dict) and "{" not in line[1:] and len(indent) + len(line) <= 240:
        return line
    deeper = indent + " "
    if isinstance(value, dict):
        entries = [f"{deeper}{plain(key)}: {dumps(entry, deeper)}" for key, entry in value.items()]
        return "{\n" + ",\n".join(entries) + f"\n{indent}}}"
    return "[\n" + ",\n".join(f"{deeper}{dumps(entry, deeper)}" for entry in value) + f"\n{indent}]"
