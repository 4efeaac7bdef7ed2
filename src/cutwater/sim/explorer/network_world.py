"""What no step of a small process network changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from cutwater.protocol import messages as m
from cutwater.protocol.snapshot_algorithms import Algorithm, ChandyLamport, LaiYang
from cutwater.sim.explorer.small import Memo
from cutwater.sim.explorer.world import Budget

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
        machine: Any = vars(self.algorithm)["_machine"]
        machine.validate()


class NetworkWorld:
    """What no step changes.  Each process has as many tokens at first as the budget has rows."""

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
        """Which tokens each process must hold at last."""
        held: list[list[int]] = [[] for _ in self.processes]
        for start, tokens in enumerate(self.tokens):
            for token in tokens:
                at = start
                while token & 15:
                    at, token = self.spec.channels[self.goes(at, token)][1], token - 1
                held[at].append(token)
        return [tuple(sorted(found)) for found in held]
