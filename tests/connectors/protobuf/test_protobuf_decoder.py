"""Protobuf messages to columns: as the official library reads them, and never more than an error for any bytes."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import mmap
import random
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

import protobuf_world as world
from cutwater.connectors.messages.base import Values
from cutwater.connectors.protobuf.decoder import ProtobufDecoder
from cutwater.connectors.protobuf.types import message_type

UNDECIDED: Any = object()


def parsed(cls: Any, value: bytes) -> Any:
    """What the library reads, as a row; ``None``: nothing, or what we refuse."""
    try:
        message = cls.FromString(value)
        if world.is_undecided(message):
            return UNDECIDED
        return world.row_of(message) if world.is_row(message) else None
    except (DecodeError, UnicodeDecodeError):
        return None


def same(ours: Any, theirs: Any) -> bool:
    """Equal, and NaN equal to itself."""
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[name], theirs[name]) for name in ours)
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(itertools.starmap(same, zip(ours, theirs, strict=True)))
    return ours == theirs or (ours != ours and theirs != theirs)


@given(st.data())
@settings(deadline=None, max_examples=200)
def test_any_message_of_any_type_is_what_the_library_reads(data: st.DataObject) -> None:
    cls, messages = data.draw(world.messages())
    written = data.draw(st.lists(messages, min_size=1, max_size=5))
    found = world.decode(cls, [one.SerializeToString() for one in written])
    assert found.bad == []
    assert world.rows_of(found) == [world.row_of(one) for one in written]


@given(st.data())
@settings(deadline=None, max_examples=100)
def test_messages_behind_each_other_are_merged_as_the_library_does(data: st.DataObject) -> None:
    cls, messages = data.draw(world.messages())
    parts = data.draw(st.lists(messages, min_size=2, max_size=4))
    whole = b"".join(one.SerializeToString() for one in parts)
    merged = cls.FromString(whole)
    if not world.is_row(merged):  # seconds of one duration with the nanoseconds of another
        return
    found = world.decode(cls, [whole, whole])
    assert found.bad == []
    assert world.rows_of(found) == 2 * [world.row_of(merged)]


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_columns_that_nobody_reads_are_null_and_change_no_other(data: st.DataObject) -> None:
    cls, messages = data.draw(world.messages())
    names = [f.name for f in cls.DESCRIPTOR.fields]
    wanted = frozenset(data.draw(st.sets(st.sampled_from(names), min_size=1)))
    parts = data.draw(st.lists(messages, min_size=1, max_size=4))
    written = [one.SerializeToString() for one in parts] + [b"".join(one.SerializeToString() for one in parts)]
    found = world.decode(cls, written, wanted).rows
    whole = world.decode(cls, written).rows
    for name in names:
        column = found.column(name)
        assert column.equals(whole.column(name)) if name in wanted else column.null_count == len(written)


def changed(whole: bytes, chance: random.Random) -> bytes:
    """The value with some bytes replaced, put in, left out or repeated."""
    made = bytearray(whole)
    for _ in range(chance.randrange(1, 4)):
        place = chance.randrange(len(made) + 1)
        if chance.random() < 0.2:
            made[place:place] = made[chance.randrange(len(made) + 1) :][:20]
        else:
            made[place : place + chance.randrange(3)] = chance.randbytes(chance.randrange(4))
    return bytes(made)


@given(st.data())
@settings(deadline=None, max_examples=150)
def test_of_any_bytes_those_are_rows_that_the_library_reads(data: st.DataObject) -> None:
    cls, messages = data.draw(world.messages())
    whole = data.draw(messages).SerializeToString()
    chance = random.Random(data.draw(st.integers(0, 2**32)))
    values = [changed(whole, chance) for _ in range(100)]
    values += [whole[:size] for size in range(len(whole))]
    expected = {number: row for number, value in enumerate(values) if (row := parsed(cls, value)) is not None}
    found = world.decode(cls, values)
    reasons = dict(found.bad)
    good = range(len(values)) if found.good is None else found.good.tolist()
    rows = dict(zip(good, world.rows_of(found), strict=True))
    for number in rows.keys() | expected.keys():
        if expected.get(number) is UNDECIDED or reasons.get(number, "").endswith("not UTF-8"):
            continue  # proto2 lets the library pass over such a text that another one replaces
        assert number in expected, ("the library does not read", values[number], rows[number])
        assert number in rows, ("we do not read", values[number], expected[number], reasons[number])
        assert same(rows[number], expected[number]), (values[number], rows[number], expected[number])


@pytest.fixture(scope="module")
def at_the_edge() -> Any:
    """``at_the_edge(values)``: they lie right before a page that must not be read: a byte too far ends the process."""
    size = 1 << 20
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(address + size), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0

    def place(values: list[bytes | None]) -> Values:
        made = Values.of(values)
        assert made.data.size <= size
        memory[size - made.data.size : size] = made.data.to_pybytes()
        return dataclasses.replace(
            made, data=pa.foreign_buffer(address + size - made.data.size, made.data.size, memory)
        )

    return place


@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_nothing_behind_the_values_is_read(at_the_edge: Any, data: st.DataObject) -> None:
    cls, messages = data.draw(world.messages())
    whole = data.draw(messages).SerializeToString()
    decoder = ProtobufDecoder(message_type(cls.DESCRIPTOR), None, "text", dictionaries=False)
    chance = random.Random(data.draw(st.integers(0, 2**32)))
    for value in [whole[:size] for size in range(len(whole))] + [changed(whole, chance) for _ in range(50)]:
        decoder.decode(at_the_edge([value]), first_only=False)
    found = decoder.decode(at_the_edge([whole, whole]), first_only=False).rows
    assert found.equals(world.decode(cls, [whole, whole]).rows)
