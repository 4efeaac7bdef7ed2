"""Reading a snapshot in the worker: the part of each subtask.

At another parallelism event times, and rows on their way, go to their new owners.  Which old channels concern a new
receiver, and which of their rows it owns, is told here; in which order they come, and what stands where of time, by
``protocol.subtask.watermarks``.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias, TypeVar

from cutwater.data.time import MAX_WATERMARK, MIN_WATERMARK
from cutwater.errors import BuildError, CorruptSnapshotError, CutwaterError, StorageError
from cutwater.operators.base import Operator
from cutwater.operators.evolution import Evolution
from cutwater.plan.compatibility import check_compatible
from cutwater.plan.graph import Channel, Edge, EdgeType, PhysicalPlan
from cutwater.protocol.channel.items import Rows, Timed, Watermark
from cutwater.protocol.subtask.watermarks import InputTime, OldChannel, RedistributedEdge, merged_time
from cutwater.runtime.channels.partitioner import HashPartitioner
from cutwater.runtime.control.messages import Deploy
from cutwater.runtime.copies.copies import CopyReader
from cutwater.runtime.failures import first_line
from cutwater.state.keys import key_group_range
from cutwater.state.segments import Segment
from cutwater.storage.reading import load_snapshot
from cutwater.storage.snapshot.channel_log import CHANNEL_KIND, LogItem, read_log
from cutwater.storage.snapshot.increments import increments_of
from cutwater.storage.snapshot.manifest import ChannelRecord, Entry, Manifest, SubtaskRecord
from cutwater.storage.snapshot.segment_files import read_segment
from cutwater.storage.store.base import Readable, Store
from cutwater.storage.store.opening import another

Share: TypeAlias = Callable[[LogItem], LogItem | None]
"""Rows on their way, but only those that a new receiver owns; ``None``: it owns none of them."""


def fitting(edge: Edge, item: LogItem) -> LogItem:
    """Rows of a snapshot with the columns that this program sends over the edge: it may read fewer than the old one.

    Raises:
        BuildError: it reads one more.
    """
    if item.batch is None or item.batch.schema.names == edge.schema.names:
        return item
    missing = [name for name in edge.schema.names if name not in item.batch.schema.names]
    if missing:
        raise BuildError(
            f"the snapshot holds rows on their way along {edge.name!r} without column {missing[0]!r}",
            step=edge.target_step,
            hint="Restore with the old program, take an aligned checkpoint there, and go on from that one.",
        )
    return item._replace(batch=item.batch.select(edge.schema.names))


def to_items(log: Iterable[LogItem], first_row: int) -> list[Timed]:
    """Items of a log as a channel delivers them; rows are numbered from ``first_row`` on."""
    items: list[Timed] = []
    for batch, watermark, idle, late_before in log:
        if batch is None:
            items.append(Watermark(watermark, idle))
        else:
            items.append(Rows(batch, first_row, watermark, late_before))
            first_row += batch.num_rows
    return items


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
        """True if the numbers of the snapshot's vertices and edges can be told; older releases did not write that."""
        told = bool(self.manifest.edges) or any(step.vertex >= 0 for step in self.manifest.steps)
        return told or {s.id for s in self.manifest.steps} == self.plan.steps.keys()

    def _old_vertex(self, step: str) -> int:
        """Number of the vertex that a step was in; -1: it was in none."""
        if not self._known:
            return -1
        told = next((s.vertex for s in self.manifest.steps if s.id == step), -1)
        return told if self.manifest.edges or told >= 0 else self.plan.vertex_of(step).index

    def watermark(self, vertex: int) -> int | None:
        """First event time of a new subtask: that of the slowest old one that had not ended."""
        old = self._old_vertex(self.plan.vertices[vertex].steps[0])
        times = [
            InputTime(r.watermark, any(c.idle for c in r.output_rows))
            for r in self.manifest.subtasks
            if r.vertex == old
        ]
        return merged_time(times).watermark if times else None

    def channel(self, key: Channel, sending: bool) -> ChannelRecord | None:
        """First event time of a new channel, on either side; its rows are numbered from 0 on."""
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
        """Items that a new channel delivers before anything that arrives."""
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
        """True if this is the channel over which its receiver gets what was on the way to it."""
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
        """Items between the ends of an old channel."""
        items = (fitting(edge, item) for entry in entries for item in self.read(entry))
        return [(i if i.batch is not None else None, InputTime(i.watermark, i.idle)) for i in items]

    def _keys(self, edge: Edge) -> tuple[str, ...]:
        """The rule by which rows of an edge find their subtask.

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


T = TypeVar("T")
_READERS = 2
_AHEAD = 3
"""Segments that are read before the operator takes one: more of them would be fresh memory only."""
_FILES_NAMED = 3
"""In a message."""


@dataclass(frozen=True)
class Restore:
    """A chosen snapshot; without manifest everything starts empty.

    Keyed segments come back to every subtask whose key groups they overlap, so the parallelism may differ from the
    snapshot's; what was on its way, and event time, is then redistributed.
    """

    store: Store
    job: str
    manifest: Manifest | None
    same_shape: bool
    plan: PhysicalPlan
    elsewhere: bool = False
    """Not in the job's folder (another job's, or a savepoint): none of its files is built upon."""
    foreign: bool = False
    """Of another job: what its sinks have in progress stays theirs (T3)."""
    fresh_sinks: bool = False
    """Its sinks were shadows: the real ones begin with nothing."""
    evolutions: Mapping[str, Evolution] = field(default_factory=dict[str, Evolution])
    """By step: what becomes of state that another version of the program wrote."""
    copies: CopyReader | None = None
    """Copies of its files that are found sooner than the store's."""

    @classmethod
    def load(
        cls, store: Store, job: str, uid: str, deploy: Deploy, plan: PhysicalPlan, copies: CopyReader | None = None
    ) -> Restore:
        """The snapshot that the coordinator chose, verified once more.

        Raises:
            CorruptSnapshotError: it changed since.
            BuildError: the program does not fit it.
        """
        if deploy.restore is None:
            return cls(store, job, None, True, plan)
        elsewhere = deploy.restore_from
        if elsewhere is not None:
            store, job, copies = another(store, elsewhere[0]), elsewhere[1], None
        manifest = load_snapshot(store, job, deploy.restore)
        foreign = manifest.uid != uid
        bound = check_compatible(plan, manifest, deploy.upgrade, foreign=foreign)
        same = _same_shape(plan, bound.manifest)
        fresh = deploy.fresh_sinks
        return cls(
            store, job, bound.manifest, same, plan, elsewhere is not None, foreign, fresh, bound.evolutions, copies
        )

    def _get(self, decode: Callable[[Readable, str, Entry], T], entry: Entry) -> T:
        """An entry, verified."""
        if self.copies is None:
            return decode(self.store, self.job, entry)
        return self.copies.read(decode, self.store, entry)

    def watermark(self, vertex: int, subtask: int) -> int | None:
        """First event time of a subtask; ``None``: the snapshot says nothing."""
        if self._moved is not None:
            return self._moved.watermark(vertex)
        record = self._records.get((vertex, subtask))
        return record.watermark if record is not None else None

    @cached_property
    def _moved(self) -> Redistribution | None:
        """The snapshot's channels for other subtasks than its own; ``None`` where they are the same."""
        if self.manifest is None or self.same_shape:
            return None
        return Redistribution(self.manifest, self.plan, lambda entry: self._get(read_log, entry))

    @property
    def processing_time_ms(self) -> int:
        """The latest processing time that a subtask had seen at its cut."""
        return max((r.processing_time_ms for r in self.manifest.subtasks), default=0) if self.manifest else 0

    def channel(self, key: Channel, sending: bool) -> ChannelRecord | None:
        """Row number and watermark of a channel's end at the cut."""
        if self._moved is not None:
            return self._moved.channel(key, sending)
        return self._ends.get((key.edge, key.source, key.target, sending))

    @cached_property
    def _records(self) -> dict[tuple[int, int], SubtaskRecord]:
        """The snapshot's record of each subtask (only if the job has the same shape)."""
        subtasks = self.manifest.subtasks if self.manifest is not None and self.same_shape else ()
        return {(r.vertex, r.subtask): r for r in subtasks}

    @cached_property
    def _ends(self) -> dict[tuple[int, int, int, bool], ChannelRecord]:
        """Both ends of every channel; the last is true for the sending one."""
        ends: dict[tuple[int, int, int, bool], ChannelRecord] = {}
        for record in self._records.values():
            for sending, channels in ((False, record.inputs), (True, record.output_rows)):
                ends |= {(c.edge, c.source, c.target, sending): c for c in channels}
        return ends

    def waiting(self, edge: Edge, key: Channel) -> list[Timed]:
        """Rows of a channel in the snapshot, to be delivered before anything that arrives.

        Rows are numbered up to the sender's next one.
        """
        if self._moved is not None:
            moved = self._moved.waiting(edge, key)
            return to_items(moved, -sum(i.batch.num_rows for i in moved if i.batch is not None))
        sent = self.channel(key, sending=True)
        logged = self._logged(edge, self._entries(edge, key), sent.next_row if sent is not None else 0)
        return logged if edge.back else logged + self._later_watermark(key, logged)

    def overtaken(self, edge: Edge, key: Channel) -> list[Timed]:
        """Items that a barrier overtook in the sender's queue: a receiver that lives on may not have them (R3, R4).

        Behind it stands what the sender had said of time.
        """
        sent = self.channel(key, sending=True)
        if sent is None:
            return []
        entries = [e for e in self._entries(edge, key) if e.side == "sender"]
        return [*self._logged(edge, entries, sent.next_row), Watermark(sent.watermark, sent.idle)]

    def _entries(self, edge: Edge, key: Channel) -> list[Entry]:
        """Items of a channel in the snapshot, in the order of its rows: those that waited at the sender come last."""
        found = [e for e in self._logs.get(edge.name, ()) if e.channel is not None and e.channel[1:] == key[1:]]
        return sorted(found, key=lambda e: (e.side == "sender", e.first_row))

    def _logged(self, edge: Edge, entries: list[Entry], next_row: int) -> list[Timed]:
        """The items of some entries, numbered up to ``next_row``."""
        items = [fitting(edge, item) for entry in entries for item in self._get(read_log, entry)]
        return to_items(items, next_row - sum(entry.rows for entry in entries))

    @cached_property
    def _logs(self) -> dict[str, list[Entry]]:
        """Entries of channels, by the name of the edge."""
        logs: dict[str, list[Entry]] = {}
        for entry in self.manifest.entries if self.manifest else ():
            if entry.kind == CHANNEL_KIND:
                logs.setdefault(entry.name, []).append(entry)
        return logs

    def _later_watermark(self, key: Channel, logged: list[Timed]) -> list[Timed]:
        """The sender's word on event time at its freeze, beyond what the receiver and the log know."""
        sent, known = self.channel(key, sending=True), self.channel(key, sending=False)
        if sent is None or known is None:
            return []
        watermark, idle = known.watermark, known.idle
        for item in logged:
            watermark, idle = max(watermark, item.watermark), type(item) is Watermark and item.idle
        if sent.watermark > watermark or (sent.watermark == watermark and sent.idle != idle):
            return [Watermark(sent.watermark, sent.idle)]
        return []

    def into(self, operator: Operator, step: str, subtask: int, parallelism: int, key_groups: range) -> None:
        """Give an operator of a subtask its state back.

        Raises:
            CorruptSnapshotError: it is damaged, or holds something else than the operator's state.
        """
        unread: list[Exception] = []

        def watched() -> Iterator[Segment]:
            try:
                yield from self.segments(step, subtask, parallelism, key_groups)
            except Exception as error:
                unread.append(error)
                raise

        try:
            operator.restore(watched())
        except (OSError, MemoryError):
            raise
        except CutwaterError as error:
            error.step = error.step or step
            if isinstance(error, StorageError) and error not in unread:  # a reader names its file
                error.message = f"{error.message} (in {self._where(step, subtask, parallelism, key_groups)})"
            raise
        except Exception as error:  # its digest was right, so it was made to be wrong: anything may come of it
            raise CorruptSnapshotError(
                f"what lies in {self._where(step, subtask, parallelism, key_groups)} is not what the step keeps "
                f"({type(error).__name__}: {first_line(str(error))})",
                hint="Somebody changed it, unless the step fails by itself: restore an older checkpoint "
                '(restore="DIR/JOB@ID"). With a key (key_file=) such state is refused before it is read.',
                step=step,
            ) from error

    def _where(self, step: str, subtask: int, parallelism: int, key_groups: range) -> str:
        """Name of the state's holder, for messages."""
        entries = self._concerned(step, subtask, parallelism, key_groups)
        files = sorted({f"{self.job}/{entry.file}" if entry.file else "the manifest" for entry in entries})
        more = f" and {len(files) - _FILES_NAMED} more files" if len(files) > _FILES_NAMED else ""
        checkpoint_id = self.manifest.checkpoint_id if self.manifest is not None else 0
        return f"{', '.join(files[:_FILES_NAMED])}{more} of checkpoint {checkpoint_id}"

    def segments(self, step: str, subtask: int, parallelism: int, key_groups: range) -> Iterator[Segment]:
        """Segments of a step that concern a subtask, in the order they apply."""
        entries = self._concerned(step, subtask, parallelism, key_groups)
        evolution = self.evolutions.get(step)
        read = self._read(entries, key_groups)
        if evolution is None or evolution.convert is None:
            return read
        return (made for segment in read if (made := evolution.convert(segment)) is not None)

    def _concerned(self, step: str, subtask: int, parallelism: int, key_groups: range) -> list[Entry]:
        entries: list[Entry] = []
        for entry in self.manifest.entries if self.manifest else ():
            if entry.step != step or entry.kind == CHANNEL_KIND:
                continue
            if entry.key_groups is None:
                concerned = entry.subtask % parallelism == subtask
            else:
                concerned = entry.key_groups[0] < key_groups.stop and key_groups.start < entry.key_groups[1]
            if concerned:
                entries.append(entry)
        return entries

    def increments(self) -> dict[tuple[str, int], list[Entry]]:
        """By step and subtask: what incremental checkpoints of the new attempt may build upon."""
        own = self.manifest is not None and self.same_shape and not self.elsewhere
        if self.manifest is None or not own:
            return {}
        found = increments_of(self.manifest.entries, self.store.seal)
        return {key: increments for key, increments in found.items() if key[0] not in self.evolutions}

    def _read(self, entries: list[Entry], owned: range) -> Iterator[Segment]:
        """In order; files are read and verified ahead by other threads, while the operator takes what came."""
        to_come = _to_come(entries, owned)

        def read(number: int) -> Segment:
            return replace(self._get(read_segment, entries[number]), to_come=to_come[number])

        if sum(1 for e in entries if e.file) < 2:
            yield from map(read, range(len(entries)))
            return
        with ThreadPoolExecutor(_READERS, thread_name_prefix="cutwater-restore") as readers:
            ahead: deque[Future[Segment]] = deque()
            for number in range(len(entries)):
                ahead.append(readers.submit(read, number))
                if len(ahead) > _AHEAD:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()

    def sink_states(self, step: str, subtask: int, parallelism: int) -> list[Any]:
        """States of the writers that a subtask takes over."""
        if self.foreign or self.fresh_sinks:
            return []
        return [
            record.sinks[step]
            for record in (self.manifest.subtasks if self.manifest else ())
            if step in record.sinks and record.subtask % parallelism == subtask and record.sinks[step] is not None
        ]


def _to_come(entries: Sequence[Entry], owned: range) -> list[int]:
    """``Segment.to_come`` of each entry: told by the manifest, before anything is read."""
    found: list[int] = []
    rows: defaultdict[str, int] = defaultdict(int)
    taken: defaultdict[str, set[int]] = defaultdict(set)  # key groups of which later entries take rows away
    for entry in reversed(entries):
        if entry.key_groups is None:  # no keyed state
            found.append(0)
            continue
        groups = range(*entry.key_groups)
        here = min(groups.stop, owned.stop) - max(groups.start, owned.start)
        rows[entry.name] += -(-entry.rows * here // len(groups))
        found.append(rows[entry.name] if taken[entry.name].isdisjoint(groups) else 0)
        if entry.kind != "delta":
            taken[entry.name].update(groups)
    return found[::-1]


def _same_shape(plan: PhysicalPlan, manifest: Manifest) -> bool:
    """True if numbers of vertices, subtasks and channels mean the same in both.

    Steps without state may have come to a chain or gone from it; the step at its head says which one it is.
    """
    had = {(r.vertex, r.subtask) for r in manifest.subtasks}
    has = {(v.index, i) for v in plan.vertices for i in range(v.parallelism)}
    if had != has:
        return False
    if not manifest.edges and all(step.vertex < 0 for step in manifest.steps):
        return True  # a manifest that does not tell
    vertices = {step.id: step.vertex for step in manifest.steps}
    heads = all(vertices.get(v.steps[0]) == v.index for v in plan.vertices)
    return heads and [edge.name for edge in manifest.edges] == [edge.name for edge in plan.edges]
