"""What the rounds of a bench come to: medians with their spread, and ratios pair by pair."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from steelyard import hardware
from steelyard.bench.arm import Arm
from steelyard.bench.matrix import Result
from steelyard.spec.bench import Bench

SCHEMA, VERSION = "steelyard.bench", 1


def as_json(name: str, arms: Sequence[Arm], results: Sequence[Result], rule: Bench) -> dict[str, Any]:
    """One document. Rates are of the whole run (samples or tokens of a step over its seconds), `_per_device` beside
    them; None where a log does not say."""
    first = next((arm.name for arm in arms), "")
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "name": name,
        "warmup": rule.excluded,
        "steps": rule.steps,
        "rounds": rule.rounds,
        "arms": [_arm(arm, _of(arm.name, results), _of(first, results)) for arm in arms],
        "says": SAYS,
    }


SAYS = {
    "seconds": "Of one step in the timed window: the steps after warm-up, evaluation and checkpoints outside.",
    "tokens_per_second": "Of the whole run: tokens of a step over the median of its seconds.",
    "model_flops_per_second": "Of the whole run: forward and backward, causal attention once, nothing recomputed.",
    "mfu": "Model FLOP/s over `peak_flops`, whose source is beside it.",
    "ratio": "Seconds of the first arm over this one's, median of the rounds; above 1 this one is faster. `low` "
    "and `high` are the extremes over the rounds.",
    "memory": "Bytes by kind after the first completed step, the largest rank; `predicted` before launch. `sampled` "
    "was seen from outside while the arm warmed up.",
}  # fmt: skip


def _of(name: str, results: Sequence[Result]) -> list[Result]:
    return [result for result in results if result["arm"] == name]


def _arm(arm: Arm, results: list[Result], baseline: list[Result]) -> dict[str, Any]:
    good = [result for result in results if result["status"] == "ok"]
    last = results[-1] if results else {"status": "not run", "reason": "", "folder": ""}
    shared = {
        "name": arm.name,
        "ours": arm.ours,
        "command": list(arm.command),
        "status": last["status"],
        "reason": last["reason"],
        "rounds": [{key: r.get(key) for key in ("round", "status", "reason", "folder", "seconds")} for r in results],
    }
    if not good:
        return shared
    one = good[0]
    seconds = spread([value for result in good for value in result["seconds"]])
    devices = one["devices"]
    amounts = {what: one[what] for what in ("samples", "tokens", "model_flops")}
    rates = {f"{what}_per_second": n / seconds["median"] if n else None for what, n in amounts.items()}
    each = {f"{key}_per_device": value / devices if value and devices else None for key, value in rates.items()}
    return {
        **shared,
        "record": str(arm.record(Path(one["folder"]))),
        "devices": devices,
        "seconds": seconds,
        **rates,
        **each,
        "mfu": _mfu(arm, good, rates["model_flops_per_second"]),
        "memory": one["memory"],
        "ranks": one["ranks"],
        "predicted": one["predicted"],
        "sampled": one["sampled"],
        "ratio": _ratio(good, [result for result in baseline if result["status"] == "ok"]),
    }


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, 10th and 90th percentile, and how many."""
    tenths = quantiles(values, n=10, method="inclusive") if len(values) > 1 else [values[0]] * 9
    return {"median": median(values), "p10": tenths[0], "p90": tenths[-1], "n": len(values)}


def _mfu(arm: Arm, good: list[Result], rate: float | None) -> dict[str, Any] | None:
    """Against the chip's dense peak where the chip is known, else against a matrix product measured beside the rounds:
    on GPUs one device's for each, on a CPU the whole processor's, which all ranks share."""
    if rate is None:
        return None
    dtype, devices = good[0]["dtype"], good[0]["devices"]
    chip = hardware.of(arm.run.hardware) if arm.run else None
    if chip and dtype in chip.peak:
        whole, source = chip.peak[dtype] * devices, chip.source
    else:
        measured = [r["peak"] for r in good if r.get("peak") and r["peak"]["dtype"] == dtype]
        if not measured:
            return None
        best = max(one["flops"] for one in measured)
        whole = best * (devices if measured[0]["device"] == "cuda" else 1)
        source = f"matrix product in {dtype}, measured beside the rounds"
    value = rate / whole
    return {
        "value": value if value <= 1 else None,
        "convention": "model FLOPs, causal",
        "peak_flops": whole,
        "peak_source": source,
        "note": "" if value <= 1 else f"{value:.0%} is impossible: the machine was busier when the peak was measured",
    }


def _ratio(good: list[Result], baseline: list[Result]) -> dict[str, Any] | None:
    """Round by round: the two of a round ran one after the other."""
    before = {result["round"]: median(result["seconds"]) for result in baseline}
    pairs = [before[r["round"]] / median(r["seconds"]) for r in good if r["round"] in before]
    return {"median": median(pairs), "low": min(pairs), "high": max(pairs), "pairs": len(pairs)} if pairs else None
