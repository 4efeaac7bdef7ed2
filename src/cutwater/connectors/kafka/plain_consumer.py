"""Reads partitions through the ordinary Python client, where its library cannot be called by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from cutwater.connectors.kafka.cluster import END_OF_PARTITION, client_library
from cutwater.connectors.kafka.fetched import HEADERS, TIME, Fetched, PartitionError, Wanted
from cutwater.connectors.messages.base import Values

_MOST_MESSAGES = 10_000


class PlainConsumer:
    """A client for each partition; several times slower than ``NativeConsumer``, with the same results.

    Args:
        options: of each client, by librdkafka's names.

    Raises:
        ConfigError: an option that the library refuses.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = dict(options)
        self._errors: list[tuple[int, str, bool]] = []

    def open(self, topic: str, partition: int, offset: int) -> PlainQueue:
        """See ``Consumer``."""
        return PlainQueue(self._options, topic, partition, offset, self._errors)

    def errors(self) -> list[tuple[int, str, bool]]:
        """See ``Consumer``."""
        found = list(self._errors)
        self._errors.clear()
        return found

    def close(self) -> None:
        """Its queues must be closed before."""


class PlainQueue:
    """See ``PartitionQueue``."""

    def __init__(
        self, options: Mapping[str, str], topic: str, partition: int, offset: int, errors: list[tuple[int, str, bool]]
    ) -> None:
        kafka = client_library()

        def report(error: Any) -> None:
            errors.append((error.code(), error.str(), error.fatal()))

        self._client: Any = kafka.Consumer({"group.id": "cutwater", **options, "error_cb": report})
        self._place: Any = kafka.TopicPartition(topic, partition, offset)
        self._client.assign([self._place])
        self.next_offset = offset

    def take(self, most: int, wanted: Wanted) -> Fetched | None:
        """See ``PartitionQueue``."""
        rows: list[Any] = []
        for message in self._client.consume(min(most, _MOST_MESSAGES), 0):
            error = message.error()
            if error is None:
                rows.append(message)
            elif error.code() == END_OF_PARTITION:
                self.next_offset = max(self.next_offset, message.offset())
            else:
                raise PartitionError(error.code(), error.str())
        if not rows:
            return None
        self.next_offset = rows[-1].offset() + 1
        stamps = [message.timestamp()[1] for message in rows] if wanted.times else []
        return Fetched(
            Values.of([message.value() for message in rows], wanted.gap),
            np.array([message.offset() for message in rows], np.int64),
            pa.array([message.key() for message in rows], pa.binary()) if wanted.keys else None,
            pa.array([None if ms < 0 else ms * 1000 for ms in stamps], TIME) if wanted.times else None,
            pa.array([_headers(message) for message in rows], HEADERS) if wanted.headers else None,
        )

    @property
    def end_offset(self) -> int | None:
        """See ``PartitionQueue``."""
        _, high = self._client.get_watermark_offsets(self._place, cached=True)
        return high if high >= 0 else None

    def close(self) -> None:
        """Stop fetching."""
        self._client.close()


def _headers(message: Any) -> list[dict[str, object]] | None:
    found = message.headers()
    return None if found is None else [{"key": key, "value": value} for key, value in found]
