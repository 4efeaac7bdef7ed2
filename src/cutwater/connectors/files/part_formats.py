"""The formats of a file sink: how staged rows become a file that readers see.

Everything else about a file, when it is cut, named, committed and taken back, does not depend on its format.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, Literal, Protocol, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

from cutwater.connectors.files.schemas import parquet_schema, plain_schema
from cutwater.errors import BuildError, ConfigError, DataError

if TYPE_CHECKING:
    import polars as pl

_ROW_GROUP_ROWS = 1 << 20
_TEXT_ROWS = 1 << 16
"""Rows that are turned into text at once."""

GZIP_SUFFIX = ".gz"


class PartFormat(Protocol):
    """A format: a frozen, picklable value."""

    @property
    def suffix(self) -> str:
        """End of the files' names, with its dot."""
        ...

    def schema(self, schema: pa.Schema) -> pa.Schema:
        """The types that rows are staged with.

        Raises:
            BuildError: a column that the format cannot hold; says what to do.
        """
        ...

    def write(self, file: BinaryIO, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> None:
        """Write a new file, also one without rows.  Making it durable, and closing it, is the caller's.

        Raises:
            DataError: a value that the format cannot hold.
            OSError: the disk is full, the folder is gone.
        """
        ...

    def holds(self, file: BinaryIO, rows: int) -> bool:
        """True if a file of the right size may be one of ours with ``rows`` rows."""
        ...

    def neighbour_schema(self, path: str) -> pa.Schema | None:
        """Types in a file that is in the target already; ``None`` if it does not say."""
        ...


@dataclass(frozen=True)
class ParquetParts:
    """Parquet, with types that Spark reads.

    Args:
        compression: ``"zstd"`` or ``"snappy"``.

    Raises:
        ConfigError: another compression.
    """

    compression: Literal["zstd", "snappy"] = "zstd"

    def __post_init__(self) -> None:
        if self.compression not in ("zstd", "snappy"):
            raise ConfigError(f"compression {self.compression!r} is unknown", hint="Use 'zstd' or 'snappy'.")

    @property
    def suffix(self) -> str:
        return ".parquet"

    def schema(self, schema: pa.Schema) -> pa.Schema:
        return parquet_schema(schema)

    def write(self, file: BinaryIO, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> None:
        try:
            with pq.ParquetWriter(file, schema, compression=self.compression) as writer:
                for table in _groups(batches, schema, _ROW_GROUP_ROWS):
                    writer.write_table(table, row_group_size=_ROW_GROUP_ROWS)
        except pa.ArrowInvalid as error:
            raise DataError(f"rows cannot be written as Parquet: {error}") from error

    def holds(self, file: BinaryIO, rows: int) -> bool:
        try:
            return pq.read_metadata(file).num_rows == rows
        except pa.ArrowInvalid:
            return False

    def neighbour_schema(self, path: str) -> pa.Schema | None:
        try:
            return parquet_schema(pq.read_schema(path))
        except (OSError, pa.ArrowInvalid, BuildError):
            return None


@dataclass(frozen=True)
class _TextParts(ABC):
    """Base of JSON lines and CSV: chunks of text, perhaps compressed."""

    compression: Literal["gzip"] | None = None

    extension: ClassVar[str]

    def __post_init__(self) -> None:
        if self.compression not in (None, "gzip"):
            raise ConfigError(f"compression {self.compression!r} is unknown", hint="Use 'gzip', or leave it away.")

    @property
    def suffix(self) -> str:
        return self.extension + (GZIP_SUFFIX if self.compression else "")

    def holds(self, file: BinaryIO, rows: int) -> bool:
        """The size says enough: a text has no number of rows."""
        return True

    def neighbour_schema(self, path: str) -> pa.Schema | None:
        """Texts name no types."""
        return None

    def write(self, file: BinaryIO, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> None:
        with pa.output_stream(cast(Any, _KeptOpen(file)), compression=self.compression) as stream:
            for text in self._texts(schema, batches):
                stream.write(text.encode())

    @abstractmethod
    def _texts(self, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> Iterator[str]: ...


@dataclass(frozen=True)
class JsonParts(_TextParts):
    """JSON lines: one object per row and line, in UTF-8; nested columns are arrays and objects.

    JSON knows numbers, strings, booleans and null.  So timestamps, dates, times and decimals become strings
    (``"2024-05-01 12:00:00.000000"``), binary becomes base64 as Spark writes it, NaN and the infinities become null.

    Args:
        compression: ``"gzip"``, or ``None`` for plain text.

    Raises:
        ConfigError: another compression.

    >>> JsonParts("gzip").suffix
    '.jsonl.gz'
    """

    extension: ClassVar[str] = ".jsonl"

    def schema(self, schema: pa.Schema) -> pa.Schema:
        return _text_schema(schema, "JSON lines", _no_json)

    def _texts(self, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> Iterator[str]:
        import polars as pl

        expressions = [
            _base64(pl.col(f.name), f.type).alias(f.name) if _has_binary(f.type) else pl.col(f.name) for f in schema
        ]
        for table in _groups(batches, schema, _TEXT_ROWS):
            yield cast("pl.DataFrame", pl.from_arrow(table)).select(expressions).write_ndjson()


@dataclass(frozen=True)
class CsvParts(_TextParts):
    """CSV in UTF-8: fields are quoted where needed, an empty field is null, ``""`` is the empty string.

    Args:
        compression: ``"gzip"``, or ``None`` for plain text.
        header: begin each file with the names of the columns.
        delimiter: one character between fields.

    Raises:
        ConfigError: another compression, or a delimiter that is not one character.

    >>> CsvParts(delimiter=";").suffix
    '.csv'
    """

    header: bool = True
    delimiter: str = ","

    extension: ClassVar[str] = ".csv"

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.delimiter) != 1 or not self.delimiter.isascii() or self.delimiter in '"\r\n':
            raise ConfigError(
                f"delimiter {self.delimiter!r} cannot be used", hint="Use one ASCII character such as ',' ';' or '\\t'."
            )

    def schema(self, schema: pa.Schema) -> pa.Schema:
        return _text_schema(schema, "CSV", _no_csv)

    def _texts(self, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> Iterator[str]:
        import polars as pl

        zoned = [
            pl.col(f.name).dt.to_string("%Y-%m-%dT%H:%M:%S%.f%:z")
            for f in schema
            if pt.is_timestamp(f.type) and f.type.tz
        ]
        if self.header:
            empty = pl.DataFrame({name: [] for name in schema.names})
            yield empty.write_csv(separator=self.delimiter)
        for table in _groups(batches, schema, _TEXT_ROWS):
            if table.num_columns == 1 and table.column(0).null_count:
                raise DataError(
                    f"column {schema.names[0]!r} is null, and a CSV row of nothing but a null is an empty line, which "
                    "readers skip",
                    hint="Fill the nulls, write a second column, or use format='json'.",
                )
            frame = cast("pl.DataFrame", pl.from_arrow(table)).with_columns(zoned)
            yield frame.write_csv(include_header=False, separator=self.delimiter)


class _KeptOpen:
    """A file that Arrow does not close."""

    closed = False

    def __init__(self, file: BinaryIO) -> None:
        self.write, self.flush, self.tell = file.write, file.flush, file.tell

    def close(self) -> None:
        """Arrow asks for it; the owner makes the file durable first."""


PART_FORMATS: dict[str, Callable[..., PartFormat]] = {"parquet": ParquetParts, "json": JsonParts, "csv": CsvParts}
"""By the name that ``cw.files(format=...)`` takes, for reading and writing alike."""


def _groups(batches: Iterator[pa.RecordBatch], schema: pa.Schema, rows: int) -> Iterator[pa.Table]:
    """The batches in tables of at least this many rows."""
    group: list[pa.RecordBatch] = []
    for batch in batches:
        group.append(batch)
        if sum(b.num_rows for b in group) >= rows:
            yield pa.Table.from_batches(group, schema)
            group = []
    if group:
        yield pa.Table.from_batches(group, schema)


def _text_schema(schema: pa.Schema, what: str, refuse: Callable[[pa.DataType], str | None]) -> pa.Schema:
    """The plain types of the columns.

    Raises:
        BuildError: no columns, two of one name, or a type for which ``refuse`` says what to do instead.
    """
    if not schema.names:
        raise BuildError(f"rows without columns cannot be written as {what}")
    plain = plain_schema(schema)
    for field in plain:
        if plain.names.count(field.name) > 1:
            raise BuildError(f"two columns are named {field.name!r}", hint="Rename one of them.")
        hint = refuse(field.type)
        if hint is not None:
            raise BuildError(f"column {field.name!r} of type {field.type} cannot be written as {what}", hint=hint)
    return plain


def _no_json(kind: pa.DataType) -> str | None:
    if pt.is_duration(kind) or pt.is_interval(kind):
        return "Write it as int64, for example the number of microseconds."
    if pt.is_union(kind):
        return "Cast the column to the type it should have."
    if pt.is_map(kind) and not pt.is_string(kind.key_type):
        return "The names in a JSON object are strings: cast the keys, or write a list of structs."
    if pt.is_map(kind) and _has_binary(kind.item_type):
        return "Write the values as strings, for example in base64."
    return next((hint for part in _parts(kind) if (hint := _no_json(part)) is not None), None)


def _no_csv(kind: pa.DataType) -> str | None:
    if pt.is_nested(kind):
        return "Select its parts as columns of their own, or write format='json', which holds nested columns."
    if pt.is_binary(kind) or pt.is_fixed_size_binary(kind):
        return "Write it as text: with_columns('id', pl.col(...).bin.encode('base64')), or use format='json'."
    return _no_json(kind)


def _parts(kind: pa.DataType) -> list[pa.DataType]:
    return [kind.field(i).type for i in range(kind.num_fields)]


def _has_binary(kind: pa.DataType) -> bool:
    return pt.is_binary(kind) or pt.is_fixed_size_binary(kind) or any(_has_binary(part) for part in _parts(kind))


def _base64(column: pl.Expr, kind: pa.DataType) -> pl.Expr:
    """The column with all binary in it, at any depth, as text."""
    import polars as pl

    if pt.is_struct(kind):
        fields: list[Any] = [kind.field(i) for i in range(kind.num_fields)]
        made = pl.struct([_base64(column.struct.field(f.name), f.type).alias(f.name) for f in fields])
        return pl.when(column.is_null()).then(None).otherwise(made)
    if pt.is_list(kind):
        return column.list.eval(_base64(pl.element(), kind.value_type))
    return column.bin.encode("base64") if pt.is_binary(kind) or pt.is_fixed_size_binary(kind) else column
