"""The formats of a file sink: which types, settings and names they have, and what encodes their rows.

Everything else about a file, when it is cut, named, committed and taken back, does not depend on its format.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, BinaryIO, ClassVar, Literal, NamedTuple, Protocol, TypeAlias, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt
import xxhash

from cutwater.connectors.files.parquet_row_groups import MAGIC, Footer, placed
from cutwater.connectors.files.schemas import parquet_schema, plain_schema
from cutwater.errors import BuildError, ConfigError, DataError

if TYPE_CHECKING:
    import polars as pl

Bytes: TypeAlias = pa.Buffer | bytes | memoryview

_TEXT_BYTES = 4 << 20
"""Arrow data that becomes text at once: smaller pieces cost more calls, larger ones leave the processor's cache."""
_ROW_GROUP_BYTES = 64 << 20
"""Arrow data that waits for its row group at most: memory that a writer needs."""
_GZIP_LEVEL = 6
"""Arrow's own choice, 9, takes three times as long for a fiftieth fewer bytes."""
_LEVELS = {"zstd": range(1, 23), "gzip": range(1, 10)}
_SUFFIXES = {None: "", "gzip": ".gz", "zstd": ".zst"}


class Blocks(NamedTuple):
    """How many rows are encoded at once."""

    rows: int
    bytes: int
    """Of Arrow data: a block of wide rows has fewer."""
    rest_waits: bool = False
    """Rows too few for a block are worth waiting for more of them: small blocks make the file larger or slower."""

    def of(self, batches: Iterable[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
        """The batches in blocks of at least this many rows, or bytes."""
        block: list[pa.RecordBatch] = []
        rows = size = 0
        for batch in batches:
            block.append(batch)
            rows, size = rows + batch.num_rows, size + batch.nbytes
            if rows >= self.rows or size >= self.bytes:
                yield block
                block, rows, size = [], 0, 0
        if block:
            yield block


_TEXT_BLOCKS = Blocks(rows=1 << 16, bytes=_TEXT_BYTES)
"""What is turned into text at once: memory again, and how long the loop is busy with it."""


class PartEncoder(Protocol):
    """Makes the bytes of one file.  Whatever it gives is appended to the file before it is asked for more."""

    def begin(self) -> Bytes:
        """What a file begins with."""
        ...

    def rows(self, batches: Sequence[pa.RecordBatch]) -> Iterator[Bytes]:
        """A block of rows, in pieces.

        Raises:
            DataError: a value that the format cannot hold; the file is of no use any more.
        """
        ...

    def end(self) -> Bytes:
        """What makes a whole file of all bytes so far; more rows may follow it."""
        ...

    def taken_over(self, file: pa.Buffer) -> Bytes:
        """The rows of another file of the same form (``PartFormat.form``), whole as it is.

        Raises:
            CorruptSnapshotError: it is no such file.
        """
        ...


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

    @property
    def blocks(self) -> Blocks:
        """How many rows are encoded at once."""
        ...

    def encoder(self, schema: pa.Schema) -> PartEncoder:
        """What makes a file of rows with these types."""
        ...

    def form(self, schema: pa.Schema) -> str:
        """A text that two files have in common exactly if rows of both can lie in one file."""
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
        compression: ``"zstd"``, ``"snappy"``, ``"gzip"``, ``"lz4"`` or ``"none"``.
        compression_level: of zstd (1 to 22) and gzip (1 to 9); None for 1 and 6.
        row_group_rows: rows of a row group; the last of a file has fewer, and those of wide rows, which would need too
            much memory.

    Raises:
        ConfigError: another compression, a level that it does not have, no rows.

    >>> ParquetParts("gzip", compression_level=9).compression_level
    9
    """

    compression: Literal["zstd", "snappy", "gzip", "lz4", "none"] = "zstd"
    compression_level: int | None = None
    row_group_rows: int = 1 << 20

    def __post_init__(self) -> None:
        _check_compression(self.compression, self.compression_level, ("zstd", "snappy", "gzip", "lz4", "none"))
        if self.row_group_rows < 1:
            raise ConfigError(f"row_group_rows must be at least 1, got {self.row_group_rows}")

    @property
    def suffix(self) -> str:
        return ".parquet"

    @property
    def blocks(self) -> Blocks:
        return Blocks(self.row_group_rows, _ROW_GROUP_BYTES, rest_waits=True)

    def schema(self, schema: pa.Schema) -> pa.Schema:
        return parquet_schema(schema)

    def encoder(self, schema: pa.Schema) -> PartEncoder:
        level = _GZIP_LEVEL if self.compression == "gzip" and self.compression_level is None else self.compression_level
        return ParquetEncoder(schema, self.compression, level, self.row_group_rows)

    def form(self, schema: pa.Schema) -> str:
        return _form("parquet", schema)

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
    """Base of JSON lines and CSV: blocks of text, each compressed by itself where a compression is asked for."""

    compression: Literal["gzip", "zstd", "none"] | None = None
    compression_level: int | None = None

    extension: ClassVar[str]

    def __post_init__(self) -> None:
        if self.compression == "none":
            object.__setattr__(self, "compression", None)
        _check_compression(self.compression or "none", self.compression_level, ("gzip", "zstd", "none"))

    @property
    def suffix(self) -> str:
        return self.extension + _SUFFIXES[self.compression]

    @property
    def blocks(self) -> Blocks:
        return _TEXT_BLOCKS

    def encoder(self, schema: pa.Schema) -> PartEncoder:
        codec: pa.Codec | None = None
        if self.compression:
            level = _GZIP_LEVEL if self.compression == "gzip" else None
            codec = pa.Codec(self.compression, compression_level=self.compression_level or level)
        return TextEncoder(schema, self.head(schema), self.text, codec)

    def form(self, schema: pa.Schema) -> str:
        return _form(f"{self.suffix} {bytes(self.encoder(schema).begin())!r}", schema)

    @abstractmethod
    def head(self, schema: pa.Schema) -> bytes:
        """What a file begins with."""

    @abstractmethod
    def text(self, schema: pa.Schema, rows: pa.Table) -> list[bytes]:
        """Rows as text, in pieces.

        Raises:
            DataError: a value that the format cannot hold.
        """

    def holds(self, file: BinaryIO, rows: int) -> bool:
        """The size says enough: a text has no number of rows."""
        return True

    def neighbour_schema(self, path: str) -> pa.Schema | None:
        """Texts name no types."""
        return None


@dataclass(frozen=True)
class JsonParts(_TextParts):
    """JSON lines: one object per row and line, in UTF-8; nested columns are arrays and objects.

    JSON knows numbers, strings, booleans and null.  So timestamps, dates, times and decimals become strings
    (``"2024-05-01 12:00:00.500"``), binary becomes base64 as Spark writes it, NaN and the infinities become null.

    Args:
        compression: ``"gzip"`` or ``"zstd"``; ``"none"`` or ``None`` for plain text.
        compression_level: of gzip (1 to 9) and zstd (1 to 22); None for 6 and 1.

    Raises:
        ConfigError: another compression, or a level that it does not have.

    >>> JsonParts("gzip").suffix
    '.jsonl.gz'
    """

    extension: ClassVar[str] = ".jsonl"

    def schema(self, schema: pa.Schema) -> pa.Schema:
        return _text_schema(schema, "JSON lines", _no_json)

    def head(self, schema: pa.Schema) -> bytes:
        return b""

    def text(self, schema: pa.Schema, rows: pa.Table) -> list[bytes]:
        import polars as pl

        from cutwater.connectors.text.time_texts import TimeTexts

        frame = cast("pl.DataFrame", pl.from_arrow(TimeTexts(" ", shorter=True).of_rows(rows)))
        coded = [_base64(pl.col(f.name), f.type).alias(f.name) for f in schema if _has_binary(f.type)]
        into = _Pieces()
        (frame.with_columns(coded) if coded else frame).write_ndjson(cast("IO[bytes]", into))
        return into.pieces


@dataclass(frozen=True)
class CsvParts(_TextParts):
    """CSV in UTF-8: fields are quoted where needed, an empty field is null, ``""`` is the empty string.

    Args:
        compression: ``"gzip"`` or ``"zstd"``; ``"none"`` or ``None`` for plain text.
        compression_level: of gzip (1 to 9) and zstd (1 to 22); None for 6 and 1.
        header: begin each file with the names of the columns.
        delimiter: one character between fields.

    Raises:
        ConfigError: another compression, a level that it does not have, or a delimiter that is not one character.

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

    def form(self, schema: pa.Schema) -> str:
        return _form(f"{super().form(schema)} {self.delimiter!r}", schema)

    def head(self, schema: pa.Schema) -> bytes:
        import polars as pl

        if not self.header:
            return b""
        return pl.DataFrame({name: [] for name in schema.names}).write_csv(separator=self.delimiter).encode()

    def text(self, schema: pa.Schema, rows: pa.Table) -> list[bytes]:
        import polars as pl

        from cutwater.connectors.text.time_texts import TimeTexts

        if rows.num_columns == 1 and rows.column(0).null_count:
            raise DataError(
                f"column {schema.names[0]!r} is null, and a CSV row of nothing but a null is an empty line, which "
                "readers skip",
                hint="Fill the nulls, write a second column, or use format='json'.",
            )
        frame = cast("pl.DataFrame", pl.from_arrow(TimeTexts("T", shorter=False).of_rows(rows)))
        zoned = [
            pl.col(name).dt.to_string("%Y-%m-%dT%H:%M:%S%.f%:z")
            for name, kind in frame.schema.items()
            if isinstance(kind, pl.Datetime) and kind.time_zone
        ]
        into = _Pieces()
        (frame.with_columns(zoned) if zoned else frame).write_csv(
            cast("IO[bytes]", into), include_header=False, separator=self.delimiter
        )
        return into.pieces


class _Pieces:
    """A file that Polars writes to: keeps what it is given as it is.  ``BytesIO`` would copy it as it grows."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def write(self, text: bytes) -> int:
        self.pieces.append(text)
        return len(text)

    def flush(self) -> None:
        """Nothing waits."""


PART_FORMATS: dict[str, Callable[..., PartFormat]] = {"parquet": ParquetParts, "json": JsonParts, "csv": CsvParts}
"""By the name that ``cw.files(format=...)`` takes, for reading and writing alike."""


def _check_compression(compression: str, level: int | None, allowed: Sequence[str]) -> None:
    if compression not in allowed:
        names = f"{', '.join(map(repr, allowed[:-1]))} or {allowed[-1]!r}"
        raise ConfigError(f"compression {compression!r} is unknown", hint=f"Use {names}.")
    levels = _LEVELS.get(compression)
    if level is None or (levels is not None and level in levels):
        return
    told = ", ".join(f"{name!r} {of[0]} to {of[-1]}" for name, of in _LEVELS.items())
    raise ConfigError(f"compression {compression!r} has no level {level}", hint=f"Levels: {told}.")


def _form(words: str, schema: pa.Schema) -> str:
    text = f"{words}\n{schema.remove_metadata().to_string()}"
    return xxhash.xxh3_64_hexdigest(text.encode())


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
    if pt.is_list_view(kind) or pt.is_large_list_view(kind):
        return "Cast the column to a list."
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


class TextEncoder:
    """Lines of text.  Compressed files are several compressed texts in a row, which all readers take for one.

    Args:
        schema: of the rows.
        head: what a file begins with.
        text: rows as lines.
        codec: compresses each block.
    """

    def __init__(
        self,
        schema: pa.Schema,
        head: bytes,
        text: Callable[[pa.Schema, pa.Table], list[bytes]],
        codec: pa.Codec | None,
    ) -> None:
        self._schema, self._text, self._codec = schema, text, codec
        self._head = self._compressed(head) if head else b""

    def begin(self) -> Bytes:
        return self._head

    def rows(self, batches: Sequence[pa.RecordBatch]) -> Iterator[Bytes]:
        table = pa.Table.from_batches(batches, self._schema)
        rows = max(1, table.num_rows * _TEXT_BYTES // max(table.nbytes, 1))
        for first in range(0, table.num_rows, rows):
            text = self._text(self._schema, table.slice(first, rows))
            if self._codec is None:
                yield from text
            else:
                yield self._compressed(b"".join(text))

    def end(self) -> Bytes:
        return b""

    def taken_over(self, file: pa.Buffer) -> Bytes:
        return file[len(self._head) :]

    def _compressed(self, text: bytes) -> bytes:
        # Not as a buffer: Arrow's tell their views the length from before they were shortened.
        return text if self._codec is None else self._codec.compress(text, asbytes=True)


class ParquetEncoder:
    """A row group for each block, and behind them a footer, which is dead once more row groups and another one follow.

    Args:
        schema: of the rows.
        compression, level: as ``pyarrow.parquet.ParquetWriter`` takes them.
        row_group_rows: what is longer becomes several row groups.
    """

    def __init__(self, schema: pa.Schema, compression: str, level: int | None, row_group_rows: int) -> None:
        self._schema, self._row_group_rows = schema, row_group_rows
        self._compression, self._level = compression, level
        self._footer = Footer(self._file([]))
        self._row_groups: list[bytes] = []
        self._rows = 0
        self._length = 0

    def begin(self) -> Bytes:
        return self._given(MAGIC)

    def rows(self, batches: Sequence[pa.RecordBatch]) -> Iterator[Bytes]:
        try:
            file = self._file(batches)
        except pa.ArrowInvalid as error:
            raise DataError(f"rows cannot be written as Parquet: {error}") from error
        yield self.taken_over(file)

    def end(self) -> Bytes:
        return self._given(self._footer.end_of_file(self._row_groups, self._rows))

    def taken_over(self, file: pa.Buffer) -> Bytes:
        footer = Footer(file)
        moved_by = self._length - len(MAGIC)
        for group in footer.row_groups:
            self._row_groups.append(placed(group, moved_by, len(self._row_groups)))
            self._rows += group.rows
        return self._given(file[len(MAGIC) : footer.data_end])

    def _given(self, body: Bytes) -> Bytes:
        self._length += memoryview(body).nbytes
        return body

    def _file(self, batches: Sequence[pa.RecordBatch]) -> pa.Buffer:
        into = pa.BufferOutputStream()
        with pq.ParquetWriter(
            into, self._schema, compression=self._compression, compression_level=self._level
        ) as writer:
            if batches:
                table = pa.Table.from_batches(batches, self._schema)
                writer.write_table(table, row_group_size=self._row_group_rows)
        return into.getvalue()
