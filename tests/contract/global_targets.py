"""Sinks with one commit for all subtasks, in the driver, and how somebody else reads what they wrote."""

from __future__ import annotations

import json
import os
import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import StaticTable
from sink_targets import OwnTarget

import cutwater as cw
from cutwater.testing import SinkTarget
from cutwater.testing.sink_job import SCHEMA
from data_source_world import Files, visible
from iceberg_world import Warehouse


class DeltaLog(OwnTarget):
    """The rows of a table by what lies there: the log's entries one after the other, and the files that they name."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.directory = str(folder / "out")
        super().__init__(cw.delta(self.directory, **options).as_sink(), self.directory)
        self._files: dict[str, list[int]] = {}
        self._seen: list[str] = []
        self._active: list[str] = []

    def rows(self) -> list[int]:
        log = os.path.join(self.directory, "_delta_log")
        entries = sorted(name for name in os.listdir(log) if name.endswith(".json")) if os.path.isdir(log) else []
        if entries != self._seen:
            assert entries == [f"{version:020}.json" for version in range(len(entries))]
            self._seen, self._active = entries, sorted(self._replayed(log, entries))
        return [row for file in self._active for row in self._of(file)]

    def _replayed(self, log: str, entries: list[str]) -> set[str]:
        files: set[str] = set()
        for name in entries:
            for line in Path(log, name).read_bytes().splitlines():
                action = json.loads(line)
                if "add" in action:
                    files.add(unquote(action["add"]["path"]))
                if "remove" in action:
                    files.discard(unquote(action["remove"]["path"]))
        return files

    def _of(self, file: str) -> list[int]:
        path = os.path.join(self.directory, file)
        assert os.path.exists(path), f"the log names {file}, which is not there"
        if file not in self._files:
            self._files[file] = pq.ParquetFile(path).read(["row"])["row"].to_pylist()
        return self._files[file]


class IcebergTable(OwnTarget):
    """A table that others append to as well, at the worst moment: when a committer has looked at it, and not committed.

    A death or sleep is just before the catalog is asked, or when it has done what it was asked for.
    """

    OTHERS = -1000
    """Their rows, from here downwards."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.warehouse = Warehouse(folder)
        super().__init__(self.warehouse.named(**options).as_sink())
        self._random = random.Random(folder.name)
        self._others = 0
        self._catalog = str(folder / "catalog.db")
        self._files: dict[str, list[int]] = {}
        self._plans: dict[str, list[str]] = {}

    def watch(self, patch: pytest.MonkeyPatch, moment: Callable[[], None]) -> None:
        real, target, appending = SqlCatalog.commit_table, self, False

        def commit_table(catalog: Any, *arguments: Any) -> Any:
            nonlocal appending
            if appending:
                return real(catalog, *arguments)
            if target._random.random() < 0.3:
                appending = True
                target._append()
                appending = False
            moment()
            made = real(catalog, *arguments)
            moment()
            return made

        patch.setattr(SqlCatalog, "commit_table", commit_table)

    def _append(self) -> None:
        if self._metadata() is None:
            return
        row = self.OTHERS - self._others
        self.warehouse.table().append(pa.Table.from_pydict({"row": [row], "text": ["of others"]}, SCHEMA))
        self._others += 1

    def rows(self) -> list[int]:
        metadata = self._metadata()
        found = [] if metadata is None else [row for path in self._planned(metadata) for row in self._of(path)]
        others = sorted((row for row in found if row <= self.OTHERS), reverse=True)
        assert others == [self.OTHERS - n for n in range(self._others)], "rows that others have appended"
        return [row for row in found if row > self.OTHERS]

    def _metadata(self) -> str | None:
        """Where the catalog says that the table is."""
        if not os.path.exists(self._catalog):
            return None
        with closing(sqlite3.connect(self._catalog)) as catalog:
            try:
                found = catalog.execute("SELECT metadata_location FROM iceberg_tables").fetchone()
            except sqlite3.OperationalError:
                return None  # the job has not begun
        return None if found is None else found[0]

    def _planned(self, metadata: str) -> list[str]:
        if metadata not in self._plans:
            plan = StaticTable.from_metadata(metadata).scan().plan_files()
            self._plans[metadata] = [task.file.file_path.removeprefix("file://") for task in plan]
        return self._plans[metadata]

    def _of(self, path: str) -> list[int]:
        if path not in self._files:
            self._files[path] = pq.ParquetFile(path).read(["row"])["row"].to_pylist()
        return self._files[path]


class Written(SinkTarget):
    """A stream writer of a user's, which writes files, and gives them their names by a commit that can come again."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder, messages = folder / "written", folder / "messages"
        self.folder.mkdir()
        sink = cw.data_source(Files, options={"path": self.folder, **options}).as_sink()
        super().__init__(sink.bind(str(messages)))
        self._messages = messages

    def rows(self) -> list[int]:
        return [row["row"] for row in visible(self.folder)]

    def undo(self, checkpoint_id: int, rows: Any) -> None:
        for path in self.folder.iterdir():
            batch, dash, _ = path.name.partition("-")
            if dash and batch and int(batch) > checkpoint_id:
                path.unlink()

    def leftovers(self) -> list[str]:
        return [path.name for path in self._messages.rglob("*")]


MAKE: dict[str, Callable[[Path], SinkTarget]] = {
    "delta, a file per checkpoint": lambda folder: DeltaLog(folder, roll_interval_ms=0),
    "delta, rolled by size": lambda folder: DeltaLog(folder, roll_rows=12, roll_interval_ms="1h"),
    "delta, partitioned": lambda folder: DeltaLog(folder, roll_rows=12, roll_interval_ms="1h", partition_by="text"),
    "iceberg": IcebergTable,
    "iceberg, partitioned": lambda folder: IcebergTable(folder, partition_by=["row"]),
    "a stream writer of rows": Written,
    "a stream writer of batches": lambda folder: Written(folder, arrow=True),
}
