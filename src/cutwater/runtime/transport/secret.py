"""The job's secret, and proving it over a socket."""

from __future__ import annotations

import secrets
import socket
import time

from cutwater.errors import WireError
from cutwater.protocol.wire.handshake import Handshake, Peer


class HungUpError(WireError):
    """The peer was silent, or hung up, before it proved anything: dial again."""


class Secret:
    """Bytes that never appear in a log, a message or a traceback.

    >>> Secret(b"0123456789abcdef")
    Secret(***)
    """

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        if len(value) < 16:
            raise WireError(f"a job's secret has at least 16 bytes, got {len(value)}")
        self._value = value

    def reveal(self) -> bytes:
        """The bytes themselves."""
        return self._value

    def __repr__(self) -> str:
        return "Secret(***)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and secrets.compare_digest(self._value, other._value)

    def __hash__(self) -> int:
        return hash(self._value)


def new_secret() -> Secret:
    """A fresh secret of 32 random bytes."""
    return Secret(secrets.token_bytes(32))


def shake(sock: socket.socket, handshake: Handshake, timeout_s: float) -> Peer:
    """Run a handshake over a connected socket; the first byte after it is left in the socket.

    Args:
        timeout_s: for all of it, however slowly the peer dribbles its bytes.

    Raises:
        HungUpError: the peer was too slow, or hung up.
        WireError: it failed to prove the secret, or is not Cutwater.
        FencedError, TryLaterError: one side refused the other.
    """
    deadline = time.monotonic() + timeout_s
    try:
        _send(sock, handshake.start(), deadline)
        while handshake.wanted:
            sock.settimeout(_left_s(deadline))
            data = sock.recv(handshake.wanted)
            if not data:
                raise HungUpError(
                    "the peer hung up during the handshake",
                    hint="It has another release, or strangers crowd its port.",
                )
            _send(sock, handshake.receive(data), deadline)
        sock.settimeout(None)
    except TimeoutError:
        raise HungUpError(f"the handshake took longer than {timeout_s:g} s") from None
    except OSError as e:
        raise HungUpError(
            f"the connection broke during the handshake: {e}",
            hint="The peer has another release, or strangers crowd its port.",
        ) from e
    return handshake.peer


def _send(sock: socket.socket, data: bytes, deadline: float) -> None:
    if data:
        sock.settimeout(_left_s(deadline))
        sock.sendall(data)


def _left_s(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
