"""W1: whether a row is late depends on its position in the split, never on how the input is cut into batches."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cutwater.data.time import MAX_WATERMARK, MIN_WATERMARK
from cutwater.protocol.subtask.source_times import watermark_after
from cutwater.runtime.chains.source_runner import watermark_cuts

times_lists = st.lists(st.integers(-9, 9), max_size=30)


def seen_by_rows(times: list[int], ends: list[int], bound: int) -> list[int]:
    """The watermark that reached each row: sent at cuts only, as a coalescing channel may hold back all others."""
    known = MIN_WATERMARK
    maximum = MIN_WATERMARK
    seen: list[int] = []
    for start, end in zip([0, *ends], [*ends, len(times)], strict=True):
        batch = np.array(times[start:end], dtype=np.int64)
        cuts, watermarks = watermark_cuts(batch, maximum, bound)
        assert len(watermarks) == len(cuts) + 1
        assert cuts == sorted(set(cuts))
        for row in range(len(batch)):
            if row in cuts:
                known = max(known, watermarks[cuts.index(row)])
            seen.append(known)
        if len(batch):
            maximum = max(maximum, int(batch.max()))
        assert watermarks[-1] == watermark_after(maximum, bound)
    return seen


def violating(times: list[int], bound: int) -> list[tuple[int, int]]:
    """Rows at or below the watermark of the rows before them, with that watermark; one row at a time."""
    rows: list[tuple[int, int]] = []
    for i in range(1, len(times)):
        watermark = max(times[:i]) - bound - 1
        if times[i] <= watermark:
            rows.append((i, watermark))
    return rows


@settings(deadline=None)  # the first call loads the kernel
@given(times_lists, st.integers(0, 6), st.lists(st.integers(0, 30), max_size=8))
def test_rule_W1_every_cut_of_the_input_gives_violating_rows_the_same_watermark(
    times: list[int], bound: int, ends: list[int]
) -> None:
    ends = sorted(min(e, len(times)) for e in ends)
    seen = seen_by_rows(times, ends, bound)
    assert [(i, seen[i]) for i, _ in violating(times, bound)] == violating(times, bound)


@given(times_lists, st.integers(0, 6))
def test_other_rows_are_never_below_a_watermark_they_may_have_met(times: list[int], bound: int) -> None:
    late = {i for i, _ in violating(times, bound)}
    for i, time in enumerate(times):
        if i and i not in late:
            assert time > max(times[:i]) - bound - 1


@given(times_lists)
def test_data_within_its_bound_is_never_cut(times: list[int]) -> None:
    cuts, _ = watermark_cuts(np.array(times, dtype=np.int64), MIN_WATERMARK, 100)
    assert cuts == []


def test_the_watermark_is_sent_once_per_rise() -> None:
    cuts, watermarks = watermark_cuts(np.array([100, 1, 2, 3, 200, 4, 5], dtype=np.int64), MIN_WATERMARK, 10)
    assert cuts == [1, 5]
    assert watermarks == [89, 189, 189]


def test_a_batch_that_begins_with_a_violating_row_is_cut_before_it() -> None:
    assert watermark_cuts(np.array([5], dtype=np.int64), 100, 10) == ([0], [89, 89])


def test_rows_within_the_batch_are_measured_by_what_came_before_it() -> None:
    assert watermark_cuts(np.array([95, 88], dtype=np.int64), 100, 10) == ([1], [89, 89])


def test_an_empty_batch_keeps_the_watermark() -> None:
    empty = np.array([], dtype=np.int64)
    assert watermark_cuts(empty, 50, 0) == ([], [49])
    assert watermark_cuts(empty, MIN_WATERMARK, 0) == ([], [MIN_WATERMARK])


def test_the_ends_of_the_range_do_not_wrap_round() -> None:
    low, high = MIN_WATERMARK + 1, MAX_WATERMARK
    times = np.array([low, high, low], dtype=np.int64)
    assert watermark_cuts(times, MIN_WATERMARK, 1000) == ([2], [high - 1001, high - 1001])
    assert watermark_cuts(times[:1], MIN_WATERMARK, 1000) == ([], [MIN_WATERMARK])
