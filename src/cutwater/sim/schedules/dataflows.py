"""The dataflows that are run in simulation, by name."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from functools import lru_cache

from cutwater.errors import DataError
from cutwater.sim.schedules.graphs import Graph, How, Step

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


TASKS_MAX, CHANNELS_MAX = 14, 36
WIDTHS = (1, 1, 2, 2, 3)


def random_dataflow(name: str) -> Graph:
    """A dataflow that follows from its name.

    One or two sources, one to four steps, one or two sinks.  Half of them have loops, of any shape: back-edges go from
    any step to itself or to one before it.  A third is moody, a third has a step that copies rows or makes pieces of
    them; not both, because what comes out has to be known beforehand.

    >>> one, other = random_dataflow("random-1"), random_dataflow("random-2")
    >>> len(one.tasks) <= 14, one.edges == random_dataflow("random-1").edges, one.edges == other.edges
    (True, True, False)
    """
    rng = random.Random(name)
    while True:
        graph = _draw(name, rng)
        regular = all(graph.regular_edges[s] for s, edges in enumerate(graph.out_edges) if edges)
        if regular and len(graph.tasks) <= TASKS_MAX and len(graph.channels) <= CHANNELS_MAX:
            return graph


def _draw(name: str, rng: random.Random) -> Graph:
    sources, inner, sinks = (
        [f"{kind} {i}" for i in range(rng.randint(least, most))]
        for kind, least, most in (("read", 1, 2), ("step", 1, 4), ("sink", 1, 2))
    )
    pairs = _pairs(sources, inner, sinks, rng)
    width = {step: rng.choice(WIDTHS) for step in (*sources, *inner, *sinks)}
    kind = rng.choice(("plain", "moody", "more"))
    chosen = rng.choice([step for step in (*sources, *inner) if sum(a == step for a, _ in pairs) > 1] or inner)
    copies, pieces = kind == "more" and rng.random() < 0.5, kind == "more"
    steps = [
        Step(
            step,
            width[step],
            copy=copies and step == chosen,
            moody=kind == "moody" and step not in sources and step not in sinks,
            slices=3 if pieces and not copies and step == chosen else 0,
        )
        for step in (*sources, *inner, *sinks)
    ]
    edges: list[tuple[str, str, How]] = [
        (a, b, "forward" if width[a] == width[b] and rng.random() < 0.5 else "hash") for a, b in pairs
    ]
    return Graph(name, steps, edges)


def _pairs(sources: list[str], inner: list[str], sinks: list[str], rng: random.Random) -> list[tuple[str, str]]:
    """Ends of the edges, in the order of writing, on which the search for back-edges depends (C1)."""
    found: dict[tuple[str, str], None] = {}
    senders = sources.copy()
    for step in (*inner, *sinks):
        for sender in rng.sample(senders, min(len(senders), rng.randint(1, 2))):
            found[sender, step] = None
        if step in inner:
            senders.append(step)
    for n, sender in enumerate(senders):
        if all(a != sender for a, _ in found):
            found[sender, rng.choice([*inner[max(n - len(sources) + 1, 0) :], *sinks])] = None
    if rng.random() < 0.5:
        for _ in range(rng.randint(1, 3)):
            end = rng.randrange(len(inner))
            found[inner[end], inner[rng.randint(0, end)]] = None
    pairs = list(found)
    rng.shuffle(pairs)
    return pairs
