"""A job around one sink, driven by a random generator: the oracle of the sink contract.

The job reads ``SPLITS`` endless counters; row ``(split, n)`` is known by its number ``split * BIG + n``.  A checkpoint
records the position of every split when the barrier passed the subtask that reads it.  So the rows that may and must be
visible follow from the positions of completed checkpoints alone, whatever the sink does.

Sometimes the newest checkpoint turns out to be damaged, or the user asks for an older one: the job falls back to any
that is retained, and from then on only its rows may be visible.  The function of ``foreach_batch`` does then what the
guide asks of it: it drops what came with higher ids.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import random
import sqlite3
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sink_disk import ForgetfulDisk, Killed

from cutwater.connectors.base import Committer, Json, PreCommit, Sink, SinkSnapshot, SinkWriter
from cutwater.connectors.foreach_batch import ForeachBatchSink
from cutwater.connectors.table_sink import TableSink

SPLITS, BIG = 4, 1_000_000
SCHEMA = pa.schema({"row": pa.int64(), "text": pa.string()})


@dataclass(frozen=True)
class Identity:
    subtask: int
    parallelism: int
    incarnation: int
    job_uid: str = "c0ffee"
    step: str = "out"


@dataclass
class Checkpoint:
    id: int
    final: bool
    positions: list[int | None]
    waiting: set[int]
    snapshots: dict[int, Callable[[], PreCommit]] = field(default_factory=dict)
    parts: dict[int, PreCommit] = field(default_factory=dict)

    @property
    def snapshot(self) -> SinkSnapshot:
        handles = [handle for part in self.parts.values() for handle in part.handles]
        return SinkSnapshot(self.id, handles, [part.state for part in self.parts.values()])


def batch_of(rows: list[int]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"row": rows, "text": [f"r{row}" for row in rows]}, SCHEMA)


def rows_of_file(path: str) -> list[int]:
    """The column ``row``; each format is read by a library that did not write it."""
    if path.endswith(".parquet"):
        return pq.ParquetFile(path).read()["row"].to_pylist()
    with gzip.open(path, "rt") if path.endswith(".gz") else open(path) as lines:
        if ".csv" in path:
            return [int(row["row"]) for row in csv.DictReader(lines)]
        return [json.loads(line)["row"] for line in lines]


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
        self.system_call: Callable[[], None] = lambda: None

    def __call__(self, table: pa.Table, *key: int) -> None:
        self.system_call()
        rows = table["row"].to_pylist()
        assert self.batches.setdefault(key, rows) == rows, f"other rows for {key} than at the first call"

    def rows(self) -> list[int]:
        return [row for rows in self.batches.values() for row in rows]

    def drop_after(self, checkpoint_id: int) -> None:
        self.batches = {key: rows for key, rows in self.batches.items() if key[0] <= checkpoint_id}


class Table:
    """What a reader of the table sees.  The database lies beside the directory: it answers for its own durability."""

    def __init__(self, sink: TableSink, patch: pytest.MonkeyPatch) -> None:
        self.system_call: Callable[[], None] = lambda: None
        self._sink, self._path = sink, getattr(sink.database, "path", "")
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        real, table = sqlite3.connect, self

        class Cursor(sqlite3.Cursor):
            def executemany(self, *arguments: Any) -> Any:
                table.system_call()
                return super().executemany(*arguments)

        class Watched(sqlite3.Connection):
            def __init__(self, *arguments: Any, **options: Any) -> None:
                super().__init__(*arguments, **options)
                super().execute("PRAGMA synchronous=OFF")  # the disk of the model is not the database's

            def execute(self, *arguments: Any) -> Any:
                table.system_call()
                return super().execute(*arguments)

            def cursor(self, *arguments: Any) -> Any:
                return super().cursor(Cursor)

        self._reader: sqlite3.Connection | None = None
        self._connect = real
        patch.setattr(sqlite3, "connect", lambda *args, **kwargs: real(*args, factory=Watched, **kwargs))

    def rows(self) -> list[int]:
        if not os.path.exists(self._path):
            return []
        return [row for (row,) in self._execute(f'SELECT row FROM "{self._sink.name}"')]

    def drop_after(self, expected: list[int]) -> None:
        """An upsert cannot be undone: rows to come would overwrite these."""
        if self._sink.mode == "upsert":
            for row in set(self.rows()) - set(expected):
                self._execute(f'DELETE FROM "{self._sink.name}" WHERE row = {row}')

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


def output_of(sink: Sink, directory: str, patch: pytest.MonkeyPatch) -> Output | Calls | Table:
    if isinstance(sink, ForeachBatchSink):
        return sink.fn
    return Table(sink, patch) if isinstance(sink, TableSink) else Output(directory)


class Job:
    def __init__(self, sink: Sink, directory: str, seed: int, patch: pytest.MonkeyPatch) -> None:
        self.random = random.Random(seed)
        self.sink = sink
        self.output: Output | Calls | Table = output_of(sink, directory, patch)
        self.disk = ForgetfulDisk(directory, patch, self.read)
        if isinstance(self.output, Calls | Table):
            self.output.system_call = self.disk.system_call
        self.story: list[str] = []
        self.num_retained = self.random.choice([1, 2, 3])
        self.retained: list[Checkpoint] = []  # oldest first; the last one is what a restore takes
        self.bound: Checkpoint | None = None  # no rows but its own may be visible
        self.late_commits: list[tuple[int, list[Json]]] = []
        self.paused_drivers: list[tuple[SinkSnapshot | None, list[SinkSnapshot], int]] = []
        self.next_id = 1
        self.incarnation = 0
        self.zombies: list[SinkWriter] = []
        self.writers: list[SinkWriter] = []
        self.deaths = 0
        self.start()

    # ------------------------------------------------------------------------------------------------ life of a job

    def start(self) -> None:
        """A driver restores the published checkpoint and starts writers, perhaps at another parallelism (T2)."""
        self.positions = [position or 0 for position in self.published.positions] if self.published else [0] * SPLITS
        self.parallelism = self.sink.parallelism or self.random.choice([1, 2, 3])
        chosen, retained, incarnation = self.view()
        self.committer().settle(chosen, retained, incarnation)
        if isinstance(self.output, Calls):
            self.output.drop_after(chosen.checkpoint_id if chosen else 0)
        elif isinstance(self.output, Table):
            self.output.drop_after(self.expected(self.published))
        self.bound = self.published
        states = chosen.states if chosen else []
        self.pending: Checkpoint | None = None
        self.writers: list[SinkWriter] = []
        for subtask in range(self.parallelism):
            mine = states[subtask :: self.parallelism]
            self.writers.append(self.sink.writer(SCHEMA, Identity(subtask, self.parallelism, self.incarnation), mine))
        self.note(f"start p={self.parallelism} at {self.positions}")

    def view(self) -> tuple[SinkSnapshot | None, list[SinkSnapshot], int]:
        """What a driver that takes the log now finds in it; the third is its attempt."""
        self.incarnation += 1
        retained = [checkpoint.snapshot for checkpoint in self.retained]
        return retained[-1] if retained else None, retained, self.incarnation

    def committer(self) -> Committer:
        return self.sink.committer(SCHEMA, "c0ffee", "out")

    @property
    def published(self) -> Checkpoint | None:
        return self.retained[-1] if self.retained else None

    def crash(self, power: bool) -> None:
        self.note("power loss" if power else "crash")
        if power:
            self.zombies = []
            self.disk.lose_power()
        else:
            self.zombies += self.writers
            if self.random.random() < 0.5:
                self.note("a driver takes the log and is paused")
                self.paused_drivers.append(self.view())
        self.start()

    def fall_back(self) -> None:
        """The newest checkpoints cannot be restored: the log says which one is, then their output is taken back."""
        self.retained = self.retained[: self.random.randrange(1, len(self.retained))]
        self.note(f"falls back to {self.retained[-1].id}")
        self.zombies += self.writers
        self.start()

    def note(self, what: str) -> None:
        self.story.append(what)

    # ----------------------------------------------------------------------------------------------------- one step

    def step(self) -> None:
        """Something happens; some of it is cut short by a death in the middle of a system call."""
        if self.disk.kill_in is None and self.random.random() < 0.3:
            self.disk.kill_in = self.random.randrange(12)
        names = ["write"] * 4 + ["checkpoint"] * 9 + ["abort", "crash", "power", "zombie", "zombie"]
        names += ["fall_back", "fall_back", "late_commit", "paused_driver", "paused_driver"]
        action = self.random.choice(names)
        while True:
            try:
                getattr(self, f"do_{action}")()
                break
            except Killed:
                self.deaths += 1
                self.note(f"killed in {action}")
                action = self.random.choice(["crash", "power"])
        self.read()

    def do_write(self) -> None:
        subtask = self.random.randrange(self.parallelism)
        rows: list[int] = []
        for split in range(subtask, SPLITS, self.parallelism):
            count = self.random.randrange(5)
            rows += [split * BIG + self.positions[split] + i for i in range(count)]
            self.positions[split] += count
        self.note(f"write {len(rows)} by {subtask}")
        self.writers[subtask].write(batch_of(rows))

    def do_checkpoint(self, final: bool = False) -> None:
        """The next bit of the checkpoint under way, or a new one."""
        if self.pending is None:
            self.pending = Checkpoint(self.next_id, final, [None] * SPLITS, set(range(self.parallelism)))
            self.next_id += 1
        pending = self.pending
        if pending.waiting:
            subtask = self.random.choice(sorted(pending.waiting))
            pending.waiting.remove(subtask)
            self.note(f"barrier {pending.id} at {subtask}")
            pending.snapshots[subtask] = self.writers[subtask].pre_commit(pending.id, pending.final)
            for split in range(subtask, SPLITS, self.parallelism):
                pending.positions[split] = self.positions[split]
        elif pending.snapshots:
            subtask = self.random.choice(sorted(pending.snapshots))
            self.note(f"snapshot {pending.id} of {subtask}")
            made = pending.snapshots.pop(subtask)()
            pending.parts[subtask] = PreCommit(*json.loads(json.dumps([made.handles, made.state])))
        else:
            self.note(f"published {pending.id}")
            self.retained.append(pending)
            self.pending, self.bound = None, pending
            due = {subtask: part.handles for subtask, part in pending.parts.items()}
            for subtask in self.random.sample(sorted(due), len(due)):
                # A worker may be late with its commit, or never come to it before the next checkpoint.
                if final or self.random.random() < 0.7:
                    self.note(f"commit {pending.id} by {subtask}")
                    self.committer().commit(pending.id, due[subtask])
                else:
                    self.late_commits.append((pending.id, due[subtask]))
            while len(self.retained) > self.num_retained:
                retired = self.retained.pop(0)
                self.note(f"retire {retired.id}")
                self.committer().retire(retired.snapshot, [checkpoint.snapshot for checkpoint in self.retained])

    def do_fall_back(self) -> None:
        if len(self.retained) > 1:
            self.fall_back()

    def do_late_commit(self) -> None:
        """A worker that was paused hears that a checkpoint completed, perhaps attempts ago."""
        if self.late_commits:
            checkpoint_id, handles = self.late_commits.pop(self.random.randrange(len(self.late_commits)))
            self.note(f"late commit of {checkpoint_id}")
            self.committer().commit(checkpoint_id, handles)

    def do_paused_driver(self) -> None:
        """A driver goes on that took the log, was paused, and has lost the log since."""
        if self.paused_drivers:
            chosen, retained, incarnation = self.paused_drivers.pop(self.random.randrange(len(self.paused_drivers)))
            self.note(f"driver {incarnation} wakes up")
            self.committer().settle(chosen, retained, incarnation)

    def do_abort(self) -> None:
        if self.pending is not None:
            self.note(f"abort {self.pending.id}")
            self.pending = None

    def do_crash(self) -> None:
        self.crash(power=False)

    def do_power(self) -> None:
        self.crash(power=True)

    def do_zombie(self) -> None:
        """A writer of an older attempt goes on: writes, is even asked for a snapshot, or closes."""
        if not self.zombies:
            return
        index = self.random.randrange(len(self.zombies))
        writer = self.zombies[index]
        self.note("zombie")
        try:
            writer.write(batch_of([-1, -2]))
            if self.random.random() < 0.5:
                writer.pre_commit(self.next_id, final=False)()
            if self.random.random() < 0.3:
                writer.close()
                del self.zombies[index]
        except Killed:
            raise
        except Exception as error:  # its files were swept away: a zombie may fail in any way
            self.note(f"zombie died: {error}")
            del self.zombies[index]

    def finish(self) -> None:
        """Write to the end of data, take the final checkpoint and commit it."""
        self.disk.kill_in = self.pending = None
        while self.published is None or not self.published.final:
            self.do_checkpoint(final=True)
            if self.published and self.published.final and len(self.retained) > 1 and self.random.random() < 0.3:
                self.fall_back()
        self.committer().finish(self.incarnation)
        self.read()
        assert Counter(self.output.rows()) == Counter(self.expected(self.published)), self.tell(
            "rows differ at the end"
        )

    # -------------------------------------------------------------------------------------------------- the oracle

    def expected(self, checkpoint: Checkpoint | None) -> list[int]:
        positions = checkpoint.positions if checkpoint else [0] * SPLITS
        return [split * BIG + n for split, end in enumerate(positions) for n in range(end or 0)]

    def read(self) -> None:
        """Any reader at any time: valid files, no row twice, none before its checkpoint completed."""
        visible = Counter(self.output.rows())
        assert max(visible.values(), default=1) == 1, self.tell(f"doubled: {visible.most_common(3)}")
        early = set(visible) - set(self.expected(self.bound))
        assert not early, self.tell(f"visible too early: {sorted(early)[:5]}")

    def tell(self, what: str) -> str:
        return what + "\n  " + "\n  ".join(self.story[-40:])
