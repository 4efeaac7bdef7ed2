"""Splits of the sources of a job: discovery in the driver, and which subtask reads which split."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import cast

import msgspec

from cutwater.connectors.base import PART_OF, SIZE, WEIGHT, Json, Source, SourceHooks, Split
from cutwater.data.time import MIN_WATERMARK
from cutwater.plan.graph import PhysicalPlan
from cutwater.protocol.job.recovery_scope import Region
from cutwater.protocol.subtask.source_times import StepTimes, SubtaskTime
from cutwater.runtime.control import messages as c
from cutwater.runtime.control.messages import SplitAssignment
from cutwater.storage.snapshot.manifest import Manifest, SplitRecord


class Splits:
    """All read steps of a job.

    Args:
        plan: the physical plan.
        discovered: per read step, the splits found before the start.
    """

    def __init__(self, plan: PhysicalPlan, discovered: dict[str, list[Split]]) -> None:
        self.plan, self._discovered = plan, discovered
        self._ids = {step: {split.id for split in splits} for step, splits in discovered.items()}
        self._enumerators: dict[str, Enumerator] = {}
        self._times: dict[str, StepTimes] = {}
        self._ended: set[str] = set()
        self._stopping = threading.Event()

    def assign(self, manifest: Manifest | None) -> dict[str, list[list[c.SplitAssignment]]]:
        """Deal all known splits for a new attempt: per read step and subtask."""
        result: dict[str, list[list[c.SplitAssignment]]] = {}
        self._enumerators = {}
        for vertex in self.plan.vertices:
            step = self.plan.steps[vertex.steps[0]]
            if step.role != "source":
                continue
            enumerator = Enumerator(step.id, cast(Source, step.spec), vertex.parallelism)
            records: dict[int, list[SplitRecord]] = {}
            for record in manifest.subtasks if manifest else ():
                if step.id in record.splits:
                    records[record.subtask] = self._as_listed(step.id, record.splits[step.id])
            if records:
                known = {split.id: split.data for splits in records.values() for split in splits}
                hooks = SourceHooks(cast(Source, step.spec))
                self._discovered[step.id] = hooks.goes_on(known, self._discovered.get(step.id, []))
            order: dict[str, int] = {}
            for place, split in enumerate(self._discovered.get(step.id, [])):
                order[split.id] = place
                order.setdefault(_whole(split.data) or split.id, place)
            assigned = enumerator.restore(records, max(records, default=-1) + 1, order)
            for subtask, fresh in enumerate(enumerator.assign(self._discovered.get(step.id, []))):
                assigned[subtask] += fresh
            self._enumerators[step.id] = enumerator
            self._times[step.id] = StepTimes(vertex.parallelism)
            self._count_dealt(step.id)
            result[step.id] = assigned
        return result

    def again(self, manifest: Manifest | None, subtasks: Region) -> dict[tuple[str, int], list[c.SplitAssignment]]:
        """By read step and subtask: what these subtasks read when they go back alone (R2)."""
        records = {(r.vertex, r.subtask): r for r in manifest.subtasks} if manifest else {}
        result: dict[tuple[str, int], list[c.SplitAssignment]] = {}
        for vertex, subtask in subtasks:
            step = self.plan.vertices[vertex].steps[0]
            if step in self._enumerators:
                record = records.get((vertex, subtask))
                known = self._as_listed(step, record.splits.get(step, [])) if record is not None else []
                result[step, subtask] = self._enumerators[step].again(subtask, known)
                self._times[step].lost(subtask)
        return result

    def _as_listed(self, step: str, records: list[SplitRecord]) -> list[SplitRecord]:
        if not SourceHooks(cast(Source, self.plan.steps[step].spec)).lists_anew:
            return records
        listed = {split.id: split.data for split in self._discovered.get(step, [])}
        return [msgspec.structs.replace(record, data=listed.get(record.id, record.data)) for record in records]

    def rates(self, slot: int) -> dict[str, float | None]:
        """Rows per second of the read steps' subtasks in a slot."""
        return {s: e.rates()[slot] for s, e in self._enumerators.items() if slot < e.parallelism}

    @property
    def complete(self) -> list[str]:
        """Read steps that get no more splits."""
        return [s for s, e in self._enumerators.items() if s in self._ended or (e.source and e.source.bounded)]

    def found(self, step: str, splits: list[Split], no_more: bool) -> list[tuple[int, list[c.SplitAssignment]]]:
        """Splits just discovered (the last ones for ever if ``no_more``); what is new for each subtask."""
        if no_more:
            self._ended.add(step)
        known = self._ids.setdefault(step, set())
        news = [split for split in splits if split.id not in known]
        self._discovered.setdefault(step, []).extend(news)
        known.update(split.id for split in news)
        enumerator = self._enumerators.get(step)
        if enumerator is None:
            return []
        fresh = list(enumerate(enumerator.assign(news)))
        self._count_dealt(step)
        return fresh

    def _count_dealt(self, step: str) -> None:
        """From now on they hold time back, whether or not their readers have heard of them."""
        enumerator = self._enumerators[step]
        for subtask in range(enumerator.parallelism):
            self._times[step].dealt(subtask, enumerator.dealt(subtask))

    def reported(self, message: c.SourceTime) -> list[tuple[int, c.StepTime]]:
        """Take a subtask's report of its time; return what is to be told to subtasks, by slot."""
        time = SubtaskTime(message.known, message.holding, message.watermark, message.finished, message.quiet)
        return [
            (tell.subtask, c.StepTime(message.attempt, message.step, tell.watermark, tell.idle, tell.report))
            for tell in self._times[message.step].reported(message.subtask, time)
        ]

    def start_discovery(
        self, found: Callable[[str, list[Split], bool], None], failed: Callable[[str, Exception], None]
    ) -> None:
        """Look for new splits of growing sources, each from a thread of its own.

        ``found`` gets the step, its splits and whether they are all for ever; not if they are the same as before.
        """
        for step in self.plan.steps.values():
            if step.role == "source" and not cast(Source, step.spec).bounded:
                args = (step.id, cast(Source, step.spec), found, failed)
                threading.Thread(target=self._discover, args=args, name=f"cutwater-find-{step.id}", daemon=True).start()

    def stop(self) -> None:
        """No more discovery; sources that stage rows all the time (a streaming DataFrame) end too."""
        self._stopping.set()
        for step in self.plan.steps.values():
            if step.role == "source":
                SourceHooks(cast(Source, step.spec)).stop()

    def _discover(
        self,
        step: str,
        source: Source,
        found: Callable[[str, list[Split], bool], None],
        failed: Callable[[str, Exception], None],
    ) -> None:
        ended, before = False, list(self._discovered.get(step, ()))
        while not ended and not self._stopping.wait(source.discover_interval_ms / 1000):
            try:
                ended = SourceHooks(source).ended  # asked before: what comes after it is none
                splits = source.discover()
                if ended or splits != before:
                    before = list(splits)  # a source may go on with its own
                    found(step, before, ended)
            except Exception as e:
                failed(step, e)


@dataclass
class Enumerator:
    """Assigns the splits of one read step.

    >>> e = Enumerator("in", None, 2)
    >>> [len(a) for a in e.assign([Split("a"), Split("b"), Split("c")])]
    [2, 1]
    >>> [len(a) for a in e.assign([Split("a"), Split("d")])]
    [0, 1]
    >>> [[split.id for split in a] for a in e.assign([Split("large", {"size": 9}), Split("e"), Split("f")])]
    [['large'], ['e', 'f']]
    """

    step: str
    source: Source | None
    parallelism: int
    _load: list[int] = field(default_factory=list[int])
    """Bytes to read, per subtask, as far as splits tell."""
    _known: set[str] = field(default_factory=set[str])
    _wholes: set[str] = field(default_factory=set[str])
    """Of which parts are known."""
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
            self._know(r.id, r.data)
            if not r.done:
                self._load[target] += _weight(r.data)
        return assigned

    def again(self, subtask: int, records: Iterable[SplitRecord]) -> list[SplitAssignment]:
        """Splits of a subtask that goes back to a snapshot while others read on: every split stays where it is."""
        known = {r.id: _at(r) for r in records}
        return [*known.values(), *(split for id, split in self._dealt[subtask].items() if id not in known)]

    def assign(self, splits: Iterable[Split]) -> list[list[SplitAssignment]]:
        """Deal the splits not seen before, in order, to the subtasks with the least to read."""
        assigned: list[list[SplitAssignment]] = [[] for _ in range(self.parallelism)]
        for split in splits:
            if split.id in self._known or split.id in self._wholes or _whole(split.data) in self._known:
                continue
            self._know(split.id, split.data)
            target = min(range(self.parallelism), key=self._load.__getitem__)
            self._load[target] += _weight(split.data)
            fresh = SplitAssignment(split.id, split.data, None, MIN_WATERMARK, False)
            assigned[target].append(fresh)
            self._dealt[target][split.id] = fresh
        return assigned

    def _know(self, id: str, data: Json) -> None:
        self._known.add(id)
        if (whole := _whole(data)) is not None:
            self._wholes.add(whole)

    def dealt(self, subtask: int) -> int:
        """Number of splits that a subtask has been given, those of the snapshot included."""
        return len(self._dealt[subtask])

    def rates(self) -> list[float | None]:
        """Rows per second for each subtask: the source's rate, shared by those that have something to read."""
        rate = self.source.rate if self.source is not None else None
        if rate is None:
            return [None] * self.parallelism
        sharing = max(1, sum(1 for n in self._load if n)) if self.source and self.source.bounded else self.parallelism
        return [rate / sharing] * self.parallelism


def _whole(data: Json) -> str | None:
    """Id of the split that a part is of."""
    return data.get(PART_OF) if isinstance(data, dict) else None


def _weight(data: Json) -> int:
    """How much there is to read of a split, in bytes; whatever a snapshot says of it, at least 1."""
    told = data.get(WEIGHT, data.get(SIZE)) if isinstance(data, dict) else None
    return max(1, told) if isinstance(told, int) else 1


def _at(record: SplitRecord) -> SplitAssignment:
    return SplitAssignment(record.id, record.data, record.position, record.max_time, record.done, record.idle)
