"""Snapshots without markers, with recorders in the wrong place, and the first idea that fails on a ring."""

from __future__ import annotations

import random

from cutwater.protocol.protocols import PROTOCOLS, AfterFreeze, BeforeFreeze, FreezeOn, ProtocolSpec
from cutwater.sim.examples.stage import Row, Stage
from cutwater.sim.examples.walk import walk
from cutwater.trace.events import Trace

MOMENT_MS = 40.0
FIRST_IDEA = ProtocolSpec("first_idea", FreezeOn.FIRST, BeforeFreeze.OPEN, AfterFreeze.RECORD_BACK_EDGES)
"""A process that records itself calls its output channels empty and sends markers; nobody records an input."""


def _three(seed: int, title: str, cut_at_ms: dict[str, float]) -> Stage:
    processes = ("P1", "P2", "P3")
    links = [(f"C{a[1]}{b[1]}", a, b) for a in processes for b in processes if a != b]
    stage = Stage(title, processes, links, machine=None)
    walk(stage, random.Random(seed), sources=processes, rows=30, hops=2, cut_at_ms=cut_at_ms)
    stage.finish(1)
    return stage


def agreed_time(seed: int, skew_ms: float) -> Stage:
    """All record themselves when their own clock shows the agreed time; clocks differ by up to ``skew_ms``."""
    rng = random.Random(1000 + seed)
    moments = {p: MOMENT_MS + rng.uniform(-skew_ms, skew_ms) for p in ("P1", "P2", "P3")}
    return _three(seed, "An agreed time, and clocks that differ", moments)


def central_command(seed: int, delay_ms: float) -> Stage:
    """Each process records itself when the command of the central process reaches it."""
    rng = random.Random(2000 + seed)
    moments = {p: MOMENT_MS + rng.uniform(0, delay_ms) for p in ("P1", "P2", "P3")}
    return _three(seed, "A command from the centre, and no markers", moments)


def all_stand_still(seed: int) -> Stage:
    """All processes stop, then record themselves; nobody looks into the channels."""
    return _three(seed, "All stand still, and nobody looks into the channels", dict.fromkeys(("P1", "P2", "P3"), 40.0))


def markers(seed: int) -> Stage:
    """The same work with the real algorithm."""
    processes = ("P1", "P2", "P3")
    links = [(f"C{a[1]}{b[1]}", a, b) for a in processes for b in processes if a != b]
    stage = Stage("Markers", processes, links)
    walk(stage, random.Random(seed), sources=processes, rows=30, hops=2, begin_after={"P1": 12})
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
    empty: list[Row] = stage.waiting("c")
    stage.record(1, "c", empty)
    stage.send("p", "c", "token", state="has it not")
    stage.cut("p", 1)
    stage.cut("q", 1)
    stage.record(1, "c'")
    stage.finish(1)
    stage.take("c", state="has it")
    return stage.trace()


def ring(seed: int, row: ProtocolSpec = FIRST_IDEA, rows: int = 20) -> Stage:
    """P1 -> P2 -> P3 -> P1."""
    processes = ("P1", "P2", "P3")
    links = [("C12", "P1", "P2"), ("C23", "P2", "P3"), ("C31", "P3", "P1")]
    title = "The first idea on a ring" if row is FIRST_IDEA else f"A ring, {row.name}"
    stage = Stage(title, processes, links, row=row)
    walk(stage, random.Random(seed), sources=processes, rows=rows, hops=3, begin_after={"P1": rows // 3})
    return stage


def line(seed: int) -> Stage:
    """P1 -> P2 -> P3: here the first idea is right."""
    stage = Stage(
        "The first idea on a line", ("P1", "P2", "P3"), [("C12", "P1", "P2"), ("C23", "P2", "P3")], row=FIRST_IDEA
    )
    walk(stage, random.Random(seed), sources=("P1", "P2"), rows=20, hops=3, begin_after={"P1": 6})
    return stage


def ring_with_markers(seed: int) -> Stage:
    """The ring with the real algorithm."""
    return ring(seed, PROTOCOLS["chandy_lamport"])
