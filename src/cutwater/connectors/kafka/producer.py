"""Writes messages through librdkafka: many in one call, from where their bytes lie."""

from __future__ import annotations

import ctypes as c
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.connectors.kafka.cluster import REFUSED, KafkaCluster, client_library
from cutwater.connectors.kafka.librdkafka import PRODUCER, Client, Library, library
from cutwater.connectors.messages.encoders import Encoded, bytes_of
from cutwater.data.words import valid_rows
from cutwater.errors import BuildError, FencedError, StorageError

_FIELDS, _VALUE, _KEY = 9, 3, 5
"""A message is a struct of so many words; where the value and the key lie (``message_kernels``)."""
_BY_KEY = -1
"""In place of a partition: the library chooses it."""
_BLOCKS = 0x4
"""A full queue waits."""
_SLICE = 100_000
_FLUSH_MS = 60_000
_TRANSACTION_MS = 60_000
_STALLED_S = 10.0
"""A commit record takes milliseconds; without a broker, as long as one needs to start again."""
_TRIES = 5
_FENCED = (-144, 90, 47)
"""Another producer has taken over this transactional id, as the library and the broker say it."""
Outcome: TypeAlias = FencedError | StorageError | None
"""What went wrong with a call."""


def messages_of(values: Encoded, gone: npt.NDArray[np.bool_] | None, keys: pa.Array | None) -> npt.NDArray[np.int64]:
    """Messages as the library takes them.  The values and keys must stay in memory.

    Args:
        gone: whose value is null, so that a compacted topic forgets the key; ``None``: none.
        keys: of binary; ``None``: without keys.
    """
    made = np.zeros((len(values.starts), _FIELDS), np.int64)
    made[:, _VALUE], made[:, _VALUE + 1] = values.addresses, values.lengths
    if gone is not None:
        made[gone, _VALUE : _VALUE + 2] = 0
    if keys is not None:
        found = bytes_of(keys)
        made[:, _KEY], made[:, _KEY + 1] = found.addresses, found.lengths
        valid = valid_rows(keys)
        if valid is not None:
            made[~valid, _KEY : _KEY + 2] = 0
    return made


class StalledError(StorageError):
    """A call of the client does not return.  The client was given up; whether it committed, the next one finds out."""


class Producer:
    """One client that writes to one topic.

    Args:
        cluster: where.
        topic: its name.
        options: of librdkafka, besides the cluster's.

    Raises:
        BuildError: the client library is missing, or cannot be called by itself.
        ConfigError: an option that it refuses.
    """

    def __init__(self, cluster: KafkaCluster, topic: str, options: Mapping[str, object]) -> None:
        client_library()
        self._cluster, self._name = cluster, topic
        self._library = _library()
        self.client = Client(self._library, PRODUCER, cluster.conf(delivery_report_only_error=True, **options))
        self._topic = self.client.topic(topic)
        self._given_up = False
        """A call does not return, and its thread ends the client some day."""

    def send(self, messages: npt.NDArray[np.int64]) -> None:
        """Hand messages to the library, whose memory must stay until ``flush``; waits while its queue is full.

        Raises:
            StorageError: the library refuses one.
        """
        for first in range(0, len(messages), _SLICE):
            part = np.ascontiguousarray(messages[first : first + _SLICE])
            taken = self._library.produce_batch(self._topic, _BY_KEY, _BLOCKS, part.ctypes.data, len(part))
            if taken != len(part):
                codes = part[:, 0].astype(np.int32)
                code = int(codes[codes != 0][0])
                raise self._error(f"a message is refused: {self._library.said(code)}")

    def flush(self) -> None:
        """Wait until all messages are written.

        Raises:
            StorageError: one was not.
        """
        self._library.flush(self.client.handle, _FLUSH_MS)
        left = self._library.outq_len(self.client.handle)
        self.check()
        if left > 0:
            raise self._error(f"{left} messages were not written within {_FLUSH_MS / 1000:.0f} s")

    def check(self) -> None:
        """Look at what the connection reported.

        Raises:
            FencedError: another producer has taken over.
            StorageError: nothing goes any more.
        """
        for code, text, fatal in self.client.errors():
            if fatal or code in REFUSED:
                raise self._failed(code, text)

    # ------------------------------------------------------------------------------------------------ transactions

    def begin_as_only_one(self) -> None:
        """Take over the transactional id: what its last producer has not committed is gone, and it can do nothing more.

        Raises:
            StorageError: the cluster does not answer.
        """
        self._done(lambda: self._library.init_transactions(self.client.handle, _TRANSACTION_MS))

    def transaction(self, write: Callable[[], None] | None, group: str, offset: int, text: str) -> None:
        """One transaction: what ``write`` sends, and an offset with a text for a group, of the first partition.

        Raises:
            FencedError: another producer has taken over the transactional id.
            StalledError: nobody knows; the producer is closed.
            StorageError: it was aborted.
        """
        self._done(lambda: self._library.begin_transaction(self.client.handle))
        try:
            if write is not None:
                write()
            self._send_offset(group, offset, text, write)
            self._done(lambda: self._library.commit_transaction(self.client.handle, _TRANSACTION_MS))
        except StalledError:
            raise
        except StorageError:
            self._ended(self._library.abort_transaction(self.client.handle, _TRANSACTION_MS))
            raise

    def _send_offset(self, group: str, offset: int, text: str, kept: object) -> None:
        """In a thread of its own, since the library heeds no limit when the group's coordinator has gone.

        See librdkafka's issues 5456 and 5511: where the connection to it was lost it may wait for ever.

        Args:
            kept: holds the memory of what was sent, which a client that was given up still reads.
        """
        library, handle = self._library, self.client.handle

        def send() -> Outcome:
            places = library.topic_partition_list_new(1)
            metadata = library.consumer_group_metadata_new(group.encode())
            try:
                _fill(library, places, self._name, offset, text)
                call = library.send_offsets_to_transaction
                return self._outcome(lambda: call(handle, places, metadata, _TRANSACTION_MS))
            finally:
                library.consumer_group_metadata_destroy(metadata)
                library.topic_partition_list_destroy(places)

        sending = _Aside(self._end, send, kept)
        if not sending.wait(_STALLED_S):
            self._given_up = True
            raise StalledError(self._error(f"the commit record was not taken within {_STALLED_S:.0f} s").message)
        if sending.outcome is not None:
            raise sending.outcome

    def _done(self, call: Callable[[], int | None]) -> None:
        """A call of the transactional interface, again while the library says that this may help."""
        raised = self._outcome(call)
        if raised is not None:
            raise raised

    def _outcome(self, call: Callable[[], int | None]) -> Outcome:
        """What went wrong with such a call in the end."""
        raised: Outcome = None
        for _ in range(_TRIES):
            error = call()
            if not error:
                return None
            again, raised = self._library.error_is_retriable(error), self._ended(error)
            if not again or isinstance(raised, FencedError):
                break
        return raised

    def _ended(self, error: int | None) -> FencedError | StorageError:
        """What an error of the library's is; it is given back."""
        if not error:
            return self._error("")
        code, text = self._library.error_code(error), self._library.error_string(error).decode(errors="replace")
        self._library.error_destroy(error)
        return self._failed(code, text)

    def _failed(self, code: int, text: str) -> FencedError | StorageError:
        if code in _FENCED:
            return FencedError(
                f"kafka topic {self._name!r}: another producer writes in the place of this one: {text}",
                hint="A newer attempt of the job, or its next driver, has taken over.",
            )
        return self._error(self._cluster.hidden(text))

    def _error(self, what: str) -> StorageError:
        return StorageError(
            f"cannot write to kafka topic {self._name!r} at {self._cluster.servers}: {what}",
            hint="Once it can be written to, the job goes on from its last checkpoint.",
        )

    def close(self) -> None:
        """Stop; what was not flushed is lost."""
        if not self._given_up:
            self._end()

    def _end(self) -> None:
        if self.client.handle:
            self._library.purge(self.client.handle, 3)
            self.client.close()


class _Aside:
    """A call with a client in a thread of its own, since it may never return.

    Once nobody waits for it any more the client is the thread's, which ends it if the call returns after all.

    Args:
        close: ends the client.
        call: what is done with it.
        kept: holds memory that the client reads as long as it lives.
    """

    def __init__(self, close: Callable[[], None], call: Callable[[], Outcome], kept: object) -> None:
        self._close, self._call, self._kept = close, call, kept
        self.outcome: Outcome = None
        self._given_up = False
        self._lock, self._returned = threading.Lock(), threading.Event()
        threading.Thread(target=self._run, name="cutwater-kafka-offsets", daemon=True).start()

    def wait(self, seconds: float) -> bool:
        """Whether it has returned; if not, it is given up."""
        if not self._returned.wait(seconds):
            with self._lock:
                self._given_up = not self._returned.is_set()
        return not self._given_up

    def _run(self) -> None:
        outcome = self._call()
        with self._lock:
            self.outcome = outcome
            self._returned.set()
        if self._given_up:
            self._close()


def _library() -> Library:
    found = library()
    if found is None:
        raise BuildError(
            "the confluent-kafka that is installed holds librdkafka in itself, where it cannot be called",
            hint="Install the wheel from PyPI: pip install 'cutwater[kafka]'.",
        )
    return found


class _Place(c.Structure):
    """The first fields of ``rd_kafka_topic_partition_t``."""

    _fields_ = [
        ("topic", c.c_char_p),
        ("partition", c.c_int32),
        ("offset", c.c_int64),
        ("metadata", c.c_void_p),
        ("metadata_size", c.c_size_t),
    ]


def _fill(library: Library, places: int, topic: str, offset: int, text: str) -> None:
    """Put an offset into a list of the library's: its last element is a struct that we may write to."""
    place = c.cast(library.topic_partition_list_add(places, topic.encode(), 0), c.POINTER(_Place)).contents
    place.offset = offset
    body = text.encode() + b"\0"  # part of it, since the Python client reads it back up to there
    memory: Any = c.CDLL(None)
    memory.malloc.restype, memory.malloc.argtypes = c.c_void_p, [c.c_size_t]
    place.metadata = memory.malloc(len(body))  # the library frees it
    c.memmove(place.metadata, body, len(body))
    place.metadata_size = len(body)
