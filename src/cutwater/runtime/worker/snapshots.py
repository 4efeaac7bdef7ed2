"""Snapshots of one worker: the record of each checkpoint, and the thread that turns frozen state and logs into files.

The attempt owns the records, and the thread keeps its own part in them: what each may touch is said at the field.  An
abort removes the record, and with it everything that was kept.  What the core of a subtask keeps of a checkpoint
(``protocol.subtask.performer``) goes when it hears of the outcome.

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from cutwater.errors import CutwaterError, StorageError
from cutwater.plan.graph import Channel, Edge
from cutwater.protocol.channel.items import Rows, Timed, Watermark
from cutwater.protocol.states import State
from cutwater.protocol.subtask.host import LoopReport
from cutwater.runtime.chains.chain import SinkOperator
from cutwater.runtime.failures import snapshot_error
from cutwater.state.segments import Frozen
from cutwater.storage.snapshot.channel_log import ChannelLog, LogItem, add_log
from cutwater.storage.snapshot.data_file import Continued
from cutwater.storage.snapshot.increments import Increments, extended, worth_extending
from cutwater.storage.snapshot.manifest import Entry, SubtaskRecord
from cutwater.storage.snapshot.savepoint_files import SavepointFile, SavepointWriter
from cutwater.storage.snapshot.segment_files import SnapshotWriter
from cutwater.storage.store.base import Store
from cutwater.storage.store.opening import another, parted

Key: TypeAlias = tuple[int, int]
"""Vertex and subtask."""


@dataclass(slots=True)
class FrozenSubtask:
    """State of one subtask, handed to the snapshot thread after its freeze."""

    checkpoint_id: int
    record: SubtaskRecord
    states: list[tuple[str, Frozen]]
    sinks: list[tuple[SinkOperator, Callable[[], Any]]]
    freeze_ms: float
    key_groups: range
    savepoint: bool = False
    """It is part of a savepoint, whose folder the trigger tells."""
    checkpoint: bool = True
    """It is part of a checkpoint in the job's folder."""
    logs_follow: bool = False
    """Logs of its channels will be handed over, too."""

    def release(self) -> None:
        """Give the memory back that the state is written from."""
        for _, state in self.states:
            state.release()


@dataclass(slots=True)
class LoggedChannel:
    """One side of a channel, as it was kept: batches by reference."""

    edge: Edge
    channel: Channel
    side: str
    """"receiver" or "sender"."""
    items: list[Timed]

    def to_log(self) -> ChannelLog:
        """What the snapshot thread writes."""
        sending = self.side == "sender"
        first = next((i.first_row for i in self.items if type(i) is Rows), 0)
        return ChannelLog(
            step=self.edge.source_step if sending else self.edge.target_step,
            subtask=self.channel.source if sending else self.channel.target,
            name=self.edge.name,
            channel=(self.channel.edge, self.channel.source, self.channel.target),
            side=self.side,
            first_row=first,
            items=[
                LogItem(i.batch, i.watermark, late_before=i.late_before)
                if type(i) is Rows
                else LogItem(None, i.watermark, _idle(i))
                for i in self.items
            ],
        )


def _idle(item: Timed) -> bool:
    return type(item) is Watermark and item.idle


@dataclass(slots=True)
class SubtaskLogs:
    """Channel logs of one subtask, handed to the snapshot thread; they are complete."""

    checkpoint_id: int
    subtask: Key
    logs: list[LoggedChannel]


@dataclass(slots=True)
class Written:
    """Outcome of one worker's part of a checkpoint, or of logs that came after it."""

    checkpoint_id: int
    subtasks: list[SubtaskRecord]
    """Subtasks whose state is durable."""
    logs_of: list[Key]
    """Subtasks whose logs are durable."""
    entries: list[Entry]
    files: list[SavepointFile] = field(default_factory=list[SavepointFile])
    """Of a savepoint."""
    freeze_ms: float = 0.0
    write_ms: float = 0.0
    error: CutwaterError | None = None
    fatal: CutwaterError | None = None
    """A sink could not pre-commit: its rows exist nowhere else, so the attempt must fail."""


@dataclass(slots=True)
class PartInProgress:
    """Files of a checkpoint that the snapshot thread is writing."""

    writer: SnapshotWriter
    written: Written
    savepoint: SavepointWriter | None
    checkpoint: bool
    goes_on: bool
    """A later checkpoint may go on with its file."""
    awaited: set[Key] = field(default_factory=set[Key])
    """Announced logs that are not there yet."""
    early: set[Key] = field(default_factory=set[Key])
    """Subtasks whose logs came before their state."""
    frozen: list[FrozenSubtask] = field(default_factory=list[FrozenSubtask])
    """State whose memory the files are written from."""

    def abort(self) -> None:
        """Drop what was written."""
        self.writer.abort()
        if self.savepoint is not None:
            self.savepoint.abort()
        self.release()

    def release(self) -> None:
        """Give the memory back: nothing will be written any more."""
        frozen, self.frozen = self.frozen, []
        for each in frozen:
            each.release()


class CheckpointStage(State):
    """Progress of a checkpoint on a worker."""

    UNDER_WAY = "under way"
    """Some subtask has not acknowledged."""
    ACKNOWLEDGED = "acknowledged"
    """The coordinator was told; its outcome is to come."""
    GIVEN_UP = "given up"
    """A subtask gave it up: nothing is written any more, only sinks make their rows durable."""


@dataclass(slots=True, weakref_slot=True)
class WorkerCheckpoint:
    """One checkpoint, probe or savepoint on one worker.  Belongs to the loop thread but for the fields at the end.

    >>> checkpoints = WorkerCheckpoints()
    >>> checkpoints[7].folder = "/savepoints/monday"
    >>> 7 in checkpoints, checkpoints[7].folder
    (True, '/savepoints/monday')
    >>> aborted = checkpoints.pop(7)
    >>> 7 in checkpoints, checkpoints[7].folder
    (False, '')
    """

    checkpoint_id: int
    stage: CheckpointStage = CheckpointStage.UNDER_WAY
    """Set in the loop thread; the snapshot thread sees it at once."""
    folder: str = ""
    """Of a savepoint, known from the trigger on."""
    homeless: list[FrozenSubtask | SubtaskLogs] = field(default_factory=list[FrozenSubtask | SubtaskLogs])
    """Parts of a savepoint whose folder is not known yet."""
    handed_over: int = 0
    """Subtasks whose state was handed over."""
    written: list[Written] = field(default_factory=list[Written])
    """Durable parts, until all is acknowledged."""
    error: CutwaterError | None = None
    """Why it could not be written."""
    acknowledged: dict[Key, LoopReport | None] = field(default_factory=dict[Key, LoopReport | None])
    """Subtasks whose part is durable, with what they tell of their loop."""
    lengths: dict[str, int] = field(default_factory=dict[str, int])
    """Bytes by file of what this worker wrote of it, or builds upon; where snapshots are copied."""
    part: PartInProgress | None = None
    """Of the snapshot thread alone: files that are being written."""
    files: int = 0
    """Of the snapshot thread alone: files begun so far."""

    def abort_part(self) -> PartInProgress | None:
        """Drop the files that are being written (in the snapshot thread, or once it has ended)."""
        part, self.part = self.part, None
        if part is not None:
            part.abort()
        return part


class WorkerCheckpoints(dict[int, WorkerCheckpoint]):
    """The checkpoints under way in one attempt on one worker, by id; asking for one begins its record."""

    def __missing__(self, checkpoint_id: int) -> WorkerCheckpoint:
        checkpoint = self[checkpoint_id] = WorkerCheckpoint(checkpoint_id)
        return checkpoint


_Part: TypeAlias = FrozenSubtask | SubtaskLogs


@dataclass(slots=True)
class _Drop:
    """The checkpoint will not complete."""


@dataclass(slots=True)
class _Completed:
    checkpoint_id: int


_Handed: TypeAlias = tuple[WorkerCheckpoint, _Part | _Drop] | _Completed


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
        self._increments = Increments(restored) if incremental else None
        self._continued = Continued(continued)
        self._done = done
        self._closed = False
        self._held: list[_Handed] = []
        """Goes to the thread with what comes next: waking it takes the interpreter away from the stream."""
        self._queue: queue.SimpleQueue[_Handed | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="cutwater-snapshots", daemon=True)
        self._thread.start()

    def submit(self, checkpoint: WorkerCheckpoint, part: FrozenSubtask | SubtaskLogs) -> None:
        """Hand over a part of a checkpoint; returns at once."""
        if isinstance(part, SubtaskLogs):
            if checkpoint.homeless:
                checkpoint.homeless.append(part)  # behind the state
            else:
                self._pass_on((checkpoint, part))
            return
        checkpoint.handed_over += 1
        if checkpoint.stage is CheckpointStage.GIVEN_UP and not part.sinks:
            part.release()
        elif checkpoint.stage is not CheckpointStage.GIVEN_UP and part.savepoint and not checkpoint.folder:
            checkpoint.homeless.append(part)
        elif checkpoint.handed_over < self._subtasks and not (part.states or part.sinks):
            self._held.append((checkpoint, part))  # another subtask of the worker will hand over
        else:
            self._pass_on((checkpoint, part))

    def _pass_on(self, *last: _Handed | None) -> None:
        held, self._held = self._held, []
        for handed in (*held, *last):
            self._queue.put(handed)

    def savepoint(self, checkpoint: WorkerCheckpoint, folder: str) -> None:
        """Say where the parts of a savepoint go; before or after the first of them."""
        checkpoint.folder = folder
        self._pass_on(*self._homeless(checkpoint))

    def drop(self, checkpoint: WorkerCheckpoint) -> None:
        """Skip the state of a checkpoint that will not complete.  Sinks still make their rows durable (``Forget``)."""
        if checkpoint.stage is not CheckpointStage.GIVEN_UP:
            checkpoint.stage = CheckpointStage.GIVEN_UP  # seen at once; the file is dropped in its turn
            self._pass_on(*self._homeless(checkpoint), (checkpoint, _Drop()))

    def completed(self, checkpoint_id: int) -> None:
        """Later checkpoints may name the files of this one: it is published."""
        self._held.append(_Completed(checkpoint_id))

    def close(self, checkpoints: Iterable[WorkerCheckpoint]) -> None:
        """End the thread, and drop what waits and what is under way of these."""
        self._closed = True
        self._pass_on(None)
        self._thread.join()
        for checkpoint in checkpoints:
            checkpoint.abort_part()
            for _, part in self._homeless(checkpoint):
                _release(part)
        self._continued.close()

    def _homeless(self, checkpoint: WorkerCheckpoint) -> list[tuple[WorkerCheckpoint, _Part]]:
        homeless, checkpoint.homeless = checkpoint.homeless, []
        return [(checkpoint, part) for part in homeless]

    def _run(self) -> None:
        while (handed := self._queue.get()) is not None:
            if isinstance(handed, _Completed):
                self._on_completed(handed.checkpoint_id)
                continue
            checkpoint, part = handed
            if isinstance(part, _Drop):
                self._drop(checkpoint)
            elif self._closed:
                _release(part)
            elif isinstance(part, FrozenSubtask):
                self._take_state(checkpoint, part)
            else:
                self._take_logs(checkpoint, part)
            del handed, checkpoint, part  # while it waits nothing of a checkpoint is kept

    def _on_completed(self, checkpoint_id: int) -> None:
        if self._increments is not None:
            self._increments.completed(checkpoint_id)
        self._continued.completed(checkpoint_id)

    def _take_state(self, checkpoint: WorkerCheckpoint, frozen: FrozenSubtask) -> None:
        checkpoint_id = checkpoint.checkpoint_id
        if checkpoint.stage is CheckpointStage.GIVEN_UP:
            self._take_dropped(frozen)
            return
        part = checkpoint.part or self._begin(checkpoint, frozen)
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
        self._finish_if_complete(checkpoint, part)

    def _write(
        self, writer: SnapshotWriter, checkpoint_id: int, step: tuple[str, int], state: Frozen
    ) -> Sequence[Entry]:
        """The entries of a step's state: new ones, and those of a completed checkpoint that they build upon."""
        if self._increments is None or not state.incremental:
            return writer.add(*step, state.segments(unsorted=True))
        known = self._increments.of(step)
        if known is not None and worth_extending(known[1]):
            changes = state.changes(since=known[0])
            if changes is not None:
                entries = extended(known[1], writer.add(*step, changes, shared=True, extends=True))
                self._increments.written(checkpoint_id, step, entries)
                return entries
        entries = writer.add(*step, state.segments(unsorted=True), shared=True)
        self._increments.written(checkpoint_id, step, entries)
        return entries

    def _take_dropped(self, frozen: FrozenSubtask) -> None:
        """Make the rows of its sinks durable, which exist nowhere else: nobody waits for anything else of it."""
        written = Written(frozen.checkpoint_id, [], [], [])
        self._pre_commit(frozen, written)
        frozen.release()
        if written.fatal is not None:
            self._done(written)

    def _take_logs(self, checkpoint: WorkerCheckpoint, logs: SubtaskLogs) -> None:
        if checkpoint.stage is CheckpointStage.GIVEN_UP:
            return
        late = checkpoint.part is None
        part = checkpoint.part or self._begin(checkpoint)
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
            self._finish(checkpoint, part)
        else:
            self._finish_if_complete(checkpoint, part)

    def _begin(self, checkpoint: WorkerCheckpoint, frozen: FrozenSubtask | None = None) -> PartInProgress:
        checkpoint_id, number = checkpoint.checkpoint_id, checkpoint.files
        checkpoint.files += 1
        incarnation = self._writer + number * self._writers
        goes_on = frozen is not None and frozen.checkpoint
        file = self._continued.take(checkpoint_id) if goes_on else None
        writer = SnapshotWriter(self._store, self._job, checkpoint_id, self._attempt, incarnation, self._inline, file)
        savepoint: SavepointWriter | None = None
        if frozen is not None and frozen.savepoint:
            above, folder = parted(checkpoint.folder)
            savepoint = SavepointWriter(another(self._store, above), folder)
        written = Written(checkpoint_id, [], [], [])
        whole = frozen is None or frozen.checkpoint
        part = checkpoint.part = PartInProgress(writer, written, savepoint, whole, goes_on)
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

    def _finish_if_complete(self, checkpoint: WorkerCheckpoint, part: PartInProgress) -> None:
        if len(part.written.subtasks) == self._subtasks and not part.awaited:
            self._finish(checkpoint, part)

    def _finish(self, checkpoint: WorkerCheckpoint, part: PartInProgress) -> None:
        checkpoint.part = None
        written = part.written
        started = time.perf_counter()
        if written.error is not None:
            part.abort()
        else:
            try:
                file = part.writer.close(go_on=part.goes_on)
                if file is not None:
                    self._continued.leave(checkpoint.checkpoint_id, file)
                part.release()
            except Exception as e:
                written.error = snapshot_error(e, "the snapshot's file")
                part.abort()
        written.write_ms += (time.perf_counter() - started) * 1000
        self._done(written)

    def _drop(self, checkpoint: WorkerCheckpoint) -> None:
        if self._increments is not None:
            self._increments.dropped(checkpoint.checkpoint_id)
        part = checkpoint.abort_part()
        if part is not None and part.written.fatal is not None:
            self._done(part.written)


def _not_pre_committed(error: Exception, checkpoint_id: int, step: str) -> CutwaterError:
    """Error for a sink that failed: what other systems raise may be over when it is tried again."""
    if isinstance(error, CutwaterError) and not isinstance(error, StorageError):
        return snapshot_error(error, "", step)
    story = "".join(traceback.format_exception(error))
    text = f"checkpoint {checkpoint_id}: the sink could not pre-commit: {type(error).__name__}: {error}"
    return StorageError(f"{text}\n{story}", step=step)


def _release(part: FrozenSubtask | SubtaskLogs) -> None:
    if isinstance(part, FrozenSubtask):
        part.release()
