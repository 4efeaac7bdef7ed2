"""Copies of snapshot files between workers: a connection of its own, one question and one answer at a time.

It goes to the data server of the other worker and proves the job's secret there, as every connection does.  Rows never
wait behind it.  Every read and write ends within a deadline, so a peer that hangs costs a restore seconds, no more.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

import msgspec

from cutwater.errors import CorruptSnapshotError, CutwaterError, WireError
from cutwater.protocol.wire import ClientHandshake, Peer, encode_control
from cutwater.runtime.transport.secret import Secret
from cutwater.runtime.transport.sockets import dial, shut, tune
from cutwater.storage.snapshot.copies import Shelf, ShelfAnswer, ShelfWriter

_PATIENCE_S: Final = 5
"""For each piece that is sent or received."""
_PIECE_BYTES: Final = 1 << 20
_MAX_MESSAGE_BYTES: Final = 1 << 16
_LENGTH: Final = struct.Struct("<I")
_TIMEVAL: Final = struct.Struct("@ll")

T = TypeVar("T")


class _Offer(msgspec.Struct, frozen=True, tag="offer"):
    """The bytes follow if the answer is "send"."""

    file: str
    length: int
    checkpoint_id: int


class _Fetch(msgspec.Struct, frozen=True, tag="fetch"):
    file: str
    offset: int
    length: int


class _Answered(msgspec.Struct, frozen=True, tag="answered"):
    answer: ShelfAnswer


class _Found(msgspec.Struct, frozen=True, tag="found"):
    """So many bytes follow; -1: they are not here."""

    length: int


_questions = msgspec.msgpack.Decoder(_Offer | _Fetch)
_answers = msgspec.msgpack.Decoder(_Answered | _Found)


class _Stream:
    """Messages and bytes on an authenticated socket; every failure is a ``WireError``."""

    def __init__(self, sock: socket.socket, *, waits_for_questions: bool) -> None:
        tune(sock)
        limit = _TIMEVAL.pack(_PATIENCE_S, 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._sock, self._idles = sock, waits_for_questions

    def send(self, message: msgspec.Struct) -> None:
        self.write(encode_control(msgspec.msgpack.encode(message)))

    def write(self, data: bytes | memoryview) -> None:
        try:
            self._sock.sendall(data)
        except OSError as e:
            raise WireError(f"sending a copy failed: {e.strerror or e}") from e

    def question(self) -> _Offer | _Fetch | None:
        """The next one; ``None`` at the end of the connection."""
        body = self._message()
        return None if body is None else _decoded(_questions.decode, body)

    def answer(self) -> _Answered | _Found:
        body = self._message()
        if body is None:
            raise WireError("the peer hung up")
        return _decoded(_answers.decode, body)

    def _message(self) -> bytes | None:
        head = self.read(_LENGTH.size, idle=self._idles)
        if not head:
            return None
        (length,) = _LENGTH.unpack(head)
        if not 0 < length <= _MAX_MESSAGE_BYTES:
            raise WireError(f"a message about copies announces {length} bytes, allowed are {_MAX_MESSAGE_BYTES}")
        return self.read(length)

    def read(self, length: int, *, idle: bool = False) -> bytes:
        """So many bytes, with one allocation where the system gives them at once.

        With ``idle`` they may take their time, and there are none where the connection ends before them.
        """
        parts: list[bytes] = []
        left = length
        while left:
            try:
                data = self._sock.recv(left, socket.MSG_WAITALL)
            except BlockingIOError as e:
                if idle and not parts:
                    continue
                raise WireError(f"the peer was silent for {_PATIENCE_S} s") from e
            except OSError as e:
                raise WireError(f"receiving a copy failed: {e.strerror or e}") from e
            if not data:
                if idle and not parts:
                    return b""
                raise WireError("the peer hung up")
            parts.append(data)
            left -= len(data)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        shut(self._sock)
        self._sock.close()


def _decoded(decode: Callable[[bytes], T], body: bytes) -> T:
    try:
        return decode(body)
    except msgspec.DecodeError as e:
        raise WireError(f"a malformed message about copies: {e}") from e


class CopyLink:
    """The asking end.  Used by one thread at a time; after an error it is of no use any more."""

    def __init__(self, sock: socket.socket) -> None:
        self._stream = _Stream(sock, waits_for_questions=False)

    def offer(self, file: str, length: int, checkpoint_id: int) -> ShelfAnswer:
        """Ask whether the peer takes a file; after "send" its bytes are due.

        Raises:
            WireError: the connection is broken, or the peer is silent.
        """
        self._stream.send(_Offer(file, length, checkpoint_id))
        return self._answered()

    def send(self, data: bytes | memoryview) -> None:
        """The next bytes of a file.

        Raises:
            WireError: the connection is broken, or the peer takes nothing.
        """
        self._stream.write(data)

    def sent(self) -> bool:
        """All bytes of a file were sent; whether the peer keeps them.

        Raises:
            WireError: the connection is broken, or the peer is silent.
        """
        return self._answered() == "have"

    def _answered(self) -> ShelfAnswer:
        answer = self._stream.answer()
        if not isinstance(answer, _Answered):
            raise WireError("the peer answered another question")
        return answer.answer

    def fetch(self, file: str, offset: int, length: int) -> bytes:
        """Bytes of a file that the peer holds.

        Raises:
            CorruptSnapshotError: it does not hold them.
            WireError: the connection is broken, or the peer is silent.
        """
        self._stream.send(_Fetch(file, offset, length))
        found = self._stream.answer()
        if not isinstance(found, _Found) or found.length not in (-1, length):
            raise WireError("the peer answered another question")
        if found.length < 0:
            raise CorruptSnapshotError(f"the copy of {file} in another worker is gone")
        return self._stream.read(length)

    def close(self) -> None:
        """Hang up."""
        self._stream.close()


def dial_copies(address: tuple[str, int], secret: Secret, job_uid: str, slot: int) -> CopyLink:
    """A connection to the copies of another worker.

    Raises:
        WireError: it is not there, or does not know the secret.
    """
    me = Peer("copies", job_uid, slot)
    sock, _ = dial(address, secret, lambda key: ClientHandshake(key, me), deadline_s=_PATIENCE_S)
    return CopyLink(sock)


class CopyServer:
    """The answering end: hands out what lies on the shelves of this worker, and takes what others offer.

    Args:
        shelves: where to look for a file, in this order.
        accepts: where an offered file goes; ``None``: all are refused.
        changed: called after the content of that shelf changed (any thread).
    """

    def __init__(self, shelves: Iterable[Shelf], accepts: Shelf | None, changed: Callable[[], None]) -> None:
        self._shelves, self._accepts, self._changed = tuple(shelves), accepts, changed
        self._lock = threading.Lock()
        self._serving: dict[_Stream, threading.Thread] = {}
        self._closed = False

    def serve(self, sock: socket.socket) -> None:
        """Answer an authenticated peer, in a thread, until it hangs up."""
        stream = _Stream(sock, waits_for_questions=True)
        thread = threading.Thread(target=self._run, args=(stream,), name="cutwater-copies", daemon=True)
        with self._lock:
            if self._closed:
                stream.close()
                return
            self._serving[stream] = thread
            thread.start()

    def close(self) -> None:
        """Hang up on everybody."""
        with self._lock:
            self._closed = True
            serving = dict(self._serving)
        for stream in serving:
            stream.close()
        for thread in serving.values():
            thread.join(_PATIENCE_S)

    def _run(self, stream: _Stream) -> None:
        try:
            while (question := stream.question()) is not None:
                if isinstance(question, _Offer):
                    self._take(stream, question)
                else:
                    self._give(stream, question)
        except (CutwaterError, OSError):
            pass  # whoever asked finds out, and does without
        finally:
            with self._lock:
                self._serving.pop(stream, None)
            stream.close()

    def _take(self, stream: _Stream, offer: _Offer) -> None:
        shelf = self._accepts
        answer = shelf.offer(offer.file, offer.length, offer.checkpoint_id) if shelf is not None else "full"
        copy: ShelfWriter | None = None
        if shelf is not None and answer == "send":
            try:
                copy = shelf.write(offer.file)
            except OSError:
                answer = "full"
        if shelf is None or copy is None:
            stream.send(_Answered(answer))
            return
        try:
            stream.send(_Answered(answer))
            left = offer.length
            while left:
                piece = stream.read(min(left, _PIECE_BYTES))
                copy.write(piece)
                left -= len(piece)
        except BaseException:
            copy.abort()
            raise
        copy.finish()
        stream.send(_Answered("have" if shelf.has(offer.file) else "stale"))
        self._changed()

    def _give(self, stream: _Stream, fetch: _Fetch) -> None:
        for shelf in self._shelves:
            if shelf.has(fetch.file):
                with contextlib.suppress(CorruptSnapshotError):
                    data = shelf.read(fetch.file, fetch.offset, fetch.length)
                    stream.send(_Found(fetch.length))
                    stream.write(data)
                    return
        stream.send(_Found(-1))
