"""The console sink: the first rows of each checkpoint, printed where the job was started."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa

from cutwater.connectors.base import Guarantee, Json, PreCommit, SinkContext
from cutwater.connectors.discard import NothingToCommit
from cutwater.data.rows import row_contents
from cutwater.errors import ConfigError

CONSOLE_LOGGER = "cutwater.console"
"""Name of the logger whose lines of workers the driver prints as they are."""

_CELL_CHARS = 60


@dataclass(frozen=True)
class ConsoleSink:
    """Prints rows for people to look at, at least once: after a failure some may be shown again.

    It is allowed in exactly-once jobs all the same, because nothing reads what it shows.

    Args:
        rows: how many rows each subtask shows at each checkpoint; of the others only the number.

    Raises:
        ConfigError: below 1.
    """

    rows: int = 20

    for_people_only = True
    """Rows that come twice do no harm."""

    guarantee: ClassVar[Guarantee] = "at-least-once"
    parallelism: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ConfigError(f"rows must be at least 1, got {self.rows}")

    def check(self, schema: pa.Schema) -> None:
        """See ``Sink.check``; any row can be shown."""

    def writer(self, schema: pa.Schema, ctx: SinkContext, restored: list[Json]) -> _ConsoleWriter:
        return _ConsoleWriter(self.rows, schema, ctx)

    def committer(self, schema: pa.Schema, job_uid: str, step: str) -> NothingToCommit:
        return NothingToCommit()


def console(rows: int = 20) -> ConsoleSink:
    """A sink that prints rows where the job was started: ``stream.write("show", cw.console())``.

    Args:
        rows: how many rows each subtask shows at each checkpoint; of the others it shows the number.
    """
    return ConsoleSink(rows)


class _ConsoleWriter:
    def __init__(self, most: int, schema: pa.Schema, ctx: SinkContext) -> None:
        self._most, self._names = most, schema.names
        self._where = f"{ctx.step}, subtask {ctx.subtask}"
        self._rows: list[dict[str, Any]] = []
        self._count = 0
        self._logger = logging.getLogger(CONSOLE_LOGGER)
        self._logger.setLevel(logging.INFO)

    def write(self, batch: pa.RecordBatch) -> None:
        shown = min(self._most - len(self._rows), batch.num_rows)
        self._rows += [row_contents(batch, index) for index in range(shown)]
        self._count += batch.num_rows

    def roll(self) -> None:
        """Nothing is in progress."""

    def pre_commit(self, checkpoint_id: int, final: bool) -> Callable[[], PreCommit]:
        rows, count = self._rows, self._count
        self._rows, self._count = [], 0

        def snapshot() -> PreCommit:
            self._show(f"checkpoint {checkpoint_id}", rows, count)
            return PreCommit()

        return snapshot

    def close(self) -> None:
        """Rows of a job without checkpoints are shown now."""
        self._show("at the end", self._rows, self._count)
        self._rows, self._count = [], 0

    def _show(self, when: str, rows: Sequence[dict[str, Any]], count: int) -> None:
        if count:
            more = f", the first {len(rows)}" if count > len(rows) else ""
            noun = "row" if count == 1 else "rows"
            self._logger.info("%s", f"-- {self._where}, {when}: {count:,} {noun}{more}\n{show_rows(self._names, rows)}")


def show_rows(names: Sequence[str], rows: Sequence[dict[str, Any]]) -> str:
    """Rows as a table of text; numbers stand to the right, long values are cut.

    >>> print(show_rows(["word", "n"], [{"word": "stream", "n": 12}, {"word": None, "n": 3}]))
    word   |  n
    -------+---
    stream | 12
    null   |  3
    """
    cells = [[_cell(row[name]) for name in names] for row in rows]
    widths = [max(len(name), *(len(line[i]) for line in cells)) for i, name in enumerate(names)]
    right = [all(isinstance(row[name], int | float) or row[name] is None for row in rows) for name in names]
    lines = [list(names), *cells]
    text = [
        " | ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True)).rstrip()
        for line in lines
    ]
    return "\n".join([text[0], "-+-".join("-" * width for width in widths), *text[1:]])


def _cell(value: object) -> str:
    text = "null" if value is None else str(value)
    text = text if text.isprintable() else repr(text)[1:-1]
    return text if len(text) <= _CELL_CHARS else f"{text[: _CELL_CHARS - 3]}..."
