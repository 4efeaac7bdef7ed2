"""The index that takes nulls: against a dict, for all kinds of columns, before and after the first null."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_index import KINDS, columns_of

from cutwater.state.key_index import NullableIndex, make_index
from cutwater.state.keys import NULL_HASH, NullableKeys, hash_keys

Row = tuple[object, ...]


def rows_of(kind: str, *, nulls: bool) -> st.SearchStrategy[list[Row]]:
    plain = KINDS[kind][2]
    some = st.tuples(plain, st.integers(0, 7)).map(
        lambda drawn: tuple(None if drawn[1] >> c & 1 else v for c, v in enumerate(drawn[0]))
    )
    return st.lists(some if nulls else plain, min_size=1, max_size=30)


def keys_at(index: Any, gids: list[int]) -> list[Row]:
    columns = index.columns(np.array(gids, np.int32))
    for column in columns:
        column.validate(full=True)
    return list(zip(*(c.to_pylist() for c in columns), strict=True))


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_a_null_is_a_key_of_its_own(kind: str, data: st.DataObject) -> None:
    index, numbers = NullableIndex(KINDS[kind][1]), dict[Row, int]()
    views: list[tuple[Any, int]] = []
    for step in range(data.draw(st.integers(1, 4))):
        probe = data.draw(rows_of(kind, nulls=True))
        found = index.find(columns_of(kind, probe, data.draw(st.integers(0, 9))))
        assert found.tolist() == [numbers.get(row, -1) for row in probe]
        rows = data.draw(rows_of(kind, nulls=step > 0))
        gids = index.upsert(columns_of(kind, rows, data.draw(st.integers(0, 9))))
        assert gids.tolist() == [numbers.setdefault(row, len(numbers)) for row in rows]
        views.append((index.frozen(), len(index)))
    known = list(numbers)
    assert keys_at(index, list(range(len(known)))) == known
    for view, count in views:  # also those of before the first null
        assert len(view) == count
        assert keys_at(view, list(range(count))) == known[:count]


def test_what_lies_under_a_null_is_no_matter() -> None:
    under = pa.Array.from_buffers(pa.int64(), 3, [pa.py_buffer(b"\x05"), pa.py_buffer(np.array([1, 2, 1]))])
    other = pa.Array.from_buffers(pa.int64(), 3, [pa.py_buffer(b"\x05"), pa.py_buffer(np.array([1, 9, 1]))])
    index = NullableIndex([pa.int64()])
    assert index.upsert([under]).tolist() == index.upsert([other]).tolist() == [0, 1, 0]
    assert hash_keys([under]).tolist() == hash_keys([other]).tolist()


def test_the_plain_index_serves_until_a_null_comes() -> None:
    index = NullableIndex([pa.int64()])
    index.upsert([pa.array([1, 2])])
    assert type(index._index) is type(make_index([pa.int64()]))
    index.upsert([pa.array([None, 2])])
    assert type(index._index) is type(make_index([pa.int64(), pa.uint64()]))


def mix(x: int) -> int:
    mask = 2**64 - 1
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
    return x ^ (x >> 31)


def test_the_hash_of_a_null_is_the_documented_one_for_every_type() -> None:
    assert int(NULL_HASH) == mix(0x6E756C6C) == 0xE166071E7FB45925
    for _, types, _ in KINDS.values():
        for kind in types:
            assert hash_keys([pa.nulls(2, kind)]).tolist() == [int(NULL_HASH)] * 2
    both = hash_keys([pa.array([None, 1]), pa.array(["x", None])]).tolist()
    one, x = hash_keys([pa.array([1])]).tolist()[0], hash_keys([pa.array(["x"])]).tolist()[0]
    golden, mask = 0x9E3779B97F4A7C15, 2**64 - 1
    assert both == [mix((int(NULL_HASH) * golden + x) & mask), mix((one * golden + int(NULL_HASH)) & mask)]


def test_keys_with_nulls_place_rows_where_the_same_columns_without_do() -> None:
    assert NullableKeys(["a", "b"]) == ("a", "b")
