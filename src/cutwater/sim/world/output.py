"""The sinks' output in simulation: rows in pieces, pieces in parts, parts that readers see (decision 0008)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from cutwater.sim.world.disk import Done
    from cutwater.sim.world.world import World

EVERYBODY = frozenset(range(100))
"""The numbers of all subtasks, at whatever parallelism."""


class Piece(NamedTuple):
    """A file in the staging area with the rows of one writer between two freezes."""

    task: int
    checkpoint_id: int
    attempt: int


class Handle(NamedTuple):
    """A pre-commit: a whole part that is to appear.  Its name carries where it comes from.

    ``own`` are the pieces that only this part needs, ``shared`` those that the state of an earlier checkpoint names.
    """

    task: int
    checkpoint_id: int
    attempt: int
    own: tuple[Piece, ...] = ()
    shared: tuple[Piece, ...] = ()


class Output:
    """What sinks have staged and what readers see."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.pieces: dict[Piece, list[int]] = {}
        self.staged: dict[Handle, list[int]] = {}
        self.visible: dict[Handle, list[int]] = {}
        self.committed_by: dict[Handle, int] = {}
        """Checkpoint that made a part visible."""
        self.gone: dict[Handle, int] = {}
        """Attempt that removed a part, staged or visible: older ones look for it in vain."""

    def commit(self, handle: Handle, checkpoint_id: int, attempt: int) -> None:
        """Make a part visible, by one rename; once more does nothing.  ``attempt`` is that of who does it."""
        rows = self.staged.pop(handle, None)
        if rows is not None:
            self.visible[handle], self.committed_by[handle] = rows, checkpoint_id
            self._world.oracle.committed(handle, checkpoint_id, rows)
        elif handle not in self.visible:
            self._world.oracle.committed_nothing(handle, checkpoint_id, attempt)
            return
        for piece in handle.own:
            self.pieces.pop(piece, None)

    def sweep(self, attempt: int, kept: set[Piece], tasks: frozenset[int]) -> None:
        """Empty the staging area of what attempts of ``tasks`` before this one left there, but for ``kept`` pieces."""
        for handle in [h for h in self.staged if h.attempt < attempt and h.task in tasks]:
            del self.staged[handle]
            self.gone[handle] = attempt
        for piece in [p for p in self.pieces if p.attempt < attempt and p.task in tasks and p not in kept]:
            del self.pieces[piece]

    def later_than(self, checkpoint_id: int, attempt: int, tasks: frozenset[int]) -> list[Handle]:
        """Visible parts of later checkpoints, made by attempts of ``tasks`` before this one."""
        visible = self.visible
        return [h for h in visible if h.checkpoint_id > checkpoint_id and h.attempt < attempt and h.task in tasks]

    def take_back(self, handle: Handle, attempt: int) -> None:
        """Remove a visible part."""
        if self.visible.pop(handle, None) is not None:
            self.gone[handle] = attempt
            self._world.seen["taken back"] += 1


class SinkWriter:
    """Writes the output of one sink subtask.  Rows wait in pieces, over checkpoints, until they are enough for a part.

    Args:
        pieces: what the restored checkpoint names as not in a part yet.
    """

    __slots__ = ("_attempt", "_open", "_output", "_shared", "_task", "_world", "handles", "rows")

    def __init__(self, world: World, task: int, attempt: int, pieces: Iterable[Piece]) -> None:
        self._world, self._output, self._task, self._attempt = world, world.output, task, attempt
        self._open: list[tuple[Piece, list[int]]] = []
        for piece in pieces:
            if piece not in self._output.pieces and world.disk.owner <= attempt:
                world.oracle.broken("staging lost", f"a restore looks for {piece}, which was removed (T4)")
            self._open.append((piece, self._output.pieces.get(piece, [])))  # nothing left: the job is another driver's
        self._shared = {piece for piece, _ in self._open}
        self.rows: list[int] = []
        """Since the last freeze."""
        self.handles: dict[int, Handle] = {}
        """Pre-commits that are not committed yet, by checkpoint."""

    def freeze(self, id: int, everything: bool) -> tuple[Piece, ...]:
        """Rows so far become durable; the pieces that are in no part yet."""
        output = self._output
        if self.rows:
            piece = Piece(self._task, id, self._attempt)
            output.pieces[piece] = self.rows
            self._open.append((piece, self.rows))
            self.rows = []
        if self._open:
            rows = [row for _, found in self._open for row in found]
            if everything or len(rows) >= self._world.schedule.roll_rows:
                pieces = [piece for piece, _ in self._open]
                handle = Handle(
                    self._task,
                    id,
                    self._attempt,
                    tuple(p for p in pieces if p not in self._shared),
                    tuple(p for p in pieces if p in self._shared),
                )
                output.staged[handle] = rows
                self.handles[id] = handle
                self._open = []
        named = tuple(piece for piece, _ in self._open)
        self._shared = set(named)
        return named

    def commit(self, id: int) -> None:
        """The checkpoint completed: everything up to it becomes visible."""
        for earlier in sorted(self.handles):
            if earlier <= id:
                self._output.commit(self.handles.pop(earlier), id, self._attempt)


class Settle(Protocol):
    """What ``settle`` is."""

    def __call__(
        self, output: Output, restored: Done | None, retained: Iterable[Done], attempt: int, tasks: frozenset[int]
    ) -> Iterator[None]: ...


def settle(
    output: Output, restored: Done | None, retained: Iterable[Done], attempt: int, tasks: frozenset[int]
) -> Iterator[None]:
    """T2 at a restore, one storage operation at a time: between them anything may happen, also the driver's death.

    Afterwards readers see what the sinks among ``tasks`` committed with ``restored`` and the checkpoints before it,
    and nothing else of them.  What other sinks have under way is not touched.
    """
    id = 0
    if restored is not None:
        id = restored.checkpoint_id
        for part in restored.manifest.values():
            for handle in part.handles if part.task in tasks else ():
                output.commit(handle, id, attempt)
                yield
    output.sweep(attempt, _named(retained), tasks)
    yield
    later = output.later_than(id, attempt, tasks)
    yield
    for handle in later:
        output.take_back(handle, attempt)
        yield


def retire(output: Output, retired: Iterable[Done], retained: Iterable[Done]) -> None:
    """Remove the pieces that only checkpoints needed which will not be restored any more."""
    kept = _named(retained)
    for done in retired:
        shared = {p for part in done.manifest.values() for h in part.handles for p in h.shared}
        for piece in (shared | _named([done])) - kept:
            output.pieces.pop(piece, None)


def _named(checkpoints: Iterable[Done]) -> set[Piece]:
    return {piece for done in checkpoints for part in done.manifest.values() for piece in part.pieces}
