"""Generated runs of every shape the spec can express and the network can run, small enough to build."""

from hypothesis import strategies as st

from steelyard.spec import resolve
from steelyard.spec.errors import UserError
from steelyard.spec.run import Run


@st.composite
def models(draw, tensor: int = 1):
    """The [model] table of a legal run that divides over `tensor` ranks."""
    groups = tensor * draw(st.integers(1, 2))
    heads = groups * draw(st.integers(1, 3))
    head_dim = 2 * draw(st.integers(1, 4))
    return {
        "kind": draw(st.sampled_from(["gpt2", "llama"])),
        "num_layers": draw(st.integers(1, 5)),
        "num_attention_heads": heads,
        "head_dim": head_dim,
        "hidden_size": draw(st.sampled_from([heads * head_dim, heads * 4])),
        "num_query_groups": groups,
        "ffn_hidden_size": tensor * draw(st.integers(1, 24)),
        "seq_length": draw(st.integers(2, 12)),
        "max_position_embeddings": 16,
        "vocab_size": draw(st.integers(3, 90)),
        "vocab_multiple": draw(st.sampled_from([tensor, 8 * tensor, "megatron"])),
        "position": draw(st.sampled_from(["learned", "rotary", "none"])),
        "norm": draw(st.sampled_from(["layernorm", "rmsnorm"])),
        "activation": draw(st.sampled_from(["gelu", "relu2", "swiglu", "geglu"])),
        "bias": draw(st.booleans()),
        "qkv_bias": draw(st.booleans()),
        "tied_embeddings": draw(st.booleans()),
        "embedding_norm": draw(st.booleans()),
        "qk_norm": draw(st.booleans()),
    }


@st.composite
def runs(draw):
    """A legal run on a generated layout."""
    tensor = draw(st.sampled_from([1, 2, 4]))
    model = draw(models(tensor))
    pipeline = draw(st.integers(1, model["num_layers"]))
    virtual = draw(st.sampled_from([1, 1, 2])) if 2 * pipeline <= model["num_layers"] else 1
    schedule = "1f1b" if virtual == 1 else draw(st.sampled_from(["interleaved", "zbv"]))
    replicate = draw(st.sampled_from([1, 2]))
    parallel = {
        "tensor": tensor,
        "pipeline": pipeline,
        "virtual": virtual,
        "pipeline_schedule": schedule,
        "data": replicate * draw(st.integers(1, 5)),
        "replicate": replicate,
        "context": draw(st.sampled_from([1, 2] if model["seq_length"] % 2 == 0 else [1])),
        "zero": draw(st.sampled_from([0, 1] if schedule == "zbv" else [0, 1, 3])),  # S120 refuses the pair
    }
    batch = {"micro_batch_size": 1, "accumulation": pipeline * virtual}
    return legal(model=model, parallel=parallel, batch=batch)


def legal(**config) -> Run:
    try:
        return resolve(config).run
    except UserError as refused:  # a generated run that the spec refuses is a mistake in the generator
        raise AssertionError(str(refused)) from refused
