"""Decodes Protobuf messages of one source: all of one type, with or without the header of a schema registry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.connectors.files.schemas import Widened, only
from cutwater.connectors.messages.base import BadValue, Decoded, Values
from cutwater.connectors.protobuf import decode_kernels as kernels
from cutwater.connectors.protobuf.layout import ROWS, Layout
from cutwater.connectors.protobuf.program import Program
from cutwater.connectors.protobuf.types import Enums, ProtoMessage, arrow_schema
from cutwater.data.words import batch_of, read_only

_WHY = {
    kernels.NULL: "the value is null",
    kernels.SHORT: "the value has fewer than 6 bytes: no id of a schema is in front",
    kernels.NO_HEADER: "the value does not begin with a zero byte and the id of a schema",
    kernels.NO_INDEXES: f"the path to the message's type is no list of {kernels.MOST_INDEXES} numbers at most",
}
_decode: Any = kernels.decode
_headers: Any = kernels.headers


class ProtobufDecoder:
    """Decodes values that are messages.

    Args:
        message: their type.
        columns: those that somebody reads; the others come as null.
        enums: what becomes of enums.
        dictionaries: enums come as such.
        fits: of the id of a schema and the path to a type in it: "" if that can be read as ``message``, or why not;
            values are in Confluent's wire format then.  ``None``: nothing is in front of a message.

    >>> from cutwater.connectors.protobuf.types import ProtoField
    >>> fields = (ProtoField("n", 1, "int64"), ProtoField("t", 2, "string", presence=True))
    >>> decoder = ProtobufDecoder(ProtoMessage("R", fields), None, "text", dictionaries=False)
    >>> decoded = decoder.decode(Values.of([b"\\x08\\x01\\x12\\x02ab", b"\\x12\\x03ab", b""]), first_only=False)
    >>> decoded.rows.to_pylist(), decoded.bad
    ([{'n': 1, 't': 'ab'}, {'n': 0, 't': None}], [BadValue(number=1, reason='field "t": the value ends in it')])
    """

    gap = 0

    def __init__(
        self,
        message: ProtoMessage,
        columns: frozenset[str] | None,
        enums: Enums,
        *,
        dictionaries: bool,
        fits: Callable[[int, tuple[int, ...]], str] | None = None,
    ) -> None:
        schema = arrow_schema(message, enums)
        self._schema = only(schema, columns)
        self._widened = Widened(schema)
        self._dictionaries = dictionaries
        self._fits = fits
        self._known: dict[tuple[int, int], str] = {}
        """Why values of a schema's id and a path are no rows; empty: they are."""
        self._layout = Layout(enums)
        chosen = {f.oneof for f in message.fields if f.name in self._schema.names and f.oneof}
        read = [f for f in message.fields if f.name in self._schema.names or f.oneof in chosen]
        fields = self._layout.fields(read, ROWS)
        self._columns = {column.field.name: column for column in fields.columns}
        self._program = Program(message, fields, self._layout)
        self._code, self._tables, self._frames = self._program.made()

    def decode(self, values: Values, *, first_only: bool) -> Decoded:
        """See ``ValueDecoder``.

        Raises:
            StorageError: the registry does not say what a writer's schema is.
        """
        starts, ends = read_only(values.starts), read_only(values.ends[1:])
        begins, bad = self._begins(values, starts, ends)
        if bad and first_only:
            return Decoded(self._rows(0), np.empty(0, np.int64), bad[:1])
        found = self._run(values.data, begins, ends, first_only)
        for number, wrong, instruction in found.tolist():
            bad.append(BadValue(number, self._program.reason(wrong, instruction)))
            begins[number] = -1
        if not bad:
            return Decoded(self._rows(len(values)), None)
        if first_only:  # the others were not looked at
            return Decoded(self._rows(0), np.empty(0, np.int64), bad)
        good = np.flatnonzero(begins >= 0)
        return Decoded(self._rows(len(good)), good, sorted(bad))

    def _begins(
        self, values: Values, starts: npt.NDArray[np.int32], ends: npt.NDArray[np.int32]
    ) -> tuple[npt.NDArray[np.int64], list[BadValue]]:
        """Where each message begins, -1 for those that do not, and those."""
        if self._fits is None:
            begins = starts.astype(np.int64)
            if not values.nulls:
                return begins, []
            begins[~values.valid] = -1
            return begins, [BadValue(int(number), _WHY[kernels.NULL]) for number in np.flatnonzero(~values.valid)]
        ids, paths, begins = (np.empty(len(values), np.int64) for _ in range(3))
        _headers(values.data.address, starts, ends, values.valid, ids, paths, begins)
        bad: list[BadValue] = []
        for id, path in _different(ids, paths):
            why = _WHY[id] if id < 0 else self._why(id, path)
            if why:
                wrong = np.flatnonzero((ids == id) & (paths == path))
                bad += [BadValue(int(number), why) for number in wrong]
                begins[wrong] = -1
        return begins, bad

    def _why(self, id: int, path: int) -> str:
        assert self._fits is not None
        if (id, path) not in self._known:
            bits = kernels.INDEX_BITS
            indexes = [(path >> shift & (1 << bits) - 1) - 1 for shift in range(0, bits * kernels.MOST_INDEXES, bits)]
            self._known[id, path] = self._fits(id, tuple(index for index in indexes if index >= 0))
        return self._known[id, path]

    def _run(
        self, data: pa.Buffer, begins: npt.NDArray[np.int64], ends: npt.NDArray[np.int32], first_only: bool
    ) -> npt.NDArray[np.int64]:
        """Decode into the slots; what is bad, as ``kernels.decode`` tells it."""
        count, layout = len(begins), self._layout
        layout.begin(count, data.size)
        bad, found = np.empty((1 if first_only else max(1, count), 3), np.int64), np.zeros(1, np.int64)
        row = 0
        while True:
            row = _decode(
                *(data.address, begins, ends, row, self._code.ctypes.data, self._tables.ctypes.data),
                *(layout.slots.ctypes.data, len(layout), layout.spaces.ctypes.data, self._frames.ctypes.data),
                *(data.address + data.size, bad, found),
            )
            if row >= count:
                break
            layout.grow()
        layout.done(count - int(found[0]))
        return bad[: int(found[0])]

    def _rows(self, count: int) -> pa.RecordBatch:
        """The rows that were decoded."""
        if not count:
            return self._widened.widen(pa.RecordBatch.from_pylist([], schema=self._schema))
        columns = [
            self._layout.array(self._columns[name], count, dictionaries=self._dictionaries)
            for name in self._schema.names
        ]
        return self._widened.widen(batch_of(columns, self._schema))


def _different(ids: npt.NDArray[np.int64], paths: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """The pairs that there are, each once."""
    if len(ids) and (ids == ids[0]).all() and (paths == paths[0]).all():
        return [(int(ids[0]), int(paths[0]))]
    return [(int(id), int(path)) for id, path in np.unique(np.stack([ids, paths], axis=1), axis=0)]
