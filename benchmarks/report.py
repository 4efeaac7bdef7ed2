"""From raw runs (JSON in ``out/bench``) to tables, a plot, and the documents between their markers."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from statistics import geometric_mean, mean, median, quantiles, stdev
from typing import Any

from benchmarks.machine import QUIET_CPUS
from benchmarks.processes import ROOT
from benchmarks.protocol_report import plots, protocol_tables
from benchmarks.svg import bar_chart
from benchmarks.turns import OUT

__all__ = [
    "OUT",
    "cost_table",
    "latency_table",
    "nexmark_table",
    "phases_table",
    "real_input_table",
    "recovery_table",
    "section",
    "throughput_svg",
    "throughput_table",
    "with_keys",
    "write_docs",
]

DOCUMENTS = (ROOT / "docs" / "benchmarks.md", ROOT / "README.md")
PLOT = ROOT / "docs" / "benchmarks.svg"
_NAMES = {"cutwater": "Cutwater", "flink": "Flink (Java)", "bytewax": "Bytewax", "kernels": "bare kernels, no engine"}


def with_keys(data: dict[str, Any], keys: str) -> dict[str, Any]:
    """The same data with only the runs whose keys are of this type.

    >>> [run["rate"] for run in with_keys({"runs": [{"rate": 1.0}, {"rate": 2.0, "keys": "text"}]}, "text")["runs"]]
    [2.0]
    """
    return {**data, "runs": [run for run in data["runs"] if run.get("keys", "int64") == keys]}


def rates(data: dict[str, Any]) -> dict[tuple[str, str], list[float]]:
    """Events per second of all runs by (engine, interval), in the order in which they were measured."""
    found: dict[tuple[str, str], list[float]] = {}
    for run in data["runs"]:
        found.setdefault((run["engine"], run["interval"]), []).append(run["rate"])
    return found


def throughput_table(data: dict[str, Any]) -> str:
    """Median, range, and the ratio to Flink at the same interval.

    >>> run = {"engine": "flink", "interval": "1 s", "rate": 2e6, "others_cpus": 0.0, "checkpoints": 7}
    >>> runs = [run, {**run, "engine": "cutwater", "rate": 40e6}]
    >>> print(throughput_table({"runs": runs, "share": 1.0}).splitlines()[2])
    | Cutwater | 1 s | 40.00 | 40.00 - 40.00 | 20x | 7 |
    """
    lines = [
        "| engine | checkpoints | median, M events/s | min - max | ratio to Flink | checkpoints completed |",
        "|---|---|---:|---:|---:|---:|",
    ]
    measured = rates(data)
    for (engine, interval), values in measured.items():
        flink = measured.get(("flink", interval))
        ratio = _ratio(median(values) / median(flink)) if flink else "-"
        same = [run for run in data["runs"] if (run["engine"], run["interval"]) == (engine, interval)]
        counts = [run["checkpoints"] for run in same if "checkpoints" in run]
        lines.append(
            f"| {_NAMES[engine]} | {interval} | {_millions(median(values))} | "
            f"{_millions(min(values))} - {_millions(max(values))} | {ratio} | "
            f"{round(median(counts)) if counts and interval != 'off' else '-'} |"
        )
    ordered = [*lines[:2], *sorted(lines[2:], key=_order)]
    return "\n".join([*ordered, "", _circumstances(data)])


def _order(line: str) -> int:
    return next(i for i, name in enumerate(_NAMES.values()) if line.startswith(f"| {name} "))


def summary_table(data: dict[str, Any]) -> str:
    """Medians only, engines by intervals: for the README."""
    measured = rates(data)
    intervals = [i for i in ("off", "1 s", "100 ms") if any(key[1] == i for key in measured)]
    lines = [
        "| M events/s, checkpoints | " + " | ".join(intervals) + " |",
        "|---" + "|---:" * len(intervals) + "|",
    ]
    for engine, name in _NAMES.items():
        cells = [_millions(median(measured[engine, i])) if (engine, i) in measured else "-" for i in intervals]
        if any(cell != "-" for cell in cells):
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", _circumstances(data)])


def throughput_svg(data: dict[str, Any]) -> str:
    """Bars of the medians with their ranges, on a logarithmic scale."""
    bars = [
        (f"{_NAMES[engine]}" + ("" if engine == "kernels" else f", {_spoken(interval)}"), values, engine == "cutwater")
        for (engine, interval), values in rates(with_keys(data, "int64")).items()
    ]
    bars.sort(key=lambda bar: -median(bar[1]))
    return bar_chart("Keyed running count and sum, events per second (logarithmic)", bars)


def _spoken(interval: str) -> str:
    return "no checkpoints" if interval == "off" else f"checkpoints every {interval}"


def latency_table(data: dict[str, Any]) -> str:
    """Percentiles per engine, medians over the rounds."""
    lines = ["| engine | p50, ms | p99, ms | p99.9, ms | max, ms | rows |", "|---|---:|---:|---:|---:|---:|"]
    engines = dict.fromkeys(run["engine"] for run in data["runs"])
    for engine in engines:
        runs = [run for run in data["runs"] if run["engine"] == engine]
        cells = [f"{median(run[name] for run in runs):.2f}" for name in ("p50_ms", "p99_ms", "p999_ms", "max_ms")]
        lines.append(f"| {_NAMES[engine]} | {' | '.join(cells)} | {sum(run['counted'] for run in runs):,} |")
    return "\n".join([*lines, "", _circumstances(data)])


def real_input_table(data: dict[str, Any]) -> str:
    """Medians by format and engine, and the ratios to Spark's and DuckDB's.

    >>> runs = [{"kind": "csv", "engine": e, "rate": r, "checkpoints": 5, "others_cpus": 0.0} for e, r in
    ...         (("cutwater", 6e6), ("spark", 1e6), ("duckdb", 8e6))]
    >>> print(real_input_table({"runs": runs, "share": 1.0}).splitlines()[2])
    | csv | 6.00 | 1.00 | 8.00 | 6.0 | 0.75 | 5 |
    """
    heads = ("files", "Cutwater", "Spark", "DuckDB, no engine", "of Spark's", "of DuckDB's", "checkpoints")
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1)]
    for kind in dict.fromkeys(run["kind"] for run in data["runs"]):
        runs = [run for run in data["runs"] if run["kind"] == kind]
        rate = {e: median(r["rate"] for r in runs if r["engine"] == e) for e in ("cutwater", "spark", "duckdb")}
        checkpoints = min(run["checkpoints"] for run in runs if run["engine"] == "cutwater")
        ratios = f"{rate['cutwater'] / rate['spark']:.1f} | {rate['cutwater'] / rate['duckdb']:.2f}"
        lines.append(f"| {kind} | {' | '.join(map(_millions, rate.values()))} | {ratios} | {checkpoints} |")
    return "\n".join([*lines, "", _circumstances(data)])


def recovery_table(data: dict[str, Any]) -> str:
    """Median and range of each time that was measured, in seconds."""
    lines = ["| from ... to ... | median, s | min - max, s | times |", "|---|---:|---:|---:|"]
    for name, seconds in data["times"].items():
        lines.append(f"| {name} | {median(seconds):.2f} | {min(seconds):.2f} - {max(seconds):.2f} | {len(seconds)} |")
    return "\n".join([*lines, "", _circumstances(data)])


def cost_table(data: dict[str, Any]) -> str:
    """Medians by interval (or scope), and the ratio of each job to the one of its round that is the base.

    >>> rates = {"off": (40e6, 50e6, 40e6), "100ms": (38e6, 45e6, 40e6)}
    >>> runs = [
    ...     {"interval": name, "rate": rate, "round": n, "checkpoints": 9, "others_cpus": 0.0}
    ...     for name, values in rates.items() for n, rate in enumerate(values)
    ... ]
    >>> data = {"runs": runs, "share": 1.0, "varied": "checkpoints", "base": "off"}
    >>> print(cost_table(data).splitlines()[3])
    | 100ms | 40.00 (38.00 - 45.00) | 0.95 | 0.93 - 0.97 | 9 |
    """
    lines = [
        f"| {data['varied']} | median, M events/s (min - max) | median of paired ratios | quartiles | checkpoints |",
        "|---|---:|---:|---:|---:|",
    ]
    without = {run["round"]: run["rate"] for run in data["runs"] if run["interval"] == data["base"]}
    for interval in dict.fromkeys(run["interval"] for run in data["runs"]):
        same = [run for run in data["runs"] if run["interval"] == interval]
        ratios = [run["rate"] / without[run["round"]] for run in same]
        low, middle, high = quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        cells = ["1", "-", "-"]
        if interval != data["base"]:
            cells = [f"{middle:.2f}", f"{low:.2f} - {high:.2f}", str(round(median(r["checkpoints"] for r in same)))]
        lines.append(f"| {interval} | {_with_range([run['rate'] for run in same])} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", _circumstances(data)])


def phases_table(data: dict[str, Any]) -> str:
    """Speed with and without checkpoints, of phases of one job that follow each other.

    >>> run = {"ratios": [0.9, 0.92, 1.0], "rates": {"off": [50e6], "on": [45e6]}, "checkpoints_ms": [30, 40]}
    >>> data = {"runs": [{**run, "others_cpus": 0.0}], "share": 1.0, "interval_ms": 100.0}
    >>> print(phases_table(data).splitlines()[2])
    | 100 ms | 50.00 | 45.00 | 0.92 (0.91 - 0.96) | 0.940 ± 0.031 | 3 | 35 |
    """
    runs = data["runs"]
    ratios = [ratio for run in runs for ratio in run["ratios"]]
    low, middle, high = quantiles(ratios, n=4, method="inclusive")
    error = stdev(ratios) / len(ratios) ** 0.5
    without, with_them = (median(rate for run in runs for rate in run["rates"][kind]) / 1e6 for kind in ("off", "on"))
    took = median(ms for run in runs for ms in run["checkpoints_ms"])
    cells = [f"{data['interval_ms']:.0f} ms", f"{without:.2f}", f"{with_them:.2f}"]
    cells += [f"{middle:.2f} ({low:.2f} - {high:.2f})", f"{mean(ratios):.3f} ± {error:.3f}"]
    cells += [str(len(ratios)), f"{took:.0f}"]
    head = "| checkpoints every | without, M events/s | with, M events/s | median of ratios (quartiles) | mean "
    head += "| ratios | a checkpoint takes, ms |"
    lines = [head, "|---|---:|---:|---:|---:|---:|---:|", f"| {' | '.join(cells)} |"]
    return "\n".join([*lines, "", _circumstances(data)])


def nexmark_table(data: dict[str, Any]) -> str:
    """Medians by query, the ratio, and the geometric mean of the ratios.

    >>> run = {"engine": "flink", "query": "q0", "rate": 1e6, "others_cpus": 0.0}
    >>> runs = [run, {**run, "engine": "cutwater", "rate": 2e6}]
    >>> runs += [{**run, "query": "q1"}, {**run, "query": "q1", "engine": "cutwater", "rate": 8e6}]
    >>> for line in nexmark_table({"runs": runs, "share": 1.0}).splitlines()[2:5]: print(line)
    | q0 | 2.00 (2.00 - 2.00) | 1.00 (1.00 - 1.00) | 2.00x |
    | q1 | 8.00 (8.00 - 8.00) | 1.00 (1.00 - 1.00) | 8.00x |
    | geometric mean | | | 4.00x |
    """
    lines = ["| query | Cutwater, M events/s | Flink SQL, M events/s | ratio |", "|---|---:|---:|---:|"]
    measured: dict[str, dict[str, list[float]]] = {}
    for run in data["runs"]:
        measured.setdefault(run["query"], {}).setdefault(run["engine"], []).append(run["rate"])
    ratios: list[float] = []
    for query, rates_of in measured.items():
        cells = [_with_range(rates_of[engine]) if engine in rates_of else "-" for engine in ("cutwater", "flink")]
        if len(rates_of) == 2:
            ratios.append(median(rates_of["cutwater"]) / median(rates_of["flink"]))
        lines.append(f"| {query} | {' | '.join(cells)} | {_ratio(ratios[-1]) if len(rates_of) == 2 else '-'} |")
    if ratios:
        lines.append(f"| geometric mean | | | {_ratio(geometric_mean(ratios))} |")
    return "\n".join([*lines, "", _circumstances(data)])


def _with_range(values: list[float]) -> str:
    return f"{_millions(median(values))} ({_millions(min(values))} - {_millions(max(values))})"


def machine_text(data: dict[str, Any]) -> str:
    m = data["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in m["versions"].items())
    return (
        f"{m['cores']} cores of {m['cpu']}, {m['memory_gib']} GiB, Linux {m['kernel']}; "
        f"Python {m['python']}, {m['java'] or 'no Java'}; {versions}."
    )


def write_docs() -> None:
    """Put tables between ``<!-- bench:NAME -->`` and ``<!-- /bench:NAME -->`` in the documents; copy the plot."""
    written: list[str] = []
    for path in DOCUMENTS:
        if path.exists():
            text = path.read_text()
            filled = fill_markers(text, section)
            if filled != text:
                path.write_text(filled)
                written.append(str(path.relative_to(ROOT)))
    if section("throughput") is not None and (OUT / "compare.svg").exists():
        shutil.copyfile(OUT / "compare.svg", PLOT)
        written.append(str(PLOT.relative_to(ROOT)))
    if section("protocols") is not None:
        for name, plot in plots(json.loads((OUT / "protocols.json").read_text())).items():
            PLOT.with_name(name).write_text(plot)
            written.append(str(PLOT.with_name(name).relative_to(ROOT)))
    print("wrote " + (", ".join(written) or "nothing: no marker needed it"))


def fill_markers(text: str, section: Callable[[str], str | None]) -> str:
    """Replace what lies between markers; ``section`` gives the text for a name, None to leave it as it is.

    >>> print(fill_markers("a <!-- bench:x -->old<!-- /bench:x --> b", str.upper))
    a <!-- bench:x -->
    X
    <!-- /bench:x --> b
    """

    def replaced(found: re.Match[str]) -> str:
        body = section(found[1])
        return found[0] if body is None else f"<!-- bench:{found[1]} -->\n{body}\n<!-- /bench:{found[1]} -->"

    return re.sub(r"<!-- bench:(\w+) -->.*?<!-- /bench:\1 -->", replaced, text, flags=re.DOTALL)


def _throughput_section(data: dict[str, Any]) -> str:
    return f"{throughput_table(with_keys(data, 'int64'))}\n\n![Throughput by engine](benchmarks.svg)"


_SECTIONS: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "machine": ("compare", machine_text),
    "throughput": ("compare", _throughput_section),
    "strings": ("compare", lambda data: throughput_table(with_keys(data, "text"))),
    "windows": ("windows", throughput_table),
    "cost": ("checkpoint_cost", cost_table),
    "phases": ("checkpoint_phases", phases_table),
    "scopes": ("scope_cost", cost_table),
    "nexmark": ("nexmark", nexmark_table),
    "summary": ("compare", lambda data: summary_table(with_keys(data, "int64"))),
    "latency": ("latency", latency_table),
    "recovery": ("recovery", recovery_table),
    "real": ("real_input", real_input_table),
    "protocols": ("protocols", lambda data: f"{protocol_tables(data)}\n\n{_circumstances(data)}"),
}


def section(name: str) -> str | None:
    """The text of a section of the documents from the figures in ``out/bench``; None to leave it as it is."""
    if name not in _SECTIONS:
        sys.exit(f"the documents have a marker bench:{name}; there are {', '.join(_SECTIONS)}")
    file, render = _SECTIONS[name]
    path = OUT / f"{file}.json"
    if not path.exists():
        print(f"bench:{name} stays as it is: {path.relative_to(ROOT)} was not measured here", file=sys.stderr)
        return None
    data = json.loads(path.read_text())
    if data["share"] != 1.0:
        print(f"bench:{name} stays as it is: {path.relative_to(ROOT)} is of short runs", file=sys.stderr)
        return None
    return render(data)


def _circumstances(data: dict[str, Any]) -> str:
    """How to take the figures: rounds, length, and whether the machine was quiet."""
    others = median(run["others_cpus"] for run in data["runs"])
    notes: list[str] = []
    if "machine" in data:
        notes.append(f"{data['machine']['date']}, {data['rounds']} round{'s' if data['rounds'] != 1 else ''}")
    if data["share"] != 1.0:
        notes.append(f"**short runs** ({data['share']:.0%} of the length): a check that it works, not a measurement")
    if others > QUIET_CPUS:
        notes.append(f"**measured while other work ran** ({others:.1f} CPUs of it between the runs)")
    return "; ".join(notes) + ("." if notes else "")


def _millions(rate: float) -> str:
    return f"{rate / 1e6:.2f}"


def _ratio(value: float) -> str:
    return f"{value:.0f}x" if value >= 10 else f"{value:.2f}x"
