"""Latency of the keyed count at 10,000 events a second, through one shuffle, with checkpoints every second.

    python -m benchmarks.latency [--rounds 3] [--quick] [--only cutwater]

From the emission of a row at the source to its arrival (its count and sum) at the sink, for every row: the source
stamps rows with the machine's monotonic clock, which all processes share.  Beside it Flink with a buffer timeout of
1 ms.  The first seconds of a run warm it up and do not count.  Results are checked as those of ``compare``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import peers, report
from benchmarks.machine import busy_cpus, facts
from benchmarks.probe import BUCKET_NS, STAMPED, Probe, Rows, read_reports
from benchmarks.processes import RunError, run_json
from benchmarks.workload import PARALLELISM, WrongResultError, verify

__all__ = ["main", "percentiles_ms"]

RATE = 10_000
SKIP_S = 5.0
_CHILD = "--run-cutwater"


def run_cutwater(folder: Path, rows: int) -> None:
    """One run in this process; prints its result."""
    import cutwater as cw
    from cutwater.spark.session import session

    flow = cw.Dataflow("latency")
    source = cw.generate(Rows(str(folder), stamped=True), schema=STAMPED, rows=rows, partitions=PARALLELISM, rate=RATE)
    counted = flow.read("gen", source).key_by("k").aggregate("agg", n=cw.count(), s=cw.sum("v"), t=cw.last("t"))
    counted.write("out", Probe(str(folder), latency=True, skip_s=SKIP_S))
    folder.mkdir(parents=True)
    job = flow.run(session(PARALLELISM), checkpoint=folder / "checkpoints", parallelism=PARALLELISM, interval="1s")
    result = {"rows": read_reports(folder).rows, "checkpoints": job.status.checkpoints.completed}
    print("RESULT", json.dumps(result), flush=True)


def percentiles_ms(folder: Path) -> dict[str, Any]:
    """Percentiles over all sink subtasks; a value is the upper bound of its bucket (0.01 ms wide).

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as name:
    ...     histogram = np.zeros(1000, "<i8")
    ...     histogram[[99, 499]] = 99, 1
    ...     histogram.tofile(Path(name, "latency-0.bin"))
    ...     percentiles_ms(Path(name))
    {'counted': 100, 'p50_ms': 1.0, 'p99_ms': 1.0, 'p999_ms': 5.0, 'max_ms': 5.0}
    """
    histogram = np.sum([np.fromfile(path, "<i8") for path in folder.glob("latency-*.bin")], axis=0)
    reached = np.cumsum(histogram)
    total = int(reached[-1])
    result: dict[str, Any] = {"counted": total}
    for name, share in (("p50_ms", 0.5), ("p99_ms", 0.99), ("p999_ms", 0.999), ("max_ms", 1.0)):
        bucket = int(np.searchsorted(reached, np.ceil(total * share)))
        result[name] = round((bucket + 1) * BUCKET_NS / 1e6, 2)
    return result


def run_once(engine: str, rows: int, round: int, scratch: Path) -> dict[str, Any]:
    """One verified run of one engine."""
    folder = scratch / f"{engine}-{round}"
    if engine == "cutwater":
        command = [sys.executable, "-m", "benchmarks.latency", _CHILD, str(folder), str(rows)]
    else:
        folder.mkdir()
        options = f"rows={rows} rate={RATE} interval_ms=1000 buffer_timeout_ms=1 skip_s={SKIP_S} watch_after=0".split()
        command = [*peers.flink_command("KeyedCount"), f"folder={folder}", *options]
    others = busy_cpus()
    result = run_json(command, rows / RATE + 120)
    verify(rows, result["rows"], folder)
    return {"engine": engine, "round": round, "others_cpus": others, **result, **percentiles_ms(folder)}


def main() -> None:
    if sys.argv[1:2] == [_CHILD]:
        run_cutwater(Path(sys.argv[2]), int(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--only", choices=["cutwater", "flink"])
    arguments = parser.parse_args()
    rounds, seconds = (1, SKIP_S + 5) if arguments.quick else (arguments.rounds, SKIP_S + 20)
    engines = [arguments.only] if arguments.only else ["cutwater", "flink"]
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="cutwater-bench-") as scratch:
        for round in range(1, rounds + 1):
            for engine in list(engines):
                try:
                    run = run_once(engine, int(RATE * seconds), round, Path(scratch))
                except peers.PeerError as e:
                    print(f"SKIPPED {engine}: {e}", file=sys.stderr)
                    engines.remove(engine)
                    continue
                except (RunError, WrongResultError) as e:
                    sys.exit(f"{engine}, round {round}: {e}")
                runs.append(run)
                print(f"round {round}  {engine:<9} p50 {run['p50_ms']:.2f} ms  p99 {run['p99_ms']:.2f} ms", flush=True)
    data = {"machine": facts(), "rounds": rounds, "share": 0.2 if arguments.quick else 1.0, "runs": runs}
    report.OUT.mkdir(parents=True, exist_ok=True)
    (report.OUT / "latency.json").write_text(json.dumps(data, indent=1) + "\n")
    print(report.latency_table(data))


if __name__ == "__main__":
    main()
