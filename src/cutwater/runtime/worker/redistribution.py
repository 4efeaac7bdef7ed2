"""A snapshot's channels at another parallelism: event times, and rows on their way to their new owners.

Which old channels concern a new receiver, and which of their rows it owns, is told here; in which order they come, and
what stands where of time, by ``protocol.job.redistribution``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

from cutwater.data.time import MAX_WATERMARK, MIN_WATERMARK
from cutwater.plan.graph import Channel, Edge, EdgeType, PhysicalPlan
from cutwater.protocol.job.redistribution import OldChannel, RedistributedEdge
from cutwater.protocol.subtask.watermarks import InputTime, merged_time
from cutwater.runtime.channels.log import fitting
from cutwater.runtime.channels.partitioner import HashPartitioner
from cutwater.state.keys import key_group_range
from cutwater.storage.snapshot.channel_log import CHANNEL_KIND, LogItem
from cutwater.storage.snapshot.manifest import ChannelRecord, Entry, Manifest

Share: TypeAlias = Callable[[LogItem], LogItem | None]
"""Rows on their way, but only those that a new receiver owns; ``None``: it owns none of them."""


class _Ends(NamedTuple):
    received: InputTime
    sent: InputTime


@dataclass
class Redistribution:
    """A snapshot of a job whose subtasks are not those of the plan.

    Args:
        manifest: of the snapshot.
        plan: what runs now.
        read: gives the items of an entry of kind "channel".
    """

    manifest: Manifest
    plan: PhysicalPlan
    read: Callable[[Entry], list[LogItem]]

    @cached_property
    def _edge_names(self) -> list[str]:
        return [e.name for e in self.manifest.edges or self.plan.edges]

    @cached_property
    def _known(self) -> bool:
        """Whether the numbers of the snapshot's vertices and edges can be told; older releases did not write that."""
        told = bool(self.manifest.edges) or any(step.vertex >= 0 for step in self.manifest.steps)
        return told or {s.id for s in self.manifest.steps} == self.plan.steps.keys()

    def _old_vertex(self, step: str) -> int:
        """Number of the vertex that a step was in; -1: it was in none."""
        if not self._known:
            return -1
        told = next((s.vertex for s in self.manifest.steps if s.id == step), -1)
        return told if self.manifest.edges or told >= 0 else self.plan.vertex_of(step).index

    def watermark(self, vertex: int) -> int | None:
        """Where the event time of a new subtask begins: that of the slowest old one that had not ended."""
        old = self._old_vertex(self.plan.vertices[vertex].steps[0])
        times = [
            InputTime(r.watermark, any(c.idle for c in r.output_rows))
            for r in self.manifest.subtasks
            if r.vertex == old
        ]
        return merged_time(times).watermark if times else None

    def channel(self, key: Channel, sending: bool) -> ChannelRecord | None:
        """Where the event time of a new channel begins, on either side; its rows are numbered from 0 on."""
        edge = self.plan.edges[key.edge]
        ends = self._ends.get(edge.name)
        if not ends or edge.back:
            return None
        times = self._redistributed(edge, ends)
        watermark = times.begins
        if not sending and self._carries(edge, key):
            watermark = times.receives(self._concerned(edge, key.target))
        return ChannelRecord(*key, 0, watermark)

    def waiting(self, edge: Edge, key: Channel) -> list[LogItem]:
        """What a new channel delivers before anything that arrives."""
        if not self._carries(edge, key):
            return []
        return list(self._replayed(edge, key.target))

    def _redistributed(self, edge: Edge, ends: Mapping[tuple[int, int], _Ends]) -> RedistributedEdge:
        return RedistributedEdge((end.sent for end in ends.values()), self.watermark(edge.source))

    # ------------------------------------------------------------------------------------------------ old channels

    @cached_property
    def _ends(self) -> dict[str, dict[tuple[int, int], _Ends]]:
        """By name of the edge, sender and receiver: both ends of the old channels."""
        received: dict[tuple[int, int, int], InputTime] = {}
        sent: dict[tuple[int, int, int], InputTime] = {}
        for record in self.manifest.subtasks if self._known else ():
            received |= {(c.edge, c.source, c.target): _time(c) for c in record.inputs}
            sent |= {(c.edge, c.source, c.target): _time(c) for c in record.output_rows}
        found: dict[str, dict[tuple[int, int], _Ends]] = {}
        for (edge, source, target), end in sent.items():
            both = _Ends(received.get((edge, source, target), end), end)
            found.setdefault(self._edge_names[edge], {})[source, target] = both
        return found

    @cached_property
    def _entries(self) -> dict[tuple[str, int, int], list[Entry]]:
        """By name of the edge, sender and receiver: rows on their way, in order."""
        found: dict[tuple[str, int, int], list[Entry]] = {}
        for entry in self.manifest.entries:
            if entry.kind == CHANNEL_KIND and entry.channel is not None:
                found.setdefault((entry.name, *entry.channel[1:]), []).append(entry)
        for entries in found.values():
            entries.sort(key=lambda e: (e.side == "sender", e.first_row))
        return found

    def _old_parallelism(self, step: str) -> int:
        return next((s.parallelism for s in self.manifest.steps if s.id == step), 1)

    # ------------------------------------------------------------------------------------------------ new channels

    def _carries(self, edge: Edge, key: Channel) -> bool:
        """Whether this is the channel over which its receiver gets what was on the way to it."""
        return key.source == (key.target if edge.type is EdgeType.FORWARD else 0)

    def _concerned(self, edge: Edge, target: int) -> list[OldChannel[LogItem]]:
        """The old channels on which there may be something for a new receiver; none, where receivers have no keys."""
        receivers = self._old_parallelism(edge.target_step)
        targets = self.plan.vertices[edge.target].parallelism
        if edge.type is EdgeType.BROADCAST:  # each had a copy of every row; it goes with the broadcast state
            theirs = [target % receivers]
        elif self._keys(edge):
            theirs = self._overlapping(target, targets, receivers)
        else:
            theirs = [old for old in range(receivers) if old % targets == target]
        ends = self._ends.get(edge.name, {})
        found: list[OldChannel[LogItem]] = []
        for old in theirs:
            for source in range(self._old_parallelism(edge.source_step)):
                both = ends.get((source, old), _Ends(InputTime(), InputTime()))
                entries = self._entries.get((edge.name, source, old), [])
                if entries or (source, old) in ends:
                    found.append(OldChannel(both.received, self._items(edge, entries), both.sent))
        return found

    def _items(self, edge: Edge, entries: list[Entry]) -> list[tuple[LogItem | None, InputTime]]:
        """What lies between the ends of an old channel."""
        items = (fitting(edge, item) for entry in entries for item in self.read(entry))
        return [(i if i.batch is not None else None, InputTime(i.watermark, i.idle)) for i in items]

    def _keys(self, edge: Edge) -> tuple[str, ...]:
        """What says where the rows of an edge belong.

        Of a forward edge whose rows have keys: they lie in place, and what follows relies on it.
        """
        if edge.type is EdgeType.FORWARD:
            keys = edge.keys or self.plan.steps[edge.source_step].outputs[edge.source_output].keys
            return keys if set(keys) <= set(edge.schema.names) else ()  # nobody behind it reads them
        return edge.keys if edge.type is EdgeType.HASH else ()

    def _share(self, edge: Edge, target: int) -> Share:
        keys, targets = self._keys(edge), self.plan.vertices[edge.target].parallelism
        if not keys:
            return lambda item: item
        partitioner = HashPartitioner(edge.schema, keys, targets, self.plan.max_parallelism)

        def share(item: LogItem) -> LogItem | None:
            assert item.batch is not None
            mine = dict(partitioner.split(item.batch)).get(target)
            return None if mine is None else item._replace(batch=mine)

        return share

    def _overlapping(self, target: int, targets: int, receivers: int) -> list[int]:
        """Old subtasks that share key groups with a new one."""
        groups = self.plan.max_parallelism
        mine = key_group_range(target, targets, groups)
        theirs = [key_group_range(old, receivers, groups) for old in range(receivers)]
        return [n for n, them in enumerate(theirs) if them.start < mine.stop and mine.start < them.stop]

    def _replayed(self, edge: Edge, target: int) -> Iterator[LogItem]:
        share, concerned = self._share(edge, target), self._concerned(edge, target)
        ends = self._ends.get(edge.name) or {(0, 0): _Ends(InputTime(), InputTime())}
        for passed in self._redistributed(edge, ends).replayed(concerned, share):
            watermark = MIN_WATERMARK if edge.back else passed.watermark  # none goes over a back-edge (W3)
            if passed.rows is not None:
                yield passed.rows._replace(watermark=watermark)
            elif not edge.back:
                yield LogItem(None, watermark)


def _time(end: ChannelRecord) -> InputTime:
    return InputTime(MAX_WATERMARK) if end.ended else InputTime(end.watermark, end.idle)
