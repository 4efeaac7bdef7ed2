"""Cycles of a step graph, found by looking at it: which edges close a loop, and what the loops are (C1).

Pure functions on an abstract graph: a mapping from every node to the nodes that read it, both in the order in which
they were written, and the nodes that are sources.  The same graph, written in the same order, gives the same answer.

An edge is a *back-edge* if a depth-first search from the sources meets it while its end is still on the search's path.
Nothing else would do: every cycle has such an edge, so without them the graph has none; and each of them closes a cycle
with edges that stay, so none is marked in vain.  (Marking edges to nodes that a breadth-first search has merely seen
marks edges that close nothing.)  In a graph whose loops are all entered at one node the back-edges do not depend on the
order of the search; where a loop has several entries the order of writing decides.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

Node = TypeVar("Node", bound=Hashable)
Successors: TypeAlias = Mapping[Node, Sequence[Node]]
"""Every node with the nodes that read it."""


@dataclass(frozen=True)
class Loop(Generic[Node]):
    """A strongly connected component that holds a cycle: nested and crossing loops are one."""

    nodes: tuple[Node, ...]
    """In the order of writing."""
    entries: tuple[Node, ...]
    """Nodes that rows from outside reach first."""
    back_edges: tuple[tuple[Node, Node], ...]
    """(from, to), in the order in which the search met them."""
    reducible: bool
    """Each back-edge ends at a natural loop's head: a node that every way from a source to its beginning passes."""


@dataclass(frozen=True)
class Cycles(Generic[Node]):
    """Cycles of a graph."""

    back_edges: frozenset[tuple[Node, Node]]
    loops: tuple[Loop[Node], ...]
    unreached: tuple[Node, ...]
    """Nodes that no source reaches; edges between them are not classified."""


def find_cycles(successors: Successors[Node], sources: Sequence[Node]) -> Cycles[Node]:
    """Everything about the cycles of a graph.

    >>> found = find_cycles({"s": ["a"], "a": ["b"], "b": ["a", "out"], "out": []}, ["s"])
    >>> found.back_edges, found.loops[0].nodes, found.loops[0].entries
    (frozenset({('b', 'a')}), ('a', 'b'), ('a',))
    """
    reached = reachable(successors, sources)
    closing = back_edges(successors, sources)
    loops: list[Loop[Node]] = []
    for nodes in components(successors):
        inside = set(nodes)
        if not inside <= reached:
            continue
        entered = {t for n, targets in successors.items() if n in reached and n not in inside for t in targets}
        own = tuple(edge for edge in closing if edge[0] in inside)
        reducible = all(n not in reachable(successors, sources, without=head) for n, head in own)
        loops.append(Loop(nodes, tuple(n for n in nodes if n in entered), own, reducible))
    return Cycles(frozenset(closing), tuple(loops), tuple(n for n in successors if n not in reached))


def back_edges(successors: Successors[Node], sources: Iterable[Node]) -> list[tuple[Node, Node]]:
    """Edges to a node that is still on the path of a depth-first search, in the order in which they are met.

    The path is kept on a list, not on Python's stack: a chain of thousands of steps is an ordinary dataflow.

    >>> back_edges({"s": ["a", "b"], "a": ["b"], "b": ["a"]}, ["s"])
    [('b', 'a')]
    """
    found: dict[tuple[Node, Node], None] = {}
    on_path: dict[Node, bool] = {}
    for source in sources:
        if source in on_path:
            continue
        on_path[source] = True
        path: list[tuple[Node, Iterator[Node]]] = [(source, iter(successors[source]))]
        while path:
            node, rest = path[-1]
            for target in rest:
                if target not in on_path:
                    on_path[target] = True
                    path.append((target, iter(successors[target])))
                    break
                if on_path[target]:
                    found[node, target] = None
            else:
                on_path[node] = False
                path.pop()
    return list(found)


def components(successors: Successors[Node]) -> list[tuple[Node, ...]]:
    """The strongly connected components that hold a cycle, and their nodes, in the order of writing.

    >>> components({"a": ["b"], "b": ["a", "c"], "c": ["c", "d"], "d": []})
    [('a', 'b'), ('c',)]
    """
    # Kosaraju: nodes by the time at which a search leaves them; each component is what reaches its last node.
    left: list[Node] = []
    seen: set[Node] = set()
    for node in successors:
        left += _leaving(successors, node, seen)
    readers: dict[Node, list[Node]] = {n: [] for n in successors}
    for node, targets in successors.items():
        for target in targets:
            readers[target].append(node)
    component: dict[Node, Node] = {}
    for root in reversed(left):
        if root not in component:
            rest = [root]
            component[root] = root
            while rest:
                for before in readers[rest.pop()]:
                    if before not in component:
                        component[before] = root
                        rest.append(before)
    members: dict[Node, list[Node]] = {}
    for node in successors:
        members.setdefault(component[node], []).append(node)
    return [tuple(nodes) for nodes in members.values() if len(nodes) > 1 or nodes[0] in successors[nodes[0]]]


def _leaving(successors: Successors[Node], start: Node, seen: set[Node]) -> Iterator[Node]:
    """Nodes that a depth-first search sees for the first time, as it leaves them."""
    if start in seen:
        return
    seen.add(start)
    path = [(start, iter(successors[start]))]
    while path:
        node, rest = path[-1]
        target = next((t for t in rest if t not in seen), None)
        if target is None:
            path.pop()
            yield node
        else:
            seen.add(target)
            path.append((target, iter(successors[target])))


def reachable(successors: Successors[Node], starts: Iterable[Node], without: Node | None = None) -> set[Node]:
    """Nodes that a way from one of ``starts`` leads to, the starts among them; no way goes through ``without``.

    >>> sorted(reachable({"s": ["a", "b"], "a": ["c"], "b": [], "c": []}, ["s"], without="a"))
    ['b', 's']
    """
    rest = [n for n in starts if n != without]
    found = set(rest)
    while rest:
        for target in successors[rest.pop()]:
            if target not in found and target != without:
                found.add(target)
                rest.append(target)
    return found


def order_without(successors: Successors[Node], left_out: Iterable[tuple[Node, Node]]) -> list[Node]:
    """The nodes, each after all that it reads by edges other than those left out; otherwise as they were written.

    Nodes on a cycle of the other edges, and what comes after them, are missing from the answer.

    >>> order_without({"head": ["body"], "s": ["head"], "body": ["head"]}, [("body", "head")])
    ['s', 'head', 'body']
    """
    skipped = set(left_out)
    nodes = list(successors)
    place = {n: i for i, n in enumerate(nodes)}
    waits_for = dict.fromkeys(nodes, 0)
    edges = {n: [t for t in dict.fromkeys(targets) if (n, t) not in skipped] for n, targets in successors.items()}
    for targets in edges.values():
        for target in targets:
            waits_for[target] += 1
    ready = [place[n] for n, count in waits_for.items() if count == 0]
    heapq.heapify(ready)
    order: list[Node] = []
    while ready:
        node = nodes[heapq.heappop(ready)]
        order.append(node)
        for target in edges[node]:
            waits_for[target] -= 1
            if waits_for[target] == 0:
                heapq.heappush(ready, place[target])
    return order
