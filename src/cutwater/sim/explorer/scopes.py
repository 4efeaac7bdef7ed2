"""Scopes of recovery in a small job: everything goes back after a failure (R1), or only a part (R2, R3, R4).

In a job of parts, what a channel has sent is known in full, so that a row which comes again is compared with the one
that the receiver has.  A subtask that takes from several inputs logs its choices (R0); every row tells what its sender
knew of all logs when it left, and a replacement takes over what survivors were told.  How a log is followed is the
core's ``DeterminantLog``.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Self, TypeAlias

from cutwater.protocol.checkpoint import messages as cm
from cutwater.protocol.determinants import CONTROL, DeterminantLog, Run
from cutwater.protocol.job.recovery_scope import Division, units_of
from cutwater.sim.explorer.effects import coordinate
from cutwater.sim.explorer.world import END, Action, Barrier, Cut
from cutwater.sim.schedules.graphs import Graph
from cutwater.sim.schedules.schedule import Recovery
from cutwater.sim.world.oracle import Violation
from cutwater.trace import events as e

if TYPE_CHECKING:
    from cutwater.sim.explorer.job import JobState

Choices: TypeAlias = tuple[tuple[int, bool], ...]
"""Of one determinant log: the input, and whether it was a row."""
Knowledge: TypeAlias = tuple[int, ...]
"""By subtask, how many of its choices somebody knows."""


def make_scope(graph: Graph, recovery: Recovery) -> Scope:
    """The scope of a job before its first step.

    Args:
        recovery: "job" (R1), "region" (R2), "upstream" (R3), or "task" (R4), which here is a single subtask.
    """
    return Scope() if recovery == "job" else Parts(PartsSpec(graph, recovery))


class Scope:
    """A part of a job's state: what it keeps for its recovery, and what goes back when a worker dies.

    Here everything goes back (R1), so that nothing is kept.  Like the state itself a scope is changed by steps; a copy
    can be changed without changing the original.
    """

    __slots__ = ("over_id",)

    def __init__(self) -> None:
        self.over_id = 0
        """Checkpoints up to this one were begun in an older attempt: their barriers stand for nothing any more."""

    def begin(self, state: JobState) -> None:
        """All subtasks have started, from the last completed checkpoint or from nothing."""

    def copy(self) -> Self:
        """A scope that can be changed without changing this one."""
        return self

    def key(self) -> tuple[object, ...]:
        """Equal scopes have equal keys."""
        return ()

    def next_row(self, state: JobState, channel: int) -> int:
        """Number of the next row that the sender sends."""
        return len(state.history[channel])

    def choices(self, task: int) -> int:
        """Number of choices that a subtask has made, where they are logged (R0)."""
        return 0

    def emit(self, state: JobState, channel: int, row: int) -> int:
        """A row leaves its subtask; returns its number."""
        number = len(state.history[channel])
        state.history[channel] += (row,)
        state.send(channel, number)
        return number

    def has_end(self, state: JobState, channel: int) -> bool:
        """The receiver has the end of a channel, or has it before it."""
        return False

    def may_take(self, state: JobState, channel: int) -> bool:
        """The receiver is free to take the next item of a channel."""
        return True

    def takes(self, state: JobState, task: int, channel: int) -> None:
        """The receiver is about to take the next item of a channel."""

    def stepped(self, state: JobState) -> None:
        """A step is over."""

    def crashes(self, state: JobState) -> list[Action]:
        """The crashes that may come next."""
        return [("crash",)]

    def describe_crash(self, state: JobState, *what: int) -> str:
        """A crash, for people."""
        return "crash"

    def crash(self, state: JobState, *what: int) -> None:
        """Perform a crash."""
        state.crash_all()


class PartsSpec:
    """The parts of a job that go back by themselves; no step changes them.

    Args:
        recovery: "region" (R2), "upstream" (R3), or "task" (R4), which here is a single subtask.
    """

    def __init__(self, graph: Graph, recovery: Recovery) -> None:
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
        tasks = range(len(graph.tasks))
        self.logs_choices = frozenset(t for t in tasks if len(graph.inputs[t]) > 1 and t not in graph.sinks)


class Parts(Scope):
    """Some subtasks may go back, and others do not (R2, R3, R4).

    Until everything that went back has sent again what survivors have, no checkpoint begins.
    """

    __slots__ = ("knows", "made", "orders", "sent", "spec", "told", "waits")

    def __init__(self, spec: PartsSpec) -> None:
        super().__init__()
        self.spec = spec
        self.orders: list[Choices] = []

    def begin(self, state: JobState) -> None:
        """Nobody knows more than the checkpoint holds."""
        tasks, channels = len(state.world.graph.tasks), state.world.graph.channels
        cuts = dict(state.done.cuts) if state.done else {}
        self.sent = [len(state.history[c.index]) for c in channels]
        """Number of the next row that each sender sends; fewer than there are while rows come again."""
        before = self.orders if state.done else [()] * tasks
        self.orders = [before[t][: cuts[t].choices if t in cuts else 0] for t in range(tasks)]
        self.made = [len(order) for order in self.orders]
        """Choices made; fewer than logged while a log is followed."""
        everything = tuple(self.made)
        self.knows: list[Knowledge] = [everything] * tasks
        self.told: list[tuple[Knowledge, ...]] = [(everything,) * sent for sent in self.sent]
        """By channel and row, what its sender knew."""
        self.waits = False
        self.over_id = 0

    def copy(self) -> Self:
        new = object.__new__(type(self))
        new.spec, new.sent, new.orders, new.made = self.spec, self.sent[:], self.orders[:], self.made[:]
        new.knows, new.told, new.waits, new.over_id = self.knows[:], self.told[:], self.waits, self.over_id
        return new

    def key(self) -> tuple[object, ...]:
        return (*self.sent, *self.orders, *self.made, *self.knows, *self.told, self.waits)

    # ------------------------------------------------------------------------------------------- channels and choices

    def next_row(self, state: JobState, channel: int) -> int:
        return self.sent[channel]

    def choices(self, task: int) -> int:
        return self.made[task]

    def emit(self, state: JobState, channel: int, row: int) -> int:
        """A row leaves; one that the receiver has is dropped by its number, and must be the same."""
        number, known = self.sent[channel], state.history[channel]
        self.sent[channel] += 1
        if number < len(known):
            if known[number] != row:
                name = state.world.graph.channel_names[channel]
                raise Violation("replay", f"row {number} of {name} was {known[number]} and is {row} now")
            return number
        state.history[channel] += (row,)
        self.told[channel] += (self.knows[state.world.graph.channels[channel].source],)
        state.send(channel, number)
        return number

    def has_end(self, state: JobState, channel: int) -> bool:
        receiver = state.machines[state.world.graph.channels[channel].target]
        return END in state.inq[channel] or channel in state.world.memo.cores[receiver].ended

    def takes(self, state: JobState, task: int, channel: int) -> None:
        """A choice, if the subtask takes from several inputs."""
        item = state.inq[channel][0]
        if type(item) is int:
            self.knows[task] = _both(self.knows[task], self.told[channel][item])
        if task in self.spec.logs_choices and type(item) is not Barrier:
            place, choice = self.made[task], (channel, type(item) is int)
            if place == len(self.orders[task]):
                self.orders[task] += (choice,)
            self.made[task] = place + 1
            own = [*self.knows[task]]
            own[task] = len(self.orders[task])
            self.knows[task] = tuple(own)

    def may_take(self, state: JobState, channel: int) -> bool:
        """A log is followed."""
        task, item = state.world.graph.channels[channel].target, state.inq[channel][0]
        run = _next_run(self.orders[task], self.made[task])
        if run is None or type(item) is Barrier:
            return True
        return run[0] == channel and (run[1] == CONTROL) == (item == END)

    def stepped(self, state: JobState) -> None:
        """Checkpoints go on as soon as all that went back is where it was."""
        if self.waits and self._caught_up(state):
            self.waits = False
            coordinate(state, cm.JobRunning(state.attempt, state.now))

    def _caught_up(self, state: JobState) -> bool:
        if any(made < len(order) for made, order in zip(self.made, self.orders, strict=True)):
            return False
        for c in state.world.graph.channels:
            ended = state.world.known(state.machines[c.source])[2]
            if self.sent[c.index] < len(state.history[c.index]) or (self.has_end(state, c.index) and not ended):
                return False
        return True

    # ----------------------------------------------------------------------------------------------------- a failure

    def crashes(self, state: JobState) -> list[Action]:
        """Any part may crash; what was just being written for the log gets there, or does not."""
        fates = (0, 1) if state.publishing else (0,)
        return [("crash", part, fate) for part in range(len(self.spec.parts)) for fate in fates]

    def describe_crash(self, state: JobState, *what: int) -> str:
        part, published = what
        names = [state.world.graph.names[t] for t in sorted(self.spec.parts[part])]
        return f"crash: {', '.join(names)}{', and the log takes the checkpoint' * published}"

    def crash(self, state: JobState, *what: int) -> None:
        part, published = what
        division, parts = self.spec.division, self.spec.parts
        going = frozenset[int]().union(*(parts[p] for p in division.with_upstream({part})))
        if state.final or len(going) == len(state.world.tasks):
            state.crash_all()  # also if others may have passed the last barrier: they take no other one
            return
        state.crashes -= 1
        coordinate(state, cm.JobStopped("crash", state.now, survivors=True))
        if state.publishing and published:
            state.publish()
        elif state.publishing:
            id, state.publishing = state.publishing[0], ()
            coordinate(state, cm.PublishFailed(id, "crash", state.now))
        state.attempt += 1
        self.over_id = state.world.memo.cores[state.coordinator].last_id
        _tell_crash(state, going)
        self._restart(state, going)
        self.waits = True

    def _restart(self, state: JobState, going: frozenset[int]) -> None:
        """These go back to the last completed checkpoint."""
        graph, cuts = state.world.graph, dict(state.done.cuts) if state.done else {}
        known = self._known_to_survivors(state, going)
        state.acks = tuple(ack for ack in state.acks if ack[0].subtask not in going)
        state.timers = tuple(timer for timer in state.timers if timer[0] not in going)
        state.cuts = {k: v for k, v in state.cuts.items() if k[0] not in going}
        for t in sorted(going):
            cut = cuts.get(t)
            state.control[t] = state.writes[t] = ()
            state.emitted[t], state.open[t], state.staged[t] = cut.position if cut else 0, (), ()
            made = self.made[t] = cut.choices if cut else 0
            self.orders[t] = self.orders[t][: max(made, known[t])]
            self.knows[t] = tuple(max(n, made) if other == t else n for other, n in enumerate(known))
            if cut is not None and state.done is not None:
                state.commit(t, cut.staged, state.done.id)
            state.machines[t] = state.world.memo.number(t, state.new_machine(t))
        logs = dict(state.done.logs) if state.done else {}
        for c in graph.channels:
            ends = c.source in going, c.target in going
            if any(ends):
                self._reconnect(state, c.index, ends, cuts.get(c.source), cuts.get(c.target), logs)

    def _reconnect(
        self,
        state: JobState,
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
            state.out[c] = state.inq[c] = state.urgent[c] = ()
            state.history[c], self.told[c] = state.history[c][:sent], self.told[c][:sent]
            self.sent[c], state.taken[c] = sent, 0
            if sender is not None and receiver is not None:
                state.restore_channel(c, sender, receiver, logs)
        elif goes[0]:  # what was on its way is lost, but for what lies in the snapshot because a barrier overtook it
            arrived = state.taken[c] + sum(type(item) is int for item in state.inq[c])
            state.out[c] = ()
            kept = max(arrived, sent)
            state.history[c], self.told[c] = state.history[c][:kept], self.told[c][:kept]
            self.sent[c] = sent
            self._again(state, c, arrived, kept, ended=False)  # it says so itself, when it is as far
        else:
            if not self.spec.keeps_output:
                raise Violation("replay", f"nobody keeps what was sent on {state.world.graph.channel_names[c]}")
            state.out[c] = state.inq[c] = state.urgent[c] = ()
            state.taken[c] = taken
            sender_ended = state.world.known(state.machines[state.world.graph.channels[c].source])[2]
            self._again(state, c, taken, self.sent[c], ended=sender_ended)

    def _again(self, state: JobState, c: int, first: int, end: int, *, ended: bool) -> None:
        """Rows that the receiver lacks, and the end of data."""
        for number in range(first, end):
            state.send(c, number)
        if ended:
            state.send(c, END)

    def _known_to_survivors(self, state: JobState, going: frozenset[int]) -> Knowledge:
        """Knowledge given to a replacement: all that survivors know, also with rows that they have not taken yet."""
        known: Knowledge = (0,) * len(self.made)
        for t in state.world.tasks:
            if t not in going:
                known = _both(known, self.knows[t])
        for c in state.world.graph.channels:
            if c.target not in going:
                rows = (item for item in state.inq[c.index] if type(item) is int)
                known = _both(known, *(self.told[c.index][row] for row in rows))
        return known


def _tell_crash(state: JobState, going: frozenset[int]) -> None:
    if state.story is None:
        return
    names, id = state.world.graph.names, state.done.id if state.done else None
    state.story += [e.Crashed(0.0, names[t], state.attempt - 1) for t in sorted(going)]
    for t, name in enumerate(names):
        restored = e.Restored(0.0, name, state.attempt, id)
        state.story.append(restored if t in going else e.Survived(0.0, name, state.attempt))


def _both(*known: Iterable[int]) -> Knowledge:
    return tuple(map(max, zip(*known, strict=True)))


@cache
def _next_run(choices: Choices, made: int) -> Run | None:
    """Run that comes next, as the core says."""
    log = DeterminantLog()
    for channel, is_row in choices:
        log.took(channel, 1 if is_row else CONTROL)
    log.go_back(made, len(choices))
    return log.next_run()
