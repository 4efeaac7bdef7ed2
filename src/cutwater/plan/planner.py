"""The physical plan: chains of steps, edges between them, and what each edge does with rows.

The same program gives the same plan, with the same numbers: steps are taken in the order they were written, except
that a step comes after all that it reads by edges that close no loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import pyarrow as pa

from cutwater.errors import BuildError, InvariantError
from cutwater.plan.checks import check_complete
from cutwater.plan.cycles import components, order_without
from cutwater.plan.graph import (
    Edge,
    EdgeType,
    Input,
    Link,
    LogicalGraph,
    PhysicalPlan,
    Step,
    Vertex,
    step_successors,
)
from cutwater.state.keys import MAX_KEY_GROUPS

if TYPE_CHECKING:
    from cutwater.connectors.base import Sink, Source
    from cutwater.operators.base import OperatorSpec
    from cutwater.operators.row_filters import RowFilter


class HasGraph(Protocol):
    """A ``Dataflow``, or its ``LogicalGraph``."""

    @property
    def graph(self) -> LogicalGraph: ...


class FusedNode(NamedTuple):
    """One operator of a chain: a step, or several neighbours that compute as one."""

    steps: tuple[str, ...]
    spec: Source | OperatorSpec | Sink


class FusedChain(NamedTuple):
    """A vertex as the worker builds it; links number the nodes."""

    nodes: list[FusedNode]
    links: list[Link]


def make_plan(flow: HasGraph, parallelism: int, max_parallelism: int = 128) -> PhysicalPlan:
    """The physical plan of a dataflow.

    A step joins the vertex of the step before it if it reads that step alone, by a forward edge, and neither or both
    of them name the same parallelism of their own; every other step heads a vertex of its own.  So the vertices and
    edges of a program, and their numbers, are the same at every parallelism of the job.  A forward edge between
    different parallelisms becomes a rebalance edge.  A hash edge becomes a forward one where rows lie in the right
    subtask already.  Edges that close loops are marked (C1); no chain holds one, and the step at its end heads a
    vertex.

    Args:
        flow: the dataflow or its graph.
        parallelism: subtasks of every step that names no number of its own.
        max_parallelism: number of key groups.

    Raises:
        BuildError: the dataflow is not whole, or a step wants more subtasks than there are key groups.
    """
    graph = flow.graph
    check_complete(graph)
    planner = _Planner(graph, parallelism, max_parallelism)
    order = [graph.steps[id] for id in order_without(graph.successors, graph.cycles.back_edges)]
    for step in order:
        planner.place(step)
    for step in order:
        planner.join(step)
    plan = planner.plan()
    validate_plan(plan)
    return plan


def replan(plan: PhysicalPlan, parallelism: int) -> PhysicalPlan:
    """The plan of the same program at another parallelism: the same in every process.

    Raises:
        BuildError: a step wants more subtasks than there are key groups.
    """
    graph = LogicalGraph(plan.name, MappingProxyType(plan.steps))
    return make_plan(graph, parallelism, plan.max_parallelism)


class _Planner:
    def __init__(self, graph: LogicalGraph, parallelism: int, max_parallelism: int) -> None:
        if not 1 <= max_parallelism <= MAX_KEY_GROUPS:
            raise BuildError(f"max_parallelism {max_parallelism} is not between 1 and {MAX_KEY_GROUPS}")
        if parallelism < 1:
            raise BuildError(f"parallelism must be a whole number above 0, not {parallelism}")
        self._graph = graph
        self._max_parallelism = max_parallelism
        self._parallelism = {s.id: s.parallelism or parallelism for s in graph.steps.values()}
        for step, subtasks in self._parallelism.items():
            if subtasks > max_parallelism:
                raise BuildError(
                    f"parallelism {subtasks} is above max_parallelism {max_parallelism}",
                    step=step,
                    hint="Key groups are the unit of scaling: raise max_parallelism before the first run.",
                )
        self._chains: list[list[str]] = []
        self._links: list[list[Link]] = []
        self._vertex: dict[str, int] = {}
        self._edges: list[Edge] = []
        self._in_place: set[str] = set()  # steps whose rows are where the keys of their type say

    def place(self, step: Step) -> None:
        """Give the step a place: in the chain it continues, or at the head of a new one."""
        # What begins a back-edge is placed later, which makes no difference: the rows of a union or loop have no keys.
        types = [self._edge_type(step, i) for i in step.inputs]
        if any(i.keys for i in step.inputs) or all(
            t is EdgeType.FORWARD and i.step in self._in_place for i, t in zip(step.inputs, types, strict=True)
        ):
            self._in_place.add(step.id)
        if types == [EdgeType.FORWARD] and self._continues_chain(step, source := step.inputs[0]):
            vertex = self._vertex[source.step]
            chain = self._chains[vertex]
            self._links[vertex].append(Link(chain.index(source.step), source.output, len(chain), 0))
            chain.append(step.id)
            self._vertex[step.id] = vertex
            return
        self._vertex[step.id] = len(self._chains)
        self._chains.append([step.id])
        self._links.append([])

    def join(self, step: Step) -> None:
        """Add the edges to the step, if it heads a vertex; all steps have their places."""
        vertex = self._vertex[step.id]
        if self._chains[vertex][0] != step.id:
            return
        for number, source in enumerate(step.inputs):
            self._edges.append(
                Edge(
                    index=len(self._edges),
                    type=self._edge_type(step, source),
                    source=self._vertex[source.step],
                    source_step=source.step,
                    source_output=source.output,
                    target=vertex,
                    target_step=step.id,
                    target_input=number,
                    schema=self._schema(step, source),
                    keys=source.keys,
                    back=(source.step, step.id) in self._graph.cycles.back_edges,
                )
            )

    def _schema(self, step: Step, source: Input) -> pa.Schema:
        """Columns that go over an edge: where the step passes no whole rows on to anybody, those that it reads."""
        schema = self._graph.source_of(source).schema
        read = None if step.operator is None else step.operator.columns_read
        sides = range(1, len(step.outputs))
        if read is None or any(self._graph.consumers(step.id, output) for output in sides):
            return schema
        kept = [column for column in schema if column.name in read or column.name in source.keys]
        return schema if len(kept) == len(schema) else pa.schema(kept)

    def plan(self) -> PhysicalPlan:
        vertices = tuple(
            Vertex(n, tuple(chain), self._parallelism[chain[0]], tuple(self._links[n]))
            for n, chain in enumerate(self._chains)
        )
        return PhysicalPlan(
            name=self._graph.name,
            max_parallelism=self._max_parallelism,
            parallelism=max(v.parallelism for v in vertices),
            steps=dict(self._graph.steps),
            vertices=vertices,
            edges=tuple(self._edges),
            loops=_loops(len(vertices), self._edges),
        )

    def _continues_chain(self, step: Step, source: Input) -> bool:
        spec = self._graph.steps[source.step].operator
        return self._alike(step, source) and (spec is None or not spec.ends_chain)

    def _alike(self, step: Step, source: Input) -> bool:
        """True if two steps have the same parallelism whatever that of the job is."""
        return step.parallelism == self._graph.steps[source.step].parallelism

    def _edge_type(self, step: Step, source: Input) -> EdgeType:
        same = self._parallelism[step.id] == self._parallelism[source.step]
        keyed = source.step in self._in_place and self._graph.source_of(source).keys == source.keys
        if source.edge is EdgeType.HASH and self._alike(step, source) and keyed:
            return EdgeType.FORWARD  # the rows of a key group are in the subtask that owns it already
        if source.edge is EdgeType.FORWARD and not same:
            return EdgeType.REBALANCE
        return source.edge


def _loops(vertices: int, edges: Sequence[Edge]) -> tuple[frozenset[int], ...]:
    """The strongly connected components of the vertices that hold a cycle."""
    successors: dict[int, list[int]] = {v: [] for v in range(vertices)}
    for edge in edges:
        successors[edge.source].append(edge.target)
    return tuple(frozenset(c) for c in components(successors))


# ------------------------------------------------------------------------------------------------------------ fusing


def fuse_links(plan: PhysicalPlan, vertex: Vertex) -> FusedChain:
    """A vertex with neighbouring steps fused into one operator, where they can be one (``OperatorSpec.fused``).

    Nobody else may read the first of them; rows that go back in a loop leave at the step they were written at.
    """
    nodes: list[FusedNode] = []
    node_of: list[int] = []
    into = {link.target: link for link in vertex.links}
    for position, id in enumerate(vertex.steps):
        link = into.get(position)
        spec = plan.steps[id].spec
        node = len(nodes) if link is None else node_of[link.source]
        one = None if link is None else _as_one(plan, vertex, link, nodes[node])
        if one is not None:
            nodes[node] = FusedNode((*nodes[node].steps, id), one)
            node_of.append(node)
        else:
            node_of.append(len(nodes))
            nodes.append(FusedNode((id,), spec))
    links = [
        Link(node_of[link.source], link.output, node_of[link.target], link.input)
        for link in vertex.links
        if node_of[link.source] != node_of[link.target]
    ]
    return FusedChain([_narrowed(plan, vertex, node) for node in nodes], links)


def _narrowed(plan: PhysicalPlan, vertex: Vertex, node: FusedNode) -> FusedNode:
    """The node as it is where all its rows leave the chain: without columns that go over no edge, with dictionaries."""
    position = vertex.steps.index(node.steps[-1])
    step = plan.steps[node.steps[-1]]
    edges = [edge for edge in plan.edges if edge.source_step == step.id]
    wanted = frozenset(name for edge in edges for name in edge.schema.names)
    inside = any(link.source == position for link in vertex.links)
    if step.operator is None or len(step.outputs) != 1 or inside or not wanted:
        return node
    spec = cast("OperatorSpec", node.spec)
    if len(wanted) < len(step.outputs[0].schema):
        spec = spec.narrowed(wanted)
    return FusedNode(node.steps, spec.passing_dictionaries())


def columns_of_source(plan: PhysicalPlan, vertex: Vertex) -> frozenset[str] | None:
    """Columns of the vertex's read step that a step reads, here or behind an edge; ``None``: all.

    The event-time column is not among them where only its watermarks are of use.
    """
    wanted: list[frozenset[str] | None] = [None] * len(vertex.steps)
    for position in reversed(range(len(vertex.steps))):
        step = plan.steps[vertex.steps[position]]
        out = _columns_taken(plan, vertex, position, wanted)
        if position == 0:
            return out if out is not None and len(out) < len(step.outputs[0].schema) else None
        wanted[position] = None if step.operator is None or out is None else step.operator.columns_for(out)
    return None


def filters_of_source(plan: PhysicalPlan, vertex: Vertex) -> tuple[RowFilter, ...]:
    """Conditions on the rows of the vertex's read step: a row that does not fulfil each of them leads to nothing."""
    if any(edge.source_step == vertex.steps[0] and edge.source_output == 0 for edge in plan.edges):
        return ()
    chain = fuse_links(plan, vertex)
    readers = [link for link in chain.links if link.source == 0 and link.output == 0]
    if len(readers) != 1 or readers[0].input != 0:
        return ()
    node = chain.nodes[readers[0].target]
    operator = plan.steps[node.steps[0]].operator
    return () if operator is None else cast("OperatorSpec", node.spec).row_filters


def may_read_dictionaries(plan: PhysicalPlan, vertex: Vertex) -> bool:
    """Whether all steps of the chain that take the rows of the vertex's read step take texts as dictionaries.

    Edges do.
    """
    readers = [vertex.steps[link.target] for link in vertex.links if link.source == 0 and link.output == 0]
    operators = [plan.steps[reader].operator for reader in readers]
    return all(operator is not None and operator.takes_dictionaries for operator in operators)


def _columns_taken(
    plan: PhysicalPlan, vertex: Vertex, position: int, wanted: Sequence[frozenset[str] | None]
) -> frozenset[str] | None:
    """Columns of output 0 of a step that others read; ``None``: they read another output, too."""
    step = plan.steps[vertex.steps[position]]
    everything = frozenset(step.outputs[0].schema.names) if step.outputs else frozenset[str]()
    taken: frozenset[str] = frozenset()
    outputs = [(edge.source_output, frozenset(edge.schema.names)) for edge in plan.edges if edge.source_step == step.id]
    outputs += [(link.output, wanted[link.target]) for link in vertex.links if link.source == position]
    for output, columns in outputs:
        if output == 0:
            taken |= everything if columns is None else columns
        elif step.role != "source":  # a source's other output are the rows that it could not read
            return None
    return taken


def _as_one(plan: PhysicalPlan, vertex: Vertex, link: Link, node: FusedNode) -> OperatorSpec | None:
    """The node that the link begins at, with the step at its end; ``None``: they stay apart."""
    before, after = (plan.steps[vertex.steps[position]] for position in (link.source, link.target))
    readers = [other for other in vertex.links if other.source == link.source]
    leaves = any(edge.source_step == before.id for edge in plan.edges)
    if before.operator is None or after.operator is None or len(readers) > 1 or leaves:
        return None
    return cast("OperatorSpec", node.spec).fused(after.operator)


# -------------------------------------------------------------------------------------------------------- validation


def validate_plan(plan: PhysicalPlan) -> None:
    """Check what every plan must fulfil.

    Raises:
        InvariantError: a step without a place, rows of another type than the step takes, keys that do not fit.
    """
    for problem in _problems(plan):
        raise InvariantError(f"the plan of dataflow {plan.name!r} is wrong: {problem}")


def _problems(plan: PhysicalPlan) -> Iterator[str]:
    placed = [id for v in plan.vertices for id in v.steps]
    if sorted(placed) != sorted(plan.steps):
        yield f"steps {sorted(set(plan.steps) ^ set(placed))} do not lie in exactly one vertex"
    for step in plan.steps.values():
        yield from _step_problems(plan, step)
    for vertex in plan.vertices:
        fed = [link.target for link in vertex.links]
        if fed != list(range(1, len(vertex.steps))):
            yield f"vertex {vertex.index} does not feed each of its steps once, in order"
    for number, edge in enumerate(plan.edges):
        if edge.index != number:
            yield f"edge {edge.index} stands at place {number}"
        if plan.vertices[edge.target].steps[0] != edge.target_step:
            yield f"edge {number} ends inside a chain"
        if edge.source_step not in plan.vertices[edge.source].steps:
            yield f"edge {number} begins outside its vertex"
        parallelisms = plan.vertices[edge.source].parallelism, plan.vertices[edge.target].parallelism
        if edge.type is EdgeType.FORWARD and parallelisms[0] != parallelisms[1]:
            yield f"forward edge {number} joins parallelism {parallelisms[0]} and {parallelisms[1]}"
        if edge.type is EdgeType.HASH and not edge.keys:
            yield f"hash edge {number} has no keys"
        yield from (f"edge {number} has no column {k!r}" for k in edge.keys if k not in edge.schema.names)
        sent = plan.steps[edge.source_step].outputs[edge.source_output].schema
        missing = [column.name for column in edge.schema if column not in list(sent)]
        if missing:
            yield f"edge {number} carries {missing[0]!r}, which step {edge.source_step!r} does not give"
    yield from _loop_problems(plan)


def _loop_problems(plan: PhysicalPlan) -> Iterator[str]:
    """Find faults in the back-edges: without them no loop is left, and every step still has an input (C1)."""
    if any(i.step not in plan.steps for s in plan.steps.values() for i in s.inputs):
        return  # a problem of another kind, named elsewhere
    successors = step_successors(plan.steps)
    back = set(plan.back_edges)
    left = plan.steps.keys() - set(order_without(successors, back))
    if left:
        yield f"steps {sorted(left)} form or follow a loop that no back-edge closes"
    inside = {id: number for number, loop in enumerate(components(successors)) for id in loop}
    for source, target in sorted(back):
        if source not in inside or inside[source] != inside.get(target):
            yield f"the edge from step {source!r} to step {target!r} closes no loop"
    for step in plan.steps.values():
        if step.inputs and all((i.step, step.id) in back for i in step.inputs):
            yield f"step {step.id!r} has no input but back-edges"
    linked = {(v.steps[link.source], v.steps[link.target]) for v in plan.vertices for link in v.links}
    if linked & back:
        yield f"a chain holds back-edge {min(linked & back)}"
    if plan.loops != _loops(len(plan.vertices), plan.edges):
        yield "its loops are not the strongly connected vertices"


def _step_problems(plan: PhysicalPlan, step: Step) -> Iterator[str]:
    if step.operator is not None:
        promised = [o.schema for o in step.outputs]
        made = list(step.operator.outputs)
        if len(promised) != len(made) or any(not _same(a, b) for a, b in zip(promised, made, strict=True)):
            yield f"step {step.id!r} promises other rows than its operator makes"
    for source in step.inputs:
        if source.step not in plan.steps or source.output >= len(plan.steps[source.step].outputs):
            yield f"step {step.id!r} reads output {source.output} of step {source.step!r}, which is not there"
            return
    taken = () if step.operator is None else step.operator.input_schemas
    for number, (source, wanted) in enumerate(zip(step.inputs, taken, strict=False)):
        if not _same(plan.steps[source.step].outputs[source.output].schema, wanted):
            yield f"input {number} of step {step.id!r} brings other rows than its operator takes"
    if step.kind == "join" and len({len(i.keys) for i in step.inputs} | {0}) != 2:
        yield f"the inputs of step {step.id!r} have different numbers of keys, or none"


def _same(a: Any, b: Any) -> bool:
    return a.names == b.names and a.types == b.types
