"""Parts of a trace from machines whose clocks disagree come back into a causal order."""

from __future__ import annotations

import random

import msgspec
import pytest
from trace_world import run

from cutwater.errors import DataError
from cutwater.trace.checker import check
from cutwater.trace.events import Header, Link, Span, Step, Trace
from cutwater.trace.parts import causal_order


@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_skewed_clocks_do_not_hurt(seed, crash):
    trace = run(seed, crash=crash, count=4)
    rng = random.Random(seed)
    skew = {p: rng.uniform(-30, 30) for p in trace.header.processes}
    skewed = [msgspec.structs.replace(e, time_ms=e.time_ms + skew[e.process]) for e in trace.events]
    by_clock = sorted(skewed, key=lambda e: e.time_ms)
    assert not check(Trace(trace.header, tuple(by_clock))).ok, "the skew does not hurt even without ordering"
    ordered = causal_order(trace.header, sorted(skewed, key=lambda e: e.process))
    assert len(ordered) == len(trace.events)
    result = check(Trace(trace.header, tuple(ordered)))
    assert result.ok, str(result)


def test_a_trace_whose_clocks_agree_keeps_its_order():
    trace = run(3, crash=True)
    assert tuple(causal_order(trace.header, trace.events)) == trace.events


def test_a_row_that_nobody_sent_is_named():
    header = Header(("p", "q"), (Link("c", "p", "q"),))
    with pytest.raises(DataError, match=r"no causal order.*Span"):
        causal_order(header, [Step(0.0, "q", 1, takes=(Span("c", 0),))])
