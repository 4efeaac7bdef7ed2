"""Small process networks for the explorer: tokens that travel while snapshots are taken, from several initiators.

The processes run the algorithms of ``cutwater.process_networks``, and their effects are carried out as there.
Messages are numbered per channel; what they contain is in ``history``.  A token is an identity and, in its last four
bits, how many channels it may still go along; where it ends follows from where it begins.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, Self

from cutwater.protocol import messages as m
from cutwater.protocol.snapshot_algorithms import Algorithm, ChandyLamport, LaiYang
from cutwater.sim.explorer.world import Action, Budget, Memo, tell_completed
from cutwater.sim.world.oracle import Violation
from cutwater.trace import events as e


class _Sent(NamedTuple):
    """A message in a channel."""

    number: int
    colour: int


class _Marker(NamedTuple):
    """A marker or notice in a channel: so many messages were sent before it."""

    id: int
    sent: int


class _Part(NamedTuple):
    """A process's part of a snapshot."""

    held: tuple[int, ...]
    sent: tuple[tuple[int, int], ...]
    taken: tuple[tuple[int, frozenset[int]], ...]


class _Global(NamedTuple):
    """A complete snapshot."""

    id: int
    parts: tuple[_Part, ...]
    logs: tuple[tuple[int, tuple[int, ...]], ...]


class NetworkState:
    """A state.  Steps work on a copy; what they do not touch is shared."""

    __slots__ = (
        "attempt", "completed", "control", "crashes", "expiries", "held", "history", "last", "logs", "members",
        "newest", "parts", "pending", "queues", "requests", "story", "taken", "world",
    )  # fmt: skip

    exactly = True

    def __init__(self, world: NetworkWorld) -> None:
        self.world = world
        self.requests, self.crashes, self.expiries = world.budget.requests, world.budget.crashes, world.budget.expiries
        self.attempt, self.newest = 1, 0
        self.last: _Global | None = None
        self.completed: Hashable = None
        self.story: list[e.Event] | None = None
        self.begin()

    def begin(self) -> None:
        """All processes start, from the last global snapshot or from nothing."""
        world, last = self.world, self.last
        count = len(world.names)
        self.held = [part.held for part in last.parts] if last else world.tokens[:]
        sent = dict(pair for part in last.parts for pair in part.sent) if last else {}
        taken = dict(pair for part in last.parts for pair in part.taken) if last else {}
        self.history: list[tuple[int, ...]] = [self.history[c][: sent[c]] if last else () for c in range(count)]
        self.taken: list[frozenset[int]] = [taken.get(c, frozenset()) for c in range(count)]
        logs = dict(last.logs) if last else {}
        self.queues: list[tuple[_Sent | _Marker, ...]] = [
            tuple(_Sent(number, self.newest) for number in logs.get(c, ())) for c in range(count)
        ]
        self.control: list[tuple[int, ...]] = [() for _ in world.processes]
        self.pending: tuple[int, ...] = ()
        self.parts: dict[tuple[int, int], _Part] = {}
        self.logs: dict[tuple[int, int], tuple[int, ...]] = {}
        counts = {str(c): len(rows) for c, rows in taken.items()}
        self.members = [world.member(p, self.newest, counts) for p in world.processes]

    def copy(self) -> Self:
        """A state that can be changed without changing this one."""
        new = object.__new__(type(self))
        new.world, new.attempt, new.newest, new.last = self.world, self.attempt, self.newest, self.last
        new.requests, new.crashes, new.expiries = self.requests, self.crashes, self.expiries
        new.completed, new.story, new.pending = None, None, self.pending
        new.held, new.history, new.taken = self.held[:], self.history[:], self.taken[:]
        new.queues, new.control, new.members = self.queues[:], self.control[:], self.members[:]
        new.parts, new.logs = self.parts.copy(), self.logs.copy()
        return new

    def key(self) -> Hashable:
        """Equal states have equal keys.  Where channels reorder, what lies in one has no order."""
        queues = self.queues if self.world.spec.fifo else map(frozenset, self.queues)
        return (
            *self.members, *queues, *self.control, *self.held, *self.history, *self.taken, self.pending, self.newest,
            frozenset(self.parts.items()), frozenset(self.logs.items()), self.last, self.requests, self.crashes,
            self.expiries, self.attempt,
        )  # fmt: skip

    def header(self) -> e.Header:
        """The first line of a trace of this network."""
        spec = self.world.spec
        ends = [(spec.processes[a], spec.processes[b]) for a, b in spec.channels]
        links = tuple(e.Link(name, *pair) for name, pair in zip(self.world.names, ends, strict=True))
        return e.Header(spec.processes, links, spec.fifo, f"{spec.name}, {self.world.algorithm}")

    # ------------------------------------------------------------------------------------------------- what may come

    def actions(self) -> tuple[list[Action], list[Action]]:
        """Steps that may come next: of what is under way; and from outside, snapshots, a crash, giving up."""
        found: list[Action] = []
        for p in self.world.processes:
            if any(token & 15 for token in self.held[p]):
                found.append(("move", p))
            if self.control[p]:
                found.append(("hear", p))
        for c, queue in enumerate(self.queues):
            found += [("take", c, n) for n in range(1 if self.world.spec.fifo and queue else len(queue))]
        outside: list[Action] = []
        if self.requests:
            outside.append(("snapshot",))
        if self.crashes:
            outside.append(("crash",))
        if self.expiries:
            outside += [("give up", id) for id in self.pending]
        return found, outside

    def act(self, action: Action) -> None:
        """Take a step.

        Raises:
            Violation, InvariantError: a promise is broken.
        """
        _STEPS[action[0]](self, *action[1:])

    def describe(self, action: Action) -> str:
        """A step, for people."""
        name, *rest = action
        if name == "take":
            item = self.queues[rest[0]][rest[1]]
            what = f"message {item.number}" if type(item) is _Sent else f"marker {item[0]}"
            return f"take {self.world.names[rest[0]]}: {what}"
        if name == "hear":
            verb, id = self.world.memo.events[self.control[rest[0]][0]]
            return f"{verb} {self.world.spec.processes[rest[0]]}: snapshot {id}"
        return f"move {self.world.spec.processes[rest[0]]}" if name == "move" else " ".join(map(str, action))

    # ------------------------------------------------------------------------------------------------------ the steps

    def move(self, process: int) -> None:
        """A process sends a token on."""
        world = self.world
        token = next(t for t in self.held[process] if t & 15)
        c = world.goes(process, token)
        number = len(self.history[c])
        rest = list(self.held[process])
        rest.remove(token)
        self.held[process] = tuple(rest)
        self.history[c] += (token - 1,)
        self.queues[c] += (_Sent(number, world.memo.cores[self.members[process]].algorithm.colour),)
        self._tell_step(process, (), (e.Span(world.names[c], number),))

    def take(self, channel: int, place: int) -> None:
        """A process takes the next item of a channel, or any if the channel reorders."""
        queue, process = self.queues[channel], self.world.spec.channels[channel][1]
        item = queue[place]
        self.queues[channel] = (*queue[:place], *queue[place + 1 :])
        if type(item) is _Marker:
            if self.story is not None:
                names = self.world.spec.processes[process], self.world.names[channel]
                self.story.append(e.MarkerTaken(0.0, names[0], self.attempt, item.id, names[1], item.sent))
            self._feed(process, ("marker", str(channel), item.id, item.sent))
            return
        number, colour = item  # type: ignore[misc]
        self._feed(process, ("message", str(channel), colour), number)
        self.taken[channel] |= {number}
        self.held[process] = tuple(sorted((*self.held[process], self.history[channel][number])))
        self._tell_step(process, (e.Span(self.world.names[channel], number),), ())

    def _tell_step(self, process: int, takes: tuple[e.Span, ...], sends: tuple[e.Span, ...]) -> None:
        if self.story is not None:
            self.story.append(e.Step(0.0, self.world.spec.processes[process], self.attempt, takes, sends))

    def hear(self, process: int) -> None:
        """A process hears that it begins a snapshot, or that one was given up."""
        number, *rest = self.control[process]
        self.control[process] = tuple(rest)
        self._feed(process, self.world.memo.events[number])

    def snapshot(self) -> None:
        """A snapshot is asked for."""
        initiators = self.world.spec.initiators
        self.newest += 1
        self.requests -= 1
        self.pending += (self.newest,)
        for p in initiators[(self.newest - 1) % len(initiators)]:
            self.control[p] += (self.world.memo.event(("trigger", self.newest)),)

    def give_up(self, id: int) -> None:
        """A snapshot is given up."""
        self.expiries -= 1
        self._drop(id)
        for p in self.world.processes:
            self.control[p] += (self.world.memo.event(("abort", id)),)
        if self.story is not None:
            self.story.append(e.Aborted(0.0, "", self.attempt, id))

    def crash(self) -> None:
        """A process loses everything: the network goes back to its last snapshot."""
        self.crashes -= 1
        names = self.world.spec.processes
        if self.story is not None:
            self.story += [e.Crashed(0.0, name, self.attempt) for name in names]
            id = self.last.id if self.last else None
            self.story += [e.Restored(0.0, name, self.attempt + 1, id) for name in names]
        self.attempt += 1
        self.begin()

    # ------------------------------------------------------------------------------------------------- the algorithm

    def _feed(self, process: int, call: tuple[Any, ...], number: int | None = None) -> None:
        """Let the algorithm decide, and perform it; ``number`` is the message in hand."""
        memo = self.world.memo
        self.members[process], effects = memo.handle(self.members[process], memo.event(call))
        reports: list[m.Durable | m.LogsDurable] = []
        for effect in effects:
            match effect:
                case m.Freeze(checkpoint_id=id):
                    self._freeze(process, id)
                    reports.append(m.Durable(id))
                case m.BroadcastBarrier(checkpoint_id=id):
                    self._send_markers(process, id)
                case m.Record(input=input, checkpoint_ids=ids) if number is not None:
                    for id in ids:
                        place = id, int(str(input))
                        self.logs[place] = (*self.logs.get(place, ()), number)
                case m.WriteLogs(checkpoint_id=id):
                    reports.append(m.LogsDurable(id))
                case m.Acknowledge(checkpoint_id=id):
                    self._acknowledge(process, id)
                case m.Forget(checkpoint_id=id):
                    self.parts.pop((process, id), None)
                    for c in self.world.inputs[process]:
                        self.logs.pop((id, c), None)
                case _:
                    pass
        for report in reports:
            self._feed(process, ("durable", report))

    def _freeze(self, process: int, id: int) -> None:
        world = self.world
        self.parts[process, id] = _Part(
            self.held[process],
            tuple((c, len(self.history[c])) for c in world.outputs[process]),
            tuple((c, self.taken[c]) for c in world.inputs[process]),
        )
        if self.story is not None:
            self.story.append(e.Cut(0.0, world.spec.processes[process], self.attempt, id))

    def _send_markers(self, process: int, id: int) -> None:
        world = self.world
        for c in world.outputs[process]:
            sent = len(self.history[c])
            self.queues[c] += (_Marker(id, sent),)
            if self.story is not None:
                self.story.append(
                    e.MarkerSent(0.0, world.spec.processes[process], self.attempt, id, world.names[c], sent)
                )

    def _acknowledge(self, process: int, id: int) -> None:
        """A process has done its part; with the last one the snapshot is complete (CL4)."""
        if id not in self.pending:
            return
        self.logs[id, -1 - process] = ()
        if any((id, -1 - p) not in self.logs for p in self.world.processes):
            return
        parts = {p: self.parts[p, id] for p in self.world.processes if (p, id) in self.parts}
        logs = {c: tuple(sorted(rows)) for (i, c), rows in self.logs.items() if i == id and c >= 0}
        before = self.last.id if self.last else 0
        self.completed = frozenset(parts.items()), frozenset(logs.items()), before, self.attempt
        if self.story is not None:
            recorded = [(self.world.names[c], rows) for c, rows in sorted(logs.items())]
            tell_completed(self.story, "", self.attempt, id, recorded)
        else:
            self._check(id, parts, logs)
        if self.last is None or self.last.id < id:
            self.last = _Global(id, tuple(parts[p] for p in self.world.processes), tuple(sorted(logs.items())))
        self._drop(id)

    def _check(self, id: int, parts: dict[int, _Part], logs: dict[int, tuple[int, ...]]) -> None:
        """CL6: what was sent before the sender's cut was taken before the receiver's, or is recorded; nothing else."""
        if len(parts) < len(self.members):
            raise Violation("part missing", f"snapshot {id} has parts of {sorted(parts)} only")
        for c, (source, target) in enumerate(self.world.spec.channels):
            sent, taken, log = dict(parts[source].sent)[c], dict(parts[target].taken)[c], logs.get(c, ())
            if sorted((*taken, *log)) != list(range(sent)):
                text = f"snapshot {id}, {self.world.names[c]}: sent {sent}, taken {sorted(taken)}, recorded {log}"
                raise Violation("inconsistent cut", text)

    def _drop(self, id: int) -> None:
        self.pending = tuple(i for i in self.pending if i != id)
        self.parts = {k: v for k, v in self.parts.items() if k[1] != id}
        self.logs = {k: v for k, v in self.logs.items() if k[0] != id}

    # ---------------------------------------------------------------------------------------------------- the verdict

    def check_end(self) -> None:
        """Nothing more comes by itself: every token is where it must end, every snapshot complete or given up.

        Raises:
            Violation: one is not.
        """
        if self.pending:
            raise Violation("stuck", f"snapshots {self.pending} never become complete (CL4)")
        if self.held != self.world.ends():
            raise Violation("lost or doubled tokens", f"{self.held} instead of {self.world.ends()}")

    def outcome(self) -> Hashable:
        """Values to check at an end."""
        return *self.history, self.attempt, self.last

    def oracle(self) -> list[str]:
        """A network commits nothing."""
        return []


_STEPS: dict[str, Any] = {
    "move": NetworkState.move,
    "take": NetworkState.take,
    "hear": NetworkState.hear,
    "snapshot": NetworkState.snapshot,
    "give up": NetworkState.give_up,
    "crash": NetworkState.crash,
}


HOPS = 2
"""Channels that the first token of a process goes along; each further one goes along one more."""


class NetworkSpec(NamedTuple):
    """A network: channels by the numbers of their ends; and who begins each snapshot that may be asked for."""

    name: str
    processes: tuple[str, ...]
    channels: tuple[tuple[int, int], ...]
    initiators: tuple[tuple[int, ...], ...]
    """Of each snapshot in turn; several begin the same one together (CL1)."""
    fifo: bool = True


class _Member:
    """An algorithm as a machine that is given events: the name of a method and its arguments."""

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm = algorithm

    def handle(self, call: tuple[Any, ...]) -> Sequence[m.Effect]:
        return getattr(self.algorithm, call[0])(*call[1:])

    def validate(self) -> None:
        machine: Any = vars(self.algorithm).get("_machine", self.algorithm)
        machine.validate()


class NetworkWorld:
    """Constants of a small network.  Each process has as many tokens at first as the budget has rows."""

    def __init__(self, spec: NetworkSpec, algorithm: str, budget: Budget) -> None:
        self.spec, self.algorithm, self.budget = spec, algorithm, budget
        self.processes = range(len(spec.processes))
        self.names = [f"{spec.processes[a]} > {spec.processes[b]}" for a, b in spec.channels]
        self.inputs = [[c for c, (_, b) in enumerate(spec.channels) if b == p] for p in self.processes]
        self.outputs = [[c for c, (a, _) in enumerate(spec.channels) if a == p] for p in self.processes]
        self.memo = Memo()
        self.tokens = [tuple((p << 8 | n) << 4 | HOPS + n for n in range(len(budget.rows))) for p in self.processes]

    def member(self, process: int, last: int, taken: dict[str, int]) -> int:
        """The number of a new member; its inputs are named by their numbers."""
        name, inputs = self.spec.processes[process], [str(c) for c in self.inputs[process]]
        kind = self.algorithm
        algorithm = LaiYang(name, inputs, last, taken) if kind == "lai_yang" else ChandyLamport(name, inputs, last)
        return self.memo.number(process, _Member(algorithm))

    def goes(self, process: int, token: int) -> int:
        """The channel that a token leaves a process by."""
        return self.outputs[process][(token & 15) % len(self.outputs[process])]

    def ends(self) -> list[tuple[int, ...]]:
        """Tokens that each process must hold at last."""
        held: list[list[int]] = [[] for _ in self.processes]
        for start, tokens in enumerate(self.tokens):
            for token in tokens:
                at = start
                while token & 15:
                    at, token = self.spec.channels[self.goes(at, token)][1], token - 1
                held[at].append(token)
        return [tuple(sorted(found)) for found in held]
