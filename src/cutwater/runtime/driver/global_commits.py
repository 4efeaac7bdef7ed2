"""Sinks whose output becomes visible by one commit of all subtasks' handles, which the driver performs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cutwater.connectors.base import Committer, Json
from cutwater.errors import CutwaterError, StorageError, UserCodeError
from cutwater.runtime.failures import first_line

_PATIENCE_S = 120.0
"""How long a restart waits for a commit under way.  Committers have limits of their own, which are shorter."""

_END_S = 10.0
"""How long the end of a job does."""


@dataclass(frozen=True)
class _Due:
    checkpoint_id: int
    handles: Mapping[str, list[Json]]
    """By step."""
    then: tuple[Callable[[], None], ...]


class GlobalCommits:
    """Performs commits one after the other in a thread of its own, so that the driver's never waits for one.

    A checkpoint that completes while an earlier one is committed waits; a newer one takes its place, for it has all
    handles that were not committed when it was cut.

    Args:
        failed: called in the commits' thread, when a commit fails; whatever waits is dropped then.

    >>> class Table:
    ...     def commit(self, checkpoint_id, handles): print(checkpoint_id, handles)
    >>> commits = GlobalCommits(print)
    >>> commits.submit(7, {"write": (Table(), ["a", "b"])}, lambda: print("done"))
    >>> commits.close()
    7 ['a', 'b']
    done
    """

    def __init__(self, failed: Callable[[CutwaterError], None]) -> None:
        self._failed = failed
        self._committers: dict[str, Committer] = {}
        self._due: _Due | None = None
        self._busy = self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def submit(
        self, checkpoint_id: int, work: Mapping[str, tuple[Committer, list[Json]]], then: Callable[[], None]
    ) -> None:
        """Commit a checkpoint that the job log has.

        Args:
            work: by step, its committer and the handles of all its subtasks.
            then: called in the commits' thread when they are committed.
        """
        with self._changed:
            waiting = self._due.then if self._due is not None else ()
            self._committers |= {step: committer for step, (committer, _) in work.items()}
            handles = {step: found for step, (_, found) in work.items()}
            self._due = _Due(checkpoint_id, handles, (*waiting, then))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="cutwater-commits", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def halt(self) -> None:
        """Forget what waits, and wait for the commit under way; afterwards sinks may be settled.

        Raises:
            StorageError: that commit does not end.
        """
        with self._changed:
            self._due = None
            if not self._changed.wait_for(lambda: not self._busy, _PATIENCE_S):
                raise StorageError(
                    f"a commit has not ended within {_PATIENCE_S:.0f} s",
                    hint="Look at what the sink writes to: it answers nothing.",
                )

    def close(self, *, perform: bool = True) -> None:
        """End; what waits, and is not performed now or not in time, is committed when the job begins again."""
        with self._changed:
            self._closed = True
            self._due = self._due if perform else None
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_END_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._due is not None or self._closed)
                due, self._due = self._due, None
                if due is None:
                    return
                self._busy = True
            try:
                self._commit(due)
            finally:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()

    def _commit(self, due: _Due) -> None:
        for step, handles in due.handles.items():
            try:
                self._committers[step].commit(due.checkpoint_id, handles)
            except Exception as error:
                with self._changed:
                    self._due = None
                self._failed(_of_step(error, step, due.checkpoint_id))
                return
        for then in due.then:
            then()


def _of_step(error: Exception, step: str, checkpoint_id: int) -> CutwaterError:
    """The error with the step, of whatever kind it is."""
    if isinstance(error, CutwaterError):
        error.step = error.step or step
        return error
    told = f"checkpoint {checkpoint_id} cannot be committed: {type(error).__name__}: {first_line(str(error))}"
    return UserCodeError(told, step=step)
