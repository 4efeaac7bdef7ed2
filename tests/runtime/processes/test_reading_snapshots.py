"""Every kind of state of a real run, read from its snapshot, against plain Python over the rows before the cut."""

from __future__ import annotations

import asyncio
import datetime as dt
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from runtime_world import gated, wait_until

import cutwater as cw

ROWS, KEYS = 6_000, 37


class Remembering(cw.ProcessFunction):
    last = cw.ValueState("long")
    most = cw.ReducingState("long", max)
    recent = cw.ListState("long")
    by_digit = cw.MapState("long", "long")
    leased = cw.ValueState("long", ttl="1d")
    seen = cw.OperatorListState("long")

    def process(self, row: Any, ctx: Any) -> Iterator[dict[str, Any]]:
        value = row["value"]
        self.last.value = value
        self.most.add(-value)
        self.recent.set([*list(self.recent)[-2:], value])
        self.by_digit[value % 10] = value
        self.leased.value = value
        if value % 1000 == 0:
            self.seen.append(value)
        ctx.timers.register_event(10**15 + value)
        ctx.timers.register_processing(4 * 10**12 + value)
        yield {"value": value}

    def on_timer(self, time: int, domain: str, ctx: Any) -> Iterator[dict[str, Any]]:
        return iter(())


async def never(row: dict[str, Any]) -> dict[str, Any]:
    await asyncio.sleep(3600)
    return row


def flow_of_all(folder: Path) -> cw.Dataflow:
    flow = cw.Dataflow("all")
    rows = flow.read("in", gated(folder, ROWS, rate=None, partitions=1), event_time="timestamp")
    rows = rows.with_columns("key", key=pl.col("value") % KEYS, text=pl.col("value").cast(pl.String))
    keyed = rows.key_by("key")
    results = [
        keyed.aggregate(
            "totals",
            n=cw.count(),
            total=cw.sum("value"),
            mean=cw.mean("value"),
            spread=cw.stddev("value"),
            kinds=cw.count_distinct("text"),
            about=cw.approx_count_distinct("text", 0.05),
            least=cw.min("text"),
            newest=cw.last("value"),
        ),
        keyed.window("hours", cw.tumbling("1h")).aggregate("hourly", n=cw.count(), mean=cw.mean("value")),
        keyed.window("slides", cw.sliding("2s", "1s")).aggregate("sliding", n=cw.count(), last=cw.last("value")),
        keyed.window("visits", cw.session("30ms")).aggregate("sessions", n=cw.count(), first=cw.first("value")),
        keyed.top("best", 2, by="value"),
        keyed.deduplicate("once", keep="last"),
        keyed.join(
            "pairs", rows.select("others", "key", "timestamp", other=pl.col("value")).key_by("key"), within=("0s", "1h")
        ),
        keyed.process("logic", Remembering(), "value long"),
        flow.read("few", cw.rate(1000, rows=7)).map_async("ask", never, "value long", timeout="1h"),
    ]
    for number, result in enumerate(results):
        result.write(f"out{number}", cw.discard())
    return flow


class Taken:
    """A snapshot, and the rows before its cut."""

    def __init__(self, address: str) -> None:
        self.snapshot = cw.Snapshot(address)
        (split,) = self.snapshot.table("in").to_pylist()
        self.values = range(int(split["position"]))
        self.by_key: dict[int, list[int]] = defaultdict(list)
        for value in self.values:
            self.by_key[value % KEYS].append(value)

    def rows(self, name: str, *columns: str) -> set[tuple[Any, ...]]:
        """The rows as tuples, each once."""
        found = [tuple(row.values()) for row in self.snapshot.table(name, columns=columns).to_pylist()]
        assert len(found) == len(set(found))
        return set(found)


def at(value: int) -> dt.datetime:
    """Event time of a row: a millisecond each."""
    return dt.datetime(2020, 1, 1, tzinfo=dt.UTC) + dt.timedelta(milliseconds=value)


def test_every_state_of_a_run_is_read_as_what_it_means(start, tmp_path: Path) -> None:
    job = start(flow_of_all(tmp_path), interval="20ms")
    wait_until(lambda: job.status.checkpoints.completed > 3 or not job.is_active, "checkpoints", 120, job=job)
    wait_until(lambda: job.status.rows_read > ROWS / 2 or not job.is_active, "rows", 120, job=job)
    job.stop()
    taken = Taken(f"{tmp_path}/chk/all")
    assert len(taken.values) > ROWS / 2
    check_aggregates(taken)
    check_windows(taken)
    check_rows(taken)
    check_logic(taken)


def check_aggregates(taken: Taken) -> None:
    exact = ("key", "n", "total", "mean", "kinds", "least", "newest")
    assert taken.rows("totals", *exact) == {
        (key, len(v), sum(v), sum(v) / len(v), len(v), min(map(str, v)), v[-1]) for key, v in taken.by_key.items()
    }
    for key, spread, about in taken.rows("totals", "key", "spread", "about"):
        values = taken.by_key[key]
        assert spread == pytest.approx(statistics.stdev(values))
        assert about == pytest.approx(len(values), rel=0.2)
    raw = taken.snapshot.table("totals", raw=True, columns=["key", "mean.sum", "mean.count"]).to_pylist()
    assert {tuple(r.values()) for r in raw} == {(k, float(sum(v)), len(v)) for k, v in taken.by_key.items()}
    owners = taken.rows("totals", "key_group", "subtask", "key")
    assert owners == {(group, group // 64, key) for group, _, key in owners}


def check_windows(taken: Taken) -> None:
    assert taken.rows("hourly", "key", "window_start", "window_end", "window_fired", "n", "mean") == {
        (key, at(0), at(3_600_000), False, len(v), sum(v) / len(v)) for key, v in taken.by_key.items()
    }
    newest = taken.values[-1]
    slices = Counter((value % KEYS, at(value // 1000 * 1000)) for value in taken.values)
    found = {(key, start): n for key, start, n in taken.rows("sliding.slices", "key", "slice_start", "n")}
    assert {s for _, s in found} >= {at(newest // 1000 * 1000)}, "the open slice is there"
    assert found == {place: slices[place] for place in found}
    overlapping: dict[tuple[int, int], list[int]] = defaultdict(list)
    for value in taken.values:
        for begin in (value // 1000 * 1000, value // 1000 * 1000 - 1000):
            if begin + 2000 > newest:
                overlapping[value % KEYS, begin].append(value)
    assert taken.rows("sliding", "key", "window_start", "window_end", "window_fired", "n", "last") == {
        (key, at(begin), at(begin + 2000), False, len(v), v[-1]) for (key, begin), v in overlapping.items()
    }
    # Rows of a key come every 37 ms, beyond the gap: only the sessions of the last 30 ms are open.
    sessions = {(v % KEYS, at(v), at(v + 30), 1, v) for v in taken.values if v + 30 > newest}
    assert taken.rows("sessions", "key", "window_start", "window_end", "n", "first") == sessions
    marks = taken.snapshot.table("hourly.watermarks", columns=["watermark", "ended"]).to_pylist()
    assert marks == [{"watermark": at(newest) - dt.timedelta(microseconds=1), "ended": False}] * 128


def check_rows(taken: Taken) -> None:
    assert taken.rows("best", "rank", "key", "value") == {
        (rank, key, v[-rank]) for key, v in taken.by_key.items() for rank in (1, 2)
    }
    kept = taken.snapshot.table("once", columns=["key", "row"]).to_pylist()
    assert {(r["key"], r["row"]["value"]) for r in kept} == {(k, v[-1]) for k, v in taken.by_key.items()}
    assert taken.rows("pairs.left", "key", "value", "timestamp") == {(v % KEYS, v, at(v)) for v in taken.values}
    assert {(k, o, t) for k, o, t in taken.rows("pairs.right", "key", "other", "timestamp")} <= {
        (v % KEYS, v, at(v)) for v in taken.values
    }
    assert {v for v, _ in taken.rows("ask", "value", "timestamp")} == set(range(7))


def check_logic(taken: Taken) -> None:
    by_key = taken.by_key
    assert taken.rows("logic.last", "key", "value") == {(k, v[-1]) for k, v in by_key.items()}
    assert taken.rows("logic.most", "key", "value") == {(k, -v[0]) for k, v in by_key.items()}
    recent = taken.snapshot.table("logic.recent", columns=["key", "value"]).to_pylist()
    assert {r["key"]: r["value"] for r in recent} == {k: v[-3:] for k, v in by_key.items()}
    digits = taken.snapshot.table("logic.by_digit", columns=["key", "value"]).to_pylist()
    assert {r["key"]: dict(r["value"]) for r in digits} == {k: {n % 10: n for n in v} for k, v in by_key.items()}
    now = dt.datetime.now(dt.UTC)
    for key, value, expires in taken.rows("logic.leased", "key", "value", "expires"):
        assert value == by_key[key][-1]
        assert now < expires < now + dt.timedelta(days=1)
    assert {v for (v,) in taken.rows("logic.seen", "value")} == {v for v in taken.values if v % 1000 == 0}
    epoch = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
    event = {(v % KEYS, "event", epoch + dt.timedelta(microseconds=10**15 + v)) for v in taken.values}
    clock = {(v % KEYS, "processing", epoch + dt.timedelta(milliseconds=4 * 10**12 + v)) for v in taken.values}
    fired = {t for t in event if t[2] <= at(taken.values[-1])}
    assert taken.rows("logic.timers", "key", "domain", "time") == (event - fired) | clock
