"""The job's secret, and proving it over a socket."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import time

import msgspec

from cutwater.data.decoding import prepare
from cutwater.errors import WireError
from cutwater.protocol.wire import Handshake, Peer
from cutwater.storage.store.seal import PLAIN, Seal


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


_NONCE_BYTES = 16
_MAC_BYTES = 32


class _Keys(msgspec.Struct, frozen=True, array_like=True):
    keys: list[bytes]
    accept_unsealed: bool


prepare(_Keys)


def hidden(seal: Seal, secret: Secret) -> bytes:
    """The keys of a seal for those who know the secret; nothing where there is none.

    >>> from cutwater.runtime.transport.secret import new_secret
    >>> seal, secret = Seal([b"0123456789abcdef"]), new_secret()
    >>> b"0123456789" in hidden(seal, secret), shown(hidden(seal, secret), secret).key_ids == seal.key_ids
    (False, True)
    """
    if not seal.keyed:
        return b""
    plain = msgspec.msgpack.encode(_Keys(*seal.reveal()))
    nonce = secrets.token_bytes(_NONCE_BYTES)
    covered = nonce + _mixed(plain, nonce, secret)
    return _mac(covered, secret) + covered


def shown(data: bytes, secret: Secret) -> Seal:
    """The seal of which ``hidden`` made this.

    Raises:
        WireError: it was changed on its way.
    """
    if not data:
        return PLAIN
    mac, covered = data[:_MAC_BYTES], data[_MAC_BYTES:]
    if not hmac.compare_digest(mac, _mac(covered, secret)):
        raise WireError("the key of the job's snapshots was changed on its way to this worker")
    nonce = covered[:_NONCE_BYTES]
    found = msgspec.msgpack.decode(_mixed(covered[_NONCE_BYTES:], nonce, secret), type=_Keys)
    return Seal(found.keys, accept_unsealed=found.accept_unsealed)


def _mixed(data: bytes, nonce: bytes, secret: Secret) -> bytes:
    key, stream = _derived(b"cutwater key transport: stream", secret), b""
    while len(stream) < len(data):
        stream += hmac.new(key, nonce + len(stream).to_bytes(8, "big"), hashlib.sha256).digest()
    return bytes(a ^ b for a, b in zip(data, stream, strict=False))


def _mac(data: bytes, secret: Secret) -> bytes:
    return hmac.new(_derived(b"cutwater key transport: mac", secret), data, hashlib.sha256).digest()


def _derived(label: bytes, secret: Secret) -> bytes:
    return hmac.new(secret.reveal(), label, hashlib.sha256).digest()
