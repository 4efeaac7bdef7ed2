"""CL1 to CL6 on arbitrary networks: any topology, several initiators, several snapshots at once, one seeded thread."""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque

import pytest

from cutwater.errors import InvariantError
from cutwater.protocol import messages as m
from cutwater.protocol.protocols import NETWORK, PROTOCOLS
from cutwater.protocol.subtask.machine import SubtaskMachine

SNAPSHOTS = 4


class Wrong(AssertionError):
    """A snapshot is no consistent cut."""


class Network:
    """Processes 0..n-1 with random channels: rings, two-way pairs, self-loops, parallel channels, lonely processes."""

    def __init__(self, seed: int, machine: type[SubtaskMachine] = SubtaskMachine) -> None:
        self.rng = rng = random.Random(seed)
        self.processes = range(rng.randint(1, 5))
        ends = [(p, q) for p in self.processes for q in self.processes for _ in range(2) if rng.random() < 0.3]
        self.channels = [(*pair, n) for n, pair in enumerate(ends)]
        self.machines = {
            p: machine(f"p{p}", [c for c in self.channels if c[1] == p], protocol=NETWORK) for p in self.processes
        }
        self.queues = {c: deque() for c in self.channels}
        self.sent, self.taken = defaultdict(list), defaultdict(list)
        self.cuts, self.logs = defaultdict(dict), defaultdict(list)
        self.acked: Counter[int] = Counter()
        self.triggers = [(id, p) for id in range(1, SNAPSHOTS + 1) for p in self.initiators()]
        self.messages = 60
        self.seen: Counter[str] = Counter()

    def initiators(self) -> list[int]:
        """Enough of them that everybody is reached, in any order and some needlessly."""
        chosen, reached = [], set()
        for p in self.rng.sample(self.processes, len(self.processes)):
            if p not in reached or self.rng.random() < 0.3:
                chosen.append(p)
                todo = [p]
                while todo:
                    at = todo.pop()
                    if at not in reached:
                        reached.add(at)
                        todo += [c[1] for c in self.channels if c[0] == at]
        return chosen

    def run(self) -> Network:
        self.rng.shuffle(self.triggers)
        while True:
            actions = [lambda c=c: self.take(c) for c, q in self.queues.items() if q]
            actions += [lambda: self.feed(*reversed(self.triggers.pop()))] if self.triggers else []
            actions += [self.send] if self.messages and self.channels else []
            if not actions:
                break
            self.rng.choice(actions)()
        for id in range(1, SNAPSHOTS + 1):
            if self.acked[id] != len(self.processes):
                raise Wrong(f"snapshot {id} has {self.acked[id]} of {len(self.processes)} parts (CL4)")
            self.check(id)
        return self

    def send(self) -> None:
        self.messages -= 1
        self.put(self.rng.choice(self.channels), self.messages)

    def put(self, channel, item) -> None:
        self.queues[channel].append(item)
        self.sent[channel].append(item)

    def take(self, channel) -> None:
        item = self.queues[channel].popleft()
        self.taken[channel].append(item)
        if isinstance(item, m.BroadcastBarrier):
            self.perform(channel[1], m.BarrierTaken(channel, item.checkpoint_id))
        elif self.machines[channel[1]].recording(channel):
            self.perform(channel[1], m.RowsTaken(channel, 1), item)

    def feed(self, process: int, id: int) -> None:
        self.perform(process, m.Trigger(id))

    def perform(self, p: int, event: m.Event, row: int = -1) -> None:
        machine = self.machines[p]
        todo = deque(machine.handle(event))
        machine.validate()
        self.seen["at once"] = max(self.seen["at once"], len(machine.pending))
        while todo:
            effect = todo.popleft()
            match effect:
                case m.Freeze(id):
                    if p in self.cuts[id]:
                        raise Wrong(f"p{p} records itself twice for {id} (CL4)")
                    self.cuts[id][p] = {c: (len(self.sent[c]), len(self.taken[c])) for c in self.channels}
                    todo += machine.handle(m.Durable(id))
                case m.BroadcastBarrier():
                    for channel in self.channels:
                        if channel[0] == p:
                            self.put(channel, effect)
                case m.Record(channel, ids):
                    for id in ids:
                        self.logs[id, channel].append(row)
                    self.seen["recorded"] += 1
                case m.WriteLogs(id):
                    todo += machine.handle(m.LogsDurable(id))
                case m.Acknowledge(id):
                    self.acked[id] += 1
                case _:
                    pass
            machine.validate()

    def check(self, id: int) -> None:
        """CL6: n messages sent before the sender's cut, m taken before the receiver's; the state is the n - m."""
        for channel in self.channels:
            sent = [i for i in self.sent[channel][: self.cuts[id][channel[0]][channel][0]] if isinstance(i, int)]
            taken = [i for i in self.taken[channel][: self.cuts[id][channel[1]][channel][1]] if isinstance(i, int)]
            if taken + self.logs[id, channel] != sent:
                raise Wrong(f"{channel}, snapshot {id}: {taken} + {self.logs[id, channel]} of {sent}")


def test_cl6_every_snapshot_of_every_network_is_a_consistent_cut():
    seen: Counter[str] = Counter()
    shapes = set()
    for seed in range(400):
        network = Network(seed).run()
        seen["recorded"] += network.seen["recorded"]
        seen["at once"] = max(seen["at once"], network.seen["at once"])
        shapes |= {"self-loop" for c in network.channels if c[0] == c[1]}
        shapes |= {"lonely" for p in network.processes if not any(p in c[:2] for c in network.channels)}
        shapes |= {"no inputs" for mach in network.machines.values() if mach.is_source}
    assert seen["recorded"] > 1000
    assert seen["at once"] == SNAPSHOTS
    assert shapes == {"self-loop", "lonely", "no inputs"}


class RecordsAgain(SubtaskMachine):
    """CL4 broken: a trigger for a snapshot that began counts as a new one."""

    def _on_trigger(self, event):
        return [m.Freeze(event.checkpoint_id, False), *super()._on_trigger(event)]


class MixesSnapshots(SubtaskMachine):
    """CL5 broken: a marker ends the recording of its channel for all snapshots."""

    def _close_log(self, snapshot, event):
        for other in list(self._recorders.get(event.input, [])):
            if other is not snapshot:
                other.logs[event.input] += 0
                self._recorders[event.input].remove(other)
        return super()._close_log(snapshot, event)

    def _drop_recorder(self, snapshot, input):
        if snapshot in self._recorders.get(input, []):
            super()._drop_recorder(snapshot, input)

    def validate(self) -> None:
        """The cut has to tell."""


class InOrderOnly(SubtaskMachine):
    """Takes for granted that ids grow."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options | {"protocol": PROTOCOLS["at_least_once"]})


class RecordsItsOwnMarkerLate(SubtaskMachine):
    """CL2 broken: also the channel of the first marker is recorded."""

    def _to_record(self, snapshot):
        return list(self._inputs)

    def validate(self) -> None:
        """The snapshot never ends."""


@pytest.mark.parametrize("mutant", [RecordsAgain, MixesSnapshots, InOrderOnly, RecordsItsOwnMarkerLate])
def test_a_planted_bug_is_caught(mutant):
    for seed in range(60):
        try:
            Network(seed, mutant).run()
        except (Wrong, InvariantError):
            return
    pytest.fail("60 networks, and nobody noticed")
