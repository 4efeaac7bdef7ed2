"""Sockets between processes of a job: dialling until somebody answers, and what is set on every socket."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Callable
from typing import Final

from cutwater.errors import WireError
from cutwater.protocol.wire.handshake import ClientHandshake, Peer, TryLaterError
from cutwater.runtime.transport.secret import HungUpError, Secret, shake
from cutwater.runtime.transport.signal import nothing

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
