"""Rows to Avro values: the columns as they lie in memory, by a program of the schema that one kernel runs."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from cutwater.connectors.avro import encode_kernels as k
from cutwater.connectors.avro.defaults import encoded, number
from cutwater.connectors.avro.schemas import NO_DEFAULT, AvroField, AvroType, SchemaText, arrow_type, record_of
from cutwater.connectors.messages.column_memory import COLUMN_BYTES, ColumnMemory
from cutwater.connectors.messages.encoders import Encoded
from cutwater.connectors.messages.registry import Registry
from cutwater.errors import BuildError, DataError, did_you_mean

_FIRST_BYTES = 64
"""Of a row, before one was seen."""
_encode: Any = k.encode


@dataclass(frozen=True)
class AvroEncoder:
    """A record for each row; with a registry the id of its schema is in front.

    >>> fields = '[{"name": "n", "type": "long"}, {"name": "t", "type": ["null", "string"]}]'
    >>> encoder = AvroEncoder(SchemaText(f'{{"type": "record", "name": "R", "fields": {fields}}}'))
    >>> encoder.encode(pa.table({"n": [1, 2], "t": ["ab", None]})).value(0)
    b'\\x02\\x02\\x04ab'
    """

    text: SchemaText
    registry: Registry | None = None
    subject: str = ""
    id: int | None = None
    """Of the schema in the registry; ``None``: it is registered when the first row is written."""

    gap: ClassVar[int] = 0

    def check(self, schema: pa.Schema) -> None:
        """See ``ValueEncoder.check``."""
        _program(self.text, schema, b"")

    def encode(self, rows: pa.Table) -> Encoded:
        """See ``ValueEncoder.encode``.

        Raises:
            StorageError: the registry does not answer, or refuses the schema.
        """
        return _program(self.text, rows.schema, self._header()).encode(rows)

    def _header(self) -> bytes:
        if self.registry is None:
            return b""
        id = _registered(self.registry, self.subject, self.text) if self.id is None else self.id
        return b"\0" + id.to_bytes(4, "big")


@lru_cache(maxsize=64)
def _registered(registry: Registry, subject: str, text: SchemaText) -> int:
    return registry.register(subject, text.json)


@lru_cache(maxsize=64)
def _program(text: SchemaText, schema: pa.Schema, header: bytes) -> EncodeProgram:
    return EncodeProgram(record_of(text), schema, header)


@dataclass(frozen=True)
class _Source:
    """A column, or what lies in one, and what becomes of it."""

    type: AvroType
    path: str
    inner: tuple[tuple[str, _Source], ...] = ()
    """The fields of a record that the rows have; of arrays and maps keys and items, without names."""


class EncodeProgram:
    """The code that writes rows of one Arrow schema as records of one Avro schema.

    Args:
        record: what to write.
        schema: of the rows.
        header: bytes in front of each value.

    Raises:
        BuildError: a column that there is no field for, a field without column and default, or types that do not fit.
    """

    def __init__(self, record: AvroType, schema: pa.Schema, header: bytes) -> None:
        self._code: list[list[int]] = []
        self._paths: list[str] = []
        self._constants = bytearray()
        self._columns = self._depth = self._deepest = 0
        if header:
            self._constant(header, "")
        self._fields = self._record(record, list(schema), "")
        self._emit("", k.END)
        self._made = np.array(self._code, np.int64)
        self._kept = np.frombuffer(bytes(self._constants) or b"\0", np.uint8)
        self._row_bytes = float(_FIRST_BYTES)

    # ------------------------------------------------------------------------------------------------------ the code

    def _emit(
        self, path: str, op: int, column: int = 0, table: int = 0, count: int = 0, low: int = 0, high: int = 0
    ) -> int:
        self._code.append([op, column * COLUMN_BYTES, table, count, low, high, 0, 0])
        self._paths.append(path)
        return len(self._code) - 1

    @property
    def _here(self) -> int:
        return len(self._code) * k.STEP

    def _set_target(self, instruction: int) -> None:
        self._code[instruction][k.TABLE // 8] = self._here

    def _constant(self, content: bytes, path: str) -> None:
        if content:
            begin = len(self._constants)
            self._constants += content
            self._emit(path, k.CONSTANT, table=begin, count=len(self._constants))

    def _record(self, record: AvroType, columns: Sequence[pa.Field], path: str) -> tuple[tuple[str, _Source], ...]:
        there = {column.name: column for column in columns}
        for name in there:
            if name not in {f.name for f in record.fields}:
                raise BuildError(
                    f"column {_inside(path, name)!r} is no field of the Avro schema",
                    hint=f"{did_you_mean(name, [f.name for f in record.fields])} Drop it, or add it to the schema.",
                )
        made: list[tuple[str, _Source]] = []
        for field in record.fields:
            if field.name in there:
                made.append((field.name, self._value(field.type, there[field.name].type, _inside(path, field.name))))
            else:
                self._missing(field, _inside(path, field.name))
        return tuple(made)

    def _missing(self, field: AvroField, path: str) -> None:
        if field.default is not NO_DEFAULT:
            self._constant(encoded(field.type, field.default), path)
        elif field.type.nullable:
            self._constant(encoded(field.type, None), path)
        elif field.type.kind != "null":
            raise BuildError(f"the rows have no column for field {path!r} of the Avro schema, which has no default")

    def _value(self, type: AvroType, arrow: pa.DataType, path: str) -> _Source:
        arrow_type(type, path)  # refuses what no column can hold
        column = self._columns
        self._columns += 1
        if type.kind != "union":
            if type.kind != "null":
                self._emit(path, k.NOT_NULL, column)
            return self._plain(type, arrow, column, path)
        held = type.value
        places = [branch.kind == "null" for branch in type.inner]
        if not type.nullable:
            self._emit(path, k.NOT_NULL, column)
            self._constant(number(0), path)
            return self._plain(held, arrow, column, path)
        null, value = places.index(True), places.index(False)
        branch = self._emit(path, k.BRANCH, column, low=2 * value, high=2 * null)
        source = self._plain(held, arrow, column, path)
        self._set_target(branch)
        return source

    def _plain(self, type: AvroType, arrow: pa.DataType, column: int, path: str) -> _Source:
        if not _fits(arrow, type):
            raise BuildError(
                f"column {path!r} is of type {arrow}, and cannot be written as the Avro schema's {type}",
                hint=f"Cast it first, to {wire_type(type)}, or change the schema.",
            )
        if type.kind == "record":
            return _Source(type, path, self._record(type, list(arrow), path))
        if type.kind in ("array", "map"):
            return self._items(type, arrow, column, path)
        if type.logical == "decimal":
            most, size = 10**type.precision - 1, type.size if type.kind == "fixed" else -1
            self._emit(path, k.DECIMAL, column, 0, size, _signed(most >> 64), _signed(most))
        elif type.kind == "fixed":
            self._emit(path, k.FIXED, column, count=type.size)
        elif type.kind != "null":
            self._emit(path, _OPS[type.kind], column)
        return _Source(type, path)

    def _items(self, type: AvroType, arrow: pa.DataType, column: int, path: str) -> _Source:
        self._depth += 1
        self._deepest = max(self._deepest, self._depth)
        opened, body = self._emit(path, k.OPEN, column), self._here
        inner: list[tuple[str, _Source]] = []
        if type.kind == "map":
            inner.append(("", self._value(AvroType("string"), arrow.key_type, path)))
        items = arrow.item_type if type.kind == "map" else arrow.value_type
        inner.append(("", self._value(type.inner[0], items, path)))
        self._emit(path, k.NEXT, table=body)
        self._set_target(opened)
        self._depth -= 1
        return _Source(type, path, tuple(inner))

    # ------------------------------------------------------------------------------------------------------ the rows

    def encode(self, rows: pa.Table) -> Encoded:
        """One value for each row.

        Raises:
            DataError: a value that cannot be written; names the column.
        """
        memory = _Memory(max(1, self._columns))
        for name, source in self._fields:
            memory.add(rows.column(name).combine_chunks(), source)
        count = rows.num_rows
        starts, lengths = np.zeros(count, np.int64), np.zeros(count, np.int64)
        frames, wrong = np.zeros(2 * self._deepest + 2, np.int64), np.zeros(2, np.int64)
        guess = min(int(count * self._row_bytes * 1.1), 2 * rows.nbytes + _FIRST_BYTES * count)
        out: Any = np.empty(guess + 1024, np.uint8)
        row = at = 0
        while True:
            row = _encode(
                *(row, count, out.ctypes.data, at, len(out), self._made.ctypes.data, self._kept.ctypes.data),
                *(memory.table.ctypes.data, frames.ctypes.data, starts, lengths, wrong),
            )
            at = int(starts[row - 1] + lengths[row - 1]) if row else 0
            if row >= count:
                break
            if wrong[0] != k.NO_ROOM:
                raise self._error(int(wrong[0]), int(wrong[1]), row)
            larger = np.empty(2 * len(out), np.uint8)
            larger[:at] = out[:at]
            out = larger
        if count:
            self._row_bytes = at / count
        return Encoded(pa.py_buffer(out), starts, lengths)

    def _error(self, wrong: int, instruction: int, row: int) -> DataError:
        error = DataError(f"column {self._paths[instruction]!r} cannot be written as Avro: {_REASONS[wrong]}")
        error.row = row
        return error


class _Memory(ColumnMemory):
    """Where columns lie, in the order in which the code numbers them."""

    def add(self, array: pa.Array, source: _Source) -> None:
        """A column and those in it."""
        place, kind = self.begin(array), source.type.kind
        if kind == "record":
            for name, inner in source.inner:
                self.add(array.field(name), inner)
        elif kind in ("array", "map"):
            self.lists(place, array)
            arrays = (array.keys, array.items) if kind == "map" else (array.values,)
            for one, (_, inner) in zip(arrays, source.inner, strict=True):
                self.add(one, inner)
        elif kind != "null":
            self.leaf(place, _wire(array, source))


_OPS = {
    "boolean": k.BOOLEAN,
    "int": k.INT,
    "long": k.LONG,
    "float": k.FLOAT,
    "double": k.DOUBLE,
    "bytes": k.BYTES,
    "string": k.BYTES,
    "enum": k.INT,
}
_WIRE = {
    "timestamp-millis": pa.timestamp("ms", "UTC"),
    "local-timestamp-millis": pa.timestamp("ms"),
}
_REASONS = {
    k.NULL: "it is null, and the schema allows none",
    k.WRONG_SIZE: "it has not the number of bytes that the schema says",
    k.OUT_OF_RANGE: "the number has more digits than the schema allows",
}


def wire_type(type: AvroType) -> pa.DataType:
    """How Arrow holds the numbers and bytes that Avro writes.

    >>> wire_type(AvroType("long", logical="timestamp-millis"))
    TimestampType(timestamp[ms, tz=UTC])
    """
    return _WIRE.get(type.logical) or arrow_type(type, "")


def _fits(arrow: pa.DataType, type: AvroType) -> bool:
    """True if values of a column can be written as a type; those in it are looked at by themselves."""
    nested = {"record": pt.is_struct, "array": pt.is_list, "map": pt.is_map}.get(type.kind)
    if nested is not None:
        return nested(arrow)
    wanted = wire_type(type)
    if arrow == wanted or pt.is_null(arrow):
        return True
    if pt.is_timestamp(arrow) and pt.is_timestamp(wanted):
        return (arrow.tz is None) == (wanted.tz is None)
    if pt.is_time(arrow) and pt.is_time(wanted):
        return True
    if pt.is_decimal128(arrow) and pt.is_decimal128(wanted):
        return arrow.scale <= wanted.scale
    if pt.is_integer(arrow):
        width = arrow.bit_width + pt.is_unsigned_integer(arrow)
        most = {"int": 32, "long": 64, "double": 54}.get("" if type.logical else type.kind, 0)
        return width <= most
    if pt.is_floating(arrow):
        return pt.is_floating(wanted) and arrow.bit_width <= wanted.bit_width
    return (pt.is_string(arrow) or pt.is_fixed_size_binary(arrow)) and pt.is_binary(wanted)


def _wire(array: pa.Array, source: _Source) -> pa.Array:
    """A column with the numbers or bytes that are written.

    Raises:
        DataError: a value has no exact counterpart.
    """
    type = source.type
    if type.kind == "enum":
        found = pc.call_function(
            "index_in", [array.cast(pa.string())], pc.SetLookupOptions(pa.array(type.symbols, pa.string()))
        )
        if found.null_count != array.null_count:
            other = array.filter(pc.call_function("is_null", [found])).drop_null()[0]
            raise DataError(
                f"column {source.path!r} cannot be written as Avro: {other.as_py()!r} is no symbol of {type.name}",
                hint=f"There are: {', '.join(type.symbols)}.",
            )
        return found
    if type.logical == "uuid" and type.kind == "fixed":
        return _uuids(array, source)
    wanted = wire_type(type)
    try:
        return array if array.type == wanted else array.cast(wanted)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(f"column {source.path!r} cannot be written as Avro's {type}: {error}") from None


def _uuids(array: pa.Array, source: _Source) -> pa.Array:
    try:
        return pa.array([None if one is None else uuid.UUID(one).bytes for one in array.to_pylist()], pa.binary())
    except ValueError as error:
        raise DataError(f"column {source.path!r} cannot be written as a UUID: {error}") from None


def _signed(word: int) -> int:
    """The lower 64 bits as a number with sign."""
    return ((word & (2**64 - 1)) ^ 2**63) - 2**63


def _inside(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
