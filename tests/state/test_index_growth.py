"""A large index grows while it serves: the larger table is filled beside it, and takes over when it is whole."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest

from cutwater.state import key_index
from cutwater.state.key_index import BytesIndex, KeyIndex, TextIndex, make_index

FIRST = 1 << 17
"""Group ids from which on the index of these tests wants a larger table."""


class Later:
    """A thread that gets no time until somebody waits for it, or the test lets it run."""

    all: list[Later] = []

    def __init__(self, work: Callable[[], object]) -> None:
        self._work: Callable[[], object] | None = work
        Later.all.append(self)

    def run(self) -> None:
        if self._work is not None:
            self._work, work = None, self._work
            work()

    def is_alive(self) -> bool:
        return self._work is not None

    join = run


@pytest.fixture(autouse=True)
def _later(monkeypatch: pytest.MonkeyPatch) -> None:
    Later.all = []
    monkeypatch.setattr(key_index, "in_background", Later)


def kinds() -> list[tuple[list[pa.DataType], Callable[[np.ndarray], list[pa.Array]]]]:
    return [
        ([pa.int64()], lambda n: [pa.array(n * 7919)]),
        ([pa.int64(), pa.int32()], lambda n: [pa.array(n), pa.array(n, pa.int32())]),
        ([pa.string(), pa.int64()], lambda n: [pa.array(n).cast(pa.string()), pa.array(n)]),
        ([pa.decimal128(20), pa.int64()], lambda n: [pa.array(n).cast(pa.decimal128(20)), pa.array(n)]),
    ]


NAMES = ["word", "words", "texts", "bytes"]


def table(index: KeyIndex) -> np.ndarray:
    return (index._index if isinstance(index, TextIndex) else index)._table


def check(index: KeyIndex, keys: Callable[[np.ndarray], list[pa.Array]], count: int) -> None:
    numbers = np.arange(count + 100)
    expected = np.where(numbers < count, numbers, -1)
    np.testing.assert_array_equal(index.find(keys(numbers)), expected)
    assert len(index) == count


@pytest.mark.parametrize(("types", "keys"), kinds(), ids=NAMES)
def test_keys_that_come_while_the_next_table_is_filled_are_in_it(types, keys) -> None:
    index = make_index(types, FIRST)
    first = table(index)
    assert index.upsert(keys(np.arange(FIRST + 10))).tolist() == list(range(FIRST + 10))
    assert len(Later.all) == 1
    assert table(index) is first
    index.upsert(keys(np.arange(FIRST, FIRST + 50_000)))
    check(index, keys, FIRST + 50_000)
    Later.all[0].run()
    index.upsert(keys(np.arange(100)))
    assert len(table(index)) == 2 * len(first)
    check(index, keys, FIRST + 50_000)


def test_what_is_too_much_at_once_goes_through_another_round() -> None:
    types, keys = kinds()[0]
    index = make_index(types, 2 * FIRST)
    index.upsert(keys(np.arange(2 * FIRST)))
    index.upsert(keys(np.arange(2 * FIRST, 2 * FIRST + 80_000)))
    Later.all[0].run()
    index.upsert(keys(np.arange(3)))
    assert len(Later.all) == 2
    check(index, keys, 2 * FIRST + 80_000)
    Later.all[1].run()
    size = len(table(index))
    index.upsert(keys(np.arange(3)))
    assert len(table(index)) == 2 * size
    check(index, keys, 2 * FIRST + 80_000)


@pytest.mark.parametrize(("types", "keys"), kinds(), ids=NAMES)
def test_a_full_table_waits_for_the_next_one(types, keys) -> None:
    index = make_index(types, FIRST)
    for begin in range(0, 4 * FIRST, 60_000):
        gids = index.upsert(keys(np.arange(begin, begin + 60_000)))
        assert gids.tolist() == list(range(begin, begin + 60_000))
    check(index, keys, len(index))
    assert len(Later.all) >= 2


def test_a_frozen_index_is_as_it_was_after_growth() -> None:
    types, keys = kinds()[2]
    index = make_index(types)
    index.upsert(keys(np.arange(70_000)))
    frozen = index.frozen()
    index.upsert(keys(np.arange(300_000)))
    assert len(frozen) == 70_000
    some = np.array([0, 69_999], np.int32)
    assert [c.to_pylist() for c in frozen.columns(some)] == [["0", "69999"], [0, 69_999]]


def test_a_frozen_index_is_as_it_was_after_a_text_that_moves_all_keys() -> None:
    types, keys = kinds()[2]
    index = make_index(types)
    index.upsert(keys(np.arange(70_000)))
    frozen = index.frozen()
    assert index.upsert([pa.array(["x" * 16]), pa.array([1])]).tolist() == [70_000]
    assert type(index._index) is BytesIndex
    index.upsert(keys(np.arange(300_000)))
    assert len(frozen) == 70_000
    some = np.array([0, 69_999], np.int32)
    for view in (frozen, index):
        assert [c.to_pylist() for c in view.columns(some)] == [["0", "69999"], [0, 69_999]]
    check_first = index.find(keys(np.arange(70_000)))
    np.testing.assert_array_equal(check_first, np.arange(70_000))
