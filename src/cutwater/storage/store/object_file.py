"""An object that is written front to back: at once if it is small, in pieces while it is written if it is not."""

from __future__ import annotations

import io
import queue
import threading
from collections.abc import Iterator
from typing import Any

from cutwater.errors import StorageError
from cutwater.storage.store.bucket import PART_BYTES, Bucket

_WAITING_PIECES = 2
"""Before whoever writes has to wait for the bucket."""


class _AbortedError(Exception):
    """Nobody wants the object any more."""


class ObjectFile(io.RawIOBase):
    """A new object, which is there, whole, once ``finish`` returns, and else never.

    What is written is kept, not copied: it must not change until then.

    Args:
        bucket, key: of the object.
    """

    def __init__(self, bucket: Bucket, key: str) -> None:
        super().__init__()
        self._bucket, self._key = bucket, key
        self._kept: list[memoryview] = []
        self._kept_bytes = 0
        self._upload: _Upload | None = None
        self._finished = False

    def writable(self) -> bool:
        return True

    def write(self, b: Any, /) -> int:
        """Take bytes.

        Raises:
            StorageError: the bucket does not take the pieces before, or the object is there.
        """
        if self._finished:
            raise StorageError(f"{self._bucket.address(self._key)} is there: an object is not written on")
        piece = memoryview(b).cast("B")
        self._kept.append(piece)
        self._kept_bytes += len(piece)
        if self._kept_bytes > PART_BYTES:
            if self._upload is None:
                self._upload = _Upload(self._bucket, self._key)
            self._upload.put(self._taken())
        return len(piece)

    def finish(self) -> None:
        """Make the object.

        Raises:
            StorageError: there is one, or the bucket does not take it.
        """
        if self._finished:
            return
        if self._upload is not None:
            if self._kept:
                self._upload.put(self._taken())
            self._upload.finish()
        elif not self._bucket.create(self._key, self._taken()):
            raise self._bucket.exists_already(self._key)
        self._finished = True

    def close(self) -> None:
        """Close; an object that is not there by then never will be."""
        self._kept = []
        if self._upload is not None and not self._finished:
            self._upload.abort()
        super().close()

    def _taken(self) -> bytes:
        taken, self._kept, self._kept_bytes = b"".join(self._kept), [], 0
        return taken


class _Upload:
    """A thread that hands pieces to the bucket as they come."""

    def __init__(self, bucket: Bucket, key: str) -> None:
        self._pieces: queue.Queue[bytes | None] = queue.Queue(_WAITING_PIECES)
        self._error: BaseException | None = None
        self._aborted = False
        self._thread = threading.Thread(target=self._run, args=(bucket, key), name="cutwater-upload", daemon=True)
        self._thread.start()

    def put(self, piece: bytes | None) -> None:
        while self._thread.is_alive():
            try:
                self._pieces.put(piece, timeout=0.2)
            except queue.Full:
                continue
            return
        self._raise()

    def finish(self) -> None:
        self.put(None)
        self._thread.join()
        self._raise()

    def abort(self) -> None:
        """What the bucket has of it goes."""
        self._aborted = True
        while self._thread.is_alive():
            try:
                self._pieces.put(None, timeout=0.2)
                break
            except queue.Full:
                continue
        self._thread.join()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self, bucket: Bucket, key: str) -> None:
        try:
            bucket.put_pieces(key, self._taken())
        except BaseException as error:
            self._error = error

    def _taken(self) -> Iterator[bytes]:
        while (piece := self._pieces.get()) is not None and not self._aborted:
            yield piece
        if self._aborted:
            raise _AbortedError
