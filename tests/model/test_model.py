"""The network by itself: the chunked loss, generation with a cache, initial weights."""

import pytest
import torch
from torch.nn import functional

from steelyard.model import loss as chunked
from steelyard.model.generate import generate
from steelyard.model.gpt import GPT
from steelyard.model.init import initial
from steelyard.spec import resolve

KINDS = {
    "gpt2": {},
    "llama": {"kind": "llama", "num_query_groups": 2, "ffn_hidden_size": 48},
    "alibi": {"position": "alibi", "embedding_norm": True},
    "qk norm": {"kind": "llama", "qk_norm": True, "rotary_fraction": 0.5, "tied_embeddings": True},
}


def build(options=(), dtype=torch.float64):
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16, "vocab_size": 61}
    spec = resolve({"model": {**sizes, **dict(options)}}).run.model
    model = GPT(spec, spec.padded_vocab_size()).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial(spec, name, tuple(parameter.shape), 1) * 3)
    return model


def inputs(model):
    tokens = torch.randint(0, 61, (3, 16), generator=torch.Generator().manual_seed(0))
    labels = torch.randint(0, 61, (3, 16), generator=torch.Generator().manual_seed(1))
    weights = torch.rand(3, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    weights[0, :5] = 0
    return tokens, labels, weights


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk_tokens", [1, 7, 1000])
def test_the_chunked_loss_equals_the_plain_one(kind, chunk_tokens, monkeypatch):
    model = build(KINDS[kind])
    monkeypatch.setattr(chunked, "CHUNK_ELEMENTS", chunk_tokens * 128)
    tokens, labels, weights = inputs(model)
    sums = model(tokens, labels=labels, weights=weights)
    sums[0].backward()
    ours = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    logits = model(tokens)[..., :61].flatten(0, 1)
    losses = functional.cross_entropy(logits, labels.flatten(), reduction="none")
    (losses * weights.flatten()).sum().backward()
    assert sums[0].item() == pytest.approx((losses * weights.flatten()).sum().item(), rel=1e-12)
    assert sums[1].item() == pytest.approx((losses * (weights.flatten() > 0)).sum().item(), rel=1e-12)
    for name, parameter in model.named_parameters():
        assert torch.allclose(ours[name], parameter.grad, rtol=0, atol=1e-12), name


def test_the_logits_of_all_tokens_never_exist(monkeypatch):
    """No tensor of tokens x vocabulary is made, forward or backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    model = build({"ffn_hidden_size": 48})
    monkeypatch.setattr(chunked, "CHUNK_ELEMENTS", 8 * 128)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, tuple | list) else [result]:
                if isinstance(tensor, torch.Tensor) and tensor.shape[-1:] in ((61,), (128,)) and len(tensor) != 32:
                    largest = max(largest, tensor.numel())
            return result

    tokens, labels, weights = inputs(model)
    with Watch():
        model(tokens, labels=labels, weights=weights)[0].backward()
    assert 0 < largest <= 8 * 128


def test_a_loss_scale_scales_gradients_and_not_the_loss():
    model = build()
    tokens, labels, weights = inputs(model)
    plain = model(tokens, labels=labels, weights=weights)
    plain[0].backward()
    gradient = model.norm.weight.grad.clone()
    model.zero_grad()
    scaled = model(tokens, labels=labels, weights=weights, grad_scale=1024.0)
    scaled[0].backward()
    assert torch.equal(plain, scaled)
    assert torch.allclose(model.norm.weight.grad, gradient * 1024, rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_the_cache_changes_nothing(kind):
    model = build(KINDS[kind]).eval()
    prompt = torch.tensor([5, 9, 2])
    found = list(generate(model, prompt, 9, temperature=0))
    tokens = prompt.tolist()
    for token in found:
        logits = model(torch.tensor([tokens]))[0, -1, :61]
        assert token == int(logits.argmax())
        tokens.append(token)


def test_generation_stops_at_the_last_learned_position_and_at_the_stop_token():
    model = build()
    assert len(list(generate(model, torch.tensor([1]), 100, temperature=1.0))) == 16
    found = list(generate(model, torch.tensor([1]), 100, temperature=0))
    assert list(generate(model, torch.tensor([1]), 100, temperature=0, stop=found[3])) == found[: found.index(found[3])]


def test_initial_weights_follow_name_seed_and_scheme():
    spec = resolve({"model": {"num_layers": 8, "hidden_size": 256, "num_attention_heads": 4}}).run.model
    wide, narrow = (initial(spec, f"layers.3.{n}.weight", (256, 256), 1) for n in ("attention.qkv", "attention.out"))
    assert wide.std().item() == pytest.approx(0.02, rel=0.02)
    assert narrow.std().item() == pytest.approx(0.02 / 4, rel=0.02)  # sqrt(2 x 8 layers)
    assert torch.equal(wide, initial(spec, "layers.3.attention.qkv.weight", (256, 256), 1))
    assert not torch.equal(wide, initial(spec, "layers.4.attention.qkv.weight", (256, 256), 1))
    assert not torch.equal(wide, initial(spec, "layers.3.attention.qkv.weight", (256, 256), 2))
    assert initial(spec, "norm.weight", (256,), 1).eq(1).all() and initial(spec, "norm.bias", (256,), 1).eq(0).all()


def test_documents_do_not_see_each_other():
    model = build().eval()
    tokens = torch.tensor([[3, 4, 5, 6, 7, 8]])
    documents = torch.tensor([[0, 0, 0, 1, 1, 1]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    both = model(tokens, documents=documents, positions=positions)
    alone = model(tokens[:, 3:])
    assert torch.allclose(both[:, 3:], alone, atol=1e-12)
