"""The page of a run: predicted against measured first, then curves, then the configuration with its origins.

One file, no script, nothing loaded from elsewhere. Every text of the run is escaped.
"""

import html
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from steelyard.record.read import read_folder
from steelyard.record.schema import Record, Validation
from steelyard.report.chart import Line, chart

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1f2328; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; } td, th { padding: .2rem .9rem .2rem 0; text-align: left; vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
tr + tr td { border-top: 1px solid #d8dee4; }
svg { width: 100%; max-width: 44rem; display: block; margin: .5rem 0; } svg text { font-size: 11px; fill: #59636e; }
svg .grid { stroke: #eaeef2; } pre { background: #f6f8fa; padding: .8rem; overflow-x: auto; white-space: pre-wrap; }
.note { color: #59636e; }
"""

Row = tuple[str, str, str]


def write(folder: str | Path, extra: Sequence[tuple[str, str]] = ()) -> Path:
    """Write report.html into a run folder and return its path. `extra` are further sections: (heading, plain text).

    Raises UserError R001 to R003.
    """
    record = read_folder(folder)
    path = Path(folder) / "report.html"
    path.write_text(page(record, extra), encoding="utf-8")
    return path


def page(record: Record, extra: Sequence[tuple[str, str]] = ()) -> str:
    name = str(record.config.get("name", record.source))
    sections = [
        f"<h1>{html.escape(name)}</h1>",
        _table(("", "predicted", "measured"), predicted_and_measured(record)),
        *(f"<h2>{html.escape(heading)}</h2><pre>{html.escape(text)}</pre>" for heading, text in extra),
        "<h2>Curves</h2>",
        *_curves(record),
        "<h2>Events</h2>",
        _table(("step", "what", ""), ((f"{e.step:,}", e.what, _brief(e.detail)) for e in record.events)),
        "<h2>Ran on</h2>",
        _table(("", ""), ((key, _brief(value)) for key, value in record.environment.items())),
        "<h2>Configuration, each value with its origin</h2>",
        f"<pre>{html.escape((Path(record.source) / 'run.toml').read_text('utf-8'))}</pre>",
    ]
    title = html.escape(f"{name} - steelyard")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>\n'
        + "\n".join(sections)
        + "\n</html>\n"
    )


def predicted_and_measured(record: Record) -> list[Row]:
    """What the plan said before launch beside what happened; "" where one of the two does not exist."""
    return [*_counts(record), *_speed(record), *_memory(record)]


def _counts(record: Record) -> Iterable[Row]:
    plan = record.plan
    live = next((e.detail.get("unique") for e in record.events if e.what == "parameters"), None)
    yield "parameters", _whole(plan.get("parameters", {}).get("unique")), _whole(live)
    yield "steps", _whole(plan.get("length", {}).get("steps")), _whole(len(record.steps) or None)
    tokens = record.steps[-1].tokens if record.steps else None
    yield "tokens", _whole(plan.get("length", {}).get("tokens")), _whole(tokens)
    yield "model FLOPs a step (causal)", _whole(plan.get("flops", {}).get("model_per_step")), ""
    skipped, nan = (sum(getattr(s, kind) for s in record.steps) for kind in ("skipped", "nan"))
    yield "steps without an update", "0", f"{skipped:,} ({nan:,} not finite)" if skipped else "0"


def _speed(record: Record) -> Iterable[Row]:
    if not record.steps:
        return
    yield "seconds a step (median)", "", f"{record.speed['seconds_per_step']:.3f}"
    yield "tokens a second, whole run (median)", "", f"{record.speed['tokens_per_second']:,.0f}"
    rates = sorted(s.model_flops_per_second or 0.0 for s in record.steps)
    yield "model TFLOP/s, whole run (median)", "", f"{rates[len(rates) // 2] / 1e12:.4f}"
    mfu = [s.mfu for s in record.steps if s.mfu is not None]
    yield "MFU", "", f"{sorted(mfu)[len(mfu) // 2]:.1%}" if mfu else "unknown: no peak is known for this device"
    yield "loss of the last step, nats", "", _loss(record.steps[-1].loss)
    for name in dict.fromkeys(v.name for v in record.validations):
        last = [v for v in record.validations if v.name == name][-1]
        yield f"{name} loss, nats", "", _loss(last.loss)


def _memory(record: Record) -> Iterable[Row]:
    """Each kind under its own name; a kind is never set beside another."""
    checked: dict[str, Any] = next((e.detail.get("checked", {}) for e in record.events if e.what == "memory"), {})
    for kind, entry in checked.items():
        yield (
            f"memory: {kind.replace('_', ' ')}, largest rank",
            _mib(entry.get("predicted")),
            _mib(entry.get("measured")),
        )
    peaks: list[dict[str, Any]] = next(
        (e.detail.get("pipeline_ranks", []) for e in record.events if e.what == "memory_peaks"), []
    )
    for rank, entries in enumerate(peaks):
        place = f"pipeline rank {rank}" if len(peaks) > 1 else "largest rank"
        for kind, entry in entries.items():
            yield (
                f"memory: {kind.replace('_', ' ')}, {place}",
                _mib(entry.get("predicted")),
                _mib(entry.get("measured")),
            )
    for kind, size in record.memory.items():
        if kind not in checked:
            yield f"memory: {kind.replace('_', ' ')}, largest rank", "", _mib(size)


def _curves(record: Record) -> list[str]:
    steps = [float(s.step) for s in record.steps]
    names = dict.fromkeys(v.name for v in record.validations)
    validations = [_validation(name, [v for v in record.validations if v.name == name]) for name in names]
    loss = Line("training", steps, [s.loss for s in record.steps])
    return [
        chart("loss, nats a token", "step", [loss, *validations]),
        chart("gradient norm before clipping", "step", [Line("", steps, [s.grad_norm for s in record.steps])], True),
        chart("learning rate", "step", [Line("", steps, [s.learning_rate for s in record.steps])]),
        chart("tokens a second, whole run", "step", [Line("", steps, [s.tokens_per_second for s in record.steps])]),
    ]


def _validation(name: str, lines: Sequence[Validation]) -> Line:
    return Line(name, [float(v.step) for v in lines], [v.loss for v in lines], dots=True)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    def cells(tag: str, values: tuple[str, ...]) -> str:
        return "".join(f"<{tag}>{html.escape(value)}</{tag}>" for value in values)

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table><tr>{cells('th', head)}</tr>{body}</table>"


def _whole(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else ""


def _mib(value: Any) -> str:
    return f"{value / 2**20:,.1f} MiB" if isinstance(value, int) else ""


def _loss(value: float | None) -> str:
    return "not finite" if value is None or not math.isfinite(value) else f"{value:.4f}"


def _brief(value: Any) -> str:
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) < 300 else text[:297] + "..."
