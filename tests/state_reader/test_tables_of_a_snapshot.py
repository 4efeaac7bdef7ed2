"""Tables of a snapshot: what a manifest tells of them, and what older manifests, which did not, let one know."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pyarrow as pa
import pytest

import cutwater as cw
from cutwater.operators.window.kinds import Period, SessionWindow, SlidingWindow, TumblingWindow, Window
from cutwater.plan.compatibility import step_records
from cutwater.plan.planner import make_plan
from cutwater.state_reader.layout import TableLayout, layouts
from cutwater.storage.snapshot.manifest import Entry, Manifest, StepRecord

SCHEMA = "k string, t timestamp, v long"
HOUR_US = 3_600_000_000


class Logic(cw.ProcessFunction):
    watermark = cw.ValueState("long")
    seen = cw.OperatorListState("long")

    def process(self, row: Any, ctx: Any) -> Iterator[dict[str, Any]]:
        return iter(())


async def ask(row: dict[str, Any]) -> dict[str, Any]:
    return row


def flow() -> cw.Dataflow:
    made = cw.Dataflow("job")
    rows = made.read("in", cw.memory([], schema=SCHEMA), event_time="t")
    other = made.read("other", cw.memory([], schema="name string, u timestamp, w long"), event_time="u")
    keyed, named = rows.key_by("k"), other.key_by("name")
    ends = [
        keyed.aggregate("totals", n=cw.count(), mean=cw.mean("v")),
        keyed.window("a", cw.tumbling("1h")).aggregate("hours", n=cw.count()),
        keyed.window("b", cw.sliding("1h", "20m", offset="5m")).aggregate("sliding", n=cw.count()),
        keyed.window("c", cw.session("1m")).aggregate("sessions", n=cw.count()),
        keyed.window("d", cw.global_window()).aggregate("all", n=cw.count()),
        keyed.deduplicate("once", keep="first"),
        keyed.top("best", 3, by="v"),
        keyed.join("near", named, within=("-1h", "1h")),
        keyed.join("met", named, window=cw.tumbling("1h")),
        keyed.join_as_of("then", named),
        keyed.join_tables("both", named, keep="last"),
        keyed.process("logic", Logic(), "v long"),
        rows.map_async("asked", ask, SCHEMA),
    ]
    for number, end in enumerate(ends):
        end.write(f"out-{number}", cw.discard())
    return made


SEGMENTS = {
    "totals": ["agg"],
    "hours": ["window", "watermark"],
    "sliding": ["window", "slice", "watermark"],
    "sessions": ["window", "watermark"],
    "all": ["window", "watermark"],
    "once": ["table"],
    "best": ["table"],
    "near": ["left", "right", "watermark"],
    "met": ["left", "right", "watermark"],
    "then": ["left", "right", "watermark"],
    "both": ["table"],
    "logic": ["watermark", "seen", "__watermark", "__event_timers"],
    "asked": ["in flight"],
}


def stored(step: StepRecord, segment: str) -> pa.Schema:
    """Columns of a segment, as far as they matter here."""
    unkeyed = {"__subtask": pa.int32(), "__position": pa.int64(), "__value": pa.int64()}
    if segment == "seen":
        return pa.schema(unkeyed)
    window = {"window_start": pa.timestamp("us")} if segment in ("window", "slice") and step.id != "all" else {}
    return pa.schema({"__key_group": pa.uint16(), **dict.fromkeys(step.keys, pa.string()), **window})


def tables(steps: list[StepRecord], *, rows: bool) -> list[TableLayout]:
    """The tables of a snapshot with these steps, with segments or without any, as it comes back from its bytes."""
    entries = [
        Entry(step.id, 0, segment, "base", 1, 10, "")
        for step in steps
        for segment in (SEGMENTS.get(step.id, ()) if rows else ())
    ]
    manifest = Manifest("job", "uid", 1, 1, "aligned", 16, 1, 0, 1, steps, [], entries)
    read = msgspec.json.decode(msgspec.json.encode(manifest), type=Manifest)
    by_id = {step.id: step for step in steps}
    return layouts(read, lambda entry: stored(by_id[entry.step], entry.name))


@pytest.mark.parametrize("rows", [True, False])
def test_a_manifest_that_does_not_tell_its_tables_has_the_same_ones(rows: bool) -> None:
    steps = step_records(make_plan(flow(), 1, 16))
    older = [msgspec.structs.replace(step, tables=[]) for step in steps]
    told, known = tables(steps, rows=rows), tables(older, rows=rows)
    without = [msgspec.structs.replace(step, tables=[]) for step in steps]
    by_id = {step.id: step for step in without}

    def plain(table: TableLayout) -> Any:
        assert table.record is not None
        beside = [other.name for other in table.beside]
        return (table.step, table.name, table.shape, table.stored, table.segments, table.identity, table.main,
                table.keys, table.period, beside, table.partitioning, by_id[table.record.id])  # fmt: skip

    assert [plain(t) for t in told] == [plain(t) for t in known]
    shapes = {f"{t.step}.{t.name}": t.shape.value for t in told}
    if rows:
        assert shapes["sliding.slices"] == shapes["hours.windows"] == "aggregates"
        assert (shapes["logic.watermark"], shapes["logic.watermarks"], shapes["logic.timers"]) == (
            "object",
            "watermarks",
            "timers",
        )
        assert (shapes["logic.seen"], shapes["asked.requests"], shapes["best.table"]) == ("elements", "requests", "top")
    right = next(t for t in told if (t.step, t.name) == ("near", "right"))
    assert (right.shape.value, right.keys) == ("rows", ("name",))
    assert next(t for t in told if t.step == "sliding").period == (HOUR_US, HOUR_US // 3, 300_000_000)


@pytest.mark.parametrize(
    "window",
    [
        TumblingWindow(HOUR_US),
        TumblingWindow(7, -3, processing_time=True),
        SlidingWindow(HOUR_US, 90_000_000, -1),
        SlidingWindow(1_500_000, 1, processing_time=True),
        SessionWindow(5),
    ],
    ids=str,
)
def test_the_text_of_windows_in_an_older_manifest_says_where_they_lie(window: Window) -> None:
    assert Period.parse(str(window)) == window.period
