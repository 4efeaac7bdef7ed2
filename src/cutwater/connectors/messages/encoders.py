"""Rows to the values of messages, and columns to their keys: each as bytes in one piece of memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

from cutwater.connectors.files.part_formats import CsvParts, JsonParts
from cutwater.data.words import bytes_view
from cutwater.errors import BuildError, did_you_mean

_NEWLINE = 10


class Encoded(NamedTuple):
    """Values of messages: where each begins in the data, and how long it is."""

    data: pa.Buffer
    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    gap: int = 0
    """Bytes behind each that are not part of it; there is nothing else between them."""

    def column(self, gone: npt.NDArray[np.bool_] | None) -> pa.Array:
        """As an Arrow array of binary, without a copy; each with the gap behind it.

        Args:
            gone: those that are null; ``None``: none is.

        >>> lines_of([b"a\\nbc\\n"], 2).column(np.array([True, False])).to_pylist()
        [None, b'bc\\n']
        """
        ends = np.zeros(len(self.starts) + 1, np.int32)
        np.cumsum(self.lengths + self.gap, out=ends[1:])
        mask, nulls = None, 0
        if gone is not None and gone.any():
            mask, nulls = pa.py_buffer(np.packbits(~gone, bitorder="little")), int(gone.sum())
        first = int(self.starts[0]) if len(self.starts) else 0
        data = self.data.slice(first, int(ends[-1]))
        return pa.Array.from_buffers(pa.binary(), len(self.starts), [mask, pa.py_buffer(ends), data], nulls)

    @property
    def addresses(self) -> npt.NDArray[np.int64]:
        """Of each, in the memory of the data, which must stay."""
        return self.starts + self.data.address

    def value(self, number: int) -> bytes:
        """One of them.

        >>> lines_of([b"a\\nbc\\n"], 2).value(1)
        b'bc'
        """
        start = int(self.starts[number])
        return self.data[start : start + int(self.lengths[number])].to_pybytes()


class ValueEncoder(Protocol):
    """Makes the values of messages: a frozen, picklable value."""

    gap: ClassVar[int]
    """Of what it encodes (``Encoded``)."""

    def check(self, schema: pa.Schema) -> None:
        """Refuse columns that values cannot hold.

        Raises:
            BuildError: with what to do.
        """
        ...

    def encode(self, rows: pa.Table) -> Encoded:
        """One value for each row.

        Raises:
            DataError: a row that cannot be written.
        """
        ...


@dataclass(frozen=True)
class LineEncoder:
    """A line of JSON or CSV for each row.

    >>> encoded = LineEncoder(JsonParts()).encode(pa.table({"n": [1, 2], "t": ["a", None]}))
    >>> encoded.value(1)
    b'{"n":2,"t":null}'
    """

    parts: JsonParts | CsvParts

    gap: ClassVar[int] = 1

    def check(self, schema: pa.Schema) -> None:
        self.parts.schema(schema)

    def encode(self, rows: pa.Table) -> Encoded:
        return lines_of(self.parts.text(rows.schema, rows), rows.num_rows)


@dataclass(frozen=True)
class ColumnEncoder:
    """The only column, a text or bytes, as it is.

    >>> ColumnEncoder().encode(pa.table({"value": ["a", "bc"]})).value(1)
    b'bc'
    """

    gap: ClassVar[int] = 0

    def check(self, schema: pa.Schema) -> None:
        kinds = [field.type for field in schema]
        if len(kinds) != 1 or not (pt.is_string(kinds[0]) or pt.is_binary(kinds[0])):
            raise BuildError(
                f"format 'text' and 'bytes' write one column of string or binary, not {', '.join(schema.names)}",
                hint="Select it first, or write format='json'.",
            )

    def encode(self, rows: pa.Table) -> Encoded:
        return bytes_of(rows.column(0).combine_chunks())


def lines_of(pieces: Sequence[bytes], rows: int) -> Encoded:
    """Text with a newline behind each row, and nowhere else."""
    data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == _NEWLINE)
    if len(ends) != rows:  # a CSV field may hold one
        raise BuildError(
            "a text with a newline cannot be written as a message of CSV", hint="Write format='json' instead."
        )
    starts = np.zeros(rows, np.int64)
    starts[1:] = ends[:-1] + 1
    return Encoded(pa.py_buffer(data), starts, ends - starts, gap=1)


def bytes_of(column: pa.Array) -> Encoded:
    """The values of a column of texts or bytes, without a copy; nulls are empty."""
    content, ends = bytes_view(column)
    data = column.buffers()[2]
    places = ends.astype(np.int64)
    return Encoded(pa.py_buffer(content) if data is None else data, places[:-1], np.diff(places))


def keys_of(rows: pa.Table, key: Sequence[str]) -> pa.Array:
    """The key of each row: a text or bytes as they are, another column as text, several as a JSON object.

    >>> keys_of(pa.table({"a": [1, 2], "b": ["x", None]}), ["a", "b"]).to_pylist()
    [b'{"a":1,"b":"x"}', b'{"a":2,"b":null}']
    >>> keys_of(pa.table({"a": [1, 2]}), ["a"]).to_pylist()
    [b'1', b'2']
    """
    chosen = rows.select(list(key))
    if len(key) == 1:
        column = chosen.column(0).combine_chunks()
        if pt.is_binary(column.type):
            return column
        return (column if pt.is_string(column.type) else column.cast(pa.string())).cast(pa.binary())
    encoded = LineEncoder(JsonParts()).encode(chosen)
    return pa.array([encoded.value(row) for row in range(rows.num_rows)], pa.binary())


ENCODERS: dict[str, Callable[..., ValueEncoder]] = {
    "json": lambda: LineEncoder(JsonParts()),
    "csv": lambda delimiter=",": LineEncoder(CsvParts(header=False, delimiter=delimiter)),
    "text": ColumnEncoder,
    "bytes": ColumnEncoder,
}
"""By the name of the format."""


def encoder_of(name: str) -> ValueEncoder:
    """The encoder of a format.

    Raises:
        BuildError: there is none.

    >>> encoder_of("jason")
    Traceback (most recent call last):
    cutwater.errors.BuildError: messages are not written as 'jason'...
    """
    make = ENCODERS.get(name)
    if make is None:
        raise BuildError(f"messages are not written as {name!r}", hint=did_you_mean(name, ENCODERS))
    return make()
