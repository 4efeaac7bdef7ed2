"""Process networks: processes joined by directed channels, and Chandy-Lamport snapshots of them.

from cutwater.process_networks import Network, Process

class Counter(Process):
    seen: int = 0

    def on_start(self, ctx):
        if ctx.name == "a":
            ctx.send("b", 1)

    def on_message(self, ctx, sender, message):
        self.seen += 1
        ctx.send(sender, message + 1)

network = Network("ping-pong", messages=[int])
network.add("a", Counter())
network.add("b", Counter())
network.connect_both("a", "b")
run = network.run_local(seed=1)          # or network.start(spark, workers=2)
snapshot = run.snapshot(initiators=["a"])
"""

from __future__ import annotations

from cutwater.process_networks.detectors import AllOf, AnyOf, Finding, conserved, deadlock, holds, terminated, tokens
from cutwater.process_networks.graph import Context, Network, Process
from cutwater.process_networks.run import PendingSnapshot, Run
from cutwater.process_networks.snapshot import GlobalSnapshot

__all__ = [
    "AllOf",
    "AnyOf",
    "Context",
    "Finding",
    "GlobalSnapshot",
    "Network",
    "PendingSnapshot",
    "Process",
    "Run",
    "conserved",
    "deadlock",
    "holds",
    "terminated",
    "tokens",
]
