"""``python -m docs.pictures``: draw all pictures anew, and fill the measured table of the page that shows them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from cutwater.protocol.protocols import PROTOCOLS
from cutwater.protocol.subtask.machine import SubtaskMachine
from cutwater.trace.checker import check
from cutwater.trace.diagram import diagram
from cutwater.trace.events import Trace
from cutwater.trace.result import CheckResult, Kind
from docs.pictures import examples, wrong_runs
from docs.pictures.stage import Stage

RUNS = 200
"""Seeds per line of the table."""


class Tally(NamedTuple):
    """Counts of the outcomes of many runs of a model."""

    runs: int
    wrong: int
    kinds: Counter[Kind]
    stuck: int = 0
    logged: float = 0.0
    """Rows in the logs of a snapshot, on average."""


def quick(stage: Stage) -> CheckResult:
    """Cuts and channels."""
    return check(stage.trace(), quick=True)


class Model(NamedTuple):
    """A line of the table: something wrong, or the right thing beside it."""

    idea: str
    run: Callable[[int], Stage]
    right: bool = False
    oracle: Callable[[Stage], CheckResult] = quick

    def tally(self, runs: int = RUNS) -> Tally:
        """Run it with the seeds 0 to ``runs - 1`` and let the checker judge each."""
        wrong = stuck = logged = 0
        kinds: Counter[Kind] = Counter()
        for stage in map(self.run, range(runs)):
            found = self.oracle(stage).kinds() - {Kind.MARKER}  # where a marker lies is the model's own affair
            wrong += bool(found)
            stuck += not stage.complete
            logged += stage.rows_logged
            kinds.update(found)
        return Tally(runs, wrong, kinds, stuck, logged / runs)


_loop, _graph, _replay, _frames = wrong_runs.self_loop, wrong_runs.random_loops, wrong_runs.replay, wrong_runs.frames

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
    "ring_markers": Model(
        "Chandy-Lamport on the ring", partial(wrong_runs.ring, row=PROTOCOLS["chandy_lamport"]), right=True
    ),
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
        "dropping by row number, order not logged", partial(_replay, logged=False), oracle=wrong_runs.order_oracle
    ),
    "replay_logged": Model(
        "dropping by row number, determinant logged", partial(_replay, logged=True), True, wrong_runs.order_oracle
    ),
    "by_frame_number": Model(
        "dropping by frame number", partial(_frames, by_row=False), oracle=wrong_runs.frames_oracle
    ),
    "by_row_number": Model(
        "dropping and slicing by row number", partial(_frames, by_row=True), True, wrong_runs.frames_oracle
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


def _judged(trace: Trace, result: CheckResult | None = None) -> str:
    """A picture with the checker's first words below."""
    lines = str(result or check(trace)).splitlines()
    return diagram(trace, notes=[line for line in lines if "reordering" not in line][:4])


def _never_reordered() -> str:
    trace = examples.never_occurred()
    return diagram(examples.reordered(trace, examples.reordering_of(trace)), by_time=True)


def _shortest(model: Callable[[int], Stage], kind: Kind) -> str:
    """The shortest of many runs in which the checker finds this kind of mistake."""
    stages = [stage for stage in map(model, range(RUNS)) if kind in quick(stage).kinds()]
    return _judged(min((stage.trace() for stage in stages), key=lambda trace: len(trace.events)))


def _first(model: Callable[[int], Stage], oracle: Callable[[Stage], CheckResult]) -> str:
    """The first of many runs whose output is wrong."""
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
    "order-log": lambda: _first(
        partial(_replay, rows=2, before_crash=2, logged=False), partial(wrong_runs.order_oracle, rows=2)
    ),
    "frame-number": lambda: _first(partial(_frames, rows=6, by_row=False), partial(wrong_runs.frames_oracle, rows=6)),
}
"""File name -> draws it."""

DIRECTORY = Path(__file__).resolve().parent
PAGE = DIRECTORY.parent / "what-does-not-work.md"
_TABLE = re.compile(r"(<!-- measured -->\n).*?(<!-- /measured -->)", re.DOTALL)


def filled(page: str, table: str) -> str:
    """The page with this table."""
    return _TABLE.sub(lambda found: f"{found[1]}{table}\n{found[2]}", page)


def main() -> None:
    """Write everything."""
    for name, draw in PICTURES.items():
        (DIRECTORY / f"{name}.svg").write_text(draw(), encoding="utf-8")
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), measured()), encoding="utf-8")


if __name__ == "__main__":
    main()
