"""What DeepSpeed's pipeline engine prints: STAGE_PARAMS, TOTAL_PARAMS, UNIQUE_PARAMS, and how it places layers."""

from dataclasses import dataclass

from steelyard.frameworks.megatron.counts import network
from steelyard.frameworks.views import Printed, View
from steelyard.predict import parameters
from steelyard.predict.parameters import Tensor
from steelyard.spec.model import Model
from steelyard.spec.run import Run

NAME = "DeepSpeed"


def partition(layers: int, stages: int, before_0_12_5: bool = False) -> tuple[int, ...]:
    """Transformer layers per stage under `type:transformer`.

    The partitioner only sees equal weights. Until December 2023 (0.12.5) it finds the smallest possible largest stage
    and fills the stages up to it from the front, so that the last ones may be nearly empty; since then it minimises the
    difference between the largest and the smallest stage. Source: DeepSpeed `partition_balanced`, pull request 4312.
    """
    if not before_0_12_5:
        return tuple(layers // stages + (stage < layers % stages) for stage in range(stages))
    most = -(-layers // stages)
    return tuple(max(0, min(most, layers - stage * most)) for stage in range(stages))


def placement(run: Run, before_0_12_5: bool = False) -> tuple[int, ...] | None:
    """Layers per stage: the run's own where they are written down, else the partitioner's; None with virtual stages,
    which this engine does not have."""
    if run.parallel.pipeline == 1:
        return (run.model.num_layers,)
    if run.parallel.virtual > 1:
        return None
    if run.parallel.stages != "balanced":
        return run.parallel.stages
    return partition(run.model.num_layers, run.parallel.pipeline, before_0_12_5)


@dataclass(frozen=True)
class Stage:
    """Tensors of one pipeline stage, and those of the last stage's copy of the tied embedding module among them."""

    tensors: tuple[Tensor, ...]
    tied_module: tuple[Tensor, ...]


def stages(run: Run, model: Model, layers: tuple[int, ...], before_pull_261: bool = False) -> tuple[Stage, ...]:
    """Each stage's tensors. The last stage holds a copy of the *whole* tied embedding module: word embedding, position
    table, and before Megatron-DeepSpeed pull request 261 the embedding norm.
    """
    parallel = run.parallel.model_copy(update={"stages": layers})
    found = [Stage(parameters.stage_tensors(model, parallel, stage), ()) for stage in range(parallel.pipeline)]
    if parallel.pipeline > 1 and model.tied_embeddings:
        whole = parameters.stage_tensors(model, parallel, 0)
        more = [t for t in whole if t.part == "position" or (before_pull_261 and t.name.startswith("embedding.norm"))]
        last = found[-1].tensors
        word = [t for t in last if t.tied_copy]
        found[-1] = Stage((*last, *more), (*word, *more))
    return tuple(found)


def local(tensors: tuple[Tensor, ...], tensor: int) -> int:
    """Parameters on one tensor rank."""
    return sum(entry.local_numel(tensor) for entry in tensors)


@dataclass(frozen=True)
class Params:
    """The three numbers of the line. `stage` has one entry per pipeline stage, each of one tensor rank."""

    stage: tuple[int, ...]
    total: int
    unique: int


def params(run: Run, layers: tuple[int, ...], before_pull_261: bool = False) -> Params:
    """STAGE = parameters of this rank; TOTAL = their sum over tensor and pipeline ranks; UNIQUE = TOTAL less the copies
    of tied modules on later stages. Source: DeepSpeed `runtime/pipe/engine.py`."""
    tensor = run.parallel.tensor
    found = stages(run, network(run), layers, before_pull_261)
    stage = tuple(local(entry.tensors, tensor) for entry in found)
    total = sum(stage) * tensor
    copies = sum(local(entry.tied_module, tensor) for entry in found) * tensor
    return Params(stage, total, total - copies)


def printed(run: Run) -> tuple[Printed, ...]:
    layers = placement(run)
    if layers is None:
        why = "DeepSpeed's pipeline engine has no virtual stages."
        names = ("stage", "stage_before_0_12_5", "total", "unique")
        return tuple(Printed(f"deepspeed_{name}", None, why) for name in names)
    now = params(run, layers)
    older = placement(run, before_0_12_5=True)
    assert older is not None
    return (
        Printed(
            "deepspeed_stage",
            list(now.stage),
            "STAGE_PARAMS: one tensor rank's own parameters of each stage, the last with its copy of the whole tied "
            "embedding module, positions included.",
            _lines(run, layers, now),
        ),
        Printed(
            "deepspeed_stage_before_0_12_5",
            list(params(run, older).stage),
            "STAGE_PARAMS before December 2023, when the partitioner filled stages from the front.",
        ),
        Printed(
            "deepspeed_total",
            now.total,
            "TOTAL_PARAMS: added up over tensor and pipeline ranks, so replicated tensors count once per tensor rank "
            "and the tied embedding module twice.",
        ),
        Printed(
            "deepspeed_unique",
            now.unique,
            "UNIQUE_PARAMS: without the second copy of the tied module, but tensors replicated over the tensor ranks "
            "still count once per rank: not unique.",
        ),
    )


def _lines(run: Run, layers: tuple[int, ...], now: Params) -> tuple[str, ...]:
    """One line per stage, of its first rank."""
    per_stage = run.parallel.world_size // run.parallel.pipeline
    half = run.precision.compute in ("fp16", "bf16")
    return tuple(
        f"RANK={stage * per_stage} STAGE={stage} LAYERS={end - start} [{start}, {end}) "
        f"STAGE_PARAMS={_with_millions(own)} TOTAL_PARAMS={_with_millions(now.total)} "
        f"UNIQUE_PARAMS={_with_millions(now.unique)}"
        for stage, ((start, end), own) in enumerate(zip(ranges(layers, half), now.stage, strict=True))
    )


def ranges(layers: tuple[int, ...], half: bool, spring_2021: bool = False) -> list[tuple[int, int]]:
    """The pipeline layers of each stage. They are not transformer layers only: Megatron-DeepSpeed puts a cast (not yet
    in spring 2021), the embedding and a transpose in front, and a transpose, the final norm, the head and in half
    precision a cast behind."""
    front, behind = (2, 4) if spring_2021 else (3, 3 + half)
    ends = [front + sum(layers[: stage + 1]) for stage in range(len(layers))]
    ends[-1] += behind
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _with_millions(count: int) -> str:
    return f"{count} ({count / 1e6:.3f}M)"


def views(run: Run) -> tuple[View, ...]:
    return ()
