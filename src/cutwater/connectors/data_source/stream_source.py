"""A stream reader as a source: its ranges are planned in the driver, its partitions are read in the workers.

The driver asks for the newest offset again and again, and writes each range down with its partitions (``range_log``).
Only then workers can read it, whoever dies when.  Partition *i* of every range belongs to split ``i % splits``, and a
split is read in the order of the ranges: what a source gives in order stays in order, and a snapshot is as small after
a million ranges as after one.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pyarrow as pa

from cutwater.connectors.base import Json, SourceContext, SourceSnapshot, Split
from cutwater.connectors.data_source import spark_api
from cutwater.connectors.data_source.hosted import Hosted, pickled_by
from cutwater.connectors.data_source.partitions import DirectRows, Rows, RowsToCome, Staging
from cutwater.connectors.data_source.range_log import Plan, Range, folder_of
from cutwater.connectors.data_source.staged_source import Reached, StagedSource, at_the_end, offset_of
from cutwater.errors import DataError

_AHEAD = 16
"""At most so many ranges are planned that not all splits have come to."""
_LOOK_S, _TELL_S = 0.01, 1.0
"""How often a reader looks whether its next range is planned, and says where it is if it is not."""


class StreamDataSource(StagedSource):
    """What ``DataSource.streamReader`` gives.

    Args:
        hosted, schema, repeats, rate, discover_interval_ms: as of ``StagedSource``.
        until: ``"latest"``: end at the newest offset of the first start; ``None``: never.
        splits: at most so many, which is how many subtasks can read at once.
    """

    interleave = True

    def __init__(
        self,
        hosted: Hosted,
        schema: object,
        *,
        repeats: bool,
        rate: float | None,
        discover_interval_ms: float,
        until: Literal["latest"] | None,
        splits: int,
    ) -> None:
        super().__init__(hosted, schema, repeats=repeats, rate=rate, discover_interval_ms=discover_interval_ms)
        self._until, self._max_splits = until, splits
        self._driver: _Planner | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_driver": None}

    @property
    def bounded(self) -> bool:
        """It ends at the newest offset of its first start."""
        return self._until is not None

    def stream_reader(self) -> Any:
        """A reader of the user's."""
        with self.hosted.calling("streamReader() failed"):
            return self.hosted.made().streamReader(self.struct)

    # ------------------------------------------------------------------------------------------------- in the driver

    def planned(self) -> Plan:
        """Where the stream begins."""
        reader = self.stream_reader()
        with self.hosted.calling("initialOffset() failed"):
            return Plan(uuid.uuid4().hex, start=offset_of(reader.initialOffset()))

    @property
    def driver(self) -> _Planner:
        """Plans, in the driver."""
        if self._driver is None:
            self._driver = _Planner(self, self._max_splits)
        return self._driver

    def discover(self) -> list[Split]:
        """Plan what is new; the splits that have something to read.

        Raises:
            UserCodeError: the user's code failed.
        """
        first = self.driver.plan_all() if self.bounded else self.driver.plan_next()
        return [Split(str(n), {"plan": self.plan.id, "first": number}) for n, number in first.items()]

    def stop_planning(self) -> None:
        """The user's reader is not needed any more, if there is one."""
        if self._driver is not None:
            self._driver.stop()

    def committer(self, job_uid: str, step: str) -> _Committer | None:
        """See ``SourceHooks.committer``; none of a fork, whose leader needs what the fork does not."""
        return _Committer(self) if self._own else None

    # -------------------------------------------------------------------------------------------------- in a worker

    def open(self, split: Split, position: Json | None, ctx: SourceContext) -> StreamReader:
        """A reader of a split.

        Raises:
            DataError: it is another plan's, or its ranges are gone.
        """
        self.check_plan(split.data)
        at = {"range": split.data["first"], "part": 0} if position is None else position
        if self.log.find(at["range"]) is None and any(number > at["range"] for number in self.log.numbers()):
            raise DataError(
                f"range {at['range']} of {self.hosted.name} is gone: ranges are kept for as long as a retained "
                "checkpoint needs them",
                hint="Restore a newer snapshot, or begin anew under another job name.",
            )
        return StreamReader(self, int(split.id), self._max_splits, at)


class _Planner:
    """The driver's part.  For the thread that looks for splits, and that of the committer: one at a time.

    Args:
        source: whose.
        max_splits: as of ``StreamDataSource``.
    """

    def __init__(self, source: StreamDataSource, max_splits: int) -> None:
        self._source, self._hosted, self._log = source, source.hosted, source.log
        self._reader = source.stream_reader()
        self._max_splits = max_splits
        self._lock = threading.Lock()
        """Held for whatever asks the user's reader, which is one for both."""
        self._first: dict[int, int] = {}
        """By split: the first range in which it has something to read."""
        self._done = 0
        """The reader knows that all ranges before it are read for good."""
        self._stopped = False
        self._last: Range | None = None
        for number in self._log.numbers():
            self._see(self._log.find(number))

    def _see(self, found: Range | None) -> None:
        assert found is not None
        self._last = found
        for n in range(min(len(found.partitions), self._max_splits)):
            self._first.setdefault(n, found.number)

    @property
    def _end(self) -> Json:
        return self._source.plan.start if self._last is None else self._last.end

    def plan_next(self) -> dict[int, int]:
        """Write the next range down, if there is one and readers are not far behind.

        Returns the splits that have had something to read, and the first range in which they have.
        """
        with self._lock:
            if not self._stopped and not self._is_far_ahead():
                start = self._end
                end = self._latest(start, everything=False)
                if end != start:
                    self._append(start, end, last=False)
            return dict(self._first)

    def plan_all(self) -> dict[int, int]:
        """Write down all that there is to read up to now, which is where the stream ends; later it is as it is.

        Returns what ``plan_next`` does.
        """
        with self._lock:
            if self._last is None or not self._last.last:
                self._plan_all()
            return dict(self._first)

    def _plan_all(self) -> None:
        with self._hosted.calling("prepareForTriggerAvailableNow() failed"):
            in_parts = spark_api.prepare_to_end(self._reader)
        while in_parts:
            start = self._end
            end = self._latest(start, everything=False)
            if end == start:
                break
            self._append(start, end, last=False)
        start = self._end
        self._append(start, start if in_parts else self._latest(start, everything=True), last=True)

    def _latest(self, start: Json, *, everything: bool) -> Json:
        with self._hosted.calling(f"latestOffset() failed, behind offset {start}"):
            return offset_of(spark_api.latest_offset(self._reader, start, everything=everything))

    def _append(self, start: Json, end: Json, *, last: bool) -> None:
        pickled: list[str] = []
        if end != start:
            what = f"offsets {start} to {end}"
            with self._hosted.calling(f"partitions() failed for {what}"):
                partitions = spark_api.partitions_of(self._reader.partitions(start, end))
            pickled = [
                pickled_by(self._hosted, each, f"partition {n} of {what}, {each!r},")
                for n, each in enumerate(partitions)
            ]
        number = 0 if self._last is None else self._last.number + 1
        self._see(self._log.append(Range(number, start, end, pickled, last)))

    def _is_far_ahead(self) -> bool:
        if self._last is None:
            return False
        planned = self._last.number + 1
        if planned - self._done < _AHEAD:
            return False
        at = [self._log.told(str(n)) or first for n, first in self._first.items()]
        return planned - min(at, default=0) >= _AHEAD

    # --------------------------------------------------------------------------------------------------- what is done

    def retain(self, retained: Sequence[SourceSnapshot]) -> None:
        """Tell the reader what is read for good, and remove what no checkpoint needs any more.

        Raises:
            UserCodeError: the user's ``commit`` failed.
        """
        with self._lock:
            reached = Reached.of([self._range_of(each) for each in retained], repeats=self._source.repeats)
            if reached.done > self._done and (found := self._log.find(reached.done - 1)) is not None:
                with self._hosted.calling(f"commit() failed for offset {found.end}"):
                    self._reader.commit(found.end)
                self._done = reached.done
            if self._last is not None:  # which tells where the next one begins
                self._log.remove_below(min(reached.needed, self._last.number))

    def _range_of(self, snapshot: SourceSnapshot) -> int:
        """The first that it reads on from."""
        ranges = {str(n): first for n, first in self._first.items()}
        ranges |= {split: at["range"] for split, at in snapshot.positions.items() if at is not None}
        return min(ranges.values(), default=0)

    def stop(self) -> None:
        """Tell the reader that it is not needed any more."""
        with self._lock:
            if not self._stopped:
                self._stopped = True
                with self._hosted.calling("stop() failed"):
                    self._reader.stop()


class _Committer:
    """See ``SourceCommitter``: shares the user's reader with the planner.

    Args:
        source: whose, the driver's copy.
    """

    def __init__(self, source: StreamDataSource) -> None:
        self._source = source

    def settle(self, retained: Sequence[SourceSnapshot], incarnation: int) -> None:
        """See ``SourceCommitter``: ranges are the job's, whoever reads them."""

    def retain(self, retained: Sequence[SourceSnapshot]) -> None:
        """See ``SourceCommitter``.

        Raises:
            UserCodeError: the user's ``commit`` failed.
        """
        self._source.driver.retain(retained)

    def finish(self, final: SourceSnapshot | None, incarnation: int) -> None:
        """See ``SourceCommitter``: the last commit.

        Raises:
            UserCodeError: it failed.
        """
        if final is not None:
            at_the_end(self._source.hosted.name, lambda: self._source.driver.retain([final]))

    def close(self) -> None:
        """See ``SourceCommitter``: the reader's ``stop``.

        Raises:
            UserCodeError: it failed.
        """
        at_the_end(self._source.hosted.name, self._source.stop_planning)


class StreamReader:
    """Reads a split: its partitions of one range after the other.

    Args:
        source: whose.
        split: number of the split.
        splits: at most so many are there.
        at: the position.
    """

    def __init__(self, source: StreamDataSource, split: int, splits: int, at: Mapping[str, Json]) -> None:
        self._source, self._log, self._split, self._splits = source, source.log, split, splits
        self._reader: Any = None
        self._range: int = at["range"]
        self._part: int = at["part"]
        self._within = {name: value for name, value in at.items() if name in ("rows", "digest")} or None
        self._rows: Rows | None = None
        self._look_s = self._tell_s = 0.0
        self.exhausted = False
        self.origin = source.hosted.name

    @property
    def position(self) -> Json:
        """Range, which of the split's partitions in it, and the rows of that one that were read."""
        within = self._within if self._rows is None else self._rows.position
        return {"range": self._range, "part": self._part, **(within or {})}

    def read(self, max_rows: int) -> pa.RecordBatch | None:
        """See ``SplitReader``.

        Raises:
            UserCodeError: the user's code failed, or gives other rows than before.
            CorruptSnapshotError: what was planned or made durable is damaged.
        """
        while not self.exhausted:
            if self._rows is None and not self._begin():
                return None
            if self._rows is None:
                continue
            batch = self._rows.read(max_rows)
            if batch is not None or not self._rows.ended:
                return batch
            self._rows.close()
            self._rows, self._within = None, None
            self._part += 1
        return None

    def _begin(self) -> bool:
        """Open the next partition, or go on to the next range; ``False``: there is none yet."""
        found = self._planned()
        if found is None:
            return False
        mine = range(self._split, len(found.partitions), self._splits)
        if self._part < len(mine):
            self._rows = self._open(found, mine[self._part])
        else:
            self._range, self._part = self._range + 1, 0
            self.exhausted = found.last
        return True

    def _planned(self) -> Range | None:
        now_s = time.monotonic()
        if now_s < self._look_s:
            return None
        found = self._log.find(self._range)
        if found is None:
            self._look_s = now_s + _LOOK_S
        if found is None and now_s >= self._tell_s:
            self._log.tell(str(self._split), self._range)
            self._tell_s = now_s + _TELL_S
        return found

    def _open(self, found: Range, number: int) -> Rows:
        hosted, struct = self._source.hosted, self._source.struct
        what = f"partition {number} of offsets {found.start} to {found.end}"
        if self._reader is None:
            self._reader = self._source.stream_reader()
        reader = self._reader
        with hosted.calling(f"{what} cannot be unpickled"):
            partition = spark_api.unpickled(found.partitions[number])
        self.origin = f"{hosted.name}, {what}"
        begin = lambda: reader.read(partition)  # noqa: E731
        if self._source.repeats:
            return DirectRows(hosted, begin, struct, what, self._within, promised=True)
        store, folder = self._log.store, folder_of(found.number)
        with_end = lambda: (begin(), None)  # noqa: E731
        begun = bool(self._within and self._within["rows"])
        staging = Staging(store, folder, f"rows-{number:05}", hosted, with_end, struct, what, begun=begun)
        return RowsToCome(staging, store, folder, self._within)

    def close(self) -> None:
        """Stop reading."""
        if self._rows is not None:
            self._rows.close()
