"""librdkafka's C interface by ctypes: the library that lies in the wheel of ``confluent-kafka``.

The Python client makes an object for each message, which costs more than everything else that is done with it.
"""

from __future__ import annotations

import ctypes as c
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from cutwater.connectors.kafka.cluster import client_library
from cutwater.errors import ConfigError, StorageError

POINTER, TEXT, INT, SIZE, LONG = c.c_void_p, c.c_char_p, c.c_int, c.c_size_t, c.c_int64
PRODUCER, CONSUMER = 0, 1
_DELIVERY, _ERROR = 0x1, 0x8
"""Events: messages that were not written, and what befell the connection."""
_TEXT_BYTES = 512
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "conf_new": (POINTER, []),
    "conf_destroy": (None, [POINTER]),
    "conf_set": (INT, [POINTER, TEXT, TEXT, TEXT, SIZE]),
    "conf_set_events": (None, [POINTER, INT]),
    "new": (POINTER, [INT, POINTER, TEXT, SIZE]),
    "destroy": (None, [POINTER]),
    "topic_new": (POINTER, [POINTER, TEXT, POINTER]),
    "topic_destroy": (None, [POINTER]),
    "last_error": (INT, []),
    "err2str": (TEXT, [INT]),
    "err2name": (TEXT, [INT]),
    "consume_start": (INT, [POINTER, c.c_int32, LONG]),
    "consume_stop": (INT, [POINTER, c.c_int32]),
    "consume_batch": (c.c_ssize_t, [POINTER, c.c_int32, INT, POINTER, SIZE]),
    "message_destroy": (None, [POINTER]),
    "message_timestamp": (LONG, [POINTER, POINTER]),
    "message_headers": (INT, [POINTER, POINTER]),
    "header_cnt": (SIZE, [POINTER]),
    "header_get_all": (INT, [POINTER, SIZE, POINTER, POINTER, POINTER]),
    "get_watermark_offsets": (INT, [POINTER, TEXT, c.c_int32, POINTER, POINTER]),
    "flush": (INT, [POINTER, INT]),
    "purge": (INT, [POINTER, INT]),
    "outq_len": (INT, [POINTER]),
    "produce_batch": (INT, [POINTER, c.c_int32, INT, POINTER, INT]),
    "queue_get_main": (POINTER, [POINTER]),
    "queue_destroy": (None, [POINTER]),
    "queue_poll": (POINTER, [POINTER, INT]),
    "event_type": (INT, [POINTER]),
    "event_message_next": (POINTER, [POINTER]),
    "event_error": (INT, [POINTER]),
    "event_error_string": (TEXT, [POINTER]),
    "event_error_is_fatal": (INT, [POINTER]),
    "event_destroy": (None, [POINTER]),
    "init_transactions": (POINTER, [POINTER, INT]),
    "begin_transaction": (POINTER, [POINTER]),
    "send_offsets_to_transaction": (POINTER, [POINTER, POINTER, POINTER, INT]),
    "commit_transaction": (POINTER, [POINTER, INT]),
    "abort_transaction": (POINTER, [POINTER, INT]),
    "consumer_group_metadata_new": (POINTER, [TEXT]),
    "consumer_group_metadata_destroy": (None, [POINTER]),
    "topic_partition_list_new": (POINTER, [INT]),
    "topic_partition_list_add": (POINTER, [POINTER, TEXT, c.c_int32]),
    "topic_partition_list_destroy": (None, [POINTER]),
    "error_code": (INT, [POINTER]),
    "error_string": (TEXT, [POINTER]),
    "error_is_retriable": (INT, [POINTER]),
    "error_destroy": (None, [POINTER]),
}
_MAPPED = re.compile(r"\s(/\S*librdkafka[^/\s]*\.so[^/\s]*)$")


class Library:
    """The functions of the library as attributes, without their prefix.

    Args:
        path: of the shared object.

    Raises:
        OSError, AttributeError: it cannot be loaded, or is too old.
    """

    def __init__(self, path: str) -> None:
        loaded = c.CDLL(path)
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(loaded, f"rd_kafka_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)  # all there are were set: this is for the type checker

    def address(self, name: str) -> int:
        """Of a function, for compiled code to call."""
        return c.cast(getattr(self, name), POINTER).value or 0

    def said(self, code: int) -> str:
        """An error code as text."""
        return f"{self.err2str(code).decode()} ({self.err2name(code).decode()})"


@cache
def library() -> Library | None:
    """The library that the Python client is linked to; ``None`` where it is part of the client itself, or too old."""
    client_library()  # maps it into this process
    try:
        with open("/proc/self/maps") as lines:
            paths = {found[1] for line in lines if (found := _MAPPED.search(line.rstrip("\n")))}
        return Library(paths.pop()) if len(paths) == 1 else None
    except (OSError, AttributeError):
        return None


class Client:
    """A producer or consumer, and what it reports when nobody asks.

    Args:
        library: the functions.
        kind: ``PRODUCER`` or ``CONSUMER``.
        options: by librdkafka's names.

    Raises:
        ConfigError: an option that the library refuses, with its own words.
    """

    def __init__(self, library: Library, kind: int, options: Mapping[str, str]) -> None:
        self.library = library
        told = c.create_string_buffer(_TEXT_BYTES)
        conf = library.conf_new()
        for name, value in options.items():
            if library.conf_set(conf, name.encode(), value.encode(), told, _TEXT_BYTES):
                library.conf_destroy(conf)
                raise ConfigError(f"kafka: {told.value.decode()}", hint="Options are those of librdkafka.")
        library.conf_set_events(conf, _DELIVERY | _ERROR if kind == PRODUCER else _ERROR)
        self.handle: int = library.new(kind, conf, told, _TEXT_BYTES)
        if not self.handle:
            library.conf_destroy(conf)
            raise ConfigError(f"kafka: {told.value.decode()}", hint="Look at the options of the connection.")
        self._events = library.queue_get_main(self.handle)
        self._topics: dict[str, int] = {}

    def topic(self, name: str) -> int:
        """The library's object for a topic.

        Raises:
            StorageError: the library gives none.
        """
        if name not in self._topics:
            made = self.library.topic_new(self.handle, name.encode(), None)
            if not made:
                raise StorageError(f"kafka topic {name!r}: {self.library.said(self.library.last_error())}")
            self._topics[name] = made
        return self._topics[name]

    def errors(self) -> list[tuple[int, str, bool]]:
        """What happened to the connection since this was asked last: code, text, and whether nothing goes any more."""
        found: list[tuple[int, str, bool]] = []
        library = self.library
        while event := library.queue_poll(self._events, 0):
            if library.event_type(event) == _ERROR:
                text = (library.event_error_string(event) or b"").decode(errors="replace")
                found.append((library.event_error(event), text, bool(library.event_error_is_fatal(event))))
            elif library.event_type(event) == _DELIVERY:
                code = c.c_int.from_address(library.event_message_next(event)).value
                found.append((code, f"a message was not written: {library.said(code)}", True))
            library.event_destroy(event)
        return found

    def close(self) -> None:
        """End it; nothing that it gave may be used any more."""
        if self.handle:
            for topic in self._topics.values():
                self.library.topic_destroy(topic)
            self.library.queue_destroy(self._events)
            self.library.destroy(self.handle)
            self.handle = 0
