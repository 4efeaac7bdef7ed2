"""W1 on Cutwater, Flink, Bytewax and bare kernels, in turns: a table, ``out/bench/compare.json`` and ``compare.svg``.

    python -m benchmarks.compare [--rounds 5] [--quick] [--only cutwater,flink] [--write-docs]

Every run is a process of its own and every result is checked against the closed form (``workload.verify``): a wrong
one stops the program.  ``--write-docs`` measures nothing; it puts the figures in ``out/bench`` into the documents.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import peers, report
from benchmarks.machine import busy_cpus, facts
from benchmarks.processes import RunError, run_json
from benchmarks.workload import WrongResultError, verify, watch_after

__all__ = ["CONTENDERS", "Contender", "main"]

_TIMEOUT_S = 300.0
_QUICK = 0.1
"""Share of the rows in a quick run."""

Command = Callable[[Path, int], list[str]]


@dataclass(frozen=True)
class Contender:
    """One engine at one checkpoint interval ("off", or a duration).

    ``rows`` make a run of 8 to 10 seconds on the machine of the documents.
    """

    engine: str
    interval: str
    rows: int
    command: Command

    @property
    def name(self) -> str:
        return f"{self.engine} {self.interval}"


def _cutwater(interval: str) -> Command:
    return lambda folder, rows: [
        *(sys.executable, "-m", "benchmarks.w1_cutwater", str(folder), str(rows), interval, str(rows // 8))
    ]


def _flink(interval_ms: int) -> Command:
    def command(folder: Path, rows: int) -> list[str]:
        folder.mkdir(parents=True)
        options = {
            "folder": folder,
            "rows": rows,
            "warm_up": rows // 5,
            "interval_ms": interval_ms,
            "watch_after": watch_after(rows),
        }
        return [*peers.flink_command(), *(f"{name}={value}" for name, value in options.items())]

    return command


def _bytewax(interval_s: float) -> Command:
    return lambda folder, rows: [
        *(peers.bytewax_python(), "benchmarks/w1_bytewax.py", str(folder), str(rows)),
        *(str(interval_s), str(watch_after(rows))),
    ]


def _bare(folder: Path, rows: int) -> list[str]:
    return [sys.executable, "-m", "benchmarks.w1_bare", str(folder), str(rows), str(rows // 8)]


CONTENDERS = (
    Contender("cutwater", "off", 400_000_000, _cutwater("off")),
    Contender("cutwater", "1 s", 400_000_000, _cutwater("1s")),
    Contender("cutwater", "100 ms", 360_000_000, _cutwater("100ms")),
    Contender("flink", "off", 20_000_000, _flink(0)),
    Contender("flink", "1 s", 20_000_000, _flink(1000)),
    Contender("flink", "100 ms", 18_000_000, _flink(100)),
    Contender("bytewax", "off", 2_400_000, _bytewax(0)),
    Contender("bytewax", "1 s", 800_000, _bytewax(1)),
    Contender("kernels", "off", 600_000_000, _bare),
)


def run_once(contender: Contender, rows: int, round: int, scratch: Path) -> dict[str, Any]:
    """One verified run.

    Raises:
        RunError: it failed.
        WrongResultError: its result is wrong.
    """
    folder = scratch / f"{contender.name.replace(' ', '-')}-{round}"
    command = contender.command(folder, rows)
    others = busy_cpus()
    result = run_json(command, _TIMEOUT_S)
    try:
        verify(rows, result["rows"], Path(result.pop("state", folder)))
    except WrongResultError as e:
        raise WrongResultError(f"{contender.name}, round {round}: {e}") from e
    shutil.rmtree(folder)
    return {
        "contender": contender.name,
        "engine": contender.engine,
        "interval": contender.interval,
        "round": round,
        "rate": rows / result["seconds"],
        "others_cpus": others,
        **result,
    }


def measure(contenders: list[Contender], rounds: int, share: float) -> list[dict[str, Any]]:
    """All contenders in turns, ``rounds`` times; the rows of the table's raw data."""
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="cutwater-bench-") as scratch:
        for round in range(1, rounds + 1):
            for contender in contenders:
                run = run_once(contender, int(contender.rows * share), round, Path(scratch))
                runs.append(run)
                rate, seconds = run["rate"] / 1e6, run["seconds"]
                print(f"round {round}  {contender.name:<16} {rate:8.2f} M events/s  ({seconds:.1f} s)", flush=True)
    return runs


def choose(only: str | None) -> list[Contender]:
    """The contenders whose engine or name is in the comma-separated list, without peers that cannot be had here."""
    wanted = None if only is None else {name.strip() for name in only.split(",")}
    chosen = [c for c in CONTENDERS if wanted is None or {c.engine, c.name} & wanted]
    if not chosen:
        sys.exit(f"--only {only}: nothing fits; there are {', '.join(c.name for c in CONTENDERS)}")
    install = {"flink": peers.flink_command, "bytewax": peers.bytewax_python}
    missing: set[str] = set()
    for engine in sorted({c.engine for c in chosen} & set(install)):
        try:
            install[engine]()
        except peers.PeerError as e:
            print(f"SKIPPED {engine}: {e}", file=sys.stderr)
            missing.add(engine)
    return [c for c in chosen if c.engine not in missing]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round with a tenth of the rows: does it all work?")
    parser.add_argument("--only", help="engines or contenders, comma-separated: cutwater,'flink 1 s'")
    parser.add_argument("--write-docs", action="store_true", help="write the figures of out/bench into the documents")
    arguments = parser.parse_args()
    if arguments.write_docs:
        report.write_docs()
        return
    rounds, share = (1, _QUICK) if arguments.quick else (arguments.rounds, 1.0)
    try:
        runs = measure(choose(arguments.only), rounds, share)
    except (RunError, WrongResultError) as e:
        sys.exit(str(e))
    data = {"machine": facts(), "rounds": rounds, "share": share, "runs": runs}
    report.OUT.mkdir(parents=True, exist_ok=True)
    (report.OUT / "compare.json").write_text(json.dumps(data, indent=1) + "\n")
    (report.OUT / "compare.svg").write_text(report.throughput_svg(data))
    print(report.throughput_table(data))


if __name__ == "__main__":
    main()
