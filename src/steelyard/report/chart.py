"""Line charts as SVG text, without a library and without a script."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 640, 240
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 24, 32
COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700")


@dataclass(frozen=True)
class Line:
    """One curve; points whose y is None leave a gap."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    dots: bool = False


def chart(title: str, x_name: str, lines: Sequence[Line], logarithmic: bool = False) -> str:
    """An <svg> element. Numbers that are not finite are gaps; a chart without a point says so."""
    points = [(x, _height(y, logarithmic)) for line in lines for x, y in zip(line.x, line.y, strict=True)]
    known = [(x, y) for x, y in points if y is not None]
    if not known:
        return f"<p>{html.escape(title)}: no data</p>"
    xs, ys = [x for x, _ in known], [y for _, y in known]
    x_range, y_range = _widened(min(xs), max(xs)), _widened(min(ys), max(ys))
    body = [*_grid(x_range, y_range, x_name, logarithmic)]
    for number, line in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        body += _curve(line, colour, x_range, y_range, logarithmic)
        body.append(
            f'<text x="{WIDTH - RIGHT - 8}" y="{TOP + 14 + 16 * number}" fill="{colour}" text-anchor="end">'
            f"{html.escape(line.name)}</text>"
        )
    heading = f'<text x="{LEFT}" y="14" font-weight="bold">{html.escape(title)}</text>'
    frame = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">'
    return f"{frame}{heading}{''.join(body)}</svg>"


def _height(value: float | None, logarithmic: bool) -> float | None:
    if value is None or not math.isfinite(value) or (logarithmic and value <= 0):
        return None
    return math.log10(value) if logarithmic else value


def _widened(low: float, high: float) -> tuple[float, float]:
    """A range with some air, never empty."""
    air = (high - low) * 0.05 or abs(low) * 0.05 or 1.0
    return low - air, high + air


def _place(value: float, span: tuple[float, float], start: float, end: float) -> float:
    return start + (value - span[0]) / (span[1] - span[0]) * (end - start)


def _at(x: float, y: float, x_range: tuple[float, float], y_range: tuple[float, float]) -> tuple[float, float]:
    return _place(x, x_range, LEFT, WIDTH - RIGHT), _place(y, y_range, HEIGHT - BOTTOM, TOP)


def _grid(x_range: tuple[float, float], y_range: tuple[float, float], x_name: str, logarithmic: bool) -> list[str]:
    found = []
    for tick in _ticks(*y_range):
        _, y = _at(x_range[0], tick, x_range, y_range)
        label = f"{10**tick:.3g}" if logarithmic else f"{tick:.4g}"
        found.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        found.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for tick in _ticks(*x_range):
        x, _ = _at(tick, y_range[0], x_range, y_range)
        found.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{tick:,.6g}</text>')
    found.append(
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end" class="axis">{html.escape(x_name)}</text>'
    )
    return found


def _ticks(low: float, high: float) -> list[float]:
    """Four to eight round numbers inside the range."""
    raw = (high - low) / 5
    unit = 10 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= raw)
    first = math.ceil(low / step)
    return [step * n for n in range(first, math.floor(high / step) + 1)]


def _curve(
    line: Line, colour: str, x_range: tuple[float, float], y_range: tuple[float, float], logarithmic: bool
) -> list[str]:
    stretches: list[list[str]] = [[]]
    dots = []
    for x, raw in zip(line.x, line.y, strict=True):
        y = _height(raw, logarithmic)
        if y is None:
            stretches.append([])
            continue
        across, down = _at(x, y, x_range, y_range)
        stretches[-1].append(f"{across:.1f},{down:.1f}")
        if line.dots:
            dots.append(f'<circle cx="{across:.1f}" cy="{down:.1f}" r="3" fill="{colour}"/>')
    return [
        f'<polyline points="{" ".join(stretch)}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        for stretch in stretches
        if stretch
    ] + dots
