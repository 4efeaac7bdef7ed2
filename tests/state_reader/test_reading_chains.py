"""Chains of bases, deltas and deletions read as one table, beside a dict that had the same rows."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming import StatefulProcessor
from snapshot_world import Running

import cutwater as cw
from cutwater.errors import ConfigError
from cutwater.state_reader import reader
from cutwater.storage.snapshot.channel_log import ChannelLog, LogItem, add_log
from cutwater.storage.snapshot.manifest import SplitRecord, SubtaskRecord
from cutwater.storage.snapshot.segment_files import SnapshotWriter

SCHEMA = "k string, v long"


class Kept(cw.ProcessFunction):
    latest = cw.ValueState("long")
    some = cw.MapState("string", "long")

    def process(self, row: Any, ctx: Any) -> Iterator[dict[str, Any]]:
        if row["v"] % 5 == 0:
            self.latest.clear()
        else:
            self.latest.value = row["v"]
        self.some[str(row["v"] % 3)] = row["v"]
        return iter(())


def flow() -> cw.Dataflow:
    made = cw.Dataflow("job")
    keyed = made.read("in", cw.memory([], schema=SCHEMA)).key_by("k")
    keyed.aggregate("totals", n=cw.count(), mean=cw.mean("v"), most=cw.max("v")).write("a", cw.discard())
    keyed.process("logic", Kept(), "v long").write("b", cw.discard())
    return made


def batch(rows: list[tuple[str, int]]) -> pa.RecordBatch:
    return pa.record_batch({"k": [k for k, _ in rows], "v": pa.array([v for _, v in rows], pa.int64())})


class Model:
    """The same rows in dicts."""

    def __init__(self) -> None:
        self.rows: dict[str, list[int]] = {}

    def feed(self, rows: list[tuple[str, int]]) -> None:
        for k, v in rows:
            self.rows.setdefault(k, []).append(v)

    @property
    def totals(self) -> dict[str, tuple[int, float, int]]:
        return {k: (len(v), sum(v) / len(v), max(v)) for k, v in self.rows.items()}

    @property
    def latest(self) -> dict[str, int]:
        return {k: v[-1] for k, v in self.rows.items() if v[-1] % 5}

    @property
    def some(self) -> dict[str, dict[str, int]]:
        return {k: {str(v % 3): v for v in values} for k, values in self.rows.items()}


def read(address: str) -> tuple[Any, Any, Any]:
    snapshot = cw.Snapshot(address)
    totals = snapshot.table("totals", columns=["k", "n", "mean", "most"]).to_pylist()
    latest = snapshot.table("logic.latest").to_pylist()
    some = snapshot.table("logic.some").to_pylist()
    assert len({r["k"] for r in totals}) == len(totals)
    return (
        {r["k"]: (r["n"], r["mean"], r["most"]) for r in totals},
        {r["k"]: r["value"] for r in latest},
        {r["k"]: dict(r["value"]) for r in some},
    )


def random_run(folder: Path, dice: random.Random) -> dict[str, tuple[Any, Any, Any]]:
    """What each of some checkpoints should hold."""
    running, model = Running(flow(), folder), Model()
    expected: dict[str, tuple[Any, Any, Any]] = {}
    for _ in range(8):
        for _ in range(dice.randint(0, 3)):
            most = 300 if dice.random() < 0.3 else 12
            rows = [(f"key {dice.randint(0, 200)}", dice.randint(0, 999)) for _ in range(dice.randint(1, most))]
            model.feed(rows)
            running.feed("totals", batch(rows))
            running.feed("logic", batch(rows))
        expected[running.checkpoint()] = (model.totals, model.latest, model.some)
    return expected


@pytest.mark.parametrize("seed", range(6))
def test_every_checkpoint_of_a_chain_is_what_was_there_then(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = random.Random(seed)
    monkeypatch.setattr(reader, "_CHUNK_ROWS", dice.choice([1, 30, 1 << 18]))
    monkeypatch.setattr(reader, "_KEPT_BYTES", dice.choice([0, 2_000, 64 << 20]))
    expected = random_run(tmp_path, dice)
    kinds = {e.kind for address in expected for e in cw.Snapshot(address).manifest.entries}
    assert kinds == {"base", "delta", "delete"}
    assert {address: read(address) for address in expected} == expected


def test_a_key_is_found_without_reading_the_others(tmp_path: Path) -> None:
    running = Running(flow(), tmp_path, parallelism=8, inline_below=0)
    rows = [(f"key {n}", n) for n in range(12_000)]
    running.feed("totals", batch(rows))
    address = running.checkpoint()
    whole, one = cw.Snapshot(address), cw.Snapshot(address)
    assert whole.table("totals").num_rows == 12_000
    found = one.table("totals", key={"k": "key 17"}, columns=["k", "n", "most"]).to_pylist()
    assert found == [{"k": "key 17", "n": 1, "most": 17}]
    assert one.bytes_read < whole.bytes_read / 4
    assert one.table("totals", key={"k": "no such"}).num_rows == 0
    groups = one.table("totals", groups=range(3, 5), columns=["key_group"]).column(0).to_pylist()
    assert set(groups) == {3, 4}


def test_a_state_without_rows_has_its_columns(tmp_path: Path) -> None:
    snapshot = cw.Snapshot(Running(flow(), tmp_path).checkpoint())
    assert snapshot.table("totals").schema.names == ["k", "n", "mean", "most", "key_group", "subtask"]
    assert snapshot.table("totals").num_rows == 0
    assert snapshot.state("logic.latest").schema.field("value").type == pa.int64()


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda s: s.table("total"), r"no state 'total' in .*job@1.*There are: totals.aggregates, logic.latest"),
        (lambda s: s.table("logic"), r"step 'logic' has several states.*Say which: logic.latest, logic.some"),
        (lambda s: s.table("totals", columns=["m"]), r"no column 'm'. There are: k, n, mean, most"),
        (lambda s: s.table("totals", key={"n": 1}), r"is not keyed by \(n\). Its key is \(k\)"),
        (lambda s: s.table("totals", key={"k": 1}), r"no key of totals.aggregates"),
    ],
)
def test_what_is_not_there_is_told_with_what_is(ask: Any, says: str, tmp_path: Path) -> None:
    running = Running(flow(), tmp_path)
    running.feed("logic", batch([("a", 1)]))
    with pytest.raises(ConfigError, match=says):
        ask(cw.Snapshot(running.checkpoint()))


class Visits(StatefulProcessor):
    """PySpark's interface."""

    def init(self, handle: Any) -> None:
        self._count = handle.getValueState("count", "n long")
        self._rows = handle.getListState("rows", "v long, twice long")
        self._digits = handle.getMapState("digits", "d long", "v long", ttlDurationMs=60_000)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        for row in rows:
            before = self._count.get()
            self._count.update(((before[0] if before else 0) + 1,))
            self._rows.appendValue((row.v, 2 * row.v))
            self._digits.updateValue((row.v % 10,), (row.v,))
        return iter(())

    def close(self) -> None:
        """Nothing to release."""


def test_the_states_of_a_stateful_processor(tmp_path: Path) -> None:
    made = cw.Dataflow("job")
    keyed = made.read("in", cw.memory([], schema=SCHEMA)).key_by("k")
    keyed.transform_with_state("visits", Visits(), "v long", time_mode="ProcessingTime").write("out", cw.discard())
    running = Running(made, tmp_path)
    rows = [(f"key {n % 5}", n) for n in range(23)]
    for part in (rows[:20], rows[20:]):
        running.feed("visits", batch(part))
        address = running.checkpoint()
    snapshot, model = cw.Snapshot(address), Model()
    model.feed(rows)
    counts = snapshot.table("visits.count").to_pylist()
    assert {r["k"]: r["value"] for r in counts} == {k: {"n": len(v)} for k, v in model.rows.items()}
    lists = snapshot.table("visits.rows").to_pylist()
    assert {r["k"]: [(e["v"], e["twice"]) for e in r["value"]] for r in lists} == {
        k: [(v, 2 * v) for v in values] for k, values in model.rows.items()
    }
    digits = {r["k"]: dict_of(r["value"]) for r in snapshot.table("visits.digits").to_pylist()}
    assert digits == {k: {v % 10: (v, 61_000) for v in values} for k, values in model.rows.items()}


def dict_of(entries: list[Any]) -> dict[int, tuple[int, int]]:
    return {key["d"]: (value["value"]["v"], value["expires_ms"]) for key, value in entries}


def test_rows_on_their_way_and_positions(tmp_path: Path) -> None:
    running = Running(flow(), tmp_path)
    writer = SnapshotWriter(running.store, "job", 1, 1, 7, 0)
    items = [LogItem(batch([("a", 1), ("b", 2)]), 5), LogItem(None, 6), LogItem(batch([("c", 3)]), 7)]
    entries = add_log(writer, ChannelLog("totals", 1, "in.0>totals.0", (0, 0, 1), "receiver", 10, items))
    writer.close()
    splits = {"in": [SplitRecord("part-0", {"file": "a"}, 13, 60_000_000), SplitRecord("part-1", None, 0)]}
    subtasks = [SubtaskRecord(0, 0, 0, "unaligned", splits=splits, handles={"a": [{"file": "x"}]})]
    snapshot = cw.Snapshot(running.checkpoint({"entries": entries, "subtasks": subtasks}))
    found = snapshot.table("in.0>totals.0", columns=["k", "v", "sender", "receiver", "row_number"]).to_pylist()
    assert [tuple(row.values()) for row in found] == [("a", 1, 0, 1, 10), ("b", 2, 0, 1, 11), ("c", 3, 0, 1, 12)]
    read, unread = snapshot.table("in").to_pylist()
    assert (read["split"], read["position"], read["data"]) == ("part-0", "13", '{"file": "a"}')
    assert (read["max_time"].isoformat(), unread["max_time"]) == ("1970-01-01T00:01:00+00:00", None)
    assert snapshot.table("a").to_pylist() == [{"subtask": 0, "handle": '{"file": "x"}'}]
