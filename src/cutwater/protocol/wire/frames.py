"""The wire format, without any I/O: frames of a data connection and messages of a control connection.

A frame is a header of 40 bytes, an optional determinant log and a body::

    offset  0     1      2     4       6       8          16    20         28         32
            kind  flags  edge  source  target  first_row  rows  watermark  determinant log  body length
            (little-endian) u8    u8     u16   u16     u16     u64        u32   i64        u32        u64

Rows are numbered per channel (``first_row``); a barrier carries its checkpoint id there, a credit the frames granted,
an end the number of rows that went before, an arrival the next row wanted.  ``rows`` of a barrier are those it overtook
at its sender.  The body of rows is an Arrow IPC record batch message without a schema: both ends know it from the plan;
with the flag ``LATE`` an event time follows it.

The determinant log is what the sender knows of the choices of subtasks and the receiver may not (``choices``, R0).  It
goes with whatever is for a subtask; alone, as the first frame of a connection, and when it is large.
"""

from __future__ import annotations

import enum
import struct
from typing import Final, NamedTuple

from cutwater.data.time import MIN_WATERMARK
from cutwater.errors import WireError

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


class Frame(NamedTuple):
    """A whole frame, as ``FrameDecoder`` returns it."""

    header: Header
    order_log: bytes = b""
    body: bytes = b""


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


class FrameDecoder:
    """Frames from a byte stream that arrives in pieces of any size.

    Feed bytes, then call ``next_frame`` until it returns ``None``.  After an error nothing more is delivered: every
    later call raises the same error.  Memory grows with what has arrived, never with what a header announces.

    >>> decoder = FrameDecoder(max_frame_bytes=1024)
    >>> data = encode_header(Header(Kind.BARRIER, first_row=7))
    >>> decoder.feed(data[:39]); decoder.next_frame()
    >>> decoder.feed(data[39:]); decoder.next_frame().header.first_row
    7
    """

    def __init__(self, *, max_frame_bytes: int) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._data = bytearray()
        self._header: Header | None = None
        self._error: WireError | None = None

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Add bytes as they came."""
        if self._error is not None:
            raise self._error
        self._data += data

    def next_frame(self) -> Frame | None:
        """The next whole frame, or ``None`` if more bytes are needed.

        Raises:
            WireError: the stream is not made of valid frames.
        """
        if self._error is not None:
            raise self._error
        if self._header is None:
            if len(self._data) < HEADER_BYTES:
                return None
            try:
                self._header = decode_header(self._data, max_frame_bytes=self._max_frame_bytes)
            except WireError as e:
                self._error = e
                self._data.clear()
                raise
            del self._data[:HEADER_BYTES]
        header = self._header
        log, size = header.order_log_length, header.order_log_length + header.body_length
        if len(self._data) < size:
            return None
        frame = Frame(header, bytes(self._data[:log]), bytes(self._data[log:size]))
        del self._data[:size]
        self._header = None
        return frame

    @property
    def at_boundary(self) -> bool:
        """True between two frames: here, and only here, the stream may end."""
        return self._header is None and not self._data


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

    @property
    def at_boundary(self) -> bool:
        """True between two messages: here, and only here, the stream may end."""
        return not self._data
