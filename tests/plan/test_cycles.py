"""Cycles of abstract graphs, against NetworkX and against what a set of back-edges must fulfil."""

from __future__ import annotations

import itertools
import random
from collections import deque

import networkx as nx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cutwater.plan.cycles import back_edges, components, find_cycles, order_without, reachable

IRREDUCIBLE = {"s": ["a", "b"], "a": ["b"], "b": ["a", "out"], "out": []}
NESTED = {"s": ["h"], "h": ["i"], "i": ["x"], "x": ["i", "h", "out"], "out": []}
CROSSING = {"s": ["a"], "a": ["b"], "b": ["c"], "c": ["a", "d"], "d": ["b", "out"], "out": []}
SELF = {"s": ["a"], "a": ["a", "out"], "out": []}
TWO_INTO_ONE = {"s": ["h"], "h": ["a", "b"], "a": ["h"], "b": ["h", "out"], "out": []}
DIAMOND = {"s": ["a", "b"], "a": ["c"], "b": ["c"], "c": []}
JOINED_BEHIND = {"t": ["u"], "h": ["u"], "u": ["f"], "f": ["h", "out"], "out": []}
FIXED = [IRREDUCIBLE, NESTED, CROSSING, SELF, TWO_INTO_ONE, DIAMOND]


@st.composite
def graphs(draw) -> dict[str, list[str]]:
    """One or two sources and some steps; any edges between steps, parallel ones and self-loops among them."""
    steps = [f"v{i}" for i in range(draw(st.integers(1, 7)))]
    sources = ["s", "t"][: draw(st.integers(1, 2))]
    nodes = draw(st.permutations(sources + steps))
    edge = st.tuples(st.sampled_from(sources + steps), st.sampled_from(steps))
    found: dict[str, list[str]] = {n: [] for n in nodes}
    for source, target in draw(st.lists(edge, min_size=1, max_size=18)):
        found[source].append(target)
    return found


def sources_of(graph: dict[str, list[str]]) -> list[str]:
    return [n for n in graph if n in ("s", "t")]


def rooted(graph: dict[str, list[str]]) -> nx.DiGraph:
    """What the sources reach, below one root, edges in the order of the graph."""
    made = nx.DiGraph()
    made.add_node("")
    made.add_nodes_from(graph)
    made.add_edges_from(("", s) for s in sources_of(graph))
    made.add_edges_from((n, t) for n, targets in graph.items() for t in targets)
    made.remove_nodes_from(set(made) - nx.descendants(made, "") - {""})
    return made


def without(graph: nx.DiGraph, edges: set[tuple[str, str]]) -> nx.DiGraph:
    left = graph.copy()
    left.remove_edges_from(edges)
    return left


def breadth_first(graph: dict[str, list[str]]) -> set[tuple[str, str]]:
    """The plain reading of the first source text: an edge to a vertex that was visited already."""
    marked: set[tuple[str, str]] = set()
    queue = deque(sources_of(graph))
    seen = set(queue)
    while queue:
        node = queue.popleft()
        for target in graph[node]:
            if target in seen:
                marked.add((node, target))
            else:
                seen.add(target)
                queue.append(target)
    return marked


class TestBackEdges:
    """C1: an edge to a step that is still on the path of a depth-first search."""

    @given(graphs())
    @example(IRREDUCIBLE)
    @example(CROSSING)
    def test_c1_they_are_the_edges_to_an_ancestor_in_the_tree_of_the_search(self, graph):
        whole = rooted(graph)
        tree = nx.dfs_tree(whole, "")
        wanted = {(n, t) for n, t in whole.edges if n == t or nx.has_path(tree, t, n)}
        assert set(back_edges(graph, sources_of(graph))) == wanted

    @given(graphs())
    def test_c1_without_them_the_graph_has_no_cycle_and_every_step_is_reached(self, graph):
        whole = rooted(graph)
        left = without(whole, set(back_edges(graph, sources_of(graph))))
        assert nx.is_directed_acyclic_graph(left)
        assert nx.descendants(left, "") == set(whole) - {""}

    @given(graphs())
    def test_c1_each_closes_a_cycle_with_edges_that_stay(self, graph):
        """None is marked in vain: putting any single one back makes a cycle."""
        whole = rooted(graph)
        found = set(back_edges(graph, sources_of(graph)))
        left = without(whole, found)
        assert all(nx.has_path(left, target, source) for source, target in found)

    @given(graphs(), st.randoms(use_true_random=False))
    def test_c1_only_loops_with_several_entries_depend_on_the_order_of_writing(self, graph, rng):
        found = find_cycles(graph, sources_of(graph))
        names = list(graph)
        rng.shuffle(names)
        other = {n: rng.sample(graph[n], len(graph[n])) for n in names}
        again = find_cycles(other, sources_of(other))
        for loop in found.loops:
            twin = next(x for x in again.loops if set(x.nodes) == set(loop.nodes))
            assert twin.reducible == loop.reducible
            if loop.reducible:
                assert set(twin.back_edges) == set(loop.back_edges)
        assert find_cycles(graph, sources_of(graph)) == found

    def test_c1_an_irreducible_loop_is_closed_where_the_order_of_writing_says(self):
        assert back_edges(IRREDUCIBLE, ["s"]) == [("b", "a")]
        assert back_edges({**IRREDUCIBLE, "s": ["b", "a"]}, ["s"]) == [("a", "b")]

    @pytest.mark.parametrize(
        ("graph", "wanted"),
        [
            (NESTED, {("x", "i"), ("x", "h")}),
            (CROSSING, {("c", "a"), ("d", "b")}),
            (SELF, {("a", "a")}),
            (TWO_INTO_ONE, {("a", "h"), ("b", "h")}),
            (DIAMOND, set()),
        ],
    )
    def test_c1_nested_crossing_and_self_loops(self, graph, wanted):
        assert set(back_edges(graph, ["s"])) == wanted

    def test_c1_the_edge_that_a_user_fed_back_need_not_be_the_back_edge(self):
        """The handle ``h`` is written first but is reached last: what closes the loop is its own output."""
        assert back_edges(JOINED_BEHIND, ["t"]) == [("h", "u")]

    def test_a_chain_of_many_steps_needs_no_deep_stack(self):
        count = 5000
        graph = {i: [i + 1] for i in range(count)} | {count: [1]}
        assert back_edges(graph, [0]) == [(count, 1)]
        assert components(graph) == [tuple(range(1, count + 1))]
        assert order_without(graph, [(count, 1)]) == list(range(count + 1))


class TestBreadthFirstIsWrong:
    """An edge to a vertex that was merely visited is no back-edge."""

    def test_c1_a_diamond_has_no_loop_and_breadth_first_search_sees_one(self):
        assert breadth_first(DIAMOND) == {("b", "c")}
        assert back_edges(DIAMOND, ["s"]) == []

    def test_c1_breadth_first_search_marks_both_edges_of_a_loop_with_two_entries(self):
        assert breadth_first(IRREDUCIBLE) == {("a", "b"), ("b", "a")}
        assert len(back_edges(IRREDUCIBLE, ["s"])) == 1

    def test_c1_over_random_graphs_it_marks_more_and_edges_on_no_cycle(self):
        rng = random.Random(5)
        marked = needed = on_no_cycle = 0
        for _ in range(300):
            steps = [f"v{i}" for i in range(rng.randint(2, 6))]
            graph = {n: rng.sample(steps, rng.randint(1, 2)) for n in ["s", *steps]}
            whole = rooted(graph)
            found, naive = set(back_edges(graph, ["s"])), breadth_first(graph)
            assert len(naive) >= len(found)
            component = {n: i for i, c in enumerate(nx.strongly_connected_components(whole)) for n in c}
            on_no_cycle += sum(component[a] != component[b] for a, b in naive)
            assert all(component[a] == component[b] for a, b in found)
            marked, needed = marked + len(naive), needed + len(found)
        assert on_no_cycle > 50
        assert marked > needed * 1.3


def dissolves(graph: nx.DiGraph) -> bool:
    """Whether taking self-loops away and merging a node into its only predecessor leads to a single node."""
    left = nx.DiGraph(graph)
    while True:
        left.remove_edges_from(list(nx.selfloop_edges(left)))
        single = next((n for n in left if left.in_degree(n) == 1), None)
        if single is None:
            return len(left) == 1
        left = nx.contracted_nodes(left, next(left.predecessors(single)), single, copy=True)


class TestLoops:
    @given(graphs())
    def test_loops_are_the_strongly_connected_components_with_a_cycle(self, graph):
        whole = rooted(graph)
        wanted = {
            frozenset(c)
            for c in nx.strongly_connected_components(whole)
            if len(c) > 1 or whole.has_edge(*(tuple(c) * 2))
        }
        found = find_cycles(graph, sources_of(graph))
        assert {frozenset(loop.nodes) for loop in found.loops} == wanted
        assert all(list(loop.nodes) == [n for n in graph if n in loop.nodes] for loop in found.loops)
        assert found.back_edges == set(itertools.chain.from_iterable(loop.back_edges for loop in found.loops))
        assert set(found.unreached) == set(graph) - set(whole)

    @given(graphs())
    def test_components_are_found_in_unreached_parts_too(self, graph):
        whole = nx.DiGraph((n, t) for n, targets in graph.items() for t in targets)
        cyclic = [c for c in nx.strongly_connected_components(whole) if len(c) > 1 or whole.has_edge(*(tuple(c) * 2))]
        assert {frozenset(c) for c in components(graph)} == {frozenset(c) for c in cyclic}

    @given(graphs())
    @example(IRREDUCIBLE)
    @example(NESTED)
    def test_a_loop_is_reducible_if_its_heads_dominate(self, graph):
        whole = rooted(graph)
        found = find_cycles(graph, sources_of(graph))
        assert all(loop.reducible for loop in found.loops) == dissolves(whole)
        dominators = nx.immediate_dominators(whole, "")

        def dominated(node: str, head: str) -> bool:
            while node != head and node:
                node = dominators[node]
            return node == head

        for loop in found.loops:
            assert loop.reducible == all(dominated(*edge) for edge in loop.back_edges)

    @given(graphs())
    def test_entries_are_where_rows_from_outside_come_in(self, graph):
        whole = rooted(graph)
        for loop in find_cycles(graph, sources_of(graph)).loops:
            outside = {t for n, t in whole.edges if n not in loop.nodes}
            assert set(loop.entries) == outside & set(loop.nodes)
            assert loop.entries
            assert loop.back_edges

    @given(graphs(), st.sampled_from(["s", "v0", "v1"]))
    def test_reachable_avoids_what_it_must(self, graph, gone):
        left = nx.DiGraph(rooted(graph))
        left.remove_nodes_from([gone])
        assert reachable(graph, sources_of(graph), without=gone) == nx.descendants(left, "")


class TestOrder:
    @given(graphs())
    @settings(max_examples=200)
    def test_each_node_comes_after_what_it_reads_and_otherwise_as_written(self, graph):
        left = nx.DiGraph()
        left.add_nodes_from(graph)
        left.add_edges_from((n, t) for n, targets in graph.items() for t in targets)
        found = back_edges(graph, [*sources_of(graph), *graph])  # a search from everywhere leaves no cycle at all
        left.remove_edges_from(found)
        place = {n: i for i, n in enumerate(graph)}
        assert order_without(graph, found) == list(nx.lexicographical_topological_sort(left, key=place.get))

    @given(graphs())
    def test_nodes_on_and_behind_a_cycle_have_no_place(self, graph):
        whole = nx.DiGraph((n, t) for n, targets in graph.items() for t in targets)
        cyclic = {n for c in components(graph) for n in c}
        behind = cyclic.union(*(nx.descendants(whole, n) for n in cyclic))
        assert set(order_without(graph, [])) == set(graph) - behind
