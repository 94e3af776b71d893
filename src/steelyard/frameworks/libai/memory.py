"""What LiBai allocates: OneFlow's static graph with AMP (fp16) and ZeRO 0 to 2.

Source: LiBai `graph_base.py`, `layers/attention.py`; OneFlow's AMP and ZeRO passes. Variables are fp32; AMP casts each
to fp16 once for the step. ZeRO splits the variables and moments over the data ranks and gathers the fp16 casts; stage 2
also scatters the gradients as they come. LiBai's attention keeps its score matrices (fused scale, mask and softmax).
"""

from dataclasses import replace

from steelyard.frameworks.allocating import refuse_others
from steelyard.frameworks.megatron import memory as megatron
from steelyard.predict import parameters
from steelyard.predict.memory import Memory, Moment, States, times, total
from steelyard.spec.run import Run

NAME = "LiBai"


def stages(layers: int, pipeline: int) -> tuple[int, ...]:
    """Layers per stage. From 4 stages and 8 layers on that divide, the last stage gets fewer and the ones before it one
    more each; what does not divide goes to later stages. Source: LiBai `distributed.py`, 24 / 4 -> 6 7 7 4."""
    share, over = divmod(layers, pipeline)
    found = [share + (stage >= pipeline - over) for stage in range(pipeline)]
    if pipeline >= 4 and layers >= 8 and not over:
        moved = min(pipeline - 2, share - 1)
        found = [share + (pipeline - 1 - moved <= stage < pipeline - 1) for stage in range(pipeline)]
        found[-1] -= moved
    return tuple(found)


def states(count: int, run: Run) -> States:
    """fp16 casts 2 P; gradients 2 P in fp16, 2 P / d at stage 2; variables 4 P and moments 8 P in fp32, over d with
    ZeRO. In fp32 there is no cast: 4 P, 4 P, 8 P."""
    zero = run.parallel.zero
    shard = -(-count // run.parallel.data) if zero else count
    if run.precision.compute == "fp32":
        return States(4 * count, 4 * (shard if zero >= 2 else count), 0, 8 * shard)
    return States(2 * count, 2 * (shard if zero >= 2 else count), 4 * shard, 8 * shard)


def loss(run: Run, size: megatron.Sizes) -> dict[str, int]:
    """Logits in fp16, their fp32 cast, the softmax that the cross entropy keeps, and the gradient's fp16 cast: 12 bytes
    an element. Source: OneFlow `sparse_softmax_cross_entropy` under AMP's black list."""
    return {"activations.norm": 2 * size.residual, "logits": size.tokens * size.rows * (2 * size.width + 8)}


def assumed(run: Run) -> tuple[str, ...]:
    """What was assumed where the run does not say it."""
    return ()


def ranks(run: Run) -> tuple[Memory, ...]:
    """The memory of every class of equal ranks, pipeline rank outermost. All micro-batches of a pipeline's warm-up are
    in flight: min(m, p - rank). Raises UserError M004."""
    legal = {"parallel.virtual": (1,), "parallel.context": (1,), "parallel.zero": (0, 1, 2)}
    refuse_others(NAME, run, {**legal, "precision.compute": ("fp16", "fp32")})
    run = megatron.of_2021(run)
    parallel = run.parallel
    if parallel.pipeline > 1 and parallel.stages == "balanced":
        split = stages(run.model.num_layers, parallel.pipeline)
        run = run.model_copy(update={"parallel": parallel.model_copy(update={"stages": split})})
    found = []
    for rank in range(parallel.pipeline):
        memory = _rank(run, rank)
        found += [replace(memory, tensor=tensor) for tensor in range(parallel.tensor)]
    return tuple(found)


def _rank(run: Run, rank: int) -> Memory:
    parallel, size = run.parallel, megatron.sizes(run)
    model = megatron.network(run)
    held = parameters.rank_tensors(model, run.parallel, rank)
    state = states(sum(t.local_numel(parallel.tensor) for t in held), run)
    layers = parameters.stages.split(model, run.parallel)[rank]
    flying = megatron.in_flight(run.parallel, run.batch.accumulation, rank, None)
    alive = total([
        times(megatron.stage_activations(run, size, layers), flying),
        times(megatron.embedding(run, size), flying if rank == 0 else 0),
    ])  # fmt: skip
    moments = [
        Moment("backward", state, total([alive, megatron.recomputed(run, size, layers), megatron.backward(run, size)]))
    ]
    if rank == parallel.pipeline - 1:
        moments.append(Moment("loss", state, total([alive, loss(run, size)])))
    between = replace(state, gradients=0)
    return Memory(rank, 0, parallel.data, tuple(moments), {}, between, state.optimizer)
