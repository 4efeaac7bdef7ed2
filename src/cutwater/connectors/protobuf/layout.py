"""Where the columns of a message type lie while values are decoded, and the Arrow arrays they become.

A *space* counts entries: the rows are one, and the items of each repeated field another.  What is true of each entry of
a space (a number, the length of a text, how many items a list has, whether something is there) lies in a *slot* of it,
by the entry's number.  What nobody wrote is zero, which is Protobuf's default.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.connectors.protobuf import decode_kernels as k
from cutwater.connectors.protobuf.types import Enums, ProtoEnum, ProtoField, arrow_type, item_type

NO_SLOT = -1
ROWS = 0
"""The space of the rows."""
_SLACK = 8
"""Bytes behind a text that may be written: texts are copied by words."""
_SLOT_WORDS, _SPACE_WORDS = k.SLOT_BYTES // 8, k.SPACE_BYTES // 8
_AT, _USED, _SIZE, _WANTED = 0, 1, 2, 7
_COUNT, _CAPACITY, _SPACE_WANTED = 0, 1, 3
_WIDTHS = {"bool": 1, "int64": 8, "uint64": 8, "sint64": 8, "fixed64": 8, "sfixed64": 8, "double": 8}


@dataclass(frozen=True)
class Fields:
    """The columns of a message that lies in a space."""

    columns: tuple[Column, ...]
    choices: dict[str, int]
    """The slot that tells which field of a oneof is there, by its number among them; 0: none."""


@dataclass(frozen=True)
class Column:
    """A column, or what lies in one."""

    field: ProtoField
    arrow: pa.DataType
    valid: int
    """Slot; ``NO_SLOT``: it is never null."""
    slot: int
    """Of the values, of the lengths of texts (the bytes are in the next one), or of the numbers of items."""
    space: int
    """In which it lies."""
    slots: range
    """All of it and of what is in it."""
    inner: Fields | None = None
    """Of a message."""
    items: Column | None = None
    """Of a list or a map: as if the field was not repeated."""


@dataclass(frozen=True)
class _Slot:
    kind: int
    space: int
    width: int
    child: int = 0
    """The space of the items."""


class Layout:
    """Slots for the columns of one message type, and their memory."""

    def __init__(self, enums: Enums) -> None:
        self._enums: Enums = enums
        self._slots: list[_Slot] = []
        self._spaces = 1
        self._per_row: dict[int, float] = {}
        """Bytes of a text, by its slot, as the last values had them."""
        self._items_per_row: list[float] = [1.0]
        """Of each space."""
        self._buffers: list[Any] = []
        self.slots = np.zeros((0, _SLOT_WORDS), np.int64)
        self.spaces = np.zeros((1, _SPACE_WORDS), np.int64)
        self.members: dict[int, int] = {}
        """Of a slot that tells which field of a oneof is there: where in the tables the slots of those fields are."""

    def __len__(self) -> int:
        return len(self._slots)

    def slot(self, kind: int, space: int, width: int, child: int = 0) -> int:
        """A further slot."""
        self._slots.append(_Slot(kind, space, width, child))
        return len(self._slots) - 1

    def fields(self, fields: Iterable[ProtoField], space: int) -> Fields:
        """Slots for fields of one message."""
        columns = tuple(self.column(one, space) for one in fields)
        names = dict.fromkeys(one.field.oneof for one in columns if one.field.oneof)
        return Fields(columns, {name: self.slot(k.VALUES, space, 4) for name in names})

    def column(self, field: ProtoField, space: int) -> Column:
        """Slots for a column, all of them one behind the other."""
        first, arrow = len(self), arrow_type(field, self._enums)
        valid = self.slot(k.VALUES, space, 1) if field.presence else NO_SLOT
        if not field.repeated:
            slot, inner = self._value(field, space)
            return Column(field, arrow, valid, slot, space, range(first, len(self)), inner)
        child = self._spaces
        self._spaces += 1
        self._items_per_row.append(0.0)
        slot = self.slot(k.ITEMS, space, 4, child)
        begin = len(self)
        item, inner = self._value(field, child)
        items = Column(field, item_type(field, self._enums), NO_SLOT, item, child, range(begin, len(self)), inner)
        return Column(field, arrow, valid, slot, space, range(first, len(self)), None, items)

    def _value(self, field: ProtoField, space: int) -> tuple[int, Fields | None]:
        if field.message is not None:
            return NO_SLOT, self.fields(field.message.fields, space)
        if field.kind in ("string", "bytes"):
            slot = self.slot(k.LENGTHS, space, 4)
            self.slot(k.CONTENT, space, 1)
            return slot, None
        return self.slot(k.VALUES, space, _WIDTHS.get(field.kind, 4)), None

    # ------------------------------------------------------------------------------------------------------- memory

    def begin(self, rows: int, content_bytes: int) -> None:
        """Fresh memory for so many rows, whose values have so many bytes."""
        self.spaces = np.zeros((self._spaces, _SPACE_WORDS), np.int64)
        self.spaces[ROWS, _CAPACITY] = rows
        for space in range(1, self._spaces):
            guess = int(rows * self._items_per_row[space] * 1.07) + 16
            self.spaces[space, _CAPACITY] = min(guess, content_bytes + 1)  # an item has a byte at least
        self.slots = np.zeros((len(self), _SLOT_WORDS), np.int64)
        self._buffers = []
        texts = sum(slot.kind == k.CONTENT for slot in self._slots)
        for number, slot in enumerate(self._slots):
            more = self.members.get(number, slot.child * k.SPACE_BYTES)
            self.slots[number, 3:7] = slot.kind, slot.space * k.SPACE_BYTES, slot.width, more
            if slot.kind == k.CONTENT:
                guess = int(rows * self._per_row.get(number, content_bytes / texts / max(1, rows)) * 1.07) + 64
                self._buffers.append(self._content(number, min(guess, content_bytes)))
            else:
                self._buffers.append(self._zeros(number, slot))

    def _content(self, number: int, size: int) -> Any:
        made: Any = np.empty(size + _SLACK, np.uint8)
        self.slots[number, _AT], self.slots[number, _SIZE] = made.ctypes.data, size
        return made

    def _zeros(self, number: int, slot: _Slot) -> Any:
        made: Any = np.zeros(int(self.spaces[slot.space, _CAPACITY]) * slot.width + _SLACK, np.uint8)
        self.slots[number, _AT] = made.ctypes.data
        return made

    def grow(self) -> None:
        """More memory where there was no room."""
        for space in np.flatnonzero(self.spaces[:, _SPACE_WANTED] > self.spaces[:, _CAPACITY]).tolist():
            self.spaces[space, _CAPACITY] = 2 * self.spaces[space, _SPACE_WANTED]
            used = int(self.spaces[space, _COUNT])
            for number, slot in enumerate(self._slots):
                if slot.space == space and slot.kind != k.CONTENT:
                    before = self._buffers[number]
                    self._buffers[number] = self._zeros(number, slot)
                    self._buffers[number][: used * slot.width] = before[: used * slot.width]
        for number in np.flatnonzero(self.slots[:, _WANTED] > self.slots[:, _SIZE]).tolist():
            used, before = int(self.slots[number, _USED]), self._buffers[number]
            self._buffers[number] = self._content(number, 2 * int(self.slots[number, _WANTED]))
            self._buffers[number][:used] = before[:used]

    def done(self, rows: int) -> None:
        """Note how much was used, for the next rows."""
        if rows:
            for space in range(1, self._spaces):
                self._items_per_row[space] = int(self.spaces[space, _COUNT]) / rows
            for number, slot in enumerate(self._slots):
                if slot.kind == k.CONTENT:
                    self._per_row[number] = int(self.slots[number, _USED]) / rows

    # ------------------------------------------------------------------------------------------------------- arrays

    def array(self, column: Column, entries: int, *, dictionaries: bool = False) -> pa.Array:
        """What was decoded; with ``dictionaries`` an enum comes as such."""
        if column.items is not None:
            return self._list(column, column.items, entries)
        mask, nulls = self._mask(column.valid, entries)
        if column.inner is not None:
            return self._message(column, column.inner.columns, entries, mask, nulls)
        kind, enum = column.field.kind, column.field.enum
        if kind in ("string", "bytes"):
            ends = _ends(self._values(column.slot, entries, np.int32))
            buffers = [mask, pa.py_buffer(ends), self._buffer(column.slot + 1, int(ends[-1]))]
            return pa.Array.from_buffers(column.arrow, entries, buffers, nulls)
        if enum is not None and self._enums == "text":
            found = _names(enum, self._values(column.slot, entries, np.int32), mask, nulls)
            return found if dictionaries else found.dictionary_decode()
        if kind == "bool":
            values = _bits(self._values(column.slot, entries, np.uint8))
        else:
            values = self._buffer(column.slot, entries * self._slots[column.slot].width)
        return pa.Array.from_buffers(column.arrow, entries, [mask, values], nulls)

    def _message(
        self, column: Column, columns: tuple[Column, ...], entries: int, mask: pa.Buffer | None, nulls: int
    ) -> pa.Array:
        message = column.field.message
        known = None if message is None else message.well_known
        if known == "wrapper":
            held = self.array(columns[0], entries)
            return pa.Array.from_buffers(column.arrow, entries, [mask, *held.buffers()[1:]], nulls)
        if known is not None:
            seconds, nanos = (self._values(one.slot, entries, t) for one, t in zip(columns, _PARTS, strict=True))
            values = seconds * 1_000_000 + np.trunc(nanos / 1000).astype(np.int64)
            return pa.Array.from_buffers(column.arrow, entries, [mask, pa.py_buffer(values)], nulls)
        inner = [self.array(one, entries) for one in columns]
        return pa.Array.from_buffers(column.arrow, entries, [mask], nulls, children=inner)

    def _list(self, column: Column, items: Column, entries: int) -> pa.Array:
        ends = _ends(self._values(column.slot, entries, np.int32))
        if not column.field.is_map:
            held = self.array(items, int(ends[-1]))
            return pa.Array.from_buffers(column.arrow, entries, [None, pa.py_buffer(ends)], 0, children=[held])
        assert items.inner is not None
        parts = sorted(items.inner.columns, key=lambda one: one.field.number)
        keys, values = (self.array(one, int(ends[-1])) for one in parts)
        ends, keys, values = _last_of_each_key(ends, keys, values)
        pairs = pa.struct([column.arrow.key_field, column.arrow.item_field])
        held = pa.Array.from_buffers(pairs, len(keys), [None], 0, children=[keys, values])
        return pa.Array.from_buffers(column.arrow, entries, [None, pa.py_buffer(ends)], 0, children=[held])

    def _buffer(self, slot: int, size: int) -> pa.Buffer:
        return pa.py_buffer(self._buffers[slot]).slice(0, size)

    def _values(self, slot: int, entries: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        return np.frombuffer(self._buffers[slot], dtype, entries)

    def _mask(self, slot: int, entries: int) -> tuple[pa.Buffer | None, int]:
        if slot == NO_SLOT:
            return None, 0
        valid = self._values(slot, entries, np.uint8)
        nulls = entries - int(np.count_nonzero(valid))
        return (_bits(valid), nulls) if nulls else (None, 0)


_PARTS = (np.int64, np.int32)
"""Of a timestamp and a duration: seconds, and nanoseconds besides."""


def _bits(flags: npt.NDArray[np.uint8]) -> pa.Buffer:
    return pa.py_buffer(np.packbits(flags, bitorder="little"))


def _ends(lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Offsets."""
    ends = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=ends[1:])
    return ends


def _names(enum: ProtoEnum, numbers: npt.NDArray[np.int32], mask: pa.Buffer | None, nulls: int) -> pa.DictionaryArray:
    """The names of an enum's numbers; a number without one as digits."""
    known = np.array([number for number, _ in enum.values], np.int64)
    names = [name for _, name in enum.values]
    place = np.minimum(np.searchsorted(known, numbers), len(known) - 1)
    other = known[place] != numbers
    if other.any():
        unknown, which = np.unique(numbers[other], return_inverse=True)
        place[other] = len(names) + which
        names += [str(number) for number in unknown.tolist()]
    places = pa.Array.from_buffers(pa.int32(), len(place), [mask, pa.py_buffer(place.astype(np.int32))], nulls)
    return pa.DictionaryArray.from_arrays(places, pa.array(names, pa.string()))


def _last_of_each_key(
    ends: npt.NDArray[np.int32], keys: pa.Array, values: pa.Array
) -> tuple[npt.NDArray[np.int32], pa.Array, pa.Array]:
    """Entries of maps without those whose key comes again in the same map: the last one counts."""
    counts = np.diff(ends)
    if not len(counts) or counts.max() <= 1:
        return ends, keys, values
    rows = np.repeat(np.arange(len(counts)), counts)
    encoded = keys.dictionary_encode()
    pairs = rows * len(encoded.dictionary) + np.asarray(encoded.indices)
    _, backwards = np.unique(pairs[::-1], return_index=True)
    if len(backwards) == len(pairs):
        return ends, keys, values
    kept = np.sort(len(pairs) - 1 - backwards)
    chosen = pa.array(kept)
    return (
        _ends(np.bincount(rows[kept], minlength=len(counts)).astype(np.int32)),
        keys.take(chosen),
        values.take(chosen),
    )
