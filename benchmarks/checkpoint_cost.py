"""What checkpoints cost our own speed: short jobs of the keyed count, in turns without and with checkpoints.

    python -m benchmarks.checkpoint_cost [--pairs 12] [--intervals 100ms | --scopes task,upstream] [--quick]

With ``--scopes`` it is what a recovery scope costs that logs orders and keeps outputs: checkpoints every second, in
turns with ``recovery="job"`` and with the scope.

Jobs of one session share JVM, workers' parent process and loaded kernels, and a pair takes seconds: little is left of
the machine's moods in the ratio of two jobs side by side.  Each round goes in the opposite order of the one before, so
that warming up favours neither.  Every result is checked against the closed form (``workload.verify``).
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.keyed_count_cutwater import run
from benchmarks.machine import busy_cpus, facts
from benchmarks.probe import read_reports
from benchmarks.turns import OUT, QUICK
from benchmarks.workload import verify
from cutwater.config import RecoveryName

ROWS = 200_000_000
PAIRS = 12
_WARM_UP_ROWS = 20_000_000


@dataclass(frozen=True)
class Case:
    """How a job is started."""

    name: str
    interval: str
    recovery: RecoveryName = "job"


def run_once(case: Case, rows: int, folder: Path) -> dict[str, Any]:
    """One verified job; its folder is gone afterwards."""
    checkpoints = run(folder, rows, case.interval, recovery=case.recovery).status.checkpoints
    reports = read_reports(folder)
    verify(rows, reports.rows, folder)
    shutil.rmtree(folder)
    rate = rows / ((reports.last_ns - reports.first_ns) / 1e9)
    return {"interval": case.name, "rate": rate, "checkpoints": checkpoints.completed}


def order(round: int, cases: list[Case]) -> list[Case]:
    """The jobs of a round, first what the others are compared with, every second round the other way about.

    >>> cases = [Case("off", "off"), Case("100ms", "100ms")]
    >>> [case.name for case in order(1, cases)], [case.name for case in order(2, cases)]
    (['off', '100ms'], ['100ms', 'off'])
    """
    return cases if round % 2 else cases[::-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=PAIRS)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--intervals", default="100ms", help="comma-separated durations, each against none")
    what.add_argument("--scopes", help="comma-separated recovery scopes, each against job")
    parser.add_argument("--quick", action="store_true", help="two pairs with a tenth of the rows: does it all work?")
    arguments = parser.parse_args()
    cases = [Case("off", "off"), *(Case(interval, interval) for interval in arguments.intervals.split(","))]
    varied = "checkpoints"
    if arguments.scopes:
        varied = "recovery"
        cases = [Case(scope, "1s", scope) for scope in ("job", *arguments.scopes.split(","))]
    pairs, share = (2, QUICK) if arguments.quick else (arguments.pairs, 1.0)
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="cutwater-bench-") as scratch:
        others = busy_cpus()
        for case in cases:
            run_once(case, int(_WARM_UP_ROWS * share), Path(scratch, f"warm-up-{case.name}"))
        for round in range(1, pairs + 1):
            for case in order(round, cases):
                found = run_once(case, int(ROWS * share), Path(scratch, f"run-{round}-{case.name}"))
                runs.append({**found, "round": round, "others_cpus": others})
                print(f"round {round}  {case.name:<8} {found['rate'] / 1e6:8.2f} M events/s", flush=True)
    about = {"varied": varied, "base": cases[0].name, "rounds": pairs, "share": share}
    data = {"machine": facts(), **about, "runs": runs}
    OUT.mkdir(parents=True, exist_ok=True)
    name = f"{'scope' if arguments.scopes else 'checkpoint'}_cost{'-quick' if arguments.quick else ''}.json"
    (OUT / name).write_text(json.dumps(data, indent=1) + "\n")
    print(report.cost_table(data))


if __name__ == "__main__":
    main()
