"""Reads one partition of a topic as a split."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.connectors.base import Json, SourceContext
from cutwater.connectors.kafka.cluster import ALL_BROKERS_DOWN, PATIENCE_S, REFUSED, KafkaCluster, client_library
from cutwater.connectors.kafka.fetched import Consumer, Fetched, PartitionError, PartitionQueue, Wanted
from cutwater.connectors.kafka.librdkafka import library
from cutwater.connectors.kafka.native_consumer import NativeConsumer
from cutwater.connectors.kafka.plain_consumer import PlainConsumer
from cutwater.connectors.messages.base import ValueDecoder
from cutwater.connectors.messages.raw import NOT_UTF8, as_texts
from cutwater.data.words import batch_of
from cutwater.errors import DataError, StorageError

_OUT_OF_RANGE, _NO_RESET = 1, -140
_GONE = (3, -188, -190)
"""Unknown topic or partition, as the broker and the library say it."""
_MAX_RAW = 10_000


class Columns(NamedTuple):
    """What a row has besides what its value holds: the name of the column by what it is."""

    names: Mapping[str, str]
    """From ``KINDS`` to columns; those that are not wanted are missing."""
    key_type: pa.DataType

    KINDS = ("key", "timestamp", "topic", "partition", "offset", "headers")


class SharedConsumer:
    """The client of a source in one process, and what is wrong with its connection.

    Args:
        cluster: where it connects to.
        options: of librdkafka, besides the cluster's.
    """

    def __init__(self, cluster: KafkaCluster, options: Mapping[str, object]) -> None:
        client_library()
        self._cluster = cluster
        self._options = options
        self._consumer: Consumer | None = None
        self._open = 0
        self._down_since_s: float | None = None

    def open(self, topic: str, partition: int, offset: int) -> PartitionQueue:
        """Begin to fetch a partition.

        Raises:
            ConfigError: an option that the library refuses.
            PartitionError: the partition cannot be fetched.
        """
        if self._consumer is None:
            native, options = library(), self._cluster.conf(**self._options)
            self._consumer = PlainConsumer(options) if native is None else NativeConsumer(native, options)
        self._open += 1
        try:
            return self._consumer.open(topic, partition, offset)
        except BaseException:
            self.closed()
            raise

    def closed(self) -> None:
        """A queue was closed; with the last one the client goes."""
        self._open -= 1
        if not self._open and self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def works(self) -> None:
        """Messages have come."""
        self._down_since_s = None

    def check(self, now_s: float) -> None:
        """Look at what the connection reported.

        Raises:
            StorageError: it is refused, or all brokers have been away for too long.
        """
        assert self._consumer is not None
        for code, text, fatal in self._consumer.errors():
            said = self._cluster.hidden(text)
            if fatal or code in REFUSED:
                raise StorageError(
                    f"kafka at {self._cluster.servers} refuses the connection: {said}",
                    hint="Look at security.protocol, sasl.* and ssl.* in options.",
                )
            if code == ALL_BROKERS_DOWN and self._down_since_s is None:
                self._down_since_s = now_s
        if self._down_since_s is not None and now_s - self._down_since_s > PATIENCE_S:
            raise StorageError(
                f"no broker of kafka at {self._cluster.servers} has answered for {PATIENCE_S:.0f} s",
                hint="Once one does, the job goes on from its last checkpoint.",
            )


class KafkaReader:
    """Position: the offset of the next message.

    Args:
        topic, partition: what it reads.
        position: offset to begin at.
        end: offset to end before; ``None``: it never ends.
        consumer: the client.
        decoder: of the values.
        columns: what rows have besides.
        schema: of the rows.
        divert: takes what cannot be decoded; ``None``: it fails the job.
    """

    def __init__(
        self,
        topic: str,
        partition: int,
        position: int,
        end: int | None,
        consumer: SharedConsumer,
        decoder: ValueDecoder,
        columns: Columns,
        schema: pa.Schema,
        divert: SourceContext | None,
    ) -> None:
        self._topic, self._partition, self._end = topic, partition, end
        self._consumer, self._decoder, self._divert = consumer, decoder, divert
        self._columns, self._schema = columns, schema
        self._wanted = Wanted(decoder.gap, *(kind in columns.names for kind in ("key", "timestamp", "headers")))
        self._last = (position, position)
        self._queue: PartitionQueue | None = None
        self._position = position
        if not self.exhausted:
            self._queue = self._called(lambda: consumer.open(topic, partition, position))

    def read(self, max_rows: int) -> pa.RecordBatch | None:
        """See ``SplitReader``; an empty batch where messages came of which none is a row."""
        queue = self._queue
        if queue is None:
            return None
        fetched = self._called(lambda: queue.take(max_rows, self._wanted))
        if fetched is None:
            self._position = max(self._position, queue.next_offset)
            self._consumer.check(time.monotonic())
            return None
        self._consumer.works()
        if self._end is not None and int(fetched.offsets[-1]) >= self._end:
            fetched = _before(fetched, self._end)
        self._position = queue.next_offset if self._end is None else min(queue.next_offset, self._end)
        if not len(fetched.offsets):
            return None
        self._last = (int(fetched.offsets[0]), int(fetched.offsets[-1]))
        return self._rows(fetched)

    def _rows(self, fetched: Fetched) -> pa.RecordBatch:
        decoded = self._decoder.decode(fetched.values, first_only=self._divert is None)
        bad: dict[int, str] = dict(decoded.bad)
        keys = fetched.keys
        if keys is not None and pa.types.is_string(self._columns.key_type):
            keys, wrong = as_texts(keys)
            bad |= {number: f"the key is {NOT_UTF8}" for number in wrong if number not in bad}
        rows, good = decoded.rows, decoded.good
        if bad:
            self._hand_over(bad, fetched)
            of = np.arange(rows.num_rows, dtype=np.int64) if good is None else good
            keep = ~np.isin(of, np.fromiter(bad, np.int64, len(bad)))
            good = of[keep]
            rows = rows if keep.all() else rows.filter(pa.array(keep))
        return self._with_columns(rows, good, fetched._replace(keys=keys))

    def _with_columns(
        self, rows: pa.RecordBatch, good: npt.NDArray[np.int64] | None, fetched: Fetched
    ) -> pa.RecordBatch:
        count, names = rows.num_rows, self._columns.names
        if not names:
            return rows
        made: dict[str, Any] = {
            "key": fetched.keys,
            "timestamp": fetched.times,
            "offset": pa.array(fetched.offsets) if "offset" in names else None,
            "headers": fetched.headers,
        }
        chosen = None if good is None else pa.array(good)
        columns = list(rows.columns)
        for kind in names:
            if kind in ("topic", "partition"):
                value: Any = self._topic if kind == "topic" else self._partition
                columns.append(pa.repeat(pa.scalar(value, pa.string() if kind == "topic" else pa.int32()), count))
            else:
                columns.append(made[kind] if chosen is None else made[kind].take(chosen))
        return batch_of(columns, self._schema)

    def _hand_over(self, bad: Mapping[int, str], fetched: Fetched) -> None:
        """Divert messages that are no rows.

        Raises:
            DataError: they are not to be diverted.
        """
        for number in sorted(bad):
            value = fetched.values.value(number)
            raw = "" if value is None else value[:_MAX_RAW].decode(errors="backslashreplace")
            offset = int(fetched.offsets[number])
            if self._divert is None:
                shown = raw if len(raw) <= 200 else f"{raw[:200]}..."
                raise DataError(
                    f"{self._name} offset {offset}: {bad[number]}: {shown}",
                    hint="Read with bad_rows='dead_letter' to divert such messages, or correct schema=...",
                )
            self._divert.dead_letter(self._name, offset, bad[number], raw)

    @property
    def position(self) -> Json:
        return self._position

    @property
    def exhausted(self) -> bool:
        return self._end is not None and self._position >= self._end

    @property
    def lag_rows(self) -> int | None:
        """Messages that are still to be read, as far as is known; gaps count as well."""
        end = self._queue.end_offset if self._queue is not None else None
        return None if end is None else max(0, end - self._position)

    @property
    def origin(self) -> str:
        return f"{self._name} offsets {self._last[0]} to {self._last[1]}"

    def close(self) -> None:
        if self._queue is not None:
            self._queue.close()
            self._queue = None
            self._consumer.closed()

    @property
    def _name(self) -> str:
        return f"{self._topic}-{self._partition}"

    def _called(self, call: Any) -> Any:
        try:
            return call()
        except PartitionError as error:
            raise self._told(error) from None

    def _told(self, error: PartitionError) -> DataError | StorageError:
        if error.code in (_NO_RESET, _OUT_OF_RANGE):
            return DataError(
                f"{self._name}: offset {self._position} is not there (any more): {error.text}",
                hint="The topic keeps messages for a shorter time than the job was away, or was made anew. To go on "
                "with what is left, and lose the rest, read with on_lost='earliest'.",
            )
        if error.code in _GONE:
            return DataError(
                f"{self._name} is not there (any more): {error.text}",
                hint="Was the topic deleted? The job's positions are those of the old one.",
            )
        return StorageError(
            f"{self._name}: {error.text}", hint="Once it can be read, the job goes on from its last checkpoint."
        )


def _before(fetched: Fetched, end: int) -> Fetched:
    """The messages before an offset."""
    count = int(np.searchsorted(fetched.offsets, end))
    return Fetched(
        fetched.values.first(count),
        fetched.offsets[:count],
        *(None if column is None else column.slice(0, count) for column in fetched[2:]),
    )
