"""What a client of Kafka gives its readers, whichever client it is."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.connectors.messages.base import Values

HEADERS = pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))
TIME = pa.timestamp("us", "UTC")


class Wanted(NamedTuple):
    """What is taken out of messages besides their values and offsets."""

    gap: int
    """Of the values, see ``Values``."""
    keys: bool = False
    times: bool = False
    headers: bool = False


class Fetched(NamedTuple):
    """Messages of one partition, in their order."""

    values: Values
    offsets: npt.NDArray[np.int64]
    keys: pa.Array | None
    """Of binary, if they are wanted."""
    times: pa.Array | None
    """Of ``TIME``, if they are wanted; null where a message has none."""
    headers: pa.Array | None
    """Of ``HEADERS``, if they are wanted."""


class PartitionError(Exception):
    """A partition gives nothing more: the code of librdkafka and its text."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text


class PartitionQueue(Protocol):
    """Messages of one partition from an offset on, as they come."""

    next_offset: int
    """Of the next message to be taken, at least: there are gaps where transactions end and topics are compacted."""

    def take(self, most: int, wanted: Wanted) -> Fetched | None:
        """Messages that are there now, at most so many; ``None`` if there are none.  Does not wait.

        Raises:
            PartitionError: the broker refuses.
        """
        ...

    @property
    def end_offset(self) -> int | None:
        """Of the next message that will be written, as far as is known; ``None``: unknown."""
        ...

    def close(self) -> None: ...


class Consumer(Protocol):
    """A client that reads some partitions, from one thread."""

    def open(self, topic: str, partition: int, offset: int) -> PartitionQueue:
        """Begin to fetch a partition.

        Raises:
            PartitionError: it cannot.
        """
        ...

    def errors(self) -> list[tuple[int, str, bool]]:
        """What happened to the connection since this was asked last: code, text, and whether nothing goes any more."""
        ...

    def close(self) -> None: ...
