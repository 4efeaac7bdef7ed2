"""Mutual authentication of a connection, without any I/O (the first bytes of every data and control connection).

Both sides hold the job's secret.  Each proves it with an HMAC-SHA256 over a label of its own (no reflection), the
protocol version, both nonces (no replay) and everything said so far; nothing of the other side is parsed before its
proof is checked::

    client -> server   magic version client-nonce knock
    client <- server   magic version server-nonce
    client -> server   proof length client-identity
    client <- server   proof length verdict server-identity

The knock is an HMAC of the bytes before it, under another label: a server tells those who know the secret from
strangers by the first bytes that come, and can keep its patience for the others.  It admits nobody, since who listened
to a connection can send its knock again.

Who greets with a wrong knock hears that he is refused, in bytes that are the same for all, and nothing else: so who has
another secret learns at once that he need not try again.  Strangers who send anything else hear nothing.

The identity says role, job, worker, attempt and incarnation; ``check`` refuses what does not belong here (fencing).  A
refusal is proved, too, so that nobody else can tell a worker to give up.
"""

from __future__ import annotations

import abc
import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable
from typing import Final, Literal

import msgspec

from cutwater.data.decoding import prepare
from cutwater.errors import FencedError, WireError
from cutwater.protocol.wire.frames import PROTOCOL_VERSION

MAX_IDENTITY_BYTES: Final = 2048
"""Longest identity, refusal text included."""

_MAGIC: Final = b"CUTW"
_NONCE_BYTES: Final = 32
_PROOF_BYTES: Final = 32
_LENGTH: Final = struct.Struct("<H")
_PREFIX: Final = _MAGIC + bytes([PROTOCOL_VERSION])
_REFUSED: Final = _MAGIC + b"\0"
"""In the place of a server's greeting, and as short as its beginning; there is no version 0."""
_HELLO_BYTES: Final = len(_PREFIX) + _NONCE_BYTES
_KNOCK_LABEL: Final = b"cutwater knock"
_STRANGER: Final = "It belongs to another job, or is not Cutwater at all."
_PROVED_BYTES: Final = _PROOF_BYTES + _LENGTH.size


class Peer(msgspec.Struct, frozen=True):
    """Process at the other end of a connection."""

    role: Literal["coordinator", "control", "data", "copies"]
    """``coordinator``: the driver's end of a control connection; else a worker's end of one."""
    job: str
    """Uid of the job."""
    worker: int = -1
    """Index of the worker; -1: not assigned yet, or not a worker."""
    attempt: int = 0
    incarnation: int = 0
    region: int = 0
    """Region that the connection is for: regions come and go by themselves."""
    own_region: int = 0
    """Region that dials."""


class Refusal(msgspec.Struct, frozen=True):
    """Refusal of a peer that knows the secret.

    ``later``: it may try again (this side is behind, for example); otherwise it is fenced off for good.
    """

    reason: str
    later: bool = False


class TryLaterError(WireError):
    """The peer is not ready for this connection yet: dial again."""


class _Identity(msgspec.Struct, frozen=True):
    peer: Peer
    refusal: Refusal | None = None


prepare(_Identity)


class Handshake(abc.ABC):
    """Base of both sides.

    Write ``start()`` to the socket, then feed what arrives to ``receive`` and write what it returns, until ``wanted``
    is 0: then it is ``done``, or there is a ``refusal``.  A driver that never reads more than ``wanted`` bytes leaves
    the first frame to its reader.

    Args:
        secret: the job's, at least 16 bytes.
        me: what to tell the peer.
        check: decides about an authenticated peer; ``None`` lets everybody in.
    """

    _own_label: bytes
    _peer_label: bytes
    _greeting_bytes: int
    """Length of the first message of the peer."""

    def __init__(self, secret: bytes, me: Peer, check: Callable[[Peer], Refusal | None] | None = None) -> None:
        if len(secret) < 16:
            raise WireError(f"a job's secret has at least 16 bytes, got {len(secret)}")
        self._secret, self._me, self._check = secret, me, check
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._transcript = b""
        self._data = bytearray()
        self._proof: bytes | None = None
        self._length = 0
        self._greeted = False
        self._peer: Peer | None = None
        self._error: WireError | None = None
        self.refusal: Refusal | None = None
        self.farewell = b""
        """Bytes for a peer that failed, before it is hung up on."""

    def start(self) -> bytes:
        """The first bytes to send (none for a server)."""
        return b""

    def receive(self, data: bytes) -> bytes:
        """Take bytes from the peer; returns bytes to send.

        Raises:
            WireError: the peer could not prove the secret, or sent something else than a handshake.  Every later call
                raises it again.
        """
        if self._error is not None:
            raise self._error
        self._data += data
        answer = b""
        try:
            if not self._greeted:
                self._check_prefix()
            while (whole := self._whole) and len(self._data) >= whole:
                message = bytes(self._data[:whole])
                del self._data[:whole]
                answer += self._step(message)
            if not whole and self._data:
                raise WireError("the peer sent more than a handshake before it was answered")
        except WireError as e:
            self._error, self._peer, self.refusal = e, None, None
            self._data.clear()
            raise
        return answer

    @property
    def _whole(self) -> int:
        """Bytes of the message that is being received; 0 when nothing more is expected."""
        if self._peer is not None or self.refusal is not None:
            return 0
        if not self._greeted:
            return self._greeting_bytes
        return _PROVED_BYTES if self._proof is None else self._length

    @property
    def wanted(self) -> int:
        """Bytes to read next; 0 at the end."""
        whole = self._whole
        return whole - len(self._data) if whole else 0

    @property
    def done(self) -> bool:
        """True when both sides have proved the secret and accepted each other."""
        return self._peer is not None

    @property
    def peer(self) -> Peer:
        """Process at the other end; known only after it proved the secret and was accepted.

        Raises:
            FencedError: one side refused the other for good.
            TryLaterError: one side asks to try again.
            WireError: the handshake is not finished.
        """
        if self.refusal is not None:
            if self.refusal.later:
                raise TryLaterError(f"not yet: {self.refusal.reason}")
            raise FencedError(f"connection refused: {self.refusal.reason}")
        if self._peer is None:
            raise WireError("the handshake is not finished: the peer is unknown")
        return self._peer

    def _step(self, message: bytes) -> bytes:
        if not self._greeted:
            answer = self._answer_greeting(message)
            self._greeted = True
            return answer
        if self._proof is None:
            (self._length,) = _LENGTH.unpack_from(message, _PROOF_BYTES)
            self._proof = message[:_PROOF_BYTES]
            if not 0 < self._length <= MAX_IDENTITY_BYTES:
                raise WireError(f"an identity has 1 to {MAX_IDENTITY_BYTES} bytes, the peer announced {self._length}")
            return b""
        if not hmac.compare_digest(self._prove(self._peer_label, message), self._proof):
            raise WireError("the peer could not prove the job's secret", hint=_STRANGER)
        self._transcript += self._proof + message
        try:
            said = msgspec.msgpack.decode(message, type=_Identity)
        except msgspec.MsgspecError as e:
            raise WireError(f"the peer's identity cannot be read: {e}") from None
        return self._answer_proof(said)

    def _check_prefix(self) -> None:
        """Whatever cannot become a greeting is refused at its first byte, and not waited for."""
        begun = bytes(self._data[: len(_PREFIX)])
        if _PREFIX.startswith(begun):
            return
        if begun == _REFUSED:
            raise WireError(
                "the peer refused this connection: authentication failed, since its secret is another one",
                hint="It belongs to another job, or to another start of this one: see which driver or worker is there.",
            )
        if not begun.startswith(_MAGIC):
            raise WireError("the peer does not speak Cutwater's protocol")
        raise WireError(
            f"the peer speaks version {begun[-1]} of the protocol, this side {PROTOCOL_VERSION}",
            hint="Install the same release of cutwater on the driver and all workers.",
        )

    def _hello(self) -> bytes:
        return _PREFIX + self._nonce

    def _knock(self, hello: bytes) -> bytes:
        return hmac.new(self._secret, _KNOCK_LABEL + hello, hashlib.sha256).digest()

    def _prove(self, label: bytes, message: bytes) -> bytes:
        said = label + self._transcript + _LENGTH.pack(len(message)) + message
        return hmac.new(self._secret, said, hashlib.sha256).digest()

    def _identify(self, refusal: Refusal | None = None) -> bytes:
        if refusal is not None:
            refusal = Refusal(refusal.reason[:200], refusal.later)
        message = msgspec.msgpack.encode(_Identity(self._me, refusal))
        if len(message) > MAX_IDENTITY_BYTES:
            raise WireError(f"this side's identity has {len(message)} bytes, allowed are {MAX_IDENTITY_BYTES}")
        proof = self._prove(self._own_label, message)
        self._transcript += proof + message
        return proof + _LENGTH.pack(len(message)) + message

    def _accept(self, said: _Identity) -> None:
        """Admit or refuse an authenticated peer."""
        refusal = said.refusal or (self._check(said.peer) if self._check is not None else None)
        if refusal is None:
            self._peer = said.peer
        self.refusal = refusal

    @abc.abstractmethod
    def _answer_greeting(self, message: bytes) -> bytes: ...

    @abc.abstractmethod
    def _answer_proof(self, said: _Identity) -> bytes: ...


class ClientHandshake(Handshake):
    """The side that dialled.

    >>> me, you = Peer("control", "j1", worker=0, attempt=2), Peer("coordinator", "j1", attempt=2)
    >>> client, server = ClientHandshake(bytes(32), me), ServerHandshake(bytes(32), you)
    >>> to_server = client.start()
    >>> while not (client.done and server.done):
    ...     to_server = client.receive(server.receive(to_server))
    >>> client.peer.role, server.peer.worker
    ('coordinator', 0)
    """

    _own_label, _peer_label = b"cutwater client", b"cutwater server"
    _greeting_bytes = _HELLO_BYTES

    def start(self) -> bytes:
        return self._hello() + self._knock(self._hello())

    def _answer_greeting(self, message: bytes) -> bytes:
        self._transcript = self.start() + message
        return self._identify()

    def _answer_proof(self, said: _Identity) -> bytes:
        self._accept(said)
        return b""


class ServerHandshake(Handshake):
    """The side that listens.  It says nothing before the client knocked, and nothing of itself before its proof.

    >>> client, server = ClientHandshake(bytes(32), Peer("data", "j")), ServerHandshake(b"x" * 32, Peer("data", "j"))
    >>> server.receive(client.start())
    Traceback (most recent call last):
    cutwater.errors.WireError: the peer could not prove the job's secret. It belongs to another job, or is not ...
    >>> client.receive(server.farewell)
    Traceback (most recent call last):
    cutwater.errors.WireError: the peer refused this connection: authentication failed, since its secret is ...
    """

    _own_label, _peer_label = b"cutwater server", b"cutwater client"
    _greeting_bytes = _HELLO_BYTES + _PROOF_BYTES

    @property
    def knocked(self) -> bool:
        """The client has shown that it knows the secret, or listened to somebody who does."""
        return self._greeted

    def _answer_greeting(self, message: bytes) -> bytes:
        if not hmac.compare_digest(self._knock(message[:_HELLO_BYTES]), message[_HELLO_BYTES:]):
            self.farewell = _REFUSED
            raise WireError("the peer could not prove the job's secret", hint=_STRANGER)
        self._transcript = message + self._hello()
        return self._hello()

    def _answer_proof(self, said: _Identity) -> bytes:
        self._accept(said)
        return self._identify(self.refusal)
