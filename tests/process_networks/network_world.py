"""Random networks that pass a conserved quantity around, and oracles that know nothing of snapshots."""

from __future__ import annotations

import random

from cutwater.process_networks import GlobalSnapshot, Network, Process

__all__ = ["START", "Account", "bank", "ends", "random_bank", "total"]

START = 100


class Account(Process):
    """Pays random neighbours until it has paid ``left`` times; ``got`` counts what it was sent."""

    balance: int = START
    left: int = 30
    got: int = 0

    def on_start(self, ctx):
        for _ in range(2):
            self.pay(ctx)

    def pay(self, ctx):
        if self.balance > 0 and self.left > 0 and ctx.outputs:
            amount = ctx.random.randint(1, self.balance)
            self.balance -= amount
            self.left -= 1
            ctx.send(ctx.random.choice(ctx.outputs), amount)

    def on_message(self, ctx, sender, message):
        self.balance += message
        self.got += 1
        self.pay(ctx)


def bank(names: str, *channels: str, left: int = 30, fifo: bool = True) -> Network:
    """``bank("abc", "ab", "bc")``: three accounts, channels a->b and b->c."""
    network = Network("bank", messages=[int])
    for name in names:
        network.add(name, Account(left=left))
    for ends in channels:
        network.connect(ends[0], ends[1], fifo=fifo)
    return network


def random_bank(seed: int, *, fifo: bool = True, left: int = 30) -> Network:
    """2 to 6 accounts: rings, stars, self-loops, several components, whatever the seed gives."""
    rng = random.Random(seed)
    names = "abcdef"[: rng.randint(2, 6)]
    pairs = [x + y for x in names for y in names]
    return bank(names, *rng.sample(pairs, rng.randint(1, len(pairs))), left=left, fifo=fifo)


def total(snapshot: GlobalSnapshot) -> int:
    return sum(state.balance for _, state in snapshot.states()) + sum(snapshot.messages())


def ends(network: Network, snapshot: GlobalSnapshot | None, seed: int) -> dict[str, int]:
    """Balances when nothing happens any more."""
    run = network.run_local(seed=seed, restore=snapshot)
    run.run_until_quiet()
    return {name: run.state(name).balance for name in network.processes}  # type: ignore[attr-defined]
