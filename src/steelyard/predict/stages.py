"""Which layers stand on which pipeline stage, and what each stage costs."""

from functools import lru_cache

from steelyard.predict import flops
from steelyard.spec.model import Model
from steelyard.spec.parallel import Parallel


@lru_cache(maxsize=64)
def split(model: Model, parallel: Parallel) -> tuple[int, ...]:
    """Layers per stage, `pipeline x virtual` numbers that add up to `num_layers`; explicit `parallel.stages` win.
    Without a pipeline there is one stage, whatever `stages` and `virtual` say.

    Balanced: the slowest stage is as fast as whole layers allow, the head counted on the last stage. Layers are given
    out one at a time to the stage that costs least with it, which is optimal for equal layers; where stages tie, the
    later one gets the layer, since the earlier ones hold more micro-batches in flight.
    """
    if parallel.pipeline == 1:
        return (model.num_layers,)
    if parallel.stages != "balanced":
        return parallel.stages
    layer, extra = _layer_cost(model), _extra_cost(model, parallel)
    layers = [1] * parallel.num_stages
    for _ in range(model.num_layers - parallel.num_stages):
        best = min(reversed(range(len(layers))), key=lambda stage: (layers[stage] + 1) * layer + extra[stage])
        layers[best] += 1
    return tuple(layers)


def chunks(parallel: Parallel, pipeline_rank: int) -> tuple[int, ...]:
    """The stages that stand on one pipeline rank: every `pipeline`-th one; in a ZBV schedule the V, there and back."""
    if parallel.pipeline == 1:
        return (0,)
    if parallel.pipeline_schedule == "zbv":
        return pipeline_rank, 2 * parallel.pipeline - 1 - pipeline_rank
    return tuple(range(pipeline_rank, parallel.num_stages, parallel.pipeline))


def costs(model: Model, parallel: Parallel) -> tuple[int, ...]:
    """Model FLOPs (forward and backward, causal) of each stage for one sequence. The embedding lookup has none; the
    head's product is on the last stage. They add up to the model's FLOPs."""
    layer, extra = _layer_cost(model), _extra_cost(model, parallel)
    return tuple(count * layer + more for count, more in zip(split(model, parallel), extra, strict=True))


def imbalance(model: Model, parallel: Parallel) -> float:
    """Slowest stage over the mean stage; 1 is perfect. A pipeline's steady state runs at the slowest stage's speed."""
    cost = costs(model, parallel)
    return max(cost) * len(cost) / sum(cost)


def _layer_cost(model: Model) -> int:
    return flops.FORWARD_AND_BACKWARD * flops.forward_per_layer(model)


def _extra_cost(model: Model, parallel: Parallel) -> list[int]:
    """What a stage does besides its layers."""
    head = flops.FORWARD_AND_BACKWARD * flops.logits(model, model.padded_vocab_size(parallel.tensor))
    stages = parallel.num_stages if parallel.pipeline > 1 else 1
    return [0] * (stages - 1) + [head]
