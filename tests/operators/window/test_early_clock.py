"""The next time of early results by the clock is state: a restore finds it, at another parallelism, too."""

from __future__ import annotations

import pytest

from cutwater.operators.group_watermarks import GroupWatermarks
from cutwater.operators.window.operator import EarlyClock
from cutwater.state.segments import Segment
from subtask_context import Subtask


def frozen(subtask: Subtask, *, rows: bool) -> Segment:
    clock = EarlyClock(5_000, subtask)
    if rows:
        clock.rows_came()
    return clock.add_to(GroupWatermarks(subtask.key_groups, 16).segment())


def restored(subtask: Subtask, *segments: Segment) -> int | None:
    clock = EarlyClock(5_000, subtask)
    for segment in segments:
        clock.restore(segment)
        clock.rows_restored()
    return clock.next_ms


SOON, LATE = Subtask(0, 2, now_ms=1_003), Subtask(1, 2, now_ms=2_000)


@pytest.mark.parametrize(
    ("subtask", "parallelism", "next_ms"),
    [(0, 2, 1_005), (1, 2, 2_005), (0, 1, 1_005), (1, 4, 1_005), (2, 4, 2_005)],
)
def test_each_key_group_brings_its_time_and_the_earliest_counts(subtask: int, parallelism: int, next_ms: int) -> None:
    """It need not be told to anybody who owns none of its groups."""
    here = Subtask(subtask, parallelism, now_ms=9_000)
    assert restored(here, frozen(SOON, rows=True), frozen(LATE, rows=True)) == next_ms


def test_who_waited_for_no_time_waits_for_none_after_a_restore() -> None:
    assert restored(Subtask(0, 2, now_ms=9_000), frozen(SOON, rows=False)) is None
    assert restored(Subtask(now_ms=9_000), frozen(SOON, rows=False), frozen(LATE, rows=True)) == 2_005


def test_a_snapshot_of_an_older_version_has_none_and_it_is_reckoned_anew() -> None:
    older = GroupWatermarks(SOON.key_groups, 16).segment()
    assert restored(Subtask(0, 2, now_ms=9_000), older) == 9_005


def test_without_early_results_by_the_clock_nothing_is_added() -> None:
    segment = GroupWatermarks(range(16), 16).segment()
    clock = EarlyClock(None, Subtask())
    clock.rows_came()
    assert clock.add_to(segment) is segment
    assert clock.next_ms is None
