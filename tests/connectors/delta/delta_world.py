"""A job of one write step on a Delta table, and what another reader sees there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deltalake
import duckdb
import pyarrow as pa

from cutwater.connectors.base import Committer, Json, Sink, SinkSnapshot

SCHEMA = pa.schema({"row": pa.int64(), "t": pa.string()})


class Identity:
    """One subtask of the step."""

    job_uid, step, parallelism = "c0ffee", "out", 2

    def __init__(self, subtask: int, incarnation: int) -> None:
        self.subtask, self.incarnation = subtask, incarnation


def batch(*rows: int, schema: pa.Schema = SCHEMA) -> pa.RecordBatch:
    return pa.record_batch([list(rows), [f"t{row % 3}" for row in rows]], schema=schema)


class Job:
    """One attempt, with a driver of its own."""

    def __init__(
        self,
        sink: Any,
        attempt: int,
        restored: SinkSnapshot | None = None,
        subtasks: int = 2,
        schema: pa.Schema = SCHEMA,
    ) -> None:
        self.sink: Sink = sink.as_sink() if hasattr(sink, "as_sink") else sink
        self.schema = schema
        self.driver: Committer = self.committer()
        self.driver.settle(restored, [restored] if restored else [], attempt)
        states: list[Json] = [] if restored is None else restored.states
        self.writers = [
            self.sink.writer(schema, Identity(n, attempt), states[n::subtasks])  # type: ignore[arg-type]
            for n in range(subtasks)
        ]

    def committer(self) -> Committer:
        """That of a driver which has just been started."""
        return self.sink.committer(self.schema, "c0ffee", "out")

    def write(self, *rows: int) -> None:
        for number, writer in enumerate(self.writers):
            writer.write(batch(*rows[number :: len(self.writers)]))

    def checkpoint(self, checkpoint_id: int, *rows: int, final: bool = False) -> SinkSnapshot:
        """Rows in turns to the subtasks, and their part of a checkpoint."""
        if rows:
            self.write(*rows)
        parts = [writer.pre_commit(checkpoint_id, final)() for writer in self.writers]
        handles = json.loads(json.dumps([handle for part in parts for handle in part.handles]))
        return SinkSnapshot(checkpoint_id, handles, [part.state for part in parts])

    def commit(self, snapshot: SinkSnapshot) -> None:
        self.driver.commit(snapshot.checkpoint_id, snapshot.handles)

    def commits(self, checkpoint_id: int, *rows: int) -> SinkSnapshot:
        snapshot = self.checkpoint(checkpoint_id, *rows)
        self.commit(snapshot)
        return snapshot


def table(path: Path) -> pa.Table:
    return deltalake.DeltaTable(path).to_pyarrow_table()


def seen(path: Path, column: str = "row") -> list[Any]:
    """What DuckDB finds in the files that the library's reader names."""
    files = deltalake.DeltaTable(path).file_uris()
    if not files:
        return []
    found = duckdb.sql(f"SELECT {column} FROM read_parquet({files!r}, union_by_name=true) ORDER BY ALL").fetchall()
    return [value for (value,) in found]


def entries(path: Path) -> list[dict[str, Any]]:
    """All actions of the log."""
    names: Sequence[Path] = sorted(Path(path, "_delta_log").glob("*.json"))
    return [json.loads(line) for name in names for line in name.read_text().splitlines()]
