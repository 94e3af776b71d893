"""What Megatron-LM prints about parameters and how it counts FLOPs, 2021 to 2026."""

from steelyard.frameworks.views import Printed, View, layer_products, score_products, tokens
from steelyard.predict import parameters
from steelyard.spec.model import Model
from steelyard.spec.parallel import Parallel
from steelyard.spec.run import Run

NAME = "Megatron-LM"


def network(run: Run) -> Model:
    """The model as Megatron would build it. It pads the vocabulary to a multiple of `--make-vocab-size-divisible-by` x
    tensor, so that its size depends on the layout. A run planned for another engine already has that engine's
    vocabulary. Source: Megatron-LM `_vocab_size_with_padding`.
    """
    multiple = run.model.vocab_multiple
    if run.engine.framework != "steelyard" or multiple == "megatron":
        return run.model
    return run.model.model_copy(update={"vocab_multiple": multiple * run.parallel.tensor})


def vocabulary(run: Run) -> int:
    """Rows of Megatron's embedding table."""
    return network(run).padded_vocab_size(run.parallel.tensor)


def layout(run: Run) -> Parallel | None:
    """Megatron's stages: the run's own where they are written down, else equal ones; None where they cannot be."""
    layers, stages = run.model.num_layers, run.parallel.num_stages
    if run.parallel.stages != "balanced" or run.parallel.pipeline == 1:
        return run.parallel
    if layers % stages:
        return None
    return run.parallel.model_copy(update={"stages": (layers // stages,) * stages})


def printed(run: Run) -> tuple[Printed, ...]:
    return (_ranks(run), *_theory(run))


def _ranks(run: Run) -> Printed:
    """Parameters of each (tensor, pipeline) rank, pipeline outermost."""
    model, parallel = network(run), layout(run)
    if parallel is None:
        refusal = f"Megatron-LM refuses {run.model.num_layers} layers over {run.parallel.num_stages} equal stages."
        return Printed("megatron_ranks", None, refusal)
    grid = [(pipeline, tensor) for pipeline in range(parallel.pipeline) for tensor in range(parallel.tensor)]
    held = [parameters.rank_tensors(model, parallel, pipeline) for pipeline in range(parallel.pipeline)]
    totals = [count.total for tensors in held for count in parameters.counts(tensors, parallel.tensor)]
    return Printed(
        "megatron_ranks",
        totals,
        "One rank's own parameters (since 2026-07-26 with a third coordinate); added up they count norms, row-parallel "
        "biases and positions once per tensor rank and the tied word embedding on both ends of the pipeline.",
        tuple(line(tensor, pipeline, total) for (pipeline, tensor), total in zip(grid, totals, strict=True)),
    )


def line(tensor: int, pipeline: int, total: int, since_2026_07: bool = False) -> str:
    """The line of one rank, as printed from 2021 to 2026-07-26 or since."""
    place = f"({tensor}, 0, {pipeline})" if since_2026_07 else f"({tensor}, {pipeline})"
    axes = "(tensor, gtp_remat, pipeline)" if since_2026_07 else "(tensor, pipeline)"
    return f" > number of parameters on {axes} model parallel rank {place}: {total}"


def _theory(run: Run) -> tuple[Printed, ...]:
    """The memory report's count, since 2023-10: L (A + M + N) + n h + E, the most loaded shard one end of the pipeline.

    Source: Megatron-LM `theoretical_memory_usage.py`.
    """
    model, parallel = network(run), run.parallel
    embedding = model.hidden_size * vocabulary(run)
    norm = model.hidden_size * (2 if model.norm == "layernorm" else 1)
    products = layer_products(run)
    block = products + 2 * norm * model.num_layers + norm
    total = block + embedding * (1 if model.tied_embeddings else 2)
    norms = 2 * norm * model.num_layers + norm
    ends = 2 if not model.tied_embeddings and parallel.pipeline == 1 else 1
    shard = (products / parallel.pipeline + ends * embedding) / parallel.tensor + norms / parallel.pipeline
    left_out = "leaves out biases, learned positions and QK norms"
    return (
        Printed(
            "megatron_theory_total_billions",
            total / 1e9,
            f"Its memory report {left_out}.",
            (
                f"Number of parameters in transformer block in billions: {block / 1e9: .2f}",
                f"Total number of parameters in billions: {total / 1e9:.2f}",
            ),
        ),
        Printed(
            "megatron_theory_most_loaded_billions",
            shard / 1e9,
            f"Its memory report {left_out}, and takes stages for equal and an end of the pipeline for the largest.",
            (f"Number of parameters in most loaded shard in billions: {shard / 1e9:.4f}",),
        ),
    )


def views(run: Run) -> tuple[View, ...]:
    """FLOPs as in the `throughput per GPU` field of its log. Source: Megatron-LM `num_floating_point_operations`."""
    model, count = network(run), tokens(run)
    head = model.hidden_size * vocabulary(run)
    today = 6 * count * (layer_products(run) + head) + 3 * count * score_products(run)
    layers, h, groups, heads = model.num_layers, model.hidden_size, model.num_query_groups, model.num_attention_heads
    linear = 60 * h * h + 12 * h * h * groups // heads
    before = count * (layers * linear + 12 * layers * model.seq_length * h + 6 * head)
    return (
        View(
            "megatron",
            today,
            "Megatron-LM since 2025-03-06: model FLOPs from the actual shapes, half of each score matrix, padded "
            "vocabulary, recomputation never counted.",
        ),
        View(
            "megatron_before_2025_03",
            before,
            "Megatron-LM 2023-11-26 to 2025-03: the full score matrices; at first an MLP of 4 x hidden without a gate "
            "was taken for granted, as here.",
        ),
    )
