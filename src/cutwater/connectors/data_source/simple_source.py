"""A simple stream reader as a source: one split, of which each read says where the next one begins."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import pyarrow as pa

from cutwater.connectors.base import Json, SourceContext, SourceSnapshot, Split
from cutwater.connectors.data_source import spark_api
from cutwater.connectors.data_source.hosted import Hosted
from cutwater.connectors.data_source.partitions import DirectRows, RowsToCome, Staging
from cutwater.connectors.data_source.range_log import Plan, folder_of
from cutwater.connectors.data_source.staged_source import Reached, StagedSource, at_the_end, offset_of
from cutwater.errors import DataError


class SimpleDataSource(StagedSource):
    """What ``DataSource.simpleStreamReader`` gives.

    Args:
        hosted, schema, repeats, rate, discover_interval_ms: as of ``StagedSource``.
        until: ``"latest"``: end at the first read that gives nothing; ``None``: never.
    """

    def __init__(
        self,
        hosted: Hosted,
        schema: object,
        *,
        repeats: bool,
        rate: float | None,
        discover_interval_ms: float,
        until: Literal["latest"] | None,
    ) -> None:
        super().__init__(hosted, schema, repeats=repeats, rate=rate, discover_interval_ms=discover_interval_ms)
        self._until = until

    @property
    def bounded(self) -> bool:
        """It ends at the first read that gives nothing."""
        return self._until is not None

    def stream_reader(self) -> Any:
        """A reader of the user's."""
        with self.hosted.calling("simpleStreamReader() failed"):
            return self.hosted.made().simpleStreamReader(self.struct)

    def planned(self) -> Plan:
        """Where the stream begins."""
        reader = self.stream_reader()
        with self.hosted.calling("initialOffset() failed"):
            return Plan(uuid.uuid4().hex, start=offset_of(reader.initialOffset()))

    def discover(self) -> list[Split]:
        """The only split."""
        return [Split("0", {"plan": self.plan.id})]

    def committer(self, job_uid: str, step: str) -> _Committer | None:
        """See ``SourceHooks.committer``; none of a fork, whose leader needs what the fork does not."""
        return _Committer(self) if self._own else None

    def open(self, split: Split, position: Json | None, ctx: SourceContext) -> SimpleReader:
        """A reader of the stream.

        Raises:
            DataError: it is another plan's.
        """
        self.check_plan(split.data)
        return SimpleReader(self, {"range": 0, "start": self.plan.start} if position is None else position)


class _Committer:
    """See ``SourceCommitter``: tells the reader what is read for good, and removes what no checkpoint needs."""

    def __init__(self, source: SimpleDataSource) -> None:
        self._source, self._hosted = source, source.hosted
        self._reader: Any = None
        self._lock = threading.Lock()
        self._told = 0
        """Number of the range of which the reader knows that all before it is read."""

    def settle(self, retained: Sequence[SourceSnapshot], incarnation: int) -> None:
        """See ``SourceCommitter``: ranges are the job's, whoever reads them."""

    def retain(self, retained: Sequence[SourceSnapshot]) -> None:
        """See ``SourceCommitter``.

        Raises:
            UserCodeError: the user's ``commit`` failed.
        """
        with self._lock:
            at = [snapshot.positions.get("0") or {"range": 0} for snapshot in retained]
            reached = Reached.of([position["range"] for position in at], repeats=self._source.repeats)
            if reached.done > self._told:
                self._commit(next(position["start"] for position in at if position["range"] == reached.done))
                self._told = reached.done
            self._source.log.remove_below(reached.needed)

    def _commit(self, end: Json) -> None:
        if self._reader is None:
            self._reader = self._source.stream_reader()
        with self._hosted.calling(f"commit() failed for offset {end}"):
            self._reader.commit(end)

    def finish(self, final: SourceSnapshot | None, incarnation: int) -> None:
        """See ``SourceCommitter``: the last commit.

        Raises:
            UserCodeError: it failed.
        """
        if final is not None:
            at_the_end(self._hosted.name, lambda: self.retain([final]))

    def close(self) -> None:
        """See ``SourceCommitter``: such a reader knows no end."""


class SimpleReader:
    """Reads the stream.

    Args:
        source: whose.
        at: the position: how many reads there were, the offset of the one that goes on, and where in it.
    """

    def __init__(self, source: SimpleDataSource, at: Mapping[str, Json]) -> None:
        self._source, self._hosted = source, source.hosted
        self._user: Any = None
        self._range: int = at["range"]
        self._start: Json = at["start"]
        self._again: Mapping[str, Json] | None = at if at.get("rows") else None
        self._end: Json = None
        self._rows: DirectRows | RowsToCome | None = None
        self._nothing = False
        self._look_s = 0.0
        self.exhausted = False

    @property
    def origin(self) -> str:
        """See ``SplitReader``."""
        return f"{self._hosted.name}, from offset {self._start}"

    @property
    def position(self) -> Json:
        """See ``SplitReader``."""
        within = self._again if self._rows is None else self._rows.position
        at = {"range": self._range, "start": self._start}
        if within is None or not within["rows"]:
            return at
        told = {name: within[name] for name in ("rows", "digest") if name in within}
        return {**at, **told, **({"end": self._end_of_rows} if "digest" in within else {})}

    @property
    def _end_of_rows(self) -> Json:
        return self._again["end"] if self._again is not None else self._end

    def read(self, max_rows: int) -> pa.RecordBatch | None:
        """See ``SplitReader``.

        Raises:
            UserCodeError: the user's code failed, or gives other rows than before.
            CorruptSnapshotError: what was made durable is damaged.
        """
        if self._rows is None:
            if self.exhausted or time.monotonic() < self._look_s:
                return None
            self._rows = self._begin()
        rows = self._rows
        batch = rows.read(max_rows)
        if isinstance(rows, RowsToCome):
            self._nothing = rows.nothing
        if batch is None and (rows.ended or self._nothing):
            self._next(rows)
        return batch

    def _next(self, rows: DirectRows | RowsToCome) -> None:
        rows.close()
        end = rows.end if isinstance(rows, RowsToCome) else self._end_of_rows
        self._rows = self._again = None
        if self._nothing:
            self._nothing = False
            self._look_s = time.monotonic() + self._source.discover_interval_ms / 1000
            self.exhausted = self._source.bounded
            return
        self._range, self._start = self._range + 1, end

    def _begin(self) -> DirectRows | RowsToCome:
        if self._user is None:
            self._user = self._source.stream_reader()
            if self._source.bounded:
                with self._hosted.calling("prepareForTriggerAvailableNow() failed"):
                    spark_api.prepare_to_end(self._user)
        what, again, struct = f"what follows offset {self._start}", self._again, self._source.struct
        if self._source.repeats:
            return DirectRows(self._hosted, self._begin_direct, struct, what, again, promised=True)
        store, folder = self._source.log.store, folder_of(self._range)
        staging = Staging(
            store, folder, "rows-00000", self._hosted, self._begin_read, struct, what, begun=again is not None
        )
        return RowsToCome(staging, store, folder, again)

    def _begin_read(self) -> tuple[Iterator[Any], Json] | None:
        """In the thread that reads: rows, and the offset behind them; ``None``: there is nothing."""
        rows, told = self._user.read(self._start)
        end, rows = offset_of(told), iter(rows)
        if end != self._start:
            return rows, end
        if next(rows, None) is not None:
            raise DataError(f"read() gives rows behind offset {end}, and the same offset as their end")
        return None

    def _begin_direct(self) -> Iterator[Any]:
        if self._again is not None:
            return self._user.readBetweenOffsets(self._start, self._again["end"])
        found = self._begin_read()
        if found is None:
            self._nothing = True
            return iter(())
        rows, self._end = found
        return rows

    def close(self) -> None:
        """Stop reading."""
        if self._rows is not None:
            self._rows.close()
