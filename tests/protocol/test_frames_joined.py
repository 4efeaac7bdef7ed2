"""Frames of few rows that wait are taken as one, and nothing that a receiver can tell is different for it."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from cutwater.protocol.channel.items import Barrier, End, Item, Rows, Watermark
from cutwater.protocol.channel.receiving import EMPTY, FEW_ROWS, ReceivingEnd
from cutwater.sim.world.channels import Numbers


def rows(first: int, count: int, watermark: int = 0, late_before: int = 0) -> Rows:
    return Rows(Numbers(range(first, first + count)), first, watermark, late_before)


def end_with(*items: Item, frames: int = 1 << 10, join: bool = True) -> ReceivingEnd:
    end = ReceivingEnd("in", frames, next_row=0, watermark=0, join=Numbers.joined if join else None)
    for item in items:
        end.put(item)
    return end


def taken(end: ReceivingEnd, most: int = 1 << 20) -> list[Item]:
    items: list[Item] = []
    while end.head() != EMPTY:
        items.append(end.take(most))
    return items


def test_what_waits_is_one_call() -> None:
    assert taken(end_with(rows(0, 3), rows(3, 2), rows(5, 1))) == [rows(0, 6)]


def test_a_call_has_no_more_rows_than_were_asked_for() -> None:
    assert taken(end_with(rows(0, 3), rows(3, 2), rows(5, 4)), 5) == [rows(0, 5), rows(5, 4)]


def test_large_frames_are_left_alone() -> None:
    large = rows(3, FEW_ROWS)
    assert taken(end_with(rows(0, 3), large, rows(3 + FEW_ROWS, 1))) == [rows(0, 3), large, rows(3 + FEW_ROWS, 1)]


def test_a_watermark_is_heard_behind_its_frame() -> None:
    got = taken(end_with(rows(0, 3), rows(3, 2, 7), rows(5, 1, 7), rows(6, 1, 9), rows(7, 1, 9)))
    assert got == [rows(0, 5, 7), rows(5, 2, 9), rows(7, 1, 9)]


def test_rows_that_are_late_by_their_own_split_stay_apart() -> None:
    assert taken(end_with(rows(0, 1), rows(1, 1, 0, 5), rows(2, 1, 0, 5))) == [rows(0, 1), rows(1, 2, 0, 5)]


def test_what_lies_between_frames_parts_them() -> None:
    items = [rows(0, 1), Barrier(1), rows(1, 1), Watermark(0, True), rows(2, 1), End()]
    assert taken(end_with(*items)) == items


def test_each_frame_gives_its_place_back() -> None:
    end, credit = end_with(rows(0, 1), rows(1, 1), rows(2, 1), frames=3), list[int]()
    end.on_credit = credit.append
    taken(end)
    assert (sum(credit), end.places) == (3, 3)


ITEMS = st.lists(st.tuples(st.integers(1, 5), st.booleans(), st.sampled_from([0, 0, 0, 4])) | st.just("barrier"))


@given(ITEMS, st.lists(st.integers(1, 8), min_size=1), st.integers(0, 5))
def test_the_same_rows_with_the_same_times_in_the_same_order(
    script: list[tuple[int, bool, int] | str], sizes: list[int], recorded_from: int
) -> None:
    """Beside an end that takes each frame by itself: each row with the watermark before it and behind its frame, and
    what a snapshot records."""
    items: list[Item] = []
    first = watermark = 0
    for step in script:
        if isinstance(step, str):
            items.append(Barrier(len(items)))
            continue
        count, rises, late_before = step
        watermark += rises
        items.append(rows(first, count, watermark, late_before))
        first += count
    seen: list[list[tuple[int, int, int]]] = []
    for join in (False, True):
        end, out, at, turn = end_with(*items, join=join), list[tuple[int, int, int]](), 0, 0
        while end.head() != EMPTY:
            if end.next_row >= recorded_from:
                end.record(1)
            before = end.watermark
            item = end.take(sizes[turn % len(sizes)] if join else 1 << 20)
            turn += 1
            if type(item) is Rows:
                assert (item.first_row, item.watermark) == (at, end.watermark)
                out += [(number, before, item.late_before) for number in item.batch]
                at += item.batch.num_rows
        assert (at, end.next_row, end.queued_rows) == (first, first, 0)
        log = end.stop_recording(1)
        assert all(
            a.first_row + a.batch.num_rows == b.first_row for a, b in pairwise(log) if type(a) is type(b) is Rows
        )
        seen.append(out)
    assert seen[0] == seen[1]
