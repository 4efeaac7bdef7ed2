"""The logical graph and the physical plan: plain values that everything else agrees on.

A *step* is what the user wrote.  The physical plan fuses forward-connected steps of one parallelism into *vertices*
(chains); a vertex runs as ``parallelism`` subtasks, and subtask *i* of every vertex lives in worker *i*.  *Edges* join
vertices; an edge has one *channel* per (sending subtask, receiving subtask) pair that may exchange rows.

An edge that closes a loop is a *back-edge*; without those, the graph of the vertices has no cycle.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

import pyarrow as pa

from cutwater.plan.cycles import Cycles, find_cycles

if TYPE_CHECKING:
    from cutwater.connectors.base import Sink, Source
    from cutwater.operators.base import OperatorSpec


class EdgeType(enum.Enum):
    """Ways of rows to the receiving subtask.  A closed list."""

    FORWARD = "forward"
    """To the subtask of the same number."""
    HASH = "hash"
    """To the subtask that owns the row's key group."""
    REBALANCE = "rebalance"
    """Round robin by batch."""
    BROADCAST = "broadcast"
    """To every subtask."""


@dataclass(frozen=True)
class StreamType:
    """Type of the rows of a step's output: schema, the event-time column (``timestamp[us]``) if any, and the key."""

    schema: pa.Schema
    event_time: str | None = None
    keys: tuple[str, ...] = ()
    """Columns that the rows are partitioned by already: a row is in the subtask that owns their key group."""
    span: tuple[int, int] | None = None
    """A window's results: (size_us, offset_us) of the event time that a row stands for, from ``event_time`` on."""
    changes: tuple[str, ...] | None = None
    """An updating stream (``data.changes``): the columns that tell rows apart, none if unknown."""


@dataclass(frozen=True)
class Input:
    """Output of another step that a step reads."""

    step: str
    output: int
    edge: EdgeType
    keys: tuple[str, ...] = ()
    """Key columns of a hash edge."""


@dataclass(frozen=True)
class Step:
    """One step of the logical graph."""

    id: str
    kind: str
    """Name of the method called: "read", "filter", "aggregate", "window", "join", "write" ..."""
    spec: Source | OperatorSpec | Sink
    inputs: tuple[Input, ...] = ()
    outputs: tuple[StreamType, ...] = ()
    parallelism: int | None = None
    options: dict[str, object] = field(default_factory=dict[str, object])
    """read: event_time, out_of_order_us, bad_rows."""

    @property
    def role(self) -> Literal["source", "operator", "sink"]:
        """Kind of ``spec``: a source has no inputs, a sink no outputs (a loop not closed yet may have no input)."""
        if not self.inputs and self.kind != "loop":
            return "source"
        return "operator" if self.outputs else "sink"

    @property
    def operator(self) -> OperatorSpec | None:
        """``spec`` of a step that is neither source nor sink."""
        return cast("OperatorSpec", self.spec) if self.role == "operator" else None


@dataclass(frozen=True)
class LogicalGraph:
    """Dataflow as written: all steps, each after the steps it reads; a loop alone also reads what comes later."""

    name: str
    steps: MappingProxyType[str, Step]

    @property
    def graph(self) -> LogicalGraph:
        """Itself, so that a plan is made from a ``Dataflow`` or from its graph alike."""
        return self

    def consumers(self, step: str, output: int | None = None) -> list[tuple[Step, int]]:
        """Steps that read an output of ``step`` (or any of them), with the number of the input that does."""
        return [
            (s, i)
            for s in self.steps.values()
            for i, source in enumerate(s.inputs)
            if source.step == step and output in (None, source.output)
        ]

    def source_of(self, input: Input) -> StreamType:
        """Type of the stream that an input reads."""
        return self.steps[input.step].outputs[input.output]

    @property
    def sources(self) -> list[str]:
        """Ids of the steps that read from outside."""
        return [s.id for s in self.steps.values() if s.role == "source"]

    @property
    def successors(self) -> dict[str, list[str]]:
        """Every step with the steps that read it, both in the order in which they were written."""
        return step_successors(self.steps)

    @cached_property
    def cycles(self) -> Cycles[str]:
        """The loops and their back-edges (C1)."""
        return find_cycles(self.successors, self.sources)


def step_successors(steps: Mapping[str, Step]) -> dict[str, list[str]]:
    """Every step with the steps that read it, both in the order in which they were written."""
    found: dict[str, list[str]] = {id: [] for id in steps}
    for step in steps.values():
        for source in dict.fromkeys(i.step for i in step.inputs):
            found[source].append(step.id)
    return found


class Link(NamedTuple):
    """Inside a vertex: output ``output`` of the step at ``source`` feeds input ``input`` of the step at ``target``."""

    source: int
    output: int
    target: int
    input: int


class Channel(NamedTuple):
    """One FIFO pair of subtasks of an edge; its number ``edge`` and both subtasks name it in frames and manifests."""

    edge: int
    source: int
    target: int


@dataclass(frozen=True)
class Vertex:
    """A chain of steps that runs as one subtask per parallel instance.

    ``steps[0]`` is the head (the only one with inputs from edges).  Steps are in topological order.
    """

    index: int
    steps: tuple[str, ...]
    parallelism: int
    links: tuple[Link, ...] = ()

    @property
    def name(self) -> str:
        return " -> ".join(self.steps)


@dataclass(frozen=True)
class Edge:
    """Rows from one output of one step to one input of the head of another vertex."""

    index: int
    type: EdgeType
    source: int
    """Sending vertex."""
    source_step: str
    source_output: int
    target: int
    """Receiving vertex."""
    target_step: str
    target_input: int
    schema: pa.Schema
    """Of the rows that go over it: the columns of the sending step's output that somebody behind it reads."""
    keys: tuple[str, ...] = ()
    back: bool = False
    """The edge closes a loop (C1); so does each of its channels.  It may be of any type."""

    @property
    def name(self) -> str:
        """Names the edge in snapshots, whatever number another version of the program gives it.

        >>> Edge(3, EdgeType.HASH, 0, "grow", 1, 1, "count", 0, pa.schema([]), ("k",)).name
        'grow.1>count.0'
        """
        return f"{self.source_step}.{self.source_output}>{self.target_step}.{self.target_input}"


@dataclass(frozen=True)
class PhysicalPlan:
    """Everything a worker needs to run its share of the job."""

    name: str
    max_parallelism: int
    parallelism: int
    """The largest parallelism of a vertex = number of workers."""
    steps: dict[str, Step]
    vertices: tuple[Vertex, ...]
    edges: tuple[Edge, ...]
    loops: tuple[frozenset[int], ...] = ()
    """Vertices of each strongly connected component that holds a cycle."""

    @property
    def back_edges(self) -> list[tuple[str, str]]:
        """The edges that close loops, as the manifest names them: (source step, target step), each once, sorted."""
        return sorted({(e.source_step, e.target_step) for e in self.edges if e.back})

    def loop_of(self, vertex: int) -> int | None:
        """Number of the loop that a vertex lies in, ``None`` outside."""
        return next((n for n, vertices in enumerate(self.loops) if vertex in vertices), None)

    def loop_inputs(self, vertex: int) -> list[Edge]:
        """Inputs of a vertex that come from its own loop, back-edges among them."""
        loop = self.loop_of(vertex)
        return [] if loop is None else [e for e in self.inputs(vertex) if e.source in self.loops[loop]]

    def channels(self, edge: Edge) -> Iterator[Channel]:
        """All channels of an edge."""
        sources, targets = self.vertices[edge.source].parallelism, self.vertices[edge.target].parallelism
        for s in range(sources):
            if edge.type is EdgeType.FORWARD:
                yield Channel(edge.index, s, s)
            else:
                for t in range(targets):
                    yield Channel(edge.index, s, t)

    def inputs(self, vertex: int) -> list[Edge]:
        return [e for e in self.edges if e.target == vertex]

    def outputs(self, vertex: int) -> list[Edge]:
        return [e for e in self.edges if e.source == vertex]

    def vertex_of(self, step: str) -> Vertex:
        return next(v for v in self.vertices if step in v.steps)
