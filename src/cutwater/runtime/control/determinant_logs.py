"""Determinant logs: what a worker knows of those of all subtasks, and what it tells the others of them (R0).

Before anything leaves a worker that depends on a choice, the choice is known where it goes: each frame brings all that
its sender knows and its receiver may not, of the sender's own subtasks and of those that it has heard of.  So whoever
survives knows every choice that anything it holds depends on, however many workers die together.

A log is addressed by bytes from its subtask's first on.  What lies before the mark of the newest completed checkpoint
is dropped: nobody will go behind it.  Two workers may hold different pieces of a log, never different bytes at one
place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable, Iterable

from cutwater.errors import InvariantError, WireError
from cutwater.protocol.determinants import read_varint, write_varint
from cutwater.protocol.job.recovery_scope import Region, Subtask


class _Log:
    """A piece of the determinant log of one subtask: bytes ``base .. base + len(data)``."""

    __slots__ = ("base", "data", "marks", "version")

    def __init__(self, base: int = 0) -> None:
        self.base, self.data, self.version = base, bytearray(), 0
        self.marks: dict[int, int] = {}
        """By checkpoint: where what follows its freeze begins."""

    @property
    def end(self) -> int:
        return self.base + len(self.data)

    def trim(self, completed: int) -> None:
        """Drop what nobody will go back to."""
        place = max((offset for id, offset in self.marks.items() if id <= completed), default=self.base)
        if place > self.base:
            del self.data[: place - self.base]
            self.base = place
            self.marks = {id: offset for id, offset in self.marks.items() if offset >= place}


class DeterminantLogs:
    """All that one worker knows of determinant logs.  Any thread.

    Args:
        restored: the checkpoint that its subtasks begin with; 0: none.

    >>> here, there = DeterminantLogs(), DeterminantLogs()
    >>> to_there, from_here = here.peer(1), there.peer(0)
    >>> here.begin([(0, 0)], 0)
    {(0, 0): b''}
    >>> here.append((0, 0), b"abc")
    >>> from_here.hear(to_there.news()); there.log_of((0, 0), 0)
    b'abc'
    """

    def __init__(self, restored: int = 0) -> None:
        self._lock = threading.Lock()
        self._own: frozenset[Subtask] = frozenset()
        self._logs: dict[Subtask, _Log] = {}
        self._version = 0
        self._completed = restored
        self._first: set[Hashable] = set()
        self._heard = threading.Event()

    def append(self, subtask: Subtask, entries: bytes) -> None:
        """An own subtask chose.  Before anything leaves that depends on it."""
        with self._lock:
            log = self._logs[subtask]
            log.data += entries
            self._version = log.version = self._version + 1

    def mark(self, subtask: Subtask, checkpoint_id: int, entries: bytes) -> None:
        """The state of an own subtask was frozen; ``entries`` are the mark."""
        with self._lock:
            log = self._logs[subtask]
            log.data += entries
            log.marks[checkpoint_id] = log.end
            self._version = log.version = self._version + 1

    def completed(self, checkpoint_id: int) -> None:
        """Nobody goes back behind this checkpoint any more."""
        with self._lock:
            self._completed = max(self._completed, checkpoint_id)
            for log in self._logs.values():
                log.trim(self._completed)

    def peer(self, who: Hashable, own: Region = frozenset(), concern: Region | None = None) -> PeerDeterminants:
        """Knowledge exchanged over one connection.

        Args:
            who: is at the other end.
            own: subtasks that run there, whose choices it knows once it has begun.
            concern: those whose choices it can depend on; ``None``: all.
        """
        return PeerDeterminants(self, who, own, concern)

    # ------------------------------------------------------------------------------------------------ a replacement

    def await_first(self, peers: Collection[Hashable], check: Callable[[], None], timeout_s: float) -> bool:
        """Wait until each of these has said all that it knows; false if it took too long.

        ``check`` is called now and then, and raises if nobody wants to know it any more.
        """
        left_s = timeout_s
        while not self._first.issuperset(peers):
            self._heard.clear()
            if self._first.issuperset(peers):
                break
            if left_s <= 0:
                return False
            check()
            if not self._heard.wait(0.05):
                left_s -= 0.05
        return True

    def log_of(self, subtask: Subtask, checkpoint_id: int) -> bytes:
        """Choices of this subtask after that checkpoint, as far as anybody knows; empty: nobody knows anything."""
        with self._lock:
            log = self._logs.get(subtask)
            if log is None or checkpoint_id not in log.marks:
                return b""
            return bytes(log.data[log.marks[checkpoint_id] - log.base :])

    def begin(self, own: Iterable[Subtask], checkpoint_id: int) -> dict[Subtask, bytes]:
        """Subtasks begin in this worker, at that checkpoint: the log that each has to follow.

        Where nobody knows of the freeze the log goes on with one: no byte of it is ever another than somebody heard.
        """
        with self._lock:
            self._own = frozenset(own)
            for subtask in self._own:
                log = self._logs.get(subtask, _Log())
                if checkpoint_id not in log.marks:
                    log = _Log(log.end)
                    log.marks[checkpoint_id] = log.base
                self._logs[subtask] = log
                self._version = log.version = self._version + 1
        return {subtask: self.log_of(subtask, checkpoint_id) for subtask in self._own}

    # -------------------------------------------------------------------------------------------- peers (any thread)

    def news(self, told: dict[Subtask, int], since: int, own: Region, concern: Region | None) -> tuple[bytes, int]:
        """Bytes that a peer was not told yet, and the version up to which it then is.  ``told`` goes on with it."""
        if since == self._version:
            return b"", since
        out = bytearray()
        with self._lock:
            for subtask, log in self._logs.items():
                if log.version <= since or (since and subtask in own):
                    continue
                if concern is not None and subtask not in concern:
                    continue
                start = max(told.get(subtask, -1), log.base)
                if start < log.end or subtask not in told:
                    _encode(out, subtask, start, log)
                    told[subtask] = log.end
            return bytes(out), self._version

    def hear(self, who: Hashable, data: bytes, told: dict[Subtask, int]) -> None:
        """News of a peer, which need not be told the same."""
        at = 0
        with self._lock:
            while at < len(data):
                subtask, start, entries, marks, at = _decode(data, at)
                self._merge(subtask, start, entries, marks)
                told[subtask] = max(told.get(subtask, 0), start + len(entries))
        self._first.add(who)
        self._heard.set()

    def _merge(self, subtask: Subtask, start: int, entries: bytes, marks: dict[int, int]) -> None:
        log, end = self._logs.get(subtask), start + len(entries)
        if subtask in self._own:
            if log is None or end > log.end:
                raise InvariantError(f"subtask {subtask} runs here, and somebody knows choices that it has not made")
            return
        if log is None or start > log.end:  # what lies between was dropped: no checkpoint needs it
            log = self._logs[subtask] = _Log(start)
        elif end < log.end or (end == log.end and log.marks.keys() >= marks.keys()):
            return
        log.data += entries[log.end - start :]
        log.marks |= {id: place for id, place in marks.items() if place >= log.base}
        log.trim(self._completed)
        self._version = log.version = self._version + 1


class PeerDeterminants:
    """Bytes for one connection: all that the peer was not told yet.  Any thread, but one after the other."""

    def __init__(self, store: DeterminantLogs, who: Hashable, own: Region, concern: Region | None) -> None:
        self._store, self._who, self._own, self._concern = store, who, own, concern
        self._told: dict[Subtask, int] = {}
        self._since = 0

    def news(self) -> bytes:
        """Bytes that go before the next frame; empty if there is nothing new."""
        data, self._since = self._store.news(self._told, self._since, self._own, self._concern)
        return data

    def hear(self, data: bytes) -> None:
        """The peer's news.

        Raises:
            WireError: they are malformed.
            InvariantError: they tell of choices of a subtask that lives here, and has not made them.
        """
        self._store.hear(self._who, data, self._told)


def _encode(out: bytearray, subtask: Subtask, start: int, log: _Log) -> None:
    entries = log.data[start - log.base :]
    marks = [(id, place) for id, place in log.marks.items() if place >= start]
    for number in (*subtask, start, len(entries)):
        write_varint(out, number)
    out += entries
    write_varint(out, len(marks))
    for id, place in marks:
        write_varint(out, id)
        write_varint(out, place)


def _decode(data: bytes, at: int) -> tuple[Subtask, int, bytes, dict[int, int], int]:
    vertex, at = read_varint(data, at)
    index, at = read_varint(data, at)
    start, at = read_varint(data, at)
    size, at = read_varint(data, at)
    entries, at = data[at : at + size], at + size
    if at > len(data):
        raise WireError(f"news of determinant logs end within the log of subtask {(vertex, index)}")
    count, at = read_varint(data, at)
    marks: dict[int, int] = {}
    for _ in range(count):
        id, at = read_varint(data, at)
        marks[id], at = read_varint(data, at)
    return (vertex, index), start, entries, marks, at
