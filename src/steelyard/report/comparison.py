"""Two runs side by side: a terminal page of at most 40 lines, Markdown for an issue, and one self-contained HTML page.

Everything that comes from a log is foreign text: control characters never reach a terminal, and each format escapes
what it would read as its own.
"""

import html
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePath
from textwrap import wrap
from typing import Any

from steelyard.compare.align import Side
from steelyard.compare.differences import Difference
from steelyard.compare.verdict import Comparison
from steelyard.report.chart import Line, chart
from steelyard.report.html import STYLE

WIDTH, MOST_LINES = 120, 40
INDENT = " " * 12
WORDS = {
    "comparable": "comparable", "after_adjustment": "after adjustment", "not_comparable": "not comparable",
    "no_data": "no data",
}  # fmt: skip


def clean(value: Any, most: int = 200) -> str:
    """Foreign text for one line: printable characters only, cut."""
    text = value if isinstance(value, str) else _plain(value)
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= most else text[: most - 3] + "..."


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        if len(value) > 4 and len(set(map(repr, value))) == 1:
            return f"{len(value)} x {_plain(value[0])}"
        return "[" + ", ".join(_plain(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {_plain(v)}" for k, v in value.items()) + "}"
    return str(value)


def _mib(size: float | None, signed: bool = False) -> str:
    return "" if size is None else f"{size / 2**20:{'+' if signed else ''},.0f} MiB"


# --- terminal ------------------------------------------------------------------------------------------------------
def terminal(one: Comparison) -> str:
    """At most 40 lines of at most 120 characters: verdicts, differences, what explains them, the rest."""
    head = [*_heading(one), *_verdicts(one)]
    body = [*_differences(one), *_details(one)]
    lines = head + body
    if len(lines) > MOST_LINES:
        lines = lines[: MOST_LINES - 1] + [f"{INDENT}... more with --json"]
    return "\n".join(line.rstrip() for line in lines)


def _heading(one: Comparison) -> Iterator[str]:
    for side in (one.a, one.b):
        steps = len(side.record.steps)
        what = f"{steps:,} steps" if steps else "no steps"
        yield clean(f"{side.name:<3} {clean(side.record.framework, 24):<20} {_file(side)}  ({what})", WIDTH)


def _file(side: Side) -> str:
    source = side.record.source
    return source if len(source) <= 80 else "..." + source[-77:]


def _verdicts(one: Comparison) -> Iterator[str]:
    for name, verdict in one.verdict.items():
        yield from _block(name, f"{WORDS[verdict.word]}: {verdict.why}")


def _block(title: str, text: str, most: int = 3) -> Iterator[str]:
    """A titled paragraph of at most `most` lines."""
    lines = wrap(clean(text, 2000), WIDTH - len(INDENT), break_on_hyphens=False) or [""]
    if len(lines) > most:
        lines = [*lines[: most - 1], lines[most - 1][: WIDTH - len(INDENT) - 4] + " ..."]
    for number, line in enumerate(lines):
        yield f"{title if not number else '':<{len(INDENT)}}{line}"


def _differences(one: Comparison, most: int = 12) -> Iterator[str]:
    if not one.differences:
        yield ""
        yield "no known setting differs"
        return
    yield ""
    a, b = one.a.name, one.b.name
    yield f"{'differs':<28}{a:>14}{b:>14}{'memory':>14}{'step':>10}   where {a} says it"
    for d in one.differences[:most]:
        step = f"{d.effect.seconds:+.3g} s" if d.effect.seconds else ""
        yield (
            f"{clean(d.knob.key, 27):<28}{clean(d.a, 13):>14}{clean(d.b, 13):>14}"
            f"{_mib(d.effect.memory_bytes, True):>14}{step:>10}   {_where(d.source_a)}"
        )
    if len(one.differences) > most:
        rest = ", ".join(d.knob.key for d in one.differences[most:])
        yield from _block("", f"and {rest}", 2)


def _where(source: str) -> str:
    path, colon, line = source.rpartition(":")
    text = f"{PurePath(path).name}:{line}" if colon and line.isdigit() else source
    return clean(text, 36) if len(text) <= 36 else "..." + clean(text[-33:])


def _details(one: Comparison) -> Iterator[str]:
    yield ""
    for title, text, most in (
        ("memory", _memory(one), 4),
        ("speed", _speed(one), 3),
        ("loss", _loss(one), 2),
    ):
        if text:
            yield from _block(title, text, most)
    for number, found in enumerate(one.inferred[:6]):
        yield from _block("" if number else "inferred", f"{found.side}: {found.text}", 2)
    yield from _block("change", _change(one), 3) if one.smallest_change else ()
    if one.unknown:
        yield from _block("unknown", ", ".join(_unknown(u, _names(one)) for u in one.unknown), 2)
    yield from _block("same", _same(one), 2)
    for number, note in enumerate(_notes(one)[:3]):
        yield from _block("" if number else "note", note, 2)


def _memory(one: Comparison) -> str:
    memory, kind = one.memory, one.memory["kind"]
    if kind is None:
        return ""
    a, b = memory["a"][kind], memory["b"][kind]
    text = f"{kind}: {one.a.name} {_mib(a)}, {one.b.name} {_mib(b)}, gap {_mib(memory['gap_bytes'], True)}"
    if not memory["explained"]:
        return text
    parts = ", ".join(f"{name} {_mib(size, True)}" for name, size in memory["explained"].items() if size)
    share = abs(memory["unexplained_bytes"]) / abs(memory["gap_bytes"]) if memory["gap_bytes"] else None
    left = f"unexplained {_mib(memory['unexplained_bytes'], True)}"
    left += f" ({share:.1%} of the gap)" if share is not None else ""
    return f"{text}; {parts}; {left}. Model: {memory['model']}"


def _speed(one: Comparison) -> str:
    parts = []
    for side, rates in ((one.a, one.speed["a"]), (one.b, one.speed["b"])):
        known = [
            f"{rates[name]:,.{digits}f} {unit}"
            for name, digits, unit in (
                ("samples_per_second", 2, "samples/s"), ("tokens_per_second_per_device", 0, "tokens/s a device"),
            )
            if rates[name]
        ]  # fmt: skip
        if flops := rates["model_flops_per_second_per_device"]:
            known.append(f"{flops / 1e12:#.3g} model TFLOP/s a device")
        if known:
            parts.append(f"{side.name} {', '.join(known)}")
    return "; ".join(parts) + (" (whole run)" if parts else "")


def _loss(one: Comparison) -> str:
    loss = one.loss
    if not loss["points"]:
        return ""
    axis = loss["aligned_on"]
    parted = loss["first_divergence"]
    equal, tolerance = loss["equal_points"], loss["tolerance"]
    text = f"{loss['points']:,} points at the same {axis}; the first {equal:,} agree to {tolerance:g}"
    if parted is None:
        return text
    steps = (
        f"step {parted['step_a']:,}"
        if parted["step_a"] == parted["step_b"]
        else f"steps {parted['step_a']:,}, {parted['step_b']:,}"
    )
    return f"{text}; first divergence at {steps}: {one.a.name} {parted['a']:g}, {one.b.name} {parted['b']:g}"


def _change(one: Comparison, most: int = 6) -> str:
    """The smallest change that makes the two comparable; of many settings only the names."""
    a, b = one.a.name, one.b.name
    changes = [c for c in one.smallest_change if "do" not in c]
    if len(changes) > most:
        text = f"{a} with {b}'s, or {b} with {a}'s: {', '.join(c['knob'] for c in changes)}"
    else:
        words, back = ([f"{c['knob']} = {_plain(c[side])}" for c in changes] for side in ("b", "a"))
        text = f"{a} with {', '.join(words)}; or {b} with {', '.join(back)}" if changes else ""
    more = "; ".join(c["do"] for c in one.smallest_change if "do" in c)
    return "; ".join(part for part in (more, text) if part)


def _unknown(entry: dict[str, Any], names: dict[str, str]) -> str:
    known = [f"{name} {_plain(entry[key])}" for key, name in names.items() if entry[key] is not None]
    return f"{entry['knob']} ({', '.join(known)})" if known else entry["knob"]


def _names(one: Comparison) -> dict[str, str]:
    return {"a": one.a.name, "b": one.b.name}


def _same(one: Comparison) -> str:
    names = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
    shape = [f"{name} {_plain(one.same[f'model.{name}'])}" for name in names if f"model.{name}" in one.same]
    rest = len(one.same) - len(shape)
    return f"{', '.join(shape)}{' and ' if shape else ''}{rest} other settings" if one.same else "nothing that is known"


def _notes(one: Comparison) -> list[str]:
    found = []
    for side in (one.a, one.b):
        seams = [e for e in side.record.events if e.what == "restart"]
        if seams:
            found.append(f"{side.name}: {len(seams)} restarts; steps that come twice are taken from the later attempt")
        found += [f"{side.name}: {note}" for note in side.record.notes]
    return found


# --- Markdown ------------------------------------------------------------------------------------------------------
def markdown(one: Comparison) -> str:
    """For an issue: a heading, two tables, the rest as a list."""
    rows = [
        f"**{side.name}**: {_escaped(side.record.framework)}, `{_code(side.record.source)}`  "
        for side in (one.a, one.b)
    ]
    rows += ["", "| | verdict | why |", "|---|---|---|"]
    rows += [f"| {name} | **{WORDS[v.word]}** | {_escaped(v.why)} |" for name, v in one.verdict.items()]
    if one.differences:
        rows += ["", f"| differs | {one.a.name} | {one.b.name} | memory | where they say it |", "|---|---|---|--:|---|"]
        rows += [_markdown_row(d) for d in one.differences]
    rows.append("")
    texts = [("memory", _memory(one)), ("speed", _speed(one)), ("loss", _loss(one))]
    texts += [("inferred", f"{i.side}: {i.text}") for i in one.inferred]
    texts += [
        ("change", _change(one)),
        ("unknown", ", ".join(_unknown(u, _names(one)) for u in one.unknown)),
        ("same", _same(one)),
    ]
    texts += [("note", note) for note in _notes(one)]
    rows += [f"- **{title}**: {_escaped(text)}" for title, text in texts if text]
    return "\n".join(rows)


def _markdown_row(d: Difference) -> str:
    cells = (_escaped(d.knob.key), _escaped(d.a), _escaped(d.b), _mib(d.effect.memory_bytes, True))
    return f"| {' | '.join(cells)} | {_escaped(_where(d.source_a))}, {_escaped(_where(d.source_b))} |"


def _escaped(value: Any) -> str:
    return re.sub(r"([\\`*_{}\[\]|#~!@])", r"\\\1", html.escape(clean(value, 2000), quote=False))


def _code(text: str) -> str:
    return clean(text).replace("`", "'")


# --- HTML ----------------------------------------------------------------------------------------------------------
def page(pairs: Sequence[Comparison]) -> str:
    """One file, no script, nothing loaded from elsewhere."""
    body = "\n".join(part for pair in pairs for part in _sections(pair))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>steelyard compare</title>'
        f"<style>{STYLE}</style>\n{body}\n</html>\n"
    )


def _sections(one: Comparison) -> Iterator[str]:
    names = " against ".join(f"{side.name}: {clean(side.record.framework)}" for side in (one.a, one.b))
    yield f"<h1>{_html(names)}</h1>"
    yield _table(("run", "framework", "read from", "steps"), (
        (side.name, side.record.framework, side.record.source, f"{len(side.record.steps):,}") for side in (one.a, one.b)
    ))  # fmt: skip
    yield "<h2>May they be compared?</h2>"
    yield _table(("", "", "why"), ((name, WORDS[v.word], v.why) for name, v in one.verdict.items()))
    yield "<h2>What differs</h2>"
    yield _table(
        ("", one.a.name, one.b.name, "memory", "seconds a step", "loss", "said in", "and in"),
        map(_html_row, one.differences),
    )
    texts = [("memory", _memory(one)), ("speed", _speed(one)), ("loss", _loss(one)), ("change", _change(one))]
    yield _table(("", ""), ((title, text) for title, text in texts if text))
    if one.inferred:
        yield "<h2>What the numbers say</h2>"
        yield _table(("run", ""), ((i.side, i.text) for i in one.inferred))
    yield "<h2>Curves</h2>"
    yield from _curves(one)
    yield "<h2>The same in both</h2>"
    yield _table(("", ""), ((key, _plain(value)) for key, value in one.same.items()))
    yield "<h2>Not known</h2>"
    yield _table(
        ("", one.a.name, one.b.name), ((u["knob"], _or_unknown(u["a"]), _or_unknown(u["b"])) for u in one.unknown)
    )
    yield "<h2>Notes</h2>"
    yield _table(("",), ((note,) for note in _notes(one)))


def _html_row(d: Difference) -> tuple[str, ...]:
    seconds = "" if d.effect.seconds is None else f"{d.effect.seconds:+.3g}"
    memory = _mib(d.effect.memory_bytes, True)
    return (
        d.knob.key,
        _plain(d.a),
        _plain(d.b),
        memory,
        seconds,
        d.effect.loss or "",
        _where(d.source_a),
        _where(d.source_b),
    )


def _curves(one: Comparison) -> Iterator[str]:
    axis = one.loss["aligned_on"] or "step"
    name = "step" if axis == "steps" else axis
    for title, field in (("loss, as each log prints it", "loss"), ("tokens a second, whole run", "tokens_per_second")):
        lines = []
        for side in (one.a, one.b):
            steps = [s for s in side.record.steps if getattr(s, name) is not None]
            steps = steps[:: max(1, len(steps) // 1000)]
            xs, ys = [float(getattr(s, name)) for s in steps], [getattr(s, field) for s in steps]
            lines.append(Line(f"{side.name}: {clean(side.record.framework, 40)}", xs, ys))
        yield chart(title, name, lines)


def _or_unknown(value: Any) -> str:
    return "unknown" if value is None else _plain(value)


def _html(value: Any) -> str:
    return html.escape(clean(value, 2000))


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    def cells(tag: str, values: tuple[str, ...]) -> str:
        return "".join(f"<{tag}>{_html(value)}</{tag}>" for value in values)

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table><tr>{cells('th', head)}</tr>{body}</table>" if body else '<p class="note">none</p>'
