"""A bench as a table for a terminal, and as a page with spread and the verdict on every pair."""

import html
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from steelyard.compare.verdict import Comparison
from steelyard.report import comparison
from steelyard.report.html import STYLE

Sheet = dict[str, Any]
HEAD = (
    "arm", "step ms", "p10", "p90", "x first", "low", "high", "samples/s", "tokens/s", "tok/s/dev", "TFLOP/s", "MFU",
    "MiB", "predicted",
)  # fmt: skip


def line(result: Sheet) -> str:
    """One round, as it ends."""
    place = f"{result['arm']}, round {result['round']}"
    kept = " (from an earlier call)" if result.get("kept") else ""
    if result["status"] != "ok":
        return f"{place}: {result['status']}: {comparison.clean(result['reason'])}{kept}"
    seconds = result["seconds"]
    return f"{place}: {median(seconds) * 1e3:,.1f} ms a step, {len(seconds)} steps{kept}"


def table(sheet: Sheet) -> str:
    """The arms under each other, and what is wrong with those that have no figures."""
    rows = [HEAD, *(_row(arm) for arm in sheet["arms"] if "seconds" in arm)]
    widths = [max(len(row[n]) for row in rows) for n in range(len(HEAD))]
    lines = []
    for row in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([f"{row[0]:<{widths[0]}}", *cells[1:]]))
    lines += [f"{arm['name']}: {arm['status']}: {comparison.clean(arm['reason'])}" for arm in sheet["arms"]
              if arm["status"] != "ok"]  # fmt: skip
    lines += ["", *_conventions(sheet)]
    return "\n".join(lines)


def _row(arm: Sheet) -> tuple[str, ...]:
    seconds, ratio = arm["seconds"], arm["ratio"] or {}
    kind, size = _memory(arm)
    predicted = arm["predicted"].get(kind)
    return (
        arm["name"],
        *(f"{seconds[key] * 1e3:,.1f}" for key in ("median", "p10", "p90")),
        *(_figure(ratio.get(key), ".2f") for key in ("median", "low", "high")),
        _figure(arm["samples_per_second"], ",.1f"),
        _figure(arm["tokens_per_second"], ",.0f"),
        _figure(arm["tokens_per_second_per_device"], ",.0f"),
        _figure(arm["model_flops_per_second"] and arm["model_flops_per_second"] / 1e12, ".4f"),
        _figure(arm["mfu"] and arm["mfu"]["value"], ".1%"),
        f"{size / 2**20:,.1f} {kind}" if size is not None else "?",
        f"{predicted / 2**20:,.1f}" if predicted is not None else "?",
    )


def _memory(arm: Sheet) -> tuple[str, int | None]:
    """The kind that was predicted, else what the log says, else what was seen from outside."""
    measured = {**arm["sampled"], **arm["memory"]}
    measured.pop("gpu_rate", None)
    kind = next((k for k in (*arm["predicted"], "allocated_peak", "device", "rss_peak", "rss") if k in measured), "")
    return kind, measured.get(kind)


def _figure(value: float | None, form: str) -> str:
    return "?" if value is None else f"{value:{form}}"


def _conventions(sheet: Sheet) -> Iterator[str]:
    yield (
        f"{sheet['warmup']} steps of warm-up excluded, {sheet['steps']} timed, {sheet['rounds']} rounds in turn; "
        "medians; rates are of the whole run"
    )  # fmt: skip
    peaks = {(m["peak_source"], m["peak_flops"]) for arm in sheet["arms"] if (m := arm.get("mfu"))}
    for arm in sheet["arms"]:
        if arm.get("mfu") and arm["mfu"]["note"]:
            yield f"MFU of {arm['name']}: {arm['mfu']['note']}"
    for source, flops in sorted(peaks):
        yield f"MFU: model FLOPs (causal, nothing recomputed) over {flops / 1e12:.4g} TFLOP/s: {source}"


def verdicts(names: Sequence[tuple[str, str]], pairs: Sequence[Comparison]) -> str:
    """One line for every pair: what of it may be compared."""
    lines = ["may they be compared?"]
    for (a, b), pair in zip(names, pairs, strict=True):
        words = ", ".join(f"{what} {verdict.word.replace('_', ' ')}" for what, verdict in pair.verdict.items())
        lines.append(f"  {a} | {b}: {words}")
    return "\n".join(lines)


def page(sheet: Sheet, names: Sequence[tuple[str, str]], pairs: Sequence[Comparison]) -> str:
    """One self-contained page. Every text of an arm is escaped."""
    title = html.escape(f"{sheet['name']} - steelyard bench")
    sections = [f"<h1>{html.escape(sheet['name'])}</h1>", f"<pre>{html.escape(table(sheet))}</pre>", _plot(sheet)]
    for (a, b), pair in zip(names, pairs, strict=True):
        sections.append(
            f"<h2>{html.escape(f'{a} against {b}')}</h2><pre>{html.escape(comparison.terminal(pair))}</pre>"
        )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>\n'
        + "\n".join(sections)
        + "\n</html>\n"
    )


WIDTH, ROW, LEFT = 640, 28, 150


def _plot(sheet: Sheet) -> str:
    """Every timed step of every arm as a mark, the median and the 10th to 90th percentile over them."""
    arms = [arm for arm in sheet["arms"] if "seconds" in arm]
    values = {arm["name"]: [v for r in arm["rounds"] for v in r["seconds"] or []] for arm in arms}
    if not arms:
        return "<p>no arm has figures</p>"
    largest = max(max(found) for found in values.values())
    height = ROW * len(arms) + 40

    def across(seconds: float) -> float:
        return LEFT + seconds / largest * (WIDTH - LEFT - 20)

    body = []
    for number, arm in enumerate(arms):
        y = 24 + ROW * number
        spread = arm["seconds"]
        body.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{html.escape(arm["name"])}</text>')
        body += [f'<circle cx="{across(v):.1f}" cy="{y}" r="2.5" fill="#1f6feb" fill-opacity=".35"/>'
                 for v in values[arm["name"]]]  # fmt: skip
        body.append(f'<line x1="{across(spread["p10"]):.1f}" x2="{across(spread["p90"]):.1f}" y1="{y}" y2="{y}" '
                    'stroke="#1f2328" stroke-width="2"/>')  # fmt: skip
        body.append(f'<circle cx="{across(spread["median"]):.1f}" cy="{y}" r="4" fill="#d1242f"/>')
    scale = f"0 to {largest * 1e3:,.0f} ms a step; dots: steps, line: 10th to 90th percentile, red: median"
    body.append(f'<text x="{LEFT}" y="{height - 8}">{scale}</text>')
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="milliseconds a step">{"".join(body)}</svg>'
