"""Just enough SVG: shapes with classes, text with a halo, arrows."""

from __future__ import annotations

import math
from html import escape
from itertools import pairwise


class Canvas:
    """Collects elements; colours and strokes come from the classes of a style sheet.

    >>> canvas = Canvas()
    >>> canvas.line(0, 0, 10, 5.25, "wire")
    >>> print(canvas.svg(20, 10, style="", title="a < b"))  # doctest: +ELLIPSIS
    <svg ...>
    <title>a &lt; b</title>
    ...
    <path class="wire" d="M0 0L10 5.2"/>
    </svg>
    <BLANKLINE>
    """

    def __init__(self) -> None:
        self._parts: list[str] = []

    def svg(self, width: float, height: float, *, style: str, title: str) -> str:
        """The whole picture."""
        w, h = _n(width), _n(height)
        head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{w}" height="{h}" viewBox="0 0 {w} {h}" role="img">'
        paper = f'<rect class="paper" width="{w}" height="{h}"/>'
        return "\n".join([head, f"<title>{escape(title)}</title>", f"<style>{style}</style>", paper, *self._parts]) + (
            "\n</svg>\n"
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, cls: str) -> None:
        """A straight line."""
        self.path(f"M{_n(x1)} {_n(y1)}L{_n(x2)} {_n(y2)}", cls)

    def path(self, d: str, cls: str, tip: str = "") -> None:
        """A path; ``tip`` is shown when one points at it."""
        self._parts.append(f'<path class="{cls}" d="{d}"' + _close("path", tip))

    def polyline(self, points: list[tuple[float, float]], cls: str, tip: str = "") -> None:
        """A smooth curve from top to bottom through the points."""
        d = f"M{_n(points[0][0])} {_n(points[0][1])}"
        for (x1, y1), (x2, y2) in pairwise(points):
            middle = (y1 + y2) / 2
            d += f"C{_n(x1)} {_n(middle)} {_n(x2)} {_n(middle)} {_n(x2)} {_n(y2)}"
        self.path(d, cls, tip)

    def circle(self, x: float, y: float, r: float, cls: str, tip: str = "") -> None:
        """A dot."""
        self._parts.append(f'<circle class="{cls}" cx="{_n(x)}" cy="{_n(y)}" r="{_n(r)}"' + _close("circle", tip))

    def rect(self, x: float, y: float, width: float, height: float, cls: str, tip: str = "") -> None:
        """A box with round corners."""
        size = f'x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" rx="3"'
        self._parts.append(f'<rect class="{cls}" {size}' + _close("rect", tip))

    def text(self, x: float, y: float, text: str, cls: str, anchor: str = "start") -> None:
        """One line of text."""
        where = f'x="{_n(x)}" y="{_n(y)}"' + (f' text-anchor="{anchor}"' if anchor != "start" else "")
        self._parts.append(f'<text class="{cls}" {where}>{escape(text)}</text>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float, cls: str, tip: str = "", bow: float = 0.0) -> None:
        """An arrow that stops a little before its goal; ``bow`` bends it upwards by so much."""
        cx, cy = (x1 + x2) / 2, (y1 + y2) / 2 - 2 * bow
        angle = math.atan2(y2 - cy, x2 - cx)
        tx, ty = x2 - 5 * math.cos(angle), y2 - 5 * math.sin(angle)
        curve = f"Q{_n(cx)} {_n(cy)} {_n(tx)} {_n(ty)}" if bow else f"L{_n(tx)} {_n(ty)}"
        self.path(f"M{_n(x1)} {_n(y1)}{curve}", cls, tip)
        self.head(tx, ty, angle, cls)

    def head(self, x: float, y: float, angle: float, cls: str) -> None:
        """The head of an arrow with its point at (x, y)."""
        wings = [(x - 8 * math.cos(angle + a), y - 8 * math.sin(angle + a)) for a in (0.38, -0.38)]
        points = f"M{_n(x)} {_n(y)}" + "".join(f"L{_n(wx)} {_n(wy)}" for wx, wy in wings) + "Z"
        self.path(points, f"{cls} head")


def _n(value: float) -> str:
    """A number without needless digits: the same picture is the same text."""
    text = f"{value:.1f}"
    return text[:-2] if text.endswith(".0") else text


def _close(tag: str, tip: str) -> str:
    return f"><title>{escape(tip)}</title></{tag}>" if tip else "/>"
