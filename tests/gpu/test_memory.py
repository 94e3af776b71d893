"""Our own engine on one GPU: predicted against allocated, reserved and device memory, and the speed.

`make test-gpu` on a machine with a GPU; under 8 minutes. The record goes to runs/gpu-memory.json.
"""

import json
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from steelyard.predict import flops
from steelyard.predict.memory import check
from steelyard.spec import resolve

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and this machine has none"),
]
RECORD = Path(os.environ.get("STEELYARD_GPU_RECORD", "runs/gpu-memory.json"))
M345 = {"num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "seq_length": 1024}
CASES = {
    f"{compute}, micro-batch {micro}, recompute {mode}, zero {zero}": (compute, micro, mode, zero)
    for compute, micro, mode, zero in [
        ("bf16", 2, "none", 1), ("bf16", 8, "none", 1), ("bf16", 8, "selective", 1), ("bf16", 8, "full", 1),
        ("bf16", 8, "none", 0), ("bf16", 8, "none", 3), ("fp16", 2, "none", 1), ("fp16", 8, "full", 1),
    ]
}  # fmt: skip


@pytest.fixture(scope="module")
def group():
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", CASES)
def test_predicted_against_measured(name, group):
    compute, micro, mode, zero = CASES[name]
    run = resolve({
        "model": M345, "precision": {"compute": compute}, "recompute": {"mode": mode}, "parallel": {"zero": zero},
        "batch": {"micro_batch_size": micro, "accumulation": 2},
    }).run  # fmt: skip
    measured, seconds = _train(run)
    found = {entry.kind: entry for entry in check(run, measured)}
    tokens = run.tokens_per_step / seconds
    model_flops = flops.model_flops(run.model, run.padded_vocab_size) * run.batch.global_batch_size / seconds
    _record(name, {
        "gpu": torch.cuda.get_device_name(), "measured": measured, "tokens_per_second": tokens,
        "model_flops_per_second": model_flops,
        "predicted": {kind: entry.predicted for kind, entry in found.items()},
    })  # fmt: skip
    assert abs(found["allocated"].error) < 0.02
    assert abs(found["allocated_peak"].error) < 0.05


def _train(run):
    """Bytes by kind after the first step, and the seconds of a later one."""
    from steelyard.parallel import mesh
    from steelyard.train import measure
    from steelyard.train.engine import Engine, Micro
    from steelyard.train.rehearse import random_batch

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    where = mesh.build(run.parallel, torch.device("cuda", 0))
    engine = Engine(run, where)
    measured, seconds = {}, 0.0
    for step in range(4):
        torch.cuda.synchronize()
        began = time.perf_counter()
        batches = [random_batch(run) for _ in range(run.batch.accumulation)]
        micro_batches: list[Micro] = engine.begin(batches)
        engine.forward_backward(micro_batches, step)
        engine.clip(1.0)
        engine.update(1e-5)
        engine.end()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        if step == 0:
            measured = measure.memory(where)
    return measured, seconds


def _record(name, line):
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    RECORD.write_text(json.dumps({**known, name: line}, indent=1))
