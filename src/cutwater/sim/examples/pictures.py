"""Every picture of the gallery by its file name, and the table of measured wrong cuts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from cutwater.protocol.subtask.machine import SubtaskMachine
from cutwater.sim.examples import examples, wrong_runs
from cutwater.sim.examples.stage import Stage
from cutwater.sim.examples.walk import Tally, quick, shortest_wrong, tally
from cutwater.trace.checker import check
from cutwater.trace.diagram import diagram
from cutwater.trace.events import Trace
from cutwater.trace.result import CheckResult, Kind

RUNS = 200
"""Seeds per line of the table."""


class Model(NamedTuple):
    """A line of the table: something wrong, or the right thing beside it."""

    idea: str
    run: Callable[[int], Stage]
    right: bool = False
    oracle: Callable[[Stage], CheckResult] = quick

    def tally(self, runs: int = RUNS) -> Tally:
        """Run it."""
        return tally(self.run, runs, self.oracle)


_loop, _graph = wrong_runs.self_loop, wrong_runs.random_loops

MODELS: dict[str, Model] = {
    "agreed_time_1": Model("agreed clock time, clocks 1 ms apart", partial(wrong_runs.agreed_time, skew_ms=1)),
    "agreed_time_20": Model("agreed clock time, clocks 20 ms apart", partial(wrong_runs.agreed_time, skew_ms=20)),
    "central_command": Model(
        "central command, up to 20 ms on its way", partial(wrong_runs.central_command, delay_ms=20)
    ),
    "all_stand_still": Model("all stand still, channels not recorded", wrong_runs.all_stand_still),
    "markers": Model("Chandy-Lamport on the same work", wrong_runs.markers, right=True),
    "first_idea_line": Model("senders call their channels empty, on a line", wrong_runs.line, right=True),
    "first_idea_ring": Model("senders call their channels empty, on a ring", wrong_runs.ring),
    "ring_markers": Model("Chandy-Lamport on the ring", wrong_runs.ring_with_markers, right=True),
    "breadth_open": Model(
        "back-edges by breadth-first search, early barriers pass",
        partial(_graph, search="breadth-first", machine=wrong_runs.EarlyBarriersPass),
    ),
    "depth_open": Model(
        "back-edges by depth-first search, early barriers pass",
        partial(_graph, search="depth-first", machine=wrong_runs.EarlyBarriersPass),
    ),
    "breadth_blocking": Model(
        "back-edges by breadth-first search, early barriers block", partial(_graph, search="breadth-first"), right=True
    ),
    "depth_blocking": Model(
        "back-edges by depth-first search, early barriers block", partial(_graph, search="depth-first"), right=True
    ),
    "waits_for_the_loop": Model(
        "freeze when the loop's barrier is back, no log", partial(_loop, machine=wrong_runs.WaitsForTheLoop)
    ),
    "no_logs": Model("aligned on a loop without logs", partial(_loop, machine=wrong_runs.NoLogs)),
    "at_least_once_no_logs": Model(
        "at least once on a loop without logs", partial(_loop, machine=wrong_runs.NoLogs, row="at_least_once"),
        oracle=lambda stage: check(stage.trace(), quick=True, at_least_once=True),
    ),
    "at_least_once": Model(
        "at least once on a loop with logs", partial(_loop, row="at_least_once"), right=True,
        oracle=lambda stage: check(stage.trace(), quick=True, at_least_once=True),
    ),
    "aligned_loop": Model("aligned on a loop with logs", partial(_loop, machine=SubtaskMachine), right=True),
    "replay_unlogged": Model(
        "dropping by row number, order not logged", wrong_runs.replay_unlogged, oracle=wrong_runs.order_oracle
    ),
    "replay_logged": Model(
        "dropping by row number, determinant logged", wrong_runs.replay_logged, True, wrong_runs.order_oracle
    ),
    "by_frame_number": Model(
        "dropping by frame number", wrong_runs.by_frame_number, oracle=wrong_runs.frames_oracle
    ),
    "by_row_number": Model(
        "dropping and slicing by row number", wrong_runs.by_row_number, True, wrong_runs.frames_oracle
    ),
}  # fmt: skip


def measured(tallies: Mapping[str, Tally] | None = None) -> str:
    """The table for the documentation: every model, how often the checker found it wrong, and what.

    Args:
        tallies: of all models, if they have been run already.
    """
    lines = ["| | wrong | what the checker found | rows logged |", "|---|---:|---|---:|"]
    for name, model in MODELS.items():
        found = tallies[name] if tallies else model.tally()
        kinds = ", ".join(f"{kind.value}: {n}" for kind, n in sorted(found.kinds.items(), key=lambda i: i[0].value))
        idea = f"*{model.idea}*" if model.right else model.idea
        logged = f"{found.logged:.1f}" if found.logged else ""
        lines.append(f"| {idea} | {found.wrong} of {found.runs} | {kinds} | {logged} |")
    return "\n".join(lines)


def _judged(trace: Trace, result: CheckResult | None = None, notes: int = 3) -> str:
    """A picture with the checker's first words below."""
    lines = str(result or check(trace)).splitlines()
    return diagram(trace, notes=[line for line in lines if "reordering" not in line][: notes + 1])


def _never_reordered() -> str:
    trace = examples.never_occurred()
    return diagram(examples.reordered(trace, examples.reordering_of(trace)), by_time=True)


def _shortest(model: Callable[[int], Stage], kind: Kind) -> str:
    return _judged(shortest_wrong(model, kind))


def _order() -> str:
    model = partial(wrong_runs.replay_unlogged, rows=2, before_crash=2)
    oracle = partial(wrong_runs.order_oracle, rows=2)
    wrong = next(stage for stage in map(model, range(99)) if Kind.OUTPUT in oracle(stage).kinds())
    return _judged(wrong.trace(), oracle(wrong))


def _frames() -> str:
    model = partial(wrong_runs.by_frame_number, rows=6)
    oracle = partial(wrong_runs.frames_oracle, rows=6)
    wrong = next(stage for stage in map(model, range(99)) if Kind.OUTPUT in oracle(stage).kinds())
    return _judged(wrong.trace(), oracle(wrong))


def _small_loop(machine: Callable[..., SubtaskMachine], title: str, row: str = "aligned") -> Callable[[int], Stage]:
    return partial(_loop, machine=machine, row=row, rows=4, title=title)


PICTURES: dict[str, Callable[[], str]] = {
    "three-processes": lambda: diagram(examples.three_processes()),
    "token": lambda: diagram(examples.token()),
    "count-and-print": lambda: diagram(examples.count_and_print()),
    "cyclic": lambda: diagram(examples.cyclic()),
    "two-snapshots": lambda: diagram(examples.two_snapshots()),
    "never-occurred": lambda: _judged(examples.never_occurred()),
    "never-occurred-reordered": _never_reordered,
    "agreed-time": lambda: _judged(wrong_runs.clocks_differ()),
    "central-command": lambda: _judged(wrong_runs.command_overtaken()),
    "token-twice": lambda: _judged(wrong_runs.token_twice()),
    "token-lost": lambda: _judged(wrong_runs.token_lost()),
    "first-idea": lambda: _shortest(partial(wrong_runs.ring, rows=3), Kind.LOST),
    "breadth-first": lambda: _judged(wrong_runs.diamond().trace()),
    "early-barrier": lambda: _shortest(
        _small_loop(wrong_runs.EarlyBarriersPass, "An early barrier on a back-edge that does not block it"), Kind.CUT
    ),
    "waits-for-the-loop": lambda: _shortest(
        partial(
            _loop,
            machine=wrong_runs.WaitsForTheLoop,
            parallelism=1,
            rows=3,
            title="The step waits for its own barrier, and keeps no log",
        ),
        Kind.LOST,
    ),
    "at-least-once": lambda: _shortest(
        _small_loop(wrong_runs.NoLogs, "At least once on a loop, without a log", "at_least_once"), Kind.LOST
    ),
    "order-log": _order,
    "frame-number": _frames,
}
"""File name -> draws it."""
