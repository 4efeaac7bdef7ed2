"""The next version of a program goes on from a snapshot of the last one, and back again, each row once.

Each case says what the plan must tell of every step, and what must come out, reckoned by plain Python and DuckDB.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from runtime_world import assert_running_counts, gated, open_gate, query, wait_until

import cutwater as cw
from cutwater.api.jobs.job import Job
from cutwater.storage.reading import open_snapshot

ROWS, KEYS = 6_000, 20
"""``ROWS`` is a multiple of 3 and of ``KEYS``."""
Build = Callable[[Path], cw.Dataflow]


def version(
    folder: Path,
    *,
    step: str = "count",
    source: str = "in",
    sink: str = "out",
    extra: bool = False,
    filtered: bool = False,
    aggregates: Any = None,
    name: str = "job",
    rate: float = 8_000,
    first: bool = False,
) -> cw.Dataflow:
    """Counts by key; ``extra``: a second count with output of its own, written before (``first``) or after."""
    flow = cw.Dataflow(name)
    rows = flow.read(source, gated(folder, ROWS, rate=rate)).with_columns("key", key=pl.col("value") % KEYS)
    if filtered:
        rows = rows.filter("all", pl.col("value") >= 0)

    def more() -> None:
        by_three = rows.with_columns("third", third=pl.col("value") % 3).key_by("third")
        counts = by_three.aggregate("thirds", m=cw.count(), eid=cw.last("value"))
        counts.write("more", cw.files(str(folder / "more"), roll_rows=200))

    if extra and first:
        more()
    aggregates = aggregates or {"n": cw.count(), "total": cw.sum("value"), "eid": cw.last("value")}
    counts = rows.key_by("key").aggregate(step, **aggregates)
    counts.write(sink, cw.files(str(folder / "out"), roll_rows=200))
    if extra and not first:
        more()
    return flow


def stopped(start: Any, flow: cw.Dataflow, **settings: Any) -> Job:
    """Half way, without rows on their way: those of an unaligned snapshot belong to edges, which may be gone."""
    job = start(flow, **settings)
    wait_until(lambda: job.status.checkpoints.completed >= 3 and job.status.rows_read > 500, "some checkpoints")
    job.stop(savepoint=f"{job.checkpoint_dir}-savepoint" if settings.get("protocol") == "unaligned" else None)
    return job


def verdicts(plan: Any) -> dict[str, str]:
    return {step.id: step.verdict for step in plan.outlook.steps}


def outcome(sql: str, folder: Path) -> list[tuple[Any, ...]]:
    return query(sql.replace("{out}", f"read_parquet('{folder}/out/*.parquet', union_by_name=true)"))


def assert_whole(folder: Path) -> None:
    assert_running_counts(folder / "out", ROWS, keys=KEYS)


def assert_thirds(folder: Path) -> None:
    sql = "select count(*), count(distinct eid), max(m) from {more} group by eid % 3"
    assert query(sql, more=folder / "more") == [(ROWS // 3, ROWS // 3, ROWS // 3)] * 3


def assert_renamed_and_added(folder: Path) -> None:
    """``n`` is called ``rows`` and goes on; ``low`` is new, and has seen what the new version was given."""
    found = outcome(
        """
        select key, count(*), count(distinct eid), max(coalesce(rows, n)), max(rows),
               arg_max(low, rows), min(eid) filter (rows is not null), arg_max(total, coalesce(rows, n))
        from {out} group by key order by key""",
        folder,
    )
    each = ROWS // KEYS
    for key, count, distinct, most, still, low, lowest, total in found:
        assert (count, distinct, most, still) == (each, each, each, each)
        assert low == lowest, "it has seen more, or less, than the rows since the upgrade"
        assert lowest >= KEYS, "void: the new version began at the beginning"
        assert total == sum(range(key, ROWS, KEYS))
    assert len(found) == KEYS


def assert_thirds_since(folder: Path) -> None:
    assert_whole(folder)
    sql = "select count(*), count(distinct eid), max(m) from {more} group by eid % 3"
    for count, distinct, most in query(sql, more=folder / "more"):
        assert count == distinct == most < ROWS // 3


RENAMED = {"low": cw.min("value"), "rows": cw.count(), "eid": cw.last("value"), "total": cw.sum("value")}
FULL = pytest.mark.full
CASES: dict[
    str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, str], list[Callable[[Path], None]]]
] = {
    "another order": ({"extra": True}, {"extra": True, "first": True}, {}, {}, [assert_whole, assert_thirds]),
    "other aggregates": ({}, {"aggregates": RENAMED}, {}, {"count": "changed"}, [assert_renamed_and_added]),
    "a further filter": ({}, {"filtered": True}, {}, {"all": "new"}, [assert_whole]),
    "a filter less": ({"filtered": True}, {}, {}, {"all": "gone"}, [assert_whole]),
    "other ids": (
        {},
        {"step": "counts", "source": "rows"},
        {"step_ids": {"count": "counts", "in": "rows"}},
        {},
        [assert_whole],
    ),
    "state that goes": (
        {"extra": True},
        {},
        {"allow_dropped_state": True},
        {"thirds": "dropped", "more": "dropped", "third": "gone"},
        [assert_whole],
    ),
    "a further step": (
        {},
        {"extra": True},
        {},
        {"third": "new", "thirds": "new", "more": "new"},
        [assert_thirds_since],
    ),
}
QUICK = [("another order", "aligned", 2), ("other aggregates", "aligned", 3)]
SLOW = [(case, protocol, p) for case in CASES for protocol in ("aligned", "unaligned") for p in (2, 3)]


@pytest.mark.parametrize(
    ("case", "protocol", "parallelism"),
    [*QUICK, *(pytest.param(*slow, marks=FULL) for slow in SLOW if slow not in QUICK)],
)
def test_the_next_version_goes_on(start: Any, tmp_path: Path, case: str, protocol: str, parallelism: int) -> None:
    old, new, upgrade, told, checks = CASES[case]
    settings = {"protocol": protocol, "inline_threshold_bytes": 0, "num_retained": 10}
    job = stopped(start, version(tmp_path, **old), **settings)
    flow = version(tmp_path, **new)
    plan = flow.plan_restore(job.checkpoint_dir, parallelism=parallelism, **upgrade)
    assert plan.ok, str(plan)
    assert verdicts(plan) == {step: told.get(step, "bound") for step in verdicts(plan)}
    open_gate(tmp_path)
    settings |= {"parallelism": parallelism, **upgrade}
    after = start(flow, **settings)
    assert after.await_termination(40)
    for check in checks:
        check(tmp_path)
    assert set(plan.outlook.warnings) <= set(after.status.warnings), "what goes is said"
    again = start(flow, **settings)  # what was said of the upgrade may stay
    assert again.await_termination(10)


def test_without_leave_nothing_is_dropped_and_the_start_says_why(start: Any, tmp_path: Path) -> None:
    stopped(start, version(tmp_path, extra=True))
    job = start(version(tmp_path, step="counts"))
    with pytest.raises(cw.BuildError, match=r"(?s)'count' .* is gone, its state would be lost.*'thirds'") as caught:
        job.await_termination(20)
    assert "step_ids={'count': 'counts'}" in caught.value.hint


def test_the_old_version_goes_back_to_its_own_checkpoint_after_the_new_one_ran(start: Any, tmp_path: Path) -> None:
    settings = {"num_retained": 50, "inline_threshold_bytes": 0}
    old = stopped(start, version(tmp_path, rate=4_000), **settings)
    last = open_snapshot(old.checkpoint_dir).manifest.checkpoint_id
    new = start(version(tmp_path, aggregates=RENAMED, rate=4_000), **settings)
    wait_until(lambda: new.status.checkpoints.completed >= 6, "checkpoints of the new version")
    new.stop()
    (committed,) = outcome("select count(*) filter (low is not null) from {out}", tmp_path)[0]
    assert committed > 0, "void: the new version has committed nothing"
    open_gate(tmp_path)
    back = start(version(tmp_path, rate=40_000), restore=f"{old.checkpoint_dir}@{last}", **settings)
    assert back.await_termination(40)
    assert back.status.checkpoints.restored_id == last
    assert_whole(tmp_path)
