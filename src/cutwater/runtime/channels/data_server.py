"""Connections between workers: listening and dialling.  What then goes on is ``Connection``'s."""

from __future__ import annotations

import socket
from collections.abc import Callable

from cutwater.protocol.wire.handshake import ClientHandshake, Peer, Refusal, ServerHandshake
from cutwater.runtime.channels.connection import Connection
from cutwater.runtime.transport.door import Door
from cutwater.runtime.transport.secret import Secret
from cutwater.runtime.transport.signal import nothing
from cutwater.runtime.transport.sockets import dial


class DataServer(Door):
    """Listens for the connections of other workers.

    Args:
        me: this worker.
        secret: the job's.
        check: decides about an authenticated peer: wrong job, attempt or incarnation (fencing).
        on_connection: gets each accepted connection, not started, in the thread of the door.
        on_copies: gets what a peer of role "copies" has dialled; without it there is none that ``check`` may accept.
        host, port, timeout_s, strangers_max: see ``Door``.
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
        timeout_s: float = 5.0,
        strangers_max: int = 128,
        max_frame_bytes: int = 1 << 30,
        on_copies: Callable[[socket.socket], None] | None = None,
    ) -> None:
        def admitted(sock: socket.socket, peer: Peer) -> None:
            if peer.role == "copies" and on_copies is not None:
                on_copies(sock)
            else:
                on_connection(Connection(sock, peer, max_frame_bytes=max_frame_bytes))

        super().__init__(
            host,
            port,
            lambda: ServerHandshake(secret.reveal(), me, check),
            admitted,
            name=f"data of worker {me.worker}",
            timeout_s=timeout_s,
            strangers_max=strangers_max,
        )


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
    """Dial a worker; tries again as ``dial`` does.

    Raises:
        FencedError: the peer refused us for good, or ``check`` refused it.
        WireError: no connection within ``deadline_s``, or the peer does not know the secret.
    """
    sock, peer = dial(
        address, secret, lambda key: ClientHandshake(key, me, check), deadline_s=deadline_s, wanted=wanted
    )
    return Connection(sock, peer, max_frame_bytes=max_frame_bytes)
