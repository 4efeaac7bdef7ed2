"""Snapshots as DataFrames: ``spark.read.format("cutwater")``, on PySpark's Python Data Source API.

| option         |                                                                                               |
|----------------|-----------------------------------------------------------------------------------------------|
| ``path``       | the snapshot: ``DIR/JOB``, ``DIR/JOB@7``, ``DIR/JOB/chk-7``, or a savepoint                    |
| ``checkpoint`` | number of a retained checkpoint of ``DIR/JOB``                                                |
| ``state``      | which table: ``STEP`` or ``STEP.STATE``                                                       |
| ``step``       | the step, if ``state`` names a state within it                                                |
| ``columns``    | only these, separated by commas (Spark tells a Python source of filters, not of columns)      |
| ``raw``        | "true": what is stored, of a mean its sum and count                                           |
| ``keyFile``    | file with the key of a sealed snapshot, if the environment of driver and executors names none |

A partition is a range of key groups.  Filters on ``key_group``, and on the whole key, leave partitions out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from cutwater.errors import ConfigError
from cutwater.spark.snapshot_options import state_name

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceWriter, Filter

    from cutwater.state_reader.reader import Snapshot

_SIGNED = {pa.uint8(): pa.int16(), pa.uint16(): pa.int32(), pa.uint32(): pa.int64(), pa.uint64(): pa.decimal128(20)}
_OPTIONS = ("path", "snapshot", "checkpoint", "state", "step", "columns", "raw", "base", "keyFile")


class SnapshotSource(DataSource):
    """``spark.read.format("cutwater").option("state", "counts").load("checkpoints/job@7")``."""

    @classmethod
    def name(cls) -> str:
        return "cutwater"

    def schema(self) -> StructType:
        """Columns of the table, known from the snapshot alone.

        Raises:
            ConfigError: no such snapshot or state; the hint lists what there is.
        """
        from pyspark.sql.pandas.types import from_arrow_schema

        return from_arrow_schema(_shown(_open(self.options), self.options))

    def reader(self, schema: StructType) -> SnapshotReader:
        return SnapshotReader(self.options)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from cutwater.spark.snapshot_sink import SnapshotSinkWriter

        return SnapshotSinkWriter(self.options, overwrite=overwrite)


class SnapshotReader(DataSourceReader):
    """Reads one table, a range of key groups for each partition.

    Args:
        options: see the module.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = dict(options)
        snapshot = _open(options)
        self._schema = _shown(snapshot, options)
        self._options["path"] = snapshot.address  # of "the newest one", the one that it is now
        self._options.pop("checkpoint", None)
        self._groups = range(snapshot.max_parallelism)

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Which key groups can hold rows that pass.  Spark still filters them all: a group holds many keys."""
        equal: dict[str, Any] = {}
        first, last = self._groups.start, self._groups.stop
        for each in filters:
            kind, column, value = type(each).__name__, getattr(each, "attribute", ()), getattr(each, "value", None)
            if len(column) != 1:
                continue
            if kind == "EqualTo":
                equal[column[0]] = value
            if column[0] == "key_group" and "key_group" in self._schema.names and isinstance(value, int):
                low, high = _bounds(kind, value)
                first, last = max(first, low), min(last, high)
        self._groups = range(first, max(first, last))
        snapshot, name = _open(self._options), state_name(self._options)
        keys = snapshot.state(name).partitioning
        if keys and all(key in equal for key in keys):
            with contextlib.suppress(ConfigError):  # compared with something that is no key
                group = snapshot.key_group(name, {key: equal[key] for key in keys})
                self._groups = range(group, group + 1) if group in self._groups else range(0)
        return filters

    def partitions(self) -> Sequence[InputPartition]:
        snapshot, name = _open(self._options), state_name(self._options)
        if "key_group" not in snapshot.state(name).schema.names:
            return [InputPartition(None)]
        from cutwater.state_reader.reader import chunks

        return [InputPartition((part.start, part.stop)) for part in chunks(snapshot.entries(name), self._groups)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        snapshot = _open(self._options)
        groups = None if partition.value is None else range(*partition.value)
        for batch in snapshot.batches(
            state_name(self._options), columns=_columns(self._options), groups=groups, raw=_is_raw(self._options)
        ):
            columns = [_cast(c, field.type) for c, field in zip(batch.columns, self._schema, strict=True)]
            yield pa.RecordBatch.from_arrays(columns, schema=self._schema)


def _open(options: Mapping[str, str]) -> Snapshot:
    unknown = [name for name in options if name not in _OPTIONS]
    if unknown:
        raise ConfigError(f"unknown option {unknown[0]!r}", hint=f"Options are: {', '.join(_OPTIONS)}.")
    path = options.get("path") or options.get("snapshot")
    if not path:
        raise ConfigError("no snapshot is named", hint='Write .load("DIR/JOB@7").')
    checkpoint = options.get("checkpoint")
    from cutwater.state_reader.reader import Snapshot  # kernels, which none of Spark's looks for its sources needs

    return Snapshot(f"{path}@{checkpoint}" if checkpoint else path, key_file=_key_file(options))


def _key_file(options: Mapping[str, str]) -> str | None:
    return next((value for name, value in options.items() if name.lower() == "keyfile"), None)


def _shown(snapshot: Snapshot, options: Mapping[str, str]) -> pa.Schema:
    shown = snapshot.table(state_name(options), columns=_columns(options), groups=range(0), raw=_is_raw(options)).schema
    return pa.schema([field.with_type(spark_arrow_type(field.type)) for field in shown])


def _columns(options: Mapping[str, str]) -> list[str] | None:
    columns = options.get("columns")
    return [name.strip() for name in columns.split(",")] if columns else None


def _is_raw(options: Mapping[str, str]) -> bool:
    return options.get("raw", "false").lower() == "true"


def _bounds(kind: str, value: int) -> tuple[int, int]:
    """The half-open range of whole numbers that a comparison lets pass."""
    ends = {
        "EqualTo": (value, value + 1),
        "GreaterThan": (value + 1, 1 << 30),
        "GreaterThanOrEqual": (value, 1 << 30),
        "LessThan": (0, value),
        "LessThanOrEqual": (0, value + 1),
    }
    return ends.get(kind, (0, 1 << 30))


def spark_arrow_type(kind: pa.DataType) -> pa.DataType:
    """The type as Spark has it: no unsigned numbers, times in microseconds.

    >>> spark_arrow_type(pa.uint16()), spark_arrow_type(pa.list_(pa.timestamp("ms", "UTC")))
    (DataType(int32), ListType(list<item: timestamp[us, tz=UTC]>))
    """
    t = pa.types
    if t.is_timestamp(kind):
        return pa.timestamp("us", None if kind.tz is None else "UTC")
    if t.is_float16(kind):
        return pa.float32()
    if t.is_date64(kind):
        return pa.date32()
    if t.is_map(kind):
        return pa.map_(spark_arrow_type(kind.key_type), spark_arrow_type(kind.item_type))
    if t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(spark_arrow_type(kind.value_type)))
    if t.is_struct(kind):
        fields = [kind.field(number) for number in range(kind.num_fields)]
        return pa.struct([field.with_type(spark_arrow_type(field.type)) for field in fields])
    return _SIGNED.get(kind, kind)


def _cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    return column if column.type == kind else column.cast(kind)
