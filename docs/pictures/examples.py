"""The worked examples, step by step; every one is a snapshot that the real machines take."""

from __future__ import annotations

import msgspec

from cutwater.protocol.protocols import PROTOCOLS
from cutwater.trace.checker import check
from cutwater.trace.events import Completed, Cut, Event, Recorded, Step, Trace
from cutwater.trace.result import Reordering
from docs.pictures.stage import Stage, all_pairs


def three_processes() -> Trace:
    """P1 begins after its event b; the message from h to d is on its way, and becomes the state of C21."""
    processes = ("P1", "P2", "P3")
    stage = Stage("Three processes: the message from h to d is in C21", processes, all_pairs(processes))

    def state(process: str, event: str) -> str:
        return f"{stage.states[process]}{event}"

    stage.send("P1", "C12", "a→f", label="a", state=state("P1", "a"))
    stage.send("P3", "C32", "i→g", label="i", state=state("P3", "i"))
    stage.take("C12", label="f", state=state("P2", "f"))
    stage.local("P1", label="b", state=state("P1", "b"))
    stage.begin("P1", 1)
    stage.take("C32", label="g", state=state("P2", "g"))
    stage.take("C13")  # the first marker at P3: C13 is empty
    stage.send("P1", "C13", "c→j", label="c", state=state("P1", "c"))
    stage.send("P2", "C21", "h→d", label="h", state=state("P2", "h"))
    stage.take("C31")  # P3's marker at P1: C31 is empty
    stage.take("C32")  # the first marker at P2: C32 is empty
    stage.take("C12")  # P1's marker at P2: C12 is empty, and P2 is done
    stage.take("C13", label="j", state=state("P3", "j"))
    stage.take("C21", label="d", state=state("P1", "d"))  # recorded: h was before P2's cut, d is after P1's
    stage.take("C21")
    stage.local("P1", label="e", state=state("P1", "e"))
    stage.take("C23")
    return stage.trace()


def token() -> Trace:
    """A token between p and q: p sends it, then records; q sends it back, then gets the marker."""
    states = {"p": "has it", "q": "has it not"}
    stage = Stage("The token is in exactly one place", "pq", [("c", "p", "q"), ("c'", "q", "p")], states=states)
    stage.send("p", "c", "token", state="has it not")
    stage.begin("p", 1)
    stage.take("c", state="has it")
    stage.send("q", "c'", "token", state="has it not")
    stage.take("c")
    stage.take("c'", state="has it")
    stage.take("c'")
    return stage.trace()


def count_and_print() -> Trace:
    """Two sources, two counts, two prints: count-2 has the barrier of src-1 and waits for that of src-2."""
    links = [(f"s{i}c{j}", f"src-{i}", f"count-{j}") for i in (1, 2) for j in (1, 2)]
    links += [(f"c{i}p{i}", f"count-{i}", f"print-{i}") for i in (1, 2)]
    processes = ("src-1", "src-2", "count-1", "count-2", "print-1", "print-2")
    stage = Stage("Aligned barriers: count-2 waits for src-2", processes, links, row=PROTOCOLS["aligned"])
    total: dict[str, int] = dict.fromkeys(processes, 0)

    def source(i: int, j: int, word: str) -> None:
        total[f"src-{i}"] += 1
        stage.send(f"src-{i}", f"s{i}c{j}", word, state=f"at {total[f'src-{i}']}")

    def count(i: int, j: int) -> None:
        total[f"count-{j}"] += 1
        n = total[f"count-{j}"]
        stage.take(f"s{i}c{j}", send=[(f"c{j}p{j}", str(n))], state=str(n))

    source(1, 1, "to")
    source(2, 2, "be")
    count(1, 1)
    source(1, 2, "or")
    stage.begin("src-1", 1)
    source(1, 2, "not")  # behind the barrier: count-2 must not count it yet
    stage.begin("src-2", 1)
    stage.take("s1c1")
    stage.take("c1p1", state="1")
    stage.take("s2c1")  # count-1 has both barriers: it freezes and sends its own
    count(1, 2)
    stage.take("s1c2")  # from here on s1c2 is blocked
    count(2, 2)  # src-2's row goes on
    stage.take("c1p1")
    stage.take("s2c2")  # now count-2 freezes
    count(1, 2)  # "not" was waiting
    stage.take("c2p2", state="1")
    stage.take("c2p2", state="1 2")
    stage.take("c2p2")
    stage.take("c2p2", state="1 2 3")
    return stage.trace()


def cyclic() -> Trace:
    """A loop: the head waits for the source's barrier only, and logs what comes back until its own barrier does."""
    links = [("in", "source", "head"), ("on", "head", "tail"), ("back", "tail", "head"), ("out", "tail", "sink")]
    stage = Stage(
        "A loop: what comes back before the barrier is in the snapshot",
        ("source", "head", "tail", "sink"),
        links,
        row=PROTOCOLS["aligned"],
        back_edges=frozenset({"back"}),
    )
    stage.send("source", "in", "x")
    stage.send("source", "in", "y")
    stage.take("in", send=[("on", "x")])
    stage.begin("source", 1)
    stage.take("on", send=[("back", "x'")])
    stage.take("in", send=[("on", "y")])
    stage.take("in")  # the head freezes: it does not wait for its own barrier
    stage.send("source", "in", "z")
    stage.take("back", send=[("on", "x'")])  # logged
    stage.take("on", send=[("back", "y'")])
    stage.take("on")  # the barrier goes round
    stage.take("in", send=[("on", "z")])  # the source's new rows are not held up
    stage.take("back", send=[("on", "y'")])  # logged
    stage.take("back")  # the head's own barrier is back: the log is x', y'
    stage.take("on", send=[("out", "x'")])
    stage.take("out")
    stage.take("out")
    return stage.trace()


def never_occurred() -> Trace:
    """A right snapshot of a state that the system never was in."""
    states = {"p": "A", "q": "C"}
    links = [("c", "p", "q"), ("c'", "q", "p")]
    stage = Stage("The state A, D with M' on its way never occurred", "pq", links, states=states)
    stage.begin("p", 1)
    stage.send("p", "c", "M", state="B", label="1")
    stage.send("q", "c'", "M'", state="D", label="2")
    stage.take("c'", state="A", label="3")
    stage.take("c")
    stage.take("c", state="C", label="4")
    stage.take("c'")
    return stage.trace()


def reordered(trace: Trace, reordering: Reordering) -> Trace:
    """The equivalent history that leads through the recorded state: its cut is straight."""
    numbers = [*reordering.before, *reordering.after]
    window = range(min(numbers), max(numbers) + 1)
    steps = {number: event for number, event in enumerate(trace.events, start=1) if isinstance(event, Step)}
    parts = [e for e in trace.events if isinstance(e, Cut | Recorded | Completed)]
    cuts = [e for e in parts if e.snapshot == reordering.snapshot]
    head = [steps[n] for n in steps if n < window.start]
    tail = [steps[n] for n in steps if n >= window.stop]
    before, after = ([steps[n] for n in part] for part in (reordering.before, reordering.after))
    events: list[Event] = [*head, *before, *cuts, *after, *tail]
    again: list[Event] = []
    for event in events:  # drawn by time: the whole cut is one moment
        now = len(again) if isinstance(event, Step) else len(head) + len(before)
        again.append(msgspec.structs.replace(event, time_ms=float(now)))
    header = msgspec.structs.replace(trace.header, title="The same events in another order: the state occurs")
    return Trace(header, tuple(again))


def reordering_of(trace: Trace) -> Reordering:
    """Verdict of the checker on the first snapshot."""
    return check(trace).reorderings[0]


def two_snapshots() -> Trace:
    """Two processes begin a snapshot each, at the same time (CL5)."""
    processes = ("P1", "P2", "P3")
    stage = Stage("Two snapshots at once, each with its own recording", processes, all_pairs(processes))
    stage.send("P2", "C21", "u")
    stage.send("P1", "C13", "v")
    stage.begin("P1", 1)
    stage.send("P3", "C32", "w")
    stage.begin("P3", 2)
    stage.take("C13")
    stage.take("C32")
    stage.take("C12")
    stage.send("P2", "C23", "x")
    stage.drain()
    return stage.trace()
