"""Tables and plots of ``benchmarks.protocols``: ratios to a job without snapshots, size and time of a snapshot."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import Any

from benchmarks.svg import line_chart

__all__ = ["plots", "protocol_tables"]

Run = dict[str, Any]


def protocol_tables(data: dict[str, Any]) -> str:
    """All tables, for the documents."""
    parts = [
        "### Cost by interval",
        _ratios(data, "interval", ("protocol", "interval_ms")),
        "![Cost by interval](protocols-interval.svg)",
        "### Cost by number of workers",
        _ratios(data, "workers", ("parallelism", "protocol", "interval_ms")),
        "![Cost by workers](protocols-workers.svg)",
        "### Under backpressure",
        _snapshots(data, "backpressure", ("protocol", "slow_us", "skew")),
        "### Loops",
        _ratios(data, "loop", ("protocol", "interval_ms")),
    ]
    return "\n\n".join(part for part in parts if part)


def plots(data: dict[str, Any]) -> dict[str, str]:
    """SVG by file name."""
    found = {
        "protocols-interval.svg": line_chart(
            "Throughput with snapshots, as a share of the same job without",
            "snapshot interval, ms",
            "share of throughput",
            _lines(data, "interval", "protocol", "interval_ms"),
            log_x=True,
        ),
        "protocols-workers.svg": line_chart(
            "Throughput with aligned snapshots every 100 ms, as a share of the same job without",
            "workers (on the cores of one machine)",
            "share of throughput",
            _lines(data, "workers", "protocol", "parallelism"),
        ),
    }
    return found


def _of(data: dict[str, Any], experiment: str) -> list[Run]:
    return [run for run in data["runs"] if run["experiment"] == experiment]


def share_of_none(runs: Iterable[Run], run: Run) -> float:
    """Throughput as a share of the run without snapshots of the same round and parallelism.

    >>> base = {"protocol": "none", "round": 1, "parallelism": 2, "rate": 10.0}
    >>> share_of_none([base], {**base, "protocol": "aligned", "rate": 9.0})
    0.9
    """
    base = next(
        r
        for r in runs
        if r["protocol"] == "none" and (r["round"], r["parallelism"]) == (run["round"], run["parallelism"])
    )
    return run["rate"] / base["rate"]


def _lines(data: dict[str, Any], experiment: str, line: str, x: str) -> dict[str, list[tuple[float, float]]]:
    runs = _of(data, experiment)
    shares: dict[str, dict[float, list[float]]] = {}
    for run in runs:
        if run["protocol"] != "none":
            shares.setdefault(run[line], {}).setdefault(run[x], []).append(share_of_none(runs, run))
    return {name: sorted((at, median(values)) for at, values in points.items()) for name, points in shares.items()}


def _groups(runs: list[Run], columns: tuple[str, ...]) -> dict[tuple[Any, ...], list[Run]]:
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(run[c] for c in columns), []).append(run)
    return groups


_TITLES = {
    "protocol": "protocol",
    "interval_ms": "interval, ms",
    "parallelism": "workers",
    "slow_us": "sink, us a row",
    "skew": "rows of one key",
}


def _ratios(data: dict[str, Any], experiment: str, columns: tuple[str, ...]) -> str:
    runs = _of(data, experiment)
    if not runs:
        return ""
    lines = _head(columns, "median, M rows/s", "share of none", "min - max", "snapshot, ms", "snapshot, MB")
    for group, mine in _groups(runs, columns).items():
        shares = [share_of_none(runs, run) for run in mine]
        cells = [*_cells(columns, group), f"{median(run['rate'] for run in mine) / 1e6:.1f}"]
        cells += [f"{median(shares):.2f}", f"{min(shares):.2f} - {max(shares):.2f}", *_snapshot_cells(mine)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _snapshots(data: dict[str, Any], experiment: str, columns: tuple[str, ...]) -> str:
    runs = _of(data, experiment)
    if not runs:
        return ""
    lines = _head(columns, "snapshot, ms", "aligned takes", "snapshot, MB", "completed")
    for group, mine in _groups(runs, columns).items():
        completed = str(round(median(run["checkpoints"] for run in mine)))
        duration, size = _snapshot_cells(mine)
        cells = [*_cells(columns, group), duration, _times_aligned(runs, mine), size, completed]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _times_aligned(runs: list[Run], mine: list[Run]) -> str:
    """How many times as long an aligned snapshot of the same job takes, as a median over the rounds."""
    ratios = [
        other["duration_ms"] / run["duration_ms"]
        for run in mine
        for other in runs
        if other["protocol"] == "aligned"
        and all(other[c] == run[c] for c in ("round", "slow_us", "skew"))
        and "duration_ms" in run
        and "duration_ms" in other
    ]
    return f"{median(ratios):.1f}x" if ratios else "-"


def _head(columns: tuple[str, ...], *others: str) -> list[str]:
    titles = [*(_TITLES[c] for c in columns), *others]
    return [f"| {' | '.join(titles)} |", "|---" * len(columns) + "|---:" * len(others) + "|"]


def _cells(columns: tuple[str, ...], group: tuple[Any, ...]) -> list[str]:
    return [f"{value:.0%}" if c == "skew" else str(value or "-") for c, value in zip(columns, group, strict=True)]


def _snapshot_cells(runs: list[Run]) -> list[str]:
    done = [run for run in runs if "size" in run]
    if not done:
        return ["-", "-"]
    return [f"{median(r['duration_ms'] for r in done):.0f}", f"{median(r['size'] for r in done) / 1e6:.2f}"]
