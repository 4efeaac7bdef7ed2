"""A windowed count over a hash edge, cut anywhere at one parallelism and gone on with at another.

The subtasks are real operators, the snapshot is a real one, and what comes back comes through ``Restore``; moving rows
from one to the next is plain Python here, in a seeded order.  What must come out is counted without any of them.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

import cutwater as cw
from cutwater.data.time import MAX_WATERMARK, MIN_WATERMARK
from cutwater.operators.base import Operator, Outputs
from cutwater.plan.compatibility import edge_records
from cutwater.plan.graph import Channel, PhysicalPlan
from cutwater.plan.planner import make_plan
from cutwater.protocol.channel.items import Rows
from cutwater.protocol.subtask.watermarks import InputTime, WatermarkMerger
from cutwater.runtime.channels.partitioner import HashPartitioner
from cutwater.runtime.worker.restore import Restore
from cutwater.state.keys import key_group_range
from cutwater.storage.snapshot.channel_log import ChannelLog, LogItem, add_log
from cutwater.storage.snapshot.manifest import ChannelRecord, Entry, Manifest, StepRecord, SubtaskRecord
from cutwater.storage.snapshot.segment_files import SnapshotWriter
from memory_store import MemoryStore
from subtask_context import Subtask

__all__ = ["Cut", "Event", "World", "go_on"]

GROUPS, KEYS, WINDOW_US = 32, 23, 10
SCHEMA = pa.schema([("key", pa.int64()), ("time", pa.timestamp("us")), ("id", pa.int64())])

Event = tuple[int, int, int]
"""Key, time, id."""


def plan_of(parallelism: int, sources: int | None = None) -> PhysicalPlan:
    """Read, count by key and window, write; ``sources``: the read step has a parallelism of its own."""
    flow = cw.Dataflow("world")
    rows = flow.read("in", cw.memory([], schema=SCHEMA), event_time="time", parallelism=sources)
    counts = rows.key_by("key").window("window", cw.tumbling("10us")).aggregate("count", n=cw.count())
    counts.write("out", cw.discard())
    counts.late.write("lost", cw.discard())
    return make_plan(flow, parallelism, GROUPS)


def batch_of(events: list[Event]) -> pa.RecordBatch:
    keys, times, ids = zip(*events, strict=True)
    return pa.record_batch([pa.array(keys), pa.array(times, pa.timestamp("us")), pa.array(ids)], schema=SCHEMA)


@dataclass
class World:
    """Splits of events, the watermark after each portion of them, and what came out."""

    splits: list[list[tuple[list[Event], int]]]
    """Per split: portions of events, each with the watermark after it."""
    windows: Counter[tuple[int, int, int]] = field(default_factory=Counter)
    """Results that came: (key, start, count)."""
    late: list[int] = field(default_factory=list)

    @classmethod
    def make(cls, rng: random.Random, splits: int, portions: int, late: bool) -> World:
        number = 0
        made: list[list[tuple[list[Event], int]]] = []
        for _ in range(splits):
            now, watermark, split = 0, MIN_WATERMARK, []
            for _ in range(portions):
                events: list[Event] = []
                for _ in range(rng.randrange(1, 6)):
                    now += rng.randrange(4)
                    back = rng.randrange(25) if late and rng.random() < 0.3 else rng.randrange(3)
                    events.append((rng.randrange(KEYS), max(0, now - back), number))
                    number += 1
                watermark = max(watermark, now - 4)
                split.append((events, watermark))
            made.append(split)
        return cls(made)

    def expected(self) -> tuple[Counter[tuple[int, int, int]], list[int]]:
        """Results, and ids of late rows, where every row meets the watermark of its own split."""
        counts: Counter[tuple[int, int]] = Counter()
        late: list[int] = []
        for split in self.splits:
            watermark = MIN_WATERMARK
            for events, after in split:
                for key, time, id in events:
                    start = time // WINDOW_US * WINDOW_US
                    if start + WINDOW_US - 1 <= watermark:
                        late.append(id)
                    else:
                        counts[key, start] += 1
                watermark = after
        return Counter((key, start, n) for (key, start), n in counts.items()), sorted(late)

    def collect(self, outputs: Outputs) -> None:
        for output, batch in outputs:
            if output == 0:
                starts = batch.column("window_start").cast(pa.int64()).to_pylist()
                counted = zip(batch["key"].to_pylist(), starts, batch["n"].to_pylist(), strict=True)
                self.windows.update((key, start, n) for key, start, n in counted)
            else:
                self.late += batch["id"].to_pylist()


class Receiver:
    """One subtask of the counting step: takes items of its channels and lets its event time rise."""

    def __init__(self, world: World, plan: PhysicalPlan, subtask: int) -> None:
        self.world, self.subtask = world, subtask
        self.vertex = plan.vertex_of("count")
        (self.edge,) = plan.inputs(self.vertex.index)
        self.channels = [c for c in plan.channels(self.edge) if c.target == subtask]
        self.operator: Operator = plan.steps["count"].spec.build()  # type: ignore[union-attr]
        self.operator.open(Subtask(subtask, self.vertex.parallelism, GROUPS, incremental=False))
        self.merger = WatermarkMerger(self.channels)

    def take(self, channel: Channel, batch: pa.RecordBatch | None, watermark: int) -> None:
        if batch is not None and batch.num_rows:
            self.world.collect(self.operator.process(0, batch))
            self._finish()
        if watermark != MIN_WATERMARK:
            risen = self.merger.update(channel, watermark, False)
            if risen is not None:
                self.world.collect(self.operator.on_watermark(risen))
                self._finish()

    def _finish(self) -> None:
        while self.operator.pending:
            self.world.collect(self.operator.resume())


@dataclass
class Cut:
    """A snapshot of a world at one parallelism, with rows on their way; ``sent`` portions had left each source."""

    store: MemoryStore
    manifest: Manifest
    sent: list[int]

    @classmethod
    def take(cls, world: World, parallelism: int, sources: int | None, rng: random.Random) -> Cut:
        plan = plan_of(parallelism, sources)
        receivers = [Receiver(world, plan, i) for i in range(parallelism)]
        edge = receivers[0].edge
        partitioner = HashPartitioner(edge.schema, edge.keys, parallelism, GROUPS)
        sent = [rng.randrange(len(split) + 1) for split in world.splits]
        queues: dict[Channel, list[tuple[pa.RecordBatch | None, int]]] = {c: [] for c in plan.channels(edge)}
        for source, count in enumerate(sent):
            for events, watermark in world.splits[source][:count]:
                parts = dict(partitioner.split(batch_of(events)))
                for i in range(parallelism):
                    queues[Channel(edge.index, source, i)].append((parts.get(i), watermark))
        taken = {channel: rng.randrange(len(queue) + 1) for channel, queue in queues.items()}
        turns = [channel for channel, count in taken.items() for _ in range(count)]
        rng.shuffle(turns)
        place = Counter[Channel]()
        for channel in turns:
            receivers[channel.target].take(channel, *queues[channel][place[channel]])
            place[channel] += 1
        return cls._snapshot(plan, receivers, queues, taken, sent, rng)

    @classmethod
    def _snapshot(
        cls,
        plan: PhysicalPlan,
        receivers: list[Receiver],
        queues: dict[Channel, list[tuple[pa.RecordBatch | None, int]]],
        taken: dict[Channel, int],
        sent: list[int],
        rng: random.Random,
    ) -> Cut:
        store = MemoryStore()
        writer = SnapshotWriter(store, "world", 1, 1, 0, 1 << 30)
        entries: list[Entry] = []
        ends: dict[bool, dict[Channel, ChannelRecord]] = {True: {}, False: {}}
        edge = receivers[0].edge
        for channel, queue in queues.items():
            row = 0
            before = [*queue[: taken[channel]]]
            row = sum(b.num_rows for b, _ in before if b is not None)
            rest = [LogItem(b, w) for b, w in queue[taken[channel] :]]
            # What a barrier overtakes at the receiver ends with rows.
            border = rng.choice([0, *(n + 1 for n, item in enumerate(rest) if item.batch is not None)])
            for side, items in (("receiver", rest[:border]), ("sender", rest[border:])):
                step, subtask = ("count", channel.target) if side == "receiver" else (edge.source_step, channel.source)
                entries += add_log(writer, ChannelLog(step, subtask, edge.name, tuple(channel), side, row, items))
                row += sum(i.batch.num_rows for i in items if i.batch is not None)
            ends[False][channel] = ChannelRecord(*channel, 0, before[-1][1] if before else MIN_WATERMARK)
            ends[True][channel] = ChannelRecord(*channel, row, queue[-1][1] if queue else MIN_WATERMARK)
        subtasks: list[SubtaskRecord] = []
        for receiver in receivers:
            frozen = receiver.operator.freeze(1)
            entries += writer.add("count", receiver.subtask, frozen.segments(unsorted=True))
            frozen.release()
            inputs = [ends[False][c] for c in receiver.channels]
            record: dict[str, Any] = {"incarnation": 1, "protocol": "unaligned", "subtask": receiver.subtask}
            watermark = receiver.merger.combined
            subtasks.append(SubtaskRecord(receiver.vertex.index, inputs=inputs, watermark=watermark, **record))
        for source in range(len(sent)):
            outputs = [end for channel, end in ends[True].items() if channel.source == source]
            last = max((w for b, w in queues[Channel(edge.index, source, 0)]), default=MIN_WATERMARK)
            record = {"incarnation": 1, "protocol": "unaligned", "subtask": source}
            subtasks.append(SubtaskRecord(edge.source, output_rows=outputs, watermark=last, **record))
        writer.close()
        steps = [
            StepRecord(s.id, s.kind, plan.vertex_of(s.id).parallelism, vertex=plan.vertex_of(s.id).index)
            for s in plan.steps.values()
        ]
        manifest = Manifest(
            "world", "uid", 1, 1, "unaligned", GROUPS, plan.parallelism, 0, 0, steps, subtasks, entries,
            edges=edge_records(plan),
        )  # fmt: skip
        return cls(store, manifest, sent)


def go_on(world: World, cut: Cut, parallelism: int, sources: int | None, rng: random.Random) -> None:
    """The rest of the world, from the snapshot, at another parallelism."""
    plan = plan_of(parallelism, sources)
    had = {(r.vertex, r.subtask) for r in cut.manifest.subtasks}
    has = {(v.index, i) for v in plan.vertices for i in range(v.parallelism) if v.steps[0] in ("in", "count")}
    restore = Restore(cut.store, "world", cut.manifest, had == has, plan)
    receivers = [Receiver(world, plan, i) for i in range(parallelism)]
    edge = receivers[0].edge
    senders = plan.vertices[edge.source].parallelism
    partitioner = HashPartitioner(edge.schema, edge.keys, parallelism, GROUPS)
    queues: dict[Channel, list[tuple[pa.RecordBatch | None, int]]] = {}
    for receiver in receivers:
        _restore(receiver, restore, queues)
    for sender in range(senders):
        mine = [n for n in range(len(world.splits)) if n % senders == sender]
        reached = {n: world.splits[n][cut.sent[n] - 1][1] if cut.sent[n] else MIN_WATERMARK for n in mine}
        turns = [n for n in mine for _ in world.splits[n][cut.sent[n] :]]
        rng.shuffle(turns)
        place = Counter[int]()
        left = Counter(turns)
        for n in turns:
            events, reached[n] = world.splits[n][cut.sent[n] + place[n]]
            place[n] += 1
            left[n] -= 1
            if not left[n]:
                del reached[n]
            parts = dict(partitioner.split(batch_of(events)))
            watermark = min((w for m, w in reached.items() if left[m]), default=MIN_WATERMARK)
            for i in range(parallelism):
                queues[Channel(edge.index, sender, i)].append((parts.get(i), watermark))
        for i in range(parallelism):
            queues[Channel(edge.index, sender, i)].append((None, MAX_WATERMARK))
    turns = [channel for channel, queue in queues.items() for _ in queue]
    rng.shuffle(turns)
    place = Counter[Channel]()
    for channel in turns:
        receivers[channel.target].take(channel, *queues[channel][place[channel]])
        place[channel] += 1


def _restore(
    receiver: Receiver, restore: Restore, queues: dict[Channel, list[tuple[pa.RecordBatch | None, int]]]
) -> None:
    """As ``Wiring`` does it."""
    groups = key_group_range(receiver.subtask, receiver.vertex.parallelism, GROUPS)
    receiver.operator.restore(restore.segments("count", receiver.subtask, receiver.vertex.parallelism, groups))
    times: dict[Any, InputTime] = {}
    for channel in receiver.channels:
        known = restore.channel(channel, sending=False)
        times[channel] = InputTime(known.watermark, known.idle) if known else InputTime()
        waiting = restore.waiting(receiver.edge, channel)
        queues[channel] = [(i.batch if type(i) is Rows else None, i.watermark) for i in waiting]
    watermark = restore.watermark(receiver.vertex.index, receiver.subtask)
    receiver.merger.restore(times, MIN_WATERMARK if watermark is None else watermark)
