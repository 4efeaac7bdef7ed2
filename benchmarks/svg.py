"""A bar chart as SVG text: a plot needs no plotting library."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from statistics import median

__all__ = ["bar_chart"]

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
