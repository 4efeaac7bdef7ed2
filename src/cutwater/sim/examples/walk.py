"""Rows that walk at random over a stage while a snapshot is taken; and how many of many such snapshots are wrong."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from cutwater.sim.examples.stage import Stage
from cutwater.trace.checker import check
from cutwater.trace.events import Trace
from cutwater.trace.result import CheckResult, Kind

STEPS_MAX = 4000


def walk(
    stage: Stage,
    rng: random.Random,
    *,
    sources: Sequence[str],
    rows: int,
    hops: int,
    begin_after: Mapping[str, int] | None = None,
    cut_at_ms: Mapping[str, float] | None = None,
) -> None:
    """Let rows walk until nothing moves.

    Args:
        sources: processes that make rows by themselves.
        rows: how many all of them make.
        hops: a row goes on from process to process up to so many times.
        begin_after: process -> begins snapshot 1 once so many rows are made (at the latest when they all are).
        cut_at_ms: process -> records itself at that time, without a word to anybody.
    """
    made = 0
    to_begin, to_cut = dict(begin_after or {}), dict(cut_at_ms or {})
    for _ in range(STEPS_MAX):
        for process in [p for p, at in to_cut.items() if stage.now_ms >= at]:
            del to_cut[process]
            stage.cut(process, 1)
        moves: list[tuple[str, str]] = [("take", channel) for channel in stage.links if stage.can_take(channel)]
        moves += [("begin", process) for process, after in to_begin.items() if made >= after]
        if made < rows:
            moves += [("make", process) for process in sources]
        if not moves:
            break
        kind, name = rng.choice(moves)
        if kind == "begin":
            del to_begin[name]
            stage.begin(name, 1)
        elif kind == "make":
            stage.send(name, rng.choice(stage.outputs(name)), f"r{made}", load=rng.randrange(hops + 1))
            made += 1
        else:
            _take(stage, rng, name)
    for process in to_cut:
        stage.cut(process, 1)


def _take(stage: Stage, rng: random.Random, channel: str) -> None:
    row, outputs = stage.head(channel), stage.outputs(stage.links[channel].target)
    if row is None or not row.load or not outputs:
        stage.take(channel)
    else:
        stage.take(channel, send=[(rng.choice(outputs), row.value, row.load - 1)])


class Tally(NamedTuple):
    """Counts of the outcomes of many runs of a model.

    >>> Tally(10, 3, Counter({Kind.LOST: 3}), stuck=1).text
    '3 of 10 wrong (lost from the cut 3), 1 never completed'
    """

    runs: int
    wrong: int
    kinds: Counter[Kind]
    stuck: int = 0
    logged: float = 0.0
    """Rows in the logs of a snapshot, on average."""

    @property
    def text(self) -> str:
        """For people."""
        kinds = ", ".join(f"{kind.value} {n}" for kind, n in sorted(self.kinds.items(), key=lambda i: i[0].value))
        stuck = f", {self.stuck} never completed" if self.stuck else ""
        return f"{self.wrong} of {self.runs} wrong" + (f" ({kinds})" if kinds else "") + stuck


def quick(stage: Stage) -> CheckResult:
    """Cuts and channels."""
    return check(stage.trace(), quick=True)


def tally(model: Callable[[int], Stage], runs: int, oracle: Callable[[Stage], CheckResult] = quick) -> Tally:
    """Run a model with the seeds 0 to ``runs - 1`` and let the checker judge each."""
    wrong = stuck = logged = 0
    kinds: Counter[Kind] = Counter()
    for seed in range(runs):
        stage = model(seed)
        found = oracle(stage).kinds() - {Kind.MARKER}  # where a marker lies is the model's own affair; the cut is not
        wrong += bool(found)
        stuck += not stage.complete
        logged += stage.rows_logged
        kinds.update(found)
    return Tally(runs, wrong, kinds, stuck, logged / runs)


def shortest_wrong(
    model: Callable[[int], Stage], kind: Kind, runs: int = 200, oracle: Callable[[Stage], CheckResult] = quick
) -> Trace:
    """The shortest trace among many runs in which the checker finds this kind of mistake, for a picture."""
    stages = [stage for stage in map(model, range(runs)) if kind in oracle(stage).kinds()]
    return min((stage.trace() for stage in stages), key=lambda trace: len(trace.events))
