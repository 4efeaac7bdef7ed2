"""An Iceberg catalog in a folder, and what other programs find in its tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog import load_catalog

import cutwater as cw
from cutwater.connectors.iceberg.iceberg import Iceberg

ROWS = pa.schema({"n": pa.int64(), "text": pa.string()})


def rows_of(numbers: Iterable[int], schema: pa.Schema = ROWS) -> pa.RecordBatch:
    numbers = list(numbers)
    return pa.RecordBatch.from_pydict({"n": numbers, "text": [f"t{n}" for n in numbers]}, schema)


@dataclass
class Warehouse:
    """A SQLite catalog whose tables lie beside it; what it reads does not go through the engine."""

    folder: Path
    _read: dict[str, list[int]] = field(default_factory=dict[str, list[int]])

    @property
    def properties(self) -> dict[str, str]:
        return {"type": "sql", "uri": f"sqlite:///{self.folder}/catalog.db", "warehouse": f"file://{self.folder}/data"}

    @property
    def catalog(self) -> Any:
        """A client of its own."""
        return load_catalog("default", **self.properties)

    def table(self, name: str = "db.t") -> Any:
        return self.catalog.load_table(name)

    def named(self, name: str = "db.t", **options: Any) -> Iceberg:
        return cw.iceberg(name, catalog=self.properties, **options)

    def make(self, name: str = "db.t", schema: pa.Schema = ROWS, **options: Any) -> Any:
        self.catalog.create_namespace_if_not_exists(name.split(".", maxsplit=1)[0])
        return self.catalog.create_table(name, schema, **options)

    def made_v3(self, name: str = "db.v3") -> None:
        """A table of format version 3, which the library does not make: another one's metadata, rewritten."""
        old = self.make("db.old").metadata_location.removeprefix("file://")
        metadata = json.loads(Path(old).read_text()) | {"format-version": 3, "next-row-id": 0}
        new = Path(old).with_name("00009-v3.metadata.json")
        new.write_text(json.dumps(metadata))
        self.catalog.register_table(name, f"file://{new}")

    def append(self, numbers: Iterable[int], name: str = "db.t") -> None:
        """By another program."""
        self.table(name).append(pa.Table.from_batches([rows_of(numbers)]))

    def files(self, name: str = "db.t") -> list[str]:
        """Paths of the current snapshot's data files."""
        return [task.file.file_path.removeprefix("file://") for task in self.table(name).scan().plan_files()]

    def numbers(self, name: str = "db.t") -> list[int]:
        """Column ``n`` of all files that the library plans to read, sorted."""
        found: list[int] = []
        for path in self.files(name):
            if path not in self._read:
                self._read[path] = pq.ParquetFile(path).read(["n"])["n"].to_pylist()
            found += self._read[path]
        return sorted(found)

    def by_duckdb(self, sql: str, name: str = "db.t") -> list[Any]:
        """Rows of a query over ``files``, which DuckDB reads."""
        files = self.files(name)
        assert files
        return duckdb.sql(
            sql.replace("files", f"read_parquet({files!r}, hive_partitioning = false, union_by_name = true)")
        ).fetchall()


@pytest.fixture
def warehouse(tmp_path: Path) -> Warehouse:
    return Warehouse(tmp_path)


@pytest.fixture
def before_commits(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """``before_commits(act)``: do that before the next commit of this process reaches the catalog."""
    from pyiceberg.catalog.sql import SqlCatalog

    waiting: list[Callable[[], None]] = []
    real = SqlCatalog.commit_table

    def commit_table(self: Any, *arguments: Any) -> Any:
        while waiting:
            waiting.pop()()
        return real(self, *arguments)

    monkeypatch.setattr(SqlCatalog, "commit_table", commit_table)
    return waiting.append
