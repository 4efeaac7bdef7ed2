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


FONT = 13.0
"""Size of the letters, in pixels."""

COLOURS = (("#1f5fd0", "#7fb0ff"), ("#8a2fb8", "#d79bff"), ("#0a7f5f", "#4fd1a8"), ("#a85b00", "#ffb65c"))
"""Of the first, second ... snapshot, on light and on dark paper; readable for all kinds of colour vision."""

_SHAPES = f"""
text{{font:{FONT:.0f}px system-ui,"DejaVu Sans",Arial,sans-serif;fill:#222}}
.title{{font-size:15px;font-weight:600}}
.process{{font-weight:600}}
.legend,.state,.label{{font-size:11px}}
.state{{fill:#666}}
.label{{paint-order:stroke;stroke:#fff;stroke-width:3px;stroke-linejoin:round}}
text.label{{fill:#555}}
.event-name{{font-style:italic;paint-order:stroke;stroke:#fff;stroke-width:3px}}
.name,text.note[class*=" s"]{{font-weight:600}}
path{{fill:none}}
.paper{{fill:#fff}}
.life{{stroke:#999;stroke-width:1.5}}
.down{{stroke-dasharray:2 5;stroke:#bbb}}
.event{{fill:#222}}
.message{{stroke:#777;stroke-width:1.4}}
.head{{fill:#777;stroke:none!important}}
.marker{{stroke:#d11a1a;stroke-width:1.4;stroke-dasharray:5 4}}
.marker.head{{fill:#d11a1a}}
.lost{{opacity:.55}}
.again{{stroke:#a85b00;stroke-dasharray:2 3}}
.again.head{{fill:#a85b00}}
.backwards,.missed,.extra{{stroke:#d1008f;stroke-width:3}}
.missed{{stroke-dasharray:7 5}}
.extra{{stroke-dasharray:2 3}}
.backwards.head,.missed.head,.extra.head,text.backwards,text.missed,text.extra,.wrong{{fill:#d1008f}}
.wrong{{font-size:20px;font-weight:700;paint-order:stroke;stroke:#fff;stroke-width:3px}}
.cut{{stroke-width:4;stroke-linecap:round;opacity:.85}}
.past{{opacity:.07}}
.waits{{opacity:.18}}
.records{{opacity:.38}}
.crash{{stroke:#d11a1a;stroke-width:3}}
.restored{{fill:#a85b00}}
.survived{{fill:none;stroke:#a85b00;stroke-width:2}}
.committed{{stroke:#0a7f5f;stroke-width:2.5}}
.other{{fill:#999}}
text.label[class*="message"]{{stroke:#fff;stroke-width:3px}}
"""

_DARK = """
text,.event{fill:#eee}
.paper{fill:#14171c}
.state,text.label{fill:#aaa}
.label,.event-name,.wrong,text.label[class*="message"]{stroke:#14171c}
.life{stroke:#777}
.down{stroke:#555}
.message{stroke:#9a9a9a}
.head{fill:#9a9a9a}
.marker,.crash{stroke:#ff6b6b}
.marker.head{fill:#ff6b6b}
.again{stroke:#ffb65c}
.again.head,.restored{fill:#ffb65c}
.backwards,.missed,.extra{stroke:#ff5cc4}
.backwards.head,.missed.head,.extra.head,text.backwards,text.missed,text.extra,.wrong{fill:#ff5cc4}
.survived{stroke:#ffb65c}
.committed{stroke:#4fd1a8}
"""


def _of_snapshots(shade: int) -> str:
    lines: list[str] = []
    for i, colours in enumerate(COLOURS):
        c = colours[shade]
        lines.append(f"path.s{i}{{stroke:{c}}}path.message.s{i}{{stroke-width:3}}path.head.s{i}{{fill:{c}}}")
        lines.append(f"rect.s{i},path.past.s{i}{{fill:{c};stroke:none}}text.s{i}{{fill:{c}}}")
    return "\n".join(lines)


STYLE = f"{_SHAPES}{_of_snapshots(0)}\n@media (prefers-color-scheme:dark){{{_DARK}{_of_snapshots(1)}}}\n"
"""A style sheet for a picture that stands alone or in an image element."""
