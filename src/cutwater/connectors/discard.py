"""The sink that keeps nothing: for benchmarks and for jobs whose output does not matter."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import ClassVar

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from cutwater.connectors.base import Guarantee, Json, PreCommit, SinkContext, SinkSnapshot
from cutwater.data.decoding import prepare
from cutwater.errors import BuildError


class DiscardState(msgspec.Struct, frozen=True):
    """State of a discarding subtask."""

    rows: int = 0
    buckets: list[tuple[int, int]] = []
    """Latency histogram: (bucket, batches); see ``LatencyHistogram``."""
    stats: dict[str, float] = {}
    """``batches``, ``p50_ms``, ``p99_ms``, ``max_ms`` of the latency; empty without a latency column."""


prepare(DiscardState)


class LatencyHistogram:
    """Counts latencies in buckets whose bounds grow by 2 % each, so that every percentile is right within 1 %.

    >>> histogram = LatencyHistogram()
    >>> for latency_ms in range(1, 101):
    ...     histogram.add(latency_ms * 1_000_000)
    >>> round(histogram.percentile_ms(50)), round(histogram.percentile_ms(99))
    (50, 100)
    """

    _BUCKETS_PER_E = 50

    def __init__(self, buckets: list[tuple[int, int]] | None = None) -> None:
        self._counts: Counter[int] = Counter()
        for bucket, count in buckets or ():
            self._counts[bucket] += count

    def add(self, latency_ns: int) -> None:
        """Count one latency; below a microsecond (or negative: clocks differ) counts as a microsecond."""
        self._counts[round(math.log(max(latency_ns, 1000)) * self._BUCKETS_PER_E)] += 1

    def percentile_ms(self, percent: float) -> float:
        """The smallest latency that ``percent`` of all do not exceed; 0 without any."""
        rank, seen = math.ceil(self.total * percent / 100), 0
        for bucket, count in sorted(self._counts.items()):
            seen += count
            if seen >= rank:
                return math.exp(bucket / self._BUCKETS_PER_E) / 1e6
        return 0.0

    @property
    def total(self) -> int:
        return sum(self._counts.values())

    def buckets(self) -> list[tuple[int, int]]:
        return sorted(self._counts.items())


@dataclass(frozen=True)
class DiscardSink:
    """Drops rows; their number (exactly once) and, if asked, their latency lie in the snapshot.

    Args:
        count: count rows.
        latency_column: a timestamp, or int64 nanoseconds since the epoch, of the row's birth.  For each batch the time
            from its youngest row's birth until now is recorded.
    """

    count: bool = True
    latency_column: str | None = None

    guarantee: ClassVar[Guarantee] = "exactly-once"
    parallelism: ClassVar[int | None] = None

    def check(self, schema: pa.Schema) -> None:
        """See ``Sink.check``.

        Raises:
            BuildError: the latency column is missing or is neither a timestamp nor int64.
        """
        if self.latency_column is None:
            return
        if self.latency_column not in schema.names:
            raise BuildError(f"no column {self.latency_column!r} to take the latency from; there are {schema.names}")
        kind = schema.field(self.latency_column).type
        if not (pa.types.is_timestamp(kind) or kind == pa.int64()):
            raise BuildError(
                f"latency column {self.latency_column!r} is {kind}",
                hint="It must be a timestamp, or int64 nanoseconds since the epoch.",
            )

    def writer(self, schema: pa.Schema, ctx: SinkContext, restored: list[Json]) -> _DiscardWriter:
        return _DiscardWriter(self, [msgspec.convert(state, DiscardState) for state in restored if state is not None])

    def committer(self, schema: pa.Schema, job_uid: str, step: str) -> NothingToCommit:
        return NothingToCommit()


def discard(count: bool = True, latency_column: str | None = None) -> DiscardSink:
    """A sink that drops rows and counts them; see ``DiscardSink``."""
    return DiscardSink(count, latency_column)


class _DiscardWriter:
    def __init__(self, sink: DiscardSink, restored: list[DiscardState]) -> None:
        self._count = sink.count
        self._column = sink.latency_column
        self._rows = sum(state.rows for state in restored)
        self._latency = LatencyHistogram([bucket for state in restored for bucket in state.buckets])

    def write(self, batch: pa.RecordBatch) -> None:
        if self._count:
            self._rows += batch.num_rows
        if self._column is not None:
            youngest = pc.call_function("max", [batch.column(self._column)])
            if pa.types.is_timestamp(youngest.type):
                youngest = youngest.cast(pa.timestamp("ns", tz=youngest.type.tz)).cast(pa.int64())
            born_ns = youngest.as_py()
            if born_ns is not None:
                self._latency.add(time.time_ns() - born_ns)

    def roll(self) -> None:
        """Nothing is in progress."""

    def pre_commit(self, checkpoint_id: int, final: bool) -> Callable[[], PreCommit]:
        latency = self._latency
        stats: dict[str, float] = {}
        if latency.total:
            stats = {"batches": latency.total, "max_ms": latency.percentile_ms(100)}
            stats |= {f"p{percent}_ms": latency.percentile_ms(percent) for percent in (50, 99)}
        state = DiscardState(self._rows, latency.buckets(), stats)
        return lambda: PreCommit(state=msgspec.to_builtins(state))

    def close(self) -> None:
        return None


class NothingToCommit:
    """The committer of a sink that leaves nothing behind."""

    takes_back = True

    def commit(self, checkpoint_id: int, handles: list[Json]) -> None:
        """Nothing was kept."""

    def settle(self, restored: SinkSnapshot | None, retained: Sequence[SinkSnapshot], incarnation: int) -> None:
        """Nothing was left behind."""

    def settle_subtasks(
        self,
        restored: SinkSnapshot | None,
        retained: Sequence[SinkSnapshot],
        incarnation: int,
        subtasks: Container[int],
    ) -> None:
        """Nothing was left behind."""

    def retire(self, retired: SinkSnapshot, retained: Sequence[SinkSnapshot]) -> None:
        """Nothing was kept."""

    def finish(self, incarnation: int) -> None:
        """Nothing was kept."""
