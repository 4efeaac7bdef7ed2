"""What PySpark has and we need: its data source classes, its pickler, and what it makes of values and types.

PySpark is imported when something of it is needed, never with this module.  Versions differ (4.0 to 4.3): whatever is
not in all of them is looked up here.
"""

from __future__ import annotations

import base64
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from cutwater.data.rows import loses_value
from cutwater.data.schema_text import as_schema
from cutwater.errors import BuildError, DataError

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
    from pyspark.sql.types import StructType


def data_source_class() -> type[DataSource]:
    """The class that all Python data sources extend.

    Raises:
        BuildError: PySpark is missing, or older than 4.0.
    """
    try:
        from pyspark.sql.datasource import DataSource
    except ImportError as error:
        raise BuildError(
            f"Python data sources need PySpark 4.0 or later: {error}", hint="pip install 'cutwater[spark]'."
        ) from None
    return DataSource


def pickled(value: object) -> str:
    """An object of the user's, by Spark's own pickler, as text."""
    from pyspark import cloudpickle

    return base64.b64encode(cloudpickle.dumps(value)).decode()


def unpickled(text: str) -> Any:
    """The object back.  Only for text that came with the plan, or is sealed as the plan's job is."""
    from pyspark import cloudpickle

    return cloudpickle.loads(base64.b64decode(text))


def case_insensitive(options: Mapping[str, str]) -> Any:
    """Options as a data source gets them."""
    from pyspark.sql.datasource import CaseInsensitiveDict

    return CaseInsensitiveDict(options)


# --------------------------------------------------------------------------------------------------------------- types


def struct_type(schema: object) -> StructType:
    """A schema as Spark has it: of a ``StructType``, an Arrow schema, or text.

    Raises:
        BuildError: it is none.
    """
    from pyspark.sql.pandas.types import from_arrow_schema
    from pyspark.sql.types import StructType

    if isinstance(schema, StructType):
        return schema
    try:
        return from_arrow_schema(as_schema(schema), prefer_timestamp_ntz=True)  # type: ignore[arg-type]
    except BuildError:
        raise
    except Exception as error:
        raise BuildError(f"Spark has no such column: {_first_line(error)}", hint="Cast it before.") from error


def arrow_schema(struct: StructType) -> pa.Schema:
    """The same for Arrow; times in microseconds, instants in UTC.

    Raises:
        BuildError: Arrow has no such type.
    """
    from pyspark.sql.pandas.types import to_arrow_schema

    utc: dict[str, Any] = {"timezone": "UTC"} if "timezone" in inspect.signature(to_arrow_schema).parameters else {}
    try:
        found = to_arrow_schema(struct, **utc)
    except Exception as error:
        raise BuildError(f"a column cannot be read: {_first_line(error)}") from error
    return pa.schema([pa.field(f.name, f.type, f.nullable) for f in found])


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# -------------------------------------------------------------------------------------------------------------- values


def _conversion() -> Any:
    try:
        from pyspark.sql import conversion
    except ImportError:  # 4.0
        from pyspark.sql.connect import conversion
    return conversion


class RowsToColumns:
    """Makes a batch of a slice of tuples, lists, Rows or dicts of a schema, with the values that Spark makes of them.

    Args:
        struct: the schema, as the data source was told it.
    """

    def __init__(self, struct: StructType) -> None:
        from pyspark.sql.types import ArrayType, MapType, StructType, TimestampNTZType, TimestampType

        self.schema = arrow_schema(struct)
        self._names = self.schema.names
        create = _conversion().LocalDataToArrowConversion._create_converter
        self._converters: list[Callable[[Any], Any]] = [create(field.dataType) for field in struct.fields]
        # Arrow takes a time without a zone for one of UTC, Spark for one of the machine's zone.
        always = (ArrayType, MapType, StructType, TimestampNTZType, TimestampType)
        self._always = [isinstance(field.dataType, always) for field in struct.fields]

    def batch(self, rows: list[Any]) -> pa.RecordBatch:
        """The rows as columns.

        Raises:
            DataError: what was given is no row of the schema; names column and value.
        """
        self._check(rows)
        columns = zip(*rows, strict=True) if self._names else ()
        arrays = [self._column(n, list(values)) for n, values in enumerate(columns)]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def conforming(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """A batch that the user made, with the schema's columns in its order.

        Raises:
            DataError: it lacks one, has another, or one of a type that does not fit.
        """
        if batch.schema.equals(self.schema):
            return batch
        if sorted(batch.schema.names) != sorted(self._names):
            raise DataError(f"a batch has the columns {batch.schema.names}, the schema has {self._names}")
        arrays: list[pa.Array] = []
        for field in self.schema:
            column = batch.column(field.name)
            try:
                arrays.append(column if column.type == field.type else column.cast(field.type))
            except pa.ArrowException as error:
                raise DataError(f"column {field.name!r} is {column.type}, not {field.type}: {error}") from error
            self._check_nulls(field, column)
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _check(self, rows: list[Any]) -> None:
        """All have the schema's columns; those of Rows with names are put into its order."""
        from pyspark.sql.types import Row

        kinds = set(map(type, rows))
        if wrong := [kind for kind in kinds if not issubclass(kind, list | tuple)]:
            raise DataError(
                f"a {wrong[0].__name__} is no row",
                hint="Yield tuples, lists, pyspark.sql.Row or pyarrow.RecordBatch, and of batches nothing else.",
            )
        if lengths := set(map(len, rows)) - {len(self._names)}:
            raise DataError(f"a row has {min(lengths)} values, the schema has {len(self._names)} columns")
        if Row in kinds:
            for at, row in enumerate(rows):
                names = getattr(row, "__fields__", None)
                if names is None or names == self._names:
                    continue
                if sorted(names) != sorted(self._names):
                    raise DataError(f"a Row has the fields {names}, the schema has {self._names}")
                rows[at] = tuple(row[name] for name in self._names)

    def _column(self, n: int, values: list[Any]) -> pa.Array:
        field = self.schema.field(n)
        try:
            lost = loses_value(values, field.type)
            if lost is not None:
                raise DataError(f"column {field.name!r} is {field.type} and cannot hold {values[lost]!r:.100}")
            column = self._array(n, field.type, values)
        except DataError:
            raise
        except Exception as error:  # Spark's converters assert
            wrong = next((v for v in values if not self._fits(n, field.type, v)), None)
            raise DataError(
                f"column {field.name!r} is {field.type} and cannot hold {wrong!r:.100}: {_first_line(error)}"
            ) from error
        self._check_nulls(field, column)
        return column

    def _array(self, n: int, kind: pa.DataType, values: list[Any]) -> pa.Array:
        if not self._always[n]:
            try:
                return pa.array(values, kind)
            except (pa.ArrowException, TypeError, OverflowError):
                pass  # Spark takes a number for a text
        return pa.array(list(map(self._converters[n], values)), kind)

    def _fits(self, n: int, kind: pa.DataType, value: Any) -> bool:
        try:
            self._array(n, kind, [value])
        except Exception:
            return False
        return True

    @staticmethod
    def _check_nulls(field: pa.Field, column: pa.Array) -> None:
        if not field.nullable and column.null_count:
            raise DataError(f"column {field.name!r} is not null, and a row has no value in it")


class ColumnsToRows:
    """Makes Rows of batches of a schema, with the values that Spark would give a writer."""

    def __init__(self, struct: StructType) -> None:
        from pyspark.sql.types import ArrayType, MapType, Row, StructType, TimestampType

        create = _conversion().ArrowTableToRowsConversion._create_converter
        needed = (ArrayType, MapType, StructType, TimestampType)  # in Python what they are in Arrow: all others
        fields = struct.fields
        self._converters = [create(f.dataType) if isinstance(f.dataType, needed) else None for f in fields]
        self._row: Callable[..., Any] = Row(*struct.fieldNames())

    def rows(self, batch: pa.RecordBatch) -> Iterator[Any]:
        """One after the other."""
        columns = [
            column.to_pylist() if convert is None else list(map(convert, column.to_pylist()))
            for convert, column in zip(self._converters, batch.columns, strict=True)
        ]
        for values in zip(*columns, strict=True):
            yield self._row(*values)


# ------------------------------------------------------------------------------------------------------------- readers


def partitions_of(planned: object) -> list[InputPartition]:
    """What ``partitions`` gave, looked at.

    Raises:
        DataError: it is no list of partitions.
    """
    from pyspark.sql.datasource import InputPartition

    if not isinstance(planned, list | tuple):
        raise DataError(f"partitions() gives a {type(planned).__name__}, not a list")
    for partition in planned:
        if not isinstance(partition, InputPartition):
            raise DataError(f"partitions() gives a {type(partition).__name__}, not only InputPartition")
    return list(planned)


def batch_partitions(reader: Any) -> list[InputPartition]:
    """All partitions of a batch reader; one for a reader that knows of none, as Spark has it.

    Raises:
        DataError: as ``partitions_of``.
    """
    from pyspark.sql.datasource import InputPartition

    try:
        planned = reader.partitions()
    except NotImplementedError:
        planned = []
    return partitions_of(planned) or [InputPartition(None)]


def latest_offset(reader: DataSourceStreamReader, start: Any, *, everything: bool) -> Any:
    """The end of what there is to read now.  From 4.2 on a reader may be asked for less, from a start on.

    Args:
        everything: without the limit that the reader proposes.
    """
    asked: Any = reader.latestOffset
    if not inspect.signature(asked).parameters:
        return asked()
    from pyspark.sql.streaming.datasource import ReadAllAvailable

    return asked(start, ReadAllAvailable() if everything else reader.getDefaultReadLimit())


def prepare_to_end(reader: Any) -> bool:
    """Have a reader fix where it ends (Spark's trigger ``availableNow``); ``False``: it knows no such thing."""
    own = getattr(reader, "prepareForTriggerAvailableNow", None)
    if own is None:
        return False
    own()
    return True


def takes_batches(writer: object) -> bool:
    """True if a stream writer takes record batches (from 4.1 on), and not Rows."""
    from pyspark.sql import datasource

    kind = getattr(datasource, "DataSourceStreamArrowWriter", None)
    return kind is not None and isinstance(writer, kind)


def is_commit_message(message: object) -> bool:
    """True if it is what ``write`` has to return."""
    from pyspark.sql.datasource import WriterCommitMessage

    return isinstance(message, WriterCommitMessage)


def overridden(cls: type, *methods: str) -> bool:
    """True if a data source has one of these methods of its own."""
    base = data_source_class()
    return any(getattr(cls, method, None) is not getattr(base, method) for method in methods)


def batches(
    rows: Iterator[Any], to_columns: RowsToColumns, *, most: int, long_s: float, clock: Callable[[], float]
) -> Iterator[pa.RecordBatch]:
    """Batches of what a reader yields, which is all batches, or all rows.

    Rows come in slices that take about ``long_s``, so that neither many wait for a slow reader nor few are handed on
    at a time.

    Args:
        most: rows of a slice.
        clock: of seconds.
    """
    first = next(rows, None)
    if first is None:
        return
    rows = itertools.chain([first], rows)
    if isinstance(first, pa.RecordBatch):
        for batch in rows:
            if not isinstance(batch, pa.RecordBatch):
                raise DataError(f"a {type(batch).__name__} comes behind batches")
            if batch.num_rows:
                yield to_columns.conforming(batch)
        return
    size = _FIRST_ROWS
    while True:
        began_s = clock()
        part = list(itertools.islice(rows, size))
        if not part:
            return
        took_s = clock() - began_s
        if took_s < long_s / 2:
            size = min(most, 2 * size)
        elif took_s > 2 * long_s:
            size = max(1, size // 2)
        yield to_columns.batch(part)


_FIRST_ROWS = 16
