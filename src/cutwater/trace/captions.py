"""What stands below a space-time diagram: the legend, and each snapshot in words."""

from __future__ import annotations

from collections.abc import Callable

from cutwater.trace.events import Committed, Crashed, MarkerTaken, Recorded, Restored, Trace
from cutwater.trace.messages import CutLine
from cutwater.trace.svg import Canvas

__all__ = ["captions", "legend"]

ITEMS_SHOWN = 8
LETTER = 6.6
"""Width of a letter of the legend, in pixels."""


def captions(cut: CutLine) -> list[str]:
    """A snapshot in words: the states of its processes, then what its channels hold.

    >>> captions(CutLine(1, {"p": 1, "q": 2}, {"p": "S0", "q": ""}, {"c": ("token",)}))
    ['Snapshot 1: p = S0; channel c holds token']
    """
    states = [f"{process} = {state}" for process, state in cut.states.items() if state and len(state) <= 24]
    contents = [f"channel {name} holds {_short(rows)}" for name, rows in sorted(cut.recorded.items()) if rows]
    contents = contents or ["all channels are empty"]
    parts = [", ".join(states)] if states and len(states) <= ITEMS_SHOWN else []
    more = [f"and {len(contents) - ITEMS_SHOWN} other channels"] if len(contents) > ITEMS_SHOWN else []
    text = "; ".join([*parts, *contents[:ITEMS_SHOWN], *more])
    lines, line = [""], 0
    for word in f"Snapshot {cut.snapshot}: {text}".split(" "):
        if len(lines[line]) + len(word) > 100:
            lines.append("   ")
            line += 1
        lines[line] += f"{' ' if lines[line].strip() else ''}{word}"
    return lines


def _short(rows: tuple[str, ...]) -> str:
    shown = ", ".join(rows[:ITEMS_SHOWN])
    return f"{shown} and {len(rows) - ITEMS_SHOWN} more" if len(rows) > ITEMS_SHOWN else shown


def legend(canvas: Canvas, trace: Trace, x: float, y: float, width: float, has_cut: bool) -> float:
    """Draw the signs that the picture uses, with their meaning; the y of what comes below."""
    kinds = {type(event) for event in trace.events}
    items: list[tuple[str, Callable[[float, float], None]]] = [
        ("event", lambda x, y: canvas.circle(x + 9, y - 4, 4, "event")),
        ("message", lambda x, y: canvas.arrow(x, y - 4, x + 26, y - 4, "message")),
    ]
    if MarkerTaken in kinds:
        items.append(("marker", lambda x, y: canvas.arrow(x, y - 4, x + 26, y - 4, "marker")))
    if has_cut:
        items.append(("cut", lambda x, y: canvas.line(x + 9, y - 11, x + 9, y + 3, "cut s0")))
        items.append(("crosses the cut", lambda x, y: canvas.arrow(x, y - 4, x + 26, y - 4, "message s0")))
    if MarkerTaken in kinds and has_cut:
        items.append(("waits for markers", lambda x, y: canvas.rect(x, y - 10, 26, 12, "waits s0")))
    if MarkerTaken in kinds and Recorded in kinds:
        items.append(("records its inputs", lambda x, y: canvas.rect(x, y - 10, 26, 12, "records s0")))
    if Crashed in kinds:
        items.append(("crash", lambda x, y: _cross(canvas, x + 9, y - 4)))
    if Restored in kinds:
        items.append(("restored", lambda x, y: canvas.rect(x + 5, y - 12, 8, 16, "restored")))
        items.append(("delivered again", lambda x, y: canvas.arrow(x, y - 4, x + 26, y - 4, "message again")))
    if Committed in kinds:
        items.append(("output committed", lambda x, y: canvas.path(f"M{x + 2:.1f} {y - 4:.1f}l4 5l8 -11", "committed")))
    at = x
    for text, draw in items:
        needed = 32 + LETTER * len(text) + 18
        if at + needed > x + width and at > x:
            at, y = x, y + 18
        draw(at, y)
        canvas.text(at + 32, y, text, "legend")
        at += needed
    return y + 24


def _cross(canvas: Canvas, x: float, y: float) -> None:
    for sign in (1, -1):
        canvas.line(x - 5, y - 5 * sign, x + 5, y + 5 * sign, "crash")
