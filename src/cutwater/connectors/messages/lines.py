"""JSON and CSV in messages: each value is a line of text, and all of them are parsed at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import pyarrow as pa

from cutwater.connectors.files.schemas import Widened, cast_batch, good_and_bad, only
from cutwater.connectors.files.text_formats import CsvFormat, JsonFormat, PlainFirst, TextFormat
from cutwater.connectors.messages.base import BadValue, Decoded, ValueDecoder, Values
from cutwater.errors import BuildError

_MAX_REASON = 500
_NULL = "the value is null"


class LineDecoder:
    """Decodes values that are lines of one text format.

    Args:
        text: the format.
        schema: of the rows.
        columns: those that somebody reads; the others come as null.
        dictionaries: columns of few texts come as such.

    >>> decoder = LineDecoder(JsonFormat(ignore_unknown=True), pa.schema({"n": pa.int64()}), None, dictionaries=False)
    >>> decoded = decoder.decode(Values.of([b'{"n": 1}', None, b'{"n": "x"}', b'{"n":\\n2}'], gap=1), first_only=False)
    >>> decoded.rows["n"].to_pylist(), decoded.good.tolist(), [bad.number for bad in decoded.bad]
    ([1, 2], [0, 3], [1, 2])
    """

    gap = 1

    def __init__(
        self, text: TextFormat, schema: pa.Schema, columns: frozenset[str] | None, *, dictionaries: bool
    ) -> None:
        self._text = text
        self._names = schema.names
        self._schema = only(schema, columns) if text.passes_over else schema
        self._widened = Widened(schema)
        self._plain = PlainFirst(text.plain(self._schema, self._names, dictionaries))

    def decode(self, values: Values, *, first_only: bool) -> Decoded:
        """See ``ValueDecoder``."""
        lines = cast(bytes, memoryview(values.data))
        whole = self._plain.parse(lines, len(values)) if not values.nulls else None
        if whole is not None:
            return Decoded(self._widened.widen(whole), None)
        there = np.flatnonzero(values.valid)
        nulls = [BadValue(int(number), _NULL) for number in np.flatnonzero(~values.valid)]
        if nulls and first_only:
            return Decoded(self._joined([]), np.empty(0, np.int64), nulls[:1])

        def convert(first: int, stop: int) -> pa.RecordBatch:
            data = values.data[int(values.starts[there[first]]) : int(values.ends[there[stop - 1] + 1])]
            return self._text.parse(data.to_pybytes(), stop - first, self._schema, self._names, newlines=False)

        found = good_and_bad(len(there), convert, first_only=first_only)
        bad = nulls + [BadValue(int(there[row]), reason[:_MAX_REASON]) for row, reason in found.bad]
        good = np.concatenate([there[r.start : r.stop] for r in found.good] or [np.empty(0, np.int64)])
        rows = self._widened.widen(self._joined(found.batches))
        return Decoded(rows, good, sorted(bad))

    def _joined(self, batches: list[pa.RecordBatch]) -> pa.RecordBatch:
        if len(batches) == 1:
            return batches[0]
        empty = pa.RecordBatch.from_pylist([], schema=self._schema)
        return pa.concat_batches([empty, *(cast_batch(batch, self._schema) for batch in batches)])


@dataclass(frozen=True)
class JsonMessages:
    """One JSON object a message.  Fields that the schema does not name are passed over, missing ones are null."""

    schema: pa.Schema
    timestamp_formats: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check(self._text, self.schema)

    @property
    def name(self) -> str:
        return "json"

    @property
    def _text(self) -> JsonFormat:
        return JsonFormat(self.timestamp_formats, ignore_unknown=True)

    def decoder(self, columns: frozenset[str] | None, *, dictionaries: bool) -> ValueDecoder:
        return LineDecoder(self._text, self.schema, columns, dictionaries=dictionaries)


@dataclass(frozen=True)
class CsvMessages:
    """One row of CSV a message, without a header: fields are the columns of the schema, in its order."""

    schema: pa.Schema
    timestamp_formats: tuple[str, ...] = ()
    delimiter: str = ","
    quote: str | None = '"'
    null_values: tuple[str, ...] = ("",)

    def __post_init__(self) -> None:
        _check(self._text, self.schema)

    @property
    def name(self) -> str:
        return "csv"

    @property
    def _text(self) -> CsvFormat:
        return CsvFormat(False, self.delimiter, self.quote, self.null_values, self.timestamp_formats)

    def decoder(self, columns: frozenset[str] | None, *, dictionaries: bool) -> ValueDecoder:
        return LineDecoder(self._text, self.schema, columns, dictionaries=dictionaries)


def _check(text: TextFormat, schema: pa.Schema) -> None:
    if not schema.names:
        raise BuildError("a schema without columns", hint="Name the fields of the messages: schema='k long, v double'.")
    text.check(schema)
