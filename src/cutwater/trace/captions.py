"""What stands below a space-time diagram: the legend, and each snapshot in words."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Collection

from cutwater.trace.messages import CutLine
from cutwater.trace.svg import Canvas

ITEMS_SHOWN = 8
TICK = "l4 5l8 -11"
LETTER = 6.6
"""Width of a letter of the legend, in pixels."""


def captions(cut: CutLine) -> list[str]:
    """A snapshot in words: the states of its processes, then what its channels hold.

    >>> captions(CutLine(1, {"p": 1, "q": 2}, {"p": "idle", "q": ""}, {"c": ("token",)}))
    ['Snapshot 1: p = idle; channel c holds token']
    """
    states = [f"{process} = {state}" for process, state in cut.states.items() if _readable(state)]
    contents = [f"channel {name} holds {_short(rows)}" for name, rows in sorted(cut.recorded.items()) if rows]
    contents = contents or ["all channels are empty"]
    parts = [", ".join(states)] if states and len(states) <= ITEMS_SHOWN else []
    more = [f"and {len(contents) - ITEMS_SHOWN} other channels"] if len(contents) > ITEMS_SHOWN else []
    text = "; ".join([*parts, *contents[:ITEMS_SHOWN], *more])
    return wrapped(f"Snapshot {cut.snapshot}: {text}", 96)


def _readable(state: str) -> bool:
    """Not empty, not long, no digest."""
    return 0 < len(state) <= 24 and not (len(state) > 9 and state.isdigit())


def wrapped(text: str, letters: int) -> list[str]:
    """Lines of at most so many letters.

    >>> wrapped("one two three", 8)
    ['one two', '   three']
    """
    return textwrap.wrap(text, letters, subsequent_indent="   ", break_long_words=False)


def _short(rows: tuple[str, ...]) -> str:
    shown = ", ".join(rows[:ITEMS_SHOWN])
    return f"{shown} and {len(rows) - ITEMS_SHOWN} more" if len(rows) > ITEMS_SHOWN else shown


def legend(canvas: Canvas, used: Collection[str], x: float, y: float, width: float) -> float:
    """Draw the signs that the picture uses, with their meaning; the y of what comes below.

    Args:
        used: kinds of events, and classes of arrows and bands.
    """
    crossing = any(kind.startswith("message s") for kind in used)
    items: list[tuple[bool, str, Callable[[float, float], None]]] = [
        ("Step" in used, "event", lambda x, y: canvas.circle(x + 9, y - 4, 4, "event")),
        ("message" in used, "message", lambda x, y: _arrow(canvas, x, y, "message")),
        ("marker" in used, "marker", lambda x, y: _arrow(canvas, x, y, "marker")),
        ("Cut" in used, "cut", lambda x, y: canvas.line(x + 9, y - 11, x + 9, y + 3, "cut s0")),
        (crossing, "crosses the cut", lambda x, y: _arrow(canvas, x, y, "message s0")),
        ("message missed" in used, "crosses, not recorded", lambda x, y: _arrow(canvas, x, y, "message missed")),
        ("message extra" in used, "recorded, does not cross", lambda x, y: _arrow(canvas, x, y, "message extra")),
        ("message backwards" in used, "against the cut", lambda x, y: _arrow(canvas, x, y, "message backwards")),
        ("waits" in used, "waits for markers", lambda x, y: canvas.rect(x, y - 10, 26, 12, "waits s0")),
        ("records" in used, "records its inputs", lambda x, y: canvas.rect(x, y - 10, 26, 12, "records s0")),
        ("Crashed" in used, "crash", lambda x, y: _cross(canvas, x + 9, y - 4)),
        ("Restored" in used, "restored", lambda x, y: canvas.rect(x + 5, y - 12, 8, 16, "restored")),
        ("Survived" in used, "goes on as it is", lambda x, y: canvas.circle(x + 9, y - 4, 6, "survived")),
        ("message again" in used, "delivered again", lambda x, y: _arrow(canvas, x, y, "message again")),
        (
            "Committed" in used,
            "output committed",
            lambda x, y: canvas.path(f"M{x + 2:.1f} {y - 4:.1f}{TICK}", "committed"),
        ),
    ]
    at = x
    for text, draw in [(text, draw) for shown, text, draw in items if shown]:
        needed = 32 + LETTER * len(text) + 18
        if at + needed > x + width and at > x:
            at, y = x, y + 18
        draw(at, y)
        canvas.text(at + 32, y, text, "legend")
        at += needed
    return y + 24


def _arrow(canvas: Canvas, x: float, y: float, cls: str) -> None:
    canvas.arrow(x, y - 4, x + 26, y - 4, cls)


def _cross(canvas: Canvas, x: float, y: float) -> None:
    for sign in (1, -1):
        canvas.line(x - 5, y - 5 * sign, x + 5, y + 5 * sign, "crash")
