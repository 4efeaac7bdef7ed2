"""Topics of Kafka as a replayable source: a partition is a split, an offset a position."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Literal, TypeAlias

import pyarrow as pa

from cutwater.config import parse_duration_ms
from cutwater.connectors.base import BadRows, Json, SourceContext, Split, check_rate
from cutwater.connectors.kafka.cluster import PATIENCE_S, KafkaCluster
from cutwater.connectors.kafka.fetched import HEADERS, TIME
from cutwater.connectors.kafka.reader import Columns, KafkaReader, SharedConsumer
from cutwater.connectors.kafka.topics import Topic, Topics, given_offsets
from cutwater.connectors.messages.base import MessageFormat
from cutwater.errors import BuildError, ConfigError, DataError, StorageError, did_you_mean

Start: TypeAlias = Literal["earliest", "latest"] | datetime | Mapping[str, Mapping[int, int]]

_TYPES: dict[str, pa.DataType] = {
    "timestamp": TIME,
    "topic": pa.string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
    "headers": HEADERS,
}
_FETCHING: dict[str, object] = {
    "enable_auto_commit": False,
    "enable_auto_offset_store": False,
    "enable_partition_eof": True,
    "isolation_level": "read_committed",
    "fetch_wait_max_ms": 50,
    "fetch_queue_backoff_ms": 2,  # the library's 1000 makes a reader that has caught up with its queue wait
    "queued_min_messages": 200_000,
    "queued_max_messages_kbytes": 32_768,
    "allow_auto_create_topics": False,
}
"""What a consumer is told where the user says nothing."""


class KafkaSource:
    """Messages of topics, partition by partition.

    Offsets lie in the job's snapshots, nowhere else.  Where the first ones begin is asked once, in the driver, and goes
    with the split: a restart before the first checkpoint begins at the same place.  A partition that is found later
    begins at its first message.

    Args:
        cluster: where.
        topics: names; or one regular expression, if ``pattern``.
        format: of the values.
        metadata: columns besides: what they are (``Columns.KINDS``) and their names.
        key_type: of the column for keys: ``"string"``, which must be UTF-8, or ``"binary"``.
        start: where to begin: ``"earliest"``, ``"latest"``, a time (first message at or after it), or offsets by topic
            and partition.
        until: ``"latest"``: end where the partitions ended at the start: a bounded source; ``None``: never.
        on_lost: an offset that the broker does not have any more fails the job, or it goes on at the ``"earliest"``.
        bad_rows: a message that cannot be decoded fails the job, or goes to the dead letters.
        rate: rows per second over all subtasks.
        discover_interval_ms: between two looks for new partitions and topics.

    Raises:
        ConfigError: a setting that makes no sense.
        BuildError: a column's name comes twice.
    """

    replayable = True
    interleave = True
    knows_lag = True

    def __init__(
        self,
        cluster: KafkaCluster,
        topics: Sequence[str],
        format: MessageFormat,
        *,
        pattern: bool = False,
        metadata: Mapping[str, str] | None = None,
        key_type: Literal["string", "binary"] = "string",
        start: Start = "earliest",
        until: Literal["latest"] | None = None,
        on_lost: Literal["fail", "earliest"] = "fail",
        bad_rows: BadRows = "fail",
        rate: float | None = None,
        discover_interval_ms: float | str | timedelta = 10_000.0,
    ) -> None:
        check_rate(rate)
        if not topics or not all(topics):
            raise ConfigError("kafka needs the name of a topic", hint="Write cw.kafka('host:9092', 'clicks', ...).")
        for name, value, known in (
            ("until", until, ("latest", None)),
            ("on_lost", on_lost, ("fail", "earliest")),
            ("bad_rows", bad_rows, ("fail", "dead_letter")),
            ("key_type", key_type, ("string", "binary")),
        ):
            if value not in known:
                raise ConfigError(f"kafka: {name} is {' or '.join(map(repr, known))}, got {value!r}")
        if not isinstance(start, datetime | Mapping) and start not in ("earliest", "latest"):
            raise ConfigError(
                f"kafka: start {start!r} is unknown",
                hint="'earliest', 'latest', a datetime, or offsets: {'clicks': {0: 17}}.",
            )
        if isinstance(start, datetime) and start.tzinfo is None:
            raise ConfigError("kafka: start needs a zone", hint="Write datetime(2026, 1, 31, tzinfo=timezone.utc).")
        self._cluster, self._topics, self._pattern = cluster, tuple(topics), pattern
        self._format = format
        self._start, self._until, self._on_lost = start, until, on_lost
        self.bad_rows: BadRows = bad_rows
        self.rate = rate
        self.discover_interval_ms = parse_duration_ms(discover_interval_ms, name="discover_interval_ms")
        key = pa.string() if key_type == "string" else pa.binary()
        self._columns = Columns(_checked(metadata or {}), key)
        self.schema = self._with_columns(format.schema)
        self._read: frozenset[str] | None = None
        self._dictionaries = False
        self._looked = False
        """A first look has said where to begin; what is found from then on came later."""
        self._answered_s = 0.0
        self._known: dict[str, Split] = {}
        self._asked: Topics | None = None
        self._consumer: SharedConsumer | None = None

    def __repr__(self) -> str:
        return f"KafkaSource({self._cluster.servers!r}, {', '.join(self._topics)!r}, {self._format.name!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_looked": False, "_known": {}, "_asked": None, "_consumer": None}

    def _with_columns(self, values: pa.Schema) -> pa.Schema:
        schema = values
        for kind, name in self._columns.names.items():
            if name in schema.names:
                raise BuildError(
                    f"kafka: column {name!r} comes twice, from the messages' values and as their {kind}",
                    hint=f"Give it another name: metadata={{{kind!r}: 'kafka_{kind}'}}.",
                )
            schema = schema.append(pa.field(name, _TYPES.get(kind, self._columns.key_type)))
        return schema

    @property
    def bounded(self) -> bool:
        return self._until is not None

    @property
    def changes(self) -> tuple[str, ...] | None:
        """See ``SourceHooks.changes``."""
        return getattr(self._format, "changes", None)

    @property
    def partial_changes(self) -> bool:
        """See ``SourceHooks.partial_changes``."""
        return getattr(self._format, "partial_changes", False)

    def with_bad_rows(self, bad_rows: BadRows) -> KafkaSource:
        """A copy that fails at bad messages or diverts them."""
        return self._copy(bad_rows=bad_rows)

    def reading(self, columns: frozenset[str] | None, *, dictionaries: bool = False) -> KafkaSource:
        """A copy of which nobody reads other columns than these."""
        return self._copy(_read=columns, _dictionaries=dictionaries)

    def _copy(self, **changed: object) -> KafkaSource:
        copy = KafkaSource.__new__(type(self))
        copy.__dict__.update(self.__getstate__(), **changed)
        return copy

    # ------------------------------------------------------------------------------------------------ in the driver

    def discover(self) -> list[Split]:
        """One split for each partition; those that are known while no broker answers, as long as readers wait for one.

        Raises:
            BuildError: a topic does not exist.
            StorageError: the cluster does not answer.
            DataError: a topic was deleted and made again.
        """
        try:
            self._look()
        except StorageError:
            now_s = time.monotonic()
            if not self._known or now_s - self._answered_s > PATIENCE_S:
                raise
        else:
            self._answered_s = time.monotonic()
        return list(self._known.values())

    def _look(self) -> None:
        asked = self._cluster_asked
        topics = asked.matching(self._topics[0]) if self._pattern else asked.named(self._topics)
        if self._pattern and not topics and self.bounded:
            raise BuildError(f"kafka: no topic matches {self._topics[0]!r}")
        fresh = [(t, p) for t in topics for p in range(t.partitions) if _split_id(t.name, p) not in self._known]
        self._check_same(topics)
        begins = self._begins(asked, [(topic.name, partition) for topic, partition in fresh])
        self._looked = True
        places = list(begins)
        ends = asked.offsets(places, "latest") if self._until else {}
        for topic, partition in fresh:
            place = (topic.name, partition)
            data = {"topic": topic.name, "partition": partition, "topic_id": topic.id, "start": begins[place]}
            if place in ends:
                data["end"] = ends[place]
            self._known[_split_id(*place)] = Split(_split_id(*place), data)

    @property
    def _cluster_asked(self) -> Topics:
        if self._asked is None:
            self._asked = Topics(self._cluster)
        return self._asked

    def _begins(self, asked: Topics, places: Sequence[tuple[str, int]]) -> dict[tuple[str, int], int]:
        """Where the reading of partitions begins."""
        if self._looked:
            return asked.offsets(places, "earliest")
        if not isinstance(self._start, Mapping):
            return asked.offsets(places, self._start)
        given = given_offsets(self._start)
        unknown = [place for place in given if place not in places]
        if unknown:
            raise BuildError(f"kafka: start names {unknown[0][0]}-{unknown[0][1]}, which there is not")
        return {**asked.offsets([place for place in places if place not in given], "earliest"), **given}

    def _check_same(self, topics: Sequence[Topic]) -> None:
        ids = {topic.name: topic.id for topic in topics}
        for split in self._known.values():
            name = split.data["topic"]
            if ids.get(name, split.data["topic_id"]) != split.data["topic_id"]:
                raise _made_anew(name)

    def goes_on(self, known: Mapping[str, Json], listed: list[Split]) -> list[Split]:
        """Partitions that came to be since the snapshot begin at their first message, whatever ``start`` says.

        Raises:
            DataError: a topic was deleted and made again.
        """
        for split in listed:
            if split.id in known and known[split.id]["topic_id"] != split.data["topic_id"]:
                raise _made_anew(split.data["topic"])
        places = [_place(split) for split in listed if split.id not in known]
        begins = self._cluster_asked.offsets(places, "earliest")
        for split in listed:
            if _place(split) in begins:
                self._known[split.id] = Split(split.id, {**split.data, "start": begins[_place(split)]})
        return [self._known.get(split.id, split) for split in listed]

    # ------------------------------------------------------------------------------------------------- in a worker

    def open(self, split: Split, position: Json | None, ctx: SourceContext) -> KafkaReader:
        """A reader of a partition.

        Raises:
            DataError: it, or the offset, is gone.
            StorageError: it cannot be read.
        """
        if self._consumer is None:
            reset = {"fail": "error", "earliest": "earliest"}[self._on_lost]
            self._consumer = SharedConsumer(self._cluster, {**_FETCHING, "auto_offset_reset": reset})
        data = split.data
        columns = self._read
        if columns is not None:
            columns = frozenset(columns & set(self._format.schema.names))
        decoder = self._format.decoder(columns, dictionaries=self._dictionaries)
        return KafkaReader(
            data["topic"],
            data["partition"],
            data["start"] if position is None else position,
            data.get("end"),
            self._consumer,
            decoder,
            self._columns,
            self.schema,
            ctx if self.bad_rows == "dead_letter" else None,
        )


def _split_id(topic: str, partition: int) -> str:
    return f"{topic}-{partition}"


def _place(split: Split) -> tuple[str, int]:
    return split.data["topic"], split.data["partition"]


def _made_anew(topic: str) -> DataError:
    return DataError(
        f"kafka topic {topic!r} was deleted and made again: the job's offsets are those of the old one",
        hint="Start a job of another name on the new topic.",
    )


def _checked(metadata: Mapping[str, str]) -> dict[str, str]:
    for kind in metadata:
        if kind not in Columns.KINDS:
            raise ConfigError(f"kafka: messages have no {kind!r}", hint=did_you_mean(kind, Columns.KINDS))
    return dict(metadata)
