"""The oracle: it sees everything, asks the protocol machines nothing, and decides whether a schedule went wrong.

Every checkpoint that becomes part of the log is compared, channel by channel, with what was really sent: rows taken
before the receiver's cut, then the recorded rows, must be exactly the rows sent before the sender's cut, in order
(CL6).  What sinks have committed is compared with a result that is computed without running anything.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NoReturn

from cutwater.protocol.channel.items import rows_in
from cutwater.sim.world.channels import log_of

if TYPE_CHECKING:
    from cutwater.sim.schedules.graphs import Plan
    from cutwater.sim.world.disk import Done, Part
    from cutwater.sim.world.output import Handle
    from cutwater.sim.world.world import World


class Violation(AssertionError):
    """A promise is broken.

    Attributes:
        kind: in a word or two, the same for the same bug.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Oracle:
    """The oracle of one schedule."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._final: Done | None = None
        self.exactly = world.row.guarantee != "at-least-once"

    def broken(self, kind: str, text: str) -> NoReturn:
        """A promise is broken.

        Raises:
            Violation: always.
        """
        raise Violation(kind, text)

    # ------------------------------------------------------------------------------------------------ as it happens

    def published(self, done: Done, *, logged: bool = True, behind: Done | None = None) -> None:
        """A checkpoint became part of the log, or a savepoint: a consistent cut of whole, durable parts.

        ``behind`` a savepoint is the entry of the log that says that no other driver had the job.
        """
        world, parts = self._world, done.manifest
        id = done.checkpoint_id
        if id in world.published:
            self.broken("id used twice", f"checkpoint {id} completed twice (A1)")
        world.published.add(id)
        fenced = behind is None or behind.attempt != done.attempt or behind not in world.disk.log
        if not logged and fenced and world.disk.owner != done.attempt:
            self.broken("fencing", f"savepoint {id} is handed out by attempt {done.attempt}, of {world.disk.owner}")
        if logged and world.disk.retained and world.disk.retained[-1].checkpoint_id > id:
            newer = world.disk.retained[-1].checkpoint_id
            self.broken("history runs backwards", f"checkpoint {id} completed after checkpoint {newer}")
        if done.final:
            self._final = done
        graph = world.attempts[done.attempt].plan.graph
        missing = [name for t, name in enumerate(graph.names) if t not in parts]
        if missing:
            self.broken("part missing", f"checkpoint {id} completed without {', '.join(missing)}")
        for part in parts.values():
            if part.attempt != world.attempts[done.attempt].attempt_of[part.task]:
                self.broken("fencing", f"checkpoint {id} of attempt {done.attempt} holds a part of {part.attempt}")
            for name in part.files:
                if name not in world.disk.files:
                    self.broken("not durable", f"checkpoint {id} completed, but {name} is not durable (A6)")
        for spec in graph.channels:
            if not logged and not spec.back and spec.index in parts[spec.target].logs:
                self.broken("savepoint with rows", f"savepoint {id} has a log of {graph.channel_names[spec.index]}")
            self._check_channel(id, parts[spec.source], parts[spec.target], spec.index)
        world.note("completed", 0, done.attempt, id)

    def _check_channel(self, id: int, sender: Part, receiver: Part, channel: int) -> None:
        world = self._world
        sent, taken = sender.outs[channel], receiver.ins[channel]
        rows = log_of(sender, receiver, channel)
        if rows:
            self._note_recorded(id, sender, receiver, channel)
        really = world.attempts[sender.attempt].links[channel].rows_on_their_way(taken, sent)
        if rows == really and (taken <= sent or not self.exactly):
            return
        name = world.attempts[sender.attempt].plan.graph.channel_names[channel]
        self.broken(
            "inconsistent cut",
            f"checkpoint {id}, {name}: {sent} rows sent before the cut, {taken} taken before it, "
            f"{len(rows)} recorded: {rows}, sent were {really} (CL6)",
        )

    def _note_recorded(self, id: int, sender: Part, receiver: Part, channel: int) -> None:
        for part, log, end in (
            (receiver, receiver.logs.get(channel, ()), None),
            (sender, sender.overtaken.get(channel, ()), sender.outs[channel]),
        ):
            count = rows_in(log)
            if count:
                first = receiver.ins[channel] if end is None else end - count
                self._world.note("recorded", part.task, part.attempt, id, channel, first, count)

    def committed(self, handle: Handle, checkpoint_id: int, rows: list[int]) -> None:
        """A sink's rows became visible: only a checkpoint in the log allows that."""
        self._world.note("committed", handle.task, handle.attempt, checkpoint_id, len(rows))
        if checkpoint_id not in self._world.published:
            self.broken(
                "early commit", f"{handle} was committed with checkpoint {checkpoint_id}, which is not published"
            )
        if handle.checkpoint_id > checkpoint_id:
            self.broken("early commit", f"{handle} was committed with the older checkpoint {checkpoint_id}")

    def committed_nothing(self, handle: Handle, checkpoint_id: int, attempt: int) -> None:
        """A sink committed what a recovery had removed: right only for an attempt that is over."""
        if self._world.output.gone.get(handle, 0) <= attempt:
            self.broken("lost commit", f"{handle} of checkpoint {checkpoint_id} was removed and then committed (T2)")

    def settled(self, restored: Done | None, attempt: int, plan: Plan, regions: tuple[int, ...]) -> None:
        """A restore has brought the sinks in line: readers see what the checkpoint and those before it committed."""
        world, output = self._world, self._world.output
        if world.disk.owner != attempt:
            return  # it was stopped on the way, and the job is another driver's
        seen: Counter[int] = Counter()
        for handle, rows in output.visible.items():
            seen[handle.task] += len(rows)
        if world.rescaled or plan.parallelism:  # who writes what has changed since
            if regions == plan.everything and restored is not None:
                sinks = world.attempts[restored.attempt].plan.graph.sinks
                self._in_line(restored, "all sinks", seen.total(), [restored.manifest[task] for task in sinks])
            return
        for task in sorted(t for t in plan.graph.sinks if plan.region_of[t] in regions):
            parts = [restored.manifest[task]] if restored is not None else []
            self._in_line(restored, plan.graph.names[task], seen[task], parts)

    def _in_line(self, restored: Done | None, name: str, seen: int, parts: list[Part]) -> None:
        pieces = self._world.output.pieces
        waiting = sum(len(pieces.get(piece, ())) for part in parts for piece in part.pieces)
        processed = sum(n for part in parts for n in part.counts.values())
        if seen + waiting != processed:
            self.broken(
                "output not in line",
                f"restored {restored and restored.checkpoint_id}, {name}: readers see {seen} rows, {waiting} are "
                f"staged, {processed} belong to the checkpoint (T2)",
            )

    def restored(self, done: Done) -> None:
        """A job goes on from a checkpoint: from a damaged one never."""
        if not self._world.disk.whole(done):
            self.broken("damaged snapshot restored", f"checkpoint {done.checkpoint_id} is torn")

    # ------------------------------------------------------------------------------------------------- at the end

    def at_end(self, finished: bool) -> None:
        """All is over.  What is committed must be the result; of a job that failed, a part of it."""
        world = self._world
        rows = world.schedule.rows
        expected = world.graph.expected(rows)
        output = world.output
        got: Counter[int] = Counter()
        for identities in output.visible.values():
            got.update(identities)
        lost = expected - got if finished else Counter[int]()
        more = got - expected
        if lost:
            self.broken("lost rows", f"{sum(lost.values())} of {sum(expected.values())}: {sorted(lost)[:8]}")
        if more and (self.exactly or more.keys() - expected.keys()):
            self.broken("doubled rows", f"{sum(more.values())} beyond {sum(expected.values())}: {sorted(more)[:8]}")
        if finished and self._final is not None and not world.graph.moody:
            self._check_state(self._final, rows)

    def _check_state(self, final: Done, rows: int) -> None:
        world = self._world
        expected = world.graph.expected_counts(rows)
        graph = world.attempts[final.attempt].plan.graph
        got: Counter[tuple[int, int]] = Counter()
        for task, part in final.manifest.items():
            if task in graph.sinks:
                continue
            step, index = graph.tasks[task]
            got.update({(step, key): n for key, n in part.counts.items()})
            foreign = [key for key in part.counts if key % graph.steps[step].parallelism != index]
            if foreign and all(edge.how == "hash" for edge in graph.edges if edge.target == step):
                self.broken("wrong owner", f"{graph.names[task]} has counted the keys {foreign} of others")
        if expected - got or (self.exactly and got - expected):
            self.broken("wrong state", f"missing {dict(expected - got)}, too many {dict(got - expected)}")
