"""``recovery="task"`` is refused where what was sent could not be made again row for row; the step is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import cutwater as cw
from cutwater.api.streams.stream import Stream
from cutwater.config import JobConfig
from cutwater.errors import BuildError, ConfigError, DataError
from cutwater.operators.base import Operator, OperatorSpec
from cutwater.plan import recovery
from cutwater.plan.planner import make_plan
from cutwater.plan.recovery import check_recovery, pin_tables, recovery_division, widened
from cutwater.protocol.job.recovery_scope import partners
from subtask_context import Subtask

Build = Callable[[Stream, Stream], Any]


def counts(rows: Stream, _: Stream) -> Stream:
    return rows.key_by("value").aggregate("count", n=cw.count())


def windows(rows: Stream, _: Stream) -> Stream:
    return rows.key_by("value").window("hours", cw.tumbling("1h")).aggregate("many", n=cw.count())


def by_clock(rows: Stream, _: Stream) -> Stream:
    window = rows.key_by("value").window("hours", cw.tumbling("1h"), early=cw.every(processing_time="1s"))
    return window.aggregate("soon", n=cw.count())


def joined(rows: Stream, other: Stream) -> Stream:
    return rows.key_by("value").join("pair", other.key_by("value"), window=cw.tumbling("1h"))


def as_of(rows: Stream, other: Stream) -> Stream:
    return rows.key_by("value").join_as_of("pair", other.key_by("value"))


def near(rows: Stream, other: Stream) -> Stream:
    return rows.key_by("value").join("pair", other.key_by("value"), within=("-1s", "1s"))


def tables(rows: Stream, other: Stream) -> Stream:
    return rows.key_by("value").join_tables("pair", other.key_by("value"), keep="last")


def named(rows: Stream, _: Stream) -> Stream:
    return rows.enrich("named", pa.table({"value": [1], "name": ["one"]}), on="value")


def named_by_files(rows: Stream, folder: Path) -> Stream:
    pq.write_table(pa.table({"value": [1], "name": ["one"]}), folder / "names.parquet")
    return rows.enrich("named", cw.EnrichmentTable(folder / "names.parquet"), on="value")


async def ask(row: dict[str, Any]) -> dict[str, Any]:
    return row


def asked(rows: Stream, _: Stream) -> Stream:
    return rows.map_async("ask", ask, "value long")


def check(build: Build, **settings: Any) -> None:
    flow = cw.Dataflow("refused")
    left, right = (flow.read(name, cw.rate(None, rows=10), event_time="timestamp") for name in ("left", "right"))
    build(left, right).write("out", cw.discard())
    right.write("rest", cw.discard())
    check_recovery(make_plan(flow, 2, 128), JobConfig(**{"recovery": "task", **settings}))


@pytest.mark.parametrize("build", [counts, windows, by_clock, asked, joined, as_of, near, tables, named])
@pytest.mark.parametrize("backend", ["memory", "rocksdb"])
def test_what_can_be_made_again_is_not_refused(build: Build, backend: str) -> None:
    check(build, state_backend=backend)


@pytest.mark.parametrize("recovery", ["task", "upstream"])
def test_a_table_in_files_must_be_the_same_for_a_replacement(tmp_path: Path, recovery: Any) -> None:
    flow = cw.Dataflow("pinned")
    named_by_files(flow.read("in", cw.rate(None, rows=10)), tmp_path).write("out", cw.discard())
    plan = make_plan(flow, 2, 128)
    config = JobConfig(recovery=recovery)
    check_recovery(plan, config)
    spec: Any = pin_tables(plan, config).steps["named"].spec
    spec.build().open(Subtask())
    pq.write_table(pa.table({"value": [1], "name": ["uno"]}), tmp_path / "names.parquet")
    with pytest.raises(DataError, match="is not what it was when the job started"):
        spec.build().open(Subtask())
    pq.write_table(pa.table({"value": [1], "name": ["one"]}), tmp_path / "names.parquet", compression="none")
    spec.build().open(Subtask())  # the same rows in another file
    assert pin_tables(plan, JobConfig(recovery="region")).steps == plan.steps


def test_a_table_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    flow = cw.Dataflow("unreadable")
    named_by_files(flow.read("in", cw.rate(None, rows=10)), tmp_path).write("out", cw.discard())
    plan = make_plan(flow, 2, 128)
    (tmp_path / "names.parquet").unlink()
    with pytest.raises(BuildError, match="no file") as caught:
        pin_tables(plan, JobConfig(recovery="task"))
    assert caught.value.step == "named"


class NewSpec(OperatorSpec):
    """Says no more than it must."""

    @property
    def outputs(self) -> tuple[pa.Schema, ...]:
        return (pa.schema({"value": pa.int64()}),)

    def build(self) -> Operator:
        return Operator()


def test_a_kind_of_step_that_nobody_has_judged_is_refused() -> None:
    flow = cw.Dataflow("new")
    rows = flow.read("in", cw.rate(None, rows=10))
    rows.key_by("value").aggregate("count", n=cw.count()).write("out", cw.discard())
    plan = make_plan(flow, 2, 128)
    plan = replace(plan, steps=plan.steps | {"count": replace(plan.steps["count"], spec=NewSpec(), kind="new")})
    with pytest.raises(BuildError, match="of kind 'new' may send its rows in another order") as caught:
        check_recovery(plan, JobConfig(recovery="task"))
    assert caught.value.step == "count"
    check_recovery(plan, JobConfig(recovery="region"))


@pytest.mark.parametrize("protocol", ["none", "at_least_once"])
def test_there_must_be_a_cut_to_go_back_to(protocol: Any) -> None:
    with pytest.raises(ConfigError, match="needs a checkpoint that is a cut"):
        JobConfig(recovery="task", protocol=protocol)


def test_what_lives_in_one_worker_goes_back_and_what_its_sinks_tie_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    flow = cw.Dataflow("tied")
    rows = flow.read("in", cw.rate(None, rows=10))
    rows.key_by("value").aggregate("count", n=cw.count()).write("out", cw.discard())
    plan = make_plan(flow, 3, 128)
    assert [{slot for _, slot in region} for region in recovery_division(plan, "task").regions] == [{0}, {1}, {2}]
    assert not widened(plan, "task")
    monkeypatch.setattr(recovery, "_settles_subtasks", lambda plan, step: step != "out")
    assert len(recovery_division(plan, "task").regions) == 1
    assert "'out' go back together" in widened(plan, "task")
    assert not widened(plan, "region")


def test_who_goes_back_upstream_is_connected_with_all_behind_and_these_with_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flow = cw.Dataflow("behind")
    rows = flow.read("in", cw.rate(None, rows=10))
    rows.key_by("value").aggregate("count", n=cw.count()).write("out", cw.discard())
    plan = make_plan(flow, 2, 128)
    division = recovery_division(plan, "upstream")
    assert [sorted(region) for region in division.regions] == [[(0, 0), (0, 1)], [(1, 0)], [(1, 1)]]
    assert [sorted(needed) for needed in division.upstream] == [[0], [0, 1], [0, 2]]
    assert partners(division, "upstream", (0, 0)) == {(1, 0), (0, 1), (1, 2)}
    assert partners(division, "upstream", (0, 1)) == {(0, 0), (1, 0)}
    assert not widened(plan, "upstream")
    monkeypatch.setattr(recovery, "_settles_subtasks", lambda plan, step: step != "out")
    assert len(recovery_division(plan, "upstream").regions) == 1
    assert "'out' go back together" in widened(plan, "upstream")
