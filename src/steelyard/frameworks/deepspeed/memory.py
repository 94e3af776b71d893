"""What DeepSpeed's engine allocates for a GPT without a pipeline: ZeRO 0 to 3.

Source: DeepSpeed `runtime/fp16/fused_optimizer.py` (stage 0), `zero/stage_1_and_2.py`, `zero/stage3.py`,
`bf16_optimizer.py` beside it. Activations are those of a network without fused attention, as in Megatron-LM of 2021.
"""

from dataclasses import dataclass, replace

from steelyard.frameworks.allocating import refuse_others
from steelyard.frameworks.megatron import memory as megatron
from steelyard.predict import parameters
from steelyard.predict.memory import Memory, Moment, States, total
from steelyard.spec.precision import BYTES
from steelyard.spec.run import Run

NAME = "DeepSpeed"
COMPUTE = ("fp16", "bf16", "fp32")
BUCKET = 500_000_000  # elements: the default of reduce_bucket_size and allgather_bucket_size


@dataclass(frozen=True)
class Held:
    """The states of one rank at the moments of a step: while micro-batches run, while the optimizer updates, and after
    it. `buckets` are alive during the backward pass, `gathering` during the update."""

    running: States
    updating: States
    after: States
    buckets: int
    gathering: int


def held(count: int, run: Run) -> Held:
    """From P parameters of a rank in w bytes, with d data ranks.

    weights w P, at stage 3 w P / d. gradients w P from the first micro-batch on, freed by the update; w P / d from
    stage 2 on; with bf16 they accumulate in fp32 unsharded, 4 P, which stay (`BF16_Optimizer`). master 4 P and moments
    8 P, over d from stage 1 on; in fp32 without ZeRO the weights are their own masters. The update makes fp32 copies of
    the gradients it needs: 4 P, over d with ZeRO. With ZeRO, gradients are reduced through a bucket (twice, to overlap)
    and updated weights gathered through another.
    """
    zero, data = run.parallel.zero, run.parallel.data
    shard = -(-count // data) if zero else count
    offloaded = run.engine.offload is not None
    wide, width = run.precision.compute == "bf16", BYTES[run.precision.compute]
    own = width == 4 and not zero  # masters of their own
    weights = width * (shard if zero == 3 else count)
    gradients = 4 * count if wide and zero < 2 else width * (shard if zero >= 2 else count)
    master, moments = (0, 0) if offloaded else (0 if own else 4 * shard, 8 * shard)
    running = States(weights, gradients, master, moments)
    copies = 0 if wide or offloaded or own else 4 * shard
    after = replace(running, gradients=gradients if wide else 0)
    reduce = 2 * width * min(count, run.engine.reduce_bucket or BUCKET) if zero else 0
    gather = width * min(count, run.engine.allgather_bucket or BUCKET) if zero in (1, 2) else 0
    return Held(running, replace(running, gradients=gradients + copies), after, reduce, gather)


def assumed(run: Run) -> tuple[str, ...]:
    """What was assumed where the run does not say it."""
    return () if run.engine.attention else ("score matrices are kept: no fused attention is named",)


def ranks(run: Run) -> tuple[Memory, ...]:
    """One class of equal ranks per tensor rank: this engine has no pipeline. Raises UserError M004."""
    refuse_others(NAME, run, {"parallel.pipeline": (1,), "precision.compute": COMPUTE})
    run = megatron.of_2021(run)
    model, size = megatron.network(run), megatron.sizes(run)
    count = sum(t.local_numel(run.parallel.tensor) for t in parameters.tensors(model, run.parallel.tensor))
    state = held(count, run)
    layers = model.num_layers
    alive = total([
        megatron.stage_activations(run, size, layers), megatron.embedding(run, size),
        {"communication": state.buckets + live_parameters(run, count)},
    ])  # fmt: skip
    moments = (
        Moment("loss", state.running, total([alive, megatron.loss(run, size)])),
        Moment("backward", state.running,
               total([alive, megatron.recomputed(run, size, layers), megatron.backward(run, size)])),
        Moment("optimizer", state.updating, {"communication": state.gathering}),
    )  # fmt: skip
    memory = Memory(0, 0, run.parallel.data * run.parallel.context, moments, {}, state.after, state.after.optimizer)
    return tuple(replace(memory, tensor=tensor) for tensor in range(run.parallel.tensor))


def live_parameters(run: Run, count: int) -> int:
    """Stage 3 keeps gathered weights up to `stage3_max_live_parameters` (10^9 by default)."""
    return BYTES[run.precision.compute] * min(count, 10**9) if run.parallel.zero == 3 else 0
