"""Time to live: how long a state keeps what was put into it, and when to look for what has expired.

What has expired is invisible from that millisecond on; that is decided whenever a value is read.  To give the memory
back as well, each key with values waits in a queue for the time at which its first value expires (rounded up, so that a
key that is written all the time is looked at only a few times per time to live).
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Any, Literal, TypeAlias, get_args

import pyarrow as pa

from cutwater.config import parse_duration_ms
from cutwater.errors import BuildError, ConfigError

TtlUpdate: TypeAlias = Literal["on_write", "on_read_and_write"]
"""The uses that make a value live on for a full time to live."""

Stamped: TypeAlias = tuple[Any, int]
"""A value, and the processing time from which on it is gone (milliseconds since the epoch)."""

_LOOKS = 16
"""Most times that a key is looked at per time to live."""


class TimeToLive:
    """The time that a value lives after it was written.

    Args:
        ttl: a duration such as "1h", or a ``timedelta``.
        update: whether reading a value counts as writing it.

    Raises:
        BuildError: not a duration above 0, or no such update.

    >>> TimeToLive("1h").ms
    3600000
    """

    def __init__(self, ttl: Any, update: TtlUpdate = "on_write") -> None:
        try:
            ms = parse_duration_ms(ttl, name="ttl")
        except ConfigError as e:
            raise BuildError(e.message, hint=e.hint) from None
        if ms < 1:
            raise BuildError(f"ttl {ttl!r} is not above 0", hint="Write for example ttl='1h'.")
        if update not in get_args(TtlUpdate):
            raise BuildError(f"ttl_update {update!r} is unknown", hint=f"Choose one of {get_args(TtlUpdate)}.")
        self.ms = round(ms)
        self.on_read = update == "on_read_and_write"


def stamped_type(value: pa.DataType) -> pa.DataType:
    """Type of a value and its expiry in a snapshot."""
    return pa.struct([pa.field("value", value), pa.field("expires_ms", pa.int64())])


def stamped(stored: Any) -> Stamped:
    """A value and its expiry, from a snapshot."""
    return stored["value"], stored["expires_ms"]


def unstamped(kept: Stamped) -> dict[str, Any]:
    """A value and its expiry, as a snapshot holds them."""
    value, expires_ms = kept
    return {"value": value, "expires_ms": expires_ms}


class Expiries:
    """Keys to be looked at in the order of time; each waits once.

    >>> expiries = Expiries(1600)
    >>> expiries.watch("a", 1620); expiries.watch("a", 9999)
    >>> expiries.next_ms, expiries.due(1650), expiries.due(1700), expiries.next_ms
    (1700, None, 'a', None)
    """

    def __init__(self, ttl_ms: int) -> None:
        self._step_ms = max(ttl_ms // _LOOKS, 1)
        self._queue: list[tuple[int, int, Hashable]] = []
        self._watched: set[Hashable] = set()
        self._number = 0

    @property
    def next_ms(self) -> int | None:
        """The time to look next; ``None`` if nothing is kept."""
        return self._queue[0][0] if self._queue else None

    def watch(self, key: Hashable, expires_ms: int) -> None:
        """A value of the key expires then; does nothing if the key waits already."""
        if key not in self._watched:
            self._watched.add(key)
            self._number += 1
            heapq.heappush(self._queue, (-(-expires_ms // self._step_ms) * self._step_ms, self._number, key))

    def due(self, now_ms: int) -> Any:
        """A key whose time has come, which waits no more; ``None`` if there is none."""
        if not self._queue or self._queue[0][0] > now_ms:
            return None
        _, _, key = heapq.heappop(self._queue)
        self._watched.discard(key)
        return key
