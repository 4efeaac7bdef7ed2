"""A table of numbered entries in a folder, as Delta and Iceberg have them, and a sink with one commit for all subtasks.

An entry is made by a link to its number, which only one of several writers can set.  It says which parts come and which
go, and carries the attempt and the checkpoint of the job that made it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from cutwater.connectors.base import Json, PreCommit, SinkContext, SinkSnapshot
from cutwater.errors import FencedError, StorageError


@dataclass(frozen=True)
class LedgerSink:
    """Writes the column ``value`` to parts below ``folder``; entries lie beside them."""

    folder: str
    pause_s: float = 0.0
    """Between reading the newest entry and making the next."""
    commits_globally: bool = field(default=True, init=False)
    guarantee: str = field(default="exactly-once", init=False)
    parallelism: int | None = field(default=None, init=False)

    def check(self, schema: pa.Schema) -> None:
        os.makedirs(os.path.join(self.folder, "parts"), exist_ok=True)

    def writer(self, schema: pa.Schema, ctx: SinkContext, restored: list[Json]) -> _Writer:
        return _Writer(self.folder, ctx)

    def committer(self, schema: pa.Schema, job_uid: str, step: str) -> LedgerCommitter:
        return LedgerCommitter(self, f"{job_uid}-{step}")


class _Writer:
    def __init__(self, folder: str, ctx: SinkContext) -> None:
        self._folder, self._ctx = folder, ctx
        self._rows: list[int] = []

    def write(self, batch: pa.RecordBatch) -> None:
        self._rows += batch.column("value").to_pylist()

    def roll(self) -> None:
        pass

    def pre_commit(self, checkpoint_id: int, final: bool) -> Callable[[], PreCommit]:
        rows, self._rows, ctx = self._rows, [], self._ctx
        name = f"{ctx.job_uid}-{ctx.step}-{ctx.subtask}-{ctx.incarnation}-{checkpoint_id}"

        def snapshot() -> PreCommit:
            if not rows:
                return PreCommit()
            Path(self._folder, "parts", name).write_text(json.dumps(rows))
            handle = {"part": name, "by": f"{ctx.job_uid}-{ctx.step}", "checkpoint": checkpoint_id}
            return PreCommit([handle])

        return snapshot

    def close(self) -> None:
        pass


class LedgerCommitter:
    takes_back = True

    def __init__(self, sink: LedgerSink, name: str) -> None:
        self._sink, self._name = sink, name
        self._attempt = 0

    def commit(self, checkpoint_id: int, handles: list[Json]) -> None:
        self._append(self._attempt, checkpoint_id, handles, back_to=None)

    def settle(self, restored: SinkSnapshot | None, retained: Sequence[SinkSnapshot], incarnation: int) -> None:
        self._attempt = incarnation
        chosen = restored.checkpoint_id if restored is not None else 0
        self._append(incarnation, chosen, restored.handles if restored is not None else [], back_to=chosen)

    def retire(self, retired: SinkSnapshot, retained: Sequence[SinkSnapshot]) -> None:
        pass

    def finish(self, incarnation: int) -> None:
        pass

    def _append(self, attempt: int, checkpoint_id: int, handles: Any, back_to: int | None) -> None:
        number, all_entries = 0, list(entries(self._sink.folder))
        mine = [entry for entry in all_entries if entry["by"] == self._name]
        number = len(all_entries) + 1
        last = mine[-1] if mine else {"attempt": 0, "checkpoint": 0}
        if last["attempt"] > attempt:
            raise FencedError(f"the table was taken over by attempt {last['attempt']}")
        done = last["checkpoint"]
        later = [
            part for entry in mine for part in entry["adds"] if back_to is not None and part["checkpoint"] > back_to
        ]
        gone = {part["part"] for entry in mine for part in entry["removes"]}
        adds = [h for h in handles if h["by"] == self._name and h["checkpoint"] > done]
        removes = [part for part in later if part["part"] not in gone]
        time.sleep(self._sink.pause_s)
        entry = {"by": self._name, "attempt": attempt, "checkpoint": checkpoint_id, "adds": adds, "removes": removes}
        entry["named"] = len(handles)
        path = Path(self._sink.folder, f"entry-{number:06}")
        draft = path.with_name(f"draft-{os.getpid()}-{time.monotonic_ns()}")
        draft.write_text(json.dumps(entry))
        try:
            os.link(draft, path)
        except FileExistsError:
            raise StorageError(f"another writer made {path.name}") from None
        finally:
            draft.unlink()


def entries(folder: str | Path) -> Iterator[dict[str, Any]]:
    """In their order."""
    for path in sorted(Path(folder).glob("entry-*")):
        yield json.loads(path.read_text())


def visible(folder: str | Path) -> list[int]:
    """The rows that a reader sees now."""
    parts: list[str] = []
    for entry in entries(folder):
        parts = [part for part in parts if part not in {gone["part"] for gone in entry["removes"]}]
        parts += [part["part"] for part in entry["adds"]]
    return [row for part in parts for row in json.loads(Path(folder, "parts", part).read_text())]
