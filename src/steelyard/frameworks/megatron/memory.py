"""What Megatron-LM allocates on each rank, 2021 and today.

Sources: `distrib_optimizer.py` and `param_and_grad_buffer.py` (states), Korthikanti et al. 2022 section 4 (bytes per
layer), `schedules.py` (micro-batches in flight), `cross_entropy.py` (loss), Transformer Engine's attention backends.
The memory that Megatron's own functional tests record holds all of it to account: docs/memory.md.
"""

from dataclasses import dataclass, replace
from typing import Literal

from steelyard import hardware
from steelyard.frameworks.megatron.counts import layout, network
from steelyard.predict import parameters
from steelyard.predict.memory import Memory, Moment, States, times, total
from steelyard.spec.model import Model
from steelyard.spec.parallel import Parallel
from steelyard.spec.precision import BYTES, Precision
from steelyard.spec.run import Engine, Run

NAME = "Megatron-LM"
MIB = 2**20
HOPPER, BLACKWELL = 90, 100
Kernel = Literal["flash", "fused", "unfused"]


@dataclass(frozen=True)
class Sizes:
    """Bytes of one micro-batch's tensors on one rank. `hidden` is a hidden state where every tensor rank has all of it,
    `residual` one between the halves of a block (cut over the tensor ranks by sequence parallelism); `query`,
    `key_value` and `ffn` are this rank's columns; `tokens` counts a rank's tokens."""

    tokens: int
    width: int  # bytes of an element
    residual_tokens: float
    hidden: int
    residual: int
    query: int
    key_value: int
    ffn: int
    rows: int  # of the vocabulary


def sizes(run: Run) -> Sizes:
    model, parallel = network(run), layout(run) or run.parallel
    tokens = run.batch.micro_batch_size * model.seq_length // parallel.context
    width = BYTES[run.precision.compute]
    cut = parallel.tensor if parallel.sequence else 1
    return Sizes(
        tokens=tokens,
        width=width,
        residual_tokens=tokens / cut,
        hidden=tokens * model.hidden_size * width,
        residual=tokens * model.hidden_size * width // cut,
        query=tokens * model.query_width * width // parallel.tensor,
        key_value=tokens * model.key_value_width * width // min(parallel.tensor, model.num_query_groups),
        ffn=tokens * model.ffn_hidden_size * width // parallel.tensor,
        rows=model.padded_vocab_size(parallel.tensor) // parallel.tensor,
    )


def states(parameters_: int, precision: Precision, parallel: Parallel, engine: Engine) -> States:
    """Bytes from a rank's parameter count P. Without the distributed optimizer bf16 18 P, fp16 20 P, fp32 16 P; with it
    6 + 12/d, 4 + 16/d, 8 + 8/d, where d = data x context / instances.

    fp16 keeps fp32 copies of the gradients beside fp16 ones, as does bf16 that reduces in bf16; the
    distributed optimizer copies only its shard. A precision-aware optimizer has its own dtypes, and no fp32 master of
    bf16 weights but the 16 bits they lack. Source: `dist_optimizer.md` of the user guide,
    `distrib_optimizer.py`.
    """
    compute, reduced = BYTES[precision.compute], BYTES[precision.gradients]
    shards = parallel.data * parallel.context // (engine.optimizer_instances or 1) if parallel.zero else 1
    shards = max(1, shards)
    shard = -(-parameters_ // shards)
    aware = engine.moment_dtypes is not None
    main_gradients = 4 * shard if reduced < 4 and not aware else 0
    master = 0 if compute == 4 else 4
    moments = 8
    if aware:
        assert engine.moment_dtypes is not None
        moments = sum(_bytes(dtype) for dtype in engine.moment_dtypes)
        master = 2 if precision.compute == "bf16" else _bytes(engine.master_dtype or "fp32")
    # ZeRO 2 and 3 (Megatron's and PyTorch's FSDP) shard the gradients, 3 also the weights
    gradients = shard if parallel.zero >= 2 else parameters_
    weights = shard if parallel.zero == 3 else parameters_
    return States(compute * weights, reduced * gradients + main_gradients, master * shard, moments * shard)


def _bytes(dtype: str) -> int:
    return 1 if dtype == "fp8" else BYTES[dtype]


def kernel(run: Run) -> Kernel:
    """The attention kernel: the one asked for, else Transformer Engine's choice: flash-attention before Hopper, cuDNN's
    fused attention from Hopper on, but not on Blackwell in deterministic mode (`get_attention_backend`)."""
    if run.engine.attention is not None:
        return run.engine.attention
    generation = _generation(run)
    if generation is None or generation < HOPPER or (generation >= BLACKWELL and run.engine.deterministic):
        return "flash"
    return "fused"


def of_2021(run: Run) -> Run:
    """The run with what was the rule before fused attention, where nothing else is said: score matrices are kept, and
    all samples share one mask."""
    said = {"attention": run.engine.attention or "unfused", "version": run.engine.version or "2021"}
    return run.model_copy(update={"engine": run.engine.model_copy(update=said)})


def _generation(run: Run) -> int | None:
    chip = hardware.of(run.hardware)
    return chip.generation if chip else None


def workspaces(run: Run) -> int:
    """What cuBLAS and Transformer Engine keep for themselves. On an unknown chip, the middle between the generations
    before Hopper and from it on. In 2021 cuBLAS allocated past PyTorch."""
    if run.engine.version == "2021":
        return 0
    generation = _generation(run)
    if generation is None:
        return (_workspaces(run.engine, HOPPER - 1) + _workspaces(run.engine, HOPPER)) // 2
    return _workspaces(run.engine, generation)


def _workspaces(engine: Engine, generation: int) -> int:
    """cuBLAS keeps a workspace for each thread that multiplies matrices: the main one and autograd's. Determinism
    fixes it at 8 x 4 MiB (`CUBLAS_WORKSPACE_CONFIG=:4096:8`); otherwise PyTorch takes 2 x 4 MiB + 8 x 16 KiB before
    Hopper and 32 MiB from it on. Local layers were measured with twice as many. Transformer Engine has one of its own:
    4 MiB before Hopper, 32 MiB from it on (`get_cublas_workspace_size_bytes`), and three of them where communication
    overlaps matrix products (`_NUM_MAX_UB_STREAMS`).
    """
    small = generation < HOPPER
    each = 8 * 4 * MIB if engine.deterministic or not small else 2 * 4 * MIB + 8 * 16 * 1024
    if engine.implementation == "local":
        return 4 * each
    return 2 * each + (4 if small else 32) * MIB * (3 if engine.overlap_buffers else 1)


def overlap_buffers(run: Run, size: Sizes) -> int:
    """Transformer Engine's user buffers for overlapped tensor-parallel communication: a whole hidden state for each of
    the ten products of a layer that overlap (`initialize_ub`: qkv, proj, fc1 and fc2, forward, dgrad and wgrad)."""
    return 10 * size.hidden if run.engine.overlap_buffers else 0


def activations(run: Run, size: Sizes) -> dict[str, int]:
    """What one layer keeps of one micro-batch for its backward pass, by part, nothing recomputed.

    Norms: both inputs and both outputs (T h each, with fp32 statistics); query, key, value and context; the score
    matrices of the unfused kernel (softmax, and with dropout its mask and output); the MLP's first product and its
    activation; one byte per element for each dropout mask. Flash-attention takes copies in its own layout and leaves a
    copy of the context; a gated MLP's first product is twice as wide. Source: Korthikanti et al. 2022, section 4.1,
    corrected by what the kernels keep.
    """
    model, parallel = network(run), run.parallel
    statistics = int(size.residual_tokens * (8 if model.norm == "layernorm" else 4))
    stream = size.residual * 2 if run.engine.fp32_residual and size.width == 2 else size.residual
    kind = kernel(run)
    heads = model.num_attention_heads // parallel.tensor
    key_value = 2 * size.key_value
    attention = size.query + key_value + size.query * (2 if kind == "flash" else 1)
    scores = 0
    if kind == "unfused":
        attention += 2 * size.query - key_value  # keys and values repeated for each query head
        per_score = size.width + (1 + size.width if model.attention_dropout else 0)
        scores = run.batch.micro_batch_size * heads * model.seq_length**2 * per_score // parallel.context**2
    else:
        attention += size.tokens * heads * 4  # log-sum-exp
    if model.qk_norm:
        attention += size.query + size.key_value
    return {
        "activations.norm": 2 * stream + 2 * size.residual + 2 * statistics,
        "activations.attention": attention,
        "activations.scores": scores,
        "activations.mlp": size.ffn * (3 if model.gated else 2),
        "activations.dropout": int(2 * size.residual_tokens * model.hidden_size) if model.hidden_dropout else 0,
    }


def kept(run: Run, size: Sizes) -> dict[str, int]:
    """What a layer keeps after its forward pass under selective recompute; all of `activations` without it."""
    found = activations(run, size)
    if run.recompute.mode != "selective":
        return found
    if "attention" in run.recompute.modules:
        found["activations.scores"] = 0
        found["activations.attention"] = 2 * size.query + 2 * size.key_value
    if "mlp" in run.recompute.modules:
        found["activations.mlp"] = 0
    if "norm" in run.recompute.modules:
        found["activations.norm"] //= 2
    return found


def in_flight(parallel: Parallel, accumulation: int, rank: int, group: int | None) -> int:
    """Forward passes of model chunks whose backward pass is still to come, at most, on a pipeline rank.

    1F1B: min(m, p - rank). Interleaved: 2 (p - rank - 1) + (v - 1) g warm-up passes and one more, where g is the number
    of micro-batches that a chunk runs in a row (p by default). Source: `schedules.py`, `get_num_warmup_microbatches`.
    """
    stages_behind = parallel.pipeline - rank - 1
    if parallel.virtual == 1:
        return min(accumulation, stages_behind + 1)
    warmup = 2 * stages_behind + (parallel.virtual - 1) * (group or parallel.pipeline)
    return min(accumulation * parallel.virtual, warmup + 1)


def stage_activations(run: Run, size: Sizes, layers: int) -> dict[str, int]:
    """One micro-batch on one model chunk of `layers` layers, as kept until its backward pass."""
    rule = run.recompute
    if rule.mode != "full":
        return times(kept(run, size), layers)
    covered = layers if rule.layers == "all" else min(rule.layers, layers)
    groups = -(-covered // rule.every)
    cut = run.parallel.tensor if rule.shard else 1
    return total(
        [{"activations.inputs": groups * size.residual // cut}, times(activations(run, size), layers - covered)]
    )


def recomputed(run: Run, size: Sizes, layers: int) -> dict[str, int]:
    """What is alive a second time in the backward pass: the layers of one group under full recompute, the named parts
    of one layer under selective."""
    if run.recompute.mode == "full":
        group = min(run.recompute.every, layers)
        return {"recomputed": sum(activations(run, size).values()) * group}
    if run.recompute.mode == "selective":
        whole, rest = activations(run, size), kept(run, size)
        return {"recomputed": sum(whole.values()) - sum(rest.values())}
    return {}


def backward(run: Run, size: Sizes) -> dict[str, int]:
    """Gradients in one layer's backward pass at the widest point: the hidden state's on both sides, the MLP's inner
    ones, or the unfused scores' two."""
    scores = 0
    if kernel(run) == "unfused":
        heads = run.model.num_attention_heads // run.parallel.tensor
        scores = (
            2 * run.batch.micro_batch_size * heads * run.model.seq_length**2 * size.width // run.parallel.context**2
        )
    mlp = size.ffn * (3 if run.model.gated else 2)
    return {"backward": 2 * size.hidden + max(mlp, scores)}


def loss(run: Run, size: Sizes) -> dict[str, int]:
    """The last stage at the loss: the final norm's input and output, the logits in the compute dtype, and their fp32
    copy that becomes softmax and gradient in place (2 + 4 bytes an element; the gradient's cast back costs the same
    again). Transformer Engine's fused loss works on the logits themselves. Source: `cross_entropy.py`."""
    elements = size.tokens * size.rows
    wide = 0 if run.engine.cross_entropy == "transformer_engine" or size.width == 4 else 4
    return {
        "activations.norm": size.residual * 2,
        "logits": elements * (size.width + wide),
    }


def embedding(run: Run, size: Sizes) -> dict[str, int]:
    """What the embedding keeps of a micro-batch: its dropout mask and the token numbers."""
    mask = int(size.residual_tokens * run.model.hidden_size) if run.model.hidden_dropout else 0
    return {"activations.embedding": mask, "batch": 8 * size.tokens}


def attention_mask(run: Run) -> int:
    """The loader's mask of one micro-batch, a byte per pair of positions; none with
    `--no-create-attention-mask-in-dataloader`."""
    if run.engine.mask_in_loader is False:
        return 0
    copies = 1 if run.engine.version == "2021" else run.batch.micro_batch_size
    return copies * run.model.seq_length**2 // run.parallel.context


def left(run: Run, size: Sizes, last: bool) -> dict[str, int]:
    """Allocated between steps beside the states: workspaces; in a pipeline the last hidden state and gradient of each
    chunk and the last mask; the buffer that the head gathers sequence-parallel inputs into."""
    found = {"workspaces": workspaces(run)}
    if run.parallel.pipeline > 1:
        found["boundary"] = 2 * run.parallel.virtual * size.residual
        found["masks"] = attention_mask(run)
    gathered = size.hidden if run.parallel.sequence and last else 0
    found["communication"] = gathered + overlap_buffers(run, size)
    return found


def assumed(run: Run) -> tuple[str, ...]:
    """What was assumed where the run does not say it."""
    found = []
    if _generation(run) is None and run.engine.version != "2021":
        spread = (_workspaces(run.engine, HOPPER) - _workspaces(run.engine, HOPPER - 1)) // 2
        found.append(f"chip unknown: workspaces are {workspaces(run) // MIB} MiB, give or take {spread // MIB}")
        if run.engine.attention is None:
            found.append("chip unknown: Transformer Engine is taken to choose flash-attention")
    passed_over = {"fp8": run.engine.fp8, "offload": run.engine.offload, "zero 3": run.parallel.zero == 3}
    found += [f"not modelled here: {name}" for name, asked in passed_over.items() if asked]
    return tuple(found)


def ranks(run: Run) -> tuple[Memory, ...]:
    """The memory of every class of equal ranks, pipeline rank outermost."""
    parallel = layout(run) or run.parallel
    run = run.model_copy(update={"parallel": parallel})
    count = parallel.data * parallel.context
    found = []
    for pipeline_rank in range(parallel.pipeline):
        memory = _rank(run, network(run), pipeline_rank)
        found += [replace(memory, tensor=tensor, count=count) for tensor in range(parallel.tensor)]
    return tuple(found)


def _rank(run: Run, model: Model, rank: int) -> Memory:
    parallel, size = run.parallel, sizes(run)
    first, last = rank == 0, rank == parallel.pipeline - 1
    held = sum(t.local_numel(parallel.tensor) for t in parameters.rank_tensors(model, parallel, rank))
    state = states(held, run.precision, parallel, run.engine)
    stays = left(run, size, last)
    chunks = parameters.stages.chunks(parallel, rank)
    split = parameters.stages.split(model, parallel)
    layers = sum(split[stage] for stage in chunks) / len(chunks)
    passes = in_flight(parallel, run.batch.accumulation, rank, run.engine.microbatch_group)
    on_first = min(passes, run.batch.accumulation) if first else 0
    alive = total([
        times(stage_activations(run, size, max(split[stage] for stage in chunks)), passes * layers / max(
            split[stage] for stage in chunks)),
        times(embedding(run, size), on_first),
        {"masks": attention_mask(run)},
        stays,
    ])  # fmt: skip
    moments = [
        Moment("backward", state, total([alive, recomputed(run, size, int(layers)), backward(run, size)])),
        Moment("steady", state, stays),
    ]
    if last:
        moments.append(Moment("loss", state, total([alive, loss(run, size)])))
    return Memory(rank, 0, 0, tuple(moments), stays, state, state.optimizer)
