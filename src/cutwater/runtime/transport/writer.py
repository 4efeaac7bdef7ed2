"""Writing to a socket from several threads, without blocking any of them."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import pyarrow as pa

from cutwater.runtime.transport.signal import Signal

Part: TypeAlias = bytes | memoryview | pa.Buffer

_INLINE_BYTES: Final = 4 << 20
"""Up to this size the sending thread makes the system call itself: where all cores work, that costs less than waking
another thread, which wants the interpreter, too.  What the socket does not take at once is the other thread's."""
_PARTS_PER_CALL: Final = 256
"""Of one ``sendmsg``; the system allows 1,024."""


class SocketWriter:
    """An outbox and a thread that empties it.

    Whoever finds the outbox unowned becomes its owner: the caller itself, with one non-blocking call; for very much
    data, and whenever the socket's buffer is full, the thread.  Data that arrives meanwhile joins the next call.

    Args:
        sock: a blocking socket.
        name: of the thread.
        on_error: called once when the socket breaks, from the thread (a sender may hold locks).
    """

    def __init__(self, sock: socket.socket, name: str, on_error: Callable[[OSError], None]) -> None:
        self._sock, self._on_error = sock, on_error
        self._changed = threading.Condition(threading.Lock())
        self._outbox: deque[Part] = deque()
        self._owned = False
        self._stopped = False
        self._failure: OSError | None = None
        self._wake = Signal()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, parts: Sequence[Part], size_bytes: int) -> None:
        """Queue the parts of one frame; never blocks.  Does nothing once stopped or broken."""
        with self._changed:
            if self._stopped:
                return
            self._outbox.extend(parts)
            if self._owned:
                return
            self._owned = True
        try:
            if size_bytes <= _INLINE_BYTES and self._push(socket.MSG_DONTWAIT):
                return
        except OSError as e:
            self._failure = e
        self._wake.set()  # the thread owns the outbox now

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything is in the socket; False when the time ran out."""
        with self._changed:
            deadline = time.monotonic() + timeout_s
            while (self._owned or self._outbox) and not self._stopped:
                if not self._changed.wait(deadline - time.monotonic()) and time.monotonic() >= deadline:
                    return False
            return not self._outbox

    def stop(self) -> None:
        """Drop what is left and end the thread; shut the socket down first, so that no call hangs in it."""
        with self._changed:
            self._stopped = True
            self._outbox.clear()
            self._changed.notify_all()
        self._wake.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread's end (not from the thread itself)."""
        if self._thread is not threading.current_thread() and self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stopped:
            self._wake.wait()
            try:
                if self._failure is not None:
                    raise self._failure
                while not self._stopped and not self._push(0):
                    pass
            except OSError as e:
                self.stop()
                self._on_error(e)

    def _push(self, flags: int) -> bool:
        """One system call by the owner; True if the outbox is empty, which gives it up.

        With ``MSG_DONTWAIT`` False means that the thread has to go on.
        """
        with self._changed:
            parts = [self._outbox.popleft() for _ in range(min(len(self._outbox), _PARTS_PER_CALL))]
        try:
            sent = self._sock.sendmsg(parts, (), flags) if parts else 0
        except BlockingIOError:
            sent = 0
        with self._changed:
            if self._stopped:
                return True
            self._outbox.extendleft(reversed(_unsent(parts, sent)))
            if self._outbox:
                return False
            self._owned = False
            self._changed.notify_all()
            return True


def _unsent(parts: list[Part], sent: int) -> list[Part]:
    """Rest of the parts after ``sent`` bytes."""
    for i, part in enumerate(parts):
        size = len(part)
        if sent < size:
            return [memoryview(part).cast("B")[sent:], *parts[i + 1 :]] if sent else parts[i:]
        sent -= size
    return []
