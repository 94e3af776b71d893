"""What Megatron-DeepSpeed allocates: Megatron's network of 2021 in DeepSpeed's pipeline, with ZeRO 0 or 1.

Source: DeepSpeed `runtime/pipe/engine.py` (buffers) and `schedule.py` (in flight: min(stages - stage, m)),
`bf16_optimizer.py`; the optimizer is `frameworks/deepspeed/memory.py`.
"""

from dataclasses import replace

from steelyard.frameworks.allocating import refuse_others
from steelyard.frameworks.deepspeed import memory as deepspeed
from steelyard.frameworks.deepspeed.counts import placement, stages
from steelyard.frameworks.megatron import memory as megatron
from steelyard.predict import parameters
from steelyard.predict.memory import Memory, Moment, times, total
from steelyard.spec.model import Model
from steelyard.spec.run import Run

NAME = "Megatron-DeepSpeed"


def assumed(run: Run) -> tuple[str, ...]:
    """What was assumed where the run does not say it."""
    return deepspeed.assumed(run)


def ranks(run: Run) -> tuple[Memory, ...]:
    """The memory of every class of equal ranks, pipeline rank outermost. Raises UserError M004."""
    refuse_others(NAME, run, {"parallel.virtual": (1,), "precision.compute": deepspeed.COMPUTE})
    run = megatron.of_2021(run)
    layers = placement(run) or run.parallel.stages
    if run.parallel.pipeline > 1:
        run = run.model_copy(update={"parallel": run.parallel.model_copy(update={"stages": layers})})
    model = megatron.network(run)
    found = []
    for rank in range(run.parallel.pipeline):
        memory = _rank(run, model, rank)
        found += [replace(memory, tensor=tensor) for tensor in range(run.parallel.tensor)]
    return tuple(found)


def boundary(run: Run, size: megatron.Sizes) -> dict[str, int]:
    """What the pipeline engine holds of a micro-batch in flight besides its activations: the hidden state it sent on,
    cut over the tensor ranks (`partition_activations` of the pipe)."""
    return {"boundary": size.hidden // run.parallel.tensor if run.parallel.pipeline > 1 else 0}


def _rank(run: Run, model: Model, rank: int) -> Memory:
    parallel, size = run.parallel, megatron.sizes(run)
    split = parameters.stages.split(model, parallel)
    held = stages(run, model, split)[rank].tensors  # the last stage has the whole tied embedding module
    state = deepspeed.held(sum(t.local_numel(parallel.tensor) for t in held), run)
    last = rank == parallel.pipeline - 1
    layers = split[rank]
    flying = min(parallel.pipeline - rank, run.batch.accumulation)
    alive = total([
        times(megatron.stage_activations(run, size, layers), flying),
        times(boundary(run, size), flying),
        times(megatron.embedding(run, size), flying if rank == 0 else 0),
        {"communication": state.buckets},
    ])  # fmt: skip
    moments = [
        Moment("backward", state.running,
               total([alive, megatron.recomputed(run, size, layers), megatron.backward(run, size)])),
        Moment("optimizer", state.updating, {"communication": state.gathering}),
    ]  # fmt: skip
    if last:
        moments.append(Moment("loss", state.running, total([alive, megatron.loss(run, size)])))
    count = parallel.data * parallel.context
    return Memory(rank, 0, count, tuple(moments), {}, state.after, state.after.optimizer)
