"""Which subtask reads which split.  Runs in the driver; a split belongs to at most one subtask of an attempt.

What is not in a snapshot was never handed out as far as that snapshot knows, so it is simply discovered again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from cutwater.connectors.base import Source, Split
from cutwater.data.time import MIN_WATERMARK
from cutwater.runtime.control.messages import SplitAssignment
from cutwater.storage.snapshot.manifest import SplitRecord


@dataclass
class Enumerator:
    """Assigns the splits of one read step.

    >>> e = Enumerator("in", None, 2)
    >>> [len(a) for a in e.assign([Split("a"), Split("b"), Split("c")])]
    [2, 1]
    >>> [len(a) for a in e.assign([Split("a"), Split("d")])]
    [0, 1]
    """

    step: str
    source: Source | None
    parallelism: int
    _load: list[int] = field(default_factory=list[int])
    _known: set[str] = field(default_factory=set[str])
    _dealt: list[dict[str, SplitAssignment]] = field(default_factory=list[dict[str, SplitAssignment]])
    """Per subtask, by id."""

    def __post_init__(self) -> None:
        self._load = [0] * self.parallelism
        self._dealt = [{} for _ in range(self.parallelism)]

    def restore(
        self, records: Mapping[int, Iterable[SplitRecord]], parallelism: int, order: Mapping[str, int]
    ) -> list[list[SplitAssignment]]:
        """Splits of a snapshot: with the old parallelism each stays where it was, otherwise they are dealt anew.

        Then they come in the order in which the source lists them, as at a first start: where one subtask reads one
        split after the other, the order of the splits is that of time.

        Args:
            records: by old subtask.
            parallelism: old number of subtasks.
            order: place of each split in the source's list.
        """
        assigned: list[list[SplitAssignment]] = [[] for _ in range(self.parallelism)]
        keep = parallelism == self.parallelism
        found = [(subtask, r) for subtask in sorted(records) for r in records[subtask]]
        if not keep:
            found.sort(key=lambda one: (order.get(one[1].id, len(order)), one[1].id))
        for subtask, r in found:
            target = subtask if keep else min(range(self.parallelism), key=self._load.__getitem__)
            assigned[target].append(_at(r))
            self._dealt[target][r.id] = _at(r)
            self._known.add(r.id)
            if not r.done:
                self._load[target] += 1
        return assigned

    def again(self, subtask: int, records: Iterable[SplitRecord]) -> list[SplitAssignment]:
        """What a subtask reads that goes back to a snapshot while others read on: every split stays where it is."""
        known = {r.id: _at(r) for r in records}
        return [*known.values(), *(split for id, split in self._dealt[subtask].items() if id not in known)]

    def assign(self, splits: Iterable[Split]) -> list[list[SplitAssignment]]:
        """Deal the splits not seen before, in order, to the subtasks with the fewest."""
        assigned: list[list[SplitAssignment]] = [[] for _ in range(self.parallelism)]
        for split in splits:
            if split.id in self._known:
                continue
            self._known.add(split.id)
            target = min(range(self.parallelism), key=self._load.__getitem__)
            self._load[target] += 1
            fresh = SplitAssignment(split.id, split.data, None, MIN_WATERMARK, False)
            assigned[target].append(fresh)
            self._dealt[target][split.id] = fresh
        return assigned

    def dealt(self, subtask: int) -> int:
        """How many splits a subtask has been given, those of the snapshot included."""
        return len(self._dealt[subtask])

    def rates(self) -> list[float | None]:
        """Rows per second for each subtask: the source's rate, shared by those that have something to read."""
        rate = self.source.rate if self.source is not None else None
        if rate is None:
            return [None] * self.parallelism
        sharing = max(1, sum(1 for n in self._load if n)) if self.source and self.source.bounded else self.parallelism
        return [rate / sharing] * self.parallelism


def _at(record: SplitRecord) -> SplitAssignment:
    return SplitAssignment(record.id, record.data, record.position, record.max_time, record.done, record.idle)
