"""Commits that take long, in a thread of their own: the rows of the next checkpoint flow meanwhile.

To the protocol a commit that comes late is a notice that came late: until it is done, later checkpoints hold its
handles as well (``SinkOperator.pre_committed``), so nothing is lost if the worker dies in between.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cutwater.runtime.chains.chain import SinkOperator

Key = tuple[int, int]
"""Vertex and subtask."""

_BEHIND = 4
"""So many commits of a subtask may wait; then the worker takes no rows until one is done."""


@dataclass(frozen=True, slots=True)
class CommitEnded:
    """What became of a commit; ``key`` is ``None`` for an answer that waited behind commits."""

    key: Key | None
    checkpoint_id: int
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class _Commit:
    key: Key | None
    checkpoint_id: int
    sinks: Sequence[SinkOperator] = ()


class CommitService:
    """Commits for the subtasks of one attempt in one worker, in the order in which they are handed over.

    After a commit that failed there is none: what follows is dropped, and the attempt has to end.

    Args:
        done: called from the thread with each outcome.

    >>> ended = []
    >>> commits = CommitService(ended.append)
    >>> commits.busy, commits.behind
    (False, False)
    >>> commits.close()
    """

    def __init__(self, done: Callable[[CommitEnded], None]) -> None:
        self._done = done
        self._queue: queue.SimpleQueue[_Commit | None] = queue.SimpleQueue()
        self._waiting: dict[Key, int] = {}
        """Of the loop thread: commits handed over whose end it has not heard of."""
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Something was handed over of whose end the loop has not heard."""
        return bool(self._waiting)

    @property
    def behind(self) -> bool:
        """Commits take longer than checkpoints: rows would pile up that wait for them."""
        return any(count > _BEHIND for count in self._waiting.values())

    def submit(self, key: Key, checkpoint_id: int, sinks: Sequence[SinkOperator]) -> None:
        """Hand over the commit of a subtask's sinks; returns at once."""
        self._waiting[key] = self._waiting.get(key, 0) + 1
        self._pass_on(_Commit(key, checkpoint_id, sinks))

    def answer(self, checkpoint_id: int) -> None:
        """Have ``done`` called once all that was handed over until now is committed."""
        self._pass_on(_Commit(None, checkpoint_id))

    def heard(self, ended: CommitEnded) -> None:
        """The loop has taken an outcome.

        Raises:
            CutwaterError: the commit failed.
        """
        if ended.key is not None:
            left = self._waiting.pop(ended.key) - 1
            if left:
                self._waiting[ended.key] = left
        if ended.error is not None:
            raise ended.error

    def finish(self) -> None:
        """Wait until all that was handed over is done, or one of it has failed; nothing more is handed over."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Wait for the commit under way, and do no other one."""
        self._closed = True
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()

    def _pass_on(self, commit: _Commit) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="cutwater-commits", daemon=True)
            self._thread.start()
        self._queue.put(commit)

    def _run(self) -> None:
        while (commit := self._queue.get()) is not None:
            if self._closed:
                continue
            error: Exception | None = None
            try:
                for sink in commit.sinks:
                    sink.commit(commit.checkpoint_id)
            except Exception as e:
                error, self._closed = e, True
            self._done(CommitEnded(commit.key, commit.checkpoint_id, error))
            del commit  # while it waits nothing of a checkpoint is kept
