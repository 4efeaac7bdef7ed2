"""Runs of wrong ideas: each is the real work, or the real machine, with one decision made differently.

Snapshots without markers or with recorders in the wrong place; loops that lose, double or mix up rows; wrong ways of
dropping what comes twice after a partial rollback.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import Literal

from cutwater.plan.cycles import back_edges
from cutwater.protocol import messages as m
from cutwater.protocol.protocols import PROTOCOLS, AfterFreeze, BeforeFreeze, FreezeOn, ProtocolSpec
from cutwater.protocol.subtask.machine import SubtaskMachine
from cutwater.trace.checker import check
from cutwater.trace.events import Trace
from cutwater.trace.result import CheckResult
from docs.pictures.stage import MachineFactory, Stage, all_pairs, walk

# ------------------------------------------------------------------------------------------------------------- cuts

MOMENT_MS = 40.0
THREE = ("P1", "P2", "P3")
FIRST_IDEA = ProtocolSpec("first_idea", FreezeOn.FIRST, BeforeFreeze.OPEN, AfterFreeze.RECORD_BACK_EDGES)
"""A process that records itself calls its output channels empty and sends markers; nobody records an input."""


def _three(seed: int, title: str, cut_at_ms: dict[str, float]) -> Stage:
    stage = Stage(title, THREE, all_pairs(THREE), machine=None)
    walk(stage, random.Random(seed), sources=THREE, rows=30, hops=2, cut_at_ms=cut_at_ms)
    stage.finish(1)
    return stage


def agreed_time(seed: int, skew_ms: float) -> Stage:
    """All record themselves when their own clock shows the agreed time; clocks differ by up to ``skew_ms``."""
    rng = random.Random(1000 + seed)
    moments = {p: MOMENT_MS + rng.uniform(-skew_ms, skew_ms) for p in THREE}
    return _three(seed, "An agreed time, and clocks that differ", moments)


def central_command(seed: int, delay_ms: float) -> Stage:
    """Each process records itself when the command of the central process reaches it."""
    rng = random.Random(2000 + seed)
    moments = {p: MOMENT_MS + rng.uniform(0, delay_ms) for p in THREE}
    return _three(seed, "A command from the centre, and no markers", moments)


def all_stand_still(seed: int) -> Stage:
    """All processes stop, then record themselves; nobody looks into the channels."""
    return _three(seed, "All stand still, and nobody looks into the channels", dict.fromkeys(THREE, MOMENT_MS))


def markers(seed: int) -> Stage:
    """The same work with the real algorithm."""
    stage = Stage("Markers", THREE, all_pairs(THREE))
    walk(stage, random.Random(seed), sources=THREE, rows=30, hops=2, begin_after={"P1": 12})
    return stage


def clocks_differ() -> Trace:
    """It is noon by P1's clock, which is fast; what it sends next comes to P2 before noon there."""
    links = [("C12", "P1", "P2"), ("C21", "P2", "P1")]
    stage = Stage("All record themselves at noon, each by its own clock", ("P1", "P2"), links, machine=None)
    stage.send("P2", "C21", "x", label="11:58")
    stage.local("P1", label="11:59")
    stage.cut("P1", 1)
    stage.send("P1", "C12", "y", label="12:01")
    stage.take("C12", label="11:59")
    stage.cut("P2", 1)
    stage.finish(1)
    stage.take("C21", label="12:02")
    return stage.trace()


def command_overtaken() -> Trace:
    """The command reaches P1 (b), P1 sends (c), P2 takes it (d), and only then does the command reach P2 (e)."""
    links = [("to P1", "centre", "P1"), ("to P2", "centre", "P2"), ("C12", "P1", "P2"), ("C21", "P2", "P1")]
    stage = Stage("c is after P1's cut, d is before P2's", ("centre", "P1", "P2"), links, machine=None)
    stage.send("centre", "to P1", "save", label="a")
    stage.send("centre", "to P2", "save", label="a'")
    stage.cut("centre", 1)
    stage.take("to P1", label="b")
    stage.cut("P1", 1)
    stage.send("P1", "C12", "message", label="c")
    stage.take("C12", label="d")
    stage.take("to P2", label="e")
    stage.cut("P2", 1)
    stage.finish(1)
    return stage.trace()


def _token(title: str) -> Stage:
    states = {"p": "has it", "q": "has it not"}
    return Stage(title, "pq", [("c", "p", "q"), ("c'", "q", "p")], states=states, machine=None)


def token_twice() -> Trace:
    """n' > n: p is recorded with the token; then it sends it, and the channel is recorded with the token too."""
    stage = _token("n' > n: the token is in p and in c")
    stage.local("p")
    stage.cut("p", 1)
    stage.send("p", "c", "token", state="has it not")
    stage.cut("q", 1)
    stage.record(1, "c", stage.waiting("c"))
    stage.record(1, "c'")
    stage.finish(1)
    stage.take("c", state="has it")
    return stage.trace()


def token_lost() -> Trace:
    """n' < n: the channel is recorded empty; then p sends the token into it, and p and q are recorded without it."""
    stage = _token("n' < n: the token is nowhere")
    stage.local("p")
    stage.record(1, "c", stage.waiting("c"))
    stage.send("p", "c", "token", state="has it not")
    stage.cut("p", 1)
    stage.cut("q", 1)
    stage.record(1, "c'")
    stage.finish(1)
    stage.take("c", state="has it")
    return stage.trace()


def ring(seed: int, row: ProtocolSpec = FIRST_IDEA, rows: int = 20) -> Stage:
    """P1 -> P2 -> P3 -> P1."""
    links = [("C12", "P1", "P2"), ("C23", "P2", "P3"), ("C31", "P3", "P1")]
    title = "The first idea on a ring" if row is FIRST_IDEA else f"A ring, {row.name}"
    stage = Stage(title, THREE, links, row=row)
    walk(stage, random.Random(seed), sources=THREE, rows=rows, hops=3, begin_after={"P1": rows // 3})
    return stage


def line(seed: int) -> Stage:
    """P1 -> P2 -> P3: here the first idea is right."""
    stage = Stage("The first idea on a line", THREE, [("C12", "P1", "P2"), ("C23", "P2", "P3")], row=FIRST_IDEA)
    walk(stage, random.Random(seed), sources=("P1", "P2"), rows=20, hops=3, begin_after={"P1": 6})
    return stage


Search = Literal["depth-first", "breadth-first"]
# ------------------------------------------------------------------------------------------------------------ loops

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
    """Rows that come on a back-edge after the freeze are not recorded: the logs stay empty."""

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
        """Inputs that have brought their barrier wait for the freeze."""
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
    after = {step: [b for a, b in edges if a == step] for step in steps}
    back = set(back_edges(after, ["s"])) if search == "depth-first" else _by_breadth(edges)
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


# --------------------------------------------------------------------------------------------------- dropping by number

FRAME_ROWS_MAX = 4


def replay(seed: int, rows: int = 6, before_crash: int = 7, *, logged: bool) -> Stage:
    """Two sources feed a count; it dies and takes the rows again, in another order or as its determinants say."""
    rng = random.Random(seed)
    links = [("a", "a", "count"), ("b", "b", "count"), ("out", "count", "sink")]
    how = "the order was logged" if logged else "the order was not logged"
    stage = Stage(f"The count goes back, the sink does not; {how}", ("a", "b", "count", "sink"), links, machine=None)
    _send_all(stage, rows)
    order = [_count(stage, rng) for _ in range(before_crash)]
    seen = [stage.take("out") for _ in range(before_crash)]
    stage.crash("count")
    stage.go_back(("a", "b", "count"))
    _send_all(stage, rows)
    for i in range(2 * rows):
        _count(stage, rng, order[i] if logged and i < len(order) else None)
    for _ in range(before_crash):
        stage.queues["out"].popleft()  # dropped by their numbers: they have been seen
    seen += [stage.take("out") for _ in range(2 * rows - before_crash)]
    _end(stage, "sink", [row.value.partition("#")[0] for row in seen if row])
    return stage


def _send_all(stage: Stage, rows: int) -> None:
    for i in range(rows):
        for source in ("a", "b"):
            stage.send(source, source, f"{source}{i}")


def _count(stage: Stage, rng: random.Random, channel: str | None = None) -> str:
    """The count takes a row from one of its inputs, and says which number it has."""
    if channel is None:
        channel = rng.choice([c for c in ("a", "b") if stage.queues[c]])
    number = int(stage.states["count"] or 0) + 1
    row = stage.head(channel)
    stage.take(channel, state=str(number), send=[("out", f"{row.value if row else ''}#{number}")])
    return channel


def _end(stage: Stage, sink: str, output: list[str]) -> None:
    for process in stage.header.processes:
        stage.cut(process, 1)
    stage.finish(1)
    stage.commit(sink, 1, output)


def order_oracle(stage: Stage, rows: int = 6) -> CheckResult:
    """Every row of both sources is committed once."""
    return check(stage.trace(), oracle=[f"{source}{i}" for source in ("a", "b") for i in range(rows)], drained=True)


def frames(seed: int, rows: int = 20, *, by_row: bool) -> Stage:
    """Frames are cut differently when they come again; the receiver drops by their number, or by that of rows."""
    rng = random.Random(seed)
    what = "rows" if by_row else "frames"
    stage = Stage(f"Dropping by the number of {what}", ("step", "sink"), [("c", "step", "sink")], machine=None)
    taken: list[str] = []
    first = _send_frames(stage, rng, rows)
    seen = first[: len(first) // 2]
    for frame in seen:
        taken += [row.value for row in stage.take_several("c", frame)]
    stage.crash("step")
    stage.go_back(("step",))
    again = _send_frames(stage, rng, rows)
    for _ in range(sum(seen) if by_row else sum(again[: len(seen)])):
        stage.queues["c"].popleft()
    for frame in again[len(seen) :]:
        if stage.queues["c"]:
            taken += [row.value for row in stage.take_several("c", min(frame, len(stage.queues["c"])))]
    if stage.queues["c"]:
        taken += [row.value for row in stage.take_several("c", len(stage.queues["c"]))]
    _end(stage, "sink", taken)
    return stage


def _send_frames(stage: Stage, rng: random.Random, rows: int) -> list[int]:
    """Number of rows of each frame."""
    frames: list[int] = []
    while sum(frames) < rows:
        frames.append(min(rng.randint(1, FRAME_ROWS_MAX), rows - sum(frames)))
        first = sum(frames) - frames[-1]
        stage.send_several("step", "c", [f"r{first + i}" for i in range(frames[-1])])
    return frames


def frames_oracle(stage: Stage, rows: int = 20) -> CheckResult:
    """Every row is committed once."""
    return check(stage.trace(), oracle=[f"r{i}" for i in range(rows)])
