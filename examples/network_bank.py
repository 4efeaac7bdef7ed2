"""Accounts pay each other while global snapshots are taken: money is never made or lost in any of them.

.venv/bin/python examples/network_bank.py           # in this process
.venv/bin/python examples/network_bank.py --spark   # on two Spark workers
"""

from __future__ import annotations

import sys
import tempfile

from cutwater.process_networks import GlobalSnapshot, Network, Process, conserved

ACCOUNTS = 8
START = 1_000


class Account(Process):
    balance: int = START

    def on_start(self, ctx):
        self.pay(ctx)

    def on_message(self, ctx, sender, message):
        self.balance += message
        self.pay(ctx)

    def pay(self, ctx):
        amount = ctx.random.randint(0, self.balance)
        self.balance -= amount
        ctx.send(ctx.random.choice(ctx.outputs), amount)


def build() -> Network:
    network = Network("bank", messages=[int])
    names = [f"account-{i}" for i in range(ACCOUNTS)]
    for name in names:
        network.add(name, Account())
    network.ring(*names)
    network.star(names[0], *names[2:-1])
    return network


def main() -> None:
    network = build()
    run = network.start(workers=2) if "--spark" in sys.argv else network.run_local(seed=1)
    with run:
        # Three snapshots at once, begun by three processes.
        pending = [run.begin_snapshot([f"account-{i}"]) for i in (0, 3, 5)]
        snapshots = [p.result(deadline="30s") for p in pending]
    audit = conserved(lambda name, state: state.balance, lambda amount: amount, ACCOUNTS * START)
    for snapshot in snapshots:
        moving = sum(snapshot.messages())
        print(f"snapshot {snapshot.id}: {audit(snapshot) or 'nothing lost'}, {moving:,} under way")

    with tempfile.TemporaryDirectory() as folder:
        snapshots[-1].save(folder)
        again = network.run_local(seed=2, restore=GlobalSnapshot.load(folder, network))
        again.step(1_000)
        print(f"1,000 steps after a restore: {audit(again.snapshot()) or 'nothing lost'}")


if __name__ == "__main__":
    main()
