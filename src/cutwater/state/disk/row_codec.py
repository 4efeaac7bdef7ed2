"""Rows of Arrow columns as bytes, one ``bytes`` for each row, for a store that holds bytes only; and back.

A row is: the fixed-width columns as Arrow has them, the lengths of the others (four bytes each), a bit for each column
that says whether it is null, then the bytes of the others.  Columns of text and numbers are packed and unpacked as
columns, structs as the columns of their fields; what a list or map holds goes through MessagePack, one by one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

from cutwater.data.words import bytes_view, fixed_view, valid_rows
from cutwater.state import column_kernels, index_kernels
from cutwater.state.keys import is_text_or_bytes
from cutwater.state.packing import Packer

Matrix = npt.NDArray[np.uint8]
"""Bytes by row."""

_LENGTH = np.dtype("<u4")


class RowCodec:
    """Packs rows of some columns.

    Rows are equal bytes if they are equal: under a null lie zeros.  Floats are kept bit by bit.

    >>> codec = RowCodec([pa.int16(), pa.string()])
    >>> rows = codec.encode([pa.array([1, None], pa.int16()), pa.array(["a", "bc"])])
    >>> [column.to_pylist() for column in codec.decode(rows)]
    [[1, None], ['a', 'bc']]
    """

    def __init__(self, types: Sequence[pa.DataType]) -> None:
        self.types = list(types)
        leaves = [leaf for kind in types for leaf in _leaf_types(kind)]
        self._packers = [None if _width(kind) or is_text_or_bytes(kind) else Packer(kind) for kind in leaves]
        self._leaves = leaves
        self._widths = [_width(kind) or _LENGTH.itemsize for kind in leaves]
        self._varying = [number for number, kind in enumerate(leaves) if not _width(kind)]
        self._fixed_bytes = sum(self._widths) + -(-len(leaves) // 8)

    def encode(self, columns: Sequence[pa.Array], prefix: Matrix | None = None) -> list[bytes]:
        """The rows, each behind its bytes of ``prefix``, if there is one."""
        rows = len(columns[0]) if prefix is None else len(prefix)
        fixed, spans = self._parts(columns, rows, prefix)
        if not spans:
            return fixed.view(f"V{fixed.shape[1]}").reshape(-1).tolist() if rows else []
        data, bounds = _joined(fixed, spans)
        whole = data.tobytes()
        return [whole[begin:end] for begin, end in itertools.pairwise(bounds.tolist())]

    def pack(self, columns: Sequence[pa.Array], bounds: npt.NDArray[np.int64]) -> pa.Array:
        """Rows that belong together as one value: those from ``bounds[i]`` to before ``bounds[i + 1]``.

        >>> codec = RowCodec([pa.string()])
        >>> packed = codec.pack([pa.array(["a", None, "bc"])], np.array([0, 2, 2, 3]))
        >>> (rows,), counts = codec.unpack(packed)
        >>> rows.to_pylist(), counts.tolist()
        (['a', None, 'bc'], [2, 0, 1])
        """
        fixed, spans = self._parts(columns, len(columns[0]), None)
        if spans:
            data, of_rows = _joined(fixed, spans)
            offsets = of_rows[bounds]
        else:
            data, offsets = fixed.reshape(-1), bounds * fixed.shape[1]
        places = pa.py_buffer(np.ascontiguousarray(offsets))
        return pa.Array.from_buffers(pa.large_binary(), len(bounds) - 1, [None, places, pa.py_buffer(data)])

    def unpack(self, packed: pa.Array) -> tuple[list[pa.Array], npt.NDArray[np.int64]]:
        """The columns of all rows of ``pack``, and how many rows each value has."""
        data, offsets = bytes_view(packed)
        width, sizes = self._fixed_bytes, np.diff(offsets)
        if not self._varying:
            content = data[int(offsets[0]) : int(offsets[-1])] if len(packed) else data[:0]
            return self._columns(content, content.reshape(-1, width), np.empty(0, np.int64)), sizes // width
        begins = np.cumsum([0, *self._widths])
        starts, counts = np.empty(int(sizes.sum()) // width, np.int64), np.empty(len(packed), np.int64)
        rows = column_kernels.row_starts(data, offsets, width, begins[self._varying], starts, counts)
        starts = starts[:rows]
        return self._columns(data, data[starts[:, None] + np.arange(width)], starts + width), counts

    def _parts(
        self, columns: Sequence[pa.Array], rows: int, prefix: Matrix | None
    ) -> tuple[Matrix, list[tuple[npt.NDArray[np.uint8], npt.NDArray[Any]]]]:
        """The fixed part of each row, and the data and offsets of what comes behind it."""
        leaves = [leaf for column in columns for leaf in _leaves_of(column)]
        at = 0 if prefix is None else prefix.shape[1]
        fixed: Matrix = np.zeros((rows, at + self._fixed_bytes), np.uint8)
        if prefix is not None:
            fixed[:, :at] = prefix
        spans: list[tuple[npt.NDArray[np.uint8], npt.NDArray[Any]]] = []
        nulls = np.zeros((rows, len(leaves)), np.bool_)
        for number, (leaf, packer, width) in enumerate(zip(leaves, self._packers, self._widths, strict=True)):
            valid = valid_rows(leaf)
            if valid is not None:
                nulls[:, number] = ~valid
            if _width(leaf.type):
                content = _fixed_bytes(leaf, width)
            else:
                leaf = leaf if packer is None else _packed(leaf, packer)
                data, offsets = bytes_view(leaf if valid is None else leaf.fill_null(b"" if packer else _empty(leaf)))
                spans.append((data, offsets))
                content = np.diff(offsets).astype(_LENGTH).view(np.uint8).reshape(rows, width)
            fixed[:, at : at + width] = content if valid is None else np.where(valid[:, None], content, 0)
            at += width
        fixed[:, at:] = np.packbits(nulls, axis=1, bitorder="little")
        return fixed, spans

    def decode(self, rows: Sequence[bytes], skip: int = 0) -> list[pa.Array]:
        """The columns of what ``encode`` gave, behind ``skip`` bytes of prefix."""
        data = np.frombuffer(b"".join(rows), np.uint8)
        ends = np.cumsum(np.fromiter(map(len, rows), np.int64, len(rows)))
        width = skip + self._fixed_bytes
        if self._varying:
            starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]]) if len(rows) else ends
            fixed = data[starts[:, None] + np.arange(width)]
            cursors = starts + width
        else:
            fixed, cursors = data.reshape(len(rows), width), ends
        return self._columns(data, fixed, cursors, skip)

    def _columns(
        self, data: npt.NDArray[np.uint8], fixed: Matrix, cursors: npt.NDArray[np.int64], skip: int = 0
    ) -> list[pa.Array]:
        """The columns of rows with these fixed parts, and with the others in the data from ``cursors`` on."""
        width = skip + self._fixed_bytes
        marks = fixed[:, width - -(-len(self._leaves) // 8) :]
        nulls = np.unpackbits(marks, axis=1, bitorder="little").astype(np.bool_)
        leaves: list[pa.Array] = []
        at = skip
        for number, (kind, leaf_width) in enumerate(zip(self._leaves, self._widths, strict=True)):
            content = np.ascontiguousarray(fixed[:, at : at + leaf_width])
            null = nulls[:, number] if nulls[:, number].any() else None
            at += leaf_width
            if _width(kind):
                leaves.append(_from_fixed(content, kind, null))
                continue
            lengths = content.view(_LENGTH).reshape(-1).astype(np.int64)
            leaves.append(_from_spans(data, cursors, lengths, kind, null, self._packers[number]))
            cursors = cursors + lengths
        rest = iter(leaves)
        return [_whole(kind, rest) for kind in self.types]


def _width(kind: pa.DataType) -> int:
    """Bytes of a value, 0 if they differ."""
    if pt.is_boolean(kind):
        return 1
    fixed = pt.is_primitive(kind) or pt.is_decimal(kind) or pt.is_fixed_size_binary(kind)
    return kind.bit_width // 8 if fixed else 0


def _empty(column: pa.Array) -> Any:
    return "" if pt.is_string(column.type) or pt.is_large_string(column.type) else b""


def _leaf_types(kind: pa.DataType) -> list[pa.DataType]:
    """A struct is a flag that says whether it is null, and its fields."""
    if not pt.is_struct(kind):
        return [kind]
    return [pa.bool_(), *(leaf for i in range(kind.num_fields) for leaf in _leaf_types(kind.field(i).type))]


def _leaves_of(column: pa.Array) -> list[pa.Array]:
    if not pt.is_struct(column.type):
        return [column]
    fields: Any = column.flatten()
    return [column.is_null(), *(leaf for field in fields for leaf in _leaves_of(field))]


def _whole(kind: pa.DataType, leaves: Any) -> pa.Array:
    """The column again, from its leaves."""
    if not pt.is_struct(kind):
        return next(leaves)
    null = next(leaves)
    fields = [kind.field(i) for i in range(kind.num_fields)]
    columns = [_whole(field.type, leaves) for field in fields]
    if not columns:
        return pa.array([None if missing else {} for missing in null.to_pylist()], kind)
    return pa.StructArray.from_arrays(columns, fields=fields, mask=null)


def _fixed_bytes(column: pa.Array, width: int) -> Matrix:
    if pt.is_boolean(column.type):
        return np.asarray(column.fill_null(False)).astype(np.uint8).reshape(-1, 1)
    return fixed_view(column, f"V{width}").view(np.uint8).reshape(len(column), width)


def _from_fixed(content: Matrix, kind: pa.DataType, null: npt.NDArray[np.bool_] | None) -> pa.Array:
    if pt.is_boolean(kind):
        return pa.array(content.reshape(-1) != 0, mask=null)
    bitmap = None if null is None else pa.py_buffer(np.packbits(~null, bitorder="little"))
    return pa.Array.from_buffers(kind, len(content), [bitmap, pa.py_buffer(content)])


def _packed(column: pa.Array, packer: Packer) -> pa.Array:
    values = [None if value is None else packer.pack(value) for value in column.to_pylist()]
    return pa.array(values, pa.large_binary())


def _from_spans(
    data: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    kind: pa.DataType,
    null: npt.NDArray[np.bool_] | None,
    packer: Packer | None,
) -> pa.Array:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    content = np.empty(int(offsets[-1]), np.uint8)
    index_kernels.gather_spans(data, starts, offsets, content)
    bitmap = None if null is None else pa.py_buffer(np.packbits(~null, bitorder="little"))
    text = pt.is_string(kind) or pt.is_large_string(kind)
    large = pa.large_string() if text else pa.large_binary()
    column = pa.Array.from_buffers(large, len(lengths), [bitmap, pa.py_buffer(offsets), pa.py_buffer(content)])
    if packer is None:
        return column.cast(kind)
    return pa.array([None if value is None else packer.unpack(value) for value in column.to_pylist()], kind)


def _joined(
    fixed: Matrix, spans: Sequence[tuple[npt.NDArray[np.uint8], npt.NDArray[Any]]]
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """The rows of a matrix, each with its bytes of the spans behind it, and where each begins."""
    rows, width = fixed.shape
    bounds = np.zeros(rows + 1, np.int64)
    np.cumsum(sum((np.diff(offsets).astype(np.int64) for _, offsets in spans), np.full(rows, width)), out=bounds[1:])
    out = np.empty(int(bounds[-1]), np.uint8)
    cursors = bounds[:-1].copy()
    flat, offsets = fixed.reshape(-1), np.arange(0, (rows + 1) * width, width, dtype=np.int64)[: rows + 1]
    flat.flags.writeable = offsets.flags.writeable = False  # as views of Arrow are: one specialisation of the kernel
    for data, places in ((flat, offsets), *spans):
        column_kernels.join_spans(data, places, cursors, out)
    return out, bounds
