"""The plan of a run as text for a terminal. Plain text: a plan answers before a table library would have loaded."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from steelyard.report import memory
from steelyard.report.memory import Sheet, block


def plan(sheet: Sheet) -> str:
    """A sheet that a person reads in ten seconds. `sheet` is the one of `plan.sheet`."""
    blocks = [
        *_headline(sheet),
        "",
        *block("model", _model(sheet)),
        *block("parameters", _parameters(sheet)),
        *block("layout", _layout(sheet)),
        *block("a rank holds", _ranks(sheet)),
        *block("batch", _batch(sheet)),
        *block("memory", memory.lines(sheet)),
        *block("traffic", _traffic(sheet)),
        *block("FLOPs", _flops(sheet)),
        *block("rate", _rate(sheet)),
        *block("others say", _others(sheet)),
        *block("note", (f"{note['key']}: {note['text']}" for note in sheet["notes"])),
    ]
    return "\n".join(blocks)


def _headline(sheet: Sheet) -> Iterator[str]:
    yield f"{sheet['name']}: {sheet['parameters']['unique_unpadded']:,} parameters{_against_name(sheet)}"


def _against_name(sheet: Sheet) -> str:
    named = sheet["size_in_name"]
    if named is None:
        return ""
    share = abs(named["difference"])
    if share < 0.0005:
        return ", as its name says"
    return f", {share:.1%} {'larger' if named['difference'] > 0 else 'smaller'} than its name says"


def _model(sheet: Sheet) -> Iterator[str]:
    model = sheet["model"]
    groups = model["num_query_groups"]
    shared = f" in {groups} query groups" if groups != model["num_attention_heads"] else ""
    yield (
        f"{model['kind']}: {model['num_layers']} layers of {model['hidden_size']:,}, "
        f"{model['num_attention_heads']} heads of {model['head_dim']}{shared}, "
        f"ffn {model['ffn_hidden_size']:,} {model['activation']}, "
        f"sequence {model['seq_length']:,}"
    )
    tied = "tied" if model["tied_embeddings"] else "untied"
    padded = f" padded to {model['padded_vocab_size']:,}" if model["padding_rows"] else ""
    yield f"vocabulary {model['vocab_size']:,}{padded}, {tied}; {model['position']} positions; {model['norm']}"


def _parameters(sheet: Sheet) -> Iterator[str]:
    counts = sheet["parameters"]
    yield f"{counts['unique_unpadded']:>19,}  unique, without padding rows"
    if counts["padding"]:
        yield f"{counts['unique']:>19,}  unique, with {sheet['model']['padding_rows']:,} padding rows"
    yield f"{counts['without_embeddings']:>19,}  without embeddings"
    if counts["sum_over_ranks"] != counts["unique"]:
        yield f"{counts['sum_over_ranks']:>19,}  held by the ranks of one replica, copies included"


def _layout(sheet: Sheet) -> Iterator[str]:
    layout = sheet["layout"]
    axes = [(name, layout[name]) for name in ("tensor", "context", "pipeline", "data") if layout[name] > 1]
    ranks = " x ".join(f"{name} {size}" for name, size in axes)
    world = f"{layout['world_size']:,} ranks: {ranks}" if ranks else "one rank"
    extras = [f"zero {layout['zero']}"]
    extras += ["sequence parallel"] if layout["sequence"] else []
    extras += [f"{layout['replicate']} replicas of each shard group"] if layout["replicate"] > 1 else []
    yield f"{world}; {', '.join(extras)}"
    if len(layout["stages"]) > 1:
        virtual = f" x {layout['virtual']} chunks" if layout["virtual"] > 1 else ""
        yield (
            f"{layout['pipeline_schedule']}{virtual}, layers per stage {_runs(layout['stages'])}; slowest stage "
            f"{layout['imbalance']:.3f} x the mean; bubble {layout['bubble']:.1%}, "
            f"{layout['bubble_of_schedule']:.1%} by the schedule alone"
        )


def _runs(values: Sequence[int]) -> str:
    """`7 7 7 3` or, where it is long, `6 x 15, 7`."""
    if len(values) <= 8:
        return "-".join(map(str, values))
    grouped = [(value, len(list(group))) for value, group in groupby(values)]
    return ", ".join(f"{value} x {times}" if times > 1 else str(value) for value, times in grouped)


def _ranks(sheet: Sheet) -> Iterator[str]:
    """Parameters per rank, equal stages on one line."""
    stages: dict[int, tuple[int, int, int]] = {}
    for rank in sheet["parameters"]["ranks"]:
        count = stages.get(rank["stage"], (0, 0, 0))[0] + rank["count"]
        stages[rank["stage"]] = (count, rank["held"], max(rank["stored"], stages.get(rank["stage"], (0, 0, 0))[2]))
    for (count, held, stored), group in groupby(stages.items(), key=lambda item: item[1]):
        numbers = [stage for stage, _ in group]
        where = f"stage {numbers[0]}" if len(numbers) == 1 else f"stages {numbers[0]} to {numbers[-1]}"
        ranks = f"each of {count:,} ranks" if count > 1 else "the one rank"
        shard = f", {stored:,} of them stored" if stored != held else ""
        yield f"{held:>19,}  on {ranks}{f' of {where}' if len(stages) > 1 else ''}{shard}"


def _batch(sheet: Sheet) -> Iterator[str]:
    batch, length = sheet["batch"], sheet["length"]
    yield (
        f"{batch['global_batch_size']:,} = micro {batch['micro_batch_size']} x accumulation {batch['accumulation']:,} "
        f"x data {sheet['layout']['data']}; {batch['tokens_per_step']:,} tokens a step"
    )
    levels = batch["levels"]
    if len(levels) > 1:
        yield (
            f"ramp from {levels[0]['global_batch_size']:,} in {len(levels) - 1} increments, over the first "
            f"{levels[-1]['first_step'] - 1:,} steps"
        )
    yield f"{length['steps']:,} steps, {length['samples']:,} samples, {length['tokens']:,} tokens"


def _traffic(sheet: Sheet) -> Iterator[str]:
    """What the busiest rank sends in a step, by axis; the kinds and purposes are in `--explain`."""
    if sheet["traffic"] is None:
        return
    found: dict[str, tuple[int, int]] = {}
    for entry in _busiest(sheet)["transfers"]:
        calls, size = found.get(entry["axis"], (0, 0))
        found[entry["axis"]] = calls + entry["calls"], size + entry["bytes"]
    parts = []
    for axis, (calls, size) in sorted(found.items(), key=lambda item: -item[1][1]):
        number, unit = memory.scaled(size)
        parts.append(f"{axis} {number:,.2f} {unit} in {calls:,}")
    yield f"{', '.join(parts)} calls; a step of the busiest rank" if parts else "none: one rank"


def _busiest(sheet: Sheet) -> Sheet:
    return max(sheet["traffic"]["ranks"], key=lambda rank: sum(entry["bytes"] for entry in rank["transfers"]))


def _flops(sheet: Sheet) -> Iterator[str]:
    counts = sheet["flops"]
    yield (
        f"{_si(counts['model_per_step'])}FLOP a step, {_si(counts['model_per_token'])}FLOP a token, "
        f"{_si(counts['model_per_run'])}FLOP the run (model FLOPs: causal, nothing recomputed)"
    )
    hardware = counts["hardware_per_step"]
    if hardware != counts["model_per_step"]:
        more = hardware / counts["model_per_step"] - 1
        yield f"{_si(hardware)}FLOP a step with what is recomputed, {more:.1%} more (hardware FLOPs)"
    yield f"{_si(counts['model_per_step_full_attention'])}FLOP a step if whole score matrices are counted"
    chip = sheet["hardware"]
    if chip["chip"] is None:
        yield "chip unknown, so no time and no utilization"
    elif chip["peak_flops"] is None:
        yield f"the peak of {chip['chip']} in {chip['dtype']} is unknown"
    else:
        seconds = counts["model_per_step"] / chip["peak_flops"] / sheet["layout"]["world_size"]
        yield (
            f"{_seconds(seconds)} a step at 100 % of {chip['chip']}'s {chip['peak_flops'] / 1e12:g} TFLOP/s in "
            f"{chip['dtype']}: no run is faster"
        )


def _rate(sheet: Sheet) -> Iterator[str]:
    """The table of the learning rate; the inner levels of a long ramp are left out (they are in the JSON)."""
    rows = sheet["learning_rate"]
    ramp = [row for row in rows if row["event"].startswith("global batch")]
    hidden = ramp[1:-1] if len(ramp) > 4 else []
    for row in rows:
        if row not in hidden:
            size = "" if row in ramp else f" (global batch {row['global_batch_size']:,})"
            yield f"{row['rate']:>10.3e}  step {row['step']:,}: {row['event']}{size}"


def _others(sheet: Sheet) -> Iterator[str]:
    """What the two best-known counters would print, where it is not the truth."""
    printed = sheet["parameters"]["as_printed"]
    estimated, total, unique = (
        printed[key] for key in ("megatron_deepspeed_estimated_billions", "deepspeed_total", "deepspeed_unique")
    )
    if estimated is None or estimated == total / 1e9 == sheet["parameters"]["unique"] / 1e9:
        return
    yield f"Megatron-DeepSpeed: {estimated} billion; DeepSpeed: TOTAL {total:,}, UNIQUE {unique:,}"
    yield "why, and what other systems would print: --explain, --as FRAMEWORK"


def side_by_side(columns: Sequence[tuple[str, Sheet]]) -> str:
    """Several layouts of one run beside each other: (what it sets, its sheet) per column."""
    rows: list[tuple[str, list[str]]] = [("", [title or "as written" for title, _ in columns])]
    for title, cell in COMPARED.items():
        cells = [cell(sheet) for _, sheet in columns]
        rows.append((title, cells))
    first = max(len(title) for title, _ in rows)
    widths = [max(len(cells[n]) for _, cells in rows) for n in range(len(columns))]
    return "\n".join(
        f"{title:<{first}}  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        for title, cells in rows
    ).rstrip()


def _held(sheet: Sheet) -> list[int]:
    return [rank["held"] for rank in sheet["parameters"]["ranks"]]


def _peak(sheet: Sheet) -> int:
    return max(rank["peak"] for rank in sheet["memory"]["ranks"])


COMPARED = {
    "ranks": lambda sheet: f"{sheet['layout']['world_size']:,}",
    "tensor x pipeline x data": lambda sheet: " x ".join(
        str(sheet["layout"][n]) for n in ("tensor", "pipeline", "data")
    ),
    "zero": lambda sheet: str(sheet["layout"]["zero"]),
    "layers per stage": lambda sheet: _runs(sheet["layout"]["stages"]),
    "slowest stage / mean": lambda sheet: f"{sheet['layout']['imbalance']:.3f}",
    "unique parameters": lambda sheet: f"{sheet['parameters']['unique']:,}",
    "without padding rows": lambda sheet: f"{sheet['parameters']['unique_unpadded']:,}",
    "largest rank holds": lambda sheet: f"{max(_held(sheet)):,}",
    "smallest rank holds": lambda sheet: f"{min(_held(sheet)):,}",
    "sum over ranks": lambda sheet: f"{sheet['parameters']['sum_over_ranks']:,}",
    "peak memory, GiB": lambda sheet: f"{_peak(sheet) / memory.GIB:.2f}" if sheet["memory"] else "?",
    "global batch": lambda sheet: f"{sheet['batch']['global_batch_size']:,}",
    "micro x accumulation": lambda sheet: f"{sheet['batch']['micro_batch_size']} x {sheet['batch']['accumulation']:,}",
    "model FLOPs a step": lambda sheet: f"{sheet['flops']['model_per_step']:.4e}",
    "hardware FLOPs a step": lambda sheet: f"{sheet['flops']['hardware_per_step']:.4e}",
}


def as_framework(sheet: Sheet, reported: dict[str, Any]) -> str:
    """What one framework would print about this run, and how that differs from the truth."""
    unique, model = sheet["parameters"]["unique"], sheet["flops"]["model_per_step"]
    title = f"{sheet['name']} as {reported['framework']} would report it"
    lines = [f"{title} (true: {unique:,} parameters, padding included)", ""]
    for key, entry in reported["printed"].items():
        value = "none for this run" if entry["value"] is None else entry["value"]
        shown = entry["lines"] or [f"{key}: {value}"]
        lines += shown[:MOST_LINES]
        if len(shown) > MOST_LINES:
            lines.append(f"... {len(shown) - MOST_LINES} more lines")
        lines += [f"    {entry['says']}", ""]
    for key, view in reported["views"].items():
        found = view["flops_per_step"]
        ratio = "none for this run" if found is None else f"{_si(found)}FLOP a step, {found / model:.3f} x model FLOPs"
        lines += [f"{key}: {ratio}", f"    {view['says']}", ""]
    return "\n".join(lines).rstrip()


MOST_LINES = 16


def explained(sheet: Sheet) -> str:
    """Every term of every number of a sheet."""
    parts = (_tensors(sheet), _totals(sheet), _products(sheet), memory.explained(sheet))
    return "\n".join([*(line for part in parts for line in (*part, "")), *_transfers(sheet), *_views(sheet)])


def _tensors(sheet: Sheet) -> Iterator[str]:
    yield f"{'parameter tensor':<36} {'shape':>18} {'cut':>9} {'each':>16} {'times':>6} {'total':>20}"
    for entry in sheet["parameters"]["tensors"]:
        shape = " x ".join(map(str, entry["shape"]))
        cut = {None: "whole", 0: "rows", 1: "columns"}[entry["cut"]]
        each, times = entry["parameters"], entry["times"]
        yield f"{entry['name']:<36} {shape:>18} {cut:>9} {each:>16,} {times:>6} {each * times:>20,}"
    yield f"`cut`: what the tensor axis ({sheet['layout']['tensor']}) divides; whole tensors are on every tensor rank."


def _totals(sheet: Sheet) -> Iterator[str]:
    counts = sheet["parameters"]
    for key in ("unique", "unique_unpadded", "padding", "without_embeddings", "sum_over_ranks"):
        yield f"{key:<20} {counts[key]:>22,}  {counts['says'][key]}"
    yield f"{'per_stage':<20} {' '.join(f'{n:,}' for n in counts['per_stage'])}"
    for key, value in counts["as_printed"].items():
        shown = f"{value:,}" if isinstance(value, int) else _brief(value)
        yield f"{key}: {shown}\n    {counts['says'][key]}"


def _brief(value: Any) -> str:
    if isinstance(value, list) and len(value) > 6:
        return f"{', '.join(map(str, value[:3]))}, ... {len(value) - 4} more ..., {value[-1]}"
    return ", ".join(map(str, value)) if isinstance(value, list) else "none" if value is None else str(value)


def _products(sheet: Sheet) -> Iterator[str]:
    model, counts = sheet["model"], sheet["flops"]
    width = model["head_dim"]
    sizes = {"s": model["seq_length"], "h": model["hidden_size"], "q": model["num_attention_heads"] * width}
    sizes |= {"k": model["num_query_groups"] * width, "f": model["ffn_hidden_size"], "V": model["padded_vocab_size"]}
    letters = ", ".join(f"{letter} = {size}" for letter, size in sizes.items())
    yield f"FLOPs of one forward pass over one sequence: {letters}"
    yield f"{'product':<20} {'formula':<18} {'each':>22} {'times':>6} {'total':>24} {'total, causal':>24}"
    linear = masked = full = causal = 0
    for name, entry in counts["forward_per_sequence"].items():
        each, total = entry["flops"], entry["flops"] * entry["times"]
        needed = total // 2 if entry["masked"] else total
        yield f"{name:<20} {entry['formula']:<18} {each:>22,} {entry['times']:>6} {total:>24,} {needed:>24,}"
        full, causal = full + total, causal + needed
        masked += each if entry["masked"] else 0
        linear += each if not entry["masked"] and name != "logits" else 0
    yield f"one layer: linear products {linear:,}; scores and context {masked:,} in full, {masked // 2:,} causal"
    for words, total in (("full score matrices", full), ("causal", causal)):
        yield f"x 3 (forward; two products of the same size backward), {words}: {3 * total:,} model FLOPs a sequence"
    again = (counts["hardware_per_step"] - counts["model_per_step"]) // sheet["batch"]["global_batch_size"]
    yield f"recompute = {sheet['recompute']['mode']}: {again:,} more a sequence, causal"
    for key in (
        "model_per_step",
        "model_per_step_full_attention",
        "hardware_per_step",
        "model_per_token",
        "model_per_run",
    ):
        yield f"{key:<32} {counts[key]:>28,}  {counts['says'][key]}"


def _transfers(sheet: Sheet) -> Iterator[str]:
    if sheet["traffic"] is None:
        return
    yield f"{'sent in a step by the busiest rank':<36} {'kind':>16} {'axis':>10} {'calls':>8} {'bytes':>20}"
    for entry in _busiest(sheet)["transfers"]:
        kind = entry["kind"].replace("_", "-")
        yield f"{entry['purpose']:<36} {kind:>16} {entry['axis']:>10} {entry['calls']:>8,} {entry['bytes']:>20,}"
    yield ""


def _views(sheet: Sheet) -> Iterator[str]:
    counts = sheet["flops"]
    yield "FLOPs of the same step by other definitions, and their ratio to our model FLOPs (causal)"
    for key, value in counts["views"].items():
        ratio = "none" if value is None else f"{value / counts['model_per_step']:.3f} x"
        yield f"{ratio:>9}  {key}: {counts['says'][key]}"


def _si(value: float) -> str:
    """Four digits and a decimal prefix: 2.451e18 -> `2.451 E`."""
    for power, prefix in ((24, "Y"), (21, "Z"), (18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if value >= 10**power:
            return f"{value / 10**power:.4g} {prefix}"
    return f"{value:.4g} "


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"
