"""The asynchronous half of a snapshot: one thread per worker turns frozen state and logs into durable files.

All subtasks of a worker share one file per checkpoint, so that a checkpoint costs one sync per worker however many
steps the job has; a later one may go on with it (``Continued``).  It is complete when the state of every subtask is in
it, and the channel logs of those that announced some at their freeze; logs that nobody announced (a checkpoint that
switched to unaligned late) get a file of their own.  The acknowledgement is sent only once that file is durable (A6).
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from cutwater.errors import CutwaterError, StorageError
from cutwater.runtime.failures import snapshot_error
from cutwater.runtime.worker.snapshot_parts import FrozenSubtask, Key, SubtaskLogs, Written
from cutwater.state.segments import Frozen
from cutwater.storage.savepoint.files import SavepointWriter
from cutwater.storage.snapshot.chains import Chains, extended, worth_extending
from cutwater.storage.snapshot.channel_log import add_log
from cutwater.storage.snapshot.data_file import Continued
from cutwater.storage.snapshot.manifest import Entry, SubtaskRecord
from cutwater.storage.snapshot.segment_files import SnapshotWriter
from cutwater.storage.store.base import Store

_DROPPED_REMEMBERED = 256


@dataclass(slots=True)
class _Savepoint:
    checkpoint_id: int
    folder: str


@dataclass(slots=True)
class _Forget:
    checkpoint_id: int


@dataclass(slots=True)
class _Completed:
    checkpoint_id: int


@dataclass(slots=True)
class _Part:
    writer: SnapshotWriter
    written: Written
    savepoint: SavepointWriter | None
    checkpoint: bool
    goes_on: bool
    """A later checkpoint may go on with its file."""
    awaited: set[Key] = field(default_factory=set[Key])
    """Announced logs that are not there yet."""
    early: set[Key] = field(default_factory=set[Key])
    frozen: list[FrozenSubtask] = field(default_factory=list[FrozenSubtask])
    """Whose memory is what the files are written from."""

    def abort(self) -> None:
        """Drop what was written."""
        self.writer.abort()
        if self.savepoint is not None:
            self.savepoint.abort()
        self.release()

    def release(self) -> None:
        """Nothing will be written any more."""
        frozen, self.frozen = self.frozen, []
        for each in frozen:
            _release(each)


_Handed: TypeAlias = FrozenSubtask | SubtaskLogs | _Savepoint | _Forget | _Completed


class SnapshotService:
    """Writes the worker's snapshots in the order they were frozen.

    Args:
        store, job: where to.
        writer, writers: number of this service, and of all in the job: they name its files.
        subtasks: how many of its subtasks take part in each checkpoint.
        incremental: write what changed since the last completed checkpoint, where that is less.
        continued: so many files may take turns in holding checkpoints that follow one another quickly; 0: each has its
            own.
        restored: by step and subtask, entries of the checkpoint restored that the first ones may build upon.
        done: called from the thread with each finished part.
    """

    def __init__(
        self,
        store: Store,
        job: str,
        *,
        attempt: int,
        writer: int,
        writers: int,
        subtasks: int,
        inline_threshold_bytes: int,
        incremental: bool,
        continued: int,
        restored: Mapping[tuple[str, int], list[Entry]],
        done: Callable[[Written], None],
    ) -> None:
        self._store, self._job = store, job
        self._attempt, self._writer, self._writers = attempt, writer, writers
        self._subtasks = subtasks
        self._inline = inline_threshold_bytes
        self._chains = Chains(restored) if incremental else None
        self._continued = Continued(continued)
        self._done = done
        self._parts: dict[int, _Part] = {}
        self._files: dict[int, int] = {}
        self._folders: dict[int, str] = {}  # of savepoints
        self._stashed: dict[int, list[FrozenSubtask | SubtaskLogs]] = {}  # of those whose folder is not known yet
        self._dropped: deque[int] = deque(maxlen=_DROPPED_REMEMBERED)
        self._closed = False
        self._held: list[_Handed] = []
        """Goes to the thread with what comes next: waking it takes the interpreter away from the stream."""
        self._unfrozen: dict[int, int] = {}
        """By checkpoint that is under way: how many subtasks have not handed over."""
        self._queue: queue.SimpleQueue[_Handed | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="cutwater-snapshots", daemon=True)
        self._thread.start()

    def submit(self, part: FrozenSubtask | SubtaskLogs) -> None:
        """Hand over; returns at once."""
        if isinstance(part, FrozenSubtask):
            left = self._unfrozen[part.checkpoint_id] = self._unfrozen.get(part.checkpoint_id, self._subtasks) - 1
            if left and not (part.states or part.sinks):
                self._held.append(part)  # another subtask of the worker will hand over
                return
            if not left:
                del self._unfrozen[part.checkpoint_id]
        self._pass_on(part)

    def _pass_on(self, last: _Handed | None) -> None:
        held, self._held = self._held, []
        for handed in (*held, last):
            self._queue.put(handed)

    def savepoint(self, checkpoint_id: int, folder: str) -> None:
        """Where the parts of a savepoint go; told before or after the first of them."""
        self._pass_on(_Savepoint(checkpoint_id, folder))

    def forget(self, checkpoint_id: int) -> None:
        """The checkpoint will not complete: skip its state.  Sinks still make their rows durable (see ``Forget``)."""
        self._dropped.append(checkpoint_id)  # seen at once; the file is dropped in its turn
        self._unfrozen.pop(checkpoint_id, None)
        self._pass_on(_Forget(checkpoint_id))

    def completed(self, checkpoint_id: int) -> None:
        """The checkpoint is published: later ones may name its files."""
        self._unfrozen = {n: left for n, left in self._unfrozen.items() if n > checkpoint_id}
        self._held.append(_Completed(checkpoint_id))

    def close(self) -> None:
        """Drop what waits and end the thread."""
        self._closed = True
        self._pass_on(None)
        self._thread.join()
        for part in self._parts.values():
            part.abort()
        self._continued.close()
        for stashed in self._stashed.values():
            for handed in stashed:
                if isinstance(handed, FrozenSubtask):
                    _release(handed)

    def _run(self) -> None:
        while (handed := self._queue.get()) is not None:
            if self._closed:
                if isinstance(handed, FrozenSubtask):
                    _release(handed)
            elif isinstance(handed, FrozenSubtask | SubtaskLogs):
                self._take(handed)
            elif isinstance(handed, _Completed):
                self._on_completed(handed.checkpoint_id)
            elif isinstance(handed, _Savepoint):
                self._folders[handed.checkpoint_id] = handed.folder
                while len(self._folders) > _DROPPED_REMEMBERED:
                    del self._folders[min(self._folders)]
                for stashed in self._stashed.pop(handed.checkpoint_id, ()):
                    self._take(stashed)
            else:
                self._drop(handed.checkpoint_id)

    def _on_completed(self, checkpoint_id: int) -> None:
        if self._chains is not None:
            self._chains.completed(checkpoint_id)
        self._continued.completed(checkpoint_id)

    def _take(self, handed: FrozenSubtask | SubtaskLogs) -> None:
        checkpoint_id = handed.checkpoint_id
        homeless = isinstance(handed, FrozenSubtask) and handed.savepoint and checkpoint_id not in self._folders
        if (homeless or checkpoint_id in self._stashed) and checkpoint_id not in self._dropped:
            self._stashed.setdefault(checkpoint_id, []).append(handed)
        elif isinstance(handed, FrozenSubtask):
            self._take_state(handed)
        else:
            self._take_logs(handed)

    def _take_state(self, frozen: FrozenSubtask) -> None:
        checkpoint_id = frozen.checkpoint_id
        if checkpoint_id in self._dropped:
            self._take_dropped(frozen)
            return
        part = self._parts.get(checkpoint_id) or self._begin(checkpoint_id, frozen)
        written = part.written
        started = time.perf_counter()
        record = self._pre_commit(frozen, written)
        step: str | None = None
        try:
            if written.error is None:
                for step, state in frozen.states:
                    if part.savepoint is not None:
                        subtask, groups, segments = record.subtask, frozen.key_groups, state.segments()
                        written.files += part.savepoint.add_state(step, subtask, groups, segments)
                    if part.checkpoint:
                        written.entries += self._write(part.writer, checkpoint_id, (step, record.subtask), state)
        except Exception as e:
            written.error = snapshot_error(e, "the state", step)
        part.frozen.append(frozen)
        key = (record.vertex, record.subtask)
        if frozen.logs_follow and key not in part.early:
            part.awaited.add(key)
        written.subtasks.append(record)
        written.freeze_ms = max(written.freeze_ms, frozen.freeze_ms)
        written.write_ms += (time.perf_counter() - started) * 1000
        self._finish_if_complete(checkpoint_id, part)

    def _write(
        self, writer: SnapshotWriter, checkpoint_id: int, step: tuple[str, int], state: Frozen
    ) -> Sequence[Entry]:
        """The entries of a step's state: new ones, and those of a completed checkpoint that they build upon."""
        if self._chains is None or not state.incremental:
            return writer.add(*step, state.segments(loose=True))
        known = self._chains.of(step)
        if known is not None and worth_extending(known[1]):
            changes = state.changes(since=known[0])
            if changes is not None:
                chain = extended(known[1], writer.add(*step, changes, shared=True, extends=True))
                self._chains.written(checkpoint_id, step, chain)
                return chain
        chain = writer.add(*step, state.segments(loose=True), shared=True)
        self._chains.written(checkpoint_id, step, chain)
        return chain

    def _take_dropped(self, frozen: FrozenSubtask) -> None:
        """Nobody waits for it any more, except that its sinks' rows exist nowhere else."""
        written = Written(frozen.checkpoint_id, [], [], [])
        self._pre_commit(frozen, written)
        _release(frozen)
        if written.fatal is not None:
            self._done(written)

    def _take_logs(self, logs: SubtaskLogs) -> None:
        checkpoint_id = logs.checkpoint_id
        if checkpoint_id in self._dropped:
            return
        part = self._parts.get(checkpoint_id)
        late = part is None
        if part is None:
            part = self._begin(checkpoint_id)
        written = part.written
        started = time.perf_counter()
        try:
            if written.error is None:
                for log in logs.logs:
                    if part.savepoint is not None:
                        written.files += part.savepoint.add_log(log.to_log())
                    if part.checkpoint:
                        written.entries += add_log(part.writer, log.to_log())
        except Exception as e:
            written.error = snapshot_error(e, "rows on their way")
        written.logs_of.append(logs.subtask)
        part.early.add(logs.subtask)
        part.awaited.discard(logs.subtask)
        written.write_ms += (time.perf_counter() - started) * 1000
        if late:
            self._finish(checkpoint_id, part)
        else:
            self._finish_if_complete(checkpoint_id, part)

    def _begin(self, checkpoint_id: int, frozen: FrozenSubtask | None = None) -> _Part:
        number = self._files.get(checkpoint_id, 0)
        self._files[checkpoint_id] = number + 1
        while len(self._files) > _DROPPED_REMEMBERED:
            del self._files[min(self._files)]
        incarnation = self._writer + number * self._writers
        goes_on = frozen is not None and frozen.checkpoint
        file = self._continued.take(checkpoint_id) if goes_on else None
        writer = SnapshotWriter(self._store, self._job, checkpoint_id, self._attempt, incarnation, self._inline, file)
        savepoint: SavepointWriter | None = None
        if frozen is not None and frozen.savepoint:
            folder = Path(self._folders[checkpoint_id])
            savepoint = SavepointWriter(self._store.at(folder.parent), folder.name)
        written = Written(checkpoint_id, [], [], [])
        checkpoint = frozen is None or frozen.checkpoint
        part = self._parts[checkpoint_id] = _Part(writer, written, savepoint, checkpoint, goes_on)
        return part

    def _pre_commit(self, frozen: FrozenSubtask, written: Written) -> SubtaskRecord:
        handles: dict[str, list[Any]] = {}
        states: dict[str, Any] = {}
        for operator, make_durable in frozen.sinks:
            try:
                made = make_durable()
            except Exception as e:
                written.fatal = written.error = _not_pre_committed(e, frozen.checkpoint_id, operator.step)
                continue
            handles[operator.step] = operator.pre_committed(frozen.checkpoint_id, made.handles)
            states[operator.step] = made.state
        return msgspec.structs.replace(frozen.record, handles=handles, sinks=states)

    def _finish_if_complete(self, checkpoint_id: int, part: _Part) -> None:
        if len(part.written.subtasks) == self._subtasks and not part.awaited:
            self._finish(checkpoint_id, part)

    def _finish(self, checkpoint_id: int, part: _Part) -> None:
        del self._parts[checkpoint_id]
        written = part.written
        started = time.perf_counter()
        if written.error is not None:
            part.abort()
        else:
            try:
                file = part.writer.close(go_on=part.goes_on)
                if file is not None:
                    self._continued.leave(checkpoint_id, file)
                part.release()
            except Exception as e:
                written.error = snapshot_error(e, "the snapshot's file")
                part.abort()
        written.write_ms += (time.perf_counter() - started) * 1000
        self._done(written)

    def _drop(self, checkpoint_id: int) -> None:
        if self._chains is not None:
            self._chains.dropped(checkpoint_id)
        for stashed in self._stashed.pop(checkpoint_id, ()):
            self._take(stashed)
        part = self._parts.pop(checkpoint_id, None)
        if part is None:
            return
        part.abort()
        if part.written.fatal is not None:
            self._done(part.written)


def _not_pre_committed(error: Exception, checkpoint_id: int, step: str) -> CutwaterError:
    """What other systems raise is theirs, and may be over when it is tried again."""
    if isinstance(error, CutwaterError) and not isinstance(error, StorageError):
        return snapshot_error(error, "", step)
    story = "".join(traceback.format_exception(error))
    text = f"checkpoint {checkpoint_id}: the sink could not pre-commit: {type(error).__name__}: {error}"
    return StorageError(f"{text}\n{story}", step=step)


def _release(frozen: FrozenSubtask) -> None:
    for _, state in frozen.states:
        state.release()
