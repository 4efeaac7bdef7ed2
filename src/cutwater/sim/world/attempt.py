"""One attempt of the job: its channels, made new or from a snapshot."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from cutwater.protocol.channel.items import Timed, Watermark
from cutwater.protocol.determinants import DeterminantLog
from cutwater.sim.schedules.graphs import Plan
from cutwater.sim.world.channels import Link
from cutwater.sim.world.disk import Done
from cutwater.sim.world.part import Part, numbers_in
from cutwater.sim.world.redistribution import Redealt

if TYPE_CHECKING:
    from cutwater.sim.schedules.graphs import Channel
    from cutwater.sim.world.part import Part
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
