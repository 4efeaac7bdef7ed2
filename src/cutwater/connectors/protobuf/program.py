"""A message type to the program that ``decode_kernels`` runs."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from cutwater.connectors.protobuf import decode_kernels as k
from cutwater.connectors.protobuf.layout import NO_SLOT, Column, Fields, Layout
from cutwater.connectors.protobuf.types import ProtoMessage

_WORDS = k.STEP // 8
_MOST_DENSE = 2048
"""Tags below are looked up in a table by their number."""
_OPS = {
    "int32": k.VARINT32,
    "uint32": k.VARINT32,
    "int64": k.VARINT64,
    "uint64": k.VARINT64,
    "sint32": k.ZIGZAG32,
    "sint64": k.ZIGZAG64,
    "bool": k.BOOL,
    "fixed32": k.FIXED32,
    "sfixed32": k.FIXED32,
    "float": k.FIXED32,
    "fixed64": k.FIXED64,
    "sfixed64": k.FIXED64,
    "double": k.FIXED64,
    "string": k.TEXT,
    "bytes": k.BYTES,
    "message": k.MESSAGE,
}
_CHECKS = {"timestamp": k.OF_TIMESTAMP, "duration": k.OF_DURATION}


class Program:
    """The code that reads messages into columns.

    Args:
        message: their type.
        fields: the columns of those of its fields that somebody reads.
        layout: where the columns lie.
    """

    def __init__(self, message: ProtoMessage, fields: Fields, layout: Layout) -> None:
        self._layout = layout
        self._code: list[list[int]] = []
        self._tables: list[int] = []
        self._about: list[str] = []
        """Which field an instruction is about."""
        self._depth = self._deepest = 0
        self._message(message, fields, "")

    def made(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The code, its tables, and memory for frames."""
        frames = np.zeros(k.GROUPS + k.FRAME_BYTES // 8 * (self._deepest + 1), np.int64)
        return np.array(self._code, np.int64), np.array(self._tables or [0], np.int64), frames

    def reason(self, wrong: int, instruction: int) -> str:
        """What is wrong with a value, in words."""
        about = self._about[instruction]
        return f'field "{about}": {_REASONS[wrong]}' if about else _REASONS[wrong]

    def _emit(self, about: str, words: list[int]) -> int:
        self._code.append(words)
        self._about.append(about)
        return len(self._code) - 1

    def _message(self, message: ProtoMessage, fields: Fields, path: str) -> int:
        """The header and instructions of a message; where they begin, in bytes."""
        self._depth += 1
        self._deepest = max(self._deepest, self._depth)
        members = self._members(fields)
        header = self._emit(path, [0] * _WORDS)
        places: dict[int, int] = {}
        later: list[tuple[int, Column, str]] = []
        for column in sorted(fields.columns, key=lambda one: one.field.number):
            about = f"{path}.{column.field.name}" if path else column.field.name
            for op, tag in _framings(column):
                place = self._field(op, tag, column, fields, members, about)
                places[tag] = place * k.STEP
                if op & 15 == k.MESSAGE:
                    later.append((place, column, about))
        self._emit("", [0, 0, -1, 0, 0, 0, 0, 0])  # what follows the last one is no field
        self._look_up(header, places)
        known = message.well_known
        if known in _CHECKS:
            parts = [column.slot * k.SLOT_BYTES for column in fields.columns]
            self._code[header][k.CHECK // 8 : k.CHECK // 8 + 3] = [_CHECKS[known], *parts]
        for place, column, about in later:
            held = column if column.items is None else column.items
            assert held.inner is not None
            assert column.field.message is not None
            self._code[place][k.MORE // 8] = self._message(column.field.message, held.inner, about)
        self._depth -= 1
        return header * k.STEP

    def _field(
        self, op: int, tag: int, column: Column, fields: Fields, members: dict[str, list[str]], about: str
    ) -> int:
        field, enum = column.field, column.field.enum
        choice = members[field.oneof].index(field.name) + 1 if field.oneof else 0
        table = count = 0
        if op & 15 == k.CLOSED:
            assert enum is not None
            table, count = self._table(number for number, _ in enum.values), len(enum.values)
        slots = [column.valid, fields.choices[field.oneof] if field.oneof else NO_SLOT]
        valid, oneof = (slot * k.SLOT_BYTES if slot != NO_SLOT else -1 for slot in slots)
        slot = max(0, column.slot) * k.SLOT_BYTES
        return self._emit(about, [op, slot, tag, valid, oneof, choice, table, count])

    def _members(self, fields: Fields) -> dict[str, list[str]]:
        """The fields of each oneof; their slots go into a table."""
        found: dict[str, list[str]] = {}
        for name, slot in fields.choices.items():
            chosen = [column for column in fields.columns if column.field.oneof == name]
            found[name] = [column.field.name for column in chosen]
            ranges = [(0, 0), *((one.slots.start, one.slots.stop) for one in chosen)]
            self._layout.members[slot] = self._table(k.SLOT_BYTES * edge for pair in ranges for edge in pair)
        return found

    def _look_up(self, header: int, places: dict[int, int]) -> None:
        """Tables from tags to instructions; the other framings of the same fields stand there as such."""
        every = {tag & ~7 | frame: k.OTHER_FRAME for tag in places for frame in range(8)} | places
        dense = {tag: place for tag, place in every.items() if tag < _MOST_DENSE}
        size = max(dense, default=-1) + 1
        table = self._table(dense.get(tag, k.NO_FIELD) for tag in range(size))
        sparse = sorted((tag, place) for tag, place in every.items() if tag >= _MOST_DENSE)
        pairs = self._table(word for pair in sparse for word in pair)
        self._code[header][:4] = [table, size, pairs, len(sparse)]

    def _table(self, entries: Iterable[int]) -> int:
        begin = len(self._tables)
        self._tables += entries
        return begin


_REASONS = {
    k.CUT_SHORT: "the value ends in it",
    k.TOO_LONG: "a number of more than ten bytes",
    k.OUT_OF_RANGE: "out of the range of its type",
    k.NOT_UTF8: "not UTF-8",
    k.WRONG_FRAME: "a field has another wire type than its type has",
    k.NO_TAG: "what should be a field's number and wire type is none",
    k.NO_GROUP: "a group ends that did not begin",
    k.TOO_DEEP: f"unknown groups are nested more than {k.GROUPS} deep",
    k.NOT_WHOLE: "packed numbers that are not whole",
}


def _framings(column: Column) -> list[tuple[int, int]]:
    """The operations and tags by which values of a field may come."""
    field = column.field
    closed = field.enum is not None and field.enum.closed
    op = (k.CLOSED if closed else k.VARINT32) if field.enum is not None else _OPS[field.kind]
    tag = field.number << 3 | field.wire_type
    if not field.repeated:
        return [(op, tag)]
    if field.wire_type == 2:
        return [(op | k.ITEM, tag)]
    return [(op | k.ITEM, tag), (op | k.PACKED, field.number << 3 | 2)]
