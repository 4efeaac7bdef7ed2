"""Streams of frames in pieces, and the frames that a reader finds in them."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterable
from typing import Any, TypeAlias

import pyarrow as pa

from cutwater.errors import CutwaterError
from cutwater.protocol.wire import Header
from cutwater.runtime.transport.sockets import FrameReader

Frame: TypeAlias = tuple[Header, bytes, bytes]
"""Header, determinant log and body."""


class Pieces:
    """A socket whose stream arrives in pieces, and ends behind the last."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = deque(piece for piece in pieces if piece)

    def recv_into(self, buffer: memoryview, size: int = 0, flags: int = 0) -> int:
        taken = 0
        while self._pieces and taken < len(buffer) and (taken == 0 or flags & socket.MSG_WAITALL):
            piece = self._pieces.popleft()
            count = min(len(piece), len(buffer) - taken)
            buffer[taken : taken + count] = piece[:count]
            taken += count
            if count < len(piece):
                self._pieces.appendleft(piece[count:])
        return taken


def frames_of(pieces: Iterable[bytes], *, max_frame_bytes: int) -> tuple[list[Frame], CutwaterError | None]:
    """The frames that a reader gives of a stream, and why it ended before its end."""
    frames: list[Frame] = []
    ends: list[CutwaterError | None] = []

    def on_frame(header: Header, order_log: bytes, body: pa.Buffer | None) -> None:
        frames.append((header, order_log, b"" if body is None else body.to_pybytes()))

    sock: Any = Pieces(pieces)
    reader = FrameReader(sock, "reader", max_frame_bytes=max_frame_bytes, on_frame=on_frame, on_end=ends.append)
    reader.start()
    reader.join(20.0)
    (end,) = ends
    return frames, end
