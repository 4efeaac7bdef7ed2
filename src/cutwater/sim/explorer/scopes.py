"""States of a small job of which only a part goes back after a failure (R2, R3, R4).

What a channel has sent is known in full, so that a row which comes again is compared with the one that the receiver
has.  A subtask that takes from several inputs logs its choices (R0); every row tells what its sender knew of all logs
when it left, and a replacement takes over what survivors were told.  How a log is followed is the core's
``DeterminantLog``.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Self, TypeAlias

from cutwater.protocol.checkpoint import messages as cm
from cutwater.protocol.job.regions import Division, units_of
from cutwater.protocol.replay.determinants import CONTROL, DeterminantLog, Run
from cutwater.sim.explorer.actions import ActingState
from cutwater.sim.explorer.world import END, Action, Barrier, Budget, Cut, Item, JobWorld
from cutwater.sim.mutants.core import Plant
from cutwater.sim.schedules.graphs import Graph
from cutwater.sim.schedules.schedule import Recovery
from cutwater.sim.world.oracle import Violation
from cutwater.trace import events as e

Choices: TypeAlias = tuple[tuple[int, bool], ...]
"""Of one determinant log: the input, and whether it was a row."""
Knowledge: TypeAlias = tuple[int, ...]
"""By subtask, how many of its choices somebody knows."""


class ScopedWorld(JobWorld):
    """A job with a scope of recovery.

    Args:
        recovery: "region" (R2), "upstream" (R3), or "task" (R4), which here is a single subtask.
    """

    def __init__(self, graph: Graph, protocol: str, budget: Budget, plant: Plant, recovery: Recovery) -> None:
        super().__init__(graph, protocol, budget, plant)
        ends = [(graph.tasks[c.source], graph.tasks[c.target]) for c in graph.channels]
        alone = tuple(frozenset({task}) for task in graph.tasks)
        parts, upstream = {
            "region": (graph.regions, ()),
            "upstream": units_of(graph.tasks, ends),
            "task": (alone, ()),
        }[recovery]
        self.parts = [frozenset(graph.tasks.index(task) for task in part) for part in parts]
        self.division = Division(parts, upstream, graph.workers)
        self.keeps_output = recovery == "task"
        self.logs_choices = frozenset(t for t in self.tasks if len(graph.inputs[t]) > 1 and t not in graph.sinks)


class ScopedState(ActingState):
    """A state in which some subtasks may go back, and others do not.

    Until everything that went back has sent again what survivors have, no checkpoint begins.
    """

    __slots__ = ("knows", "made", "orders", "over_id", "sent", "told", "waits")

    world: ScopedWorld

    def begin(self) -> None:
        """All subtasks start, and nobody knows more than the checkpoint holds."""
        super().begin()
        tasks, channels = len(self.world.graph.tasks), self.world.graph.channels
        cuts = dict(self.done.cuts) if self.done else {}
        self.sent = [len(self.history[c.index]) for c in channels]
        """Number of the next row that each sender sends; fewer than there are while rows come again."""
        before = self.orders if self.done else [()] * tasks
        self.orders: list[Choices] = [before[t][: cuts[t].choices if t in cuts else 0] for t in range(tasks)]
        self.made = [len(order) for order in self.orders]
        """Choices made; fewer than logged while a log is followed."""
        everything = tuple(self.made)
        self.knows: list[Knowledge] = [everything] * tasks
        self.told: list[tuple[Knowledge, ...]] = [(everything,) * sent for sent in self.sent]
        """By channel and row, what its sender knew."""
        self.waits = False
        self.over_id = 0
        """Checkpoints up to this one were begun in an older attempt."""

    def copy(self) -> Self:
        """A state that can be changed without changing this one."""
        new = super().copy()
        new.sent, new.orders, new.made = self.sent[:], self.orders[:], self.made[:]
        new.knows, new.told, new.waits, new.over_id = self.knows[:], self.told[:], self.waits, self.over_id
        return new

    def key(self) -> tuple[object, ...]:
        """Equal states have equal keys."""
        own = (*self.sent, *self.orders, *self.made, *self.knows, *self.told, self.waits)
        return super().key(), own

    # ------------------------------------------------------------------------------------------- channels and choices

    def next_row(self, channel: int) -> int:
        return self.sent[channel]

    def choices(self, task: int) -> int:
        return self.made[task]

    def emit(self, channel: int, row: int) -> int:
        """A row leaves; one that the receiver has is dropped by its number, and must be the same."""
        number, known = self.sent[channel], self.history[channel]
        self.sent[channel] += 1
        if number < len(known):
            if known[number] != row:
                name = self.world.graph.channel_names[channel]
                raise Violation("replay", f"row {number} of {name} was {known[number]} and is {row} now")
            return number
        self.history[channel] += (row,)
        self.told[channel] += (self.knows[self.world.graph.channels[channel].source],)
        self.send(channel, number)
        return number

    def send(self, channel: int, item: Item) -> None:
        if item != END or not self._has_end(channel):
            super().send(channel, item)

    def _has_end(self, channel: int) -> bool:
        """The receiver has the end of a channel, or has it before it."""
        receiver = self.machines[self.world.graph.channels[channel].target]
        return END in self.inq[channel] or channel in self.world.memo.cores[receiver].ended

    def _tell_taken(self, task: int, channel: int, item: Barrier) -> None:
        """Barriers that were on their way when others went back stand for nothing any more."""
        if item.id > self.over_id:
            super()._tell_taken(task, channel, item)

    def take(self, channel: int) -> None:
        """The receiver takes the next item: a choice, if it takes from several inputs."""
        item, task = self.inq[channel][0], self.world.graph.channels[channel].target
        if type(item) is int:
            self.knows[task] = _both(self.knows[task], self.told[channel][item])
        if task in self.world.logs_choices and type(item) is not Barrier:
            place, choice = self.made[task], (channel, type(item) is int)
            if place == len(self.orders[task]):
                self.orders[task] += (choice,)
            self.made[task] = place + 1
            own = [*self.knows[task]]
            own[task] = len(self.orders[task])
            self.knows[task] = tuple(own)
        super().take(channel)

    # ------------------------------------------------------------------------------------------------- what may come

    def actions(self) -> tuple[list[Action], list[Action]]:
        """As ever, but that a log is followed; any part may crash."""
        inner, outer = super().actions()
        return [action for action in inner if action[0] != "take" or self._may_take(action[1])], outer

    def _may_take(self, channel: int) -> bool:
        task, item = self.world.graph.channels[channel].target, self.inq[channel][0]
        run = _next_run(self.orders[task], self.made[task])
        if run is None or type(item) is Barrier:
            return True
        return run[0] == channel and (run[1] == CONTROL) == (item == END)

    def _crashes(self) -> list[Action]:
        fates = (0, 1) if self.publishing else (0,)
        return [("crash", part, fate) for part in range(len(self.world.parts)) for fate in fates]

    def describe(self, action: Action) -> str:
        """A step, for people."""
        if action[0] != "crash":
            return super().describe(action)
        _, part, published = action
        names = [self.world.graph.names[t] for t in sorted(self.world.parts[part])]
        return f"crash: {', '.join(names)}{', and the log takes the checkpoint' * published}"

    def act(self, action: Action) -> None:
        """Take a step; checkpoints go on as soon as all that went back is where it was."""
        super().act(action)
        if self.waits and self._caught_up():
            self.waits = False
            self.coordinate(cm.JobRunning(self.attempt, self.now))

    def _caught_up(self) -> bool:
        if any(made < len(order) for made, order in zip(self.made, self.orders, strict=True)):
            return False
        for c in self.world.graph.channels:
            ended = self.world.known(self.machines[c.source])[2]
            if self.sent[c.index] < len(self.history[c.index]) or (self._has_end(c.index) and not ended):
                return False
        return True

    # ----------------------------------------------------------------------------------------------------- a failure

    def crash(self, part: int = 0, published: int = 0) -> None:
        """A part of the job fails; ``published``: what was just being written for the log gets there."""
        division, parts = self.world.division, self.world.parts
        going = frozenset[int]().union(*(parts[p] for p in division.with_upstream({part})))
        if self.final or len(going) == len(self.world.tasks):
            super().crash()  # also if others may have passed the last barrier: they take no other one
            return
        self.crashes -= 1
        self.coordinate(cm.JobStopped("crash", self.now, survivors=True))
        if self.publishing and published:
            self.publish()
        elif self.publishing:
            id, self.publishing = self.publishing[0], ()
            self.coordinate(cm.PublishFailed(id, "crash", self.now))
        self.attempt += 1
        self.over_id = self.world.memo.cores[self.coordinator].last_id
        self._tell_crash(going)
        self._restart(going)
        self.waits = True

    def _tell_crash(self, going: frozenset[int]) -> None:
        if self.story is None:
            return
        names, id = self.world.graph.names, self.done.id if self.done else None
        self.story += [e.Crashed(0.0, names[t], self.attempt - 1) for t in sorted(going)]
        for t, name in enumerate(names):
            restored = e.Restored(0.0, name, self.attempt, id)
            self.story.append(restored if t in going else e.Survived(0.0, name, self.attempt))

    def _restart(self, going: frozenset[int]) -> None:
        """These go back to the last completed checkpoint."""
        graph, cuts = self.world.graph, dict(self.done.cuts) if self.done else {}
        known = self._known_to_survivors(going)
        self.acks = tuple(ack for ack in self.acks if ack[0].subtask not in going)
        self.timers = tuple(timer for timer in self.timers if timer[0] not in going)
        self.cuts = {k: v for k, v in self.cuts.items() if k[0] not in going}
        for t in sorted(going):
            cut = cuts.get(t)
            self.control[t] = self.writes[t] = ()
            self.emitted[t], self.open[t], self.staged[t] = cut.position if cut else 0, (), ()
            made = self.made[t] = cut.choices if cut else 0
            self.orders[t] = self.orders[t][: max(made, known[t])]
            self.knows[t] = tuple(max(n, made) if other == t else n for other, n in enumerate(known))
            if cut is not None and self.done is not None:
                self.commit(t, cut.staged, self.done.id)
            self.machines[t] = self.world.memo.number(t, self._new_machine(t))
        logs = dict(self.done.logs) if self.done else {}
        for c in graph.channels:
            ends = c.source in going, c.target in going
            if any(ends):
                self._reconnect(c.index, ends, cuts.get(c.source), cuts.get(c.target), logs)

    def _reconnect(
        self,
        c: int,
        goes: tuple[bool, bool],
        sender: Cut | None,
        receiver: Cut | None,
        logs: dict[int, tuple[int, ...]],
    ) -> None:
        """The sender, the receiver, or both begin anew."""
        sent = dict(sender.outs)[c] if sender else 0
        taken = dict(receiver.ins)[c] if receiver else 0
        if goes == (True, True):
            self.out[c] = self.inq[c] = self.urgent[c] = ()
            self.history[c], self.told[c] = self.history[c][:sent], self.told[c][:sent]
            self.sent[c], self.taken[c] = sent, 0
            if sender is not None and receiver is not None:
                self._restore_channel(c, sender, receiver, logs)
        elif goes[0]:  # what was on its way is lost, but for what lies in the snapshot because a barrier overtook it
            arrived = self.taken[c] + sum(type(item) is int for item in self.inq[c])
            self.out[c] = ()
            kept = max(arrived, sent)
            self.history[c], self.told[c] = self.history[c][:kept], self.told[c][:kept]
            self.sent[c] = sent
            self._again(c, arrived, kept, ended=False)  # it says so itself, when it is as far
        else:
            if not self.world.keeps_output:
                raise Violation("replay", f"nobody keeps what was sent on {self.world.graph.channel_names[c]}")
            self.out[c] = self.inq[c] = self.urgent[c] = ()
            self.taken[c] = taken
            sender_ended = self.world.known(self.machines[self.world.graph.channels[c].source])[2]
            self._again(c, taken, self.sent[c], ended=sender_ended)

    def _again(self, c: int, first: int, end: int, *, ended: bool) -> None:
        """Rows that the receiver lacks, and the end of data."""
        for number in range(first, end):
            super().send(c, number)
        if ended:
            self.send(c, END)

    def _known_to_survivors(self, going: frozenset[int]) -> Knowledge:
        """What a replacement is told: all that survivors know, also with rows that they have not taken yet."""
        known: Knowledge = (0,) * len(self.made)
        for t in self.world.tasks:
            if t not in going:
                known = _both(known, self.knows[t])
        for c in self.world.graph.channels:
            if c.target not in going:
                rows = (item for item in self.inq[c.index] if type(item) is int)
                known = _both(known, *(self.told[c.index][row] for row in rows))
        return known


def _both(*known: Iterable[int]) -> Knowledge:
    return tuple(map(max, zip(*known, strict=True)))


@cache
def _next_run(choices: Choices, made: int) -> Run | None:
    """What the core says comes next."""
    log = DeterminantLog()
    for channel, is_row in choices:
        log.took(channel, 1 if is_row else CONTROL)
    log.go_back(made, len(choices))
    return log.next_run()
