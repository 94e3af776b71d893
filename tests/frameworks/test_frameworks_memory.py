"""What other people's systems allocate, held against what they were measured to: tests/golden/memory."""

import json
import statistics
from pathlib import Path

import pytest

from benchmarks import memory as tables
from steelyard.frameworks import allocating
from steelyard.frameworks.deepspeed import memory as deepspeed
from steelyard.frameworks.libai import memory as libai
from steelyard.frameworks.megatron import memory, script
from steelyard.spec import UserError, resolve

GOLDEN = Path(__file__).parents[1] / "golden/memory"
MIB = 2**20


@pytest.fixture(scope="module")
def rows():
    return list(tables.megatron())


def sizes(rows, key):
    return sorted(abs(row[key]) for row in rows)


def test_states_are_exact(rows):
    """TensorBoard keeps 24 bits of a figure, hence the 64 KiB."""
    assert len(rows) == 134
    assert max(abs(row["states_error"]) for row in rows) < 64 * 1024


def test_after_a_step(rows):
    assert statistics.median(sizes(rows, "allocated_error")) < 0.005


def test_peaks(rows):
    known = [row for row in rows if row["kernel"] in ("flash", "unfused")]
    large = [row for row in rows if row["large"]]
    for part, median, late in ((known, 0.01, 0.03), (rows, 0.01, 0.03), (large, 0.001, 0.001)):
        errors = sizes(part, "peak_error")
        assert statistics.median(errors) < median
        assert errors[int(0.9 * len(errors))] < late


def test_megatron_is_further_off_itself(rows):
    """The known medians of its own report, so that a repair of ours cannot break the comparison silently."""
    assert 0.2 < statistics.median(sizes(rows, "theory_peak")) < 0.4


def test_seed_thread():
    found = list(tables.seed_thread())
    assert len(found) == 8
    for row in found:
        limit = 0.07 if row.get("before_moments") else 0.0601
        assert abs(row["error"]) < limit, row


def test_bigscience_logs():
    """Meg-DS: the same 272 MiB less on every later stage, down to the floor of the optimizer's update at stage 9."""
    found = [row for row in tables.bigscience() if row["kind"] == "allocated" and "DeepSpeed" in row["framework"]]
    assert len(found) == 16
    errors = sorted(abs(row["error"]) for row in found)
    assert errors[len(errors) // 2] < 0.011
    config = found[0]["config"]
    ranks = {m.stage: m for m in allocating.ranks(resolve(config).run) if m.tensor == 0}
    assert [ranks[n].peak - ranks[n + 1].peak for n in range(1, 8)] == [272 * MIB] * 7
    assert {ranks[n].at_peak.name for n in range(9, 15)} == {"optimizer"}


def test_states_of_megatron():
    """Bytes per parameter: 18 or 6 + 12/d in bf16, 20 or 4 + 16/d in fp16, 16 or 8 + 8/d in fp32."""
    for compute, plain, sharded in (("bf16", 18, 7.5), ("fp16", 20, 6), ("fp32", 16, 9)):
        gradients = "fp16" if compute == "fp16" else "fp32"
        for zero, per_parameter in ((0, plain), (1, sharded)):
            run = megatron_run({"precision": {"compute": compute, "gradients": gradients}, "parallel": {"zero": zero}})
            state = memory.states(8000, run.precision, run.parallel, run.engine)
            assert state.total == per_parameter * 8000


def megatron_run(sections, world=8):
    base = {
        "model": {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4},
        "engine": {"framework": "megatron"},
    }
    return resolve({**base, **sections}, world=world).run


@pytest.mark.parametrize("accumulation", [1, 2, 4, 8])
def test_micro_batches_in_flight(accumulation):
    """Field report C04: bounded by the stages, not by the accumulation."""
    run = megatron_run({"parallel": {"pipeline": 4}, "batch": {"micro_batch_size": 1, "accumulation": accumulation}})
    flying = [memory.in_flight(run.parallel, accumulation, rank, None) for rank in range(4)]
    assert flying == [min(accumulation, most) for most in (4, 3, 2, 1)]


def test_interleaved_in_flight():
    """9 chunk passes on the last of 4 ranks with 3 chunks, 11 with groups of 5: both seen in the functional tests."""
    run = megatron_run({
        "model": {"num_layers": 12, "hidden_size": 64, "num_attention_heads": 4},
        "parallel": {"pipeline": 4, "virtual": 3, "pipeline_schedule": "interleaved"},
        "batch": {"micro_batch_size": 1, "accumulation": 8},
    })  # fmt: skip
    assert memory.in_flight(run.parallel, 8, 3, None) == 9
    assert memory.in_flight(run.parallel, 8, 3, 5) == 11


def test_kernel_of_a_chip():
    def chosen(chip, deterministic=False):
        engine = {"framework": "megatron", "deterministic": deterministic}
        return memory.kernel(megatron_run({"hardware": {"chip": chip}, "engine": engine}))

    assert chosen("A100-SXM4-80GB") == "flash"
    assert chosen("H100-SXM5-80GB", deterministic=True) == "fused"
    assert (chosen("GB200"), chosen("GB200", deterministic=True)) == ("fused", "flash")


def test_bf16_optimizer_accumulates_unsharded():
    run = megatron_run({"precision": {"compute": "bf16"}, "engine": {"framework": "deepspeed"}})
    assert deepspeed.held(1000, run).running.gradients == 4000


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_deepspeed_in_fp32(zero):
    """Four bytes wide throughout; without ZeRO the weights are their own masters."""
    run = megatron_run({"precision": {"compute": "fp32"}, "parallel": {"zero": zero}})
    share = 1000 if zero == 0 else 125
    running = deepspeed.held(1000, run).running
    assert (running.weights, running.gradients) == ((500, 500) if zero == 3 else (4000, 4000))
    assert (running.master, running.optimizer) == (4 * share if zero else 0, 8 * share)


@pytest.mark.parametrize(("framework", "sections", "said"), [
    ("deepspeed", {"parallel": {"pipeline": 2}}, "parallel.pipeline = 2.*set parallel.pipeline = 1"),
    ("libai", {"parallel": {"context": 2}}, "parallel.context = 2"),
    ("libai", {"precision": {"compute": "bf16"}}, "precision.compute = bf16.*fp16 or fp32"),
    ("megatron-deepspeed", {"parallel": {"pipeline": 2, "virtual": 2, "pipeline_schedule": "interleaved"}},
     "parallel.virtual = 2"),
])  # fmt: skip
def test_what_a_framework_does_not_do_is_refused(framework, sections, said):
    """Rather than planned as if it were not there."""
    with pytest.raises(UserError, match=f"(?s)M004.*{said}"):
        allocating.ranks(megatron_run({"engine": {"framework": framework}, **sections}))


def test_libai_stages():
    assert libai.stages(24, 4) == (6, 7, 7, 4)
    assert libai.stages(48, 8) == (6, 6, 7, 7, 7, 7, 7, 1)
    assert libai.stages(25, 4) == (6, 6, 6, 7)


def test_zero_explains_the_seed_thread():
    """Field report C01: what the thread never connected. LiBai with ZeRO 2 needs 14 of its 16 bytes a parameter less
    than without, spread over 8 ranks."""

    def peak(zero):
        values = json.loads((GOLDEN / "seed_thread.json").read_text())["rows"][4]["config"]
        run = resolve({**values, "parallel": {"zero": zero}}, world=8).run
        return allocating.ranks(run)[0].peak, run

    (with_zero, run), (without, _) = peak(2), peak(0)
    from steelyard.predict import parameters

    saved = parameters.unique(run.model) * 14 * 7 / 8
    assert without - with_zero == pytest.approx(saved, rel=0.001)


def test_recompute_explains_the_seed_thread():
    """Field report C01: one flag is the whole difference between two scripts."""
    text = json.loads((GOLDEN / "seed_thread.json").read_text())["rows"][2]["arguments"]
    with_flag = resolve(script.values(script.parse(text)), world=8).run
    without = resolve(script.values(script.parse(text.replace("--checkpoint-activations", ""))), world=8).run
    assert with_flag.recompute.mode == "full" and without.recompute.mode == "none"
    assert allocating.ranks(without)[0].peak > 2.5 * allocating.ranks(with_flag)[0].peak
