"""Checks of a whole dataflow: that no rows end nowhere, and that its connectors can do what the job demands."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from cutwater.dataflow.graph import LogicalGraph, Step
from cutwater.errors import BuildError

if TYPE_CHECKING:
    from cutwater.config import ProtocolName
    from cutwater.connectors.base import Sink, Source

__all__ = ["check_complete", "check_guarantees", "guarantee_of"]

_DISCARD = "or discard it on purpose: .write('id', cw.discard())."


def check_complete(graph: LogicalGraph) -> None:
    """Check that the dataflow is whole: every step's rows end in a sink.

    Raises:
        BuildError: no step at all, no sink, or rows that nobody reads (names the step).
    """
    if not graph.steps:
        raise BuildError(f"dataflow {graph.name!r} is empty", hint="Begin with flow.read('id', source).")
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


def guarantee_of(protocol: ProtocolName) -> str:
    """What a job under this protocol promises: "at-most-once", "at-least-once" or "exactly-once".

    >>> guarantee_of("aligned")
    'exactly-once'
    """
    return {"none": "at-most-once", "at_least_once": "at-least-once"}.get(protocol, "exactly-once")


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
            offered = cast("Sink", step.spec).guarantee
            if offered != wanted:
                raise BuildError(
                    f"its sink gives {offered} only, the job wants {wanted}",
                    step=step.id,
                    hint="Choose another sink, or protocol='at_least_once'.",
                )


def _diverts(step: Step) -> bool:
    """Whether output 1 of the step takes rows that would otherwise fail the job."""
    return step.kind == "key_check" or (step.kind == "read" and step.options.get("bad_rows") == "dead_letter")
