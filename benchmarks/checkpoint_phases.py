"""What checkpoints cost, told within one job: seconds with one every 100 ms and seconds without, in turns.

    python -m benchmarks.checkpoint_phases [--jobs 5] [--interval-ms 100] [--quick]

Two jobs that are the same differ by several per cent: where their memory lies, and who else uses the machine in those
seconds. Neighbouring seconds of one job differ by little else than the checkpoints. The job is the keyed count with an
interval that never comes up; in every other phase checkpoints are asked for (``job.checkpoint()``), each at its time or
when the one before is complete. A phase is compared with the mean of the two around it. Every result is checked against
the closed form (``workload.verify``).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.keyed_count_cutwater import dataflow
from benchmarks.machine import busy_cpus, facts
from benchmarks.probe import read_reports
from benchmarks.turns import OUT, QUICK
from benchmarks.workload import PARALLELISM, verify
from cutwater.api.jobs.job import Job
from cutwater.errors import CutwaterError
from cutwater.spark.session import session

ROWS = 1_400_000_000
PHASE_S = 1.0
_WARM_UP_ROWS = 50_000_000
_BEGINNING = 2
"""Phases that do not count: tables grow, pages are touched for the first time."""
_SETTLING_NS = 30_000_000
"""The beginning of each phase does not count: what the one before left behind is worked off."""


@dataclass(frozen=True)
class Phase:
    """A stretch of a job, in ``time.monotonic_ns``."""

    begin_ns: int
    end_ns: int
    checkpoints_ms: tuple[float, ...]
    """How long each took; none: a phase without."""


def take_turns(job: Job, interval_ms: float) -> list[Phase]:
    """Phases until the job ends; the last one, which it cuts off, is not among them."""
    phases: list[Phase] = []
    try:
        while job.is_active:
            begin_ns, took_ms = time.monotonic_ns(), list[float]()
            due_ns = begin_ns
            while (now_ns := time.monotonic_ns()) < begin_ns + PHASE_S * 1e9:
                if len(phases) % 2:
                    job.checkpoint()
                    took_ms.append((time.monotonic_ns() - now_ns) / 1e6)
                due_ns += int(interval_ms * 1e6)
                time.sleep(max(0.0, due_ns - time.monotonic_ns()) / 1e9)
            phases.append(Phase(begin_ns, time.monotonic_ns(), tuple(took_ms)))
    except CutwaterError:
        pass  # a checkpoint at the end of the job; what went wrong otherwise is told by ``await_termination``
    job.await_termination()
    return phases


def rates_of(phases: list[Phase], batches: Any) -> list[float]:
    """Rows a second of each phase.

    Args:
        phases: of a job.
        batches: array of time (ns) and rows of each batch at the sinks.

    >>> batches = np.array([[100_000_000 * i, 10] for i in range(21)])
    >>> phases = [Phase(0, 1_000_000_000, ()), Phase(1_000_000_000, 2_000_000_000, (30.0,))]
    >>> [round(rate) for rate in rates_of(phases, batches)]
    [100, 100]
    """
    batches = batches[np.argsort(batches[:, 0])]
    times_ns, rows = batches[:, 0], np.cumsum(batches[:, 1])
    found: list[float] = []
    for phase in phases:
        first, last = np.interp([phase.begin_ns + _SETTLING_NS, phase.end_ns], times_ns, rows)
        found.append(float(last - first) / (phase.end_ns - phase.begin_ns - _SETTLING_NS) * 1e9)
    return found


def ratios_of(phases: list[Phase], rates: list[float]) -> list[float]:
    """The speed with checkpoints by that without, of each phase and those around it.

    >>> phases = [Phase(0, 1, took) for took in ((), (30.0,), (), (30.0,))]
    >>> ratios_of(phases, [100.0, 90.0, 110.0, 108.0])
    [0.8571428571428571, 0.9]
    """
    found: list[float] = []
    for i in range(1, len(phases) - 1):
        around = (rates[i - 1] + rates[i + 1]) / 2
        found.append(rates[i] / around if phases[i].checkpoints_ms else around / rates[i])
    return found


def run_once(rows: int, interval_ms: float, folder: Path) -> dict[str, Any]:
    """One verified job."""
    folder.mkdir()
    settings: dict[str, Any] = {"checkpoint": folder / "checkpoints", "parallelism": PARALLELISM, "interval": "1d"}
    job = dataflow(folder, rows, times=True).start(session(PARALLELISM), **settings)
    phases = take_turns(job, interval_ms)
    verify(rows, read_reports(folder).rows, folder)
    batches = np.concatenate([np.fromfile(path, "<i8").reshape(-1, 2) for path in folder.glob("times-*.bin")])
    phases = [phase for phase in phases[_BEGINNING:] if phase.end_ns < batches[:, 0].max()]
    rates = rates_of(phases, batches)
    return {
        "ratios": ratios_of(phases, rates),
        "rates": {
            "off": [rate for rate, phase in zip(rates, phases, strict=True) if not phase.checkpoints_ms],
            "on": [rate for rate, phase in zip(rates, phases, strict=True) if phase.checkpoints_ms],
        },
        "checkpoints_ms": [took for phase in phases for took in phase.checkpoints_ms],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=5)
    parser.add_argument("--interval-ms", type=float, default=100.0)
    parser.add_argument("--quick", action="store_true", help="one short job: does it all work?")
    arguments = parser.parse_args()
    jobs, share = (1, 4 * QUICK) if arguments.quick else (arguments.jobs, 1.0)
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="cutwater-bench-") as scratch:
        others = busy_cpus()
        run_once(int(_WARM_UP_ROWS * share), arguments.interval_ms, Path(scratch, "warm-up"))
        for number in range(1, jobs + 1):
            found = run_once(int(ROWS * share), arguments.interval_ms, Path(scratch, f"run-{number}"))
            runs.append({**found, "others_cpus": others})
            print(f"job {number}: {np.median(found['ratios']):.3f} of {len(found['ratios'])} ratios", flush=True)
    data = {"machine": facts(), "interval_ms": arguments.interval_ms, "share": share, "rounds": jobs, "runs": runs}
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / f"checkpoint_phases{'-quick' if arguments.quick else ''}.json").write_text(json.dumps(data, indent=1) + "\n")
    print(report.phases_table(data))


if __name__ == "__main__":
    main()
