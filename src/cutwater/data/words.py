"""Fixed-width Arrow columns as 64-bit words, and back.

Kernels see ``int64`` words (or ``float64``), whatever the logical type: so each is compiled once.  Views are read-only,
also over mutable memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Words: TypeAlias = npt.NDArray[np.int64]

_EMPTY_BYTES: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
_UNSIGNED: dict[int, Any] = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_SIGN = np.int64(-(2**63))
_DICTIONARY = pa.dictionary(pa.int32(), pa.string()).id
_WHOLE_NUMBERS: dict[int, np.dtype[Any]] = {
    kind.id: np.dtype(code)
    for code, kinds in {
        "i1": [pa.int8()],
        "i2": [pa.int16()],
        "i4": [pa.int32(), pa.date32(), pa.time32("s")],
        "i8": [pa.int64(), pa.date64(), pa.time64("us"), pa.timestamp("us"), pa.duration("us")],
        "u1": [pa.uint8()],
        "u2": [pa.uint16()],
        "u4": [pa.uint32()],
        "u8": [pa.uint64()],
    }.items()
    for kind in kinds
}
"""How values that are whole numbers lie in memory, by the id of their type: asking the type itself costs more."""


def is_word_type(kind: pa.DataType) -> bool:
    """True if a value of the type fits one 64-bit word: integers, bool, floats up to 64 bits, dates, times, timestamps.

    >>> is_word_type(pa.timestamp("us", "UTC")), is_word_type(pa.string())
    (True, False)
    """
    t = pa.types
    if t.is_integer(kind) or t.is_boolean(kind) or t.is_float32(kind) or t.is_float64(kind):
        return True
    return t.is_temporal(kind) and not t.is_interval(kind)


def new_buffer(rows: int, dtype: npt.DTypeLike) -> tuple[pa.Buffer, npt.NDArray[Any]]:
    """A buffer of Arrow's pool and a writable view of ``rows`` values over it."""
    kind = np.dtype(dtype)
    buffer = pa.allocate_buffer(rows * kind.itemsize)
    return buffer, np.frombuffer(buffer, kind) if rows else np.empty(0, kind)


def batch_of(columns: Sequence[pa.Array], schema: pa.Schema) -> pa.RecordBatch:
    """Columns under the names of a schema, with its types or, where they or it hold dictionaries, with their own.

    >>> few = batch_of([pa.array(["a", "a"]).dictionary_encode()], pa.schema({"k": pa.string()}))
    >>> few.schema.field("k").type == pa.dictionary(pa.int32(), pa.string())
    True
    """
    if any(
        isinstance(column, pa.DictionaryArray) or kind.id == _DICTIONARY
        for column, kind in zip(columns, schema.types, strict=True)
    ):
        schema = pa.schema([field.with_type(column.type) for field, column in zip(schema, columns, strict=True)])
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def bits_dtype(kind: pa.DataType) -> Any:
    """Unsigned integers as wide as the values of the type, to move them as they are; ``None`` if there are none.

    >>> bits_dtype(pa.timestamp("us")), bits_dtype(pa.bool_()), bits_dtype(pa.string())
    (<class 'numpy.uint64'>, None, None)
    """
    return _UNSIGNED.get(kind.bit_width) if pa.types.is_primitive(kind) else None


def fixed_view(array: pa.Array, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Read-only view of the values of a fixed-width array (nulls: whatever lies there)."""
    kind = np.dtype(dtype)
    buffer = array.buffers()[1]
    if buffer is None or len(array) == 0:
        values = np.empty(0, kind)
    else:
        values = np.frombuffer(buffer, kind, len(array), array.offset * kind.itemsize)
    return _readonly(values)


def bytes_view(array: pa.Array) -> tuple[npt.NDArray[np.uint8], npt.NDArray[Any]]:
    """Data and offsets (``int32`` or ``int64``, one more than rows) of a string or binary array, read-only."""
    large = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    kind = np.dtype(np.int64 if large else np.int32)
    _, offsets, data = array.buffers()
    if offsets is None or offsets.size == 0:
        places = np.zeros(len(array) + 1, kind)
    else:
        places = np.frombuffer(offsets, kind, len(array) + 1, array.offset * kind.itemsize)
    content = _EMPTY_BYTES if data is None or data.size == 0 else np.frombuffer(data, np.uint8)
    return _readonly(content), _readonly(places)


def valid_rows(array: pa.Array) -> npt.NDArray[np.bool_] | None:
    """Mask of the rows that are not null; ``None`` if none is."""
    if array.null_count == 0:
        return None
    if pa.types.is_null(array.type):
        return _readonly(np.zeros(len(array), np.bool_))
    return _readonly(np.asarray(array.is_valid()))


def to_words(array: pa.Array, *, ordered: bool = False) -> Words:
    """The values as ``int64`` words; the words of null rows mean nothing.

    Signed integers, dates, times and timestamps are extended to 64 bits, unsigned ones reinterpreted, floats widened to
    ``float64`` and taken by their bits, with one zero and one NaN.

    Args:
        ordered: words compare as the values do: unsigned as unsigned, NaN above all other floats.

    >>> to_words(pa.array([1.5, -0.0, 0.0])).tolist()
    [4609434218613702656, 0, 0]
    >>> to_words(pa.array([-1.5, 2.0]), ordered=True).argsort().tolist()
    [0, 1]
    """
    return _readonly(_to_words(array, ordered))


def _to_words(array: pa.Array, ordered: bool) -> Words:
    kind = array.type
    dtype = _WHOLE_NUMBERS.get(kind.id)
    if dtype is None:
        if pa.types.is_boolean(kind):
            return _bits(array).astype(np.int64)
        values = fixed_view(array, kind.to_pandas_dtype()).astype(np.float64) + 0.0
        values[np.isnan(values)] = np.nan
        words = values.view(np.int64)
        return np.where(words < 0, words ^ np.int64(2**63 - 1), words) if ordered else words
    words = fixed_view(array, dtype)
    if words.dtype == np.uint64:
        words = words.view(np.int64)
        return words ^ _SIGN if ordered else words
    return words if words.dtype == np.int64 else words.astype(np.int64)


def from_words(
    words: Words, kind: pa.DataType, valid: npt.NDArray[np.bool_] | None = None, *, ordered: bool = False
) -> pa.Array:
    """An array of type ``kind`` from what ``to_words`` made; takes over ``words`` where no conversion is needed.

    >>> from_words(to_words(pa.array([3, 4], pa.uint8())), pa.uint8()).to_pylist()
    [3, 4]
    """
    bitmap = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
    dtype = _WHOLE_NUMBERS.get(kind.id)
    if dtype is not None:
        if ordered and dtype == np.uint64:
            words = words ^ _SIGN
        content: Any = words.view(dtype) if dtype.itemsize == 8 else words.astype(dtype)
    elif pa.types.is_boolean(kind):
        content = np.packbits(words != 0, bitorder="little")
    else:
        if ordered:
            words = np.where(words < 0, words ^ np.int64(2**63 - 1), words)
        content = words.view(np.float64).astype(kind.to_pandas_dtype(), copy=False)
    return pa.Array.from_buffers(kind, len(words), [bitmap, pa.py_buffer(np.ascontiguousarray(content))])


def _bits(array: pa.Array) -> npt.NDArray[np.uint8]:
    buffer = array.buffers()[1]
    if buffer is None or len(array) == 0:
        return np.zeros(len(array), np.uint8)
    first = array.offset // 8
    skip = array.offset - 8 * first
    content = np.frombuffer(buffer, np.uint8, (skip + len(array) + 7) // 8, first)
    return np.unpackbits(content, bitorder="little")[skip : skip + len(array)]


def read_only(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A view of the same memory, as all are that kernels get: so each needs one specialisation."""
    return _readonly(values.view())


def _readonly(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    values.flags.writeable = False
    return values
