"""The keyed count on Cutwater, Flink, Bytewax and bare kernels, in turns: a table, ``compare.json``, ``compare.svg``.

    python -m benchmarks.compare [--rounds 5] [--quick] [--only cutwater,flink] [--write-docs]

Every run is a process of its own and every result is checked against the closed form (``workload.verify``): a wrong
one stops the program.  ``--write-docs`` measures nothing; it puts the figures in ``out/bench`` into the documents.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks import peers, report, turns
from benchmarks.turns import Command, Contender
from benchmarks.workload import verify, watch_after

__all__ = ["CONTENDERS", "main"]


def _cutwater(interval: str, keys: str) -> Command:
    return lambda folder, rows: [
        *(sys.executable, "-m", "benchmarks.keyed_count_cutwater"),
        *(str(folder), str(rows), interval, str(rows // 8), keys),
    ]


def _flink(interval_ms: int, keys: str) -> Command:
    def command(folder: Path, rows: int) -> list[str]:
        options = {"interval_ms": interval_ms, "watch_after": watch_after(rows), "keys": keys}
        return [*peers.flink_command("KeyedCount"), *turns.flink_arguments(folder, rows, **options)]

    return command


def _bytewax(interval_s: float) -> Command:
    return lambda folder, rows: [
        *(peers.bytewax_python(), "benchmarks/keyed_count_bytewax.py", str(folder), str(rows)),
        *(str(interval_s), str(watch_after(rows))),
    ]


def _bare(folder: Path, rows: int) -> list[str]:
    return [sys.executable, "-m", "benchmarks.keyed_count_bare", str(folder), str(rows), str(rows // 8)]


def _check(rows: int, result: dict[str, Any], folder: Path) -> None:
    verify(rows, result["rows"], Path(result.pop("state", folder)))


def _contender(engine: str, interval: str, rows: int, command: Command, keys: str = "int64") -> Contender:
    labels = {"interval": interval} if keys == "int64" else {"interval": interval, "keys": keys}
    return Contender(engine, labels, rows, command, _check)


CONTENDERS = (
    _contender("cutwater", "off", 400_000_000, _cutwater("off", "int64")),
    _contender("cutwater", "1 s", 400_000_000, _cutwater("1s", "int64")),
    _contender("cutwater", "100 ms", 360_000_000, _cutwater("100ms", "int64")),
    _contender("flink", "off", 20_000_000, _flink(0, "int64")),
    _contender("flink", "1 s", 20_000_000, _flink(1000, "int64")),
    _contender("flink", "100 ms", 18_000_000, _flink(100, "int64")),
    _contender("bytewax", "off", 2_400_000, _bytewax(0)),
    _contender("bytewax", "1 s", 800_000, _bytewax(1)),
    _contender("kernels", "off", 600_000_000, _bare),
    _contender("cutwater", "off", 300_000_000, _cutwater("off", "text"), "text"),
    _contender("cutwater", "1 s", 300_000_000, _cutwater("1s", "text"), "text"),
    _contender("flink", "off", 15_000_000, _flink(0, "text"), "text"),
    _contender("flink", "1 s", 15_000_000, _flink(1000, "text"), "text"),
)


def main() -> None:
    parser = turns.arguments_of(__doc__)
    parser.add_argument("--write-docs", action="store_true", help="write the figures of out/bench into the documents")
    arguments = parser.parse_args()
    if arguments.write_docs:
        report.write_docs()
        return
    data = turns.run_all(CONTENDERS, arguments, "compare")
    if not arguments.quick and report.with_keys(data, "int64")["runs"]:
        (report.OUT / "compare.svg").write_text(report.throughput_svg(data))
    for keys in ("int64", "text"):
        if report.with_keys(data, keys)["runs"]:
            print(f"keys: {keys}", report.throughput_table(report.with_keys(data, keys)), sep="\n")


if __name__ == "__main__":
    main()
