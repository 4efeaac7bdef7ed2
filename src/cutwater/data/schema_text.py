"""Schemas written as text, as Spark users write them, ``"word string, n long not null"``, and how two differ."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import pyarrow as pa

from cutwater.errors import BuildError

_SIMPLE: dict[str, pa.DataType] = {
    "boolean": pa.bool_(),
    "bool": pa.bool_(),
    "tinyint": pa.int8(),
    "byte": pa.int8(),
    "smallint": pa.int16(),
    "short": pa.int16(),
    "int": pa.int32(),
    "integer": pa.int32(),
    "bigint": pa.int64(),
    "long": pa.int64(),
    "float": pa.float32(),
    "real": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ltz": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}
_TOKEN = re.compile(r"\s*(?:(?P<quoted>`(?:[^`]|``)*`)|(?P<text>'[^']*')|(?P<word>\w+)|(?P<mark>[<>(),:]))")
ZONES_DIFFER_HINT = (
    "One is an instant, the other has no zone. Read both alike, schema='..., at timestamp', or change one: "
    "with_columns('id', at=pl.col('at').dt.replace_time_zone('UTC')), then .with_event_time('at') if it is that."
)
"""What to do where a time with a zone meets one without."""
_HINT = "Write for example 'word string, n long not null, tags array<string>'."


class _Token(NamedTuple):
    kind: str
    text: str
    position: int


class _Parser:
    """Recursive descent over the tokens of one schema text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = self._scan()
        self.at = 0

    def _scan(self) -> list[_Token]:
        tokens: list[_Token] = []
        position, end = 0, len(self.text.rstrip())
        while position < end:
            match = _TOKEN.match(self.text, position)
            if match is None or match.lastgroup is None:
                raise self._error(f"unexpected {self.text[position:].lstrip()[:1]!r}", position)
            tokens.append(_Token(match.lastgroup, match[match.lastgroup], match.start(match.lastgroup)))
            position = match.end()
        tokens.append(_Token("end", "", end))
        return tokens

    def _error(self, what: str, position: int) -> BuildError:
        return BuildError(f"schema {self.text!r}: {what} at character {position + 1}", hint=_HINT)

    def schema(self) -> pa.Schema:
        fields = self.fields(":", "end")
        return pa.schema(fields)

    def fields(self, separator: str, closing: str) -> list[pa.Field]:
        """``name type [not null] [comment '...']`` and so on, up to the ``closing`` mark."""
        fields: list[pa.Field] = []
        seen: set[str] = set()
        while True:
            token = self._next()
            if token.kind not in ("word", "quoted"):
                raise self._error("expected a column name", token.position)
            name = token.text[1:-1].replace("``", "`") if token.kind == "quoted" else token.text
            if name in seen:
                raise self._error(f"column {name!r} appears twice", token.position)
            seen.add(name)
            self._skip(separator)
            fields.append(pa.field(name, self.type(), nullable=not self._not_null()))
            if self._skip_word("comment") and self._next().kind != "text":
                raise self._error("expected a quoted comment", self.tokens[self.at - 1].position)
            token = self._next()
            if token.text == closing or token.kind == closing:
                return fields
            if token.text != ",":
                raise self._error(f"expected ',' after column {name!r}", token.position)

    def type(self) -> pa.DataType:
        token = self._next()
        name = token.text.lower()
        if token.kind != "word":
            raise self._error("expected a type", token.position)
        if name in _SIMPLE:
            return _SIMPLE[name]
        compound = self._compound.get(name)
        if compound is None:
            known = ", ".join((*_SIMPLE, *self._compound))
            raise BuildError(f"schema {self.text!r}: unknown type {token.text!r}", hint=f"Known types: {known}.")
        return compound(self)

    def _decimal(self) -> pa.DataType:
        precision, scale = 10, 0
        if self._skip("("):
            precision = self._number(1, 38)
            if self._skip(","):
                scale = self._number(0, precision)
            self._expect(")")
        return pa.decimal128(precision, scale)

    def _text(self) -> pa.DataType:
        if self._skip("("):
            self._number(1, 2**31 - 1)
            self._expect(")")
        return pa.string()

    def _array(self) -> pa.DataType:
        self._expect("<")
        element = self.type()
        nullable = not self._not_null()
        self._expect(">")
        return pa.list_(pa.field("element", element, nullable))

    def _map(self) -> pa.DataType:
        self._expect("<")
        key = self.type()
        self._expect(",")
        value = self.type()
        nullable = not self._not_null()
        self._expect(">")
        return pa.map_(key, pa.field("value", value, nullable))

    def _struct(self) -> pa.DataType:
        self._expect("<")
        if self._skip(">"):
            return pa.struct([])
        return pa.struct(self.fields(":", ">"))

    _compound: dict[str, Callable[[_Parser], pa.DataType]] = {
        "decimal": _decimal,
        "numeric": _decimal,
        "varchar": _text,
        "char": _text,
        "array": _array,
        "map": _map,
        "struct": _struct,
    }

    def _next(self) -> _Token:
        token = self.tokens[self.at]
        self.at = min(self.at + 1, len(self.tokens) - 1)
        return token

    def _skip(self, mark: str) -> bool:
        if self.tokens[self.at].kind == "mark" and self.tokens[self.at].text == mark:
            self.at += 1
            return True
        return False

    def _expect(self, mark: str) -> None:
        if not self._skip(mark):
            raise self._error(f"expected {mark!r}", self.tokens[self.at].position)

    def _skip_word(self, word: str) -> bool:
        if self.tokens[self.at].kind == "word" and self.tokens[self.at].text.lower() == word:
            self.at += 1
            return True
        return False

    def _not_null(self) -> bool:
        if not self._skip_word("not"):
            return False
        if not self._skip_word("null"):
            raise self._error("expected 'null' after 'not'", self.tokens[self.at].position)
        return True

    def _number(self, low: int, high: int) -> int:
        token = self._next()
        if not token.text.isdecimal() or not low <= int(token.text) <= high:
            raise self._error(f"expected a whole number from {low} to {high}", token.position)
        return int(token.text)


def parse_schema(text: str) -> pa.Schema:
    """The Arrow schema of a Spark-like DDL text.

    Types: boolean, tinyint (byte), smallint (short), int (integer), bigint (long), float (real), double, string,
    varchar(n), binary, date, timestamp (microseconds, UTC), timestamp_ntz (microseconds, no zone), decimal(p, s),
    ``array<...>``, ``map<..., ...>``, ``struct<name: ...>``.  Names may be in backquotes; ``not null`` and
    ``comment '...'`` may follow a type.  Type names are case-insensitive, column names are not.

    Raises:
        BuildError: the text is no schema; the message says where.

    >>> parse_schema("word string, n long not null").field("n")
    pyarrow.Field<n: int64 not null>
    """
    return _Parser(text).schema()


def as_schema(schema: pa.Schema | str) -> pa.Schema:
    """``schema`` itself, or what ``parse_schema`` makes of a text.

    Raises:
        BuildError: neither a schema nor a text that is one.
    """
    if isinstance(schema, str):
        return parse_schema(schema)
    if not isinstance(schema, pa.Schema):  # pyright: ignore[reportUnnecessaryIsInstance] - users pass anything
        raise BuildError(f"a schema is needed, got {type(schema).__name__}", hint=_HINT)
    return schema


def zones_differ(a: pa.DataType, b: pa.DataType) -> bool:
    """True if two types are times of which only one has a zone.

    >>> zones_differ(pa.timestamp("us"), pa.timestamp("us", "UTC")), zones_differ(pa.timestamp("us"), pa.int64())
    (True, False)
    """
    both = pa.types.is_timestamp(a) and pa.types.is_timestamp(b)
    return both and (a.tz is None) != (b.tz is None)


def schema_differences(expected: pa.Schema, other: pa.Schema) -> list[str]:
    """What ``other`` does differently: one sentence per missing, extra, mistyped or misplaced column.

    >>> schema_differences(pa.schema({"a": pa.int64()}), pa.schema({"a": pa.string(), "b": pa.int8()}))
    ["column 'a' is string instead of int64", "column 'b' is extra"]
    """
    found: list[str] = []
    for field in expected:
        index = other.get_field_index(field.name)
        if index < 0:
            found.append(f"column {field.name!r} is missing")
        elif other.field(index).type != field.type:
            found.append(f"column {field.name!r} is {other.field(index).type} instead of {field.type}")
    found += [f"column {name!r} is extra" for name in other.names if name not in expected.names]
    if not found and other.names != expected.names:
        found.append(f"columns are in the order {', '.join(other.names)} instead of {', '.join(expected.names)}")
    return found
