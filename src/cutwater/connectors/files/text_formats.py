"""CSV and JSON lines: a block of whole rows to a batch, and a schema from a first block.

Times written as text follow one rule.  A text with a zone is an instant: a column that has any is
``timestamp[us, UTC]``.  One without is a time of the wall clock, ``timestamp[us]``; in a column of instants it counts
as UTC.  In a column of the wall clock a zone is an error.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute
import pyarrow.csv as pa_csv
import pyarrow.json as pa_json
import pyarrow.types as pt

from cutwater.connectors.files.line_blocks import Block
from cutwater.connectors.text.text_columns import TextColumns, knows
from cutwater.errors import BuildError

pc: Any = pyarrow.compute
"""Its functions are made at import: the type checker does not know them."""

PlainParser = Callable[[bytes, int], "pa.RecordBatch | None"]
"""Data and their number of rows to a batch; ``None`` if a row is not plain: then ``parse`` has to say what it is."""

_SLOW_MOST = 31
"""So often the slow way is taken at most before the fast one is tried again."""
_ZONE = r"\d:\d\d\S*(?:[zZ]|[+-]\d\d(?::?\d\d)?)$|T\d\d(?:Z|[+-]\d\d(?::?\d\d)?)$"
"""A time of day that ends with a zone (the end of a plain date looks like an offset, too)."""
_TIME = r"^\d{4}-\d\d-\d\d(?:[T ]|$)"
_DATE = r"^\d{4}-\d\d-\d\d$"
_FINER = r"\.\d{7,}"
_ISO_HINT = "write 2026-01-31T12:00:00.5Z, or give timestamp_formats"


def time_type(texts: pa.ChunkedArray, formats: Sequence[str]) -> pa.DataType | None:
    """The type of a column of texts that are times or dates, all of them; ``None`` if they are not.

    >>> time_type(pa.chunked_array([["2026-01-01T00:00:00.5+01:00", None, "2026-01-01 00:00:00"]]), ())
    TimestampType(timestamp[us, tz=UTC])
    >>> time_type(pa.chunked_array([["2026-01-01"]]), ())
    DataType(date32[day])
    """
    seen = texts.drop_null().combine_chunks()
    if not len(seen):
        return None
    if formats:
        kind = pa.timestamp("us", "UTC" if any("%z" in pattern for pattern in formats) else None)
    elif not _every(seen, _TIME):
        return None
    elif _every(seen, _DATE):
        kind = pa.date32()
    else:
        zoned = pc.any(pc.match_substring_regex(seen, _ZONE)).as_py()
        kind = pa.timestamp("us", "UTC" if zoned else None)
    try:
        _ = parse_dates(seen) if kind == pa.date32() else parse_times(seen, kind, formats)
    except (pa.ArrowInvalid, ValueError):
        return None
    return kind


def parse_times(texts: pa.Array, kind: pa.DataType, formats: Sequence[str]) -> pa.Array:
    """Texts as timestamps: ISO 8601, or the first ``strptime`` format that fits.

    A text without zone in a column with zone is local time there.

    Raises:
        ValueError: a text is no such time, or has a zone where the column has none.

    >>> texts = pa.array(["1969-12-31 23:00:00", "1970-01-01T00:00+01:00"])
    >>> parse_times(texts, pa.timestamp("us", "UTC"), ()).cast("int64").to_pylist()
    [-3600000000, -3600000000]
    """
    if formats:
        return _by_format(texts, kind, formats)
    try:
        return _iso(texts, kind)
    except pa.ArrowInvalid as e:
        raise ValueError(_why(texts, kind)) from e


def parse_dates(texts: pa.Array) -> pa.Array:
    """Texts as dates, ``2026-01-31``.

    Raises:
        ValueError: a text is no such date.

    >>> parse_dates(pa.array(["1970-01-02", None])).cast("int32").to_pylist()
    [1, None]
    """
    try:
        return texts.cast(pa.date32())
    except pa.ArrowInvalid:
        wrong = next(t for t in texts.to_pylist() if t is not None and not _is_date(t))
        raise ValueError(f"{wrong!r} is no date: write 2026-01-31") from None


def _iso(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    if kind.tz is None:
        return texts.cast(kind)
    zoned = pc.match_substring_regex(texts, _ZONE)
    if zoned.null_count == 0 and zoned.true_count == len(zoned):
        return texts.cast(kind)
    missing = pa.scalar(None, texts.type)
    with_zone = pc.if_else(zoned, texts, missing).cast(kind)
    local = pc.if_else(zoned, missing, texts).cast(pa.timestamp(kind.unit))
    return pc.coalesce(with_zone, pc.assume_timezone(local, kind.tz).cast(kind))


def _why(texts: pa.Array, kind: pa.DataType) -> str:
    """The fault of the first text that is no time of this kind."""
    for text in texts.to_pylist():
        one = pa.array([text], texts.type)
        try:
            _iso(one, kind)
        except pa.ArrowInvalid:
            if kind.tz is None and _every(one, _ZONE):
                return f"{text!r} has a zone, and {kind} (timestamp_ntz) has none: give the column type timestamp"
            if _matches(one, _FINER):
                return f"{text!r} is finer than {kind}: read it as string"
            return f"{text!r} is no ISO 8601 time: {_ISO_HINT}"
    return f"not {kind}"


def _by_format(texts: pa.Array, kind: pa.DataType, formats: Sequence[str]) -> pa.Array:
    result = pa.nulls(len(texts), kind)
    for pattern in formats:
        times = pc.strptime(texts, format=pattern, unit=kind.unit, error_is_null=True)
        if kind.tz is not None and times.type.tz is None:
            times = pc.assume_timezone(times, kind.tz)
        result = pc.coalesce(result, times.cast(kind))
    if result.null_count > texts.null_count:
        bad = texts.filter(pc.and_(pc.is_null(result), pc.is_valid(texts)))
        raise ValueError(f"{bad[0].as_py()!r} is no time of the form {' or '.join(map(repr, formats))}")
    return result


def _is_date(text: str) -> bool:
    try:
        pa.array([text]).cast(pa.date32())
    except pa.ArrowInvalid:
        return False
    return True


def _every(texts: pa.Array, pattern: str) -> bool:
    return bool(pc.all(pc.match_substring_regex(texts, pattern)).as_py())


def _matches(texts: pa.Array, pattern: str) -> bool:
    return bool(pc.any(pc.match_substring_regex(texts, pattern)).as_py())


@dataclass(frozen=True)
class CsvFormat:
    """Settings for reading CSV."""

    header: bool = True
    delimiter: str = ","
    quote: str | None = '"'
    null_values: tuple[str, ...] = ("",)
    timestamp_formats: tuple[str, ...] = ()

    passes_over: ClassVar = True
    """Fields may be passed over without a look at them."""

    def names(self, header: str) -> list[str]:
        """Column names of a header row.

        >>> CsvFormat().names('a,"b, c",d')
        ['a', 'b, c', 'd']
        """
        return next(csv.reader(io.StringIO(header, newline=""), **self._dialect()))

    def positional_names(self, first_row: str) -> list[str]:
        """Names of a file without header, as Spark gives them.

        >>> CsvFormat().positional_names("1,2")
        ['_c0', '_c1']
        """
        return [f"_c{i}" for i in range(len(self.names(first_row)))]

    def parse(
        self, data: bytes, rows: int, schema: pa.Schema, names: Sequence[str], *, newlines: bool
    ) -> pa.RecordBatch:
        """Exactly ``rows`` rows.

        Raises:
            pa.ArrowInvalid, ValueError: a row is bad.
        """
        if rows > 1 and data.count(b"\r") != data.count(b"\r\n"):
            # Arrow ends rows at a lone carriage return, too: only row by row is their number certain.
            raise ValueError("a carriage return without newline")
        types = {f.name: pa.string() if pt.is_timestamp(f.type) else f.type for f in schema}
        try:
            table = self._read(
                data,
                names,
                pa_csv.ConvertOptions(
                    column_types=types,
                    null_values=list(self.null_values),
                    strings_can_be_null=True,
                    quoted_strings_can_be_null=False,
                    include_columns=schema.names,
                ),
                newlines,
            )
        except pa.ArrowInvalid as e:
            raise ValueError(_csv_reason(str(e), names)) from e
        return _finish(table, rows, schema, self.timestamp_formats)

    def plain(self, schema: pa.Schema, names: Sequence[str], dictionaries: bool) -> PlainParser | None:
        """A parser of plain rows, much faster than ``parse``; ``None`` if there is none for such columns.

        With ``dictionaries`` columns of few texts come as such.
        """
        if self.timestamp_formats or self.null_values != ("",) or not knows(schema):
            return None
        columns = TextColumns(schema, names, dictionaries=dictionaries)
        return lambda data, rows: columns.csv(data, rows, delimiter=self.delimiter, quote=self.quote)

    def infer(self, block: Block, names: Sequence[str]) -> pa.Schema:
        """Types of the columns from the rows of a block; rows of a wrong length are left out."""
        options = pa_csv.ConvertOptions(
            null_values=list(self.null_values), strings_can_be_null=True, quoted_strings_can_be_null=False
        )
        if not len(block.starts):
            return pa.schema([pa.field(n, pa.string()) for n in names])
        guessed = self._read(block.data, names, options, block.quoted_newlines, skip_bad=True).schema
        perhaps = {f.name: pa.string() for f in guessed if _may_be_time(f.type)}
        options.column_types = perhaps
        texts = self._read(block.data, names, options, block.quoted_newlines, skip_bad=True)
        return _with_times(guessed, texts, self.timestamp_formats)

    def check(self, schema: pa.Schema) -> None:
        """Refuse types that a CSV field cannot hold.

        Raises:
            BuildError: such a type.
        """
        for field in schema:
            if pt.is_nested(field.type):
                raise BuildError(
                    f"column {field.name!r}: CSV cannot hold {field.type}", hint="Read it as string, or use JSON lines."
                )
        _try_types(lambda: self.parse(b"", 0, schema, schema.names, newlines=False), schema, "CSV")

    def _read(
        self, data: bytes, names: Sequence[str], convert: pa_csv.ConvertOptions, newlines: bool, skip_bad: bool = False
    ) -> pa.Table:
        if not data:
            # Arrow calls an input without bytes an error; a blank line is no row.
            data = b"\n"
        return pa_csv.read_csv(
            pa.BufferReader(data),
            pa_csv.ReadOptions(use_threads=False, block_size=len(data) + 1, column_names=list(names)),
            pa_csv.ParseOptions(
                delimiter=self.delimiter,
                quote_char=self.quote or False,
                double_quote=True,
                newlines_in_values=newlines,
                ignore_empty_lines=True,
                invalid_row_handler=(lambda row: "skip") if skip_bad else None,
            ),
            convert,
        )

    def _dialect(self) -> dict[str, Any]:
        quoting = csv.QUOTE_MINIMAL if self.quote else csv.QUOTE_NONE
        return {"delimiter": self.delimiter, "quotechar": self.quote or '"', "quoting": quoting}


@dataclass(frozen=True)
class JsonFormat:
    """Settings for reading JSON lines: one object per line.  A field that is missing in a row is null."""

    timestamp_formats: tuple[str, ...] = ()
    ignore_unknown: bool = False
    """Pass over fields that the schema does not name (it was given by the user)."""

    @property
    def passes_over(self) -> bool:
        """Fields may be passed over without a look at them; else each that is new is an error."""
        return self.ignore_unknown

    def parse(
        self, data: bytes, rows: int, schema: pa.Schema, names: Sequence[str], *, newlines: bool
    ) -> pa.RecordBatch:
        """Exactly ``rows`` rows.

        Raises:
            pa.ArrowInvalid, ValueError: a row is bad.
        """
        if not _one_object_per_line(data, rows):
            raise ValueError("not one JSON object on one line")
        # Arrow's JSON reader knows neither zones nor fractions, and takes dates for numbers.
        as_text = (pa.string() if pt.is_timestamp(f.type) or pt.is_date32(f.type) else f.type for f in schema)
        asked = pa.schema([pa.field(f.name, kind) for f, kind in zip(schema, as_text, strict=True)])
        unknown = "ignore" if self.ignore_unknown else "error"
        try:
            table = self._read(data, pa_json.ParseOptions(explicit_schema=asked, unexpected_field_behavior=unknown))
        except pa.ArrowInvalid as e:
            raise ValueError(_json_reason(str(e), data, rows, schema)) from e
        table.validate(full=True)  # Arrow's JSON reader lets bytes pass that are not UTF-8
        return _finish(table.select(schema.names), rows, schema, self.timestamp_formats)

    def plain(self, schema: pa.Schema, names: Sequence[str], dictionaries: bool) -> PlainParser | None:
        """A parser of plain rows, much faster than ``parse``; ``None`` if there is none for such columns.

        With ``dictionaries`` columns of few texts come as such.
        """
        if self.timestamp_formats or not knows(schema):
            return None
        columns = TextColumns(schema, dictionaries=dictionaries)
        return lambda data, rows: columns.json(data, rows, ignore=self.ignore_unknown)

    def infer(self, block: Block, names: Sequence[str]) -> pa.Schema:
        """Fields and types from the rows of a block; rows that are no JSON objects are left out.

        Raises:
            BuildError: no row to take a schema from, or fields whose type changes from row to row.
        """
        try:
            data = block.data
            table = self._read(data, pa_json.ParseOptions())
        except pa.ArrowInvalid:
            rows = [block.data[a:b] for a, b in zip(block.starts, block.ends, strict=True)]
            try:
                data = b"".join(row for row in rows if _is_object(row))
                table = self._read(data, pa_json.ParseOptions())
            except pa.ArrowInvalid as e:
                raise BuildError(f"the JSON lines have no common schema: {e}", hint="Give schema=...") from e
        perhaps = pa.schema([pa.field(f.name, pa.string()) for f in table.schema if _may_be_time(f.type)])
        # Arrow drops the zone when it guesses a type, and knows no fractions: look at the texts.
        texts = self._read(data, pa_json.ParseOptions(explicit_schema=perhaps, unexpected_field_behavior="ignore"))
        return _with_times(table.schema, texts, self.timestamp_formats)

    def check(self, schema: pa.Schema) -> None:
        """Refuse types that Arrow's JSON reader does not make.

        Raises:
            BuildError: such a type.
        """
        nullable = pa.schema([f.with_nullable(True) for f in schema])
        _try_types(lambda: self.parse(b"{}\n", 1, nullable, (), newlines=False), schema, "JSON")

    @staticmethod
    def _read(data: bytes, options: pa_json.ParseOptions) -> pa.Table:
        if not data.strip():
            return pa.table({f.name: pa.array([], f.type) for f in options.explicit_schema or ()})
        read = pa_json.ReadOptions(use_threads=False, block_size=len(data) + 1)
        return pa_json.read_json(pa.BufferReader(data), read, options)


TextFormat = CsvFormat | JsonFormat


class PlainFirst:
    """Tries the fast parser, and leaves it alone for a while each time that rows were not plain.

    Args:
        plain: the parser; ``None``: there is none.

    >>> tries = PlainFirst(lambda data, rows: print("tried"))
    >>> [tries.parse(b"", 0) for _ in range(4)]
    tried
    tried
    [None, None, None, None]
    """

    def __init__(self, plain: PlainParser | None) -> None:
        self._plain = plain
        self._left = self._last = 0
        """How often it is not tried now, and how often it was not the last time."""

    def parse(self, data: bytes, rows: int) -> pa.RecordBatch | None:
        """The rows; ``None`` if ``parse`` of the format has to say what they are."""
        if self._plain is None:
            return None
        if self._left:
            self._left -= 1
            return None
        batch = self._plain(data, rows)
        self._last = 0 if batch is not None else min(2 * self._last + 1, _SLOW_MOST)
        self._left = self._last
        return batch


def _finish(table: pa.Table, rows: int, schema: pa.Schema, formats: Sequence[str]) -> pa.RecordBatch:
    if table.num_rows != rows:
        raise ValueError(f"{table.num_rows} values where {rows} should be (one row per line)")
    columns: list[pa.Array] = []
    for field in schema:
        chunks = table.column(field.name)
        column = chunks.combine_chunks() if chunks.num_chunks != 1 else chunks.chunk(0)
        if column.type != field.type:
            try:
                column = parse_dates(column) if pt.is_date32(field.type) else parse_times(column, field.type, formats)
            except (pa.ArrowInvalid, ValueError) as e:
                raise ValueError(f"column {field.name!r}: {e}") from e
        if not field.nullable and column.null_count:
            raise ValueError(f"column {field.name!r} is null and the schema says it is not")
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _may_be_time(kind: pa.DataType) -> bool:
    """True if a column for which Arrow guesses this type may hold times."""
    return pt.is_timestamp(kind) or pt.is_date(kind) or pt.is_string(kind)


def _with_times(guessed: pa.Schema, texts: pa.Table, formats: Sequence[str]) -> pa.Schema:
    """A guessed schema with the types of times by the one rule, whatever Arrow's readers make of them."""
    fields: list[pa.Field] = []
    for field in guessed:
        kind = _settled(field.type)
        if _may_be_time(field.type):
            kind = time_type(texts.column(field.name), formats) or pa.string()
        fields.append(pa.field(field.name, kind))
    return pa.schema(fields)


def _settled(kind: pa.DataType) -> pa.DataType:
    """A guessed type as a column of a stream has it: string where nothing was seen."""
    if pt.is_null(kind) or pt.is_time(kind):
        return pa.string()
    if pt.is_list(kind):
        return pa.list_(_settled_inner(kind.value_type))
    if pt.is_struct(kind):
        return pa.struct([(kind.field(i).name, _settled_inner(kind.field(i).type)) for i in range(kind.num_fields)])
    return kind


def _settled_inner(kind: pa.DataType) -> pa.DataType:
    """Inside lists and structs guessed times stay texts: their zones cannot be told apart there."""
    return pa.string() if pt.is_timestamp(kind) else _settled(kind)


def _try_types(parse: Any, schema: pa.Schema, what: str) -> None:
    try:
        parse()
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid, pa.ArrowTypeError, KeyError, ValueError) as e:
        raise BuildError(
            f"{what} cannot be read as {', '.join(f'{f.name} {f.type}' for f in schema)}: {e}",
            hint="Read such columns as string, or use Parquet.",
        ) from e


def _one_object_per_line(data: bytes, rows: int) -> bool:
    """True if every line begins and ends as an object does.

    Arrow alone would take objects that run over several lines, and several on one line: their number could come out
    right by accident.  No object can be cut so that both parts begin with ``{`` and end with ``}``.
    """
    starts = data.count(b"\n{") + data.startswith(b"{")
    ends = data.count(b"}\n") + data.count(b"}\r\n") + data.endswith(b"}")
    if starts == ends == rows == data.count(b"\n") + (not data.endswith(b"\n")):
        return True
    lines = [line for line in map(bytes.strip, data.split(b"\n")) if line]
    return len(lines) == rows and all(line.startswith(b"{") and line.endswith(b"}") for line in lines)


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _csv_reason(message: str, names: Sequence[str]) -> str:
    message = re.sub(r"^CSV parse error: (Row #\d+: )?", "", message)
    message = re.sub(r"(Expected \d+ columns, got \d+).*", r"\1", message, flags=re.DOTALL)
    found = re.match(r"In CSV column #(\d+): (?:Row #\d+: )?(?:CSV conversion error to )?", message)
    if found and int(found[1]) < len(names):
        message = f"column {names[int(found[1])]!r}: not {message[found.end() :]}"
    return message


def _json_reason(message: str, data: bytes, rows: int, schema: pa.Schema) -> str:
    message = re.sub(r"^JSON parse error: ", "", message)
    message = re.sub(r" in row \d+$", "", message)
    if rows == 1 and message == "unexpected field" and _is_object(data):
        unknown = [name for name in json.loads(data) if name not in schema.names]
        if unknown:
            return f"field {unknown[0]!r} is new"
    return message
