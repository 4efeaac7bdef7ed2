"""Sockets between processes of a job: dialling, frames read, bytes written without blocking the writer; wake-ups."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import pyarrow as pa

from cutwater.errors import CutwaterError, InvariantError, WireError
from cutwater.protocol.wire import HEADER_BYTES, ClientHandshake, Header, Peer, TryLaterError, decode_header
from cutwater.runtime.transport.secret import HungUpError, Secret, shake


def nothing() -> None:
    """The default wake-up: none."""
    return


class Signal:
    """One waiter, many setters; sets coalesce until the waiter wakes.

    A bare lock used as a binary semaphore: waking costs as little as ``SimpleQueue`` (about 45 us for a round trip
    between two threads; ``Condition`` and ``eventfd`` need about 60), and a set that finds the flag up costs 50 ns.

    The waiter must look for work *after* ``wait`` returned; then no work announced by ``set`` is missed.  A wait may
    return True without new work.

    >>> signal = Signal()
    >>> signal.set(); signal.set()
    >>> signal.wait(1.0), signal.wait(0.0)
    (True, False)
    """

    __slots__ = ("_lock", "_raised")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._raised = False

    def set(self) -> None:
        """Wake the waiter (any thread, never blocks)."""
        if self._raised:
            return
        self._raised = True
        try:
            self._lock.release()
        except RuntimeError:
            pass  # another setter was faster: the waiter is awake already

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until somebody called ``set`` since the last wait; False when the time ran out (``None``: no limit)."""
        if timeout_s is None or timeout_s > threading.TIMEOUT_MAX:
            timeout_s = -1
        else:
            timeout_s = max(0.0, timeout_s)
        woken = self._lock.acquire(timeout=timeout_s)
        self._raised = False
        return woken


JOIN_S: Final = 5.0
"""Time for which ``close`` waits for threads that have nothing left to wait for."""


def tune(sock: socket.socket) -> None:
    """Small frames go at once; a peer whose machine is gone is noticed."""
    sock.settimeout(None)
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 60_000)


def shut(sock: socket.socket) -> None:
    """Wake every thread that sleeps in a call on this socket."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


_TRY_S = 5.0
"""For one connection, and for one handshake: the other end may have lost what it was sent."""
_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.5


def dial(
    address: tuple[str, int],
    secret: Secret,
    handshake: Callable[[bytes], ClientHandshake],
    *,
    deadline_s: float,
    wanted: Callable[[], None] = nothing,
) -> tuple[socket.socket, Peer]:
    """A connection whose other end proved the secret, and who that is.

    Tries again while nobody listens, the other is not ready yet, or hangs up before it says why, with longer and longer
    pauses, of which a random part is left out: those that were turned away together do not come back together.

    Args:
        handshake: makes this side's part, with the bytes of the secret.
        deadline_s: for all of it.
        wanted: called before it tries again; raises if nobody wants the connection any more.

    Raises:
        FencedError: one side refused the other for good.
        WireError: no connection within ``deadline_s``; or, at once, one side has another secret or release.
    """
    deadline = time.monotonic() + deadline_s
    where = f"{address[0]}:{address[1]}"
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            return _try(address, handshake(secret.reveal()), min(_TRY_S, max(0.001, deadline - time.monotonic())))
        except (OSError, TryLaterError, HungUpError) as e:
            if time.monotonic() + pause_s >= deadline:
                hint = e.hint if isinstance(e, WireError) else ""
                why = e.message if isinstance(e, WireError) else e
                raise WireError(f"no connection to {where} within {deadline_s:g} s: {why}", hint=hint) from e
        except WireError as e:
            raise WireError(f"no connection to {where}: {e.message}", hint=e.hint) from e
        time.sleep(pause_s * random.uniform(0.5, 1.0))
        wanted()
        pause_s = min(_LONGEST_PAUSE_S, pause_s * 2)


def _try(address: tuple[str, int], handshake: ClientHandshake, timeout_s: float) -> tuple[socket.socket, Peer]:
    sock = socket.create_connection(address, timeout=timeout_s)
    try:
        return sock, shake(sock, handshake, timeout_s)
    except BaseException:
        sock.close()
        raise


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


_STAGING_BYTES: Final = 16 * 1024
"""One read takes many small frames; of a large one it takes the header, and its body is read to where it stays."""


class FrameReader:
    """A thread that reads frames until the stream ends.

    Args:
        sock: a blocking socket; shutting it down ends the thread.
        name: of the thread.
        max_frame_bytes: larger frames are refused before anything is allocated.
        on_frame: called for each frame with its determinant log and its body (aligned, one allocation of its own;
            ``None`` for an empty body).
        on_end: called once: with ``None`` at the end of the stream between two frames, else with the reason.
    """

    def __init__(
        self,
        sock: socket.socket,
        name: str,
        *,
        max_frame_bytes: int,
        on_frame: Callable[[Header, bytes, pa.Buffer | None], None],
        on_end: Callable[[CutwaterError | None], None],
    ) -> None:
        self._sock, self._max_frame_bytes = sock, max_frame_bytes
        self._on_frame, self._on_end = on_frame, on_end
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread's end (not from the thread itself)."""
        if self._thread is not threading.current_thread() and self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        reason: CutwaterError | None = None
        try:
            self._read()
        except CutwaterError as e:
            reason = e
        except OSError as e:
            reason = WireError(f"the connection broke: {e.strerror or e}")
        except Exception as e:
            reason = InvariantError(f"handling a frame failed: {type(e).__name__}: {e}")
            reason.__cause__ = e
        self._on_end(reason)

    def _read(self) -> None:
        staging = memoryview(bytearray(_STAGING_BYTES))
        low = high = 0
        while True:
            count = self._sock.recv_into(staging[high:])
            if not count:
                if high:
                    raise WireError(f"the stream ended in the middle of a frame, {high} bytes into it")
                return
            high += count
            while high - low >= HEADER_BYTES:
                header = decode_header(staging, max_frame_bytes=self._max_frame_bytes, offset=low)
                start, size, order = low + HEADER_BYTES, header.body_length, b""
                if header.order_log_length:
                    start += header.order_log_length
                    if start <= high:
                        order = bytes(staging[start - header.order_log_length : start])
                    elif start - low <= _STAGING_BYTES:
                        break
                    else:
                        begun = staging[low + HEADER_BYTES : high]
                        order, start = self._large(header.order_log_length, begun).to_pybytes(), high
                if not size:
                    self._on_frame(header, order, None)
                    low = start
                elif start + size <= high:
                    self._on_frame(header, order, pa.py_buffer(bytes(staging[start : start + size])))
                    low = start + size
                elif HEADER_BYTES + header.order_log_length + size <= _STAGING_BYTES:
                    break  # the rest comes with the next read
                else:
                    self._on_frame(header, order, self._large(size, staging[start:high]))
                    low = high
            if low:
                staging[: high - low] = staging[low:high]
                low, high = 0, high - low

    def _large(self, size: int, begun: memoryview) -> pa.Buffer:
        """A determinant log or a body whose first bytes were read with its header."""
        body = pa.allocate_buffer(size)
        view = memoryview(body).cast("B")
        have = len(begun)
        view[:have] = begun
        while have < size:
            count = self._sock.recv_into(view[have:], 0, socket.MSG_WAITALL)
            if not count:
                raise WireError(f"the stream ended in the middle of a frame, {have} of {size} bytes of it came")
            have += count
        return body
