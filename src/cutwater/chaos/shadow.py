"""A dataflow as it is run under faults: read at a chosen pace, written to a folder of its own, failing when told to.

Sources stay what they are, but for their rate: rows keep their order and their positions.  Sinks are replaced, so that
nothing of the user's is written; what a sink would have been given lies, exactly once, in the job's folder.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, cast

import pyarrow as pa

from cutwater.connectors.base import (
    Json,
    PreCommit,
    SinkContext,
    SinkWriter,
    Source,
    SourceCommitter,
    SourceContext,
    SourceHooks,
    Split,
    SplitReader,
    SubtaskCommitter,
    earliest_time,
)
from cutwater.connectors.files.sink import CollectSink
from cutwater.errors import BuildError, UserCodeError
from cutwater.plan.graph import LogicalGraph, Step
from cutwater.plan.replaced_sinks import shadow_of

HOOKS = ("read", "write", "pre-commit", "commit")
"""Calls in which a worker can be told to raise."""
SLOW = "slow"
"""Order to take long over writing a part of a snapshot."""


@dataclass(frozen=True)
class Orders:
    """Faults that workers carry out themselves: files in a folder that driver and workers see.

    >>> import tempfile
    >>> orders = Orders(tempfile.mkdtemp())
    >>> orders.give("write")
    >>> orders.open("write"), orders.take("write"), orders.take("write")
    (True, True, False)
    """

    folder: str

    def give(self, name: str) -> None:
        """Let the first worker that comes by carry it out."""
        with open(os.path.join(self.folder, name), "w", encoding="ascii"):
            return

    def open(self, name: str) -> bool:
        """True while nobody has taken the order."""
        return os.path.exists(os.path.join(self.folder, name))

    def take(self, name: str) -> bool:
        """True for one caller, if the order was given."""
        try:
            os.unlink(os.path.join(self.folder, name))
        except FileNotFoundError:
            return False
        return True

    def maybe_raise(self, hook: str) -> None:
        """Fail here, if that was ordered.

        Raises:
            UserCodeError: it was.
        """
        if self.take(hook):
            raise UserCodeError(f"chaos: an exception in {hook}")

    def maybe_wait(self, slow_s: float = 1.0) -> None:
        """Take long, if that was ordered."""
        if self.take(SLOW):
            time.sleep(slow_s)


@dataclass
class Pace:
    """Speed of reading, asked for by the driver whenever it deploys an attempt.

    >>> pace = Pace({"in": 10_000})
    >>> pace.rate("in"), pace.hold(20.0), pace.rate("in"), pace.held, pace.release(), pace.rate("in"), pace.held
    (None, None, 500.0, True, None, None, False)
    """

    rows: dict[str, int]
    """Of each read step, in the run without faults."""
    splits: dict[str, list[Split]] = field(default_factory=dict[str, list[Split]])
    held: bool = False
    """The job does not end: its sources might have more splits, as far as it knows."""
    _rounds_per_s: float | None = None

    def hold(self, seconds: float) -> None:
        """All rows take so long, and the job waits for ``release``."""
        self.held, self._rounds_per_s = True, 1 / seconds

    def at_will(self) -> None:
        """From the next attempt on, as fast as possible."""
        self._rounds_per_s = None

    def release(self) -> None:
        """The job ends when its rows do; from the next attempt on, they come as fast as possible."""
        self.held, self._rounds_per_s = False, None

    def rate(self, step: str) -> float | None:
        """Rows per second; ``None``: as fast as possible."""
        rows = self.rows.get(step, 0)
        return None if self._rounds_per_s is None or not rows else max(rows * self._rounds_per_s, 0.01)


@dataclass(frozen=True)
class PacedSource:
    """The user's source, at a pace."""

    inner: Source
    step: str
    orders: Orders
    pace: Pace = field(compare=False)

    @property
    def schema(self) -> pa.Schema:
        return self.inner.schema

    @property
    def bounded(self) -> bool:
        """Not while the trial holds the job: it must not end before everything has struck."""
        return self.inner.bounded and not self.pace.held

    @property
    def ended(self) -> bool:
        """Asked of a source that is not bounded: whether no split will come any more."""
        return not self.pace.held

    @property
    def replayable(self) -> bool:
        return self.inner.replayable

    @property
    def rate(self) -> float | None:
        """The slower of the user's and the trial's."""
        given = [r for r in (self.inner.rate, self.pace.rate(self.step)) if r is not None]
        return min(given, default=None)

    @property
    def discover_interval_ms(self) -> float:
        return 50.0

    @property
    def interleave(self) -> bool:
        """True if splits are read in turns (asked by the reading subtask)."""
        return SourceHooks(self.inner).interleave

    @property
    def time_ordered(self) -> bool:
        """True if its splits follow each other in time (asked by the reading subtask)."""
        return SourceHooks(self.inner).time_ordered

    def earliest_time(self, split: Split, column: str, bound_us: int) -> int | None:
        """Begin of a split's rows in event time (asked by the reading subtask); that is not reading them."""
        return earliest_time(self.inner, split, column, bound_us)

    @property
    def stages_in_store(self) -> bool:
        """True if it is staged in a folder of the job's store."""
        return SourceHooks(self.inner).stages_in_store

    @property
    def pickles_user_code(self) -> bool:
        """True if staging pickles objects of the user's."""
        return SourceHooks(self.inner).pickles_user_code

    def guarded(self, guard: object) -> PacedSource:
        """The same in a worker, which knows the job's seal."""
        return replace(self, inner=SourceHooks(self.inner).guarded(guard))

    def stage(self, directory: str, *guards: object) -> PacedSource:
        """The same, of a source that is staged before the job begins."""
        return replace(self, inner=SourceHooks(self.inner).stage(directory, *guards))

    @property
    def repeatable(self) -> bool:
        """See ``SourceHooks``."""
        return SourceHooks(self.inner).repeatable

    def committer(self, job_uid: str, step: str) -> SourceCommitter | None:
        """See ``SourceHooks``."""
        return SourceHooks(self.inner).committer(job_uid, step)

    def discover(self) -> list[Split]:
        """Those that were there at the start."""
        if self.step not in self.pace.splits:
            self.pace.splits[self.step] = self.inner.discover()
        return self.pace.splits[self.step]

    def open(self, split: Split, position: Json | None, ctx: SourceContext) -> SplitReader:
        return cast("SplitReader", _Reader(self.inner.open(split, position, ctx), self.orders))


class _Obedient:
    """Fails in some of its calls when told to; everything else is that of a reader, writer or committer of others."""

    def __init__(self, inner: Any, orders: Orders) -> None:
        self._inner, self._orders = inner, orders

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Reader(_Obedient):
    def read(self, max_rows: int) -> pa.RecordBatch | None:
        self._orders.maybe_raise("read")
        return self._inner.read(max_rows)


@dataclass(frozen=True, kw_only=True)
class Shadow(CollectSink):
    """Takes the rows of a sink and keeps them in the job's folder, from where ``Job.result_table`` reads them."""

    orders: Orders

    def writer(self, schema: pa.Schema, ctx: SinkContext, restored: list[Json]) -> SinkWriter:
        return cast("SinkWriter", _Writer(super().writer(schema, ctx, restored), self.orders))

    def committer(self, schema: pa.Schema, job_uid: str, step: str) -> SubtaskCommitter:
        return cast("SubtaskCommitter", _Committer(super().committer(schema, job_uid, step), self.orders))


class _Writer(_Obedient):
    def write(self, batch: pa.RecordBatch) -> None:
        self._orders.maybe_raise("write")
        self._inner.write(batch)

    def pre_commit(self, checkpoint_id: int, final: bool) -> Callable[[], PreCommit]:
        make_durable = self._inner.pre_commit(checkpoint_id, final)

        def durably() -> PreCommit:
            self._orders.maybe_wait()
            self._orders.maybe_raise("pre-commit")
            return make_durable()

        return durably


class _Committer(_Obedient):
    def commit(self, checkpoint_id: int, handles: list[Json]) -> None:
        self._orders.maybe_raise("commit")
        self._inner.commit(checkpoint_id, handles)


def shadowed(graph: LogicalGraph, orders: Orders, pace: Pace) -> LogicalGraph:
    """The graph with paced sources and shadows for sinks.

    Raises:
        BuildError: a source has no end, or the rows of a sink cannot be kept; names the step.
    """
    return replace(
        graph, steps=MappingProxyType({s.id: _shadowed(graph, s, orders, pace) for s in graph.steps.values()})
    )


def _shadowed(graph: LogicalGraph, step: Step, orders: Orders, pace: Pace) -> Step:
    if step.role == "source":
        source = cast("Source", step.spec)
        if not source.bounded:
            raise BuildError(
                "its source has no end, so two runs have no results to compare",
                step=step.id,
                hint="Give it an end, for example with rows= or with files that are there already.",
            )
        return replace(step, spec=PacedSource(source, step.id, orders, pace))
    if step.role == "sink":
        return shadow_of(graph, step, Shadow(orders=orders))
    return step
