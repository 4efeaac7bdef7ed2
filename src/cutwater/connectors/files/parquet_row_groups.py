"""Row groups of a Parquet file that grows: each is encoded by Arrow as a file of its own and moved to where it lies.

The footer of a Parquet file is a struct in Thrift's compact protocol.  It is read here as a tree of fields, so that the
offsets in it can be moved, and written again; what a field means does not matter otherwise.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pyarrow as pa

from cutwater.errors import CorruptSnapshotError

MAGIC = b"PAR1"
_UNREADABLE = "the footer of a Parquet file cannot be read"
_TAIL = struct.Struct("<I4s")
"""Behind the footer: how many bytes it has, and the magic."""

_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12
_FILE_ROWS, _FILE_ROW_GROUPS = 3, 4
_GROUP_COLUMNS, _GROUP_ROWS, _GROUP_OFFSET, _GROUP_ORDINAL = 1, 3, 5, 7
_CHUNK_OFFSETS, _CHUNK_META = (2, 4, 6), 3
"""Offsets of a column chunk (zero where nobody says any) and of its indexes; and what else it says."""
_META_OFFSETS = (9, 10, 11, 14)
"""Of the first data page, an index page, a dictionary page and a bloom filter."""
_ORDINALS = 1 << 15
_GROUP_KINDS: dict[int, int] = {_GROUP_COLUMNS: _LIST, _GROUP_ROWS: _I64, _GROUP_OFFSET: _I64, _GROUP_ORDINAL: _I16}
_CHUNK_KINDS: dict[int, int] = {**dict.fromkeys(_CHUNK_OFFSETS, _I64), _CHUNK_META: _STRUCT}
_META_KINDS: dict[int, int] = dict.fromkeys(_META_OFFSETS, _I64)


class _Field(NamedTuple):
    id: int
    kind: int
    value: Any


class _Elements(NamedTuple):
    kind: int
    values: list[Any]


class RowGroup(NamedTuple):
    """A row group as the footer tells of it, with offsets in the file that it came in."""

    rows: int
    fields: list[_Field]


class Footer:
    """The footer of a Parquet file, without what it says of row groups.

    Args:
        file: a whole Parquet file.

    Raises:
        CorruptSnapshotError: it is none.
    """

    def __init__(self, file: pa.Buffer) -> None:
        self.data_end, body = _footer_of(file)
        """How many bytes of the file lie before the footer."""
        fields = _Reader(body).struct()
        self._fields = [field for field in fields if field.id not in (_FILE_ROWS, _FILE_ROW_GROUPS)]
        found = next((field.value for field in fields if field.id == _FILE_ROW_GROUPS), None)
        self.row_groups = [_row_group(fields) for fields in _structs(found)] if found is not None else []

    def end_of_file(self, row_groups: list[bytes], rows: int) -> bytes:
        """What makes a whole file of a magic and row groups behind it.

        Args:
            row_groups: from ``placed``, in the order in which they are read.
            rows: of all of them.
        """
        more = [_Field(_FILE_ROWS, _I64, rows), _Field(_FILE_ROW_GROUPS, _LIST, _Elements(_STRUCT, row_groups))]
        body = _struct(sorted([*self._fields, *more]))
        return body + _TAIL.pack(len(body), MAGIC)


def placed(row_group: RowGroup, moved_by: int, number: int) -> bytes:
    """A footer's words on a row group, the ``number``-th of a file, ``moved_by`` bytes behind where it was."""
    made: list[_Field] = []
    for field in row_group.fields:
        if field.id == _GROUP_COLUMNS:
            chunks = [_moved_chunk(chunk, moved_by) for chunk in field.value.values]
            made.append(field._replace(value=_Elements(_STRUCT, chunks)))
        elif field.id == _GROUP_OFFSET:
            made.append(field._replace(value=field.value + moved_by))
        elif field.id != _GROUP_ORDINAL:
            made.append(field)
        elif number < _ORDINALS:
            made.append(field._replace(value=number))
    return _struct(made)


def _moved_chunk(chunk: list[_Field], moved_by: int) -> list[_Field]:
    made: list[_Field] = []
    for field in chunk:
        if field.id in _CHUNK_OFFSETS and field.value:
            field = field._replace(value=field.value + moved_by)
        elif field.id == _CHUNK_META:
            meta = [f._replace(value=f.value + moved_by) if f.id in _META_OFFSETS else f for f in field.value]
            field = field._replace(value=meta)
        made.append(field)
    return made


def _row_group(fields: list[_Field]) -> RowGroup:
    _check(fields, _GROUP_KINDS)
    for field in fields:
        for chunk in _structs(field.value) if field.id == _GROUP_COLUMNS else ():
            _check(chunk, _CHUNK_KINDS)
            for meta in (field.value for field in chunk if field.id == _CHUNK_META):
                _check(meta, _META_KINDS)
    rows = next((field.value for field in fields if field.id == _GROUP_ROWS), 0)
    return RowGroup(rows, fields)


def _structs(value: Any) -> list[list[_Field]]:
    if not isinstance(value, _Elements) or value.kind != _STRUCT:
        raise CorruptSnapshotError(_UNREADABLE)
    return value.values


def _check(fields: list[_Field], kinds: Mapping[int, int]) -> None:
    if any(field.kind != kinds.get(field.id, field.kind) for field in fields):
        raise CorruptSnapshotError(_UNREADABLE)


def _footer_of(file: pa.Buffer) -> tuple[int, bytes]:
    """Where the footer begins, and its bytes."""
    view = memoryview(file)
    if len(view) >= len(MAGIC) + _TAIL.size:
        length, magic = _TAIL.unpack(view[-_TAIL.size :])
        begin = len(view) - _TAIL.size - length
        if magic == MAGIC and begin >= len(MAGIC):
            return begin, bytes(view[begin : begin + length])
    raise CorruptSnapshotError("it is no whole Parquet file")


class _Reader:
    """Reads Thrift's compact protocol; whatever is none is a ``CorruptSnapshotError``."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0
        self._readers: dict[int, Callable[[], Any]] = {
            _BYTE: self._byte,
            _I16: self._integer,
            _I32: self._integer,
            _I64: self._integer,
            _DOUBLE: lambda: self._bytes(8),
            _BINARY: lambda: self._bytes(self._varint()),
            _LIST: self._list,
            _SET: self._list,
            _STRUCT: self._struct,
        }

    def struct(self) -> list[_Field]:
        try:
            return self._struct()
        except (IndexError, KeyError, RecursionError) as error:
            raise CorruptSnapshotError(_UNREADABLE) from error

    def _struct(self) -> list[_Field]:
        fields: list[_Field] = []
        id = 0
        while head := self._byte():
            kind = head & 15
            id = id + (head >> 4) if head >> 4 else self._integer()
            fields.append(_Field(id, kind, None if kind in (_TRUE, _FALSE) else self._readers[kind]()))
        return fields

    def _list(self) -> _Elements:
        head = self._byte()
        kind = head & 15
        size = self._varint() if head >> 4 == 15 else head >> 4
        read = self._byte if kind in (_TRUE, _FALSE) else self._readers[kind]
        return _Elements(kind, [read() for _ in range(size)])

    def _byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1]

    def _bytes(self, length: int) -> bytes:
        self._at += length
        if self._at > len(self._data):
            raise IndexError
        return self._data[self._at - length : self._at]

    def _varint(self) -> int:
        value = shift = 0
        while (byte := self._byte()) > 127:
            value |= (byte & 127) << shift
            shift += 7
        return value | byte << shift

    def _integer(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)


def _struct(fields: list[_Field]) -> bytes:
    made = bytearray()
    last = 0
    for id, kind, value in fields:
        if 0 < id - last < 16:
            made.append(id - last << 4 | kind)
        else:
            made.append(kind)
            made += _integer(id)
        if kind not in (_TRUE, _FALSE):
            made += _value(kind, value)
        last = id
    made.append(0)
    return bytes(made)


def _value(kind: int, value: Any) -> bytes:
    if kind == _STRUCT:  # one that is written already stays as it is
        return value if isinstance(value, bytes) else _struct(value)
    if kind in (_LIST, _SET):
        return _list(value)
    if kind == _BINARY:
        return _varint(len(value)) + value
    if kind == _DOUBLE:
        return value
    return bytes([value]) if kind == _BYTE else _integer(value)


def _list(elements: _Elements) -> bytes:
    kind, values = elements
    size = len(values)
    head = bytes([size << 4 | kind]) if size < 15 else bytes([0xF0 | kind]) + _varint(size)
    if kind in (_TRUE, _FALSE):
        return head + bytes(values)
    return head + b"".join(_value(kind, value) for value in values)


def _integer(value: int) -> bytes:
    return _varint(value << 1 if value >= 0 else (-value << 1) - 1)


def _varint(value: int) -> bytes:
    made = bytearray()
    while value > 127:
        made.append(value & 127 | 128)
        value >>= 7
    made.append(value)
    return bytes(made)
