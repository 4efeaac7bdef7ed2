"""Decodes Avro values of one source: with one schema, or with the one that each names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.connectors.avro import decode_kernels as kernels
from cutwater.connectors.avro.layout import Layout
from cutwater.connectors.avro.program import Program
from cutwater.connectors.avro.schemas import AvroType, SchemaText, arrow_schema, record_of
from cutwater.connectors.files.schemas import Widened, only
from cutwater.connectors.messages.base import BadValue, Decoded, Values
from cutwater.data.words import batch_of, read_only
from cutwater.errors import DataError

HEADER_BYTES = 5
_NULL, _SHORT, _NO_HEADER = -1, -2, -3
_WHY = {
    _NULL: "the value is null",
    _SHORT: f"the value has fewer than {HEADER_BYTES} bytes: no id of a schema is in front",
    _NO_HEADER: "the value does not begin with a zero byte and the id of a schema",
}
_decode: Any = kernels.decode
_schema_ids: Any = kernels.schema_ids


class AvroDecoder:
    """Decodes values that are records.

    Args:
        text: schema of the rows.
        columns: those that somebody reads; the others come as null.
        dictionaries: enums come as such.
        schema_of: the schema that a writer registered with an id, or why there is none; values are in Confluent's wire
            format then.  ``None``: values are records of the schema of the rows, nothing in front.

    >>> fields = '[{"name": "n", "type": "long"}, {"name": "t", "type": "string"}]'
    >>> text = SchemaText(f'{{"type": "record", "name": "R", "fields": {fields}}}')
    >>> decoder = AvroDecoder(text, None, dictionaries=False)
    >>> decoded = decoder.decode(Values.of([b"\\x02\\x04ab", b"\\x03\\x06ab"]), first_only=False)
    >>> decoded.rows.to_pylist(), decoded.bad
    ([{'n': 1, 't': 'ab'}], [BadValue(number=1, reason='field "t": the value ends in it')])
    """

    gap = 0

    def __init__(
        self,
        text: SchemaText,
        columns: frozenset[str] | None,
        *,
        dictionaries: bool,
        schema_of: Callable[[int], AvroType | str] | None = None,
    ) -> None:
        reader = record_of(text)
        schema = arrow_schema(reader)
        self._schema = only(schema, columns)
        self._widened = Widened(schema)
        self._dictionaries = dictionaries
        self._schema_of = schema_of
        self._layout = Layout()
        fields = {f.name: f for f in reader.fields}
        self._columns = {name: self._layout.column(fields[name].type, name) for name in self._schema.names}
        self._program = Program(reader, self._columns)
        self._entries: dict[int, int] = {}
        """Where the program of a schema begins, by its id; -1: there is none until now."""
        self._why = dict(_WHY)
        self._only = self._program.add(reader) if schema_of is None else -1
        self._code, self._tables, self._constants, self._frames = self._program.made()

    def decode(self, values: Values, *, first_only: bool) -> Decoded:
        """See ``ValueDecoder``.

        Raises:
            StorageError: the registry does not say what a writer's schema is.
            DataError: the rows are too much for one batch.
        """
        starts, ends = read_only(values.starts), read_only(values.ends[1:])
        entries, bad = self._begins(values, starts, ends)
        if bad and first_only:
            return Decoded(self._rows(0), np.empty(0, np.int64), bad[:1])
        found = self._run(values.data, starts, ends, entries, first_only)
        for number, wrong, instruction in found.tolist():
            bad.append(BadValue(number, self._program.reason(wrong, instruction)))
            entries[number] = -1
        if not bad:
            return Decoded(self._rows(len(values)), None)
        if first_only:  # the others were not looked at
            return Decoded(self._rows(0), np.empty(0, np.int64), bad)
        good = np.flatnonzero(entries >= 0)
        return Decoded(self._rows(len(good)), good, sorted(bad))

    def _begins(
        self, values: Values, starts: npt.NDArray[np.int32], ends: npt.NDArray[np.int32]
    ) -> tuple[npt.NDArray[np.int64], list[BadValue]]:
        """The instruction to begin with for each value, and those that have none."""
        count = len(values)
        if self._schema_of is None:
            entries = np.full(count, self._only, np.int64)
            if not values.nulls:
                return entries, []
            entries[~values.valid] = -1
            return entries, [BadValue(int(number), _WHY[_NULL]) for number in np.flatnonzero(~values.valid)]
        ids = np.empty(count, np.int64)
        _schema_ids(values.data.address, starts, ends, values.valid, ids)
        one = bool(count) and bool((ids == ids[0]).all())
        for id in ids[:1].tolist() if one else np.unique(ids).tolist():
            if id >= 0 and self._entries.get(id, -1) < 0:
                self._add(id)
        if one and self._entries.get(int(ids[0]), -1) >= 0:
            return np.full(count, self._entries[int(ids[0])], np.int64), []
        entries = np.array([self._entries.get(id, -1) for id in ids.tolist()], np.int64)
        bad = np.flatnonzero(entries < 0)
        return entries, [BadValue(int(n), self._why[int(ids[n])]) for n in bad]

    def _add(self, id: int) -> None:
        assert self._schema_of is not None
        writer = self._schema_of(id)
        if isinstance(writer, str):
            self._entries[id], self._why[id] = -1, writer
            return
        self._entries[id] = self._program.add(writer)
        self._code, self._tables, self._constants, self._frames = self._program.made()

    def _run(
        self,
        data: pa.Buffer,
        starts: npt.NDArray[np.int32],
        ends: npt.NDArray[np.int32],
        entries: npt.NDArray[np.int64],
        first_only: bool,
    ) -> npt.NDArray[np.int64]:
        """Decode into the slots; what is bad, as ``kernels.decode`` tells it."""
        count, layout = len(entries), self._layout
        layout.begin(count, data.size)
        bad, found = np.empty((1 if first_only else max(1, count), 3), np.int64), np.zeros(1, np.int64)
        header = HEADER_BYTES if self._schema_of is not None else 0
        memory = (self._code, self._tables, self._constants)
        addresses = [array.ctypes.data for array in memory]
        row = 0
        while True:
            row = _decode(
                *(data.address, starts, ends, entries, row, header),
                *(*addresses, layout.address, len(layout), self._frames.ctypes.data),
                *(data.address + data.size, bad, found),
            )
            if row >= count:
                break
            if not layout.grow():
                raise DataError(
                    "the rows of one batch hold more than 2 GiB of text in a column",
                    hint="Are large defaults added to messages that lack a field? Read without that column.",
                )
        layout.done(count - int(found[0]))
        return bad[: int(found[0])]

    def _rows(self, count: int) -> pa.RecordBatch:
        """The rows that were decoded."""
        if not count:
            return self._widened.widen(pa.RecordBatch.from_pylist([], schema=self._schema))
        columns = [self._layout.array(self._columns[name], count, self._dictionaries) for name in self._schema.names]
        return self._widened.widen(batch_of(columns, self._schema))
