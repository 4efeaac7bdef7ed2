"""Contenders in turns: a process for each run, its result checked, its figures gathered as JSON in ``out/bench``."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import peers
from benchmarks.machine import busy_cpus, facts
from benchmarks.processes import ROOT, RunError, run_json
from benchmarks.workload import WrongResultError

__all__ = [
    "OUT",
    "QUICK",
    "Check",
    "Command",
    "Contender",
    "arguments_of",
    "choose",
    "flink_arguments",
    "measure",
    "run_all",
]

OUT = ROOT / "out" / "bench"
_TIMEOUT_S = 300.0
QUICK = 0.1
"""Share of the rows in a quick run."""

Command = Callable[[Path, int], list[str]]
"""``command(folder, rows)``: what one run executes; the folder is its own."""
Check = Callable[[int, dict[str, Any], Path], None]
"""``check(rows, result, folder)`` raises ``WrongResultError``; takes from the result what is no figure."""


@dataclass(frozen=True)
class Contender:
    """One engine at one case.

    Args:
        engine: short name, see ``report``.
        labels: what tells this case from the engine's others, such as ``{"interval": "1 s"}``.
        rows: rows that make a run of several seconds on the machine of the documents.
        command: what a run executes.
        check: what its result has to stand.
    """

    engine: str
    labels: dict[str, str]
    rows: int
    command: Command
    check: Check

    @property
    def name(self) -> str:
        return " ".join([self.engine, *self.labels.values()])


def flink_arguments(folder: Path, rows: int, **more: object) -> list[str]:
    """Arguments of a job on Flink, whose folder is made here; the warm-up is a fifth of the rows."""
    folder.mkdir(parents=True)
    return [f"{name}={value}" for name, value in {"folder": folder, "rows": rows, "warm_up": rows // 5, **more}.items()]


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
        contender.check(rows, result, folder)
    except WrongResultError as e:
        raise WrongResultError(f"{contender.name}, round {round}: {e}") from e
    shutil.rmtree(folder)
    found = {"contender": contender.name, "engine": contender.engine, **contender.labels, "round": round}
    return {**found, "rate": rows / result["seconds"], "others_cpus": others, **result}


def measure(
    contenders: Sequence[Contender], rounds: int, share: float, keep: Callable[[list[dict[str, Any]], int], Any]
) -> None:
    """All contenders in turns, ``rounds`` times.

    Args:
        keep: called behind each round, with the rows of the table's raw data so far and the number of rounds: a long
            measurement may be interrupted.
    """
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="cutwater-bench-") as scratch:
        for round in range(1, rounds + 1):
            for contender in contenders:
                run = run_once(contender, int(contender.rows * share), round, Path(scratch))
                runs.append(run)
                rate, seconds = run["rate"] / 1e6, run["seconds"]
                print(f"round {round}  {contender.name:<20} {rate:8.2f} M events/s  ({seconds:.1f} s)", flush=True)
            keep(runs, round)


def choose(contenders: Sequence[Contender], only: str | None) -> list[Contender]:
    """The contenders one of whose engine, labels and name is in the comma-separated list, without missing peers."""
    wanted = None if only is None else {name.strip() for name in only.split(",")}
    chosen = [c for c in contenders if wanted is None or {c.engine, *c.labels.values(), c.name} & wanted]
    if not chosen:
        sys.exit(f"--only {only}: nothing fits; there are {', '.join(c.name for c in contenders)}")
    install = {"flink": lambda: peers.flink_command("KeyedCount"), "bytewax": peers.bytewax_python}
    missing: set[str] = set()
    for engine in sorted({c.engine for c in chosen} & set(install)):
        try:
            install[engine]()
        except peers.PeerError as e:
            print(f"SKIPPED {engine}: {e}", file=sys.stderr)
            missing.add(engine)
    return [c for c in chosen if c.engine not in missing]


def arguments_of(doc: str | None, rounds: int = 5) -> argparse.ArgumentParser:
    """The options that all benchmarks with contenders have."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--quick", action="store_true", help="one round with a tenth of the rows: does it all work?")
    parser.add_argument("--only", help="engines, cases or contenders, comma-separated: cutwater,'flink 1 s'")
    return parser


def run_all(contenders: Sequence[Contender], arguments: argparse.Namespace, file: str) -> dict[str, Any]:
    """Measure what the arguments ask for, into ``out/bench/<file>.json``; a wrong or failed run ends the program.

    A quick run has a file of its own, ``<file>-quick.json``: it replaces no figures.
    """
    rounds, share = (1, QUICK) if arguments.quick else (arguments.rounds, 1.0)
    data: dict[str, Any] = {}

    def keep(runs: list[dict[str, Any]], round: int) -> None:
        data.update({"machine": facts(), "rounds": round, "share": share, "runs": runs})
        OUT.mkdir(parents=True, exist_ok=True)
        (OUT / f"{file}{'-quick' if arguments.quick else ''}.json").write_text(json.dumps(data, indent=1) + "\n")

    try:
        measure(choose(contenders, arguments.only), rounds, share, keep)
    except (RunError, WrongResultError) as e:
        sys.exit(str(e))
    return data
