"""Where the columns of a schema lie while values are decoded: slots of memory, and the Arrow arrays they become."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from cutwater.connectors.avro import decode_kernels as kernels
from cutwater.connectors.avro.schemas import AvroType, arrow_type
from cutwater.data.words import new_buffer

NO_SLOT = -1
_SLACK = 8
"""Bytes behind a slot that may be written: texts are copied by words."""
_WORDS = kernels.SLOT_BYTES // 8
_AT, _USED, _SIZE, _WANTED = 0, 1, 2, 4


@dataclass(frozen=True)
class Column:
    """A column, or what lies in one."""

    type: AvroType
    """Not null: what a union holds otherwise."""
    arrow: pa.DataType
    valid: int
    """Slot; ``NO_SLOT``: it is never null."""
    slot: int
    """Of the values, or of the offsets, then the bytes are in the next one; ``NO_SLOT``: it has none of its own."""
    inner: tuple[Column, ...] = ()
    """The fields of a record, the items of an array, the keys and values of a map."""


class Layout:
    """Slots for the columns of one schema, and their memory.

    >>> layout = Layout()
    >>> layout.column(AvroType("string"), "t").slot, layout.column(AvroType("long"), "n").slot
    (0, 2)
    """

    def __init__(self) -> None:
        self._widths: list[int] = []
        """Bytes for each value; 0: of a text."""
        self._first: list[int] = []
        """What is in a slot at the beginning: an offset, or nothing."""
        self._row_bytes: list[float] = []
        """Of each slot, as the last values were."""
        self._buffers: list[pa.Buffer] = []
        self._table = np.zeros((0, _WORDS), np.int64)

    def __len__(self) -> int:
        return len(self._widths)

    @property
    def address(self) -> int:
        """Of the slots; ``begin`` moves them."""
        return self._table.ctypes.data

    def _slot(self, width: int, first: int = 0) -> int:
        self._widths.append(width)
        self._first.append(first)
        self._row_bytes.append(float(width))
        return len(self._widths) - 1

    def column(self, type: AvroType, path: str) -> Column:
        """Slots for a column.

        Raises:
            BuildError: there is no such column; names the field.
        """
        arrow, held = arrow_type(type, path), type.value
        valid = self._slot(1) if type.nullable else NO_SLOT
        if held.kind == "null":
            return Column(held, arrow, valid, NO_SLOT)
        if held.kind == "record":
            inner = tuple(self.column(f.type, f"{path}.{f.name}") for f in held.fields)
            return Column(held, arrow, valid, NO_SLOT, inner)
        if held.kind in ("array", "map"):
            slot = self._slot(4, first=4)
            keys = (self.column(AvroType("string"), path),) if held.kind == "map" else ()
            return Column(held, arrow, valid, slot, (*keys, self.column(held.inner[0], path)))
        if held.kind == "enum":
            return Column(held, arrow, valid, self._slot(4))
        if pa.types.is_string(arrow) or pa.types.is_binary(arrow):
            slot = self._slot(4, first=4)
            self._slot(0)
            return Column(held, arrow, valid, slot)
        return Column(held, arrow, valid, self._slot(max(1, arrow.bit_width // 8)))

    def begin(self, rows: int, content_bytes: int) -> None:
        """Fresh memory for so many rows; texts may have so many bytes."""
        self._table = np.zeros((len(self), _WORDS), np.int64)
        self._buffers = []
        for slot, (width, first) in enumerate(zip(self._widths, self._first, strict=True)):
            size = first + int(rows * self._row_bytes[slot])
            if not width and not self._row_bytes[slot]:
                size = content_bytes // max(1, self._widths.count(0))
            # The last rows may have been few and large.
            size = min(size, first + max(rows * width, content_bytes * max(1, width)))
            self._buffers.append(self._memory(slot, size + size // 16 + 64))
            if first:
                _bytes_of(self._buffers[slot])[:first] = 0
                self._table[slot, _USED] = first

    def _memory(self, slot: int, size: int) -> pa.Buffer:
        buffer, _ = new_buffer(size + _SLACK, np.uint8)
        self._table[slot, _AT], self._table[slot, _SIZE] = buffer.address, size
        return buffer

    def grow(self) -> bool:
        """More memory for slots in which there was no room; false if there was room in all."""
        wanting = np.flatnonzero(self._table[:, _WANTED] > self._table[:, _SIZE])
        for slot in wanting.tolist():
            used, wanted = int(self._table[slot, _USED]), int(self._table[slot, _WANTED])
            before = self._buffers[slot]
            self._buffers[slot] = self._memory(slot, 2 * wanted)
            _bytes_of(self._buffers[slot])[:used] = _bytes_of(before)[:used]
        return len(wanting) > 0

    def done(self, rows: int) -> None:
        """Note how much was used, for the next rows."""
        if rows:
            for slot, (width, first) in enumerate(zip(self._widths, self._first, strict=True)):
                self._row_bytes[slot] = max(float(width), (int(self._table[slot, _USED]) - first) / rows)

    def array(self, column: Column, rows: int, dictionaries: bool) -> pa.Array:
        """What was decoded; with ``dictionaries`` an enum comes as such."""
        mask, nulls = self._mask(column.valid, rows)
        kind = column.type.kind
        if kind == "null":
            return pa.nulls(rows)
        if kind == "record":
            inner = [self.array(one, rows, False) for one in column.inner]
            return pa.Array.from_buffers(column.arrow, rows, [mask], nulls, children=inner)
        if kind == "enum":
            numbers = pa.Array.from_buffers(pa.int32(), rows, [mask, self._used(column.slot)], nulls)
            found = pa.DictionaryArray.from_arrays(numbers, pa.array(column.type.symbols, pa.string()))
            return found if dictionaries else found.dictionary_decode()
        values = self._used(column.slot)
        if kind in ("array", "map"):
            items = int(np.frombuffer(values, np.int32)[rows])
            inner = [self.array(one, items, False) for one in column.inner]
            if kind == "map":
                pairs = pa.struct([column.arrow.key_field, column.arrow.item_field])
                inner = [pa.Array.from_buffers(pairs, items, [None], 0, children=inner)]
            return pa.Array.from_buffers(column.arrow, rows, [mask, values], nulls, children=inner)
        if pa.types.is_string(column.arrow) or pa.types.is_binary(column.arrow):
            return pa.Array.from_buffers(column.arrow, rows, [mask, values, self._used(column.slot + 1)], nulls)
        if kind == "boolean":
            values = pa.py_buffer(np.packbits(np.frombuffer(values, np.uint8), bitorder="little"))
        return pa.Array.from_buffers(column.arrow, rows, [mask, values], nulls)

    def _used(self, slot: int) -> pa.Buffer:
        return self._buffers[slot].slice(0, int(self._table[slot, _USED]))

    def _mask(self, slot: int, rows: int) -> tuple[pa.Buffer | None, int]:
        if slot == NO_SLOT:
            return None, 0
        valid = np.frombuffer(self._used(slot), np.uint8)
        nulls = rows - int(np.count_nonzero(valid))
        return (pa.py_buffer(np.packbits(valid, bitorder="little")), nulls) if nulls else (None, 0)


def _bytes_of(buffer: pa.Buffer) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(buffer, np.uint8)
