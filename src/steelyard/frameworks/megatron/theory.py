"""Megatron-LM's own estimate of memory, as it prints it after the first iterations. It is wrong off the one setting it
was made for; it stands here so that a record or a reader can be told so.

Source: Megatron-LM `theoretical_memory_usage.py` at d98e8a64.
"""

from steelyard.frameworks.megatron.counts import network, vocabulary
from steelyard.frameworks.views import layer_products
from steelyard.spec.run import Run


def weights_and_optimizer(run: Run) -> int:
    """Bytes of the most loaded shard: 18 a parameter, or 6 + 12 / data with the distributed optimizer, whatever the
    precision; one embedding, two where it is untied without a pipeline."""
    model, parallel = network(run), run.parallel
    norm = model.hidden_size * (2 if model.norm == "layernorm" else 1)
    ends = 2 if not model.tied_embeddings and parallel.pipeline == 1 else 1
    embedding = ends * model.hidden_size * vocabulary(run)
    norms = (2 * norm * model.num_layers + norm) / parallel.pipeline
    count = (layer_products(run) / parallel.pipeline + embedding) / parallel.tensor + norms
    return round(count * (6 + 12 / parallel.data if parallel.zero else 18))


def activations(run: Run) -> int:
    """Bytes of activations: s b h (18 + 4 f / h) a layer with sequence parallelism and selective recompute, otherwise
    s b h (10 + 24 / t), x 1.05; full recompute, context parallelism, kernel and precision do not enter."""
    model, parallel, batch = network(run), run.parallel, run.batch
    tokens, h = batch.micro_batch_size * model.seq_length, model.hidden_size
    selective = parallel.sequence and run.recompute.mode == "selective"
    layer = tokens * h * (18 + 4 * model.ffn_hidden_size / h if selective else 10 + 24 / parallel.tensor)
    total = layer * model.num_layers + parallel.pipeline * (8 * tokens + tokens * h)
    if parallel.virtual > 1:
        total *= 1 + (parallel.pipeline - 1) / (parallel.pipeline * parallel.virtual)
    elif parallel.pipeline > 1:
        total *= min(1, batch.accumulation / parallel.pipeline)
    if parallel.pipeline == 1:
        head = 4 * tokens * h * (1 + vocabulary(run) / h)
        total += head if selective else 2 * tokens * (vocabulary(run) / parallel.tensor + h)
    return round(total / parallel.tensor if selective else total * 1.05)
