"""Which checkpoints are in a topic, as the topic's own cluster says.

With the rows of an epoch goes a *commit record*, in the same transaction: an offset of a consumer group that nobody
consumes with.  So either both are there or neither is.  Each subtask has a group of its own, since a broker takes
offsets for partitions that exist only; the record is that of the first one.  The offset is the id of the checkpoint,
the text beside it says who may still write.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from cutwater.connectors.kafka.cluster import KafkaCluster, asked, client_library
from cutwater.data.decoding import prepare
from cutwater.errors import StorageError

_TIMEOUT_S = 30.0


class CommitRecord(msgspec.Struct, frozen=True):
    """The newest checkpoint of a subtask that is in the topic; 0: none is.

    Whoever has a smaller incarnation than the one that wrote it last may not write any more.
    """

    checkpoint_id: int
    incarnation: int

    def admits(self, checkpoint_id: int, incarnation: int) -> bool:
        """Whether rows may be written: they are not in, and nobody has gone back behind them since they were staged.

        >>> record = CommitRecord(checkpoint_id=7, incarnation=3)
        >>> record.admits(8, 3), record.admits(7, 3), record.admits(8, 2)
        (True, False, False)
        """
        return checkpoint_id > self.checkpoint_id and incarnation >= self.incarnation

    def text(self) -> str:
        """What goes along with the offset."""
        return msgspec.json.encode({"incarnation": self.incarnation}).decode()


class _Text(msgspec.Struct):
    incarnation: int


prepare(_Text)


@dataclass(frozen=True)
class CommitRecords:
    """The records of one write step of one job.

    Args:
        cluster, topic: of the rows.
        job_uid, step: whose.
    """

    cluster: KafkaCluster
    topic: str
    job_uid: str
    step: str

    def group(self, subtask: int) -> str:
        """The group in whose offsets the record of a subtask lies; also the transactional id of its producer."""
        return f"{self._prefix}{subtask}"

    @property
    def _prefix(self) -> str:
        return f"cutwater-{self.job_uid}-{self.step}-"

    def of(self, subtask: int) -> CommitRecord | None:
        """That of a subtask, if there is one; waits for a transaction that is being decided.

        Raises:
            StorageError: the cluster does not answer, or says what no sink has written.
        """
        kafka = client_library()
        group = self.group(subtask)
        options = {"group.id": group, "enable.auto.commit": False, "isolation.level": "read_committed"}
        consumer = kafka.Consumer({**self.cluster.conf(), **options})
        try:
            asks = [kafka.TopicPartition(self.topic, 0)]
            [place] = asked(lambda: consumer.committed(asks, timeout=_TIMEOUT_S), _TIMEOUT_S)
        except kafka.KafkaException as raised:
            raise self._unknown(raised) from None
        finally:
            consumer.close()
        return None if place.offset < 0 else _record_of(group, place.offset, place.metadata)

    def subtasks(self) -> list[int]:
        """Those that have a record: all that have ever staged rows.

        Raises:
            StorageError: as ``of``.
        """
        kafka, administration = client_library(), client_library("confluent_kafka.admin")
        admin = administration.AdminClient(self.cluster.conf())
        try:
            listed = asked(lambda: admin.list_consumer_groups(request_timeout=_TIMEOUT_S).result(), _TIMEOUT_S)
        except kafka.KafkaException as raised:
            raise self._unknown(raised) from None
        if listed.errors:
            raise self._unknown(listed.errors[0])
        names = (group.group_id for group in listed.valid)
        ends = (name.removeprefix(self._prefix) for name in names if name.startswith(self._prefix))
        return sorted(int(end) for end in ends if end.isdecimal())

    def _unknown(self, raised: Exception) -> StorageError:
        return StorageError(
            f"kafka at {self.cluster.servers} does not say which checkpoints are in topic {self.topic!r}: "
            f"{self.cluster.hidden(raised.args[0].str())}",
            hint="Once it does, the job goes on from its last checkpoint.",
        )


def _record_of(group: str, checkpoint_id: int, text: str | None) -> CommitRecord:
    try:
        return CommitRecord(checkpoint_id, msgspec.json.decode(text or "", type=_Text).incarnation)
    except msgspec.DecodeError as error:
        raise StorageError(
            f"the offsets of kafka group {group!r} are no records of this job: {error}",
            hint="No consumer may use this group. Delete it if the job is to begin anew.",
        ) from None
