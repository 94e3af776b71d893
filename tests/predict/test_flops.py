"""FLOPs against PyTorch's counter on the live network, and the conventions against hand numbers."""

import pytest
import torch
from generated import legal, models
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from steelyard import hardware
from steelyard.model.gpt import GPT
from steelyard.parallel import recompute as parallel_recompute
from steelyard.predict import flops
from steelyard.spec import UserError, resolve
from steelyard.spec.precision import Recompute

BATCH = 2
# The counter knows addmm but not its in-place form, which the loss uses for the head's gradient.
IN_PLACE = {torch.ops.aten.addmm_: lambda _, a, b, **rest: 2 * a[0] * a[1] * b[1]}


@pytest.fixture(autouse=True)
def one_thread():
    """Products this small only wait for each other's threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def executed(run, around=lambda block: block):
    """FLOPs that PyTorch counts in one forward and backward of the live network on BATCH sequences."""
    network = GPT(run.model, run.padded_vocab_size)
    for name, block in list(network.layers.items()):
        network.layers[name] = around(block)
    return counted(network, early_stop=False)


def counted(network, early_stop):
    tokens = torch.zeros(BATCH, network.spec.seq_length, dtype=torch.long)
    counter = FlopCounterMode(display=False, custom_mapping=IN_PLACE)
    with sdpa_kernel(SDPBackend.MATH), set_checkpoint_early_stop(early_stop), counter:
        network(tokens, labels=tokens, weights=torch.ones(tokens.shape))[0].backward()
    return counter.get_total_flops()


class Repeated(torch.nn.Module):
    """A block under PyTorch's activation checkpointing."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, *inputs):
        return checkpoint(self.block, *inputs, use_reentrant=False, preserve_rng_state=False)


@settings(max_examples=50, deadline=None)
@given(models())
def test_model_flops_are_what_is_executed(model):
    run = legal(model=model)
    assert executed(run) == BATCH * flops.model_flops(run.model, run.padded_vocab_size, causal=False)


@settings(max_examples=15, deadline=None)
@given(models(), st.one_of(st.just("all"), st.integers(1, 5)))
def test_full_recompute_repeats_blocks_and_never_the_logits(model, layers):
    run = legal(model=model, recompute={"mode": "full", "layers": layers})
    stages = (run.model.num_layers,)
    numbers = iter(range(run.model.num_layers))
    first = run.model.num_layers if layers == "all" else layers
    repeated = executed(run, lambda block: Repeated(block) if next(numbers) < first else block)
    expected = flops.hardware_flops(run.model, run.padded_vocab_size, run.recompute, stages, causal=False)
    assert repeated == BATCH * expected


@settings(max_examples=15, deadline=None)
@given(models())
def test_selective_recompute_repeats_the_attention_core(model):
    run = legal(model=model, recompute={"mode": "selective"})

    def with_core(block):
        block.attention.core = Repeated(block.attention.core)
        return block

    expected = flops.hardware_flops(run.model, run.padded_vocab_size, run.recompute, (1,), causal=False)
    assert executed(run, with_core) == BATCH * expected


@pytest.mark.parametrize(
    ("recompute", "product", "times"),
    [
        ({"mode": "full"}, "mlp.down", 4),
        ({"mode": "full", "every": 2}, "mlp.down", 2),
        ({"mode": "full", "every": 3, "layers": 2}, "mlp.down", 1),
        ({"mode": "selective"}, "attention.context", 4),
        ({"mode": "selective", "modules": ["mlp"]}, "mlp.down", 4),
    ],
)
def test_our_engine_skips_the_last_product(recompute, product, times):
    """PyTorch ends a recomputation once every saved tensor is back; docs/flops.md says so."""
    run = resolve({"model": T1, "recompute": recompute}).run
    network = GPT(run.model, run.padded_vocab_size)
    parallel_recompute.recompute(network, None, run)
    skipped = {entry.name: entry.flops for entry in flops.products(run.model, 1)}[product]
    expected = flops.hardware_flops(run.model, run.padded_vocab_size, run.recompute, (4,), causal=False)
    assert counted(network, early_stop=True) == BATCH * (expected - times * skipped)


T1 = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64, "vocab_size": 257}


@pytest.mark.parametrize("ffn", [64, 256, 1024])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_actual_shapes_count(ffn, activation, groups):
    """Field report B02: neither ffn = 4h nor one key per query is taken for granted."""
    model = {**T1, "ffn_hidden_size": ffn, "activation": activation, "num_query_groups": groups}
    run = resolve({"model": model}).run
    assert executed(run) == BATCH * flops.model_flops(run.model, run.padded_vocab_size, causal=False)


def test_every_coefficient_is_a_product():
    """Field report B03, one sequence: linear products of a layer 24 s h^2, the masked pair 4 s^2 h, logits 2 s h V."""
    model = resolve({"model": T1}).run.model
    by_name = {entry.name: entry for entry in flops.products(model, 384)}
    masked = by_name["attention.scores"].flops + by_name["attention.context"].flops
    assert masked == 1_048_576
    assert flops.forward_per_layer(model, causal=False) - masked == 6_291_456
    assert flops.logits(model, 384) == 3_145_728
    assert flops.model_flops(model, 384, causal=False) == 97_517_568
    assert flops.model_flops(model, 257, causal=False) == 94_396_416
    full = Recompute(mode="full")
    assert flops.hardware_flops(model, 384, full, (4,), causal=False) == 126_877_696
    assert flops.model_flops(model, 384) == 97_517_568 - 3 * 4 * masked // 2


def test_what_full_recompute_costs():
    model = resolve({"model": T1}).run.model
    block = flops.forward_per_layer(model)
    assert flops.recomputed(model, Recompute(mode="full", layers=1), (2, 2)) == 2 * block
    assert flops.recomputed(model, Recompute(mode="full", layers=9), (1, 3)) == 4 * block
    assert flops.recomputed(model, Recompute(mode="full", every=2), (4,)) == 4 * block
    assert flops.recomputed(model, Recompute(), (4,)) == 0


def test_utilization_says_what_it_used():
    chip = hardware.find("A100-SXM4-80GB")
    found = flops.utilization(312 * 10**12, 2.0, 1, chip, "bf16", "model FLOPs, causal")
    assert found is not None
    assert (found.value, found.convention, found.peak_flops) == (0.5, "model FLOPs, causal", 312e12)
    assert "A100" in found.peak_source


def test_an_unknown_chip_has_no_utilization():
    assert flops.utilization(1, 1.0, 1, None, "bf16", "model FLOPs, causal") is None
    assert flops.utilization(1, 1.0, 1, hardware.find("T4"), "bf16", "model FLOPs, causal") is None


def test_more_than_the_peak_is_an_error():
    with pytest.raises(UserError, match="P003"):
        flops.utilization(10**18, 1.0, 1, hardware.find("T4"), "fp16", "model FLOPs, causal")
