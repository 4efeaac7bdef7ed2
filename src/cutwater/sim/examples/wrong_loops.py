"""Ideas for loops that lose, double or mix up rows: each is the real machine with one decision changed."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import Literal

from cutwater.protocol import messages as m
from cutwater.protocol.protocols import PROTOCOLS, ProtocolSpec
from cutwater.protocol.subtask.machine import SubtaskMachine
from cutwater.sim.examples.stage import MachineFactory, Stage
from cutwater.sim.examples.walk import walk

Search = Literal["depth-first", "breadth-first"]
PARALLELISM = 2


class EarlyBarriersPass(SubtaskMachine):
    """C2 without its second sentence: a barrier that comes early on a back-edge does not block it."""

    def handle(self, event: m.Event) -> list[m.Effect]:
        effects = super().handle(event)
        early = [e for e in effects if isinstance(e, m.Block) and e.input in self._back_edges]
        for effect in early:
            del self._blocked[effect.input]
        return [e for e in effects if e not in early]


class NoLogs(SubtaskMachine):
    """What comes on a back-edge after the freeze is not recorded: the logs stay empty."""

    def handle(self, event: m.Event) -> list[m.Effect]:
        return [effect for effect in super().handle(event) if not isinstance(effect, m.Record)]


class WaitsForTheLoop:
    """Sends the barrier on, holds its regular inputs, and freezes when the loop's barriers are back; keeps no log."""

    def __init__(
        self, name: str, inputs: Sequence[str], *, protocol: ProtocolSpec, back_edges: frozenset[str] = frozenset()
    ) -> None:
        self._inputs, self._regular = frozenset(inputs), frozenset(inputs) - back_edges
        self._arrived: set[m.InputId] = set()
        self._sent = self._frozen = False

    def handle(self, event: m.Event) -> list[m.Effect]:
        """As a subtask machine."""
        match event:
            case m.BarrierTaken(input):
                self._arrived.add(input)
            case m.Durable(id):
                return [m.Acknowledge(id)]
            case m.Trigger():
                pass  # a source: as if the last regular barrier had come
            case _:
                return []
        effects: list[m.Effect] = []
        if not self._sent and self._regular <= self._arrived:
            self._sent = True
            effects.append(m.BroadcastBarrier(event.checkpoint_id, False))
        if not self._frozen and self._inputs <= self._arrived:
            self._frozen = True
            effects.append(m.Freeze(event.checkpoint_id, False))
        return effects

    def can_take(self, input: m.InputId) -> bool:
        """What has brought its barrier waits for the freeze."""
        return self._frozen or input not in self._arrived

    def recording(self, input: m.InputId) -> bool:
        """Never."""
        return False


def self_loop(
    seed: int,
    machine: MachineFactory = SubtaskMachine,
    row: str = "aligned",
    *,
    parallelism: int = 2,
    rows: int = 16,
    title: str = "A step that feeds itself",
) -> Stage:
    """One source and one step that feeds itself through a shuffle."""
    steps = [f"t{i}" for i in range(parallelism)]
    links = [(f"s→{t}", "s", t) for t in steps] + [(f"{a}→{b}", a, b) for a in steps for b in steps]
    back = frozenset(f"{a}→{b}" for a in steps for b in steps)
    stage = Stage(title, ("s", *steps), links, row=PROTOCOLS[row], back_edges=back, machine=machine)
    walk(stage, random.Random(seed), sources=("s",), rows=rows, hops=3, begin_after={"s": rows // 3})
    return stage


def diamond() -> Stage:
    """No loop at all; breadth-first search still calls a→b a back-edge, because s→b has been seen before."""
    links = [("s→a", "s", "a"), ("s→b", "s", "b"), ("a→b", "a", "b")]
    row, back = PROTOCOLS["aligned"], _by_breadth([("s", "a"), ("s", "b"), ("a", "b")])
    closing = frozenset(f"{a}→{b}" for a, b in back)
    stage = Stage(
        "No loop, but a log: breadth-first search calls a→b a back-edge", "sab", links, row=row, back_edges=closing
    )
    stage.send("s", "s→a", "x")
    stage.send("s", "s→b", "y")
    stage.begin("s", 1)
    stage.take("s→b")
    stage.take("s→b")
    stage.take("s→a", send=[("a→b", "x")])
    stage.take("a→b")
    stage.drain()
    return stage


def random_loops(seed: int, search: Search, machine: MachineFactory = SubtaskMachine) -> Stage:
    """A random graph of up to four steps, two subtasks each, with any edges between them.

    Its back-edges are found by ``search``: by depth, an edge to a step still on the search stack; by breadth, an edge
    to a step seen before.
    """
    rng = random.Random(seed)
    count = rng.randint(1, 4)
    steps = ["s", *(f"t{i}" for i in range(count))]
    pairs = {("s", "t0")} | {(rng.choice(steps[: i + 1]), steps[i + 1]) for i in range(1, count)}
    pairs |= {(rng.choice(steps[1:]), rng.choice(steps[1:])) for _ in range(rng.randint(1, 4))}
    edges = sorted(pairs)
    back = _by_depth(edges) if search == "depth-first" else _by_breadth(edges)
    links: list[tuple[str, str, str]] = []
    closing: set[str] = set()
    for a, b in edges:
        shuffled = rng.random() < 0.5
        for i in range(PARALLELISM):
            for j in range(PARALLELISM):
                if shuffled or i == j:
                    links.append((f"{a}.{i}→{b}.{j}", f"{a}.{i}", f"{b}.{j}"))
                    if (a, b) in back:
                        closing.add(links[-1][0])
    processes = [f"{s}.{i}" for s in steps for i in range(PARALLELISM)]
    stage = Stage(
        f"Back-edges by {search} search",
        processes,
        links,
        row=PROTOCOLS["aligned"],
        back_edges=frozenset(closing),
        machine=machine,
    )
    sources = [f"s.{i}" for i in range(PARALLELISM)]
    walk(stage, rng, sources=sources, rows=40, hops=5, begin_after=dict.fromkeys(sources, 12))
    return stage


def _by_depth(edges: list[tuple[str, str]]) -> set[tuple[str, str]]:
    found: set[tuple[str, str]] = set()
    open_steps: set[str] = set()
    seen: set[str] = set()

    def visit(step: str) -> None:
        seen.add(step)
        open_steps.add(step)
        for a, b in edges:
            if a == step and b in open_steps:
                found.add((a, b))
            elif a == step and b not in seen:
                visit(b)
        open_steps.discard(step)

    visit("s")
    return found


def _by_breadth(edges: list[tuple[str, str]]) -> set[tuple[str, str]]:
    found: set[tuple[str, str]] = set()
    seen, queue = {"s"}, deque(["s"])
    while queue:
        step = queue.popleft()
        for a, b in edges:
            if a == step and b in seen:
                found.add((a, b))
            elif a == step:
                seen.add(b)
                queue.append(b)
    return found
