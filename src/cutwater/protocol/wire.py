"""The wire format, without any I/O: frames of a data connection, messages of a control connection, and the handshake.

A frame is a header of 40 bytes, an optional determinant log and a body::

    offset  0     1      2     4       6       8          16    20         28         32
            kind  flags  edge  source  target  first_row  rows  watermark  determinant log  body length
            (little-endian) u8    u8     u16   u16     u16     u64        u32   i64        u32        u64

Rows are numbered per channel (``first_row``); a barrier carries its checkpoint id there, a credit the frames granted,
an end the number of rows that went before, an arrival the next row wanted.  ``rows`` of a barrier are those it overtook
at its sender.  The body of rows is an Arrow IPC record batch message without a schema: both ends know it from the plan;
with the flag ``LATE`` an event time follows it.

The determinant log is what the sender knows of the choices of subtasks and the receiver may not (``determinants``, R0).
It goes with whatever is for a subtask; alone, as the first frame of a connection, and when it is large.

Handshake
---------
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
import enum
import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable
from typing import Final, Literal, NamedTuple

import msgspec

from cutwater.data.decoding import prepare
from cutwater.data.time import MIN_WATERMARK
from cutwater.errors import FencedError, WireError

PROTOCOL_VERSION: Final = 2
"""Both sides of a connection must have the same; the handshake proves it."""


class Kind(enum.IntEnum):
    """Kind of a frame's contents."""

    ROWS = 1
    WATERMARK = 2
    BARRIER = 3
    END = 4
    CREDIT = 5
    GOODBYE = 6
    """The last frame of an orderly close; an end of stream without it is a lost peer."""
    ORDER = 7
    """A determinant log alone."""
    ARRIVED = 8
    """Next row that a receiver lacks of a channel whose sender was replaced (R4)."""


IDLE: Final = 1
"""Flag of a watermark: the sender has nothing to say for now."""
FINAL: Final = 2
"""Flag of a barrier: the job's last checkpoint (rule A7).  Of what arrived: so did the end of data."""
CUT: Final = 4
"""Flag of a barrier: it overtook waiting rows (unaligned)."""
LATE: Final = 8
"""Flag of rows: they break the promise of their split.  The event time that the split had reached before them ends the
body (i64): what ends at it or before is over for them (rule W4)."""
LATE_BYTES: Final = 8
"""Of that event time."""
PROBE: Final = 16
"""Flag of a barrier: its wave stores nothing (rule C6)."""
SAVEPOINT: Final = 32
"""Flag of a barrier: its wave is aligned, whatever the protocol."""

_HEADER: Final = struct.Struct("<BBHHHQIqIQ")
HEADER_BYTES: Final = _HEADER.size
_LENGTH: Final = struct.Struct("<I")
_MAX_ROW: Final = 2**63 - 1
_MAX_CREDIT: Final = 2**20
_FLAGS: Final[dict[int, int]] = {
    Kind.ROWS: LATE,
    Kind.WATERMARK: IDLE,
    Kind.BARRIER: FINAL | CUT | PROBE | SAVEPOINT,
    Kind.END: 0,
    Kind.CREDIT: 0,
    Kind.GOODBYE: 0,
    Kind.ORDER: 0,
    Kind.ARRIVED: FINAL,
}
"""Kinds, and the flags that each may carry."""
_NO_ORDER: Final = frozenset({Kind.CREDIT, Kind.GOODBYE, Kind.ARRIVED})


class Header(NamedTuple):
    """The fixed part of a frame.

    >>> header = Header(Kind.ROWS, edge=3, source=0, target=1, first_row=100, rows=10, body_length=256)
    >>> decode_header(encode_header(header), max_frame_bytes=1 << 20) == header
    True
    """

    kind: int
    flags: int = 0
    edge: int = 0
    source: int = 0
    target: int = 0
    first_row: int = 0
    rows: int = 0
    watermark: int = MIN_WATERMARK
    order_log_length: int = 0
    body_length: int = 0


def encode_header(header: Header) -> bytes:
    """The 40 bytes of a header.

    Raises:
        WireError: a field does not fit.
    """
    try:
        return _HEADER.pack(*header)
    except struct.error as e:
        raise WireError(f"{header} does not fit into a frame header: {e}") from None


def decode_header(data: bytes | bytearray | memoryview, *, max_frame_bytes: int, offset: int = 0) -> Header:
    """The header at ``offset``, checked: every field of a kind that does not use it must be at rest.

    Args:
        max_frame_bytes: largest determinant log and body together.

    Raises:
        WireError: fewer than 40 bytes, an unknown kind or flag, a limit exceeded, or a field set that must not be.

    >>> decode_header(bytes(40), max_frame_bytes=1024)
    Traceback (most recent call last):
    cutwater.errors.WireError: unknown kind of frame 0
    """
    if len(data) - offset < HEADER_BYTES:
        raise WireError(f"a frame header has {HEADER_BYTES} bytes, got {len(data) - offset}")
    header = Header._make(_HEADER.unpack_from(data, offset))
    kind, flags, _, _, _, first_row, rows, watermark, order_log_length, body_length = header
    allowed = _FLAGS.get(kind)
    if allowed is None:
        raise WireError(f"unknown kind of frame {kind}")
    if flags & ~allowed:
        raise WireError(f"unknown flags {flags:#x} in {header}")
    if order_log_length + body_length > max_frame_bytes:
        size = order_log_length + body_length
        raise WireError(
            f"a frame announces {size} bytes, allowed are {max_frame_bytes}",
            hint="If rows are that large, raise max_frame_bytes.",
        )
    if kind == Kind.ROWS:
        if not rows or body_length <= (LATE_BYTES if flags & LATE else 0) or first_row + rows > _MAX_ROW:
            raise WireError(f"rows missing or out of range in {header}")
        return header
    behind = kind == Kind.BARRIER and flags & CUT
    if (rows and not behind) or body_length or first_row > _MAX_ROW:
        raise WireError(f"only rows carry data: {header}")
    if order_log_length and kind in _NO_ORDER:
        raise WireError(f"no determinant log goes with this: {header}")
    if watermark != MIN_WATERMARK and kind != Kind.WATERMARK:
        raise WireError(f"only rows and watermarks carry a watermark: {header}")
    if kind == Kind.CREDIT:
        if not 0 < first_row <= _MAX_CREDIT:
            raise WireError(f"credit of {first_row} frames is out of range")
    elif first_row and kind not in (Kind.BARRIER, Kind.END, Kind.ARRIVED):
        raise WireError(f"only rows, barriers, ends, arrivals and credits carry a number: {header}")
    return header


def encode_control(body: bytes, *, max_message_bytes: int = 1 << 28) -> bytes:
    """A control message with its length in front.

    Raises:
        WireError: the message is empty or too long.

    >>> encode_control(b"abc")
    b'\\x03\\x00\\x00\\x00abc'
    """
    if not 0 < len(body) <= max_message_bytes:
        raise WireError(f"a control message has 1 to {max_message_bytes} bytes, got {len(body)}")
    return _LENGTH.pack(len(body)) + body


class ControlDecoder:
    """Bodies of control messages from a byte stream that arrives in pieces of any size.

    >>> decoder = ControlDecoder(max_message_bytes=100)
    >>> decoder.feed(encode_control(b"one") + encode_control(b"two"))
    >>> decoder.next_message(), decoder.next_message(), decoder.next_message()
    (b'one', b'two', None)
    """

    def __init__(self, *, max_message_bytes: int = 1 << 28) -> None:
        self._max_message_bytes = max_message_bytes
        self._data = bytearray()
        self._error: WireError | None = None

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Add bytes as they came."""
        if self._error is not None:
            raise self._error
        self._data += data

    def next_message(self) -> bytes | None:
        """The next whole message, or ``None`` if more bytes are needed.

        Raises:
            WireError: a length is 0 or above the limit; every later call raises it again.
        """
        if self._error is not None:
            raise self._error
        if len(self._data) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._data)
        if not 0 < length <= self._max_message_bytes:
            self._data.clear()
            self._error = WireError(
                f"a control message announces {length} bytes, allowed are {self._max_message_bytes}"
            )
            raise self._error
        end = _LENGTH.size + length
        if len(self._data) < end:
            return None
        body = bytes(self._data[_LENGTH.size : end])
        del self._data[:end]
        return body


MAX_IDENTITY_BYTES: Final = 2048
"""Longest identity, refusal text included."""

_MAGIC: Final = b"CUTW"
_NONCE_BYTES: Final = 32
_PROOF_BYTES: Final = 32
_IDENTITY_LENGTH: Final = struct.Struct("<H")
_PREFIX: Final = _MAGIC + bytes([PROTOCOL_VERSION])
_REFUSED: Final = _MAGIC + b"\0"
"""In the place of a server's greeting, and as short as its beginning; there is no version 0."""
_HELLO_BYTES: Final = len(_PREFIX) + _NONCE_BYTES
_KNOCK_LABEL: Final = b"cutwater knock"
_STRANGER: Final = "It belongs to another job, or is not Cutwater at all."
_PROVED_BYTES: Final = _PROOF_BYTES + _IDENTITY_LENGTH.size


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
            (self._length,) = _IDENTITY_LENGTH.unpack_from(message, _PROOF_BYTES)
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
        said = label + self._transcript + _IDENTITY_LENGTH.pack(len(message)) + message
        return hmac.new(self._secret, said, hashlib.sha256).digest()

    def _identify(self, refusal: Refusal | None = None) -> bytes:
        if refusal is not None:
            refusal = Refusal(refusal.reason[:200], refusal.later)
        message = msgspec.msgpack.encode(_Identity(self._me, refusal))
        if len(message) > MAX_IDENTITY_BYTES:
            raise WireError(f"this side's identity has {len(message)} bytes, allowed are {MAX_IDENTITY_BYTES}")
        proof = self._prove(self._own_label, message)
        self._transcript += proof + message
        return proof + _IDENTITY_LENGTH.pack(len(message)) + message

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
