"""Stands between clients and a broker, and loses what ends a transaction when it is told to.

It knows the first words of each message only: its length, what is asked (``EndTxn`` is 26), and the number by which the
answer says what it answers.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from typing import Literal, Self

Loss = Literal["request", "answer", "connection"]
"""What is lost of the next end of a transaction: the broker never hears of it; or it answers and nobody hears; or the
connection ends in place of the answer."""

END_TRANSACTION = 26


class Proxy:
    """Listens on a port of loopback, and passes on to another one."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.target = 0
        """The broker's port, given before anybody connects."""
        self.lost = threading.Event()
        """What was to be lost is."""
        self.ends = 0
        """Ends of transactions that came by."""
        self._next: Loss | None = None
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def lose(self, what: Loss) -> None:
        """Lose that of the next end of a transaction; once."""
        with self._lock:
            self.lost.clear()
            self._next = what

    def close(self) -> None:
        """End all connections."""
        self._listener.close()
        with self._lock:
            for connection in self._open:
                _end(connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    broker = socket.create_connection(("127.0.0.1", self.target), 5)
                except OSError:
                    client.close()
                    continue
                broker.settimeout(None)
                with self._lock:
                    self._open |= {client, broker}
                pair = _Pair(self, client, broker)
                for run in (pair.ask, pair.answer):
                    threading.Thread(target=run, daemon=True).start()

    def meets(self) -> Loss | None:
        """The end of a transaction comes by; what is to be lost of it."""
        with self._lock:
            self.ends += 1
            loss, self._next = self._next, None
            return loss


class _Pair:
    """A client's connection, and that to the broker in its name."""

    def __init__(self, proxy: Proxy, client: socket.socket, broker: socket.socket) -> None:
        self._proxy, self._client, self._broker = proxy, client, broker
        self._loses: dict[int, Loss] = {}
        """By the number of the request."""
        self._silent = False

    def ask(self) -> None:
        with contextlib.suppress(OSError):
            while (message := _message(self._client)) is not None:
                what, _, number = struct.unpack_from(">hhi", message, 4)
                loss = self._proxy.meets() if what == END_TRANSACTION else None
                if loss == "request":
                    self._silent = True
                    self._proxy.lost.set()
                elif loss is not None:
                    self._loses[number] = loss
                if not self._silent:
                    self._broker.sendall(message)
        _end(self._broker)

    def answer(self) -> None:
        with contextlib.suppress(OSError):
            while (message := _message(self._broker)) is not None:
                (number,) = struct.unpack_from(">i", message, 4)
                loss = self._loses.pop(number, None)
                if loss is not None:
                    self._silent = True
                    self._proxy.lost.set()
                if loss == "connection":
                    break
                if not self._silent:
                    self._client.sendall(message)
        _end(self._client)
        _end(self._broker)


def _message(connection: socket.socket) -> bytes | None:
    """The next one with its length; ``None`` at the end."""
    head = _exactly(connection, 4)
    if head is None:
        return None
    body = _exactly(connection, int.from_bytes(head, "big"))
    return None if body is None else head + body


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    parts: list[bytes] = []
    while count:
        part = connection.recv(min(count, 1 << 20))
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
