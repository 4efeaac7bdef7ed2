"""Windows as the documentation words them, one row at a time in plain Python."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from cutwater.data.time import MAX_WATERMARK, MIN_WATERMARK
from cutwater.operators.aggregate.accumulators import Aggregate
from cutwater.operators.base import Operator, Outputs
from cutwater.operators.window import operator as window_operator
from cutwater.operators.window.kinds import Early, GlobalWindow, SessionWindow, Window
from cutwater.operators.window.spec import WindowAggregateSpec
from cutwater.state import backend
from cutwater.state.disk.rocks import RocksStore
from cutwater.state.table import keyed_segments, multi_row_keys, spill, timed_table
from keyed_world import aggregate, rows_of, same

KINDS = ("count", "sum", "max", "first", "last", "mean")
AGGREGATES = (
    *(Aggregate(f"{kind}_v", kind, "v") for kind in (*KINDS, "min", "variance", "count_distinct")),
    *(
        Aggregate(f"{kind}_s", kind, "s")
        for kind in ("first", "last", "max", "count_distinct", "approx_count_distinct")
    ),
    Aggregate("rows", "count"),
)
"""Over a number and over a text, whose accumulators differ."""
TIME = pa.timestamp("us", "Europe/Berlin")
Row = tuple[int, str, int | None]  # event time, key, value
Result = dict[str, object]


def us(value: object) -> int:
    assert isinstance(value, datetime.datetime)
    delta = value - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC if value.tzinfo else None)
    return delta // datetime.timedelta(microseconds=1)


def text_of(value: int | None) -> str | None:
    return None if value is None else f"number {value}"


def batch_of(rows: Iterable[Row], time: pa.DataType = TIME) -> pa.RecordBatch:
    rows = list(rows)
    return pa.record_batch(
        {
            "t": pa.array([r[0] for r in rows], pa.int64()).cast(time),
            "k": pa.array([r[1] for r in rows], pa.string()),
            "v": pa.array([r[2] for r in rows], pa.int32()),
            "s": pa.array([text_of(r[2]) for r in rows], pa.string()),
        }
    )


def spec_of(
    window: Window,
    lateness: int = 0,
    early: Early | None = None,
    *,
    discarding: bool = False,
    aggregates: tuple[Aggregate, ...] = AGGREGATES[: len(KINDS)],
) -> WindowAggregateSpec:
    return WindowAggregateSpec(batch_of([]).schema, ("k",), "t", window, aggregates, lateness, early, discarding)


@dataclass
class Open:
    """A window of a key."""

    start: int
    end: int
    rows: list[tuple[int, int | None]] = field(default_factory=list)
    """(arrival, value)"""
    shown: int = 0
    """How many of the rows came out already, if they are discarded then."""
    new: int = 0
    fired: bool = False


@dataclass
class Model:
    """One key's windows."""

    spec: WindowAggregateSpec
    key: str
    watermark: int = MIN_WATERMARK
    open: list[Open] = field(default_factory=list)
    late: list[Row] = field(default_factory=list)
    arrived: int = 0

    def borders(self, time: int) -> list[tuple[int, int]]:
        window = self.spec.window
        match window:
            case GlobalWindow():
                return [(0, MAX_WATERMARK + 1)]
            case SessionWindow():
                return [(time, time + window.gap_us)]
            case _:
                assert window.period is not None
                size, every, offset = window.period
                first = offset + (time - offset) // every * every
                return [(s, s + size) for s in range(first, time - size, -every) if s <= time < s + size]

    def row(self, row: Row) -> list[Result]:
        results: list[Result] = []
        places = self.borders(row[0])
        taken = False
        for start, end in places:
            window = self._find(start, end)
            if window is None:
                continue
            taken = True
            window.rows.append((self.arrived, row[2]))
            window.new += 1
            early = self.spec.early
            window.fired = window.end - 1 <= self.watermark
            if window.fired or (early and early.rows and window.new >= early.rows):
                results.append(self._come_out(window))
        self.arrived += 1
        if places and not taken:
            self.late.append(row)
        return results

    def _find(self, start: int, end: int) -> Open | None:
        if isinstance(self.spec.window, SessionWindow):
            hit = [w for w in self.open if w.start <= end and w.end >= start]
            if hit:
                rows = sorted(r for w in hit for r in w.rows[w.shown :])
                merged = Open(min(start, *(w.start for w in hit)), max(end, *(w.end for w in hit)), rows)
                merged.new = sum(w.new for w in hit)
                self.open = [w for w in self.open if w not in hit] + [merged]
                return merged
        else:
            hit = [w for w in self.open if w.start == start]
            if hit:
                return hit[0]
        if end - 1 + self.spec.allowed_lateness_us <= self.watermark:
            return None
        self.open.append(Open(start, end))
        return self.open[-1]

    def advance(self, watermark: int) -> list[Result]:
        if watermark <= self.watermark:
            return []
        before, self.watermark = self.watermark, watermark
        results: list[Result] = []
        for window in sorted(self.open, key=lambda w: w.end):
            if not window.fired and window.end - 1 <= watermark:
                window.fired = True
                if window.new or not (self.spec.discarding and self.spec.early):
                    results.append(self._come_out(window))
        reach = self.spec.allowed_lateness_us - 1
        self.open = [w for w in self.open if w.end + reach > watermark]
        early = self.spec.early
        if early and early.event_time_us and before // early.event_time_us < watermark // early.event_time_us:
            changed = [w for w in self.open if w.new and not w.fired]
            results += [self._come_out(w) for w in sorted(changed, key=lambda w: w.end)]
        return results

    def _come_out(self, window: Open) -> Result:
        values = [v for _, v in window.rows[window.shown :]]
        window.new = 0
        if self.spec.discarding:
            window.shown = len(window.rows)
        row: Result = {"k": self.key}
        if not isinstance(self.spec.window, GlobalWindow):
            row |= {"window_start": window.start, "window_end": window.end}
        return row | {a.name: self._aggregate(a, values) for a in self.spec.aggregates}

    def _aggregate(self, call: Aggregate, values: list[int | None]) -> object:
        if call.column is None:
            return len(values)
        return aggregate(call.kind, [text_of(v) for v in values] if call.column == "s" else list(values))


def plain(outputs: Outputs) -> list[Result]:
    """Results with times as numbers."""
    rows = rows_of(outputs)
    for row in rows:
        if "window_start" in row:
            row["window_start"], row["window_end"] = us(row["window_start"]), us(row["window_end"])
    return rows


def late_rows(outputs: Outputs) -> list[Row]:
    return [(us(row["t"]), row["k"], row["v"]) for row in rows_of(outputs, 1)]  # type: ignore[misc]


def advance(operator: Operator, watermark: int) -> Outputs:
    outputs = operator.on_watermark(watermark)
    while operator.pending:
        outputs = outputs + operator.resume()
    return outputs


def by_key(results: list[Result]) -> dict[object, list[Result]]:
    found: dict[object, list[Result]] = {}
    for result in results:
        found.setdefault(result["k"], []).append(result)
    return found


def in_order(results: list[Result]) -> list[Result]:
    """What comes out together: later borders after earlier ones."""
    return sorted(results, key=lambda r: (r["k"], r.get("window_end", 0), r.get("window_start", 0)))  # type: ignore[arg-type]


def assert_same(got: list[Result], expected: list[Result]) -> None:
    """Equal, key by key; the order of one key's results counts, except among those of one row or one watermark."""
    ours, theirs = by_key(got), by_key(expected)
    assert ours.keys() == theirs.keys(), (got, expected)
    for key in ours:
        assert len(ours[key]) == len(theirs[key]), (ours[key], theirs[key])
        for a, b in zip(ours[key], theirs[key], strict=True):
            assert list(a) == list(b)
            assert all(same(a[name], b[name]) for name in b), (a, b)


def hardly_any_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on windows lie on disk, but for a few keys; everything moves one by one."""
    pytest.importorskip("rocksdict")
    for module, name in (
        (spill, "_PART_ROWS"),
        (timed_table, "PART_ROWS"),
        (multi_row_keys, "PART_KEYS"),
        (keyed_segments, "_FEW_ROWS"),
    ):
        monkeypatch.setattr(module, name, 1)
    store = RocksStore(1 << 20)
    request.addfinalizer(store.close)
    monkeypatch.setattr(backend, "open_store", lambda memory_bytes: store)
    made = backend.StateBackend

    def scarce(ctx: Any, tables: int) -> backend.StateBackend:
        memory = SimpleNamespace(key_groups=ctx.key_groups, max_parallelism=ctx.max_parallelism, state_memory_bytes=0)
        return made(memory, tables)

    monkeypatch.setattr(window_operator, "StateBackend", scarce)
