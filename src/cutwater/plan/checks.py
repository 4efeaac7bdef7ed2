"""Checks of a whole dataflow: that no rows end nowhere or go round for ever, and that its connectors can do what the
job demands.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

from cutwater.config import ProtocolName
from cutwater.connectors.base import SinkHooks
from cutwater.errors import BuildError, ConfigError
from cutwater.plan.cycles import components, reachable
from cutwater.plan.graph import LogicalGraph, Step
from cutwater.protocol.protocols import PROTOCOLS, Guarantee

if TYPE_CHECKING:
    from cutwater.connectors.base import Sink, Source

_DISCARD = "or discard it on purpose: .write('id', cw.discard())."


def check_complete(graph: LogicalGraph) -> None:
    """Check that the dataflow is whole: every step's rows end in a sink, every loop is closed and can end.

    Raises:
        BuildError: no step at all, no sink, rows that nobody reads, or a loop that is wrong (names the step).
    """
    if not graph.steps:
        raise BuildError(f"dataflow {graph.name!r} is empty", hint="Begin with flow.read('id', source).")
    for step in graph.steps.values():
        if step.kind == "loop" and not _fed_back(step):
            raise BuildError(
                "the loop is never closed",
                step=step.id,
                hint="Give rows back to it: loop.feed_back(stream). A stream without loop needs no flow.loop.",
            )
    if all(s.role != "sink" for s in graph.steps.values()):
        raise BuildError(
            f"dataflow {graph.name!r} writes nothing",
            hint="End every stream with .write('id', sink), .collect('id') or .foreach_batch('id', fn).",
        )
    for step in graph.steps.values():
        if step.role != "sink" and not graph.consumers(step.id):
            raise BuildError("nobody uses its rows", step=step.id, hint=f"Write the stream, {_DISCARD}")
        if _diverts(step) and not graph.consumers(step.id, 1):
            raise BuildError(
                "nobody uses its dead letters, so they would be lost",
                step=step.id,
                hint=f"Write its .dead_letters, {_DISCARD}",
            )
    _check_loops(graph)


def _check_loops(graph: LogicalGraph) -> None:
    """Every loop is reached by a source, closed by its own rows, left by rows, and drops some on each way round."""
    cycles = graph.cycles
    handles = [s for s in graph.steps.values() if s.kind == "loop"]
    for step in handles:
        if step.id in cycles.unreached:
            raise BuildError(
                "no source reaches the loop, so that no row ever enters it",
                step=step.id,
                hint="Begin it with a stream, flow.loop('id', stream), or join one to it with union.",
            )
        own = next((set(loop.nodes) for loop in cycles.loops if step.id in loop.nodes), {step.id})
        for source in _fed_back(step):
            if source not in own:
                raise BuildError(
                    f"what is fed back, the stream of step {source!r}, does not come from the loop",
                    step=step.id,
                    hint="Rows enter a loop where it begins, flow.loop('id', stream), or by a union.",
                )
    sinks = {s.id for s in graph.steps.values() if s.role == "sink"}
    for loop in cycles.loops:
        if not sinks & reachable(graph.successors, loop.nodes):
            raise BuildError(
                f"rows never leave the loop of the steps {', '.join(loop.nodes)}",
                step=_handle(graph, loop.nodes),
                hint="Write the stream of one of its steps.",
            )
    for nodes in components(_row_for_row(graph)):
        raise BuildError(
            f"rows would go round for ever: {', '.join(nodes)} give a row for each row",
            step=_handle(graph, nodes),
            hint="Let a filter, flat_map or map_batches in the loop drop the rows that are done.",
        )


def _fed_back(step: Step) -> list[str]:
    """Steps whose rows were given to a loop by ``feed_back``."""
    return [i.step for i in (step.inputs if step.options["declared"] else step.inputs[1:])]


def _handle(graph: LogicalGraph, nodes: Iterable[str]) -> str:
    """The loop step on a cycle; there is one, since only loops read what is written later."""
    return next(n for n in nodes if graph.steps[n].kind == "loop")


def _row_for_row(graph: LogicalGraph) -> dict[str, list[str]]:
    """The steps that give exactly one row for each row, or more, and their edges to each other."""
    steps = graph.steps
    keeping = [s.id for s in steps.values() if s.operator is not None and s.operator.keeps_every_row]
    found: dict[str, list[str]] = {id: [] for id in keeping}
    for id in keeping:
        for source in steps[id].inputs:
            if source.step in found:
                found[source.step].append(id)
    return found


def guarantee_of(protocol: ProtocolName) -> Guarantee:
    """The promise of a job under this protocol.

    Raises:
        ConfigError: there is no such protocol.

    >>> guarantee_of("aligned")
    'exactly-once'
    """
    row = PROTOCOLS.get(protocol)
    if row is None:
        raise ConfigError(f"protocol {protocol!r} is unknown", hint=f"Choose one of {', '.join(PROTOCOLS)}.")
    return row.guarantee


def check_guarantees(graph: LogicalGraph, protocol: ProtocolName) -> None:
    """Check that every source and sink can do what the protocol promises.

    Raises:
        BuildError: a source that cannot be rewound where rows may not be lost, or a sink that may write rows twice
            where they must come out once; names the step.
    """
    wanted = guarantee_of(protocol)
    if wanted == "at-most-once":
        return
    for step in graph.steps.values():
        if step.role == "source" and not cast("Source", step.spec).replayable:
            raise BuildError(
                f"its source cannot be rewound, so rows would be lost after a failure: no {wanted}",
                step=step.id,
                hint="Stage its rows in files first, or accept the loss: protocol='none'.",
            )
        if step.role == "sink" and wanted == "exactly-once":
            sink = cast("Sink", step.spec)
            offered = sink.guarantee
            if offered != wanted and not SinkHooks(sink).for_people_only:
                raise BuildError(
                    f"its sink gives {offered} only, the job wants {wanted}",
                    step=step.id,
                    hint="Choose another sink, or protocol='at_least_once'.",
                )


def _diverts(step: Step) -> bool:
    """True if output 1 of the step takes rows that would otherwise fail the job."""
    return step.kind == "key_check" or "dead_letter" in (step.options.get("bad_rows"), step.options.get("on_timeout"))
