"""Schemas to the programs that ``decode_kernels`` runs: one for each schema that values were written with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from cutwater.connectors.avro import decode_kernels as k
from cutwater.connectors.avro.defaults import encoded
from cutwater.connectors.avro.layout import NO_SLOT, Column
from cutwater.connectors.avro.schemas import NO_DEFAULT, AvroField, AvroType

_WORDS = k.STEP // 8
_INT, _LONG = (-(2**31), 2**31 - 1), (-(2**63), 2**63 - 1)
_DAY_MS = 86_400_000
_BETWEEN = {"time-millis": (0, _DAY_MS - 1), "time-micros": (0, 1000 * _DAY_MS - 1)}
_NANOSECONDS = {"millis": 1_000_000, "micros": 1_000, "nanos": 1}
_PROMOTED = {
    ("int", "long"),
    ("int", "float"),
    ("int", "double"),
    ("long", "float"),
    ("long", "double"),
    ("float", "double"),
    ("string", "bytes"),
    ("bytes", "string"),
}
_NOT_NULL = 2
"""In an entry of a switch: there is nothing to say of validity."""


class Program:
    """The code for some schemas that all give the same columns.

    Args:
        reader: the record that the rows are of.
        columns: those of its fields that somebody reads.
    """

    def __init__(self, reader: AvroType, columns: Mapping[str, Column]) -> None:
        self._reader, self._columns = reader, columns
        self._code: list[list[int]] = []
        self._tables: list[int] = []
        self._constants = bytearray()
        self._about: list[str] = []
        """Which field an instruction is about."""
        self._why: dict[int, str] = {}
        """Of an instruction that always fails, and others that can say more than the kernel."""
        self._depth = self._deepest = 0

    def add(self, writer: AvroType) -> int:
        """Code for values of another schema; where it begins, in bytes.

        What cannot be read fails when it comes: rows are bad, a schema is not.
        """
        begin = len(self._code) * k.STEP
        if writer.kind != "record":
            self._fail("", f"it is of type {writer}, and no record")
        else:
            self._record(writer, self._reader, self._columns, "")
        self._emit("", k.END)
        return begin

    def made(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The code, its tables, its constants, and memory for frames."""
        code = np.array(self._code, np.int64).reshape(-1, _WORDS)
        constants = np.frombuffer(bytes(self._constants) or b"\0", np.uint8)
        return code, np.array(self._tables or [0], np.int64), constants, np.zeros(1 + 2 * self._deepest, np.int64)

    def reason(self, wrong: int, instruction: int) -> str:
        """What is wrong with a value, in words."""
        about, why = self._about[instruction], self._why.get(instruction) or _REASONS[wrong]
        return f'field "{about}": {why}' if about else why

    # ----------------------------------------------------------------------------------------------------- emitting

    def _emit(
        self, about: str, op: int, slot: int = NO_SLOT, table: int = 0, count: int = 0, low: int = 0, high: int = 0
    ) -> int:
        """An instruction; its number."""
        place = slot * k.SLOT_BYTES if slot != NO_SLOT else NO_SLOT
        self._code.append([op, place, table, count, low, high, 0, 0])
        self._about.append(about)
        return len(self._code) - 1

    @property
    def _here(self) -> int:
        return len(self._code) * k.STEP

    def _set_target(self, instruction: int) -> None:
        """Let an instruction go on at what comes next."""
        self._code[instruction][k.TABLE // 8] = self._here

    def _fail(self, path: str, why: str) -> None:
        self._why[self._emit(path, k.FAIL)] = why

    def _table(self, entries: Sequence[int]) -> int:
        self._tables += entries
        return len(self._tables) - len(entries)

    # ---------------------------------------------------------------------------------------------------- resolving

    def _record(self, writer: AvroType, reader: AvroType, columns: Mapping[str, Column], path: str) -> None:
        """The fields of a writer's record, those that are read into their columns; then defaults of those it lacks."""
        taken: dict[str, AvroField] = {}
        ours = {f.name: f for f in reader.fields}
        for theirs in writer.fields:
            field = ours.get(theirs.name) or next((f for f in reader.fields if theirs.name in f.aliases), None)
            if field is not None and field.name not in taken and field.name in columns:
                self._value(theirs.type, field.type, columns[field.name], _inside(path, field.name))
            else:
                self._skip(theirs.type, _inside(path, theirs.name))
            if field is not None:
                taken[field.name] = theirs
        for field in reader.fields:
            if field.name not in taken and field.name in columns:
                self._default(field, columns[field.name], _inside(path, field.name))

    def _default(self, field: AvroField, column: Column, path: str) -> None:
        if field.default is NO_DEFAULT:
            self._fail(path, "it is missing, and has no default")
            return
        try:
            content = encoded(field.type, field.default)
        except ValueError as error:
            self._fail(path, f"it is missing, and its default is wrong: {error}")
            return
        begin = len(self._constants)
        self._constants += content
        self._emit(path, k.ENTER, table=begin, count=len(self._constants))
        self._value(field.type, field.type, column, path)
        self._emit(path, k.LEAVE)

    def _value(self, writer: AvroType, reader: AvroType, column: Column, path: str) -> None:
        """A value that may be null, or of several types for its writer."""
        if writer.kind == "union":
            self._switch(writer, reader, column, path)
        elif writer.kind == "null":
            self._null(reader, column, path, said=False)
        else:
            if column.valid != NO_SLOT:
                self._emit(path, k.VALID, column.valid, count=1)
            self._plain(writer, column, path)

    def _switch(self, writer: AvroType, reader: AvroType, column: Column, path: str) -> None:
        entries = [0] * len(writer.inner)
        table = self._table(entries)
        self._emit(path, k.SWITCH, column.valid, table, len(entries))
        leaves: list[int] = []
        records = [branch for branch in writer.inner if branch.kind == "record"]
        for place, branch in enumerate(writer.inner):
            null = branch.kind == "null"
            valid = _NOT_NULL if column.valid == NO_SLOT else 0 if null else 1
            self._tables[table + place] = self._here << 2 | valid
            if null:
                self._null(reader, column, path, said=True)
            elif branch.kind == "record" and len(records) > 1 and not column.type.called(branch):
                self._fail(path, f"a {branch} is no {column.type}")
            else:
                self._plain(branch, column, path)
            if place < len(entries) - 1:
                leaves.append(self._emit(path, k.JUMP))
        for leave in leaves:
            self._set_target(leave)

    def _null(self, reader: AvroType, column: Column, path: str, *, said: bool) -> None:
        """A null; ``said``: the slot of validity knows already."""
        if column.valid != NO_SLOT:
            self._fill(column, path, said=said)
        elif reader.kind != "null" and not reader.nullable:
            self._fail(path, "it is null, and must not be")

    def _fill(self, column: Column, path: str, *, said: bool = False) -> None:
        """What lies under a null."""
        if column.valid != NO_SLOT and not said:
            self._emit(path, k.VALID, column.valid, count=0)
        if column.type.kind == "record":
            for inner in column.inner:
                self._fill(inner, path)
        elif column.type.kind in ("array", "map") or _is_text(column):
            self._emit(path, k.FILL_ENDS, column.slot)
        elif column.slot != NO_SLOT:
            width = 4 if column.type.kind == "enum" else max(1, column.arrow.bit_width // 8)
            self._emit(path, k.FILL, column.slot, count=width)

    def _plain(self, writer: AvroType, column: Column, path: str) -> None:
        """A value that is not null, and of one type."""
        reader = column.type
        if writer.kind != reader.kind and (writer.kind, reader.kind) not in _PROMOTED:
            self._fail(path, f"a {writer} is no {reader}")
        elif writer.kind == "record":
            inner = {f.name: one for f, one in zip(reader.fields, column.inner, strict=True)}
            self._record(writer, reader, inner, path)
        elif writer.kind in ("array", "map"):
            self._items(writer, reader, column, path)
        elif writer.kind == "enum":
            self._enum(writer, column, path)
        elif writer.kind in ("bytes", "string", "fixed"):
            self._bytes(writer, column, path)
        elif writer.kind in ("int", "long"):
            self._number(writer, column, path)
        elif writer.kind != "null":
            ops = {("float", "double"): k.DOUBLE_OF_FLOAT}
            plain = {"float": k.FLOAT, "double": k.DOUBLE, "boolean": k.BOOLEAN}
            self._emit(path, ops.get((writer.kind, reader.kind), plain[writer.kind]), column.slot)

    def _number(self, writer: AvroType, column: Column, path: str) -> None:
        reader = column.type
        low, high = _INT if writer.kind == "int" else _LONG
        if reader.kind in ("float", "double"):
            op = k.FLOAT_OF_LONG if reader.kind == "float" else k.DOUBLE_OF_LONG
            self._emit(path, op, column.slot, low=low, high=high)
            return
        times = _times(writer, column)
        if times is None:
            self._fail(path, f"a {writer} is no {reader}")
            return
        if times > 1 and writer.kind == "long":
            low, high = -(high // times), high // times
        if reader.logical in _BETWEEN:
            least, most = _BETWEEN[reader.logical]
            low, high = least, most // times
        self._emit(path, k.LONG if reader.kind == "long" else k.INT, column.slot, times, low=low, high=high)

    def _bytes(self, writer: AvroType, column: Column, path: str) -> None:
        reader = column.type
        size = writer.size if writer.kind == "fixed" else -1
        if writer.kind == "fixed" and writer.size != reader.size:
            self._fail(path, f"it has {writer.size} bytes, and must have {reader.size}")
        elif reader.logical == "decimal":
            if writer.logical == "decimal" and writer.scale != reader.scale:
                self._fail(path, f"it has {writer.scale} digits behind the point, and must have {reader.scale}")
                return
            most = 10**reader.precision - 1
            self._emit(path, k.DECIMAL, column.slot, 0, size, _signed(most >> 64), _signed(most))
        elif reader.logical == "uuid" and reader.kind == "fixed":
            self._emit(path, k.UUID, column.slot)
        else:
            self._emit(path, k.TEXT if reader.kind == "string" else k.BYTES, column.slot, 0, size)

    def _enum(self, writer: AvroType, column: Column, path: str) -> None:
        reader = column.type
        other = reader.symbols.index(reader.default) if reader.default in reader.symbols else -1
        ours = [reader.symbols.index(one) if one in reader.symbols else other for one in writer.symbols]
        self._emit(path, k.ENUM, column.slot, self._table(ours), len(ours))

    def _items(self, writer: AvroType, reader: AvroType, column: Column, path: str) -> None:
        begin, following = self._loop(writer, column.slot, path)
        if writer.kind == "map":
            self._emit(path, k.TEXT, column.inner[0].slot, 0, -1)
        self._value(writer.inner[0], reader.inner[0], column.inner[-1], path)
        self._end_loop(begin, following, path)

    def _loop(self, writer: AvroType, slot: int, path: str) -> tuple[int, int]:
        self._depth += 1
        self._deepest = max(self._deepest, self._depth)
        self._emit(path, k.OPEN)
        begin = self._here
        empty = writer.kind == "array" and writer.inner[0].least_bytes == 0
        return begin, self._emit(path, k.NEXT, slot, count=int(empty))

    def _end_loop(self, begin: int, following: int, path: str) -> None:
        self._depth -= 1
        self._emit(path, k.JUMP, table=begin)
        self._set_target(following)

    def _skip(self, writer: AvroType, path: str) -> None:
        """A value that nobody reads."""
        if writer.kind == "union":
            table = self._table([0] * len(writer.inner))
            self._emit(path, k.SWITCH, NO_SLOT, table, len(writer.inner))
            leaves: list[int] = []
            for place, branch in enumerate(writer.inner):
                self._tables[table + place] = self._here << 2 | _NOT_NULL
                self._skip(branch, path)
                leaves.append(self._emit(path, k.JUMP))
            for leave in leaves:
                self._set_target(leave)
        elif writer.kind == "record":
            for field in writer.fields:
                self._skip(field.type, _inside(path, field.name))
        elif writer.kind in ("array", "map"):
            begin, following = self._loop(writer, NO_SLOT, path)
            if writer.kind == "map":
                self._emit(path, k.SKIP_BYTES, count=-1)
            self._skip(writer.inner[0], path)
            self._end_loop(begin, following, path)
        elif writer.kind in ("int", "long", "enum"):
            self._emit(path, k.SKIP_NUMBER)
        elif writer.kind in ("bytes", "string"):
            self._emit(path, k.SKIP_BYTES, count=-1)
        elif writer.kind != "null":
            sizes = {"boolean": 1, "float": 4, "double": 8}
            self._emit(path, k.SKIP, count=sizes.get(writer.kind, writer.size))


_REASONS = {
    k.CUT_SHORT: "the value ends in it",
    k.TOO_LONG: "a number of more than 64 bits",
    k.OUT_OF_RANGE: "out of the range of its type",
    k.NEGATIVE: "a negative length",
    k.NOT_UTF8: "not UTF-8",
    k.NO_BRANCH: "a number that stands for no branch of the union, or no symbol of the enum",
    k.TOO_MANY: "too many items without content",
    k.NOT_BOOLEAN: "a boolean that is neither 0 nor 1",
    k.TRAILING: "bytes are left behind the last field",
    k.NO_SYMBOL: "a symbol that the reader's enum does not have",
}


def _times(writer: AvroType, column: Column) -> int | None:
    """What a writer's number is to be multiplied with; ``None``: its units are finer than the reader's."""
    reader = column.type
    ours = reader.logical.rpartition("-")[2]
    if ours not in _NANOSECONDS:
        return 1
    if "timestamp" in reader.logical and ours == "millis":
        ours = "micros"  # all our columns of times count microseconds at least
    theirs = writer.logical if writer.logical.rpartition("-")[2] in _NANOSECONDS else reader.logical
    times = _NANOSECONDS[theirs.rpartition("-")[2]] / _NANOSECONDS[ours]
    return int(times) if times >= 1 else None


def _is_text(column: Column) -> bool:
    return column.type.kind in ("string", "bytes", "fixed") and column.type.logical != "decimal"


def _signed(word: int) -> int:
    """The lower 64 bits as a number with sign."""
    return ((word & (2**64 - 1)) ^ 2**63) - 2**63


def _inside(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
