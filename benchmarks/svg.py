"""Bar and line charts as SVG text: a plot needs no plotting library."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from statistics import median

__all__ = ["bar_chart", "line_chart"]

_WIDTH, _LEFT, _RIGHT, _TOP, _ROW = 860, 260, 90, 56, 30
_OURS, _OTHERS, _INK, _GRID = "#0b6e99", "#9aa5b1", "#1f2933", "#d9dee4"


def bar_chart(title: str, bars: Sequence[tuple[str, Sequence[float], bool]]) -> str:
    """Horizontal bars of medians with a line from minimum to maximum, on a logarithmic axis.

    Args:
        bars: label, values (events per second, above 0), whether it is ours.

    >>> chart = bar_chart("t", [("a & b", [1e6, 2e6, 4e6], True)])
    >>> chart.startswith("<svg") and "a &amp; b" in chart and "2.0 M" in chart
    True
    """
    values = [value for _, each, _ in bars for value in each]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    bottom = _TOP + _ROW * len(bars)

    def x(value: float) -> float:
        return round(_LEFT + (_WIDTH - _LEFT - _RIGHT) * (math.log10(value) - low) / (high - low), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {bottom + 34}" font-family="sans-serif">',
        f'<rect width="100%" height="100%" fill="#ffffff"/><text x="16" y="28" font-size="16" fill="{_INK}">'
        f"{escape(title)}</text>",
    ]
    for power in range(low, high + 1):
        at = x(10.0**power)
        parts.append(
            f'<line x1="{at}" x2="{at}" y1="{_TOP - 8}" y2="{bottom}" stroke="{_GRID}"/>'
            f'<text x="{at}" y="{bottom + 18}" font-size="12" fill="{_INK}" text-anchor="middle">'
            f"{_amount(10.0**power)}</text>"
        )
    for number, (label, each, ours) in enumerate(bars):
        parts.append(_bar(_TOP + _ROW * number, label, each, _OURS if ours else _OTHERS, x))
    return "\n".join([*parts, "</svg>", ""])


def _bar(y: int, label: str, values: Sequence[float], color: str, x: Callable[[float], float]) -> str:
    middle, start = y + 11, _LEFT
    least, most, mid = x(min(values)), x(max(values)), x(median(values))
    return (
        f'<text x="{_LEFT - 8}" y="{middle + 4}" font-size="13" fill="{_INK}" text-anchor="end">{escape(label)}</text>'
        f'<rect x="{start}" y="{y}" width="{max(1.0, mid - start):.1f}" height="22" fill="{color}"/>'
        f'<line x1="{least}" x2="{most}" y1="{middle}" y2="{middle}" stroke="{_INK}" stroke-width="2"/>'
        f'<text x="{max(most, mid) + 8}" y="{middle + 4}" font-size="13" fill="{_INK}">{_amount(median(values))}</text>'
    )


def _amount(value: float) -> str:
    """
    >>> _amount(1e8), _amount(2.25e6), _amount(74_000.0)
    ('100 M', '2.2 M', '0.074 M')
    """
    millions = value / 1e6
    return f"{millions:.0f} M" if millions >= 100 else f"{millions:.1f} M" if millions >= 1 else f"{millions:.2g} M"


def line_chart(
    title: str,
    x_label: str,
    y_label: str,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    *,
    log_x: bool = False,
    log_y: bool = False,
) -> str:
    """Lines with a point for each (x, y); every x that occurs is marked on its axis.

    >>> chart = line_chart("t", "x", "y", {"a & b": [(1, 2.0), (10, 1.0)]}, log_x=True)
    >>> chart.startswith("<svg") and "a &amp; b" in chart and "polyline" in chart
    True
    """
    points = [point for line in lines.values() for point in line]
    xs, ys = sorted({x for x, _ in points}), [y for _, y in points]
    top = max(ys) * 1.1
    bottom = 10 ** math.floor(math.log10(min(ys))) if log_y else 0.0
    right, high = _WIDTH - 200, 380

    def at(value: float, low: float, high_value: float, start: float, end: float, log: bool) -> float:
        if log:
            value, low, high_value = math.log10(value), math.log10(low), math.log10(high_value)
        return round(start + (end - start) * (value - low) / ((high_value - low) or 1), 1)

    def x(value: float) -> float:
        return at(value, xs[0], xs[-1], 90, right, log_x)

    def y(value: float) -> float:
        return at(value, bottom, top, high - 50, _TOP, log_y)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {high}" font-family="sans-serif">',
        f'<rect width="100%" height="100%" fill="#ffffff"/><text x="16" y="28" font-size="16" fill="{_INK}">'
        f"{escape(title)}</text>",
        _text((90 + right) / 2, high - 10, x_label),
        f'<text x="22" y="{(_TOP + high - 50) / 2}" font-size="12" fill="{_INK}" text-anchor="middle" '
        f'transform="rotate(-90 22 {(_TOP + high - 50) / 2})">{escape(y_label)}</text>',
    ]
    for value in xs:
        parts.append(f'<line x1="{x(value)}" x2="{x(value)}" y1="{_TOP}" y2="{high - 50}" stroke="{_GRID}"/>')
        parts.append(_text(x(value), high - 32, f"{value:g}"))
    for value in _ticks(bottom, top, log_y):
        parts.append(f'<line x1="90" x2="{right}" y1="{y(value)}" y2="{y(value)}" stroke="{_GRID}"/>')
        parts.append(_text(82, y(value) + 4, f"{value:g}", "end"))
    for number, (name, line) in enumerate(lines.items()):
        color = _COLORS[number % len(_COLORS)]
        path = " ".join(f"{x(a)},{y(b)}" for a, b in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x(a)}" cy="{y(b)}" r="3.5" fill="{color}"/>' for a, b in line]
        parts.append(f'<rect x="{right + 24}" y="{_TOP + 22 * number}" width="14" height="4" fill="{color}"/>')
        parts.append(_text(right + 46, _TOP + 22 * number + 7, name, "start"))
    return "\n".join([*parts, "</svg>", ""])


_COLORS = ("#0b6e99", "#c2410c", "#15803d", "#7e22ce", "#9aa5b1", "#a16207")


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" font-size="12" fill="{_INK}" text-anchor="{anchor}">{escape(text)}</text>'


def _ticks(bottom: float, top: float, log: bool) -> list[float]:
    if log:
        return [10.0**n for n in range(math.ceil(math.log10(bottom)), math.floor(math.log10(top)) + 1)]
    step = 10 ** math.floor(math.log10(top))
    step = step / 5 if top / step < 2 else step / 2 if top / step < 5 else step
    return [round(n * step, 10) for n in range(int(top / step) + 1)]
