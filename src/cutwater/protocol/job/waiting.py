"""Waiting of an incomplete group of workers: for cores, or for processes that are starting on those it has.

Lost cores are a state and no end: a node of a cluster that scales itself comes after minutes.  So the wait has no end
of its own; it is told of once, it has numbers, hosts and times for whoever looks, and ends the job only where its user
set a time for that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from cutwater.protocol.job.messages import Progress, Starting

_TELL_CORES_MS = 8_000.0
"""So long a group lacks a core before its user is told: within 10 s, the looks at Spark included."""
_TELL_STARTING_MS = 30_000.0
"""So long a process may be starting before its user is told."""
_SHOWN_MAX = 3
"""Workers that are starting are named up to this number."""


def duration_text(ms: float) -> str:
    """
    >>> duration_text(61_900), duration_text(312_000)
    ('61 s', '5m 12s')
    """
    seconds = int(ms // 1000)
    return f"{seconds} s" if seconds < 120 else f"{seconds // 60}m {seconds % 60:02}s"


@dataclass
class Waiting:
    """The wait of one group.  Belongs to the job machine, which says who is there.

    Args:
        resource_timeout_ms: cores must come so long after the last that came, else the job ends; ``None``: never.
        stabilization_ms: the same, for a group that can do with fewer.
        progress_ms: when it begins.

    >>> waiting = Waiting(None, 10_000.0, 0.0)
    >>> waiting.look({0: 1}, 3, 5_000.0)
    >>> waiting.hear(Progress(frozenset({1}), (Starting(2, "node7", 4_000.0),), 5_000.0))
    >>> waiting.text(65_000.0)
    'waiting for cores, 2 of 3 since 60 s; worker 2 has a core, Python is starting since 61 s on host node7'
    """

    resource_timeout_ms: float | None
    stabilization_ms: float
    progress_ms: float
    """Time at which the last worker or core came, or the wait began."""
    since_ms: float | None = None
    """Time at which the group became incomplete; ``None``: it is not."""
    _slots: int = 0
    _missing: frozenset[int] = frozenset()
    _queued: frozenset[int] = frozenset()
    _starting: dict[int, Starting] = field(default_factory=dict[int, Starting])
    _told: set[str] = field(default_factory=set[str])

    def look(self, workers: Iterable[int], slots: int, now_ms: float) -> None:
        """These slots of a group of ``slots`` have a worker."""
        self._slots, self._missing = slots, frozenset(range(slots)).difference(workers)
        self._queued &= self._missing
        self._starting = {slot: found for slot, found in self._starting.items() if slot in self._missing}
        if not self._missing:
            self.since_ms = None
            self._told.clear()
        elif self.since_ms is None:
            self.since_ms = now_ms

    def hear(self, progress: Progress) -> None:
        """Take what Spark tells of slots without a worker."""
        known = len(self._queued) + len(self._starting), len(self._starting)
        starting = {found.slot: found for found in progress.starting if found.slot in self._missing}
        self._queued = (progress.queued & self._missing).difference(starting)
        self._starting = starting
        if (len(self._queued) + len(starting), len(starting)) > known:
            self.progress_ms = progress.now_ms

    def progressed(self, now_ms: float) -> None:
        """A worker came or went, or the group is another one: whoever waits has patience anew."""
        self.progress_ms = now_ms

    @property
    def cores(self) -> int:
        """Slots of the group with a core, or a worker."""
        return self._slots - len(self._missing) + len(self._starting)

    @property
    def present(self) -> int:
        """Slots of the group with a worker."""
        return self._slots - len(self._missing)

    @property
    def starting(self) -> list[Starting]:
        """Slots that have a core and no worker yet."""
        return [self._starting[slot] for slot in sorted(self._starting)]

    @property
    def lacks_cores(self) -> bool:
        """Spark knows of a worker that is wanted, and has no core for it; any other that is missing is starting."""
        return bool(self._queued)

    def due_ms(self, enough: bool) -> float | None:
        """Time at which something is to be told or decided; ``enough``: the job can go on with those that are there."""
        dues = [due for kind, due in self._tellings(enough) if kind not in self._told]
        if (deadline := self.deadline_ms(enough)) is not None:
            dues.append(deadline)
        return min(dues, default=None)

    def deadline_ms(self, enough: bool) -> float | None:
        """Time at which the wait for cores is over; ``enough`` as above."""
        patience_ms = self.stabilization_ms if enough else self.resource_timeout_ms
        return self.progress_ms + patience_ms if patience_ms is not None and self.lacks_cores else None

    def tell(self, enough: bool, now_ms: float) -> str:
        """Text that the user has to be told now; empty: he knows."""
        fresh = [kind for kind, due in self._tellings(enough) if kind not in self._told and now_ms >= due]
        self._told.update(fresh)
        if not fresh:
            return ""
        advice = f" ({self._advice}; the job goes on when they are there)" if "cores" in fresh else ""
        return self.text(now_ms) + advice

    def _tellings(self, enough: bool) -> list[tuple[str, float]]:
        tellings: list[tuple[str, float]] = []
        if self.lacks_cores and self.since_ms is not None and not enough:
            tellings.append(("cores", self.since_ms + _TELL_CORES_MS))
        tellings += [(f"starting {s.slot}", s.since_ms + _TELL_STARTING_MS) for s in self._starting.values()]
        return tellings

    def text(self, now_ms: float) -> str:
        """The state in one line, for a user."""
        if self.since_ms is None:
            return ""
        parts: list[str] = []
        if self.lacks_cores:
            parts.append(f"waiting for cores, {self.cores} of {self._slots} since {_age(self.since_ms, now_ms)}")
        elif len(self._starting) < len(self._missing):
            parts.append(f"waiting for workers, {self.present} of {self._slots} since {_age(self.since_ms, now_ms)}")
        starting = self.starting
        for found in starting[:_SHOWN_MAX]:
            host = f" on host {found.host}" if found.host else ""
            age = _age(found.since_ms, now_ms)
            parts.append(f"worker {found.slot} has a core, Python is starting since {age}{host}")
        if len(starting) > _SHOWN_MAX:
            parts.append(f"{len(starting) - _SHOWN_MAX} more are starting")
        return "; ".join(parts)

    def shortage(self) -> str:
        """Reason for which the group is not complete."""
        return f"{self.cores} of {self._slots} workers got a core of the Spark cluster; {self._advice}"

    @property
    def _advice(self) -> str:
        missing = self._slots - self.cores
        ask = f" or ask for parallelism {self.cores}" if self.cores else ""
        return f"free {missing} {'core' if missing == 1 else 'cores'}{ask}"


def _age(since_ms: float, now_ms: float) -> str:
    return duration_text(max(0.0, now_ms - since_ms))
