"""Predicted collectives against those that the real engine makes, rehearsed on ranks of worlds we do not have.

tests/parity counts them on live ranks in float64; here other precisions and sizes are tried.
"""

import pytest

from steelyard.predict import traffic
from steelyard.spec import resolve

MODEL = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "seq_length": 32, "vocab_size": 1000}
BF16, MIXED, FP16 = {"compute": "bf16", "gradients": "bf16"}, {"compute": "bf16"}, {"compute": "fp16"}
CASES = {  # world, micro-batches a rank, sections
    "one rank": (1, 2, {"precision": MIXED}),
    "odd shards": (3, 2, {"parallel": {"zero": 3}, "model": {"vocab_multiple": 1}, "precision": FP16}),
    "hybrid": (8, 2, {"parallel": {"zero": 2, "replicate": 2}, "precision": BF16}),
    "sequence": (12, 2, {"parallel": {"tensor": 4, "sequence": True, "zero": 2}, "precision": MIXED}),
    "sequence, zero 1": (12, 2, {"parallel": {"tensor": 4, "sequence": True, "zero": 1}, "precision": BF16}),
    "partitioned": (64, 4, {"parallel": {"tensor": 8, "pipeline": 4}, "recompute": {"mode": "full", "shard": True}}),
    "zero 3 in a pipeline": (64, 4, {"parallel": {"pipeline": 4, "zero": 3}, "precision": FP16}),
    "zbv": (16, 8, {"model": {"num_layers": 8}, "precision": MIXED, "parallel": {
        "pipeline": 4, "pipeline_schedule": "zbv", "virtual": 2, "tensor": 2, "sequence": True}}),
    "grouped": (8, 2, {"model": {"kind": "llama", "num_query_groups": 4, "qk_norm": True}, "parallel": {"tensor": 4}}),
}  # fmt: skip


def counted(run, rank):
    """Where a rehearsed rank's count differs from the prediction."""
    pytest.importorskip("torch")
    from steelyard.train.rehearse import beside_prediction

    return beside_prediction(run, rank)["traffic"]


@pytest.mark.parametrize("case", CASES)
def test_a_rehearsed_step_sends_what_is_predicted(case):
    world, micro_batches, sections = CASES[case]
    ranks = sections.get("parallel", {})
    data = world // (ranks.get("tensor", 1) * ranks.get("pipeline", 1))
    batch = {"global_batch_size": micro_batches * data, "micro_batch_size": 1}
    given = {**sections, "batch": batch, "model": {**MODEL, **sections.get("model", {})}, "length": {"steps": 1}}
    run = resolve(given, world=world).run
    for rank in {0, world - 1}:
        found = counted(run, rank)
        assert not found["wrong"]
        assert (found["calls"] > 0) == (world > 1)


def test_bytes_are_those_of_the_tensors():
    """Two blocks of h = 64 on two tensor ranks, two micro-batches of 32 tokens, by hand."""
    given = {"model": {**MODEL, "num_layers": 2, "vocab_size": 1024}, "parallel": {"tensor": 2},
             "batch": {"global_batch_size": 2, "micro_batch_size": 1}, "length": {"steps": 1}}  # fmt: skip
    found = {(t.purpose, t.kind, t.axis): (t.calls, t.bytes) for t in traffic.on_rank(resolve(given, world=2).run, 0)}
    hidden = 32 * 64 * 4
    assert found == {
        ("blocks, forward", "all_reduce", "tensor"): (2 * 4, 2 * 4 * hidden),
        ("blocks, backward", "all_reduce", "tensor"): (2 * 4, 2 * 4 * hidden),
        ("embedding, forward", "all_reduce", "tensor"): (2, 2 * hidden),
        ("loss", "all_reduce", "tensor"): (2 * 3, 2 * 3 * 32 * 4),
        ("loss, backward", "all_reduce", "tensor"): (2, 2 * hidden),
        ("gradient norm", "all_reduce", "tensor"): (1, 8),
    }
