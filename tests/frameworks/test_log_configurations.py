"""What whole logs say about their run. The logs are invented, in the formats of their frameworks; a key that a log does
not state must not appear, and every value has a line or a reason."""

from pathlib import Path

import pytest

from steelyard.compare.align import flat
from steelyard.frameworks import detect

GOLDEN = Path(__file__).parents[1] / "golden" / "logs"

STATED = {
    "torchtitan-2025-01.log": {
        "model.num_layers": 8, "model.hidden_size": 256, "model.ffn_hidden_size": 768,
        "model.num_attention_heads": 16, "model.num_query_groups": 16, "model.seq_length": 2048,
        "model.vocab_size": 2256, "model.rotary_base": 500000.0,
        "parallel.tensor": 2, "parallel.data": 2, "parallel.zero": 3, "parallel.sequence": True,
        "batch.micro_batch_size": 8, "batch.global_batch_size": 16, "batch.accumulation": 1,
        "precision.compute": "bf16",
        "recompute.mode": "selective", "recompute.every": 2, "learning_rate.peak": 0.0008, "length.steps": 100,
        "learning_rate.warmup_steps": 20, "hardware.chip": "H100-SXM5-80GB", "optimizer.betas": [0.9, 0.95],
    },
    "nanotron-2024.log": {
        "model.num_layers": 12, "model.hidden_size": 768, "model.ffn_hidden_size": 3072, "model.vocab_size": 50257,
        "model.vocab_multiple": 32, "model.tied_embeddings": True, "model.activation": "swiglu", "parallel.tensor": 2,
        "parallel.data": 4, "parallel.zero": 1, "parallel.sequence": True, "batch.micro_batch_size": 4,
        "batch.accumulation": 2, "batch.global_batch_size": 32, "precision.compute": "bf16",
        "optimizer.betas": [0.9, 0.95],
        "learning_rate.minimum": 6e-05, "learning_rate.warmup_steps": 10, "model.seq_length": 2048,
    },
    "gpt-neox.log": {
        "model.num_layers": 12, "model.hidden_size": 768, "model.vocab_size": 50257, "model.position": "rotary",
        "model.tied_embeddings": False, "parallel.tensor": 1, "parallel.data": 8, "parallel.zero": 1,
        "batch.micro_batch_size": 4, "batch.global_batch_size": 256, "batch.accumulation": 8,
        "precision.compute": "fp16",
        "recompute.mode": "full", "optimizer.betas": [0.9, 0.95], "optimizer.weight_decay": 0.1,
        "learning_rate.peak": 0.0006, "data.train": ["data/enwik8/enwik8_text_document"], "data.split": "969,30,1",
    },
    "nanogpt.log": {
        "model.seq_length": 1024, "batch.micro_batch_size": 12, "batch.global_batch_size": 480, "parallel.data": 4,
        "learning_rate.peak": 0.0006, "optimizer.weight_decay": 0.1, "length.steps": 100,
    },
    "llm-c.log": {
        "model.num_layers": 12, "model.hidden_size": 768, "model.vocab_size": 50257, "parallel.data": 8,
        "parallel.zero": 1, "batch.micro_batch_size": 32, "batch.global_batch_size": 512, "batch.accumulation": 2,
        "precision.compute": "bf16", "learning_rate.peak": 0.0006, "learning_rate.minimum": 0.0,
        "hardware.chip": "A100-SXM4-80GB",
    },
    "maxtext.log": {
        "model.num_layers": 12, "model.hidden_size": 768, "model.ffn_hidden_size": 2048, "model.seq_length": 2048,
        "model.vocab_size": 32000, "parallel.data": 4, "parallel.zero": 3, "batch.micro_batch_size": 8,
        "batch.global_batch_size": 32, "recompute.mode": "full", "learning_rate.warmup_steps": 2,
    },
    "huggingface": {
        "batch.micro_batch_size": 8, "batch.global_batch_size": 64, "batch.accumulation": 2, "parallel.data": 4,
        "length.steps": 200,
    },
    "lingua": {"parallel.data": 2, "hardware.chip": "A100-SXM4-80GB"},
}  # fmt: skip

# what a naive reader would make up
NOT_STATED = {
    "torchtitan-2025-01.log": ["seed", "model.init_std"],
    "nanotron-2024.log": ["recompute.mode", "data.train", "data.tokenizer"],
    "nanogpt.log": ["model.num_layers", "model.hidden_size", "hardware.chip", "precision.compute"],
    "maxtext.log": ["hardware.chip", "data.train"],
    "huggingface": ["model.seq_length", "precision.compute", "model.num_layers"],
    "lingua": ["model.num_layers", "model.seq_length", "batch.global_batch_size"],
}


@pytest.mark.parametrize("name", STATED)
def test_configuration(name):
    record = detect.read(GOLDEN / name)
    known = dict(flat(record.config))
    assert {key: known.get(key) for key in STATED[name]} == STATED[name]
    assert not [key for key in NOT_STATED.get(name, []) if key in known]
    assert all(record.sources[key] for key in known if not key.startswith("engine."))


# step, loss, seconds, tokens per second of the whole run
STEPS = {
    "torchtitan-2025-01.log": (4, (10, 7.7577, 0.1496, 219008)),
    "nanotron-2024.log": (3, (4, 10.3, 0.4, 164000)),
    "gpt-neox.log": (3, (20, 8.726479, 1.1975, 437831.7)),
    "nanogpt.log": (6, (10, 9.9637, 0.70285, 699324.2)),
    "llm-c.log": (4, (2, 10.437351, 0.29827, 1757763)),
    "maxtext.log": (6, (1, 10.091, 0.041, 1598439.024)),
    "lingua": (3, (20, 8.980192798599411, 0.50601, 129516.399)),
    "huggingface": (5, (20, 10.2071, None, None)),
}


@pytest.mark.parametrize("name", STEPS)
def test_every_step_line(name):
    count, (step, loss, seconds, rate) = STEPS[name]
    record = detect.read(GOLDEN / name)
    assert len(record.steps) == len(record.lines) == count
    second = record.steps[1]
    assert (second.step, second.loss) == (step, loss)
    assert second.seconds == (None if seconds is None else pytest.approx(seconds, rel=1e-3))
    assert second.tokens_per_second == (None if rate is None else pytest.approx(rate, rel=1e-4))


def test_memory_has_its_kind():
    kinds = {name: set(detect.read(GOLDEN / name).memory) for name in STATED}
    assert kinds == {
        "torchtitan-2025-01.log": {"reserved_peak"},
        "nanotron-2024.log": {"allocated", "allocated_peak", "reserved_peak"},
        "gpt-neox.log": {"allocated", "allocated_peak", "reserved", "reserved_peak"},
        "nanogpt.log": set(),
        "llm-c.log": {"device"},
        "maxtext.log": set(),
        "huggingface": set(),
        "lingua": {"active_peak", "reserved_peak"},
    }


def test_evaluations_and_warm_up_are_not_speed():
    """nanoGPT's iterations with an evaluation, MaxText's first dispatches, GPT-NeoX's first window."""
    assert detect.read(GOLDEN / "nanogpt.log").speed["seconds_per_step"] < 0.71
    assert detect.read(GOLDEN / "maxtext.log").speed["seconds_per_step"] == pytest.approx(0.2935, abs=0.001)
    assert detect.read(GOLDEN / "gpt-neox.log").speed["seconds_per_step"] < 1.2


def test_deepspeeds_clock_is_another():
    record = detect.read(GOLDEN / "gpt-neox.log")
    assert [s.step for s in record.steps] == [10, 20, 30]
    assert record.steps[0].loss == 9.93421  # DeepSpeed's own line says 9.4053
