"""Control connections: the driver's listener and the worker's end.

Every connection proves the job's secret before anything of it is parsed.  A peer that does not read never holds up the
sender (``SocketWriter``).
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from cutwater.errors import WireError
from cutwater.protocol.wire import ClientHandshake, ControlDecoder, Peer, Refusal, ServerHandshake, encode_control
from cutwater.runtime.control import messages as c
from cutwater.runtime.transport.door import Door
from cutwater.runtime.transport.secret import Secret
from cutwater.runtime.transport.sockets import JOIN_S, SocketWriter, dial, shut, tune


def now_ms() -> float:
    """The driver's monotonic clock."""
    return time.monotonic() * 1000


class ControlLink:
    """One end of a control connection.

    Args:
        sock: connected and authenticated.
        received: called from the reader thread with each body.
        lost: called once from the reader thread when the connection ended, with the reason.
        heartbeat_s: send a sign of life so often; a long call of an operator or sink in the loop thread does not stop
            it.
    """

    def __init__(
        self,
        sock: socket.socket,
        received: Callable[[bytes], None],
        lost: Callable[[str], None],
        name: str,
        heartbeat_s: float | None = None,
    ) -> None:
        tune(sock)  # a worker behind a cut network ends by itself, and gives its core back
        self._sock, self._received, self._lost = sock, received, lost
        self._closed = threading.Event()
        self._reader = threading.Thread(target=self._read, name=f"{name}-reader", daemon=True)
        self._writer = SocketWriter(sock, f"{name}-writer", lambda _: None)  # the reader tells that it is lost
        self._heart: threading.Thread | None = None
        if heartbeat_s is not None:
            self._heart = threading.Thread(target=self._beat, args=(heartbeat_s,), name=f"{name}-heart", daemon=True)

    def start(self) -> None:
        self._reader.start()
        self._writer.start()
        if self._heart is not None:
            self._heart.start()

    @property
    def local_host(self) -> str:
        """The local address of this connection."""
        return str(self._sock.getsockname()[0])

    def send(self, message: c.ToWorker | c.FromWorker) -> None:
        """Send a message; never blocks, and drops it when the link is closed."""
        self.send_frame(encode_control(c.encode(message)))

    def send_frame(self, frame: bytes) -> None:
        """``send`` a message that is encoded already."""
        if not self._closed.is_set():
            self._writer.send([frame], len(frame))

    def close(self, linger_s: float = 0.5) -> None:
        """Send what is queued (for at most ``linger_s``), then close.  ``lost`` is not called any more."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._writer.drain(linger_s)
        shut(self._sock)
        self._writer.stop()
        self._writer.join(JOIN_S)
        self._sock.close()

    def sever(self) -> None:
        """Break the connection, as a network does: both ends' ``lost`` is called."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def drain(self, timeout_s: float) -> None:
        """Wait until the other end closed and everything it sent was received."""
        self._reader.join(timeout_s)

    def _read(self) -> None:
        decoder = ControlDecoder()
        reason = "the connection was closed"
        try:
            while data := self._sock.recv(1 << 16):
                decoder.feed(data)
                while (body := decoder.next_message()) is not None:
                    self._received(body)
        except (OSError, WireError) as e:
            reason = str(e)
        if not self._closed.is_set():
            self._lost(reason)

    def _beat(self, every_s: float) -> None:
        while not self._closed.wait(every_s):
            self.send(c.Heartbeat())


class WorkerLink(ControlLink):
    """The driver's end of a worker's connection."""

    slot: int = -1
    incarnation: int = 0
    hello: c.Hello | None = None
    seen_ms: float = 0.0
    copies: frozenset[str] = frozenset()
    """Files of the job that the worker has copies of."""

    @property
    def where(self) -> str:
        """Process and host, in a user's words; empty before it said so."""
        return self.hello.where if self.hello is not None else ""


class ControlServer(Door):
    """Listens for workers on one address of the driver.

    Args:
        host: address to bind to (loopback in local mode).
        secret: of the job.
        job: its name; a worker of another job is refused.
        joined, received, lost: called from connection threads.
        told: see ``Door``.
    """

    def __init__(
        self,
        host: str,
        secret: Secret,
        job: str,
        *,
        joined: Callable[[WorkerLink, c.Hello], None],
        received: Callable[[WorkerLink, c.FromWorker], None],
        lost: Callable[[WorkerLink, str], None],
        told: Callable[[str], None],
    ) -> None:
        def check(peer: Peer) -> Refusal | None:
            if peer.role != "control" or peer.job != job:
                return Refusal(f"this is the coordinator of job {job!r}")
            return None

        self._joined, self._received, self._lost = joined, received, lost
        super().__init__(
            host,
            0,
            lambda: ServerHandshake(secret.reveal(), Peer("coordinator", job), check),
            self._begin,
            name="control",
            told=told,
        )

    def _begin(self, sock: socket.socket, peer: Peer) -> None:
        """A worker is connected."""
        holder: list[WorkerLink] = []

        def received(body: bytes) -> None:
            message = c.decode_from_worker(body)
            if isinstance(message, c.Hello):
                self._joined(holder[0], message)
            else:
                self._received(holder[0], message)

        link = WorkerLink(sock, received, lambda reason: self._lost(holder[0], reason), "cutwater-worker")
        holder.append(link)
        link.start()


def dial_coordinator(
    address: tuple[str, int],
    secret: Secret,
    job: str,
    slot: int,
    received: Callable[[c.ToWorker], None],
    lost: Callable[[str], None],
    *,
    heartbeat_s: float,
    timeout_s: float = 60.0,
) -> ControlLink:
    """The worker's end, connected and authenticated; call ``start`` on it.

    Raises:
        WireError: the coordinator cannot be reached in time, or one side could not prove the secret.
    """
    me = Peer("control", job, worker=slot)
    try:
        sock, _ = dial(address, secret, lambda key: ClientHandshake(key, me), deadline_s=timeout_s)
    except WireError as e:
        hint = e.hint or "Executors must be able to reach the driver (spark.driver.host)."
        raise WireError(f"the coordinator cannot be reached: {e.message}", hint=hint) from e

    def decode(body: bytes) -> Any:
        received(c.decode_to_worker(body))

    return ControlLink(sock, decode, lost, "cutwater-control", heartbeat_s)
