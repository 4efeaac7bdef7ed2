"""What is done to every socket between processes of a job."""

from __future__ import annotations

import contextlib
import socket
from typing import Final

JOIN_S: Final = 5.0
"""How long ``close`` waits for threads that have nothing left to wait for."""


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
