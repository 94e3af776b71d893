"""A run -> a launch script of another framework, or of steelyard itself.

What is written is read back by the same reader that translates scripts in, and every value that comes back as another
one is stated: nothing is approximated in silence. What the other framework cannot do at all is an error.
"""

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steelyard.frameworks.libai import write as libai
from steelyard.frameworks.megatron import write as megatron
from steelyard.frameworks.megatron_deepspeed import write as fork
from steelyard.predict import stages
from steelyard.spec import Loaded, progress, resolve
from steelyard.spec import write as run_file
from steelyard.spec.errors import UserError, error
from steelyard.spec.run import Engine, Run
from steelyard.translate import into

# What says where files are and how a run is watched, not what it computes; never compared.
ELSEWHERE = (
    "name", "model.kind", "record", "hardware", "engine", "bench", "data.cache", "data.tokenizer", "checkpoint.keep",
    "checkpoint.asynchronous", "checkpoint.overlap_steps", "checkpoint.load", "checkpoint.accept",
    "checkpoint.every_minutes", "stop.hang_seconds",
    "stop.nan_limit", "stop.on_nan",
)  # fmt: skip
WHY = {
    "learning_rate.first_update": "there the first update has rate 0 and the curve comes one step later",
    "model.padding_in_softmax": "there padding rows take part in the softmax and are trained",
    "batch.loss_mean": "there the loss is the mean of micro-batch means, which is the same while no target is masked",
    "precision.loss_scale.rule": "both rules move the scale alike",
    "model.activation": "there GELU is the exact form, which differs from the tanh form by less than 0.001",
    "parallel.compile": "it changes speed, not results",
    "evaluation.every_steps": "there an interval is always set",
    "data.split": "without data there is nothing to split",
}


@dataclass(frozen=True)
class Difference:
    """A value of the run that the written text does not say: `here` in the run, `there` as it is read back."""

    key: str
    here: str
    there: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.key}: {self.here} here, {self.there} there" + (f" ({self.why})" if self.why else "")


@dataclass(frozen=True)
class Written:
    text: str
    differences: tuple[Difference, ...] = ()


def target(name: str) -> str:
    """Raises UserError F021."""
    plain = name.lower().replace("_", "-")
    if plain not in TARGETS:
        raise error("F021", place="--to", target=name, known=", ".join(TARGETS))
    return plain


def as_run_file(loaded: Loaded, keep_engine: bool = False) -> Written:
    """As a run file, every value with its origin. Without `keep_engine` the other framework's own settings are left
    out, so that it can be trained from."""
    run = loaded.run
    differences = [] if keep_engine else list(_left_out(run.engine))
    if not keep_engine:
        run = run.model_copy(update={"engine": Engine()})
        try:
            resolve({**run_file.as_config(run), "engine": {}})
        except UserError as failure:
            differences += [
                Difference(p.key or "run", "as written", "refused by train", p.rule) for p in failure.problems
            ]
    text = run_file.dumps(run, lambda key: str(loaded.origin(key)))
    if run.engine == Engine():
        text = re.sub(r"\n\[engine\]\n.*?(?=\n\[|\Z)", "", text, flags=re.DOTALL).rstrip() + "\n"
    return Written(text, tuple(differences))


def _left_out(engine: Engine) -> Iterator[Difference]:
    """Settings of a framework's own engine that change numbers."""
    why = "it is trained without"
    plain: dict[str, tuple[Any, ...]] = {
        "fp32_residual": (None, False), "master_dtype": (None, "fp32"), "fp8": (None,), "offload": (None,),
        "moment_dtypes": (None, ("fp32", "fp32")),
    }  # fmt: skip
    for name, harmless in plain.items():
        value = getattr(engine, name)
        if value not in harmless:
            yield Difference(f"engine.{name}", str(value), "left out", why)


def write(loaded: Loaded, target: str, keep_engine: bool = False) -> Written:
    run = loaded.run
    if target == "toml":
        return as_run_file(loaded, keep_engine)
    if target in ("torchrun", "slurm"):
        here = as_run_file(loaded)
        return Written(_own(run, here.text, target), here.differences)
    body = BODIES[target](run)
    name = "translated.py" if target == "libai" else "translated.sh"
    back = into.of_text(body, Path(name))
    differences = tuple(_differences(run, _again(back, run)))
    return Written(_headed(run, body, target, differences), differences)


def _again(found: Any, run: Run) -> Run:
    """The run that a written text comes to."""
    values = {key: value for key, value in found.values.items() if key != "engine"}
    if found.problems:
        raise UserError(list(found.problems))
    model = dict(values.get("model", {}))
    model.setdefault("vocab_size", run.model.vocab_size)
    return resolve(
        {**values, "model": model, "engine": {"framework": "other"}}, world=found.world or run.parallel.world_size
    ).run


def _differences(run: Run, back: Run) -> Iterator[Difference]:
    here, there = canonical(run), canonical(back)
    for key in here:
        if here[key] != there[key]:
            yield Difference(key, _shown(here[key]), _shown(there[key]), WHY.get(key, ""))


def _shown(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str | bool) or value is None else str(value)


def canonical(run: Run) -> dict[str, Any]:
    """What a run computes with, in one form: amounts in samples, stages as layers, the vocabulary padded."""
    flat = {key: value for key, value in _flat("", run_file.as_config(run)) if not key.startswith(ELSEWHERE)}
    for key in [
        key
        for key in flat
        if key.startswith(("learning_rate.warmup", "learning_rate.decay_", "length.", "model.vocab_multiple"))
    ]:
        del flat[key]
    curve = progress.schedule(run.learning_rate, run.length, run.batch, run.model.seq_length)
    flat |= {
        "length.steps": progress.total_steps(run.length, run.batch, run.model.seq_length),
        "learning_rate.warmup_samples": round(curve.warmup, 6),
        "learning_rate.decay_samples": curve.decay if run.learning_rate.decay != "constant" else 0,
        "parallel.stages": list(stages.split(run.model, run.parallel)),
        "model.padded_vocab_size": run.padded_vocab_size,
    }
    if run.parallel.pipeline == 1:
        for key in ("parallel.pipeline_schedule", "parallel.virtual"):
            flat[key] = None
    if run.precision.compute != "fp16":
        for key in [key for key in flat if key.startswith("precision.loss_scale")]:
            flat[key] = None
    if run.recompute.mode != "full":
        flat |= {"recompute.every": None, "recompute.layers": None, "recompute.shard": None}
    if run.recompute.mode != "selective":
        flat["recompute.modules"] = None
    if run.learning_rate.decay != "wsd":
        flat |= {"learning_rate.wsd_decay": None, "learning_rate.wsd_decay_fraction": None}
    if run.model.position != "rotary":
        flat |= {"model.rotary_base": None, "model.rotary_fraction": None}
    if run.model.position != "learned":
        flat["model.max_position_embeddings"] = None
    if not run.data.train or run.data.validation or run.data.test:
        flat["data.split"] = None
    return {**dict.fromkeys(OPTIONAL), **flat}


OPTIONAL = ("batch.ramp", "precision.loss_scale.static")  # absent where they are not set


def _flat(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}", _plain(value)


def _plain(value: Any) -> Any:
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


# --- texts -----------------------------------------------------------------------------------------------------------
def _megatron(run: Run) -> str:
    groups = megatron.groups(run)
    return "\n".join([
        "#!/bin/bash", *_nodes(run),
        "DISTRIBUTED_ARGS=(",
        '    --nproc_per_node "$GPUS_PER_NODE"', '    --nnodes "$NNODES"', '    --node_rank "$NODE_RANK"',
        '    --master_addr "$MASTER_ADDR"', '    --master_port "$MASTER_PORT"', ")",
        *_arrays(groups),
        'torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py \\\n' + _uses(groups),
    ]) + "\n"  # fmt: skip


def _megatron_deepspeed(run: Run) -> str:
    groups = fork.groups(run)
    path = f"ds_config_{run.name}.json"
    return "\n".join([
        "#!/bin/bash", *_nodes(run),
        f"cat <<'EOT' > {path}\n{json.dumps(fork.json(run), indent=2)}\nEOT",
        *_arrays(groups), _array("DEEPSPEED_ARGS", fork.engine(run, path)),
        'deepspeed --num_gpus "$GPUS_PER_NODE" --num_nodes "$NNODES" --master_port "$MASTER_PORT" pretrain_gpt.py \\\n'
        + _uses(groups) + ' \\\n    "${DEEPSPEED_ARGS[@]}"',
    ]) + "\n"  # fmt: skip


def _libai(run: Run) -> str:
    return libai.text(run)


def _nodes(run: Run) -> list[str]:
    world = run.parallel.world_size
    per_node = min(world, run.hardware.devices_per_node)
    return [f"GPUS_PER_NODE={per_node}", f"NNODES={world // per_node}", "NODE_RANK=${NODE_RANK:-0}",
            "MASTER_ADDR=${MASTER_ADDR:-localhost}", "MASTER_PORT=${MASTER_PORT:-6000}"]  # fmt: skip


def _arrays(groups: megatron.Groups) -> list[str]:
    return [_array(f"{name.upper()}_ARGS", getattr(groups, name)) for name in _names(groups)]


def _names(groups: megatron.Groups) -> list[str]:
    return [name for name in ("model", "parallel", "training", "data", "output") if getattr(groups, name)]


def _array(name: str, arguments: Sequence[megatron.Argument]) -> str:
    return (
        f"{name}=(\n"
        + "".join(f"    {' '.join(shlex.quote(word) for word in argument)}\n" for argument in arguments)
        + ")"
    )


def _uses(groups: megatron.Groups) -> str:
    return " \\\n".join(f'    "${{{name.upper()}_ARGS[@]}}"' for name in _names(groups))


def _headed(run: Run, body: str, target: str, differences: Sequence[Difference]) -> str:
    """The text with what it is, and what it does not say, in its first lines."""
    first, _, rest = body.partition("\n") if body.startswith("#!") else ("", "", body)
    said = [f"{run.name}, written for {target} by `steelyard translate`."]
    if differences:
        said += ["What it does not say as the run does:", *(f"  {difference}" for difference in differences)]
    lines = [" ".join(f"# {line}".split("\n")) for line in said]
    return "\n".join([*([first] if first else []), *lines, rest])


def _own(run: Run, text: str, target: str) -> str:
    """A script that starts the run here; the run file is part of it."""
    world, path = run.parallel.world_size, f"{run.name}.toml"
    per_node = min(world, run.hardware.devices_per_node)
    if world % per_node:
        raise error("F020", "hardware.devices_per_node", target=target, name="hardware.devices_per_node",
                    value=run.hardware.devices_per_node, advice="the ranks must fill whole nodes")  # fmt: skip
    file = f"cat > {path} <<'STEELYARD'\n{text}STEELYARD\n"
    command = f"-m steelyard.cli.main train {path}"
    if target == "torchrun":
        return "\n".join([
            "#!/bin/bash",
            f"# {run.name}, written by `steelyard translate`. On every node: NODE_RANK=n MASTER_ADDR=host.",
            *_nodes(run), file,
            'torchrun --nproc_per_node "$GPUS_PER_NODE" --nnodes "$NNODES" --node_rank "$NODE_RANK" \\\n'
            f'    --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" \\\n    {command}',
        ]) + "\n"  # fmt: skip
    return "\n".join([
        "#!/bin/bash", f"#SBATCH --job-name={run.name}", f"#SBATCH --nodes={world // per_node}",
        "#SBATCH --ntasks-per-node=1", f"#SBATCH --gpus-per-node={per_node}",
        f"# {run.name}, written by `steelyard translate`: one launcher a node, which starts a rank for each device.",
        file,
        'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        f"srun torchrun --nproc_per_node {per_node} --nnodes {world // per_node} --rdzv_backend c10d \\\n"
        f'    --rdzv_id "$SLURM_JOB_ID" --rdzv_endpoint "$MASTER_ADDR:29500" \\\n    {command}',
    ]) + "\n"  # fmt: skip


BODIES: dict[str, Callable[[Run], str]] = {
    "megatron": _megatron,
    "megatron-deepspeed": _megatron_deepspeed,
    "libai": _libai,
}
TARGETS = ("toml", *BODIES, "torchrun", "slurm")
