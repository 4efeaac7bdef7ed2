"""Random dataflow graphs for the cut world: steps with two subtasks each, acyclic or with loops."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

Task = tuple[str, int]
Channel = tuple[Task, Task]
PARALLELISM = 2


@dataclass(frozen=True)
class Graph:
    tasks: tuple[Task, ...]
    channels: tuple[Channel, ...]
    back_edges: frozenset[Channel]

    @cached_property
    def _ends(self) -> tuple[dict[Task, list[Channel]], dict[Task, list[Channel]]]:
        outputs, inputs = ({t: [c for c in self.channels if c[end] == t] for t in self.tasks} for end in (0, 1))
        return inputs, outputs

    def inputs(self, task: Task) -> list[Channel]:
        return self._ends[0][task]

    def outputs(self, task: Task) -> list[Channel]:
        return self._ends[1][task]

    @cached_property
    def loops(self) -> dict[int, frozenset[Task]]:
        """Strongly connected components of the steps that have a back-edge, by number."""
        after = {s: {b[0] for a, b in self.channels if a[0] == s} for s, _ in self.tasks}
        for _ in after:
            after = {s: found.union(*(after[t] for t in found)) for s, found in after.items()}
        rings = {frozenset(t for t in found if s in after[t]) for s, found in after.items() if s in found}
        return {n: frozenset(t for t in self.tasks if t[0] in ring) for n, ring in enumerate(sorted(rings, key=min))}

    def loop_inputs(self, task: Task) -> frozenset[Channel]:
        inside = next((loop for loop in self.loops.values() if task in loop), frozenset())
        return frozenset(c for c in self.inputs(task) if c[0] in inside)

    @cached_property
    def sources(self) -> frozenset[Task]:
        return frozenset(t for t in self.tasks if not self.inputs(t))


def physical(steps: list[str], edges: dict[tuple[str, str], str], loops: set[tuple[str, str]]) -> Graph:
    """Subtasks and channels of steps; an edge is "forward" or "hash"."""
    channels = [
        ((a, i), (b, j))
        for (a, b), how in edges.items()
        for i in range(PARALLELISM)
        for j in range(PARALLELISM)
        if how == "hash" or i == j
    ]
    back = frozenset(c for c in channels if (c[0][0], c[1][0]) in loops)
    return Graph(tuple((s, i) for s in steps for i in range(PARALLELISM)), tuple(channels), back)


def random_dag(rng: random.Random) -> Graph:
    """One or two sources, up to four further steps, each fed by some of the steps before it."""
    sources = [f"s{i}" for i in range(rng.randint(1, 2))]
    steps, edges = list(sources), dict[tuple[str, str], str]()
    for i in range(rng.randint(1, 4)):
        for upstream in rng.sample(steps, rng.randint(1, min(2, len(steps)))):
            edges[upstream, f"t{i}"] = rng.choice(["forward", "hash", "hash"])
        steps.append(f"t{i}")
    for source in sources:
        if not any(a == source for a, _ in edges):
            edges[source, steps[-1]] = "hash"
    return physical(steps, edges, set())


def random_loops(rng: random.Random) -> Graph:
    """One source and up to four steps with any edges between them; back-edges by depth-first search (C1)."""
    count = rng.randint(1, 4)
    steps = ["s", *(f"t{i}" for i in range(count))]
    pairs = {("s", "t0")} | {(rng.choice(steps[: i + 1]), steps[i + 1]) for i in range(1, count)}
    pairs |= {(rng.choice(steps[1:]), rng.choice(steps[1:])) for _ in range(rng.randint(1, 4))}
    edges = {pair: rng.choice(["forward", "hash"]) for pair in sorted(pairs)}
    return physical(steps, edges, _on_stack(steps, edges))


def _on_stack(steps: list[str], edges: dict[tuple[str, str], str]) -> set[tuple[str, str]]:
    follow, found, colour = defaultdict[str, list[str]](list), set[tuple[str, str]](), dict[str, str]()
    for a, b in edges:
        follow[a].append(b)

    def visit(step: str) -> None:
        colour[step] = "grey"
        for after in follow[step]:
            if colour.get(after) == "grey":
                found.add((step, after))
            elif after not in colour:
                visit(after)
        colour[step] = "black"

    visit(steps[0])
    return found
