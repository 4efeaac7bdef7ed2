"""Calls of a user's function outside the subtask's thread: in an event loop of their own, with timeout and retries.

Plain functions run in further threads.  All of them are daemons: a function that never returns holds up neither the
stream nor the end of the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from cutwater.data.rows import Row

if TYPE_CHECKING:
    from cutwater.operators.enrich.async_map import AsyncMapSpec

_JOIN_S = 1.0


class Call:
    """One call for one or several rows, and what became of it."""

    __slots__ = ("batch", "error", "first_row", "number", "over", "result", "retried", "rows", "start", "timed_out")

    def __init__(self, number: int, batch: pa.RecordBatch, start: int, rows: Sequence[Row], first_row: int) -> None:
        self.number = number
        self.batch, self.start, self.rows = batch, start, rows
        self.first_row = first_row
        """How many rows the operator had taken before the batch."""
        self.result: Any = None
        self.error: BaseException | None = None
        self.timed_out = self.over = False
        self.retried = 0

    def may_join(self, other: Call) -> bool:
        """Whether the rows of the other one follow its own in the same batch."""
        return other.batch is self.batch and other.start == self.start + len(self.rows)

    def join(self, other: Call) -> None:
        """Ask for the rows of the other one, too."""
        self.rows = [*self.rows, *other.rows]

    def slice(self) -> pa.RecordBatch:
        """Its rows as they came."""
        return self.batch.slice(self.start, len(self.rows))


class AsyncCalls:
    """Runs calls; a thread begins with the first.

    Args:
        fn: the user's function.
        settings: timeout, retries, and how many calls at a time.
        name: of the thread.
        finished: called in that thread with each call that is over, in whatever way.
    """

    def __init__(
        self, fn: Callable[..., Any], settings: AsyncMapSpec, name: str, finished: Callable[[Call], None]
    ) -> None:
        self._fn, self._settings, self._name, self._finished = fn, settings, name, finished
        self._is_async = inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._threads = CallThreads(settings.capacity, name)

    def begin(self, calls: Sequence[Call]) -> None:
        """Start them; returns at once."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._run, args=(self._loop,), name=self._name, daemon=True)
            self._thread.start()
        self._loop.call_soon_threadsafe(self._start, calls)

    def close(self) -> None:
        """Cancel what runs.  Coroutines get a second to clean up; threads are left to themselves."""
        self._threads.close()
        loop, self._loop = self._loop, None
        if loop is not None and self._thread is not None:
            loop.call_soon_threadsafe(self._stop, loop)
            self._thread.join(_JOIN_S)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            with contextlib.suppress(Exception):
                loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
        finally:
            loop.close()

    def _stop(self, loop: asyncio.AbstractEventLoop) -> None:
        for task in self._tasks:
            task.cancel()
        loop.stop()

    def _start(self, calls: Sequence[Call]) -> None:
        for call in calls:
            task = asyncio.ensure_future(self._perform(call))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _perform(self, call: Call) -> None:
        try:
            async with asyncio.timeout(self._settings.timeout_ms / 1000):
                await self._attempts(call)
        except TimeoutError:
            call.timed_out = True
        self._finished(call)

    async def _attempts(self, call: Call) -> None:
        argument: Any = call.rows[0] if self._settings.batch_rows is None else call.rows
        delay_s = self._settings.retry_delay_ms / 1000
        while True:
            try:
                call.result = await self._once(argument)
                return
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise  # by the timeout, or at the end
                call.error = RuntimeError("the function was cancelled from inside")
                return
            except Exception as error:
                if call.retried >= self._settings.retries:
                    call.error = error
                    return
            except BaseException as error:
                call.error = error
                return
            call.retried += 1
            await asyncio.sleep(delay_s)
            delay_s *= 2

    async def _once(self, argument: Any) -> Any:
        if self._is_async:
            return await self._fn(argument)
        result = await self._threads.run(self._fn, argument)
        return await result if inspect.isawaitable(result) else result


class CallThreads:
    """Daemon threads for plain functions, started as they are needed."""

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._work: queue.SimpleQueue[tuple[Callable[..., Any], Any, asyncio.Future[Any]] | None] = queue.SimpleQueue()
        self._started = self._busy = 0  # of the event loop's thread

    async def run(self, fn: Callable[..., Any], argument: Any) -> Any:
        """Call it in a thread."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._busy += 1
        if self._busy > self._started and self._started < self._most:
            self._started += 1
            threading.Thread(target=self._serve, name=f"{self._name}-{self._started}", daemon=True).start()
        self._work.put((fn, argument, future))
        return await future

    def close(self) -> None:
        """Idle threads end."""
        for _ in range(self._started):
            self._work.put(None)

    def _serve(self) -> None:
        while (item := self._work.get()) is not None:
            fn, argument, future = item
            result, error = None, None
            if not future.cancelled():
                try:
                    result = fn(argument)
                except BaseException as e:
                    error = e
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                future.get_loop().call_soon_threadsafe(self._settle, future, result, error)

    def _settle(self, future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        self._busy -= 1
        if future.cancelled():
            return
        if error is None:
            future.set_result(result)
        else:  # a future takes no StopIteration
            future.set_exception(RuntimeError(repr(error)) if isinstance(error, StopIteration) else error)
