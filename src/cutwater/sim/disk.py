"""Simulated storage: snapshot files that are written in time, a log with atomic create, and the sinks' output."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from cutwater.sim.world import World

__all__ = ["AttemptBegan", "Disk", "Done", "Finished", "Output"]


class AttemptBegan(NamedTuple):
    """Log entry: a driver took the job."""

    attempt: int
    driver: int


class Done(NamedTuple):
    """Log entry: a checkpoint completed."""

    checkpoint_id: int
    attempt: int
    final: bool
    manifest: Any


class Finished(NamedTuple):
    """Log entry: the job is over."""

    attempt: int


class _Write:
    __slots__ = ("data", "dead", "done", "name", "owner")

    def __init__(self, owner: object, name: str, data: object, done: Callable[[str], None]) -> None:
        self.owner, self.name, self.data, self.done = owner, name, data, done
        self.dead = False


class Disk:
    """Files and the log.  A write takes time and may fail; a crash of its owner loses it, tears it, or lets it land."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.files: dict[str, bool] = {}
        """Name -> whole (false: torn or rotten; every restore verifies digests and sees it)."""
        self.log: list[AttemptBegan | Done | Finished] = []
        self.full = 0
        self.failing = 0
        """Above 0: about this many of 256 writes fail."""
        self.doubtful = 0
        self.slow = 0
        self._pending: list[_Write] = []

    def write(self, owner: object, name: str, done: Callable[[str], None]) -> None:
        """Write a file; ``done`` hears "" once it is durable, or why not."""
        write = _Write(owner, name, None, done)
        self._pending.append(write)
        self._world.after(self._delay(), self._land, write)

    def append(self, owner: object, known: int, entry: Any, done: Callable[[str], None]) -> None:
        """Create log entry number ``known``; ``done`` hears "ok", "taken", "doubt" (it may be there) or "failed"."""
        write = _Write(owner, "", (known, entry), done)
        self._pending.append(write)
        self._world.after(self._delay(), self._create, write)

    def crash(self, owner: object) -> None:
        """The process that wrote is gone; what it was writing may be lost, torn or whole."""
        for write in [w for w in self._pending if w.owner is owner]:
            write.dead = True
            self._pending.remove(write)
            fate = self._world.draws.below(3)
            if write.name:
                if fate:
                    self.files[write.name] = fate == 2
                self._world.strike("torn" if fate == 1 else "lost")
            elif fate == 2:
                self._take_number(*write.data)  # type: ignore[misc]

    def rot(self, done: Done) -> None:
        """Damage a file of a completed checkpoint."""
        names = [name for part in done.manifest.values() for name in part.files]
        name = names[self._world.draws.below(len(names))]
        if self.files[name]:
            self.files[name] = False
            self._world.strike("rot")

    def whole(self, done: Done) -> bool:
        """Every byte of the checkpoint verifies."""
        return all(self.files.get(name, False) for part in done.manifest.values() for name in part.files)

    def newest_id(self) -> int:
        """Highest checkpoint id in the log or among leftovers (A1)."""
        ids = [int(name.partition("/")[0]) for name in self.files]
        return max([0, *ids, *(e.checkpoint_id for e in self.log if type(e) is Done)])

    def _delay(self) -> float:
        draws = self._world.draws
        return 0.3 + 0.2 * draws.below(16) + self.slow * 2.0

    def _fails(self, kind: str) -> str:
        if self.full:
            self._world.strike("full_disk")
            return "disk full"
        if self.failing and self._world.draws.chance(self.failing):
            self._world.strike("write_error")
            return f"{kind}: input/output error"
        return ""

    def _land(self, write: _Write) -> None:
        if write.dead:
            return
        self._pending.remove(write)
        error = self._fails("write")
        if not error:
            self.files[write.name] = True
        write.done(error)

    def _create(self, write: _Write) -> None:
        if write.dead:
            return
        self._pending.remove(write)
        if self._fails("create"):
            write.done("failed")
            return
        made = self._take_number(*write.data)  # type: ignore[misc]
        if self.doubtful and self._world.draws.chance(self.doubtful):
            self._world.strike("doubt")
            write.done("doubt")
        else:
            write.done("ok" if made else "taken")

    def _take_number(self, known: int, entry: AttemptBegan | Done | Finished) -> bool:
        if len(self.log) != known:
            return False
        self.log.append(entry)
        if type(entry) is Done:
            self._world.judge.published(entry)
        return True


class Output:
    """What sinks have staged and committed, by handle.  A reader sees what is committed, and nothing else."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.staged: dict[tuple[int, int, int], list[int]] = {}
        self.committed: dict[tuple[int, int, int], list[int]] = {}
        self.committed_by: dict[tuple[int, int, int], int] = {}

    def stage(self, handle: tuple[int, int, int], identities: list[int]) -> None:
        self.staged[handle] = identities

    def commit(self, handle: tuple[int, int, int], checkpoint_id: int) -> None:
        """Make a handle visible; once more does nothing."""
        rows = self.staged.pop(handle, None)
        if rows is not None:
            self.committed[handle] = rows
            self.committed_by[handle] = checkpoint_id
            self._world.judge.committed(handle, checkpoint_id, rows)
        elif handle in self.committed:
            self.committed_by[handle] = min(checkpoint_id, self.committed_by[handle])
        else:
            self._world.judge.committed_nothing(handle, checkpoint_id)

    def abort_all_but(self, kept: set[tuple[int, int, int]]) -> None:
        """T2: after a restore nothing else of this job will ever be committed."""
        for handle in [h for h in self.staged if h not in kept]:
            del self.staged[handle]
