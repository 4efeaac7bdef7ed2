"""Rows to Protobuf messages: the columns as they lie in memory, by a program of the type that one kernel runs."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from cutwater.connectors.messages.column_memory import COLUMN_BYTES, ColumnMemory
from cutwater.connectors.messages.encoders import Encoded
from cutwater.connectors.messages.registry import Registry
from cutwater.connectors.protobuf import encode_kernels as k
from cutwater.connectors.protobuf.descriptors import Described, header_of
from cutwater.connectors.protobuf.types import ProtoField, ProtoMessage, item_type, map_parts, struct_type
from cutwater.errors import BuildError, DataError, did_you_mean

_FIRST_BYTES = 64
"""Of a row, before one was seen."""
_encode: Any = k.encode


@dataclass(frozen=True)
class ProtobufEncoder:
    """A message for each row; with a registry the id of its schema is in front.

    >>> user, page = ProtoField("user", 1, "int64"), ProtoField("page", 2, "string", presence=True)
    >>> encoder = ProtobufEncoder(Described(ProtoMessage("Click", (user, page)), b"", (0,), ()))
    >>> encoder.encode(pa.table({"user": [1, 2], "page": ["ab", None]})).value(0)
    b'\\x08\\x01\\x12\\x02ab'
    """

    described: Described
    registry: Registry | None = None
    subject: str = ""
    id: int | None = None
    """Of the schema in the registry; ``None``: it is registered when the first row is written."""

    gap: ClassVar[int] = 0

    def check(self, schema: pa.Schema) -> None:
        """See ``ValueEncoder.check``."""
        _program(self.described.message, schema, b"")

    def encode(self, rows: pa.Table) -> Encoded:
        """See ``ValueEncoder.encode``.

        Raises:
            StorageError: the registry does not answer, or refuses the schema.
        """
        return _program(self.described.message, rows.schema, self._header()).encode(rows)

    def _header(self) -> bytes:
        if self.registry is None:
            return b""
        id = _registered(self.registry, self.subject, self.described.file) if self.id is None else self.id
        return header_of(id, self.described.path)


@lru_cache(maxsize=64)
def _registered(registry: Registry, subject: str, file: bytes) -> int:
    return registry.register(subject, base64.b64encode(file).decode(), "PROTOBUF")


@lru_cache(maxsize=64)
def _program(message: ProtoMessage, schema: pa.Schema, header: bytes) -> EncodeProgram:
    return EncodeProgram(message, schema, header)


@dataclass(frozen=True)
class _Source:
    """A column, or what lies in one, and what becomes of it."""

    field: ProtoField
    path: str
    kind: str
    """``"leaf"``, ``"message"``, ``"list"``, ``"map"``."""
    inner: tuple[_Source, ...] = ()
    """The fields of a message that the rows have; of lists the items, of maps keys and items."""
    held: ProtoField | None = None
    """Of a wrapper: what it is around."""


class EncodeProgram:
    """The code that writes rows of one Arrow schema as messages of one type.

    Args:
        message: the type.
        schema: of the rows.
        header: bytes in front of each value.

    Raises:
        BuildError: a column that there is no field for, or types that do not fit.
    """

    def __init__(self, message: ProtoMessage, schema: pa.Schema, header: bytes) -> None:
        self._code: list[list[int]] = []
        self._paths: list[str] = []
        self._columns = self._depth = self._deepest = 0
        self._fields = self._message(message, list(schema), "")
        if header:
            self._emit("", k.CONSTANT, target=0, count=len(header))
        self._emit("", k.END)
        self._made = np.array(self._code, np.int64)
        self._constants = np.frombuffer(header or b"\0", np.uint8)
        self._row_bytes = float(_FIRST_BYTES)

    # ------------------------------------------------------------------------------------------------------ the code

    def _emit(self, path: str, op: int, column: int = 0, tag: int = 0, target: int = 0, count: int = 0) -> int:
        self._code.append([op, column * COLUMN_BYTES, tag, target, count, 0, 0, 0])
        self._paths.append(path)
        return len(self._code) - 1

    def _set_target(self, instruction: int) -> None:
        self._code[instruction][k.TARGET // 8] = len(self._code) * k.STEP

    def _deeper(self, by: int) -> None:
        self._depth += by
        self._deepest = max(self._deepest, self._depth)

    def _message(self, message: ProtoMessage, columns: Sequence[pa.Field], path: str) -> tuple[_Source, ...]:
        """The fields that there are columns for, the last one first: it is written from the end."""
        there = {column.name: column for column in columns}
        names = [f.name for f in message.fields]
        for name in there:
            if name not in names:
                raise BuildError(
                    f"column {_inside(path, name)!r} is no field of {message.name}",
                    hint=f"{did_you_mean(name, names)} Drop it, or add it to the message type.",
                )
        made: list[_Source] = []
        for field in sorted(message.fields, key=lambda f: -f.number):
            if field.name in there:
                made.append(self._field(field, there[field.name].type, _inside(path, field.name)))
        return tuple(made)

    def _new_column(self) -> int:
        self._columns += 1
        return self._columns - 1

    def _field(self, field: ProtoField, arrow: pa.DataType, path: str) -> _Source:
        column = self._new_column()
        if field.repeated:
            self._emit(path, k.NOT_NULL, column)
            return self._list(field, arrow, column, path)
        tag = field.number << 3 | field.wire_type
        if field.presence:
            skip = self._emit(path, k.SKIP_NULL, column)
        else:
            self._emit(path, k.NOT_NULL, column)
            skip = self._emit(path, k.SKIP_ZERO, column, count=_zero_size(field))
        source = self._value(field, arrow, column, path, tag)
        self._set_target(skip)
        return source

    def _list(self, field: ProtoField, arrow: pa.DataType, column: int, path: str) -> _Source:
        packed = field.packed
        tag = field.number << 3 | (2 if packed else field.wire_type)
        if not (pt.is_map(arrow) if field.is_map else pt.is_list(arrow)):
            raise _does_not_fit(path, arrow, "a map" if field.is_map else "repeated")
        self._deeper(1)
        if packed:
            self._emit(path, k.OPEN)
            self._deeper(1)
        first = self._emit(path, k.FIRST, column)
        body = len(self._code) * k.STEP
        if field.is_map:
            inner = self._entry(field, arrow, path, tag)
        else:
            item = self._new_column()
            self._emit(path, k.NOT_NULL, item)
            inner = (self._value(field, arrow.value_type, item, path, 0 if packed else tag),)
        self._emit(path, k.NEXT, target=body)
        self._set_target(first)
        if packed:
            self._emit(path, k.CLOSE, tag=tag, count=1)
            self._deeper(-1)
        self._deeper(-1)
        return _Source(field, path, "map" if field.is_map else "list", inner)

    def _entry(self, field: ProtoField, arrow: Any, path: str, tag: int) -> tuple[_Source, ...]:
        """A pair of a map, the value before the key."""
        assert field.message is not None
        key, value = map_parts(field.message)
        self._deeper(1)
        self._emit(path, k.OPEN)
        made: list[_Source] = []
        for one, held in ((value, arrow.item_type), (key, arrow.key_type)):
            column = self._new_column()
            self._emit(path, k.NOT_NULL, column)
            made.append(self._value(one, held, column, path, one.number << 3 | one.wire_type))
        self._emit(path, k.CLOSE, tag=tag)
        self._deeper(-1)
        return tuple(made)

    def _value(self, field: ProtoField, arrow: pa.DataType, column: int, path: str, tag: int) -> _Source:
        message = field.message
        if message is None:
            if not _fits(arrow, field):
                raise _does_not_fit(path, arrow, f"the message's {field.kind}")
            self._emit(path, _op(field), column, tag)
            return _Source(field, path, "leaf")
        if message.well_known in ("timestamp", "duration"):
            wanted = pt.is_timestamp(arrow) and arrow.tz is not None
            if not (wanted if message.well_known == "timestamp" else pt.is_duration(arrow)):
                raise _does_not_fit(path, arrow, message.name)
            self._emit(path, k.TIMESTAMP if message.well_known == "timestamp" else k.DURATION, column, tag)
            return _Source(field, path, "leaf")
        self._deeper(1)
        self._emit(path, k.OPEN)
        if message.well_known == "wrapper":
            held = message.fields[0]
            skip = self._emit(path, k.SKIP_ZERO, column, count=_zero_size(held))
            self._value(held, arrow, column, path, held.number << 3 | held.wire_type)
            self._set_target(skip)
            source = _Source(field, path, "leaf", held=held)
        elif pt.is_struct(arrow):
            source = _Source(field, path, "message", self._message(message, list(arrow), path))
        else:
            raise _does_not_fit(path, arrow, message.name)
        self._emit(path, k.CLOSE, tag=tag)
        self._deeper(-1)
        return source

    # ------------------------------------------------------------------------------------------------------ the rows

    def encode(self, rows: pa.Table) -> Encoded:
        """One value for each row.

        Raises:
            DataError: a value that cannot be written; names the column.
        """
        memory = _Memory(max(1, self._columns))
        columns = {name: rows.column(name).combine_chunks() for name in rows.schema.names}
        _one_of_each(self._fields, columns, None)
        for source in self._fields:
            memory.add(columns[source.field.name], source)
        count = rows.num_rows
        behind, lengths = np.zeros(count, np.int64), np.zeros(count, np.int64)
        frames, wrong = np.zeros(2 * self._deepest + 2, np.int64), np.zeros(2, np.int64)
        guess = min(int(count * self._row_bytes * 1.1), 2 * rows.nbytes + _FIRST_BYTES * count)
        out: Any = np.empty(guess + 1024, np.uint8)
        left, used = count, 0
        while True:
            left = _encode(
                *(left, out.ctypes.data, len(out) - used, len(out), self._made.ctypes.data),
                *(self._constants.ctypes.data, memory.table.ctypes.data, frames.ctypes.data),
                *(behind, lengths, wrong),
            )
            used = int(behind[left]) if left < count else 0
            if left == 0:
                break
            if wrong[0] != k.NO_ROOM:
                raise self._error(int(wrong[0]), int(wrong[1]), left - 1)
            larger = np.empty(2 * len(out), np.uint8)
            larger[len(larger) - used :] = out[len(out) - used :]
            out = larger
        if count:
            self._row_bytes = used / count
        return Encoded(pa.py_buffer(out), len(out) - behind, lengths)

    def _error(self, wrong: int, instruction: int, row: int) -> DataError:
        error = DataError(
            f"column {self._paths[instruction]!r} cannot be written as Protobuf: {_REASONS[wrong]}",
            hint=_HINTS.get(wrong, ""),
        )
        error.row = row
        return error


class _Memory(ColumnMemory):
    """Where columns lie, in the order in which the code numbers them."""

    def add(self, array: pa.Array, source: _Source) -> None:
        """A column and those in it."""
        if source.kind == "message":
            self.begin(array)
            for inner in source.inner:
                self.add(array.field(inner.field.name), inner)
        elif source.kind == "leaf":
            self.leaf(self.begin(array), _wire(array, source))
        else:
            self.lists(self.begin(array), array)
            arrays = (array.items, array.keys) if source.kind == "map" else (array.values,)
            for one, inner in zip(arrays, source.inner, strict=True):
                self.add(one, inner)


_OPS = {
    **dict.fromkeys(("int32", "enum"), k.SIGNED32),
    "uint32": k.UNSIGNED32,
    **dict.fromkeys(("int64", "uint64"), k.VARINT64),
    "sint32": k.ZIGZAG32,
    "sint64": k.ZIGZAG64,
    "bool": k.BOOL,
    **dict.fromkeys(("fixed32", "sfixed32", "float"), k.FIXED32),
    **dict.fromkeys(("fixed64", "sfixed64", "double"), k.FIXED64),
    **dict.fromkeys(("string", "bytes"), k.BYTES),
}
_REASONS = {
    k.NULL: "it is null, and the message type has no way to say so",
    k.OUT_OF_RANGE: "the time is not between the years 1 and 9999, or the duration longer than 10,000 years",
}
_HINTS = {k.NULL: "Declare the field optional, or fill the nulls first."}


def _op(field: ProtoField) -> int:
    return _OPS[field.kind]


def _zero_size(field: ProtoField) -> int:
    """Bytes of a value that is zero where nothing is written; 0: of a text."""
    if field.kind in ("string", "bytes"):
        return 0
    return 1 if field.kind == "bool" else 8 if _wire_type(field).bit_width == 64 else 4


def _wire_type(field: ProtoField) -> pa.DataType:
    """How Arrow holds what is written."""
    if field.message is not None:
        return struct_type(field.message, "number")
    return item_type(field, "number")


def _fits(arrow: pa.DataType, field: ProtoField) -> bool:
    """True if values of a column can be written as a scalar field."""
    wanted = _wire_type(field)
    if arrow == wanted or pt.is_null(arrow):
        return True
    if field.kind == "enum":
        return pt.is_string(arrow) or pt.is_dictionary(arrow) or (pt.is_integer(arrow) and arrow.bit_width < 32)
    if pt.is_integer(arrow) and pt.is_integer(wanted):
        if pt.is_unsigned_integer(arrow):
            return arrow.bit_width < wanted.bit_width + pt.is_unsigned_integer(wanted)
        return pt.is_signed_integer(wanted) and arrow.bit_width < wanted.bit_width
    if pt.is_floating(arrow):
        return pt.is_floating(wanted) and arrow.bit_width < wanted.bit_width
    if pt.is_dictionary(arrow):
        return pt.is_string(arrow.value_type) and pt.is_string(wanted)
    return (pt.is_string(arrow) or pt.is_fixed_size_binary(arrow)) and pt.is_binary(wanted)


def _wire(array: pa.Array, source: _Source) -> pa.Array:
    """A column with the numbers or bytes that are written.

    Raises:
        DataError: a value has no exact counterpart.
    """
    field = source.held or source.field
    if isinstance(array, pa.DictionaryArray):
        array = array.dictionary_decode()
    if field.enum is not None and pt.is_string(array.type):
        return _numbers(array, source)
    wanted = _wire_type(field)
    try:
        return array if array.type == wanted else array.cast(wanted)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(f"column {source.path!r} cannot be written as Protobuf's {field.kind}: {error}") from None


def _numbers(array: pa.Array, source: _Source) -> pa.Array:
    """The numbers of names of an enum, and of digits."""
    enum = source.field.enum
    assert enum is not None
    names = pa.array([name for _, name in enum.values], pa.string())
    found = pc.call_function("index_in", [array], pc.SetLookupOptions(names))
    numbers = pa.array([number for number, _ in enum.values], pa.int32()).take(found)
    if numbers.null_count == array.null_count:
        return numbers
    lacking = pc.call_function("and", [pc.call_function("is_null", [found]), pc.call_function("is_valid", [array])])
    try:
        digits = array.filter(lacking).cast(pa.int32())
        return pc.call_function("replace_with_mask", [numbers, lacking, digits])
    except pa.ArrowInvalid:
        other = next(one for one in array.filter(lacking).to_pylist() if not one.lstrip("-").isdigit())
        raise DataError(
            f"column {source.path!r} cannot be written as Protobuf: {other!r} is no name of {enum.name}",
            hint=f"There are: {', '.join(name for _, name in enum.values)}.",
        ) from None


def _one_of_each(sources: Iterable[_Source], columns: dict[str, pa.Array], there: Any) -> None:
    """Refuse rows that have two fields of one oneof.

    Raises:
        DataError: names them.
    """
    chosen: dict[str, list[str]] = {}
    for source in sources:
        if source.field.oneof:
            chosen.setdefault(source.field.oneof, []).append(source.field.name)
    for oneof, names in chosen.items():
        count: Any = sum(np.asarray(columns[name].is_valid()).astype(np.int64) for name in names)
        bad = np.flatnonzero((count > 1) if there is None else (count > 1) & there)
        if len(bad):
            error = DataError(
                f"columns {', '.join(sorted(names))} cannot be written as Protobuf: of oneof {oneof!r} one is there "
                "at most"
            )
            error.row = int(bad[0])
            raise error
    for source in sources:
        _one_of_each_within(source, columns[source.field.name])


def _one_of_each_within(source: _Source, array: pa.Array) -> None:
    if source.kind == "message":
        inner = {one.field.name: array.field(one.field.name) for one in source.inner}
        _one_of_each(source.inner, inner, np.asarray(array.is_valid()))
    elif source.kind in ("list", "map"):
        arrays = (array.items, array.keys) if source.kind == "map" else (array.values,)
        for one, held in zip(source.inner, arrays, strict=True):
            _one_of_each_within(one, held)


def _does_not_fit(path: str, arrow: pa.DataType, wanted: str) -> BuildError:
    return BuildError(
        f"column {path!r} is of type {arrow}, and cannot be written as {wanted}",
        hint="Cast it first, or change the message type.",
    )


def _inside(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
