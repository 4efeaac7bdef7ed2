"""The asynchronous half of a snapshot: one thread per worker turns frozen state into durable files.

All subtasks of a worker share one file per checkpoint, so that a checkpoint costs one sync per worker however many
steps the job has.  The acknowledgement is sent only once that file is durable (A6).
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from cutwater.runtime.sink_operator import SinkOperator
from cutwater.state.segments import Frozen
from cutwater.storage.base import Store
from cutwater.storage.manifest import Entry, SubtaskRecord
from cutwater.storage.snapshot import SnapshotWriter

__all__ = ["FrozenSubtask", "SnapshotService", "Written"]


@dataclass(slots=True)
class FrozenSubtask:
    """What one subtask hands over at its freeze."""

    checkpoint_id: int
    record: SubtaskRecord
    states: list[tuple[str, Frozen]]
    sinks: list[tuple[SinkOperator, Callable[[], Any]]]
    freeze_ms: float


@dataclass(slots=True)
class Written:
    """The outcome of one worker's part of a checkpoint."""

    attempt: int
    checkpoint_id: int
    subtasks: list[SubtaskRecord]
    entries: list[Entry]
    freeze_ms: float
    write_ms: float
    error: str = ""
    fatal: str = ""
    """A sink could not pre-commit: its rows exist nowhere else, so the attempt must fail."""


@dataclass(slots=True)
class _Part:
    writer: SnapshotWriter
    records: list[SubtaskRecord] = field(default_factory=list[SubtaskRecord])
    entries: list[Entry] = field(default_factory=list[Entry])
    freeze_ms: float = 0.0
    write_ms: float = 0.0
    error: str = ""
    fatal: str = ""


class SnapshotService:
    """Writes the worker's snapshots in the order they were frozen.

    Args:
        store, job: where to.
        subtasks: how many subtasks of this worker take part in each checkpoint.
        done: called from the thread with each finished part.
    """

    def __init__(
        self,
        store: Store,
        job: str,
        *,
        attempt: int,
        incarnation: int,
        subtasks: int,
        inline_threshold_bytes: int,
        done: Callable[[Written], None],
    ) -> None:
        self._store, self._job = store, job
        self._attempt, self._incarnation = attempt, incarnation
        self._subtasks = subtasks
        self._inline = inline_threshold_bytes
        self._done = done
        self._parts: dict[int, _Part] = {}
        self._aborted: set[int] = set()
        self._closed = False
        self._queue: queue.SimpleQueue[FrozenSubtask | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="cutwater-snapshots", daemon=True)
        self._thread.start()

    def submit(self, frozen: FrozenSubtask) -> None:
        """Hand over; returns at once."""
        self._queue.put(frozen)

    def forget(self, checkpoint_id: int) -> None:
        """The checkpoint will not complete: skip its state.  Sinks still make their rows durable (see ``Forget``)."""
        self._aborted.add(checkpoint_id)

    def close(self) -> None:
        """Drop what waits and end the thread."""
        self._closed = True
        self._queue.put(None)
        self._thread.join()
        for part in self._parts.values():
            part.writer.abort()

    def _run(self) -> None:
        while (frozen := self._queue.get()) is not None:
            if self._closed:
                _release(frozen)
                continue
            self._take(frozen)

    def _take(self, frozen: FrozenSubtask) -> None:
        checkpoint_id = frozen.checkpoint_id
        part = self._parts.get(checkpoint_id)
        if part is None:
            writer = SnapshotWriter(
                self._store, self._job, checkpoint_id, self._attempt, self._incarnation, self._inline
            )
            part = self._parts[checkpoint_id] = _Part(writer)
        started = time.perf_counter()
        record = self._pre_commit(frozen, part)
        try:
            if checkpoint_id not in self._aborted and not part.error:
                for step, state in frozen.states:
                    part.entries += part.writer.add(step, record.subtask, state.segments())
        except Exception as e:
            part.error = f"{type(e).__name__}: {e}"
        finally:
            _release(frozen)
        part.records.append(record)
        part.freeze_ms = max(part.freeze_ms, frozen.freeze_ms)
        part.write_ms += (time.perf_counter() - started) * 1000
        if len(part.records) == self._subtasks:
            self._finish(checkpoint_id, part)

    def _pre_commit(self, frozen: FrozenSubtask, part: _Part) -> SubtaskRecord:
        handles: dict[str, list[Any]] = {}
        states: dict[str, Any] = {}
        for operator, make_durable in frozen.sinks:
            try:
                made = make_durable()
            except Exception as e:
                part.fatal = part.error = f"step {operator.step!r}: {type(e).__name__}: {e}\n{traceback.format_exc()}"
                continue
            handles[operator.step] = operator.pre_committed(frozen.checkpoint_id, made.handles)
            states[operator.step] = made.state
        return msgspec.structs.replace(frozen.record, handles=handles, sinks=states)

    def _finish(self, checkpoint_id: int, part: _Part) -> None:
        del self._parts[checkpoint_id]
        started = time.perf_counter()
        if checkpoint_id in self._aborted or part.error:
            part.writer.abort()
            self._aborted.discard(checkpoint_id)
            part.error = part.error or "aborted"
        else:
            try:
                part.writer.close()
            except Exception as e:
                part.error = f"{type(e).__name__}: {e}"
        write_ms = part.write_ms + (time.perf_counter() - started) * 1000
        self._done(
            Written(
                self._attempt,
                checkpoint_id,
                part.records,
                part.entries,
                part.freeze_ms,
                write_ms,
                part.error,
                part.fatal,
            )
        )


def _release(frozen: FrozenSubtask) -> None:
    for _, state in frozen.states:
        state.release()
