"""Charts as SVG text: lines over linear or logarithmic axes, for a page without any network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from process.number_text import exact

_COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
_DASHES = ("", "8 3", "2 3")
_ROUNDING = 1e-9
_WIDTH, _HEIGHT = 560, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 16, 46


@dataclass(frozen=True)
class Line:
    """A named line through points."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Chart:
    """Lines over common axes; `mark` draws a vertical line at a value of x."""

    title: str
    x_label: str
    lines: Sequence[Line]
    log_x: bool = False
    mark: float | None = None


def stroke(number: int) -> str:
    """The attributes of a chart's line with this number; 24 lines differ."""
    turn, colour = divmod(number, len(_COLOURS))
    dash = _DASHES[turn % len(_DASHES)]
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'stroke="{_COLOURS[colour]}" stroke-width="2" stroke-linecap="round"{dashed}'


def svg(chart: Chart) -> str:
    """The chart as an SVG element."""
    points = [point for line in chart.lines for point in line.points]
    if not points:
        return ""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    low = max(min(xs), 1e-3) if chart.log_x else min(0.0, *xs)
    high = max(*xs, low * 1.01 + 1e-9)
    top = max(*ys, 1e-9)
    place = _Scale(low, high, top, chart.log_x)
    label = f"{chart.title}, by {chart.x_label}"
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}">',
        *_grid(place, chart),
    ]
    for number, line in enumerate(chart.lines):
        shown = line.points if len(line.points) > 1 else [*line.points] * 2  # a lone point: a dot
        path = " ".join(f"{place.x(x):.1f},{place.y(y):.1f}" for x, y in shown)
        parts.append(f'<polyline fill="none" {stroke(number)} points="{path}"/>')
    return "".join([*parts, "</svg>"])


@dataclass(frozen=True)
class _Scale:
    low: float
    high: float
    top: float
    log_x: bool

    def x(self, value: float) -> float:
        value = min(max(value, self.low), self.high)
        if self.log_x:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - value / self.top * (_HEIGHT - _TOP - _BOTTOM)

    def x_ticks(self) -> list[float]:
        """Round values on the axis of x."""
        if not self.log_x:
            return round_values(self.low, self.high)
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        decades = [10.0**number for number in range(first, last + 1)]
        if last - first < 3:
            decades = [each * factor for each in decades for factor in (1, 2, 5)]
        found = [each for each in decades if self.low <= each <= self.high]
        return found or round_values(self.low, self.high)


def round_values(low: float, high: float) -> list[float]:
    """At most some six multiples of 1, 2 or 5 times a power of ten, from `low` to `high`."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first, last = math.ceil(low / step - _ROUNDING), math.floor(high / step + _ROUNDING)
    return [number * step for number in range(first, last + 1)]


def _grid(place: _Scale, chart: Chart) -> list[str]:
    parts = []
    bottom = _HEIGHT - _BOTTOM
    for tick in place.x_ticks():
        x = place.x(tick)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}"/>')
        text = exact(round(tick, 10))
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{text}</text>')
    for value in round_values(0.0, place.top):
        y = place.y(value)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        text = exact(round(value, 10))
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    if chart.mark is not None and place.low <= chart.mark <= place.high:
        x = place.x(chart.mark)
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}"/>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    label = escape(chart.x_label)
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">{label}</text>')
    return parts
