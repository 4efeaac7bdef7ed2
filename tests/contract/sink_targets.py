"""Our sinks, and how somebody else reads what they wrote."""

from __future__ import annotations

import csv
import gzip
import json
import os
import sqlite3
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cutwater.connectors.base import Sink
from cutwater.connectors.foreach_batch import ForeachBatchSink
from cutwater.connectors.table_sink import TableSink
from cutwater.testing import SinkTarget


def rows_of_file(path: str) -> list[int]:
    """The column ``row``; each format is read by a library that did not write it."""
    if path.endswith(".parquet"):
        return pq.ParquetFile(path).read()["row"].to_pylist()
    with gzip.open(path, "rt") if path.endswith(".gz") else open(path) as lines:
        if ".csv" in path:
            return [int(row["row"]) for row in csv.DictReader(lines)]
        return [json.loads(line)["row"] for line in lines]


class OwnTarget(SinkTarget):
    """Ours die before system calls and where ``watch`` says: that finds more than lines do, in less time."""

    module = ""

    def process(self) -> Sink:
        """One for all: they keep nothing of what they write (and the function of ``foreach_batch`` keeps it here)."""
        return self.sink

    def leftovers(self) -> list[str]:
        folder = os.path.join(self.files or "", "_cutwater")
        return [folder] if os.path.exists(folder) else []


class Files(OwnTarget):
    """What a reader of a directory sees."""

    def __init__(self, sink: Sink, files: str) -> None:
        super().__init__(sink, files)
        self._output = Output(files)

    def rows(self) -> list[int]:
        return self._output.rows()


class Output:
    """What a reader of the target sees."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._cache: dict[tuple[str, int, int], list[int]] = {}

    def rows(self) -> list[int]:
        rows: list[int] = []
        names = os.listdir(self.directory) if os.path.isdir(self.directory) else []
        for name in names:
            if not name.startswith(("_", ".")):
                path = os.path.join(self.directory, name)
                stat = os.stat(path)
                key = (name, stat.st_ino, stat.st_size)
                if key not in self._cache:
                    try:
                        self._cache[key] = rows_of_file(path)
                    except (pa.ArrowInvalid, ValueError, EOFError) as error:
                        raise AssertionError(f"a reader found {path}: {error}") from error
                rows += self._cache[key]
        return rows


class Calls:
    """What an idempotent function of foreach_batch keeps, in memory that outlives the job."""

    def __init__(self) -> None:
        self.batches: dict[tuple[int, ...], list[int]] = {}
        self.moment: Callable[[], None] = lambda: None

    def __call__(self, table: pa.Table, *key: int) -> None:
        self.moment()
        rows = table["row"].to_pylist()
        assert self.batches.setdefault(key, rows) == rows, f"other rows for {key} than at the first call"

    def rows(self) -> list[int]:
        return [row for rows in self.batches.values() for row in rows]


class Batches(OwnTarget):
    """What a function of ``foreach_batch`` was called with.  It does what the guide asks of it at a restore."""

    def rows(self) -> list[int]:
        return self._calls.rows()

    def watch(self, patch: pytest.MonkeyPatch, moment: Callable[[], None]) -> None:
        self._calls.moment = moment

    def undo(self, checkpoint_id: int, rows: Sequence[int]) -> None:
        batches = self._calls.batches
        self._calls.batches = {key: found for key, found in batches.items() if key[0] <= checkpoint_id}

    @property
    def _calls(self) -> Calls:
        assert isinstance(self.sink, ForeachBatchSink)
        return self.sink.fn  # type: ignore[return-value]


class Table(OwnTarget):
    """What a reader of the table sees.  The database lies beside the directory: it answers for its own durability."""

    locks = True

    def __init__(self, sink: TableSink, files: str) -> None:
        super().__init__(sink, files)
        self._name, self._upserts = sink.name, sink.mode == "upsert"
        self._path = getattr(sink.database, "path", "")
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        self._reader: sqlite3.Connection | None = None
        self._connect = sqlite3.connect

    def watch(self, patch: pytest.MonkeyPatch, moment: Callable[[], None]) -> None:
        real = self._connect

        class Cursor(sqlite3.Cursor):
            def executemany(self, *arguments: Any) -> Any:
                moment()
                return super().executemany(*arguments)

        class Watched(sqlite3.Connection):
            def __init__(self, *arguments: Any, **options: Any) -> None:
                super().__init__(*arguments, **options)
                super().execute("PRAGMA synchronous=OFF")  # the disk of the model is not the database's

            def execute(self, *arguments: Any) -> Any:
                moment()
                return super().execute(*arguments)

            def cursor(self, *arguments: Any) -> Any:
                return super().cursor(Cursor)

        patch.setattr(sqlite3, "connect", lambda *args, **kwargs: real(*args, factory=Watched, **kwargs))

    def rows(self) -> list[int]:
        if not os.path.exists(self._path):
            return []
        return [row for (row,) in self._execute(f'SELECT row FROM "{self._name}"')]

    def undo(self, checkpoint_id: int, rows: Sequence[int]) -> None:
        """An upsert cannot be undone: rows to come would overwrite these."""
        if self._upserts:
            for row in set(self.rows()) - set(rows):
                self._execute(f'DELETE FROM "{self._name}" WHERE row = {row}')

    def _execute(self, sql: str) -> list[Any]:
        if self._reader is None:
            self._reader = self._connect(self._path, isolation_level=None)
            self._reader.execute("PRAGMA synchronous=OFF")
        try:
            return self._reader.execute(sql).fetchall()
        except sqlite3.OperationalError as error:
            if "no such table" in str(error):
                return []
            raise


def target_of(sink: Sink, directory: str) -> SinkTarget:
    """A sink of ours with its reader."""
    if isinstance(sink, ForeachBatchSink):
        return Batches(sink, directory)
    return Table(sink, directory) if isinstance(sink, TableSink) else Files(sink, directory)
