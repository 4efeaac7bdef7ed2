"""Messages whose values are taken as they are: texts, or bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa

from cutwater.connectors.messages.base import BadValue, Decoded, ValueDecoder, Values

NOT_UTF8 = "not UTF-8"


@dataclass(frozen=True)
class RawMessages:
    """One column ``value``: a text, which must be UTF-8, or bytes.  A null value is a null.

    >>> decoder = RawMessages("text").decoder(None, dictionaries=False)
    >>> decoded = decoder.decode(Values.of([b"a", None, b"\\xff"]), first_only=False)
    >>> decoded.rows["value"].to_pylist(), decoded.bad
    (['a', None], [BadValue(number=2, reason='not UTF-8')])
    """

    name: str

    NAMES: ClassVar[tuple[str, str]] = ("text", "bytes")

    @property
    def schema(self) -> pa.Schema:
        return pa.schema({"value": pa.string() if self.name == "text" else pa.binary()})

    def decoder(self, columns: frozenset[str] | None, *, dictionaries: bool) -> ValueDecoder:
        return _RawDecoder(self.schema)


class _RawDecoder:
    gap = 0

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._text = pa.types.is_string(schema.field(0).type)

    def decode(self, values: Values, *, first_only: bool) -> Decoded:
        column = values.array()
        if not self._text:
            return Decoded(pa.record_batch([column], schema=self._schema), None)
        texts, wrong = as_texts(column)
        bad = [BadValue(int(number), NOT_UTF8) for number in wrong[: 1 if first_only else None]]
        if not bad:
            return Decoded(pa.record_batch([texts], schema=self._schema), None)
        good = np.setdiff1d(np.arange(len(values), dtype=np.int64), wrong)
        return Decoded(pa.record_batch([texts.take(pa.array(good))], schema=self._schema), good, bad)


def as_texts(column: pa.Array) -> tuple[pa.Array, list[int]]:
    """A column of bytes as texts, and the rows that are none (null there).

    >>> as_texts(pa.array([b"a", b"\\xff"]))[1]
    [1]
    """
    try:
        return column.cast(pa.string()), []
    except pa.ArrowInvalid:
        texts = [_text(value) for value in column.to_pylist()]
        wrong = [
            row for row, (text, value) in enumerate(zip(texts, column, strict=True)) if text is None and value.is_valid
        ]
        return pa.array(texts, pa.string()), wrong


def _text(value: bytes | None) -> str | None:
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        return None
