"""Connections between workers: listening and dialling.  What then goes on is ``net_connection``."""

from __future__ import annotations

import logging
import random
import socket
import threading
import time
from collections.abc import Callable

from cutwater.errors import CutwaterError, WireError
from cutwater.protocol.handshake import ClientHandshake, Peer, Refusal, ServerHandshake, TryLaterError
from cutwater.runtime.auth import Secret, shake
from cutwater.runtime.net_connection import JOIN_S, Connection, shut
from cutwater.runtime.net_items import nothing

__all__ = ["Connection", "DataServer", "connect"]

_log = logging.getLogger(__name__)


class DataServer:
    """Listens for the connections of other workers.

    Nothing but a handshake of bounded size is read from anybody who has not proved the secret; at most ``max_pending``
    of them are listened to at a time, each for at most ``handshake_timeout_s``.

    Args:
        me: this worker.
        secret: the job's.
        check: decides about an authenticated peer: wrong job, attempt or incarnation (fencing).
        on_connection: gets each accepted connection, not started, in a thread of the server.
        on_copies: gets what a peer of role "copies" has dialled; without it there is none that ``check`` may accept.
        host, port: where to listen; port 0 takes a free one, see ``address``.
    """

    def __init__(
        self,
        me: Peer,
        secret: Secret,
        check: Callable[[Peer], Refusal | None],
        on_connection: Callable[[Connection], None],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        handshake_timeout_s: float = 5.0,
        max_pending: int = 64,
        max_frame_bytes: int = 1 << 30,
        on_copies: Callable[[socket.socket], None] | None = None,
    ) -> None:
        self._on_copies = on_copies
        self._me, self._secret, self._check, self._on_connection = me, secret, check, on_connection
        self._timeout_s, self._max_pending, self._max_frame_bytes = handshake_timeout_s, max_pending, max_frame_bytes
        self._lock = threading.Lock()
        self._pending: dict[socket.socket, threading.Thread] = {}
        self._closed = False
        self._listener = socket.create_server((host, port), backlog=128)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._thread = threading.Thread(target=self._accept, name="cutwater-accept", daemon=True)

    def start(self) -> None:
        """Begin to accept."""
        self._thread.start()

    def close(self) -> None:
        """Stop listening and drop handshakes that are not finished.  Accepted connections live on."""
        with self._lock:
            self._closed = True
            pending = dict(self._pending)
        shut(self._listener)
        for sock in pending:
            shut(sock)
        for thread in (self._thread, *pending.values()):
            if thread is not threading.current_thread() and thread.ident is not None:
                thread.join(JOIN_S)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, address = self._listener.accept()
            except OSError as e:
                if self._closed:
                    return
                _log.warning("accepting a connection failed: %s", e)
                time.sleep(0.05)  # out of file descriptors, for example
                continue
            with self._lock:
                if self._closed or len(self._pending) >= self._max_pending:
                    sock.close()
                    continue
                thread = threading.Thread(
                    target=self._admit, args=(sock, address), name="cutwater-handshake", daemon=True
                )
                self._pending[sock] = thread
                thread.start()

    def _admit(self, sock: socket.socket, address: tuple[str, int]) -> None:
        try:
            peer = shake(sock, ServerHandshake(self._secret.reveal(), self._me, self._check), self._timeout_s)
            with self._lock:
                self._pending.pop(sock)
                if self._closed:
                    raise WireError("the server was closed meanwhile")
            if peer.role == "copies" and self._on_copies is not None:
                self._on_copies(sock)
            else:
                self._on_connection(Connection(sock, peer, max_frame_bytes=self._max_frame_bytes))
        except CutwaterError as e:
            _log.info("refused a connection from %s: %s", address, e)
            sock.close()
        except Exception:
            _log.exception("accepting a connection from %s failed", address)
            sock.close()
        finally:
            with self._lock:
                self._pending.pop(sock, None)


def connect(
    address: tuple[str, int],
    me: Peer,
    secret: Secret,
    check: Callable[[Peer], Refusal | None] | None = None,
    *,
    deadline_s: float = 10.0,
    max_frame_bytes: int = 1 << 30,
    wanted: Callable[[], None] = nothing,
) -> Connection:
    """Dial a worker; tries again while it is not there or not ready yet.

    Args:
        wanted: called before it tries again; raises if nobody wants the connection any more.

    Raises:
        FencedError: the peer refused us for good, or ``check`` refused it.
        WireError: no connection within ``deadline_s``, or the peer does not know the secret.
    """
    deadline = time.monotonic() + deadline_s
    pause_s = 0.01
    while True:
        left_s = deadline - time.monotonic()
        try:
            return _dial(address, ClientHandshake(secret.reveal(), me, check), max(0.001, left_s), max_frame_bytes)
        except (OSError, TryLaterError) as e:
            if time.monotonic() + pause_s >= deadline:
                raise WireError(f"no connection to {address[0]}:{address[1]} within {deadline_s:g} s: {e}") from e
        time.sleep(pause_s * random.uniform(0.5, 1.0))
        wanted()
        pause_s = min(0.25, pause_s * 2)


def _dial(address: tuple[str, int], handshake: ClientHandshake, timeout_s: float, max_frame_bytes: int) -> Connection:
    sock = socket.create_connection(address, timeout=timeout_s)
    try:
        return Connection(sock, shake(sock, handshake, timeout_s), max_frame_bytes=max_frame_bytes)
    except BaseException:
        sock.close()
        raise
