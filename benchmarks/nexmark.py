"""Nexmark on Cutwater and Flink SQL, in turns: a table with the geometric mean, and ``out/bench/nexmark.json``.

    python -m benchmarks.nexmark [--rounds 5] [--quick] [--only cutwater,q3]

The queries are those of ``examples/nexmark_queries.py``; on Flink they are SQL (``flink/Nexmark.java``).  Both
read the same rows from files that are mapped into memory.  Every run is a process of its own, and what comes out is
compared with DuckDB over the same rows (``nexmark_check.verify``): a wrong result stops the program.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import peers, report, turns
from benchmarks.processes import EXAMPLES
from benchmarks.turns import Check, Command, Contender

sys.path.insert(0, str(EXAMPLES))

from benchmarks.nexmark_check import Unit, verify
from benchmarks.nexmark_rows import write

__all__ = ["EVENTS", "contenders", "main"]

EVENTS = {
    "q0": (600_000_000, 40_000_000),
    "q1": (600_000_000, 40_000_000),
    "q2": (600_000_000, 40_000_000),
    "q3": (120_000_000, 40_000_000),
    "q4": (24_000_000, 3_000_000),
    "q5": (40_000_000, 6_000_000),
    "q7": (24_000_000, 1_500_000),
    "q8": (120_000_000, 16_000_000),
}
"""Events for Cutwater and for Flink, which make a run of several seconds on the machine of the documents."""
BIDS = 40_000_000
"""The bids of so many events are stored; queries that take one row at a time read them again, in later times."""
AGAIN = ("q0", "q1", "q2")


def _cutwater(query: str, stored: Path) -> Command:
    return lambda folder, events: [
        *(sys.executable, "-m", "benchmarks.nexmark_cutwater", str(folder), query, str(stored)),
        *(str(_whole(events)), str(_whole(events // 8))),
    ]


def _flink(query: str, stored: Path) -> Command:
    def command(folder: Path, events: int) -> list[str]:
        options = {"interval_ms": 1000, "query": query, "tables": stored}
        return [*peers.flink_command("Nexmark"), *turns.flink_arguments(folder, events, **options)]

    return command


def _check(query: str, stored: Path, unit: Unit) -> Check:
    def check(events: int, result: dict[str, Any], folder: Path) -> None:
        verify(stored, query, _whole(events), unit, result)
        result.pop("sums")

    return check


def _whole(events: int) -> int:
    """Events in whole blocks of 50.

    >>> _whole(1_234)
    1200
    """
    return events // 50 * 50


def contenders(stored: Path) -> list[Contender]:
    """Both engines, query by query."""
    found: list[Contender] = []
    for query, (ours, theirs) in EVENTS.items():
        found += [
            Contender("cutwater", {"query": query}, ours, _cutwater(query, stored), _check(query, stored, "us")),
            Contender("flink", {"query": query}, theirs, _flink(query, stored), _check(query, stored, "ms")),
        ]
    return found


def main() -> None:
    arguments = turns.arguments_of(__doc__).parse_args()
    with tempfile.TemporaryDirectory(prefix="cutwater-nexmark-") as stored:
        chosen = turns.choose(contenders(Path(stored)), arguments.only)
        share = turns.QUICK if arguments.quick else 1.0
        other = [c.rows for c in chosen if c.labels["query"] not in AGAIN]
        write(Path(stored), _whole(int(max([BIDS, *other]) * share)), _whole(int(BIDS * share)))
        data = turns.run_all(chosen, arguments, "nexmark")
    print(report.nexmark_table(data))


if __name__ == "__main__":
    main()
