"""One attempt of the job: its channels, made new or from a snapshot, which may be one taken at another parallelism.

Where event time begins then, and in which order what was on its way comes, is the core's to say; who owns which key,
and who reads which split, is the simulator's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from cutwater.data.time import MAX_WATERMARK, MIN_WATERMARK
from cutwater.protocol.channel.items import Rows, Timed, Watermark, rows_in
from cutwater.protocol.determinants import DeterminantLog
from cutwater.protocol.subtask.watermarks import InputTime, OldChannel, RedistributedEdge, merged_time
from cutwater.sim.schedules.graphs import Channel, Graph, How, Plan, key_of
from cutwater.sim.world.channels import Link, Numbers
from cutwater.sim.world.disk import Done, Part, numbers_in

if TYPE_CHECKING:
    from cutwater.sim.world.worker import SimWorker
    from cutwater.sim.world.world import World


class Attempt:
    """What the subtasks of one attempt share.

    Args:
        plan: the dataflow at its present parallelism.
        number: of the attempt.
        first_id: every checkpoint of the attempt has a higher id.
        restored: the checkpoint it goes on from.
        regions: what goes back to it (R2).
        before: the attempt in which all else has run so far, and runs on.
    """

    __slots__ = (
        "_orders", "attempt_of", "first_id", "lineage", "links", "number", "others_live", "parts",
        "plan", "regions", "rescales", "restored", "tasks",
    )  # fmt: skip

    def __init__(
        self,
        world: World,
        plan: Plan,
        number: int,
        first_id: int,
        restored: Done | None,
        regions: tuple[int, ...],
        before: Attempt | None,
    ) -> None:
        self.number, self.first_id, self.restored, self.regions = number, first_id, restored, regions
        self.plan = plan
        graph, region_of = plan.graph, plan.region_of
        self.others_live = before is not None
        self.tasks = [t for t, region in enumerate(region_of) if region in regions]
        """Those that begin with it."""
        self.attempt_of = [number] * len(graph.tasks) if before is None else before.attempt_of.copy()
        """Of each subtask, the attempt that it began with."""
        for task in self.tasks:
            self.attempt_of[task] = number
        self.parts: dict[int, Part] = restored.manifest if restored else {}
        self.rescales = restored is not None and world.attempts[restored.attempt].plan is not plan
        """The checkpoint was taken at another parallelism."""
        if restored and self.rescales:
            before_it = world.attempts[restored.attempt].plan.graph
            self.parts = Redealt(self.parts, before_it, graph, world.redistributed_edge, world.rerouting).parts
        self.lineage = number if before is None else before.lineage
        """The attempt that all subtasks began with at last."""
        self._orders: dict[int, DeterminantLog] = {} if before is None else before._orders.copy()
        self.links: list[Link] = [self._link(world, spec, before) for spec in graph.channels]

    def _link(self, world: World, spec: Channel, before: Attempt | None) -> Link:
        parts, id = self.parts, self.restored.checkpoint_id if self.restored else 0
        if before is not None:
            regions, region_of, old = self.regions, self.plan.region_of, before.links[spec.index]
            sender_lives, receiver_lives = region_of[spec.source] not in regions, region_of[spec.target] not in regions
            if sender_lives and receiver_lives:
                return old
            if sender_lives:
                log = self._log_between(spec)
                return Link.after_receiver(spec, old, parts.get(spec.target), log, id)
            if receiver_lives:
                return Link.after_sender(spec, old, parts.get(spec.source), id)
        if not parts:
            return Link(world, spec)
        return self._restored(world, spec, id)

    def _log_between(self, spec: Channel) -> list[Timed]:
        """What the checkpoint holds of a channel."""
        if not self.parts:
            return []
        return self.log(self.parts[spec.source], self.parts[spec.target], spec.index, spec.back)

    def _restored(self, world: World, spec: Channel, id: int) -> Link:
        """A channel whose ends both go back to the checkpoint."""
        c, sender, receiver = spec.index, self.parts[spec.source], self.parts[spec.target]
        log = self._log_between(spec)
        really = numbers_in(log)
        if not self.rescales:
            really = world.attempts[sender.attempt].links[c].rows_on_their_way(receiver.ins[c], sender.outs[c])
        return Link(world, spec, (sender, receiver), log, really, id)

    def order(self, task: int) -> DeterminantLog:
        """The determinant log of a subtask that begins with this attempt.

        Only once all have turned: until then whoever is replaced, if it is late and not dead, goes on choosing, and
        survivors hear of it.
        """
        old = self._orders.get(task)
        self._orders[task] = DeterminantLog() if old is None else old.copy()
        return self._orders[task]

    def turned(self, workers: Iterable[SimWorker]) -> bool:
        """Whoever goes back is gone, and whoever does not has turned to the new channels, and lives."""
        if not self.others_live:
            return True
        ends = [end for link in self.links for end in (link.sender, link.receiver) if end is not None]
        if any(link.before is not None for link in self.links) or any(end.dropped for end in ends):
            return False
        going = set(self.tasks)
        return all(s.attempt is self for w in workers if not w.dead for s in w.subtasks if s.task in going)

    @staticmethod
    def log(sender: Part, receiver: Part, channel: int, back: bool) -> list[Timed]:
        """What is on its way: the receiver's part, the sender's part, and what the sender had said of time."""
        log = [*receiver.logs.get(channel, ()), *sender.overtaken.get(channel, ())]
        known = max([receiver.heard[channel], *(item.watermark for item in log)])
        if not back and sender.said[channel] > known:
            log.append(Watermark(sender.said[channel]))
        return log


Rerouting: TypeAlias = Callable[[How, int, int, int, int], bool]
"""Whether a row on its way belongs to a new receiver: kind of edge, row, old receiver, new one, number of new ones."""


def reroute(how: How, row: int, old: int, target: int, targets: int) -> bool:
    """A row with a key goes to the key's owner, another one to the subtask with the number of the one it was for."""
    return (key_of(row) if how == "hash" else old) % targets == target


class Redealt:
    """The parts of a snapshot at another parallelism; what is on its way lies in the receivers' parts.

    Keys go to their owners, a sink's staged rows to any of its subtasks, splits to readers by their number.  Rows of
    the channels are numbered anew.
    """

    def __init__(
        self,
        parts: Mapping[int, Part],
        old: Graph,
        new: Graph,
        edge_class: type[RedistributedEdge],
        rerouting: Rerouting,
    ) -> None:
        self._before, self._old, self._new, self._rerouting = parts, old, new, rerouting
        self._of_edge = [[c for c in old.channels if c.edge == e] for e in range(len(old.edges))]
        reached = [self._reached(step) for step in range(len(new.steps))]
        self._edges = [
            edge_class([self._old_channel(c).sent for c in channels], reached[new.edges[e].source])
            for e, channels in enumerate(self._of_edge)
        ]
        self.parts = {task: self._part(task, reached[step]) for task, (step, _) in enumerate(new.tasks)}
        for channel in new.channels:
            self._begin(channel)

    def _reached(self, step: int) -> int:
        """Where the event time of a new subtask begins: that of the slowest old one that had not ended."""
        return merged_time(InputTime(part.watermark) for part in self._parts_of(step)).watermark

    def _parts_of(self, step: int) -> list[Part]:
        return [self._before[t] for t, (s, _) in enumerate(self._old.tasks) if s == step]

    def _part(self, task: int, reached: int) -> Part:
        new, (step, index) = self._new, self._new.tasks[task]
        before, parallelism = self._parts_of(step), self._new.steps[step].parallelism
        mine = before[index::parallelism]
        read = {split: position for p in before for split, position in p.positions.items()}
        part = Part(
            task=task,
            attempt=0,
            positions={split: read[split] for split in new.splits.get(task, ())},
            counts=_counts(mine if task in new.sinks else before, task in new.sinks, index, parallelism),
            sign=sum(p.sign for p in before),
            watermark=reached,
            pieces=tuple(piece for p in mine for piece in p.pieces),
        )
        return part

    def _begin(self, channel: Channel) -> None:
        """Where a new channel begins, and what it delivers first."""
        c, edge, new = channel.index, self._edges[channel.edge], self._new
        how, target = new.edges[channel.edge].how, new.tasks[channel.target][1]
        targets = new.steps[new.edges[channel.edge].target].parallelism
        sender, receiver = self.parts[channel.source], self.parts[channel.target]
        sender.said[c] = receiver.heard[c] = MIN_WATERMARK if channel.back else edge.begins
        log: list[Timed] = []
        if new.tasks[channel.source][1] == (target if how == "forward" else 0):
            owners = [o for o in self._of_edge[channel.edge] if how == "hash" or self._receiver(o) % targets == target]
            concerned = [self._old_channel(o, (how, target, targets)) for o in owners]
            if not channel.back:
                receiver.heard[c] = edge.receives(concerned)
            for passed in edge.replayed(concerned, lambda row: row):
                if passed.rows is not None:
                    log.append(Rows(Numbers((passed.rows,)), rows_in(log)))
                if not channel.back and passed.rises:
                    log.append(Watermark(passed.watermark))
        receiver.logs[c], receiver.ins[c] = log, 0
        sender.outs[c] = rows_in(log)

    def _receiver(self, channel: Channel) -> int:
        return self._old.tasks[channel.target][1]

    def _old_channel(self, channel: Channel, mine: tuple[How, int, int] | None = None) -> OldChannel[int]:
        """An old channel, with the rows on their way that belong to a new receiver."""
        c, sender, receiver = channel.index, self._before[channel.source], self._before[channel.target]
        items: list[tuple[int | None, InputTime]] = []
        for item in (*receiver.logs.get(c, ()), *sender.overtaken.get(c, ())):
            for row in item.batch if type(item) is Rows else ():
                if mine is not None and self._rerouting(mine[0], row, self._receiver(channel), *mine[1:]):
                    items.append((row, InputTime()))
            items.append((None, InputTime(item.watermark)))
        sent = InputTime(MAX_WATERMARK if sender.has_ended else sender.said[c])
        return OldChannel(InputTime(receiver.heard[c]), items, sent)


def _counts(parts: Sequence[Part], sink: bool, index: int, parallelism: int) -> dict[int, int]:
    found = Counter[int]()
    for part in parts:
        found.update(part.counts)
    return {key: n for key, n in found.items() if sink or key % parallelism == index}
