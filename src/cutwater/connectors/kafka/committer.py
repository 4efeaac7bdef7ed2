"""Epochs into a topic, each in one transaction with its commit record.  See ``docs/decisions/0055-kafka.md``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Sequence

import pyarrow as pa

from cutwater.connectors.base import Json, SinkSnapshot
from cutwater.connectors.foreach_batch import EpochCommitter, EpochHandle
from cutwater.connectors.kafka.commit_records import CommitRecord, CommitRecords
from cutwater.connectors.kafka.producer import Producer, StalledError
from cutwater.connectors.staging import StagingArea, incarnation_of
from cutwater.connectors.staging_folders import StoreFolder
from cutwater.errors import FencedError, StorageError


class TransactionalProducers:
    """The producers of a write step in this process, one for each subtask, made when first needed.

    Rows are staged only once their subtask has a commit record (``announce``), so whoever may ever commit some has one,
    and a restore finds all of them.

    Args:
        records: of the step.
        make: a producer with a transactional id.
        send: hands messages to a producer and waits for nothing; they stay in memory meanwhile.
    """

    def __init__(
        self, records: CommitRecords, make: Callable[[str], Producer], send: Callable[[Producer, pa.Table], None]
    ) -> None:
        self._records, self._make, self._send = records, make, send
        self._made: dict[int, tuple[Producer, CommitRecord]] = {}
        self._announced: set[int] = set()
        self._lock = threading.RLock()
        """One thread commits while that of the snapshots announces."""

    def announce(self, subtask: int, incarnation: int) -> None:
        """Make the subtask's producer, and leave a record if there is none.

        Raises:
            FencedError, StorageError: as ``Producer``.
        """
        if subtask in self._announced:  # asked without the lock: a snapshot does not wait for a commit
            return

        def record() -> None:
            if subtask not in self._made and self._take_over(subtask) is None:
                self._record(subtask, CommitRecord(0, incarnation), None)

        with self._lock:
            _once_more(record)
            self._announced.add(subtask)

    def write(self, rows: pa.Table, epoch: EpochHandle, incarnation: int) -> None:
        """The rows of an epoch, if they are not in and may come in.

        Args:
            incarnation: on whose word.

        Raises:
            FencedError, StorageError: as ``Producer``; or it cannot be told whether they are in.
        """
        with self._lock:
            _once_more(lambda: self._write(rows, epoch, incarnation))

    def _write(self, rows: pa.Table, epoch: EpochHandle, incarnation: int) -> None:
        if epoch.subtask not in self._made and self._take_over(epoch.subtask) is None:
            self.close()
            raise StorageError(
                f"kafka group {self._records.group(epoch.subtask)!r} has no commit record any more: it "
                f"cannot be told whether the rows of checkpoint {epoch.checkpoint_id} are in the topic",
                hint="A group's offsets expire (offsets.retention.minutes of the broker; 7 days). Look at the end "
                "of the topic; restored with the sink under another step id, the job does not write them.",
            )
        producer, record = self._made[epoch.subtask]
        if record.admits(epoch.checkpoint_id, incarnation):
            after = CommitRecord(epoch.checkpoint_id, incarnation)
            self._record(epoch.subtask, after, lambda: self._send(producer, rows))

    def fence(self, incarnation: int, subtasks: Container[int] | None) -> None:
        """From now on nobody of a smaller incarnation writes.

        Args:
            subtasks: whose; ``None``: all.

        Raises:
            FencedError: somebody of a larger one does already.
            StorageError: as ``Producer``.
        """
        with self._lock:
            for subtask in self._records.subtasks():
                if subtasks is not None and subtask not in subtasks:
                    continue
                _once_more(lambda subtask=subtask: self._fence(subtask, incarnation))

    def _fence(self, subtask: int, incarnation: int) -> None:
        before = self._take_over(subtask)
        if before is not None and before.incarnation > incarnation:
            raise FencedError(
                f"kafka group {self._records.group(subtask)!r}: attempt {before.incarnation} of the job "
                f"writes already, this is {incarnation}",
                hint="Another driver has taken over the job.",
            )
        if before is not None and before.incarnation < incarnation:
            self._record(subtask, CommitRecord(before.checkpoint_id, incarnation), None)

    def close(self) -> None:
        """End all of them; later ones are made anew."""
        with self._lock:
            for producer, _ in self._made.values():
                producer.close()
            self._made.clear()

    def _take_over(self, subtask: int) -> CommitRecord | None:
        """Whatever the id's last producer did is decided now; returns the record."""
        producer = self._make(self._records.group(subtask))
        try:
            producer.begin_as_only_one()
            found = self._records.of(subtask)
        except BaseException:
            producer.close()
            raise
        self._made[subtask] = producer, found or CommitRecord(0, 0)
        return found

    def _record(self, subtask: int, record: CommitRecord, send: Callable[[], None] | None) -> None:
        producer, _ = self._made[subtask]
        try:
            producer.transaction(send, self._records.group(subtask), record.checkpoint_id, record.text())
        except BaseException:
            self._made.pop(subtask, None)  # whether it was committed, the next producer finds out
            producer.close()
            raise
        self._made[subtask] = producer, record


def _once_more(write: Callable[[], None]) -> None:
    """Again with the next producer if a call of the first does not return: it finds out what that one has committed."""
    try:
        write()
    except StalledError:
        write()


class KafkaCommitter:
    """Commits the epochs of one write step.

    Args:
        area: the step's staging.
        producers: of the step.
    """

    takes_back = False

    def __init__(self, area: StagingArea[StoreFolder], producers: TransactionalProducers) -> None:
        self._area, self._producers = area, producers
        self._authority: int | None = None
        self._epochs = EpochCommitter(area, self._take)

    def commit(self, checkpoint_id: int, handles: list[Json]) -> None:
        """See ``Committer.commit``.

        Raises:
            CorruptSnapshotError: staged rows are torn or flipped.
            FencedError: a newer attempt writes in this one's place.
            StorageError: the topic cannot be written to; the rows stay for the next try.
        """
        self._epochs.commit(checkpoint_id, handles)

    def _take(self, rows: pa.Table, epoch: EpochHandle) -> None:
        own = incarnation_of(epoch.piece.file)
        self._producers.write(rows, epoch, own if self._authority is None else self._authority)

    def settle(self, restored: SinkSnapshot | None, retained: Sequence[SinkSnapshot], incarnation: int) -> None:
        """See ``Committer.settle``.  What is in the topic stays: nothing can be taken out of it."""
        self.settle_subtasks(restored, retained, incarnation, None)

    def settle_subtasks(
        self,
        restored: SinkSnapshot | None,
        retained: Sequence[SinkSnapshot],
        incarnation: int,
        subtasks: Container[int] | None,
    ) -> None:
        """See ``SubtaskCommitter``; without ``subtasks``, all of them."""
        self._authority = incarnation
        try:
            self._producers.fence(incarnation, subtasks)
            self._epochs.settle_subtasks(restored, retained, incarnation, subtasks)
        finally:
            self._authority = None
            self._producers.close()

    def retire(self, retired: SinkSnapshot, retained: Sequence[SinkSnapshot]) -> None:
        """See ``Committer.retire``."""
        self._epochs.retire(retired, retained)

    def finish(self, incarnation: int) -> None:
        """See ``Committer.finish``.  The records stay, as long as the cluster keeps them."""
        self._epochs.finish(incarnation)
        self._producers.close()
