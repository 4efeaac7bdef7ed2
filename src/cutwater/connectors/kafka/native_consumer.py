"""Reads partitions through librdkafka itself: from its messages to Arrow columns without an object for each."""

from __future__ import annotations

import ctypes as c
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from cutwater.connectors.kafka import message_kernels as kernels
from cutwater.connectors.kafka.cluster import END_OF_PARTITION
from cutwater.connectors.kafka.fetched import HEADERS, TIME, Fetched, PartitionError, Wanted
from cutwater.connectors.kafka.librdkafka import CONSUMER, Client, Library
from cutwater.connectors.messages.base import Values
from cutwater.data.words import new_buffer

_MOST_MESSAGES = 1 << 16
"""Taken from the library at once."""
_MOST_BYTES = 1 << 30
"""Of values that become one batch: offsets in it have 32 bits."""
_measure: Any = kernels.measure
_gather: Any = kernels.gather


def warm_up() -> None:
    """Compile the kernels, over no messages."""
    none = np.zeros(0, np.int64)
    starts, ends, valid = np.empty(0, np.int32), np.zeros(1, np.int32), np.empty(0, np.bool_)
    _measure(none, 0, 0, np.zeros(2, np.int64))
    _gather(none, 0, 0, kernels.VALUE, 0, none.ctypes.data, starts, ends[1:], valid)
    kernels.places(none, 0, 0, none)
    kernels.stamps(none, 0, 0, 0, 0, none)
    kernels.destroy(none, 0, 0, 0)


class NativeConsumer:
    """One client with a queue for each partition.

    Args:
        library: the functions.
        options: of the client, by librdkafka's names.

    Raises:
        ConfigError: an option that the library refuses.
    """

    def __init__(self, library: Library, options: Mapping[str, str]) -> None:
        self.client = Client(library, CONSUMER, options)

    def open(self, topic: str, partition: int, offset: int) -> NativeQueue:
        """See ``Consumer``."""
        return NativeQueue(self.client, topic, partition, offset)

    def errors(self) -> list[tuple[int, str, bool]]:
        """See ``Consumer``."""
        return self.client.errors()

    def close(self) -> None:
        """End it; its queues must be closed before."""
        self.client.close()


class NativeQueue:
    """See ``PartitionQueue``.  Messages that were taken and not yet handed on stay in the library's memory."""

    def __init__(self, client: Client, topic: str, partition: int, offset: int) -> None:
        self._client, self._library = client, client.library
        self._topic, self._name, self._partition = client.topic(topic), topic, partition
        self.next_offset = offset
        self._messages = np.zeros(_MOST_MESSAGES, np.int64)
        self._first = self._stop = 0
        self._sizes = np.zeros(2, np.int64)
        self._open = True
        if self._library.consume_start(self._topic, partition, offset):
            code = self._library.last_error()
            raise PartitionError(code, self._library.said(code))

    def take(self, most: int, wanted: Wanted) -> Fetched | None:
        """See ``PartitionQueue``."""
        if self._first == self._stop:
            self._first, self._stop = 0, max(0, self._consume(min(most, _MOST_MESSAGES)))
        while self._first < self._stop:
            stop = min(self._stop, self._first + most)
            end = int(_measure(self._messages, self._first, stop, self._sizes))
            while self._sizes.max() > _MOST_BYTES and end - self._first > 1:
                end = int(_measure(self._messages, self._first, (self._first + end) // 2, self._sizes))
            if end > self._first:
                return self._taken(end, wanted)
            self._event()
        return None

    def _consume(self, most: int) -> int:
        return self._library.consume_batch(self._topic, self._partition, 0, self._messages.ctypes.data, most)

    def _taken(self, end: int, wanted: Wanted) -> Fetched:
        """The messages up to ``end``, which go back to the library."""
        first, count = self._first, end - self._first
        values = self._gathered(end, kernels.VALUE, int(self._sizes[0]), wanted.gap)
        keys = self._gathered(end, kernels.KEY, int(self._sizes[1]), 0).array() if wanted.keys else None
        offsets = np.empty(count, np.int64)
        kernels.places(self._messages, first, end, offsets)
        times = self._times(end) if wanted.times else None
        headers = self._headers(end) if wanted.headers else None
        kernels.destroy(self._messages, first, end, self._library.address("message_destroy"))
        self._first = end
        self.next_offset = int(offsets[-1]) + 1
        return Fetched(values, offsets, keys, times, headers)

    def _gathered(self, end: int, where: int, size: int, gap: int) -> Values:
        count = end - self._first
        data = pa.allocate_buffer(size + gap * count)
        starts, ends = np.empty(count, np.int32), np.zeros(count + 1, np.int32)
        valid = np.empty(count, np.bool_)
        nulls = _gather(self._messages, self._first, end, where, gap, data.address, starts, ends[1:], valid)
        return Values(data.slice(0, size + gap * (count - nulls)), starts, ends, valid, int(nulls))

    def _times(self, end: int) -> pa.Array:
        buffer, stamps = new_buffer(end - self._first, np.int64)
        kind = c.c_int()
        function = self._library.address("message_timestamp")
        missing = kernels.stamps(self._messages, self._first, end, function, c.addressof(kind), stamps)
        mask = pa.py_buffer(np.packbits(stamps >= 0, bitorder="little")) if missing else None
        return pa.Array.from_buffers(TIME, len(stamps), [mask, buffer], int(missing))

    def _headers(self, end: int) -> pa.Array:
        """By a call for each: few ask for them."""
        return pa.array([self._headers_of(int(self._messages[n])) for n in range(self._first, end)], HEADERS)

    def _headers_of(self, message: int) -> list[dict[str, object]] | None:
        library, found = self._library, c.c_void_p()
        if library.message_headers(message, c.byref(found)):
            return None
        name, value, size = c.c_char_p(), c.c_void_p(), c.c_size_t()
        headers: list[dict[str, object]] = []
        for number in range(library.header_cnt(found)):
            library.header_get_all(found, number, c.byref(name), c.byref(value), c.byref(size))
            content = c.string_at(value.value, size.value) if value.value else None
            headers.append({"key": (name.value or b"").decode(errors="replace"), "value": content})
        return headers

    def _event(self) -> None:
        """Take note of the next message, which is none."""
        address = int(self._messages[self._first])
        fields = (c.c_int64 * 9).from_address(address)
        code, offset = c.c_int32.from_address(address).value, fields[7]
        text = c.string_at(fields[3], fields[4]).decode(errors="replace") if fields[3] else ""
        self._library.message_destroy(address)
        self._first += 1
        if code != END_OF_PARTITION:
            raise PartitionError(code, text or self._library.said(code))
        self.next_offset = max(self.next_offset, offset)

    @property
    def end_offset(self) -> int | None:
        """See ``PartitionQueue``; from what the broker said last."""
        low, high = c.c_int64(-1), c.c_int64(-1)
        name = self._name.encode()
        self._library.get_watermark_offsets(self._client.handle, name, self._partition, c.byref(low), c.byref(high))
        return high.value if high.value >= 0 else None

    def close(self) -> None:
        """Stop fetching, and give back what was not handed on."""
        if self._open:
            self._open = False
            kernels.destroy(self._messages, self._first, self._stop, self._library.address("message_destroy"))
            self._first = self._stop
            self._library.consume_stop(self._topic, self._partition)
