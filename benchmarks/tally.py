"""A sink that discards rows and adds up what a function says about each batch, for results that sums can check."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa

from benchmarks.probe import Watching
from cutwater.connectors.base import Json, PreCommit, SinkContext

__all__ = ["Found", "Sums", "Tally", "read_tallies"]

Sums: TypeAlias = dict[str, int | float]


@dataclass(frozen=True)
class Tally(Watching):
    """Adds up ``sums(batch)`` over all batches, or, with ``newest_by``, over the newest row of each key.

    A benchmark kills nobody: what a lost incarnation saw is lost, and the check of the result says so.

    Args:
        folder: where each subtask leaves its report.
        sums: numbers about a batch, by name; they are added up.
        newest_by: the column of whose values only the newest row counts (for results that are updated).
    """

    folder: str
    sums: Callable[[pa.RecordBatch], Sums]
    newest_by: str | None = None

    def writer(self, schema: pa.Schema, ctx: SinkContext, restored: list[Json]) -> _TallyWriter:
        return _TallyWriter(self, f"{ctx.subtask}-{ctx.incarnation}")


class _TallyWriter:
    def __init__(self, tally: Tally, name: str) -> None:
        self._tally, self._name = tally, name
        self._rows, self._last_ns = 0, 0
        self._sums: Counter[str] = Counter()
        self._newest: dict[Any, pa.RecordBatch] = {}

    def write(self, batch: pa.RecordBatch) -> None:
        self._rows += batch.num_rows
        if self._tally.newest_by is None:
            self._sums.update(self._tally.sums(batch))
        else:
            places = {key: row for row, key in enumerate(batch.column(self._tally.newest_by).to_pylist())}
            self._newest |= {key: batch.slice(row, 1) for key, row in places.items()}
        self._last_ns = time.monotonic_ns()

    def roll(self) -> None:
        """Nothing is in progress."""

    def pre_commit(self, checkpoint_id: int, final: bool) -> Callable[[], PreCommit]:
        return PreCommit

    def close(self) -> None:
        for batch in self._newest.values():
            self._sums.update(self._tally.sums(batch))
        report = {"rows": self._rows, "last_ns": self._last_ns, "sums": self._sums}
        Path(self._tally.folder, f"tally-{self._name}.json").write_text(json.dumps(report))


@dataclass(frozen=True)
class Found:
    """What all subtasks of a finished run saw."""

    rows: int
    """That came to the sink."""
    sums: Sums
    seconds: float
    """From the first emission of any source subtask to the last batch at any sink subtask."""


def read_tallies(folder: Path) -> Found:
    """The reports of a finished run.

    Raises:
        RuntimeError: no source or no sink left one.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as name:
    ...     for subtask, last_ns in enumerate([7, 2_000_000_005]):
    ...         report = {"rows": 2, "last_ns": last_ns, "sums": {"n": 3 * subtask}}
    ...         _ = Path(name, f"tally-{subtask}-1.json").write_text(json.dumps(report))
    ...         Path(name, f"first-{subtask}-{5 + subtask}").touch()
    ...     read_tallies(Path(name))
    Found(rows=4, sums={'n': 3}, seconds=2.0)
    """
    reports = [json.loads(path.read_text()) for path in folder.glob("tally-*.json")]
    firsts = [int(path.name.split("-")[2]) for path in folder.glob("first-*")]
    if not reports or not firsts:
        raise RuntimeError(f"the run left no reports in {folder}")
    sums: Counter[str] = Counter()
    for report in reports:
        sums.update(report["sums"])
    last_ns = max(report["last_ns"] for report in reports)
    return Found(sum(report["rows"] for report in reports), dict(sums), (last_ns - min(firsts)) / 1e9)
