"""What checkpoints cost our own speed: short jobs of W1 in one session, in turns without and with checkpoints.

    python -m benchmarks.checkpoint_cost [--pairs 12] [--intervals 100ms] [--quick]

Jobs of one session share JVM, workers' parent process and loaded kernels, and a pair takes seconds: little is left of
the machine's moods in the ratio of two jobs side by side.  Each round goes in the opposite order of the one before, so
that warming up favours neither.  Every result is checked against the closed form (``workload.verify``).
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.machine import busy_cpus, facts
from benchmarks.probe import read_reports
from benchmarks.turns import OUT, QUICK
from benchmarks.w1_cutwater import run
from benchmarks.workload import verify

ROWS = 100_000_000
PAIRS = 12
_WARM_UP_ROWS = 20_000_000


def run_once(interval: str, rows: int, folder: Path) -> dict[str, Any]:
    """One verified job; its folder is gone afterwards."""
    checkpoints = run(folder, rows, interval).status.checkpoints
    reports = read_reports(folder)
    verify(rows, reports.rows, folder)
    shutil.rmtree(folder)
    rate = rows / ((reports.last_ns - reports.first_ns) / 1e9)
    return {"interval": interval, "rate": rate, "checkpoints": checkpoints.completed}


def order(round: int, intervals: list[str]) -> list[str]:
    """The jobs of a round, first without checkpoints and then with, every second round the other way about.

    >>> order(1, ["100ms"]), order(2, ["100ms"])
    (['off', '100ms'], ['100ms', 'off'])
    """
    return ["off", *intervals] if round % 2 else [*reversed(intervals), "off"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--intervals", default="100ms", help="comma-separated durations, each against none")
    parser.add_argument("--quick", action="store_true", help="two pairs with a tenth of the rows: does it all work?")
    arguments = parser.parse_args()
    intervals = arguments.intervals.split(",")
    pairs, share = (2, QUICK) if arguments.quick else (arguments.pairs, 1.0)
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="cutwater-bench-") as scratch:
        others = busy_cpus()
        for number, interval in enumerate(order(1, intervals)):
            run_once(interval, int(_WARM_UP_ROWS * share), Path(scratch, f"warm-up-{number}"))
        for round in range(1, pairs + 1):
            for place, interval in enumerate(order(round, intervals)):
                found = run_once(interval, int(ROWS * share), Path(scratch, f"run-{round}-{place}"))
                runs.append({**found, "round": round, "others_cpus": others})
                print(f"round {round}  {interval:<8} {found['rate'] / 1e6:8.2f} M events/s", flush=True)
    data = {"machine": facts(), "rounds": pairs, "share": share, "runs": runs}
    OUT.mkdir(parents=True, exist_ok=True)
    name = f"checkpoint_cost{'-quick' if arguments.quick else ''}.json"
    (OUT / name).write_text(json.dumps(data, indent=1) + "\n")
    print(report.cost_table(data))


if __name__ == "__main__":
    main()
