"""Every protocol and every kind of edge, rescaled up and down while rows flow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from loop_world import assert_circulated, circulating, counted_loop, nested
from runtime_world import Gated, assert_ids, assert_running_counts, counting, gated, open_gate, query, wait_until

import cutwater as cw
from cutwater.api.jobs.job import Job
from cutwater.connectors.base import Json, SourceContext, Split, SplitReader

ROWS, RULES, KEYS = 6_000, 40, 31
PROTOCOLS: dict[str, dict[str, Any]] = {
    "aligned": {},
    "unaligned": {"aligned_timeout": "0ms"},
    "chandy_lamport": {},
    "synchronous": {},
    "at_least_once": {},
}
SHAPES = {"plain": counting, "self": circulating, "counted": counted_loop, "nested": nested}


def up_and_down(job: Job, *steps: int) -> None:
    for parallelism in steps:
        read = job.status.rows_read
        wait_until(lambda read=read: job.status.rows_read != read, "rows", job=job)
        job.rescale(parallelism)


@pytest.mark.full
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_nothing_is_lost_or_doubled(start, tmp_path: Path, protocol: str, shape: str) -> None:
    flow = SHAPES[shape]("wider", gated(tmp_path, ROWS, rate=3_000), tmp_path / "out")
    job = start(flow, protocol=protocol, channel_frames=1, **PROTOCOLS[protocol])
    up_and_down(job, 3, 1, 2)
    open_gate(tmp_path)
    assert job.await_termination(60)
    assert job.status.rescales == 3
    exactly = protocol != "at_least_once"
    if shape != "plain":
        assert_circulated(tmp_path / "out", ROWS, nest=shape == "nested", exactly=exactly)
    elif exactly:
        assert_running_counts(tmp_path / "out", ROWS)
    else:
        found = query("SELECT count(DISTINCT eid), count(*) FROM {out}", out=tmp_path / "out")[0]
        assert found[0] == ROWS <= found[1]


class Ruled(cw.BroadcastProcessFunction):
    """Passes rows on, with the number of rules that it has."""

    rules = cw.BroadcastState("long", "boolean")

    def process(self, row: dict[str, Any], ctx: cw.ProcessContext) -> Iterator[dict[str, Any]]:
        yield {"eid": row["value"], "key": row["value"] % KEYS, "rules": len(self.rules), "subtask": ctx.subtask}

    def process_broadcast(self, row: dict[str, Any], ctx: cw.ProcessContext) -> Iterator[dict[str, Any]]:
        if row["value"] in self.rules:
            raise ValueError(f"rule {row['value']} came twice to subtask {ctx.subtask}")
        self.rules[row["value"]] = True
        return iter(())


@pytest.mark.full
@pytest.mark.parametrize("protocol", ["aligned", "unaligned", "chandy_lamport"])
def test_forward_rebalanced_keyed_and_broadcast_edges_in_one_job(start, tmp_path: Path, protocol: str) -> None:
    flow = cw.Dataflow("mixed")
    rows = flow.read("in", gated(tmp_path, ROWS, rate=6_000)).rebalance()
    rules = flow.read("rules", cw.rate(RULES // 2, rows=RULES), parallelism=1)
    ruled = rows.connect(rules.broadcast()).process("rule", Ruled(), "eid long, key long, rules long, subtask int")
    counts = ruled.key_by("key").aggregate("count", n=cw.count(), eid=cw.last("eid"), rules=cw.last("rules"))
    counts.write("out", cw.files(str(tmp_path / "out"), roll_rows=500))
    job = start(flow, protocol=protocol, channel_frames=1, **PROTOCOLS[protocol])
    up_and_down(job, 4, 2, 3)
    open_gate(tmp_path)
    assert job.await_termination(60)
    assert_ids(tmp_path / "out", ROWS)
    gaps = query(
        "SELECT key, n, row_number() OVER (PARTITION BY key ORDER BY n) AS rank FROM {out} QUALIFY n <> rank LIMIT 3",
        out=tmp_path / "out",
    )
    assert not gaps, f"counts of a key with gaps or doubles: {gaps}"
    assert query("SELECT max(rules) FROM {out}", out=tmp_path / "out")[0][0] <= RULES


@dataclass(frozen=True)
class Jumbled(Gated):
    """One split whose rows come up to 50 ms too late."""

    def open(self, split: Split, position: Json | None, ctx: SourceContext) -> SplitReader:
        return _JumbledReader(super().open(split, position, ctx))


class _JumbledReader:
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def read(self, max_rows: int) -> Any:
        batch = self._inner.read(max_rows)
        if batch is None:
            return None
        late = pl.col("timestamp") - pl.duration(milliseconds=pl.col("value") * 7 % 50)
        moved = pl.from_arrow(batch).with_columns(late.alias("timestamp"))  # type: ignore[union-attr]
        return moved.to_arrow().cast(batch.schema).combine_chunks().to_batches()[0]


@pytest.mark.full
def test_the_same_rows_are_late_as_without_a_rescale(start, tmp_path: Path) -> None:
    plain = gated(tmp_path, ROWS, rate=6_000, partitions=1)
    source = Jumbled(**{f.name: getattr(plain, f.name) for f in fields(plain)})
    flow = cw.Dataflow("late")
    rows = flow.read("in", source, event_time="timestamp", out_of_order="20ms")
    keyed = rows.with_columns("key", key=pl.col("value") % KEYS).key_by("key")
    counted = keyed.window("w", cw.tumbling("10ms")).aggregate("count", n=cw.count())
    counted.write("out", cw.files(str(tmp_path / "out")))
    counted.late.write("late", cw.files(str(tmp_path / "lost")))
    rows.write("raw", cw.files(str(tmp_path / "raw")))
    job = start(flow, protocol="unaligned", channel_frames=1)
    up_and_down(job, 4, 1, 3)
    open_gate(tmp_path)
    assert job.await_termination(60)
    counts, lost, watermark = Counter[tuple[int, int]](), [], -(2**63)
    for value, time in query("SELECT value, epoch_us(timestamp) FROM {raw} ORDER BY value", raw=tmp_path / "raw"):
        window = time // 10_000 * 10_000
        if window + 10_000 - 1 <= watermark:
            lost.append(value)
        else:
            counts[value % KEYS, window] += 1
        watermark = max(watermark, time - 20_000 - 1)
    assert lost
    assert query("SELECT value FROM {lost} ORDER BY value", lost=tmp_path / "lost") == [(value,) for value in lost]
    found = query("SELECT key, epoch_us(window_start), n FROM {out} ORDER BY ALL", out=tmp_path / "out")
    assert found == sorted((key, window, n) for (key, window), n in counts.items())
