"""Timers: instants at which a process function wants to be called again, by key and in order of time.

A timer is a pair of key and time, and a set holds no pair twice: registering it again changes nothing, and deleting one
that is not there does nothing (as in Flink).  The timers themselves lie in an ``ObjectTable`` by key, so that a freeze
costs nothing; a heap beside it knows which is next.  The heap may name timers that were deleted; they are skipped when
their time comes, and swept out when they are too many.
"""

from __future__ import annotations

import datetime as dt
import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, Literal, TypeAlias

from cutwater.errors import UserCodeError
from cutwater.state.objects.table import FrozenObjects, KeyedObjects, ObjectTable

PREFIX = "__"
"""Begins the names of the segments that are no state of the user's."""

TimerDomain: TypeAlias = Literal["event", "processing"]
"""The clock that a timer goes by: the watermark (microseconds) or the processing time (milliseconds)."""

EVENT: TimerDomain = "event"
PROCESSING: TimerDomain = "processing"

Key: TypeAlias = tuple[Hashable, ...]
"""The values of the key columns."""

_SWEEP_ABOVE = 1024
"""Entries of the heap below which nobody looks for deleted ones."""
_MIN_TIME, _MAX_TIME = -(2**63), 2**63 - 1
_EPOCH = dt.datetime(1970, 1, 1)
_EPOCH_UTC = _EPOCH.replace(tzinfo=dt.UTC)
_MICROSECOND = dt.timedelta(microseconds=1)


def timers_segment(domain: TimerDomain) -> str:
    """Name of the segments that hold timers."""
    return f"{PREFIX}{domain}_timers"


class Timers:
    """A set of timers of one clock.

    >>> timers = Timers()
    >>> [timers.register(("a",), 30), timers.register(("b",), 10), timers.register(("a",), 30)]
    [True, True, False]
    >>> timers.next_time, len(timers), list(timers.due(20, 100)), timers.times(("a",))
    (10, 2, [(10, ('b',))], [30])
    """

    def __init__(self) -> None:
        self._by_key: KeyedObjects[dict[int, None]] = ObjectTable(dict)
        self._queue: list[tuple[int, int | str, Key]] = []
        self._number = 0  # timers of one time fire in the order in which they were registered
        self.by_key = False
        """Instead, in an order of their keys, which a restore does not change."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def next_time(self) -> int | None:
        """The time at which the first timer is due; ``None`` if there is none."""
        queue = self._queue
        while queue:
            time, _, key = queue[0]
            if self._has(key, time):
                return time
            heapq.heappop(queue)
        return None

    def register(self, key: Key, time: int) -> bool:
        """Add a timer; false if it is there already."""
        times = self._by_key.own(key)
        if times is None:
            self._by_key.put(key, {time: None})
        elif time in times:
            return False
        else:
            times[time] = None
        heapq.heappush(self._queue, (time, repr(key) if self.by_key else self._number, key))
        self._number += 1
        self._count += 1
        return True

    def delete(self, key: Key, time: int) -> bool:
        """Remove a timer; false if it is not there."""
        if not self._has(key, time):
            return False
        self._remove(key, time)
        if len(self._queue) > _SWEEP_ABOVE and len(self._queue) > 2 * self._count:
            self._sweep()
        return True

    def times(self, key: Key) -> list[int]:
        """The timers of a key, in order of time."""
        return sorted(self._by_key.get(key) or ())

    def due(self, time: int, most: int) -> Iterator[tuple[int, Key]]:
        """Take up to ``most`` timers that are due at ``time``, one after the other, in order of time.

        Each is gone before it is handed out.  What is registered and deleted meanwhile counts at once.
        """
        while most > 0 and (first := self.next_time) is not None and first <= time:
            _, _, key = heapq.heappop(self._queue)
            self._remove(key, first)
            most -= 1
            yield first, key

    def track(self, *, restored: bool = False) -> None:
        self._by_key.track(restored=restored)

    def freeze(self, checkpoint_id: int | None = None) -> FrozenObjects[dict[int, None]]:
        """All timers as they are now: the times of each key; see ``KeyedObjects``."""
        return self._by_key.freeze(checkpoint_id)

    def restore(self, timers: Iterable[tuple[Key, int]]) -> None:
        """Add what a snapshot held."""
        for key, time in timers:
            self.register(key, time)

    def _has(self, key: Key, time: int) -> bool:
        times = self._by_key.get(key)
        return times is not None and time in times

    def _remove(self, key: Key, time: int) -> None:
        times = self._by_key.own(key)
        assert times is not None
        if len(times) == 1:
            self._by_key.remove(key)
        else:
            del times[time]
        self._count -= 1

    def _sweep(self) -> None:
        """Rebuild the heap from what is there; a timer that was deleted and set again keeps one entry."""
        kept: dict[tuple[int, Key], int | str] = {}
        for time, place, key in sorted(self._queue, key=lambda entry: entry[:2]):
            if self._has(key, time):
                kept.setdefault((time, key), place)
        self._queue = [(time, place, key) for (time, key), place in kept.items()]
        heapq.heapify(self._queue)


def timer_rows(times: Iterable[tuple[Key, Iterable[int]]]) -> Iterator[tuple[Key, int]]:
    """Key and time of every timer, from keys and their times.

    >>> timers = Timers()
    >>> timers.register(("a",), 3)
    True
    >>> list(timer_rows(timers.freeze().items()))
    [(('a',), 3)]
    """
    return ((key, time) for key, of_key in times for time in of_key)


class TimerService:
    """The timers of a process function: those of its current key: ``ctx.timers``.

    A timer calls ``on_timer(time, domain, ctx)`` once.  They are in every snapshot.

    - An *event-time* timer fires when the watermark reaches it, in order of time, before the watermark goes on.  One
      that is set behind the watermark fires when the watermark rises next.  At the end of a bounded input all fire.
    - A *processing-time* timer fires soon after the clock reaches it, never before, in order of time.  Those that came
      due while the job was down fire after the restore.  One that is not due when a bounded input ends does not fire.
    """

    def __init__(
        self, event: Timers, processing: Timers, function: object, fires: bool, key: Callable[[], Key]
    ) -> None:
        self._event, self._processing = event, processing
        self._function, self._fires = function, fires
        self._key = key

    def register_event(self, time: int | dt.datetime) -> None:
        """Fire when the watermark reaches ``time``: microseconds since the epoch, or a datetime (UTC if without zone).

        Raises:
            UserCodeError: not a time, or the function has no ``on_timer``.
        """
        self._check()
        self._event.register(self._key(), _event_time_us(time))

    def register_processing(self, time_ms: int) -> None:
        """Fire when the processing time reaches ``time_ms``, milliseconds since the epoch.

        Raises:
            UserCodeError: not a time, or the function has no ``on_timer``.
        """
        self._check()
        self._processing.register(self._key(), _whole(time_ms))

    def delete_event(self, time: int | dt.datetime) -> bool:
        """Forget an event-time timer; false if there is none at that time."""
        return self._event.delete(self._key(), _event_time_us(time))

    def delete_processing(self, time_ms: int) -> bool:
        """Forget a processing-time timer; false if there is none at that time."""
        return self._processing.delete(self._key(), _whole(time_ms))

    def registered(self, domain: TimerDomain) -> list[int]:
        """When the timers of the key are due, in order: microseconds for "event", milliseconds for "processing"."""
        return (self._event if domain == EVENT else self._processing).times(self._key())

    def _check(self) -> None:
        if not self._fires:
            raise UserCodeError(
                f"{type(self._function).__name__} sets a timer and has no on_timer",
                hint="Define on_timer(self, time, domain, ctx).",
            )


def _event_time_us(time: Any) -> int:
    if isinstance(time, dt.datetime):
        return (time - (_EPOCH if time.tzinfo is None else _EPOCH_UTC)) // _MICROSECOND
    return _whole(time)


def _whole(time: Any) -> int:
    try:
        if isinstance(time, bool) or (isinstance(time, float) and not time.is_integer()):
            raise TypeError
        whole = int(time)
        if isinstance(time, str) or not _MIN_TIME <= whole <= _MAX_TIME:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise UserCodeError(
            f"{time!r} is not the time of a timer",
            hint="Event time is in microseconds since the epoch (or a datetime), processing time in milliseconds.",
        ) from None
    return whole
