"""Simulated storage: the parts of snapshots, files that are written in time, and a log with atomic create."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from cutwater.data.time import MIN_WATERMARK
from cutwater.protocol.channel.items import Rows, Timed
from cutwater.sim.world.output import Handle, Piece

if TYPE_CHECKING:
    from cutwater.sim.schedules.graphs import Plan
    from cutwater.sim.world.world import World

RETAINED = 3
"""Completed checkpoints that the log names as restorable."""


class AttemptBegan(NamedTuple):
    """Log entry: a driver took the job."""

    attempt: int
    driver: int
    plan: Plan
    """The dataflow at the parallelism of the attempt."""


class Done(NamedTuple):
    """Log entry: a checkpoint completed."""

    checkpoint_id: int
    attempt: int
    final: bool
    manifest: Any


class RolledBack(NamedTuple):
    """Log entry: the attempt restores an older checkpoint than the newest; those after it count no more."""

    attempt: int
    checkpoint_id: int


class Finished(NamedTuple):
    """Log entry: the job is over."""

    attempt: int


Entry: TypeAlias = AttemptBegan | Done | RolledBack | Finished


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
        self.log: list[Entry] = []
        self.retained: list[Done] = []
        """Completed checkpoints that may be restored, oldest first; each follows from the one before it."""
        self.owner = 0
        """The attempt that owns the job."""
        self.plan: Plan | None = None
        """Of that attempt."""
        self.full = 0
        self.failing = 0
        """Above 0: about this many of 256 writes fail."""
        self.doubtful = 0
        self.slow = 0
        self.lies: list[Callable[[object], None]] = []
        """What happens when the next checkpoint is complete."""
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

    def rot(self, done: Done, for_ms: float | None) -> None:
        """Damage a file of a completed checkpoint, for a while or for ever (``None``)."""
        names = [name for part in done.manifest.values() for name in part.files]
        name = names[self._world.draws.below(len(names))]
        if self.files[name]:
            self.files[name] = False
            self._world.strike("rot")
            if for_ms is not None:
                self._world.after(for_ms, lambda _: self.files.update({name: True}))

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

    def _take_number(self, known: int, entry: Entry) -> bool:
        if len(self.log) != known:
            return False
        self.log.append(entry)
        if type(entry) is Done:
            self._world.oracle.published(entry)
            self.retained = [*self.retained, entry][-RETAINED:]
            if self.lies:
                self._world.after(0.1, self.lies.pop())
        elif type(entry) is RolledBack:
            self.retained = [done for done in self.retained if done.checkpoint_id <= entry.checkpoint_id]
        elif type(entry) is AttemptBegan:
            self.owner, self.plan = entry.attempt, entry.plan
        return True


@dataclass(slots=True)
class Part:
    """What one subtask writes for one checkpoint."""

    task: int
    attempt: int
    positions: dict[int, int] = field(default_factory=dict[int, int])
    """Of a source: split -> rows read."""
    counts: dict[int, int] = field(default_factory=dict[int, int])
    sign: int = 0
    """Digest of all rows processed, in their order."""
    ins: dict[int, int] = field(default_factory=dict[int, int])
    """Input -> rows taken."""
    outs: dict[int, int] = field(default_factory=dict[int, int])
    """Output -> rows sent."""
    choice: tuple[int, int] = (0, 0)
    """R0: lineage of the determinant log, and position in it."""
    watermark: int = MIN_WATERMARK
    """The event time that it had reached."""
    heard: dict[int, int] = field(default_factory=dict[int, int])
    """Input -> last watermark taken."""
    said: dict[int, int] = field(default_factory=dict[int, int])
    """Output -> last watermark sent."""
    ended: frozenset[Any] = frozenset()
    """Inputs whose end it had taken."""
    has_ended: bool = False
    """It has sent its end on all outputs."""
    handles: list[Handle] = field(default_factory=list[Handle])
    """Pre-commits that are not committed yet."""
    pieces: tuple[Piece, ...] = ()
    """Staged rows that are in no part yet."""
    logs: dict[int, list[Timed]] = field(default_factory=dict[int, "list[Timed]"])
    """Recorded, or overtaken by the barrier, at the inputs."""
    overtaken: dict[int, list[Timed]] = field(default_factory=dict[int, "list[Timed]"])
    """Overtaken by the barrier in the outputs' queues."""
    files: list[str] = field(default_factory=list[str])


def numbers_in(items: list[Timed]) -> list[int]:
    """The rows among some items of a channel."""
    return [row for item in items if type(item) is Rows for row in item.batch]
