"""A step that changes, checkpoints of it that complete, abort and are restored, and what each of them should hold."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from cutwater.state.segments import Frozen, Segment
from cutwater.storage.job_log import JobLog
from cutwater.storage.reading import next_checkpoint_id, verify_checkpoint
from cutwater.storage.snapshot.increments import Increments, extended, increments_of, worth_extending
from cutwater.storage.snapshot.manifest import Entry, Manifest
from cutwater.storage.snapshot.publish import publish
from cutwater.storage.snapshot.retention import Retention, list_shared
from cutwater.storage.snapshot.segment_files import SnapshotWriter, load_manifest, read_segment
from cutwater.storage.store.seal import PLAIN
from memory_store import MemoryStore

GROUPS = 16
JOB = "job"
STEP = ("step", 0)

Content = list[Any]
"""What is in a state, as a sorted list; that of several subtasks is all of theirs, sorted."""


class Step(Protocol):
    """One subtask under test, and what should be in it."""

    def change(self, dice: random.Random) -> None:
        """Something comes: rows, a watermark ..."""
        ...

    def freeze(self, checkpoint_id: int) -> Frozen: ...

    def expected(self, frozen: Frozen) -> Any:
        """What a restore of this freeze, which is of now, must have as ``content``, sorted."""
        ...

    def restore(self, segments: Iterable[Segment], expected: Any = None) -> None:
        """Go on from segments; ``expected`` is what they hold, if it shall go on."""
        ...

    def content(self) -> Content: ...


@dataclass
class World:
    """One subtask, its storage, and what is expected of each checkpoint."""

    seed: int
    make: Callable[[int, int], Step]
    """Of subtask and parallelism."""
    worth: Callable[[Iterable[Entry]], bool] = worth_extending
    expected: dict[int, Any] = field(default_factory=dict)
    kinds: set[tuple[str, str]] = field(default_factory=set)
    """Names of states, and kinds of segments in checkpoints that had an outcome."""
    built_on_restored: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.store = MemoryStore()
        self.log = JobLog(self.store, JOB, num_retained=self.random.randint(1, 3))
        self.log.begin_attempt("driver")
        self.retention = Retention(self.store, self.log)
        self.step = self.make(0, 1)
        self.increments = Increments()
        self.pending: list[tuple[int, list[Entry]]] = []
        self.next_id = 1

    def run(self, steps: int = 40) -> World:
        for _ in range(steps):
            common = [self.change, self.change, self.checkpoint, self.outcome]
            happens = self.random.choice(common if self.random.random() < 0.95 else [self.restart])
            happens()
            if happens == self.outcome:  # nothing else publishes or deletes
                self.check()
        return self

    def change(self) -> None:
        self.step.change(self.random)

    def checkpoint(self) -> None:
        if len(self.pending) == 2:
            return
        checkpoint_id, self.next_id = self.next_id, self.next_id + 1
        frozen = self.step.freeze(checkpoint_id)
        self.expected[checkpoint_id] = self.step.expected(frozen)
        if self.random.random() < 0.5:
            self.change()  # while it is written
        writer = SnapshotWriter(self.store, JOB, checkpoint_id, self.log.attempt, 0, 900)
        entries = written(writer, self.increments, frozen, self.worth)
        self.built_on_restored += self.increments._completed == 0 and any(e.kind == "delta" for e in entries)
        writer.close()
        frozen.release()
        self.increments.written(checkpoint_id, STEP, entries)
        self.pending.append((checkpoint_id, entries))

    def outcome(self) -> None:
        if not self.pending:
            return
        checkpoint_id, entries = self.pending.pop(self.random.randrange(len(self.pending)))
        self.kinds |= {(e.name, e.kind) for e in entries}
        if self.random.random() < 0.3:
            self.increments.dropped(checkpoint_id)
            return
        self.pending = [p for p in self.pending if p[0] > checkpoint_id]  # subsumed
        manifest = Manifest(
            JOB, self.log.state.uid, checkpoint_id, self.log.attempt, "aligned", GROUPS, 1, 0, 0, [], [], entries
        )
        self.retention.shared.check(manifest)
        self.retention.shared.published(publish(self.store, self.log, manifest), manifest)
        assert self.retention.collect() == []
        self.increments.completed(checkpoint_id)

    def restart(self) -> None:
        """A new attempt goes on from the newest completed checkpoint, in the same shape."""
        self.log.begin_attempt("driver")
        self.retention = Retention(self.store, self.log)
        self.pending, self.step, self.increments = [], self.make(0, 1), Increments()
        self.next_id = next_checkpoint_id(self.store, JOB, self.log.state)
        if self.log.state.completed:
            completed = self.log.state.completed[0]
            entries = load_manifest(self.store, JOB, completed).entries
            self.step.restore(self._read(entries), self.expected[completed.checkpoint_id])
            self.increments = Increments(increments_of(entries, PLAIN))

    def check(self) -> None:
        """Every retained checkpoint is whole, and is what was there at its freeze, at any parallelism."""
        for completed in self.log.state.completed:
            report = verify_checkpoint(self.store, JOB, completed)
            assert report.ok, report.problems
            entries = load_manifest(self.store, JOB, completed).entries
            parallelism = self.random.randint(1, 3)
            content: Content = []
            for subtask in range(parallelism):
                restored = self.make(subtask, parallelism)
                restored.restore(self._read(entries))
                content += restored.content()
            assert sorted(content) == self.expected[completed.checkpoint_id]

    def _read(self, entries: Iterable[Entry]) -> Iterator[Segment]:
        return (read_segment(self.store, JOB, e) for e in entries)

    def files(self) -> set[str]:
        return {file for file, _ in list_shared(self.store, JOB)}


def short(chain: Iterable[Entry]) -> bool:
    """Instead of ``worth_extending``: in a small state the changes are never few bytes."""
    return sum(entry.kind == "delta" for entry in chain) < 9


def written(
    writer: SnapshotWriter,
    increments: Increments,
    frozen: Frozen,
    worth: Callable[[Iterable[Entry]], bool] = worth_extending,
) -> list[Entry]:
    """What the snapshot service writes: changes where that is worth it, else everything."""
    known = increments.of(STEP)
    changes = frozen.changes(known[0]) if frozen.incremental and known and worth(known[1]) else None
    if changes is None:
        return writer.add(*STEP, frozen.segments(unsorted=True), shared=True)
    assert known is not None
    return extended(known[1], writer.add(*STEP, changes, shared=True))
