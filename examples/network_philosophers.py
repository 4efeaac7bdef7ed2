"""Dining philosophers: each takes the fork on the left, then the one on the right.  Sooner or later they all wait.

Forks are processes, too.  The deadlock is found in a global snapshot while everything runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cutwater.process_networks import AllOf, Network, Process, deadlock

SEATS = 5


@dataclass
class Take:
    """A philosopher wants the fork."""


@dataclass
class Granted:
    """The fork is yours."""


@dataclass
class PutBack:
    """The fork is free again."""


class Philosopher(Process):
    left: str
    right: str
    waits_for: str = ""
    meals: int = 0

    def on_start(self, ctx):
        self.ask(ctx, self.left)

    def ask(self, ctx, fork):
        self.waits_for = fork
        ctx.send(fork, Take())

    def on_message(self, ctx, sender, message):
        if sender == self.left:
            self.ask(ctx, self.right)
            return
        self.meals += 1
        for fork in (self.left, self.right):
            ctx.send(fork, PutBack())
        self.ask(ctx, self.left)


class Fork(Process):
    holder: str = ""
    queue: list[str] = field(default_factory=list)

    def on_message(self, ctx, sender, message):
        if isinstance(message, Take):
            self.queue.append(sender)
        else:
            self.holder = ""
        if not self.holder and self.queue:
            self.holder = self.queue.pop(0)
            ctx.send(self.holder, Granted())


def waits(name, state):
    """Philosophers wait for a fork, a taken fork that somebody wants waits for its holder."""
    if isinstance(state, Philosopher):
        return AllOf((state.waits_for,)) if state.waits_for else None
    return AllOf((state.holder,)) if state.holder else None


def build() -> Network:
    network = Network("philosophers", messages=[Take, Granted, PutBack])
    for i in range(SEATS):
        network.add(f"fork-{i}", Fork())
    for i in range(SEATS):
        left, right = f"fork-{i}", f"fork-{(i + 1) % SEATS}"
        network.add(f"philosopher-{i}", Philosopher(left, right))
        network.connect_both(f"philosopher-{i}", left)
        network.connect_both(f"philosopher-{i}", right)
    return network


def main() -> None:
    run = build().run_local(seed=3)
    found = run.watch(deadlock(waits), every="1ms", timeout="10s")
    snapshot = run.last_snapshot
    assert snapshot is not None
    meals = sum(state.meals for name, state in snapshot.states() if isinstance(state, Philosopher))
    print(f"{meals} meals, then {found.detail if found else 'no deadlock yet'}")


if __name__ == "__main__":
    main()
