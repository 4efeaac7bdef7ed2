"""The dataflows that are run in simulation, by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

from cutwater.errors import DataError
from cutwater.sim.schedules.graphs import Graph, Step
from cutwater.sim.schedules.random_dataflows import random_dataflow

RANDOM = "random"
"""``random-7`` is a dataflow drawn by chance."""


def _worlds() -> Iterator[Graph]:
    yield Graph(
        "four", [Step("read"), Step("count", 2), Step("sink")],
        [("read", "count", "hash"), ("count", "sink", "hash")],
    )  # fmt: skip
    yield Graph(
        "diamond", [Step("read"), Step("left"), Step("right"), Step("sink")],
        [("read", "left", "forward"), ("read", "right", "forward"), ("left", "sink", "forward"),
         ("right", "sink", "forward")],
    )  # fmt: skip
    yield Graph(
        "fan", [Step("read", copy=True), Step("left"), Step("right", 2), Step("sink", 2)],
        [("read", "left", "forward"), ("read", "right", "hash"), ("left", "sink", "hash"), ("right", "sink", "hash")],
    )  # fmt: skip
    yield Graph(
        "shuffle", [Step("read", 2), Step("count", 2), Step("sink", 2)],
        [("read", "count", "hash"), ("count", "sink", "forward")],
    )  # fmt: skip
    yield Graph(
        "sources", [Step("first"), Step("second", 2), Step("join", 2), Step("sink")],
        [("first", "join", "hash"), ("second", "join", "hash"), ("join", "sink", "hash")],
    )  # fmt: skip
    yield Graph(
        "self_loop", [Step("read"), Step("loop", 2), Step("sink")],
        [("read", "loop", "hash"), ("loop", "loop", "hash"), ("loop", "sink", "hash")],
    )  # fmt: skip
    yield Graph(
        "nested", [Step("read"), Step("outer", 2), Step("inner", 2), Step("sink")],
        [("read", "outer", "hash"), ("outer", "inner", "hash"), ("inner", "inner", "forward"),
         ("inner", "outer", "hash"), ("inner", "sink", "hash")],
    )  # fmt: skip
    yield Graph(
        "crossing", [Step("read"), Step("a"), Step("b"), Step("c"), Step("d"), Step("sink")],
        [("read", "a", "forward"), ("a", "b", "forward"), ("b", "c", "forward"), ("c", "a", "forward"),
         ("c", "d", "forward"), ("d", "b", "forward"), ("d", "sink", "forward")],
    )  # fmt: skip
    yield Graph(
        "irreducible", [Step("read"), Step("a"), Step("b", 2), Step("sink")],
        [
            ("read", "a", "forward"), ("read", "b", "hash"), ("a", "b", "hash"), ("b", "a", "hash"),
            ("b", "sink", "hash"),
        ],
    )  # fmt: skip
    yield Graph(
        "two_heads", [Step("first"), Step("second"), Step("a", 2), Step("b"), Step("sink")],
        [("first", "a", "hash"), ("second", "b", "forward"), ("a", "b", "hash"), ("b", "a", "hash"),
         ("b", "sink", "forward")],
    )  # fmt: skip
    yield Graph(
        "spread", [Step("read", 2), Step("pass", 2), Step("count", 2), Step("sink")],
        [("read", "pass", "rebalance"), ("pass", "count", "hash"), ("count", "sink", "hash")],
    )  # fmt: skip
    yield from _worlds_of_parts()


def _worlds_of_parts() -> Iterator[Graph]:
    """Worlds of which a part can go back while others run."""
    yield Graph(
        "two_jobs", [Step("read", 2), Step("count", 2), Step("sink"), Step("other"), Step("loop", 2), Step("out")],
        [("read", "count", "hash"), ("count", "sink", "hash"), ("other", "loop", "hash"), ("loop", "loop", "hash"),
         ("loop", "out", "hash")],
    )  # fmt: skip
    yield Graph(
        "wide", [Step("read", 2), Step("count", 2), Step("again", 3), Step("sink", 3)],
        [("read", "count", "hash"), ("count", "again", "hash"), ("again", "sink", "hash")],
    )  # fmt: skip
    yield Graph(
        "side_by_side", [Step("read", 3), Step("count", 3), Step("sink", 3)],
        [("read", "count", "forward"), ("count", "sink", "forward")],
    )  # fmt: skip
    yield from _moody_worlds()


def _moody_worlds() -> Iterator[Graph]:
    """Worlds in which another order makes other rows, so that it matters who is known to have chosen what."""
    yield Graph(
        "moody_join",
        [Step("read", 2), Step("join", 3, moody=True), Step("left", 2), Step("right", 3), Step("sink", 2)],
        [("read", "join", "hash"), ("join", "left", "hash"), ("join", "right", "forward"), ("left", "sink", "forward"),
         ("right", "sink", "hash")],
    )  # fmt: skip
    yield Graph(
        "moody_loop", [Step("read"), Step("loop", 3, moody=True), Step("sink", 2)],
        [("read", "loop", "hash"), ("loop", "loop", "hash"), ("loop", "sink", "hash")],
    )  # fmt: skip
    yield Graph(
        "moody_crossing",
        [Step("read"), Step("a", 2), Step("b"), Step("c", 2, moody=True), Step("d", moody=True), Step("sink")],
        [("read", "a", "hash"), ("a", "b", "hash"), ("b", "c", "hash"), ("c", "a", "hash"), ("c", "d", "hash"),
         ("d", "b", "forward"), ("d", "sink", "hash")],
    )  # fmt: skip
    yield from _worlds_of_joined_regions()


def _worlds_of_joined_regions() -> Iterator[Graph]:
    """Worlds of which several subtasks go back at the loss of some workers, and others behind them do not (R3)."""
    yield Graph(
        "moody_stairs",
        [Step("read", 2), Step("first", 3, moody=True), Step("left", 3), Step("right", 2, moody=True), Step("low", 2),
         Step("high", 2), Step("sink", 3)],
        [("read", "first", "hash"), ("first", "left", "forward"), ("first", "right", "hash"),
         ("right", "low", "forward"), ("right", "high", "hash"), ("left", "sink", "forward"),
         ("low", "sink", "forward"), ("high", "sink", "forward")],
    )  # fmt: skip
    yield Graph(
        "moody_aside", [Step("read", 3), Step("sort", 3, moody=True), Step("aside", 3), Step("loop", 2, moody=True),
                        Step("sink", 2)],
        [("read", "sort", "hash"), ("sort", "aside", "forward"), ("sort", "loop", "hash"), ("loop", "loop", "hash"),
         ("loop", "sink", "hash")],
    )  # fmt: skip
    yield Graph(
        "moody_spin", [Step("read", 2), Step("spin", 3, moody=True), Step("sink", 2), Step("rest", 3)],
        [("read", "spin", "hash"), ("spin", "spin", "forward"), ("spin", "sink", "hash"), ("spin", "rest", "forward")],
    )  # fmt: skip
    yield from _worlds_with_slices()


def _worlds_with_slices() -> Iterator[Graph]:
    """Worlds in which a step can be in the middle of work: what it makes of a row leaves in slices."""
    yield Graph(
        "sliced_join", [Step("read", 2), Step("join", 2, slices=3), Step("count", 2, moody=True), Step("sink")],
        [("read", "join", "hash"), ("join", "count", "hash"), ("count", "sink", "hash")],
    )  # fmt: skip
    yield Graph(
        "sliced_loop", [Step("read", slices=3), Step("other"), Step("loop", 2, slices=3), Step("sink")],
        [("read", "loop", "hash"), ("other", "loop", "hash"), ("loop", "loop", "hash"), ("loop", "sink", "hash")],
    )  # fmt: skip


WORLDS = {graph.name: graph for graph in _worlds()}
"""Every world by its name, but for those drawn by chance."""


@lru_cache(maxsize=8)
def _drawn(name: str) -> Graph:
    return random_dataflow(name)


def dataflow(name: str) -> Graph:
    """The dataflow of a name: one of ``WORLDS``, or one drawn by chance.

    Raises:
        DataError: there is none of this name.

    >>> dataflow("four") is WORLDS["four"], dataflow("random-7").name
    (True, 'random-7')
    """
    if name in WORLDS:
        return WORLDS[name]
    if not re.fullmatch(f"{RANDOM}-[0-9]+", name):
        raise DataError(f"no world {name!r}", hint=f"Worlds: {', '.join(WORLDS)}, {RANDOM}-0, {RANDOM}-1 and so on.")
    return _drawn(name)
