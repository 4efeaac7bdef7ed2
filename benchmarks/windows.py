"""Count and sum by key in tumbling windows on Cutwater and Flink, in turns: a table and ``out/bench/windows.json``.

    python -m benchmarks.windows [--rounds 5] [--quick] [--only cutwater]

Every run is a process of its own and every result is checked against the closed form (``window_work.verify``): a wrong
one stops the program.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks import peers, report, turns
from benchmarks.turns import Contender
from benchmarks.window_work import verify

__all__ = ["CONTENDERS", "main"]


def _cutwater(folder: Path, rows: int) -> list[str]:
    return [sys.executable, "-m", "benchmarks.windows_cutwater", str(folder), str(rows), str(rows // 8)]


def _flink(folder: Path, rows: int) -> list[str]:
    return [*peers.flink_command("Windows"), *turns.flink_arguments(folder, rows, interval_ms=1000)]


def _check(rows: int, result: dict[str, Any], folder: Path) -> None:
    verify(rows, result)
    result.pop("digest")


CONTENDERS = (
    Contender("cutwater", {"interval": "1 s"}, 200_000_000, _cutwater, _check),
    Contender("flink", {"interval": "1 s"}, 12_000_000, _flink, _check),
)


def main() -> None:
    data = turns.run_all(CONTENDERS, turns.arguments_of(__doc__).parse_args(), "windows")
    print(report.throughput_table(data))


if __name__ == "__main__":
    main()
