"""``cw.cached``: a function for ``map_async`` that asks another system about keys, and remembers what it said."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeAlias, cast

from cutwater.config import parse_duration_ms
from cutwater.data.rows import Row
from cutwater.errors import BuildError, UserCodeError
from cutwater.operators.enrich.async_calls import CallThreads

Found: TypeAlias = Mapping[str, Any] | None
Fetch: TypeAlias = Callable[[Any], Found | Mapping[Any, Found] | Awaitable[Found | Mapping[Any, Found]]]
_MOST_THREADS = 16
_now_s = time.monotonic


class Cached:
    """See ``cached``.  What is remembered belongs to the process; a copy that is sent to another one begins empty."""

    def __init__(
        self,
        fetch: Fetch,
        key: tuple[str, ...],
        size: int,
        ttl_s: float,
        missing_ttl_s: float,
        batch_keys: int | None,
        batch_delay_s: float,
        keep_missing: bool,
    ) -> None:
        self._fetch, self._key, self._size = fetch, key, size
        self._ttl_s, self._missing_ttl_s = ttl_s, missing_ttl_s
        self._batch_keys, self._batch_delay_s, self._keep_missing = batch_keys, batch_delay_s, keep_missing
        self._is_async = inspect.iscoroutinefunction(fetch) or inspect.iscoroutinefunction(type(fetch).__call__)
        self.__qualname__ = getattr(fetch, "__qualname__", type(fetch).__name__)
        self._forget()

    def _forget(self) -> None:
        self._known: OrderedDict[Any, tuple[float, Found]] = OrderedDict()
        """When it is too old, and what was found; those used last at the end."""
        self._flights: dict[Any, asyncio.Future[Found]] = {}
        self._waiting: list[Any] = []
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._threads: CallThreads | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _OF_A_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    async def __call__(self, row: Row) -> dict[str, Any] | None:
        key = row[self._key[0]] if len(self._key) == 1 else tuple(row[name] for name in self._key)
        found = await self._find(key)
        if found is None and not self._keep_missing:
            return None
        return {**row, **(found or {})}

    async def _find(self, key: Any) -> Found:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # another run of the subtask in this process: those of the last one never land
            known = self._known
            self._forget()
            self._loop, self._known = loop, known
        entry = self._known.get(key)
        if entry is not None and entry[0] > _now_s():
            self._known.move_to_end(key)
            return entry[1]
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = loop.create_future()
            flight.add_done_callback(_heard)
            self._wait(loop, key)
        return await asyncio.shield(flight)  # whoever gives up does not take the others' answer along

    def _wait(self, loop: asyncio.AbstractEventLoop, key: Any) -> None:
        self._waiting.append(key)
        if len(self._waiting) >= (self._batch_keys or 1):
            self._leave()
        elif self._timer is None:
            self._timer = loop.call_later(self._batch_delay_s, self._leave)

    def _leave(self) -> None:
        """Ask about those that wait."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        keys, self._waiting = self._waiting, []
        if keys:
            task = asyncio.ensure_future(self._ask(keys))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _ask(self, keys: list[Any]) -> None:
        flights = [self._flights[key] for key in keys]
        try:
            answer = await self._called(keys[0] if self._batch_keys is None else keys)
            if self._batch_keys is not None and not isinstance(answer, Mapping):
                raise UserCodeError(
                    f"{self.__qualname__!r} returned a {type(answer).__name__} for a list of keys, not a dict by key",
                    hint="Return {key: {'column': value}}; keys that are not in it are not there.",
                )
            found = [answer if self._batch_keys is None else answer.get(key) for key in keys]
            for value in found:
                if value is not None and not isinstance(value, Mapping):
                    raise UserCodeError(
                        f"{self.__qualname__!r} found a {type(value).__name__} for a key, not a dict of columns or None"
                    )
        except BaseException as error:  # is told to all who wait, and not remembered: the next one asks again
            for key, flight in zip(keys, flights, strict=True):
                self._flights.pop(key, None)
                if not flight.done():
                    flight.set_exception(_as_exception(error))
            if not isinstance(error, Exception):
                raise
            return
        for key, flight, value in zip(keys, flights, found, strict=True):
            self._flights.pop(key, None)
            self._remember(key, value)
            if not flight.done():
                flight.set_result(value)

    async def _called(self, argument: Any) -> Any:
        if self._is_async:
            return await cast("Awaitable[Any]", self._fetch(argument))
        if self._threads is None:
            self._threads = CallThreads(_MOST_THREADS, f"cutwater-{self.__qualname__}")
        result = await self._threads.run(self._fetch, argument)
        return await result if inspect.isawaitable(result) else result

    def _remember(self, key: Any, value: Found) -> None:
        ttl_s = self._missing_ttl_s if value is None else self._ttl_s
        if ttl_s <= 0:
            return
        self._known[key] = _now_s() + ttl_s, value
        self._known.move_to_end(key)
        while len(self._known) > self._size:
            self._known.popitem(last=False)


_OF_A_PROCESS = frozenset({"_known", "_flights", "_waiting", "_timer", "_loop", "_threads", "_tasks"})


def cached(
    fetch: Fetch,
    *,
    key: str | Sequence[str],
    size: int = 100_000,
    ttl: float | str | timedelta = "1m",
    missing_ttl: float | str | timedelta | None = None,
    batch_keys: int | None = None,
    batch_delay: float | str | timedelta = "2ms",
    keep_missing: bool = True,
) -> Cached:
    """A function for ``map_async``: each row with what another system has for its key.

    A key is asked about once at a time, whoever waits for it, and what was found is remembered for a while: in each
    worker, not in the job's state.  A failure is not remembered; ``retries`` of ``map_async`` asks again.

    Args:
        fetch: ``fetch(key)`` gives a dict of columns, or ``None`` for a key that is not there; several key columns are
            a tuple.  A coroutine function, or a plain one, which runs in threads.
        key: columns of the row that are the key.
        size: keys that are remembered at most; those not used for longest go first.
        ttl: time for which what was found holds.
        missing_ttl: time for which a key stays not there; by default as ``ttl``.
        batch_keys: ask about up to so many keys in one call: ``fetch([key, ...])`` gives a dict by key.
        batch_delay: time for which the first of them waits for others.
        keep_missing: a row whose key is not there comes without those columns; False: it is dropped.

    Raises:
        BuildError: ``fetch`` is no function, or a number is out of range.

    >>> find = cached({"a": {"n": 1}}.get, key="k")
    >>> asyncio.run(find({"k": "a"})), asyncio.run(find({"k": "b"}))
    ({'k': 'a', 'n': 1}, {'k': 'b'})
    """
    if not callable(fetch):
        raise BuildError(f"cached needs a function that finds keys, got a {type(fetch).__name__}")
    names = (key,) if isinstance(key, str) else tuple(key)
    if not names:
        raise BuildError("cached needs the columns of the key", hint="Write key='user'.")
    if size < 1 or (batch_keys is not None and batch_keys < 1):
        raise BuildError("cached: size and batch_keys are at least 1")
    ttl_s = parse_duration_ms(ttl, name="ttl") / 1000
    missing_ttl_s = ttl_s if missing_ttl is None else parse_duration_ms(missing_ttl, name="missing_ttl") / 1000
    delay_s = parse_duration_ms(batch_delay, name="batch_delay") / 1000
    return Cached(fetch, names, size, ttl_s, missing_ttl_s, batch_keys, delay_s, keep_missing)


def _as_exception(error: BaseException) -> BaseException:
    if isinstance(
        error, StopIteration | asyncio.CancelledError
    ):  # which a future does not take, or means another thing
        return RuntimeError(repr(error))
    return error


def _heard(flight: asyncio.Future[Found]) -> None:
    """All who waited may have given up: an exception that nobody asks for is no matter then."""
    if not flight.cancelled():
        flight.exception()
