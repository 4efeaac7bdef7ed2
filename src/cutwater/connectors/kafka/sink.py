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
from cutwater.connectors.foreach_batch import EpochSink, EpochWriter
from cutwater.connectors.kafka.cluster import KafkaCluster
from cutwater.connectors.kafka.committer import KafkaCommitter, TransactionalProducers
from cutwater.connectors.kafka.markers import Markers
from cutwater.connectors.kafka.producer import Producer, messages_of
from cutwater.connectors.kafka.topics import Topics
from cutwater.connectors.messages.encoders import ValueEncoder, keys_of
from cutwater.data.changes import OP, added_rows
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
        parallelism: number of subtasks; ``None``: the job's.
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

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_producers": {}}

    def applying(self, changes: tuple[str, ...]) -> KafkaSink:
        """The same sink for an updating stream; appended, its rows stay a log of the changes, with their marks.

        Raises:
            BuildError: rows that are not told apart by the key of the upsert would replace each other.
        """
        if self.mode == "append":
            return self
        if changes and set(changes) <= set(self.key):
            return replace(self, changes=changes)
        known = f"are told apart by {', '.join(changes)}" if changes else "have no known key"
        raise BuildError(
            f"the rows of the updating stream {known}, but the topic keeps one message for each {', '.join(self.key)}",
            hint=f"Write key=[{', '.join(map(repr, changes))}]."
            if changes
            else "Say which columns tell its rows apart: .with_changes('column').",
        )

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
        area = self.area(ctx.job_uid, ctx.step)
        return _StagingWriter(area, plain_schema(schema), ctx, self._of(ctx.job_uid, ctx.step), self._refuse)

    def committer(self, schema: pa.Schema, job_uid: str, step: str) -> Committer:
        if self.guarantee == "at-least-once":
            return _WrittenAtOnce()
        return KafkaCommitter(self.area(job_uid, step), self._of(job_uid, step))

    def _of(self, job_uid: str, step: str) -> TransactionalProducers:
        if (job_uid, step) not in self._producers:
            markers = Markers(self.cluster, self.topic, job_uid, step)
            options = {**_WRITING, "transaction_timeout_ms": _TRANSACTION_MS}

            def make(id: str) -> Producer:
                return Producer(self.cluster, self.topic, {**options, "transactional_id": id})

            self._producers[job_uid, step] = TransactionalProducers(markers, make, self.send)
        return self._producers[job_uid, step]

    def send(self, producer: Producer, rows: pa.Table) -> object:
        """Hand rows to a producer; what is returned must stay in memory until it has flushed.

        Raises:
            DataError: a row that cannot be written.
            StorageError: the library refuses one.
        """
        gone = None
        if self.changes is not None:
            kept = _compute.not_equal(rows.column(OP), "-U")  # its +U follows
            rows = rows.filter(kept).combine_chunks()
            marks = [added_rows(batch) for batch in rows.to_batches()]
            gone = ~np.concatenate(marks or [np.zeros(0, np.bool_)])
        if not rows.num_rows:
            return None
        values = self.encoder.encode(rows.select(self._values(rows.schema).names))
        keys = keys_of(rows, self.key) if self.key else None
        producer.send(messages_of(values, gone, keys))
        return values, keys

    def _refuse(self, rows: pa.Table) -> None:
        self.encoder.refuse(rows.select(self._values(rows.schema).names))

    def _values(self, schema: pa.Schema) -> pa.Schema:
        """The columns that values hold: the mark of a change is none in an upsert."""
        return pa.schema([field for field in schema if self.changes is None or field.name != OP])


class _StagingWriter(EpochWriter):
    """Stages rows that can be written, and announces itself before any of them may be committed."""

    def __init__(
        self,
        area: Any,
        schema: pa.Schema,
        ctx: SinkContext,
        producers: TransactionalProducers,
        refuse: Callable[[pa.Table], None],
    ) -> None:
        super().__init__(area, schema, ctx)
        self._producers, self._refuse = producers, refuse

    def write(self, batch: pa.RecordBatch) -> None:
        plain = cast_batch(batch, self._schema)
        self._refuse(pa.Table.from_batches([plain]))
        super().write(plain)

    def pre_commit(self, checkpoint_id: int, final: bool) -> Callable[[], PreCommit]:
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
        self._kept: list[object] = []
        self._kept_bytes = 0

    def write(self, batch: pa.RecordBatch) -> None:
        rows = pa.Table.from_batches([cast_batch(batch, self._schema)])
        self._kept.append(self._sink.send(self._producer, rows))
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
