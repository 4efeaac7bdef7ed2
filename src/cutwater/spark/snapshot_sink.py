"""``df.write.format("cutwater")``: another snapshot with one state replaced by the rows of a DataFrame.

Partitions go into files beside the target, and the driver makes the savepoint of them; nothing is left beside it then.
Options as for reading; ``base`` is the snapshot of which everything else is kept.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from cutwater.errors import ConfigError
from cutwater.spark.snapshot_options import state_name
from cutwater.state_reader.writer import write_savepoint


@dataclass
class _Written(WriterCommitMessage):
    """The file of one partition; none if it had no rows."""

    file: str | None


class SnapshotSinkWriter(DataSourceArrowWriter):
    """Collects the partitions' rows in files, and writes the savepoint when all are there.

    Args:
        options: ``path``, ``base``, ``step``, ``state``.
        overwrite: refused: a savepoint is never replaced.

    Raises:
        ConfigError: an option is missing, or ``mode("overwrite")``.
    """

    def __init__(self, options: Mapping[str, str], *, overwrite: bool) -> None:
        if overwrite:
            raise ConfigError("a savepoint is never replaced", hint='Write mode("append") to a folder that is new.')
        for name in ("path", "base"):
            if not options.get(name):
                raise ConfigError(
                    f"option {name!r} is missing",
                    hint='Write .option("base", "DIR/JOB@7").option("state", "STEP").mode("append").save("savepoint"); '
                    "for a dataflow that has not run yet there is cw.write_savepoint(..., flow=flow).",
                )
        self._path, self._base = Path(options["path"]).absolute(), options["base"]
        self._state = state_name(options)
        self._parts = self._path.with_name(f".{self._path.name}.{uuid.uuid4().hex}")

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        first = next(iterator, None)
        if first is None:
            return _Written(None)
        self._parts.mkdir(parents=True, exist_ok=True)
        file = self._parts / f"{uuid.uuid4().hex}.arrow"
        with pa.OSFile(str(file), "wb") as out, pa.ipc.new_stream(out, first.schema) as stream:
            stream.write_batch(first)
            for batch in iterator:
                stream.write_batch(batch)
        return _Written(str(file))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        tables: list[pa.Table] = []
        for message in messages:
            if isinstance(message, _Written) and message.file is not None:
                with pa.memory_map(message.file) as source:
                    tables.append(pa.ipc.open_stream(source).read_all())
        try:
            table = pa.concat_tables(tables) if tables else pa.table({})
            write_savepoint(self._path, {self._state: table}, base=self._base)
        finally:
            shutil.rmtree(self._parts, ignore_errors=True)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        shutil.rmtree(self._parts, ignore_errors=True)
