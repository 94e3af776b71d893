"""Predicted against measured memory, from the facts in tests/golden/memory: `python benchmarks/memory.py`.

`--rehearse` adds our own engine against what it allocates on fake tensors (needs torch, a minute). `--rows` prints
every row.
"""

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from steelyard import hardware
from steelyard.frameworks import allocating
from steelyard.frameworks.megatron import script, theory
from steelyard.predict.memory import Memory, device
from steelyard.spec import resolve
from steelyard.spec.run import Run

GOLDEN = Path(__file__).parents[1] / "tests/golden/memory"
CHIPS = {"a100": "A100-SXM4-80GB", "h100": "H100-SXM5-80GB", "gb200": "GB200"}
MIB = 2**20
HALF_PERCENT = 0.005


def functional_tests() -> dict[str, Any]:
    return json.loads((GOLDEN / "megatron.json").read_text())


def predicted(arguments: Any, world: int, chip: str | None) -> tuple[Run, Memory]:
    """A list of arguments, and what its last rank allocates, which writes the log."""
    values = script.values(script.arguments(arguments))
    run = resolve({**values, "hardware": {"chip": chip}} if chip else values, world=world).run
    return run, (allocating.ranks(run) or ())[-1]


def megatron() -> Iterator[dict[str, Any]]:
    """Every row with our prediction and Megatron's own."""
    measured = functional_tests()
    for row in measured["rows"]:
        run, memory = predicted(measured["arguments"][row["arguments"]], row["world"], CHIPS[row["gpu"]])
        own = theory.weights_and_optimizer(run), theory.activations(run)
        yield {
            **row,
            "large": run.model.hidden_size >= 4096,
            "states_error": memory.kept.total - row["states"],
            "allocated_error": memory.steady / row["allocated"] - 1,
            "peak_error": memory.peak / row["peak"] - 1,
            "first_error": memory.peak_first_step / row["peak_first_step"] - 1,
            "theory_allocated": own[0] / row["allocated"] - 1,
            "theory_peak": sum(own) / row["peak"] - 1,
        }


def spread(errors: list[float]) -> str:
    """Median and 90th percentile of the sizes of errors."""
    sizes = sorted(abs(error) for error in errors)
    return f"{statistics.median(sizes):>7.2%} {sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))]:>7.2%}"


SUBSETS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "all": lambda row: True,
    "attention kernel known": lambda row: row["kernel"] in ("flash", "unfused"),
    "  flash": lambda row: row["kernel"] == "flash",
    "  unfused": lambda row: row["kernel"] == "unfused",
    "attention kernel chosen": lambda row: row["kernel"] not in ("flash", "unfused"),
    "7B, sequence 8,192": lambda row: row["large"],
    "toy models": lambda row: not row["large"],
}


def megatron_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    exact = sum(abs(row["states_error"]) < 64 * 1024 for row in rows)
    yield f"Megatron-LM's functional tests, last rank: states exact in {exact} of {len(rows)} rows"
    yield f"{'|error|: median, 90th percentile':<34} {'rows':>4} {'after a step':>16} {'peak':>16} {'first step':>16}"
    for name, chosen in SUBSETS.items():
        part = [row for row in rows if chosen(row)]
        columns = [spread([row[key] for row in part]) for key in ("allocated_error", "peak_error", "first_error")]
        yield f"{name:<34} {len(part):>4} {columns[0]:>16} {columns[1]:>16} {columns[2]:>16}"
        own = [spread([row[key] for row in part]) for key in ("theory_allocated", "theory_peak")]
        yield f"{'    Megatron-LM of itself':<34} {'':>4} {own[0]:>16} {own[1]:>16}"


def chip_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """What the arguments leave open: the same list was measured on several chips."""
    lists = functional_tests()["arguments"]
    known = [row["kernel"] in ("flash", "unfused") for row in rows]
    near: Counter[tuple[str, str]] = Counter()  # list of arguments, choice of a chip -> rows within 0.5 %
    choices = {"no chip, as `plan` on arguments alone": None, **{f"chip taken for {key}": CHIPS[key] for key in CHIPS}}
    yield f"{'from the arguments alone':<40} {'after a step':>16} {'peak':>16} {'kernel known':>16}"
    for name, chip in choices.items():
        after, peak = [], []
        for row in rows:
            _, memory = predicted(lists[row["arguments"]], row["world"], chip)
            after.append(memory.steady / row["allocated"] - 1)
            peak.append(memory.peak / row["peak"] - 1)
            near[row["arguments"], name] += abs(after[-1]) <= HALF_PERCENT
        chosen = [error for error, sure in zip(peak, known, strict=True) if sure]
        yield f"{name:<40} {spread(after):>16} {spread(peak):>16} {spread(chosen):>16}"
    best = sum(max(near[key, name] for name in choices) for key in lists)
    true = sum(abs(row["allocated_error"]) <= HALF_PERCENT for row in rows)
    several = sum(len({row["gpu"] for row in rows if row["arguments"] == key}) > 1 for key in lists)
    yield f"{several} of {len(lists)} lists were measured on more than one chip. Rows within 0.5 % after a step:"
    yield f"{true} of {len(rows)} with the chip, {best} with the best of these four, chosen per list after the fact"


def seed_thread() -> Iterator[dict[str, Any]]:
    facts = json.loads((GOLDEN / "seed_thread.json").read_text())
    for row in facts["rows"]:
        values = row.get("config") or script.values(script.parse(row["arguments"]))
        chip = {"chip": row.get("chip") or values["hardware"]["chip"]}
        run = resolve({**values, "hardware": chip}, world=facts["world"]).run
        memory = (allocating.ranks(run) or ())[0]
        context = device(memory, hardware.of(run.hardware)) or 0
        if row.get("before_moments"):
            context -= memory.peak - memory.peak_first_step
        yield {**row, "predicted_mib": context / MIB, "error": context / MIB / row["device_mib"] - 1}


def seed_table() -> Iterator[str]:
    facts = json.loads((GOLDEN / "seed_thread.json").read_text())
    yield "LiBai issue 349: GPT-2 24 x 1024 on 8 GPUs, device MiB with a V100's context of 1,113 MiB"
    for row in seed_thread():
        yield (
            f"{row['framework']:<12} {row['device_mib']:>7,} measured {row['predicted_mib']:>9,.0f} predicted "
            f"{row['error']:>+7.1%}  {row['note']}"
        )
    for name, figures in facts["peers"].items():
        yield f"{name} on the same: micro-batch 2 {figures['mbs2']:,} MiB, micro-batch 8 {figures['mbs8']:,} MiB"


def bigscience() -> Iterator[dict[str, Any]]:
    for row in json.loads((GOLDEN / "bigscience.json").read_text())["rows"]:
        run = resolve(row["config"]).run
        found = allocating.ranks(run) or ()
        if row["kind"] == "allocated":
            memory = next(m for m in found if m.stage == row["stage"])
            steady = memory.steady / row["steady"] - 1 if row["steady"] else None
            yield {**row, "error": memory.peak / row["peak"] - 1, "steady_error": steady}
        else:
            largest = max(device(m, hardware.of(run.hardware)) or 0 for m in found)
            yield {**row, "error": largest / row["device"] - 1, "steady_error": None}


def bigscience_table() -> Iterator[str]:
    yield "BigScience, by what was read"
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in bigscience():
        groups.setdefault((row["framework"], row["kind"]), []).append(row)
    for (framework, kind), rows in groups.items():
        steady = [row["steady_error"] for row in rows if row["steady_error"] is not None]
        after = f"after a step {spread(steady)}" if steady else ""
        signed = statistics.median(row["error"] for row in rows)
        peak = spread([row["error"] for row in rows])
        yield f"{framework + ', ' + kind:<56} {len(rows):>3} rows  peak {peak} (signed {signed:+.1%})  {after}"


LAYOUTS: list[tuple[str, int, int, dict[str, Any]]] = [
    ("one rank, fp32", 1, 0, {"precision": {"compute": "fp32"}}),
    ("zero 1", 8, 0, {}),
    ("zero 3", 8, 0, {"parallel": {"zero": 3}}),
    ("tensor 2, sequence", 8, 3, {"parallel": {"tensor": 2, "sequence": True}}),
    ("full recompute", 8, 0, {"recompute": {"mode": "full"}}),
    ("pipeline 4, stage 0", 8, 0, {"parallel": {"pipeline": 4}, "batch": {"micro_batch_size": 2, "accumulation": 8}}),
    ("pipeline 4, stage 3", 8, 7, {"parallel": {"pipeline": 4}, "batch": {"micro_batch_size": 2, "accumulation": 8}}),
    *((f"pipeline 4, {name}, stage {rank // 2}", 8, rank, {
        "parallel": {"pipeline": 4, "pipeline_schedule": name, "virtual": 1 if name == "gpipe" else 2},
        "batch": {"micro_batch_size": 1, "accumulation": 8}})
      for name in ("gpipe", "interleaved", "zero_bubble", "zbv") for rank in (0, 2, 7)),
    ("64 ranks: tensor 4, pipeline 4", 64, 20, {"parallel": {"tensor": 4, "pipeline": 4}, "batch": {
        "micro_batch_size": 1, "accumulation": 8}}),
    ("512 ranks: tensor 8, pipeline 8", 512, 448, {"parallel": {"tensor": 8, "pipeline": 8}, "batch": {
        "micro_batch_size": 1, "accumulation": 16}}),
]  # fmt: skip
BASE = {"num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "seq_length": 1024}


def rehearsal_table() -> Iterator[str]:
    from steelyard.train.rehearse import beside_prediction

    yield "our own engine, 24 x 1024 in bf16 unless said, against one step on fake tensors"
    for name, world, rank, sections in LAYOUTS:
        values = {"model": BASE, "precision": {"compute": "bf16"}, "batch": {"micro_batch_size": 4, "accumulation": 2}}
        found = beside_prediction(resolve({**values, **sections}, world=world).run, rank)["bytes"]
        shown = " ".join(f"{key} {found[key]['error']:+.2%}" for key in ("master", "optimizer", "steady", "peak"))
        yield f"{name:<34} {shown} of {found['peak']['rehearsed'] / MIB:,.0f} MiB"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--rehearse", action="store_true")
    options.add_argument("--rows", action="store_true")
    asked = options.parse_args()
    rows = list(megatron())
    for table in (megatron_table(rows), chip_table(rows), seed_table(), bigscience_table()):
        print("\n".join(table) + "\n")
    if asked.rows:
        for row in rows:
            kernel = row["kernel"][:7]
            errors = f"{row['allocated_error']:+.2%} {row['peak_error']:+.2%}"
            print(f"{errors:>16} {row['gpu']:<6} {kernel:<8} {row['container']:<10} {row['case']}")
    if asked.rehearse:
        print("\n".join(rehearsal_table()))


if __name__ == "__main__":
    main()
