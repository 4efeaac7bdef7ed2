"""Reading frames from a socket."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Final

import pyarrow as pa

from cutwater.errors import CutwaterError, InvariantError, WireError
from cutwater.protocol.wire.frames import HEADER_BYTES, Header, decode_header

_STAGING_BYTES: Final = 16 * 1024
"""One read takes many small frames; of a large one it takes the header, and its body is read to where it stays."""


class FrameReader:
    """A thread that reads frames until the stream ends.

    Args:
        sock: a blocking socket; shutting it down ends the thread.
        name: of the thread.
        max_frame_bytes: larger frames are refused before anything is allocated.
        on_frame: called for each frame with its determinant log and its body (aligned, one allocation of its own;
            ``None`` for an empty body).
        on_end: called once: with ``None`` at the end of the stream between two frames, else with the reason.
    """

    def __init__(
        self,
        sock: socket.socket,
        name: str,
        *,
        max_frame_bytes: int,
        on_frame: Callable[[Header, bytes, pa.Buffer | None], None],
        on_end: Callable[[CutwaterError | None], None],
    ) -> None:
        self._sock, self._max_frame_bytes = sock, max_frame_bytes
        self._on_frame, self._on_end = on_frame, on_end
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread's end (not from the thread itself)."""
        if self._thread is not threading.current_thread() and self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        reason: CutwaterError | None = None
        try:
            self._read()
        except CutwaterError as e:
            reason = e
        except OSError as e:
            reason = WireError(f"the connection broke: {e.strerror or e}")
        except Exception as e:
            reason = InvariantError(f"handling a frame failed: {type(e).__name__}: {e}")
            reason.__cause__ = e
        self._on_end(reason)

    def _read(self) -> None:
        staging = memoryview(bytearray(_STAGING_BYTES))
        low = high = 0
        while True:
            count = self._sock.recv_into(staging[high:])
            if not count:
                if high:
                    raise WireError(f"the stream ended in the middle of a frame, {high} bytes into it")
                return
            high += count
            while high - low >= HEADER_BYTES:
                header = decode_header(staging, max_frame_bytes=self._max_frame_bytes, offset=low)
                start, size, order = low + HEADER_BYTES, header.body_length, b""
                if header.order_log_length:
                    start += header.order_log_length
                    if start <= high:
                        order = bytes(staging[start - header.order_log_length : start])
                    elif start - low <= _STAGING_BYTES:
                        break
                    else:
                        begun = staging[low + HEADER_BYTES : high]
                        order, start = self._large(header.order_log_length, begun).to_pybytes(), high
                if not size:
                    self._on_frame(header, order, None)
                    low = start
                elif start + size <= high:
                    self._on_frame(header, order, pa.py_buffer(bytes(staging[start : start + size])))
                    low = start + size
                elif HEADER_BYTES + header.order_log_length + size <= _STAGING_BYTES:
                    break  # the rest comes with the next read
                else:
                    self._on_frame(header, order, self._large(size, staging[start:high]))
                    low = high
            if low:
                staging[: high - low] = staging[low:high]
                low, high = 0, high - low

    def _large(self, size: int, begun: memoryview) -> pa.Buffer:
        """A determinant log or a body whose first bytes were read with its header."""
        body = pa.allocate_buffer(size)
        view = memoryview(body).cast("B")
        have = len(begun)
        view[:have] = begun
        while have < size:
            count = self._sock.recv_into(view[have:], 0, socket.MSG_WAITALL)
            if not count:
                raise WireError(f"the stream ended in the middle of a frame, {have} of {size} bytes of it came")
            have += count
        return body
