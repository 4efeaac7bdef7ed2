"""Dataflows drawn by chance: any steps, edges, loops and parallelism, within sizes."""

from __future__ import annotations

import random

from cutwater.sim.schedules.graphs import Graph, How, Step

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
