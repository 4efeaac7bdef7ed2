"""Files read by several subtasks into one keyed window, in one thread: every order of reading and delivery by chance.

Real are the files, the source, its runners, how splits are dealt, the time of the step, the merger of watermarks and
the operator of windows.  Channels and the control connection are queues; chance says which of them moves next.
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pyarrow as pa

from cutwater.connectors.files.source import FileSource
from cutwater.data.time import MAX_WATERMARK, MIN_WATERMARK
from cutwater.operators.aggregate.accumulators import Aggregate
from cutwater.operators.base import Outputs
from cutwater.operators.stateless.expressions import ExpressionSpec, Filter
from cutwater.operators.window.kinds import Window
from cutwater.operators.window.spec import WindowAggregateSpec
from cutwater.plan.graph import Step, StreamType
from cutwater.protocol.subtask.source_times import StepTimes, TellTime
from cutwater.protocol.subtask.watermarks import InputTime, WatermarkMerger, merged_time
from cutwater.runtime.chains.source_runner import SourceRunner
from cutwater.runtime.control.messages import SplitAssignment
from cutwater.runtime.driver.splits import Enumerator
from cutwater.state.segments import Segment
from cutwater.storage.snapshot.manifest import SplitRecord
from subtask_context import Subtask

SECOND = 1_000_000
ZERO = 1_600_000_000 * SECOND
SCHEMA = pa.schema([("id", pa.int64()), ("k", pa.int64()), ("t", pa.timestamp("us", "UTC"))])
COUNTS = (Aggregate("n", "count"), Aggregate("ids", "sum", "id"))


@dataclass(frozen=True)
class File:
    """Rows of a file in their order: (id, key, seconds)."""

    name: str
    rows: tuple[tuple[int, int, int], ...]

    def write(self, folder: Path) -> None:
        """By the name's end as Parquet, CSV or JSON lines."""
        ids, keys, seconds = ([row[i] for row in self.rows] for i in range(3))
        times = pl.Series("t", [ZERO + s * SECOND for s in seconds], pl.Int64).cast(pl.Datetime("us", "UTC"))
        frame = pl.DataFrame({"id": pl.Series(ids, dtype=pl.Int64), "k": pl.Series(keys, dtype=pl.Int64)})
        frame = frame.with_columns(times)
        hidden = folder / f"_{self.name}"
        text = frame.with_columns(pl.col("t").dt.strftime("%Y-%m-%dT%H:%M:%S%.6fZ"))
        if self.name.endswith("parquet"):
            frame.write_parquet(hidden, row_group_size=7)
        elif self.name.endswith("csv"):
            text.write_csv(hidden)
        else:
            text.write_ndjson(hidden)
        hidden.rename(folder / self.name)


@dataclass
class Snapshot:
    """What a checkpoint holds."""

    splits: dict[int, list[bytes]]
    told: list[InputTime]
    state: list[Segment]
    outputs: int


@dataclass
class World:
    """One attempt.

    Args:
        source: the files.
        parallelism: how many subtasks read.
        window, bound_s: what is computed.
        chance: draws every order.
        outputs: what came out before.
        restored: what it goes on from.
    """

    source: FileSource
    parallelism: int
    window: Window
    bound_s: int
    chance: random.Random
    outputs: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    restored: Snapshot | None = None
    idle_timeout_s: float | None = None
    kept: pl.Expr | None = None
    """A filter between the source and the window."""
    now_s: float = 0.0

    def __post_init__(self) -> None:
        options: dict[str, object] = {"event_time": "t", "out_of_order_us": self.bound_s * SECOND}
        if self.idle_timeout_s is not None:
            options["idle_timeout_ms"] = self.idle_timeout_s * 1000
        self.step = Step("in", "read", self.source, (), (StreamType(SCHEMA, "t"),), options=options)
        self.filter = None if self.kept is None else ExpressionSpec(SCHEMA, (Filter(self.kept),))
        filters = () if self.filter is None else self.filter.row_filters
        self.readers = [SourceRunner(self.step, i, filters=filters) for i in range(self.parallelism)]
        self.rows: list[deque[tuple[Outputs, int, int]]] = [deque() for _ in self.readers]
        self.ended = [False] * self.parallelism
        self.to_readers: list[deque[Any]] = [deque() for _ in self.readers]
        self.to_coordinator: deque[tuple[int, Any]] = deque()
        self.merger = WatermarkMerger(range(self.parallelism))
        spec = WindowAggregateSpec(SCHEMA, ("k",), "t", self.window, COUNTS, 0, None, False)
        self.operator = spec.build()
        self.operator.open(Subtask(0, 1))
        self.enumerator = Enumerator("in", self.source, self.parallelism)
        self.times = StepTimes(self.parallelism)
        self.no_more = False
        self._begin()

    def _begin(self) -> None:
        found = self.source.discover()
        order = {split.id: place for place, split in enumerate(found)}
        old = self.restored
        records = (
            {s: [msgspec.json.decode(r, type=SplitRecord) for r in rs] for s, rs in old.splits.items()} if old else {}
        )
        dealt = self.enumerator.restore(records, len(records), order)
        for subtask, fresh in enumerate(self.enumerator.assign(found)):
            dealt[subtask] += fresh
        self.no_more = self.source.bounded
        for i, reader in enumerate(self.readers):
            reader.assign(dealt[i], self.no_more)
            self.times.dealt(i, self.enumerator.dealt(i))
        if old is None:
            return
        self.operator.restore(old.state)
        common = merged_time(old.told)
        same = len(old.told) == self.parallelism
        told = [t.watermark if same else common.watermark for t in (old.told if same else [common] * self.parallelism)]
        for reader, watermark in zip(self.readers, told, strict=True):
            reader.restore_watermark(watermark)
        self.merger.restore({i: InputTime(t) for i, t in enumerate(told)}, common.watermark)

    # ------------------------------------------------------------------------------------------------- what happens

    def act(self) -> None:
        """Something, by chance."""
        self.now_s += 0.005
        choice = self.chance.randrange(4)
        place = self.chance.randrange(self.parallelism)
        if choice == 0:
            self.read(place)
        elif choice == 1:
            self.deliver(place)
        elif choice == 2:
            self.hear(place)
        else:
            self.report(place)
            self.coordinate()

    def read(self, place: int) -> None:
        reader = self.readers[place]
        wait = reader.wait_s(self.now_s)
        if wait is not None and wait <= 0:
            self._sent(place, reader.read(self.chance.choice([1, 2, 5, 100]), self.now_s))
        elif reader.exhausted and not self.ended[place]:
            self.ended[place] = True
            self.rows[place].append(([], MAX_WATERMARK, MIN_WATERMARK))

    def _sent(self, place: int, got: Any) -> None:
        if got is not None:
            self.rows[place].append((got.outputs, got.watermark, got.late_before))

    def deliver(self, place: int) -> None:
        if not self.rows[place]:
            return
        outputs, watermark, late_before = self.rows[place].popleft()
        self.operator.late_before = late_before
        for _, batch in outputs:
            for _, kept in [(0, batch)] if self.filter is None else self.filter.build().process(0, batch):
                self._out(self.operator.process(0, kept))
        risen = self.merger.update(place, watermark, False)
        if risen is not None:
            self._out(self.operator.on_watermark(risen))
            while self.operator.pending:
                self._out(self.operator.resume())

    def _out(self, outputs: Outputs) -> None:
        self.outputs += [(number, row) for number, batch in outputs for row in batch.to_pylist()]

    def report(self, place: int) -> None:
        time = self.readers[place].report(self.now_s)
        if time is not None:
            self.to_coordinator.append((place, time))

    def coordinate(self) -> None:
        if self.to_coordinator:
            for tell in self.times.reported(*self.to_coordinator.popleft()):
                self.to_readers[tell.subtask].append(tell)

    def discover(self) -> None:
        """The coordinator looks for new files; their readers hear of it some time."""
        if self.no_more:
            return
        ended = self.source.ended
        for place, fresh in enumerate(self.enumerator.assign(self.source.discover())):
            self.times.dealt(place, self.enumerator.dealt(place))
            if fresh or ended:
                self.to_readers[place].append((fresh, ended))
        self.no_more = ended

    def hear(self, place: int) -> None:
        if not self.to_readers[place]:
            return
        message: TellTime | tuple[list[SplitAssignment], bool] = self.to_readers[place].popleft()
        if isinstance(message, TellTime):
            self.readers[place].hear_step_time(message.watermark, message.idle, message.report)
        else:
            self.readers[place].assign(*message)

    @property
    def done(self) -> bool:
        return all(self.ended) and not any(self.rows)

    @property
    def quiet(self) -> bool:
        """Nothing is left to do until somebody has something new."""
        return not any((*self.rows, *self.to_readers, self.to_coordinator)) and all(
            (wait := reader.wait_s(self.now_s)) is None or wait > 0 for reader in self.readers
        )

    def run(self, actions: int | None = None) -> None:
        """So many actions, or to the end."""
        for _ in range(actions if actions is not None else 1_000_000):
            if self.done:
                return
            self.act()
        assert actions is not None, "it does not end"

    # ---------------------------------------------------------------------------------------------------- snapshots

    def snapshot(self) -> Snapshot:
        """An aligned one: what was read is worked off, everything else is forgotten with the attempt."""
        for place, reader in enumerate(self.readers):
            while reader.queued:
                self._sent(place, reader.read(1, self.now_s))
            while self.rows[place]:
                self.deliver(place)
        splits = {i: [msgspec.json.encode(r) for r in reader.records().splits] for i, reader in enumerate(self.readers)}
        told = [InputTime(MAX_WATERMARK if self.ended[i] else self.watermark(i)) for i in range(self.parallelism)]
        frozen = self.operator.freeze(1)
        return Snapshot(splits, told, list(frozen.segments()), len(self.outputs))

    def watermark(self, place: int) -> int:
        return self.merger.snapshot()[place].watermark

    def restart(self, snapshot: Snapshot, parallelism: int) -> World:
        """The next attempt, with what was committed."""
        for reader in self.readers:
            reader.close()
        return World(
            self.source,
            parallelism,
            self.window,
            self.bound_s,
            self.chance,
            self.outputs[: snapshot.outputs],
            snapshot,
            self.idle_timeout_s,
            self.kept,
        )

    # ------------------------------------------------------------------------------------------------------ results

    @property
    def late(self) -> list[int]:
        """Ids of the late rows."""
        return sorted(row["id"] for number, row in self.outputs if number == 1)

    @property
    def counts(self) -> dict[tuple[int, int, int], tuple[int, int]]:
        """(key, start, end) of windows: rows and sum of their ids."""
        found: dict[tuple[int, int, int], tuple[int, int]] = {}
        for number, row in self.outputs:
            if number == 0:
                start, end = (int(row[name].timestamp()) - ZERO // SECOND for name in ("window_start", "window_end"))
                assert (row["k"], start, end) not in found, "a window came out twice"
                found[row["k"], start, end] = (row["n"], row["ids"])
        return found


def said(files: Sequence[File]) -> str:
    """For the message of a failure."""
    return json.dumps({f.name: f.rows for f in files})
