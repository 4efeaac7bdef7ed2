"""A simulated subtask's part of a snapshot."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cutwater.data.time import MIN_WATERMARK
from cutwater.protocol.channel.items import Rows, Timed
from cutwater.sim.world.output import Handle, Piece


@dataclass(slots=True)
class Part:
    """What one subtask writes for one checkpoint."""

    task: int
    attempt: int
    positions: dict[int, int] = field(default_factory=dict[int, int])
    """Of a source: split -> rows read."""
    counts: dict[int, int] = field(default_factory=dict[int, int])
    sign: int = 0
    """Digest of all rows processed, in their order."""
    ins: dict[int, int] = field(default_factory=dict[int, int])
    """Input -> rows taken."""
    outs: dict[int, int] = field(default_factory=dict[int, int])
    """Output -> rows sent."""
    choice: tuple[int, int] = (0, 0)
    """R0: lineage of the determinant log, and position in it."""
    watermark: int = MIN_WATERMARK
    """The event time that it had reached."""
    heard: dict[int, int] = field(default_factory=dict[int, int])
    """Input -> last watermark taken."""
    said: dict[int, int] = field(default_factory=dict[int, int])
    """Output -> last watermark sent."""
    ended: frozenset[Any] = frozenset()
    """Inputs whose end it had taken."""
    has_ended: bool = False
    """It has sent its end on all outputs."""
    handles: list[Handle] = field(default_factory=list[Handle])
    """Pre-commits that are not committed yet."""
    pieces: tuple[Piece, ...] = ()
    """Staged rows that are in no part yet."""
    logs: dict[int, list[Timed]] = field(default_factory=dict[int, "list[Timed]"])
    """Recorded, or overtaken by the barrier, at the inputs."""
    overtaken: dict[int, list[Timed]] = field(default_factory=dict[int, "list[Timed]"])
    """Overtaken by the barrier in the outputs' queues."""
    files: list[str] = field(default_factory=list[str])


def numbers_in(items: list[Timed]) -> list[int]:
    """The rows among some items of a channel."""
    return [row for item in items if type(item) is Rows for row in item.batch]
