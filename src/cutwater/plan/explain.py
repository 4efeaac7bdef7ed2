"""``flow.explain()``: the logical and the physical graph as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from cutwater.config import ProtocolName, format_us
from cutwater.connectors.base import SourceHooks
from cutwater.errors import BuildError
from cutwater.plan.checks import check_guarantees, guarantee_of
from cutwater.plan.graph import Edge, EdgeType, Input, LogicalGraph, PhysicalPlan, Step, Vertex
from cutwater.plan.planner import filters_of_source, fuse_links, make_plan

if TYPE_CHECKING:
    from cutwater.connectors.base import Sink, Source


def explain(graph: LogicalGraph, *, parallelism: int, max_parallelism: int, protocol: ProtocolName) -> str:
    """Both graphs and what the job promises.  A dataflow that is not whole yet is shown as far as it goes."""
    parts = [f"dataflow {graph.name}", "", "Logical graph", *explain_logical(graph), ""]
    try:
        plan = make_plan(graph, parallelism, max_parallelism)
    except BuildError as e:
        parts += ["Physical plan", f"  none yet: {e}"]
    else:
        parts.append(f"Physical plan: {plan.parallelism} workers, {max_parallelism} key groups")
        parts += [*explain_physical(plan), ""]
        if plan.loops:
            parts += ["Loops", *explain_loops(graph), ""]
        parts += ["Guarantees", *_guarantees(graph, protocol)]
    return "\n".join(parts)


def explain_logical(graph: LogicalGraph) -> Iterator[str]:
    """One line per step and input, one for what flows out."""
    width = max((len(s.id) for s in graph.steps.values()), default=0)
    for step in graph.steps.values():
        details = "; ".join(_details(step))
        yield f"  {step.id:<{width}}  {step.kind}{f': {details}' if details else ''}"
        margin = " " * (width + 4)
        for source in step.inputs:
            back = ", a back-edge" if (source.step, step.id) in graph.cycles.back_edges else ""
            yield f"{margin}<- {_input(graph, source)}{back}"
        for number, output in enumerate(step.outputs):
            columns = ", ".join(f"{f.name} {f.type}" for f in output.schema)
            marks = f"; event time {output.event_time}" if output.event_time else ""
            side = f" output {number}" if number else ""
            yield f"{margin}->{side} ({columns}){marks}"


def explain_physical(plan: PhysicalPlan) -> Iterator[str]:
    """Every vertex with its operators, and the edges that leave it."""
    for vertex in plan.vertices:
        yield f"  [{vertex.index}] x{vertex.parallelism}  {_chain(plan, vertex)}"
        if passed_over := _passed_over(plan, vertex):
            yield f"        reads only row groups that may have rows with {' and '.join(passed_over)}"
        for edge in plan.outputs(vertex.index):
            yield f"        {_edge(plan, edge)}"


def explain_loops(graph: LogicalGraph) -> Iterator[str]:
    """Each loop: its steps, where rows enter it, and the edges that close it."""
    for loop in graph.cycles.loops:
        yield f"  {', '.join(loop.nodes)}"
        several = "" if loop.reducible else " (not by one head: the order of writing decides what closes it)"
        yield f"    entered at {', '.join(loop.entries)}{several}"
        yield f"    closed by {', '.join(f'{a} -> {b}' for a, b in loop.back_edges)}"


def _chain(plan: PhysicalPlan, vertex: Vertex) -> str:
    """The operators of a vertex; fused steps stand together, a branch says where it leaves."""
    nodes, links = fuse_links(plan, vertex)
    names = ["+".join(node.steps) for node in nodes]
    text = names[0]
    for link in links:
        side = f".{link.output}" if link.output else ""
        from_before = link.source == link.target - 1 and not side
        text += f" -> {names[link.target]}" if from_before else f" | {names[link.source]}{side} -> {names[link.target]}"
    return text


def _passed_over(plan: PhysicalPlan, vertex: Vertex) -> list[str]:
    """Filters behind a read step by which its source leaves out rows that it need not look at."""
    step = plan.steps[vertex.steps[0]]
    if step.role != "source":
        return []
    source = SourceHooks(cast("Source", step.spec)).passing_over(filters_of_source(plan, vertex), None)
    return SourceHooks(source).passes_over_by


def _edge(plan: PhysicalPlan, edge: Edge) -> str:
    side = f" output {edge.source_output}" if edge.source_output else ""
    channels = sum(1 for _ in plan.channels(edge))
    many = f"{'channel' if channels == 1 else 'channels'}{', a back-edge' if edge.back else ''}"
    sent = plan.steps[edge.source_step].outputs[edge.source_output].schema
    only = f"; only {', '.join(edge.schema.names)}" if len(edge.schema) < len(sent) else ""
    return (
        f"edge {edge.index}: {edge.source_step}{side} -- {_how(edge.type, edge.keys)} --> "
        f"[{edge.target}] {edge.target_step} input {edge.target_input} ({channels} {many}{only})"
    )


def _input(graph: LogicalGraph, source: Input) -> str:
    side = f" output {source.output}" if source.output else ""
    return f"{source.step}{side} by {_how(source.edge, source.keys)}"


def _how(edge: EdgeType, keys: tuple[str, ...]) -> str:
    return f"{edge.value}({', '.join(keys)})" if keys else edge.value


def _details(step: Step) -> Iterator[str]:
    if step.role == "source":
        source = cast("Source", step.spec)
        yield f"{type(source).__name__}, {'bounded' if source.bounded else 'unbounded'}"
        if step.options.get("event_time"):
            yield f"out of order by {format_us(cast(int, step.options.get('out_of_order_us', 0)))}"
        if step.options.get("bad_rows") == "dead_letter":
            yield "bad rows to output 1"
    elif step.role == "sink":
        sink = cast("Sink", step.spec)
        yield f"{type(sink).__name__}, {sink.guarantee}"
    elif step.operator is not None:
        yield from step.operator.explanation()
        if step.operator.state_schema is not None:
            yield f"state ({', '.join(step.operator.state_schema.names)})"
    if step.parallelism is not None:
        yield f"parallelism {step.parallelism}"


def _guarantees(graph: LogicalGraph, protocol: ProtocolName) -> Iterator[str]:
    try:
        check_guarantees(graph, protocol)
    except BuildError as e:
        yield f"  protocol {protocol} is refused: {e}"
        return
    promise = guarantee_of(protocol)
    yield f"  state   {promise} (protocol {protocol})"
    for step in graph.steps.values():
        if step.role == "sink":
            offered = cast("Sink", step.spec).guarantee
            yield f"  output  {step.id}: {offered if promise == 'exactly-once' else promise}"
