"""Captured columns stay as they were, whatever is written meanwhile and whoever copies the chunks."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutwater.state import growing_array as memory
from cutwater.state.column_kernels import CHUNK_ROWS
from cutwater.state.growing_array import GrowingArray, in_background, populate
from cutwater.state.table import keyed_table as capture_module
from cutwater.state.table.keyed_table import Captures


def columns_of(rows: int) -> list[GrowingArray]:
    columns = [GrowingArray(np.int64), GrowingArray(np.bool_), GrowingArray(np.int16, (3,))]
    for column in columns:
        column.reserve(rows)
    return columns


def write(columns: list[GrowingArray], gids: np.ndarray, value: int) -> None:
    columns[0].values[gids] = value
    columns[1].values[gids] = value % 2
    columns[2].values[gids] = value % 100


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_captures_hold_the_rows_as_they_were(data: st.DataObject) -> None:
    """Random histories of writes, growth, captures, completions in part and in whole, and releases."""
    rows = data.draw(st.integers(1, 3 * CHUNK_ROWS), "rows")
    columns, captures = columns_of(rows), Captures()
    open_ones: list[tuple[object, int, list[np.ndarray]]] = []
    for value in range(1, data.draw(st.integers(1, 12), "steps") + 1):
        what = data.draw(st.sampled_from(["write", "write", "freeze", "grow", "replace", "read", "complete"]))
        if what == "write":
            some = st.lists(st.integers(0, rows - 1), min_size=1, max_size=8)
            gids = np.array(data.draw(some), np.int32)
            captures.preserve(gids)
            write(columns, gids, value)
        elif what == "freeze":
            expected = [c.values[:rows].copy() for c in columns]
            open_ones.append((captures.begin(columns, rows), rows, expected))
        elif what == "grow":
            rows += data.draw(st.integers(1, 2000))
            for column in columns:
                column.reserve(rows)
            captures.prepare(columns, rows)
        elif what == "replace":
            for column in columns:
                column.replace(column.values[:rows][::-1].copy())
            captures.abandon_columns()
        elif what == "complete" and open_ones:
            data.draw(st.sampled_from(open_ones))[0].complete()
        elif what == "read" and open_ones:
            check(captures, *open_ones.pop(data.draw(st.integers(0, len(open_ones) - 1))))
    for each in open_ones:
        check(captures, *each)


def check(captures: Captures, capture: object, rows: int, expected: list[np.ndarray]) -> None:
    capture.complete()
    for copy, was in zip(capture.copies, expected, strict=True):
        np.testing.assert_array_equal(copy[:rows], was)
    captures.give_back(capture)


def test_while_rows_are_restored_memory_is_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture's memory is made when all rows are there, and from then on as the table grows."""
    made: list[int] = []
    take = capture_module._memory_for
    monkeypatch.setattr(capture_module, "_memory_for", lambda *args: made.append(args[1]) or take(*args))
    captures, column = Captures(), GrowingArray(np.int64)
    step = memory.LARGE_ROWS
    column.reserve(5 * step)
    captures.expect(3 * step)
    for rows in (step + 1, 2 * step, 3 * step, 4 * step):
        captures.prepare([column], rows)
    assert made == [3 * step, 4 * step]
    captures.expect(10 * step)  # more than there are in the end: the next capture ends it
    captures.give_back(captures.begin([column], step))
    captures.preserve(np.zeros(1, np.int32))  # sees that nothing is captured any more
    captures.prepare([column], 5 * step)
    assert made == [3 * step, 4 * step, step, 5 * step]


def test_both_threads_copy_at_once() -> None:
    """The stream writes rows at random while another thread copies: each chunk is taken as it was at the freeze."""
    rows = 200_000
    columns, captures = columns_of(rows), Captures()
    rng = np.random.default_rng(7)
    for value in range(1, 6):
        expected = [c.values[:rows].copy() for c in columns]
        capture = captures.begin(columns, rows)
        copier = threading.Thread(target=capture.complete)
        copier.start()
        for _ in range(30):
            gids = rng.integers(0, rows, 500, np.int32)
            captures.preserve(gids)
            write(columns, gids, value)
        copier.join()
        assert not capture.open
        check(captures, capture, rows, expected)


def test_a_freeze_copies_nothing_and_a_released_one_costs_nothing() -> None:
    rows = 50 * CHUNK_ROWS
    columns, captures = columns_of(rows), Captures()
    write(columns, np.arange(rows), 3)
    capture = captures.begin(columns, rows)
    assert all((copy[:rows] == 0).all() for copy in capture.copies)
    captures.preserve(np.array([5], np.int32))
    assert (capture.copies[0][:CHUNK_ROWS] == 3).all()
    assert (capture.copies[0][CHUNK_ROWS:rows] == 0).all()
    memory_of_copies = capture.copies[0]
    captures.give_back(capture)
    captures.preserve(np.arange(rows, dtype=np.int32))
    assert (memory_of_copies[CHUNK_ROWS:rows] == 0).all()
    assert captures.begin(columns, rows).copies[0] is memory_of_copies


def test_a_small_table_is_copied_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 50 * CHUNK_ROWS
    columns, captures = columns_of(rows), Captures()
    write(columns, np.arange(rows), 3)
    size = sum(column.values[:rows].nbytes for column in columns)
    for limit, open in ((size - 1, True), (size, False)):
        monkeypatch.setattr(capture_module, "COPIED_AT_ONCE_BYTES", limit)
        capture = captures.begin(columns, rows)
        assert (capture.open, captures.open) == (open, open)
        assert bool((capture.copies[0][:rows] == 3).all()) is not open
        captures.give_back(capture)
        captures.preserve(np.array([0], np.int32))


def test_a_large_array_grows_without_moving_and_is_there_ahead() -> None:
    column = GrowingArray(np.int64)
    column.reserve(100_000)
    column.values[:100_000] = np.arange(100_000)
    large = column.values
    assert len(large) == memory.ROWS_RESERVED
    column.reserve(1_000_000)
    assert column.values is large
    assert (large[:100_000] == np.arange(100_000)).all()
    assert not large[100_000:1_000_000].any()


def test_where_no_address_space_is_given_arrays_grow_by_copying(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_may_reserve", lambda: False)
    column = GrowingArray(np.float64)
    column.reserve(100_000)
    column.values[99_999] = 2.5
    before = column.values
    column.reserve(400_000)
    assert len(column.values) < memory.ROWS_RESERVED
    assert column.values[99_999] == 2.5
    before[0] = 1.0
    assert column.values[0] == 0.0


def test_making_pages_present_changes_nothing_under_writers() -> None:
    values = np.zeros(1 << 20, np.int64)
    thread = in_background(lambda: [populate(values, 0, len(values)) for _ in range(20)])
    for value in range(1, 100):
        values[::511] = value
        assert (values[::511] == value).all()
    thread.join()
    assert np.count_nonzero(values) == len(values[::511])
