"""One contract for all kinds of index; the oracle is a dict that numbers keys as they come."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutwater.state.key_index import BytesIndex, KeyIndex, NullableIndex, TextIndex, WordsIndex, make_index
from cutwater.state.keys import hash_keys
from cutwater.state.table.multi_row_keys import FrozenMultiRowKeys

Row = tuple[object, ...]

NUMBERS = st.integers(-5, 5)
TEXTS = st.text(alphabet="ab\0é", max_size=12)

# kind -> (class, column types, rows)
KINDS: dict[str, tuple[type[KeyIndex], list[pa.DataType], st.SearchStrategy[Row]]] = {
    "int64": (WordsIndex, [pa.int64()], st.tuples(NUMBERS | st.integers(-(2**63), 2**63 - 1))),
    "uint8": (WordsIndex, [pa.uint8()], st.tuples(st.integers(0, 255))),
    "uint64": (WordsIndex, [pa.uint64()], st.tuples(st.integers(0, 2**64 - 1))),
    "bool": (WordsIndex, [pa.bool_()], st.tuples(st.booleans())),
    "float32": (WordsIndex, [pa.float32()], st.tuples(st.floats(allow_nan=False, width=32).map(lambda x: x + 0.0))),
    "two words": (WordsIndex, [pa.int32(), pa.float64()], st.tuples(NUMBERS, NUMBERS.map(float))),
    "three words": (WordsIndex, [pa.bool_(), pa.int8(), pa.int64()], st.tuples(st.booleans(), NUMBERS, NUMBERS)),
    "string": (TextIndex, [pa.string()], st.tuples(TEXTS)),
    "large binary": (TextIndex, [pa.large_binary()], st.tuples(st.binary(max_size=20))),
    "decimal": (BytesIndex, [pa.decimal128(9, 2)], st.tuples(st.decimals(-99, 99, places=2))),
    "word and string": (TextIndex, [pa.int64(), pa.string()], st.tuples(NUMBERS, TEXTS)),
    "strings around a word": (TextIndex, [pa.string(), pa.int16(), pa.string()], st.tuples(TEXTS, NUMBERS, TEXTS)),
}

each_kind = pytest.mark.parametrize("kind", KINDS)


def columns_of(kind: str, rows: list[Row], skipped: int = 0) -> list[pa.Array]:
    """The rows as key columns; ``skipped``: in arrays that begin at that offset."""
    _, types, _ = KINDS[kind]
    padded = rows[:1] * skipped + rows
    return [pa.array([row[c] for row in padded], t).slice(skipped) for c, t in enumerate(types)]


class Oracle:
    def __init__(self) -> None:
        self.gids: dict[Row, int] = {}

    def find(self, rows: list[Row]) -> list[int]:
        return [self.gids.get(row, -1) for row in rows]

    def upsert(self, rows: list[Row]) -> list[int]:
        return [self.gids.setdefault(row, len(self.gids)) for row in rows]


@each_kind
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_gids_are_numbered_as_keys_first_come(kind: str, data: st.DataObject) -> None:
    made, types, strategy = KINDS[kind]
    index, oracle = make_index(types), Oracle()
    assert type(index) is made
    for rows in data.draw(st.lists(st.lists(strategy, min_size=1, max_size=30), max_size=4)):
        assert index.upsert(columns_of(kind, rows, data.draw(st.integers(0, 9)))).tolist() == oracle.upsert(rows)
        assert len(index) == len(oracle.gids)
    if len(index):
        order = data.draw(st.permutations(range(len(index))))
        back = [c.to_pylist() for c in index.columns(np.array(order, np.int32))]
        keys = list(oracle.gids)
        assert list(zip(*back, strict=True)) == [keys[gid] for gid in order]
        assert [c.type for c in index.columns(np.array(order, np.int32))] == types


def many(kind: str, count: int) -> list[Row]:
    """Distinct keys: number i spread over the columns."""
    _, types, _ = KINDS[kind]
    make: dict[str, Callable[[int], object]] = {
        "string": lambda i: f"k{i}" * (i % 9),
        "large_binary": lambda i: i.to_bytes(3, "big") * (1 + i % 5),
        "bool": lambda i: bool(i % 2),
        "int8": lambda i: i % 100,
        "int16": lambda i: i % 1000,
        "float": float,
        "double": lambda i: i / 4,
        "uint8": lambda i: i % 256,
    }
    return [tuple(make.get(str(t), lambda i: i)(i) for t in types) for i in range(count)]


def test_texts_of_all_lengths_around_a_word_differ_from_each_other() -> None:
    texts = [text for length in range(15) for text in ("a" * length, "a" * length + "\0", "\0" * (length + 1))]
    distinct = list(dict.fromkeys(texts))
    index = make_index([pa.string()])
    whole = pa.array(texts)
    for begin in range(len(texts)):  # the last ones end where the memory may end, too
        exact = pa.StringArray.from_buffers(1, *pa.array([texts[begin]]).buffers()[1:])
        assert index.find([exact]).tolist() == [-1 if begin == 0 or texts[begin] not in texts[:begin] else
                                                distinct.index(texts[begin])]  # fmt: skip
        assert index.upsert([exact]).tolist() == [distinct.index(texts[begin])]
    assert index.upsert([whole]).tolist() == [distinct.index(text) for text in texts]
    assert index.find([pa.array(["a" * 16, "a" * 15])]).tolist() == [-1, -1]
    assert index.find([whole]).tolist() == [distinct.index(text) for text in texts]


@each_kind
def test_growing_keeps_every_gid(kind: str) -> None:
    index, oracle = make_index(KINDS[kind][1]), Oracle()
    rows = many(kind, 9000)
    for begin in (0, 3000, 0, 6000):
        part = rows[begin : begin + 3000]
        assert index.upsert(columns_of(kind, part)).tolist() == oracle.upsert(part)
    assert index.upsert(columns_of(kind, rows)).tolist() == oracle.upsert(rows)


@each_kind
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_find_tells_known_keys_from_unknown_ones_and_adds_none(kind: str, data: st.DataObject) -> None:
    _, types, strategy = KINDS[kind]
    index, oracle = make_index(types), Oracle()
    lists = st.lists(strategy, max_size=20)
    for rows, wanted in data.draw(st.lists(st.tuples(lists, lists), max_size=3)):
        index.upsert(columns_of(kind, rows))
        oracle.upsert(rows)
        assert index.find(columns_of(kind, wanted)).tolist() == oracle.find(wanted)
        assert len(index) == len(oracle.gids)


@each_kind
def test_a_frozen_view_stays_as_it_is(kind: str) -> None:
    index = make_index(KINDS[kind][1])
    rows = many(kind, 5000)
    index.upsert(columns_of(kind, rows[:100]))
    frozen, used = index.frozen(), len(index)
    before = [c.to_pylist() for c in frozen.columns(np.arange(used))]
    index.upsert(columns_of(kind, rows[::-1]))
    assert len(frozen) == used
    assert [c.to_pylist() for c in frozen.columns(np.arange(used))] == before


@each_kind
def test_a_frozen_view_refuses_to_find_and_to_add(kind: str) -> None:
    index = make_index(KINDS[kind][1])
    columns = columns_of(kind, many(kind, 100))
    index.upsert(columns)
    for ask in (index.frozen().find, index.frozen().upsert):
        with pytest.raises(AttributeError):  # never a look at memory that is not its own
            ask(columns)
    assert (index.find(columns) >= 0).all()


def test_the_keys_of_a_frozen_index_are_gathered_as_group_ids() -> None:
    """Only those of 32 bits are copied at once; see ``gather``."""
    index, asked = NullableIndex([pa.int64()]), []
    index.upsert([pa.array([3, 1, 2])])
    real = index.columns
    index.columns = lambda gids: asked.append(gids.dtype) or real(gids)
    spilled = SimpleNamespace(rows=SimpleNamespace(chunks=lambda: iter(())))
    table: Any = SimpleNamespace(spilled=spilled, index=index)
    frozen: FrozenMultiRowKeys[Any] = FrozenMultiRowKeys(table, index, lambda *_: None)  # type: ignore[arg-type]
    list(frozen.parts(np.empty(0, np.int32), lambda _: []))
    assert asked == [np.int32]


@each_kind
def test_an_empty_batch_changes_nothing(kind: str) -> None:
    index = make_index(KINDS[kind][1])
    assert index.upsert(columns_of(kind, [])).tolist() == []
    assert len(index) == 0


def test_a_string_of_ten_megabytes_is_a_key_like_any_other() -> None:
    index = make_index([pa.string()])
    long = ["x" * 10_000_000, "x" * 9_999_999 + "y", "x" * 10_000_000]
    assert index.upsert([pa.array(long)]).tolist() == [0, 1, 0]
    assert index.columns(np.array([1]))[0].to_pylist() == [long[1]]


def test_where_one_column_ends_matters() -> None:
    index = make_index([pa.string(), pa.string()])
    assert index.upsert([pa.array(["ab", "a", ""]), pa.array(["c", "bc", "abc"])]).tolist() == [0, 1, 2]


def test_words_that_collide_in_the_table_are_told_apart() -> None:
    # Multiples of a power of two would share their low bits; a weak hash would still work here, only slowly: the
    # point is that probing over a full neighbourhood finds the right key.
    keys = np.arange(900, dtype=np.int64) << 40
    index = make_index([pa.int64()])
    assert index.upsert([pa.array(keys)]).tolist() == list(range(900))
    assert index.upsert([pa.array(keys[::-1])]).tolist() == list(range(899, -1, -1))


M64 = 2**64 - 1


def unmix(x: int) -> int:
    """The inverse of splitmix64's finaliser: gives keys with any hash one likes."""
    x ^= x >> 31 ^ x >> 62
    x = x * pow(0x94D049BB133111EB, -1, 2**64) & M64
    x ^= x >> 27 ^ x >> 54
    x = x * pow(0xBF58476D1CE4E5B9, -1, 2**64) & M64
    return x ^ x >> 30 ^ x >> 60


# Equal in the upper half (the tag) and in the low bits (the place in the table), different between.
COLLIDING = [0xABCDEF0100000123 + (i << 24) for i in range(8)]


def test_equal_tags_at_one_place_are_told_apart_by_their_bytes() -> None:
    keys: list[bytes] = []
    for wanted in COLLIDING:
        h = unmix(wanted)
        h ^= h >> 32
        word = h * pow(0xBF58476D1CE4E5B9, -1, 2**64) & M64
        keys.append((word ^ 8 * 0x9E3779B97F4A7C15 & M64).to_bytes(8, "little"))
    column = pa.array(keys, pa.binary())
    assert hash_keys([column]).tolist() == COLLIDING
    index = make_index([pa.binary()])
    assert index.upsert([column]).tolist() == list(range(8))
    assert index.find([column.take(pa.array([5, 0, 7]))]).tolist() == [5, 0, 7]


def test_equal_tags_at_one_place_are_told_apart_by_their_words() -> None:
    text = int(hash_keys([pa.array(["same text"])])[0])
    words = [(unmix(wanted) - text - 0x9E3779B97F4A7C15) & M64 for wanted in COLLIDING]
    columns = [pa.array(words, pa.uint64()), pa.array(["same text"] * 8)]
    index = make_index([pa.uint64(), pa.string()])
    assert index.upsert(columns).tolist() == list(range(8))
    assert index.find(columns).tolist() == list(range(8))
