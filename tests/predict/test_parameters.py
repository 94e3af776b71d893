"""Closed-form counts against the live network and against PyTorch's own sharding."""

import pytest
import torch
from generated import legal, models, runs
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.model.gpt import GPT
from steelyard.predict import parameters, stages
from steelyard.spec import resolve


def shapes(tensors):
    return {entry.name: entry.shape for entry in tensors}


def live(run, stage=None):
    """Names and shapes of the network's own parameters, whole or of one stage."""
    rows = run.padded_vocab_size
    if stage is None:
        return {n: tuple(p.shape) for n, p in GPT(run.model, rows).named_parameters()}
    split = stages.split(run.model, run.parallel)
    start = sum(split[:stage])
    part = GPT(
        run.model, rows, layers=range(start, start + split[stage]), first=stage == 0, last=stage == len(split) - 1
    )
    return {n: tuple(p.shape) for n, p in part.named_parameters()}


@settings(max_examples=100, deadline=None)
@given(models())
def test_every_tensor_of_the_network(model):
    run = legal(model=model)
    with torch.device("meta"):
        network = live(run)
    assert shapes(parameters.tensors(run.model)) == network
    assert parameters.unique(run.model) == sum(torch.Size(shape).numel() for shape in network.values())


@settings(max_examples=100, deadline=None)
@given(runs())
def test_every_tensor_of_every_stage(run):
    with torch.device("meta"):
        network = [live(run, stage) for stage in range(len(stages.split(run.model, run.parallel)))]
    assert [
        shapes(parameters.stage_tensors(run.model, run.parallel, stage)) for stage in range(len(network))
    ] == network
    per_stage = [sum(torch.Size(shape).numel() for shape in stage.values()) for stage in network]
    assert parameters.per_stage(run.model, run.parallel) == tuple(per_stage)


@settings(max_examples=100, deadline=None)
@given(runs())
def test_ranks_add_up(run):
    model, parallel = run.model, run.parallel
    ranks = parameters.ranks(model, parallel)
    assert sum(rank.count for rank in ranks) == parallel.world_size
    one_replica = {(rank.pipeline, rank.tensor): rank.held for rank in ranks}
    assert len(one_replica) == parallel.pipeline * parallel.tensor
    held = one_replica.values()
    assert sum(count.total for count in held) == parameters.sum_over_ranks(model, parallel)
    # Take away every second copy, and each distinct parameter is left once.
    copies = sum(count.replicated for (_, tensor), count in one_replica.items() if tensor > 0)
    distinct = sum(count.total - count.tied_copy for count in held) - copies
    assert distinct == parameters.unique(model, parallel.tensor)
    tied_padding = sum(count.padding for count in held) - parameters.padding(model, parallel.tensor)
    tied = model.tied_embeddings and parallel.pipeline > 1
    assert tied_padding == (tied and (run.padded_vocab_size - model.vocab_size) * model.hidden_size)
    if parallel.zero == 3:  # each replica's shards make the whole exactly once
        stored = sum(rank.count * rank.stored for rank in ranks)
        assert stored == parallel.context * parallel.replicate * parameters.sum_over_ranks(model, parallel)
    else:
        assert all(rank.stored == rank.held.total for rank in ranks)


@given(st.integers(1, 40), st.integers(1, 9))
def test_shards_are_cut_as_pytorch_cuts_them(rows, shards):
    chunks = [chunk.shape[0] for chunk in torch.chunk(torch.empty(rows), shards)]
    expected = chunks + [0] * (shards - len(chunks))  # ranks behind the last chunk hold nothing
    assert [parameters.on_shard({(rows,): 1}, shards, index) for index in range(shards)] == expected


# T1 of the field reports: 4 layers, hidden 64, sequence 64, bytes and one end-of-document token.
T1 = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64, "vocab_size": 257}


@pytest.mark.parametrize(
    ("tensor", "tied", "unique"), [(1, True, 228736), (1, False, 253312), (2, True, 236928), (2, False, 269696)]
)
def test_unique_of_a_tiny_model(tensor, tied, unique):
    run = resolve({"model": {**T1, "vocab_multiple": "megatron", "tied_embeddings": tied}}).run
    assert parameters.unique(run.model, tensor) == unique
    assert parameters.unique_unpadded(run.model) == (220608 if tied else 237056)
    assert parameters.without_embeddings(run.model) == 200064


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_the_count_does_not_depend_on_sharding(zero):
    """Field report A02: 228,736 under every sharding, never 0 and never a half."""
    run = resolve({"model": T1, "parallel": {"zero": zero}}, world=2).run
    assert {rank.held.total for rank in parameters.ranks(run.model, run.parallel)} == {228736}


def test_gpt2_small_tied_and_untied():
    """Field reports A03 and A04."""
    small = {"num_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "seq_length": 1024}
    tied = resolve({"model": small}).run.model
    untied = resolve({"model": {**small, "tied_embeddings": False}}).run.model
    assert (parameters.unique(tied), parameters.unique_unpadded(tied)) == (124475904, 124439808)
    assert parameters.unique(untied) == 163109376
    assert parameters.without_embeddings(tied) == parameters.without_embeddings(untied) == 85056000
