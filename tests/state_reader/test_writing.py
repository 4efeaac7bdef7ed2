"""Snapshots written out of tables: read again they are those tables, and operators go on from them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from snapshot_world import Running

import cutwater as cw
from cutwater.errors import BuildError, ConfigError, CutwaterError, DataError
from cutwater.state_reader.compare import comparable_states, compare_states

SCHEMA = "k string, t timestamp, v long"


class Kept(cw.ProcessFunction):
    latest = cw.ValueState("long")
    leased = cw.ValueState("long", ttl="1h")
    recent = cw.ListState("long")
    digits = cw.MapState("string", "long")
    all_rows = cw.OperatorListState("long")

    def process(self, row: Any, ctx: Any) -> Iterator[dict[str, Any]]:
        self.latest.value = row["v"]
        self.leased.value = row["v"]
        self.recent.append(row["v"])
        self.digits[str(row["v"] % 10)] = row["v"]
        self.all_rows.append(row["v"])
        ctx.timers.register_event(10**9 + row["v"])
        return iter(())

    def on_timer(self, time: int, domain: str, ctx: Any) -> Iterator[dict[str, Any]]:
        return iter(())


def flow() -> cw.Dataflow:
    made = cw.Dataflow("job")
    keyed = made.read("in", cw.memory([], schema=SCHEMA), event_time="t").key_by("k")
    right = made.read("other", cw.memory([], schema="key string, t timestamp, w long"), event_time="t").key_by("key")
    keyed.aggregate("totals", n=cw.count(), mean=cw.mean("v"), first=cw.first("v")).write("a", cw.discard())
    keyed.aggregate("counts", n=cw.count(), total=cw.sum("v")).write("b", cw.discard())
    keyed.window("h", cw.tumbling("1h")).aggregate("hourly", n=cw.count()).write("c", cw.discard())
    keyed.process("logic", Kept(), "v long").write("d", cw.discard())
    keyed.join("pairs", right, within=("0s", "1h")).write("e", cw.discard())
    keyed.top("best", 2, by="v").write("f", cw.discard())
    return made


STEPS = ("totals", "counts", "hourly", "logic", "pairs", "best")


def batch(values: range) -> pa.RecordBatch:
    rows = {"k": [f"key {v % 7}" for v in values], "t": [v * 60_000_000 for v in values], "v": [*values]}
    return pa.record_batch(rows, pa.schema({"k": pa.string(), "t": pa.timestamp("us", "UTC"), "v": pa.int64()}))


def taken(folder: Path) -> cw.Snapshot:
    running = Running(flow(), folder)
    for part in (range(30), range(30, 60), range(60, 64)):
        for step in STEPS:
            running.feed(step, batch(part))
        running.feed("pairs", batch(part).rename_columns(["key", "t", "w"]), input=1)
        address = running.checkpoint()
    return cw.Snapshot(address)


def content(snapshot: cw.Snapshot, but: str = "") -> dict[str, list[str]]:
    """Every table but one, as sorted rows."""
    tables = [t.address for t in snapshot.states if t.address != but]
    return {name: sorted(map(repr, snapshot.table(name, raw=True).to_pylist())) for name in tables}


def test_what_is_read_and_written_again_is_the_same(tmp_path: Path) -> None:
    snapshot = taken(tmp_path / "chk")
    names = ["totals", "counts", "hourly", "logic.recent", "logic.digits", "logic.leased", "pairs.left", "pairs.right"]
    tables = {name: snapshot.table(name, raw=name == "totals") for name in names}
    cw.write_savepoint(tmp_path / "copy", {"best": snapshot.table("best", raw=True), **tables}, base=snapshot)
    assert content(cw.Snapshot(tmp_path / "copy")) == content(snapshot)
    names_of_all = comparable_states(snapshot, cw.Snapshot(tmp_path / "copy"))
    assert len(names_of_all) == 11
    assert [d for n in names_of_all for d in compare_states(snapshot, cw.Snapshot(tmp_path / "copy"), n)] == []
    cw.write_savepoint(tmp_path / "new", tables, flow=flow(), max_parallelism=16)
    new = cw.Snapshot(tmp_path / "new")
    for name in names:
        columns = [n for n in snapshot.state(name).schema.names if n != "subtask"]
        rows = [sorted(map(repr, s.table(name, columns=columns).to_pylist())) for s in (snapshot, new)]
        assert rows[0] == rows[1], name
    assert new.table("logic.latest").num_rows == 0


def test_rows_without_key_differ_by_how_often_they_are_there(tmp_path: Path) -> None:
    snapshot = taken(tmp_path / "chk")
    left = snapshot.table("pairs.left")
    some = pa.concat_tables([left.slice(0, 3), left.slice(0, 1), left.slice(5)])
    cw.write_savepoint(tmp_path / "edited", {"pairs.left": some}, base=snapshot)
    found = list(compare_states(snapshot, cw.Snapshot(tmp_path / "edited"), "pairs.left"))
    assert sorted((d.kind, d.key["v"]) for d in found) == sorted(
        [("added", left["v"][0].as_py()), *(("removed", left["v"][n].as_py()) for n in (3, 4))]
    )


def test_one_state_is_replaced_and_everything_else_stays(tmp_path: Path) -> None:
    snapshot = taken(tmp_path / "chk")
    counts = pl.from_arrow(snapshot.table("counts"))
    halved = counts.filter(pl.col("k") != "key 3").with_columns(n=pl.col("n") // 2)
    cw.write_savepoint(tmp_path / "edited", {"counts": halved}, base=snapshot.address)
    edited = cw.Snapshot(tmp_path / "edited")
    assert content(edited, "counts.aggregates") == content(snapshot, "counts.aggregates")
    assert edited.manifest.uid == snapshot.manifest.uid
    found = {r["k"]: (r["n"], r["total"]) for r in edited.table("counts").to_pylist()}
    by_key = {f"key {k}": [v for v in range(64) if v % 7 == k] for k in range(7)}
    assert found == {k: (len(v) // 2, sum(v)) for k, v in by_key.items() if k != "key 3"}


@pytest.mark.parametrize("parallelism", [1, 3])
def test_operators_go_on_from_history(parallelism: int, tmp_path: Path) -> None:
    history = pl.DataFrame({"k": [f"key {v % 7}" for v in range(50)], "v": range(50)})
    counts = history.group_by("k").agg(n=pl.len(), total=pl.col("v").sum())
    states = {
        "counts": counts,
        "logic.recent": history.group_by("k").agg(value=pl.col("v")),
        "logic.digits": pa.table({"k": ["key 0"], "value": pa.array([[{"key": "9", "value": 9}]])}),
    }
    cw.write_savepoint(tmp_path / "begin", states, flow=flow(), max_parallelism=16)
    begin = cw.Snapshot(tmp_path / "begin")
    running = Running(flow(), tmp_path / "chk", parallelism)
    for (step, _), operator in running.operators.items():
        operator.restore(s for e in begin.manifest.entries if e.step == step for s in [begin.segments.read(e)])
    for step in ("counts", "logic"):
        running.feed(step, batch(range(50, 64)))
    after = cw.Snapshot(running.checkpoint())
    by_key = {f"key {k}": [v for v in range(64) if v % 7 == k] for k in range(7)}
    assert {r["k"]: (r["n"], r["total"]) for r in after.table("counts").to_pylist()} == {
        k: (len(v), sum(v)) for k, v in by_key.items()
    }
    assert {r["k"]: r["value"] for r in after.table("logic.recent").to_pylist()} == by_key
    digits = {r["k"]: dict(r["value"]) for r in after.table("logic.digits").to_pylist()}
    assert digits["key 0"] == {"9": 9, "6": 56, "3": 63}


COUNTS = {"k": ["a"], "n": [1], "total": [2]}


@pytest.mark.parametrize(
    ("states", "error", "says"),
    [
        ({"count": COUNTS}, BuildError, "no state 'count' to write. There are: totals.aggregates, counts.aggregates"),
        ({"counts": {"k": ["a"], "n": [1]}}, BuildError, "no column 'total' is given. It needs one of int64"),
        ({"counts": {**COUNTS, "n": ["x"]}}, BuildError, "column 'n' of type string does not become int64"),
        ({"counts": {"k": ["a", "a"], "n": [1, 2], "total": [1, 2]}}, DataError, "the key .*a.* is there twice"),
        ({"totals": {"k": ["a"], "n": [1], "mean": [1.0], "first": [1]}}, BuildError, "mean 'mean' is stored as"),
        ({"logic.latest": {"k": ["a"]}}, BuildError, "no column 'value' is given"),
    ],
)
def test_what_cannot_be_written_is_told(states: Any, error: type[CutwaterError], says: str, tmp_path: Path) -> None:
    tables = {name: pa.table(columns) for name, columns in states.items()}
    with pytest.raises(error, match=says):
        cw.write_savepoint(tmp_path / "new", tables, flow=flow())
    assert not (tmp_path / "new").exists()


def test_a_folder_is_never_written_over(tmp_path: Path) -> None:
    cw.write_savepoint(tmp_path / "new", {}, flow=flow())
    with pytest.raises(ConfigError, match="is there already"):
        cw.write_savepoint(tmp_path / "new", {}, flow=flow())
    with pytest.raises(ConfigError, match="either flow= or base="):
        cw.write_savepoint(tmp_path / "other", {})
