"""All kinds of dataflows under kills, each against an independent computation by DuckDB."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from fake_host import FakeSpark
from runtime_world import assert_ids, assert_running_counts, counting, gated, kill_some, open_gate, query

import cutwater as cw
from cutwater.api.jobs.job import Job
from cutwater.api.streams.stream import Stream
from cutwater.connectors.memory import KILL, PAUSE

ROWS = 16_000
RATE = 40_000


def survive(job: Job, spark: FakeSpark, folder: Path, *, kills: int = 2, seed: int = 7) -> None:
    kill_some(job, spark, kills, seed)
    open_gate(folder)
    assert job.await_termination(30)
    assert job.status.restarts == kills


def test_steps_with_their_own_parallelism(start, fake_spark: FakeSpark, tmp_path: Path) -> None:
    flow = cw.Dataflow("own")
    rows = flow.read("in", gated(tmp_path, ROWS, rate=RATE), parallelism=1)
    keyed = rows.with_columns("key", key=pl.col("value") % 97, parallelism=3).key_by("key")
    counts = keyed.aggregate("count", n=cw.count(), total=cw.sum("value"), eid=cw.last("value"), parallelism=2)
    counts.write("out", cw.files(str(tmp_path / "out")), parallelism=1)
    survive(start(flow, parallelism=3), fake_spark, tmp_path)
    assert_running_counts(tmp_path / "out", ROWS)


def test_null_is_a_key_like_any_other(start, fake_spark: FakeSpark, tmp_path: Path) -> None:
    flow = cw.Dataflow("nulls")
    rows = flow.read("in", gated(tmp_path, ROWS, rate=RATE))
    key = pl.when(pl.col("value") % 97 != 5).then(pl.col("value") % 97)
    keyed = rows.with_columns("key", key=key).key_by("key", nulls="key")
    counts = keyed.aggregate("count", n=cw.count(), total=cw.sum("value"), eid=cw.last("value"))
    named = counts.with_columns("name", key=pl.col("key").fill_null(5))  # no value has this key
    named.write("out", cw.files(str(tmp_path / "out")))
    survive(start(flow), fake_spark, tmp_path)
    assert_running_counts(tmp_path / "out", ROWS)


def test_rebalance_hands_every_row_to_one_subtask(start, fake_spark: FakeSpark, tmp_path: Path) -> None:
    flow = cw.Dataflow("rebalance")
    rows = flow.read("in", gated(tmp_path, ROWS, rate=RATE), parallelism=1).rebalance()
    rows.map_batches("same", lambda batches: batches, rows.schema).write("out", cw.files(str(tmp_path / "out")))
    survive(start(flow, parallelism=3), fake_spark, tmp_path)
    assert_ids(tmp_path / "out", ROWS, column="value")


def test_broadcast_hands_every_row_to_every_subtask(start, fake_spark: FakeSpark, tmp_path: Path) -> None:
    flow = cw.Dataflow("broadcast")
    rows = flow.read("in", gated(tmp_path, ROWS, rate=RATE)).broadcast()
    rows.select("ids", "value").write("out", cw.files(str(tmp_path / "out")))
    survive(start(flow, parallelism=3), fake_spark, tmp_path)
    assert_ids(tmp_path / "out", ROWS, column="value", copies=3)


def test_union_of_two_sources(start, fake_spark: FakeSpark, tmp_path: Path) -> None:
    flow = cw.Dataflow("union")
    half = ROWS // 2
    one = flow.read("one", gated(tmp_path, half, rate=RATE / 2))
    two = flow.read("two", gated(tmp_path, half, rate=RATE / 2, start=half))
    rows = one.union("both", two).with_columns("key", key=pl.col("value") % 97)
    counts = rows.key_by("key").aggregate("count", n=cw.count(), total=cw.sum("value"), eid=cw.last("value"))
    counts.write("out", cw.files(str(tmp_path / "out")))
    survive(start(flow), fake_spark, tmp_path)
    assert_running_counts(tmp_path / "out", ROWS)


def test_several_sinks_get_the_same_rows(start, fake_spark: FakeSpark, tmp_path: Path) -> None:
    def with_copy(rows: Stream) -> Stream:
        rows.write("raw", cw.files(str(tmp_path / "raw")))
        rows.filter("some", pl.col("key") == 3).write("third", cw.files(str(tmp_path / "third")))
        return rows

    flow = counting("sinks", gated(tmp_path, ROWS, rate=RATE), tmp_path / "out", wrap=with_copy)
    survive(start(flow), fake_spark, tmp_path)
    assert_running_counts(tmp_path / "out", ROWS)
    assert_ids(tmp_path / "raw", ROWS, column="value")
    expected = query("SELECT value FROM {raw} WHERE value % 97 = 3 ORDER BY 1", raw=tmp_path / "raw")
    assert query("SELECT value FROM {third} ORDER BY 1", third=tmp_path / "third") == expected


def test_windows_and_late_rows_share_out_every_row(start, fake_spark: FakeSpark, tmp_path: Path) -> None:
    """Which rows are late may differ from run to run; that none is in both or in neither may not."""
    flow = cw.Dataflow("windows")
    rows = flow.read("in", disordered(tmp_path), event_time="happened", out_of_order="2ms")
    windows = rows.key_by("key").window("w", cw.tumbling("10ms")).aggregate("count", n=cw.count(), ids=cw.sum("value"))
    windows.write("out", cw.files(str(tmp_path / "out")))
    windows.late.write("late", cw.files(str(tmp_path / "late")))
    rows.write("raw", cw.files(str(tmp_path / "raw")))
    survive(start(flow), fake_spark, tmp_path)
    folders = {name: tmp_path / name for name in ("raw", "out", "late")}
    assert_ids(folders["raw"], ROWS, column="value")
    late_count = query("SELECT count(*), count(DISTINCT value) FROM {late}", late=folders["late"])[0]
    assert late_count[0] == late_count[1] > 0
    differ = query(
        """WITH expected AS (
          SELECT key, time_bucket(INTERVAL 10 milliseconds, happened) AS window_start, count(*) n, sum(value) ids
          FROM {raw} WHERE value NOT IN (SELECT value FROM {late}) GROUP BY ALL
        )
        (SELECT * FROM expected EXCEPT ALL SELECT key, window_start, n, ids FROM {out})
        UNION ALL (SELECT key, window_start, n, ids FROM {out} EXCEPT ALL SELECT * FROM expected)""",
        **folders,
    )
    assert not differ, f"windows that differ from DuckDB's: {differ[:3]} of {len(differ)}"


def test_interval_join_finds_every_pair_once(start, fake_spark: FakeSpark, tmp_path: Path) -> None:
    flow = cw.Dataflow("join")
    count = 6_000
    left = flow.read("left", gated(tmp_path, count, rate=15_000), event_time="timestamp", out_of_order="50ms")
    right = flow.read("right", gated(tmp_path, count, rate=15_000), event_time="timestamp", out_of_order="50ms")
    left = left.with_columns("lkey", key=pl.col("value") % 50)
    right = right.with_columns("rkey", key=pl.col("value") % 50).rename("names", value="other")
    pairs = left.key_by("key").join("pairs", right.key_by("key"), within=("-10ms", "15ms"))
    pairs.write("out", cw.files(str(tmp_path / "out")))
    pairs.late_left.write("late-left", cw.files(str(tmp_path / "late_left")))
    pairs.late_right.write("late-right", cw.files(str(tmp_path / "late_right")))
    survive(start(flow), fake_spark, tmp_path)
    micros = 1e6 / 15_000
    differ = query(
        f"""WITH ids AS (SELECT range AS value, range % 50 AS key, floor(range * {micros})::BIGINT AS us
          FROM range({count})),
        expected AS (SELECT l.value, r.value AS other FROM ids l JOIN ids r
          ON l.key = r.key AND r.us BETWEEN l.us - 10000 AND l.us + 15000)
        (SELECT * FROM expected EXCEPT ALL SELECT value, other FROM {{out}})
        UNION ALL (SELECT value, other FROM {{out}} EXCEPT ALL SELECT * FROM expected)""",
        out=tmp_path / "out",
    )
    assert not differ, f"pairs that differ from DuckDB's: {differ[:3]} of {len(differ)}"


def test_all_keys_in_one_group_of_one_subtask(start, fake_spark: FakeSpark, tmp_path: Path) -> None:
    flow = counting("one-key", gated(tmp_path, ROWS, rate=RATE), tmp_path / "out", keys=1)
    survive(start(flow, parallelism=3), fake_spark, tmp_path)
    assert_running_counts(tmp_path / "out", ROWS, keys=1)


@pytest.mark.parametrize("rows", [0, 1])
def test_almost_no_rows(start, tmp_path: Path, rows: int) -> None:
    out = tmp_path / "out"
    schema = "value long"
    job = start(counting("few", cw.memory([{"value": 0}] * rows, schema=schema), out), parallelism=3)
    assert job.await_termination(30)
    assert sum(len(pl.read_parquet(f)) for f in out.glob("*.parquet")) == rows


def test_strings_of_ten_megabytes(start, fake_spark: FakeSpark, tmp_path: Path) -> None:
    """A row larger than any buffer crosses the network, the state, a snapshot and a kill."""
    marker = tmp_path / "killed"
    size = 10 << 20
    items = [{"key": f"k{i}", "text": chr(97 + i) * size} for i in range(4)]
    source = cw.memory([*items[:2], PAUSE(0.3), KILL(str(marker))], [*items[2:], PAUSE(0.3)])
    flow = cw.Dataflow("large")
    texts = flow.read("in", source).key_by("key").aggregate("last", n=cw.count(), text=cw.last("text"))
    texts.write("out", cw.files(str(tmp_path / "out")))
    job = start(flow)
    assert job.await_termination(60)
    assert marker.exists()
    found = query("SELECT key, n, length(text), text[1] FROM {out} ORDER BY key", out=tmp_path / "out")
    assert found == [(f"k{i}", 1, size, chr(97 + i)) for i in range(4)]


def test_no_row_of_a_batch_function_is_seen_twice_by_the_sink(start, fake_spark: FakeSpark, tmp_path: Path) -> None:
    """A function that makes several rows of one: numbers of rows change between the steps."""

    def twice(row: dict[str, int]) -> list[dict[str, int]]:
        return [{"id": 2 * row["value"]}, {"id": 2 * row["value"] + 1}] if row["value"] % 3 else []

    flow = cw.Dataflow("flat")
    ids = flow.read("in", gated(tmp_path, ROWS // 2, rate=RATE / 2)).flat_map("twice", twice, "id long")
    ids.key_by("id").aggregate("count", n=cw.count()).write("out", cw.files(str(tmp_path / "out")))
    survive(start(flow), fake_spark, tmp_path)
    expected = [i for v in range(ROWS // 2) if v % 3 for i in (2 * v, 2 * v + 1)]
    assert [r[0] for r in query("SELECT id FROM {out} ORDER BY id", out=tmp_path / "out")] == expected
    assert query("SELECT max(n) FROM {out}", out=tmp_path / "out") == [(1,)]


def _disordered(start: int, count: int) -> pa.RecordBatch:
    value = np.arange(start, start + count)
    happened = 1_577_836_800_000_000 + value * 25 - np.where(value % 50 == 0, 20_000, 0) - (value * 7919 % 100) * 15
    return pa.record_batch(
        {
            "value": value,
            "key": value % 5,
            "happened": pa.array(happened, pa.timestamp("us")),
        }
    )


def disordered(folder: Path) -> object:
    """Every 50th row comes 20 ms too late, all others up to 1.5 ms out of order."""
    source = gated(folder, ROWS, rate=RATE)
    return replace(source, fn=_disordered, schema=_disordered(0, 1).schema)
