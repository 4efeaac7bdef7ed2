"""A topic as a sink: exactly once by transactions, at least once as rows come, or the table of an updating stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute

from cutwater.connectors.base import Committer, Guarantee, Json, PreCommit, SinkContext, SinkWriter
from cutwater.connectors.discard import NothingToCommit
from cutwater.connectors.files.schemas import cast_batch, plain_schema
from cutwater.connectors.foreach_batch import EpochSink, EpochWriter, check_upsert_key
from cutwater.connectors.kafka.cluster import KafkaCluster
from cutwater.connectors.kafka.commit_records import CommitRecords
from cutwater.connectors.kafka.committer import KafkaCommitter, TransactionalProducers
from cutwater.connectors.kafka.producer import Producer, messages_of
from cutwater.connectors.kafka.topics import Topics
from cutwater.connectors.messages.encoders import ValueEncoder, bytes_of, keys_of
from cutwater.data.changes import OP, added_rows
from cutwater.data.words import valid_rows
from cutwater.errors import BuildError, ConfigError, did_you_mean

_compute: Any = pyarrow.compute
_WRITING: dict[str, object] = {
    "enable_idempotence": True,
    "partitioner": "murmur2_random",  # Java's choice: rows of a key lie where other programs look for them
    "queue_buffering_max_messages": 2_000_000,
    "queue_buffering_max_kbytes": 1_000_000,
    "linger_ms": 2,
    "compression_type": "lz4",
}
"""What a producer is told where the user says nothing."""
_TRANSACTION_MS = 300_000
_MESSAGES = pa.schema({"key": pa.binary(), "value": pa.binary()})
"""What is staged: messages as they are written."""
_ENCODED_ROWS = 1 << 14
"""Rows that are encoded at once: for fewer a call costs more than they do."""
_KEPT_BYTES, _KEPT_BATCHES = 64 << 20, 4096
"""Rows that the library may still be reading from; then it is waited for."""


@dataclass(frozen=True)
class KafkaSink(EpochSink):
    """Writes rows as messages of one topic.

    Args:
        cluster: where.
        topic: its name; it must exist.
        encoder: of the values.
        key: columns of the key; none: messages without keys.
        mode: ``"append"``: a message for each row.  ``"upsert"``: of an updating stream, the newest row of each key,
            and a message without value for a key that leaves.
        guarantee: ``"exactly-once"``: messages become visible, to readers of committed ones, with the checkpoint;
            ``"at-least-once"``: at once, and after a failure some of them again.
        parallelism: number of subtasks; ``None``: the job's, and 1 for an upsert.
        changes: of an upsert, the columns that tell the stream's rows apart; given through ``applying``.

    Raises:
        ConfigError: settings that contradict each other.
    """

    cluster: KafkaCluster
    topic: str
    encoder: ValueEncoder
    key: tuple[str, ...] = ()
    mode: Literal["append", "upsert"] = "append"
    guarantee: Guarantee = "exactly-once"
    parallelism: int | None = None
    changes: tuple[str, ...] | None = None
    _producers: dict[tuple[str, str], TransactionalProducers] = field(
        default_factory=dict[tuple[str, str], TransactionalProducers], init=False, repr=False, compare=False
    )
    """Of this process: a writer and its committer use the same."""

    def __post_init__(self) -> None:
        if not self.topic:
            raise ConfigError("a kafka sink needs the name of a topic, got an empty one")
        for name, known in (("mode", ("append", "upsert")), ("guarantee", ("exactly-once", "at-least-once"))):
            if getattr(self, name) not in known:
                raise ConfigError(f"kafka: {name} is {' or '.join(map(repr, known))}, got {getattr(self, name)!r}")
        if self.mode == "upsert" and not self.key:
            raise ConfigError("an upsert needs a key", hint="Name the columns that tell rows apart: key=['id'].")
        if self.mode == "upsert" and self.parallelism not in (None, 1):
            raise ConfigError(
                f"an upsert with parallelism {self.parallelism} would write rows of one key in any order",
                hint="Leave parallelism out, or append.",
            )
        if self.mode == "upsert":
            object.__setattr__(self, "parallelism", 1)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_producers": {}}

    @property
    def commits_in_background(self) -> bool:
        """See ``SinkHooks``."""
        return self.guarantee == "exactly-once"

    def applying(self, changes: tuple[str, ...]) -> KafkaSink:
        """The same sink for an updating stream; appended, its rows stay a log of the changes, with their marks.

        Raises:
            BuildError: rows that are not told apart by the key of the upsert would replace each other.
        """
        if self.mode == "append":
            return self
        check_upsert_key(changes, self.key, f"the topic keeps one message for each {', '.join(self.key)}")
        return replace(self, changes=changes)

    def check(self, schema: pa.Schema) -> None:
        """See ``Sink.check``.

        Raises:
            BuildError: the rows cannot be written so, or there is no such topic.
            StorageError: the cluster does not answer.
        """
        for name in self.key:
            if name not in schema.names:
                raise BuildError(f"no such key column {name!r}", hint=did_you_mean(name, schema.names))
        self.encoder.check(self._values(plain_schema(schema)))
        Topics(self.cluster).named([self.topic])

    def writer(self, schema: pa.Schema, ctx: SinkContext, restored: list[Json]) -> SinkWriter:
        if self.guarantee == "at-least-once":
            return _DirectWriter(self, plain_schema(schema), self.cluster)
        return _StagingWriter(self, plain_schema(schema), ctx, self._of(ctx.job_uid, ctx.step))

    def committer(self, schema: pa.Schema, job_uid: str, step: str) -> Committer:
        if self.guarantee == "at-least-once":
            return _WrittenAtOnce()
        return KafkaCommitter(self.area(job_uid, step), self._of(job_uid, step))

    def _of(self, job_uid: str, step: str) -> TransactionalProducers:
        if (job_uid, step) not in self._producers:
            records = CommitRecords(self.cluster, self.topic, job_uid, step)
            options = {**_WRITING, "transaction_timeout_ms": _TRANSACTION_MS}

            def make(id: str) -> Producer:
                return Producer(self.cluster, self.topic, {**options, "transactional_id": id})

            self._producers[job_uid, step] = TransactionalProducers(records, make, self.send)
        return self._producers[job_uid, step]

    def messages(self, rows: pa.Table) -> pa.RecordBatch:
        """Rows as they are written: their keys, and their values with the encoder's gap; null for a key that leaves.

        Raises:
            DataError: a row that cannot be written.
        """
        gone = None
        if self.changes is not None:
            rows = rows.filter(_compute.not_equal(rows.column(OP), "-U")).combine_chunks()  # its +U follows
            marks = [added_rows(batch) for batch in rows.to_batches()]
            gone = ~np.concatenate(marks or [np.zeros(0, np.bool_)])
        values = self.encoder.encode(rows.select(self._values(rows.schema).names))
        keys = keys_of(rows, self.key) if self.key else pa.nulls(rows.num_rows, pa.binary())
        return pa.record_batch([keys, values.column(gone)], schema=_MESSAGES)

    def send(self, producer: Producer, messages: pa.Table) -> None:
        """Hand messages to a producer; they must stay in memory until it has flushed.

        Raises:
            StorageError: the library refuses one.
        """
        for batch in messages.to_batches():
            keys, column = batch.columns
            values, there = bytes_of(column), valid_rows(column)
            values = values._replace(lengths=values.lengths - self.encoder.gap)
            producer.send(messages_of(values, None if there is None else ~there, keys if self.key else None))

    def _values(self, schema: pa.Schema) -> pa.Schema:
        """The columns that values hold: the mark of a change is none in an upsert."""
        return pa.schema([field for field in schema if self.changes is None or field.name != OP])


class _Encoding:
    """Joins rows until they are worth a call of the encoder.

    Args:
        sink: of which they become messages.
        schema: of the rows, with plain types.
    """

    def __init__(self, sink: KafkaSink, schema: pa.Schema) -> None:
        self._sink, self._schema = sink, schema
        self._rows: list[pa.RecordBatch] = []
        self._count = 0

    def add(self, batch: pa.RecordBatch) -> bool:
        """Take rows; True if they are enough."""
        self._rows.append(cast_batch(batch, self._schema))
        self._count += batch.num_rows
        return self._count >= _ENCODED_ROWS

    def messages(self) -> pa.RecordBatch | None:
        """All rows as messages, if there are any.

        Raises:
            DataError: a row that cannot be written.
        """
        if not self._count:
            return None
        rows = pa.Table.from_batches(self._rows, self._schema).combine_chunks()
        self._rows, self._count = [], 0
        return self._sink.messages(rows)


class _StagingWriter(EpochWriter):
    """Stages messages, and announces itself before any of them may be committed.

    Rows are encoded before a checkpoint has them: one that cannot be written is found while it can still be left out.
    """

    def __init__(self, sink: KafkaSink, schema: pa.Schema, ctx: SinkContext, producers: TransactionalProducers) -> None:
        super().__init__(sink.area(ctx.job_uid, ctx.step), _MESSAGES, ctx)
        self._encoding, self._producers = _Encoding(sink, schema), producers

    def write(self, batch: pa.RecordBatch) -> None:
        if self._encoding.add(batch):
            self._stage()

    def _stage(self) -> None:
        messages = self._encoding.messages()
        if messages is not None:
            super().write(messages)

    def pre_commit(self, checkpoint_id: int, final: bool) -> Callable[[], PreCommit]:
        self._stage()
        make = super().pre_commit(checkpoint_id, final)

        def snapshot() -> PreCommit:
            made = make()
            if any(handle.get("type") == "epoch" for handle in made.handles):
                self._producers.announce(self._ctx.subtask, self._ctx.incarnation)
            return made

        return snapshot

    def close(self) -> None:
        super().close()
        self._producers.close()


class _DirectWriter:
    """Sends rows as they come; a checkpoint waits until they are written."""

    def __init__(self, sink: KafkaSink, schema: pa.Schema, cluster: KafkaCluster) -> None:
        self._sink, self._schema = sink, schema
        self._producer = Producer(cluster, sink.topic, _WRITING)
        self._kept: list[pa.Table] = []
        self._kept_bytes = 0

    def write(self, batch: pa.RecordBatch) -> None:
        rows = pa.Table.from_batches([cast_batch(batch, self._schema)])
        messages = pa.Table.from_batches([self._sink.messages(rows)])
        self._sink.send(self._producer, messages)
        self._kept.append(messages)
        self._kept_bytes += batch.nbytes
        self._producer.check()
        if self._kept_bytes >= _KEPT_BYTES or len(self._kept) >= _KEPT_BATCHES:
            self._flush()

    def pre_commit(self, checkpoint_id: int, final: bool) -> Callable[[], PreCommit]:
        self._flush()  # here, and not behind the barrier: rows that follow would make it wait for ever
        return PreCommit

    def _flush(self) -> None:
        self._producer.flush()
        self._kept.clear()
        self._kept_bytes = 0

    def roll(self) -> None:
        """Every ``pre_commit`` leaves nothing behind."""

    def close(self) -> None:
        self._producer.close()


class _WrittenAtOnce(NothingToCommit):
    """Of rows that are in the topic before anything is committed."""

    takes_back = False
