"""Messages of a COPY or of a replication stream, as many at a time as have come: by libpq itself, or by psycopg."""

from __future__ import annotations

import ctypes as c
import re
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from cutwater.connectors.postgres import receive_kernels as kernels
from cutwater.connectors.postgres.server import client_library

_MOST_MESSAGES, _MOST_BYTES = 1 << 15, 1 << 22
"""At a time; a longer message comes alone."""
_MAPPED = re.compile(r"\s(/\S*libpq[-.][^/\s]*)$")


class Messages(NamedTuple):
    """Messages one behind the other."""

    data: npt.NDArray[np.uint8]
    starts: npt.NDArray[np.int64]
    """Where each begins; without where the last one ends."""


class Receiver(Protocol):
    """Takes messages from a connection."""

    ended: bool
    """There are no more."""

    def take(self) -> Messages | None:
        """Those that have come; ``None``: none for now, or no more.

        Raises:
            psycopg.Error: the connection is lost.
        """

    def close(self) -> None:
        """Before the connection is closed."""


class PlainReceiver:
    """By psycopg, message by message.

    Args:
        connection: of libpq, as psycopg wraps it.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.ended = False

    def take(self) -> Messages | None:
        """See ``Receiver``."""
        parts: list[bytes] = []
        size = 0
        while len(parts) < _MOST_MESSAGES and size < _MOST_BYTES:
            length, content = self._connection.get_copy_data(1)
            if length <= 0:
                self.ended = length < 0
                break
            parts.append(bytes(content))
            size += length
        if not parts:
            return None
        ends = np.cumsum([len(part) for part in parts])
        starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
        return Messages(np.frombuffer(b"".join(parts), np.uint8), starts)

    def close(self) -> None:
        """Nothing is held."""


class NativeReceiver:
    """By compiled code that calls libpq.

    Args:
        connection: of libpq, as psycopg wraps it.
        functions: addresses of ``PQgetCopyData`` and ``PQfreemem``.
    """

    def __init__(self, connection: Any, functions: tuple[int, int]) -> None:
        self._connection = connection
        self._get, self._free = functions
        self._word = np.zeros(1, np.int64)
        self._state = np.zeros(5, np.int64)
        self.ended = False

    def take(self) -> Messages | None:
        """See ``Receiver``."""
        capacity = max(_MOST_BYTES, int(self._state[kernels.LENGTH])) if self._state[kernels.HELD] else _MOST_BYTES
        out, starts = np.empty(capacity, np.uint8), np.empty(_MOST_MESSAGES + 1, np.int64)
        where = self._word.ctypes.data
        kernels.drain(
            self._connection.pgconn_ptr,
            self._get,
            self._free,
            where,
            out.ctypes.data,
            capacity,
            starts,
            _MOST_MESSAGES,
            self._state,
        )
        last, count = int(self._state[kernels.LAST]), int(self._state[kernels.COUNT])
        self.ended = last == -1
        if last == -2 and not count:
            message = self._connection.error_message.decode(errors="replace")
            raise client_library().OperationalError(message)
        if count == 0 and self._state[kernels.HELD]:  # longer than all room that there was
            return self.take()
        if count == 0:
            return None
        size = int(self._state[kernels.SIZE])
        data = out[:size] if 2 * size > capacity else out[:size].copy()
        data.flags.writeable = False
        return Messages(data, starts[:count].copy())

    def close(self) -> None:
        """See ``Receiver``."""
        kernels.release(self._free, self._state)


@cache
def _functions() -> tuple[int, int] | None:
    """Of the libpq that psycopg is linked to; ``None`` where it is part of psycopg itself, or there are several."""
    client_library()
    try:
        with open("/proc/self/maps") as lines:
            paths = {found[1] for line in lines if (found := _MAPPED.search(line.rstrip("\n")))}
        if len(paths) != 1:
            return None
        library = c.CDLL(paths.pop())
        get, free = (c.cast(getattr(library, name), c.c_void_p).value for name in ("PQgetCopyData", "PQfreemem"))
    except (OSError, AttributeError):
        return None
    return (get, free) if get and free else None


def receiver(connection: Any) -> Receiver:
    """The faster one that works here."""
    functions = _functions()
    if functions is None or not isinstance(getattr(connection, "pgconn_ptr", None), int):
        return PlainReceiver(connection)
    return NativeReceiver(connection, functions)
