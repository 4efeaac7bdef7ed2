"""Good traces with one thing changed: the checker refuses each, or it is still a right trace by the plain rules."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable

import msgspec
import pytest
from trace_rules import what_is_wrong
from trace_world import run

from cutwater.sim.simulate import Simulation, play
from cutwater.sim.world.record import to_trace
from cutwater.trace.checker import check
from cutwater.trace.events import Completed, Cut, Event, MarkerSent, MarkerTaken, Recorded, Span, Step, Trace
from cutwater.trace.result import Kind

SEEDS = range(40)
MUTATIONS_PER_TRACE = 30

Mutation = Callable[[random.Random, list[Event]], None]


def good(seed: int) -> Trace:
    trace = run(seed, count=2 + seed % 3, steps=30)
    assert check(trace).ok
    assert what_is_wrong(trace) == ""
    return trace


def drop(rng: random.Random, events: list[Event]) -> None:
    del events[rng.randrange(len(events))]


def double(rng: random.Random, events: list[Event]) -> None:
    event = rng.choice(events)
    events.insert(rng.randint(events.index(event), len(events)), event)


def swap(rng: random.Random, events: list[Event]) -> None:
    at = rng.randrange(len(events) - 1)
    events[at], events[at + 1] = events[at + 1], events[at]


def move(rng: random.Random, events: list[Event]) -> None:
    event = events.pop(rng.randrange(len(events)))
    events.insert(rng.randint(0, len(events)), event)


def relabel(rng: random.Random, events: list[Event]) -> None:
    at = rng.randrange(len(events))
    event = events[at]
    name = rng.choice([n for n in event.__struct_fields__ if n not in ("time_ms", "label")])
    value = getattr(event, name)
    if isinstance(value, int):
        value += rng.choice((-1, 1))
    elif isinstance(value, str):
        value = rng.choice(["p0", "p1", "p0p1", "p1p0", "nobody", value + "'"])
    elif value:
        value = (_other_span(rng, value[0]), *value[1:])
    events[at] = msgspec.structs.replace(event, **{name: value})


def _other_span(rng: random.Random, span: Span) -> Span:
    first, values = span.first + rng.choice((-1, 1)), ("other",)
    return rng.choice([
        msgspec.structs.replace(span, first=first),
        msgspec.structs.replace(span, values=values),
        msgspec.structs.replace(span, channel="p1p0"),
        msgspec.structs.replace(span, count=2, values=span.values * 2),
    ])  # fmt: skip


MUTATIONS: tuple[Mutation, ...] = (drop, double, swap, move, relabel)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.__name__)
def test_a_changed_trace_is_refused_exactly_if_the_plain_rules_say_so(mutation: Mutation) -> None:
    refused = 0
    for seed in SEEDS:
        trace, rng = good(seed), random.Random(seed)
        for _ in range(MUTATIONS_PER_TRACE):
            events = list(trace.events)
            mutation(rng, events)
            changed = Trace(trace.header, tuple(events))
            wrong, found = what_is_wrong(changed), check(changed)
            assert bool(wrong) is not found.ok, f"seed {seed}: {wrong or 'nothing'} is wrong, found: {found}"
            refused += not found.ok
    assert refused > len(SEEDS) * MUTATIONS_PER_TRACE // 5


def _marker_mutations(trace: Trace) -> Iterable[tuple[str, Trace]]:
    """Of each marker of each complete snapshot: gone, there twice, never taken."""
    complete = {event.snapshot for event in trace.events if isinstance(event, Completed)}
    for at, event in enumerate(trace.events):
        if isinstance(event, MarkerSent | MarkerTaken | Cut) and event.snapshot in complete:
            name = type(event).__name__
            yield f"{name} dropped", Trace(trace.header, (*trace.events[:at], *trace.events[at + 1 :]))
            yield f"{name} doubled", Trace(trace.header, (*trace.events[: at + 1], event, *trace.events[at + 1 :]))
        if isinstance(event, Recorded) and event.spans and event.snapshot in complete:
            yield "Recorded dropped", Trace(trace.header, (*trace.events[:at], *trace.events[at + 1 :]))
        if isinstance(event, Step) and event.takes and any(s.count for s in event.takes):
            yield "Step doubled", Trace(trace.header, (*trace.events[: at + 1], event, *trace.events[at + 1 :]))


@pytest.mark.parametrize("protocol", ["aligned", "chandy_lamport", "unaligned", "synchronous"])
def test_every_marker_cut_and_log_of_a_run_with_faults_is_needed_once(protocol: str) -> None:
    """In the traces of the simulator: recoveries of all scopes, channels that overtake, loops."""
    seen = Counter[str]()
    simulation, rng = Simulation(["diamond", "self_loop", "moody_join", "sources"], [protocol]), random.Random(7)
    for seed in range(12):
        world, violation = play(simulation.schedule(seed))
        assert violation is None
        trace = to_trace(world)
        assert check(trace, quick=True).ok
        for what, changed in rng.sample(found, min(len(found), 25)) if (found := [*_marker_mutations(trace)]) else ():
            result = check(changed, quick=True)
            assert not result.ok, f"seed {seed}: {what}, and nobody noticed"
            seen[what] += 1
    assert len(seen) >= 7, seen


def test_full_checks_judge_the_snapshots_of_attempts_with_survivors() -> None:
    """A recorded row more, or a state that nobody was in: found by the rebuilt history as well."""
    simulation = Simulation(["moody_join", "wide"], ["chandy_lamport", "aligned"])
    judged = wrong = 0
    for seed in range(40):
        schedule = simulation.schedule(seed)
        if schedule.recovery not in ("task", "upstream"):
            continue
        trace = to_trace(play(schedule)[0])
        result = check(trace)
        assert result.ok, f"seed {seed}: {result}"
        survived = {e.attempt for e in trace.events if type(e).__name__ == "Survived"}
        complete = {e.snapshot for e in trace.events if isinstance(e, Completed)}
        cuts = [n for n, e in enumerate(trace.events)
                if isinstance(e, Cut) and e.attempt in survived and e.snapshot in complete]  # fmt: skip
        judged += bool(cuts)
        for at in cuts[:1]:
            cut = msgspec.structs.replace(trace.events[at], state="nobody's")
            found = check(Trace(trace.header, (*trace.events[:at], cut, *trace.events[at + 1 :]))).kinds()
            assert Kind.STATE in found
            wrong += Kind.REORDERING in found  # a process that has done nothing may have been in any state
    assert judged > 5
    assert wrong > judged // 2
