"""What the time from nothing to the first output of a new session consists of.

    python -m benchmarks.startup

One ``cutwater run`` of a tiny dataflow in this process, with a mark at each border.  On a machine that does other
things as well, read the shares and not the seconds.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["main"]

_PROGRAM = """
import polars as pl
import cutwater as cw

flow = cw.Dataflow("startup")
rows = flow.read("in", cw.rate(None, rows=1_000)).with_columns("key", key=pl.col("value") % 7)
rows.key_by("key").aggregate("count", n=cw.count()).write("out", cw.discard())
"""


class Marks:
    """Moments in the order of their coming; of each name the first counts."""

    def __init__(self) -> None:
        self.begun_s = time.monotonic()
        self.moments: dict[str, float] = {}

    def mark(self, name: str) -> None:
        self.moments.setdefault(name, time.monotonic())

    def around(self, owner: Any, function: str, before: str = "", after: str = "") -> None:
        """Mark the calls of a function from now on."""
        real: Callable[..., Any] = getattr(owner, function)

        @functools.wraps(real)
        def marked(*args: Any, **named: Any) -> Any:
            if before:
                self.mark(before)
            result = real(*args, **named)
            if after:
                self.mark(after)
            return result

        setattr(owner, function, marked)

    def table(self) -> str:
        """Per phase its seconds and its share."""
        total_s, last_s = max(self.moments.values()) - self.begun_s, self.begun_s
        lines = ["| phase | s | share |", "|---|---:|---:|"]
        for name, moment_s in self.moments.items():
            lines.append(f"| {name} | {moment_s - last_s:.2f} | {(moment_s - last_s) / total_s:.0%} |")
            last_s = moment_s
        return "\n".join(lines)


def main() -> None:
    marks = Marks()
    import pyspark.java_gateway
    import pyspark.sql  # pyright: ignore[reportUnusedImport]

    from cutwater.runtime.driver.worker_group import WorkerGroup
    from cutwater.runtime.status.board import StatusBoard
    from cutwater.spark import session
    from cutwater.ui import cli, run

    marks.mark("imports in the driver: pyspark, polars, pyarrow, numba, cutwater")
    marks.around(run, "start_context", before="program loaded and checked")
    marks.around(pyspark.java_gateway, "launch_gateway", after="Spark's launcher and the Java process")
    marks.around(session, "_launch", after="SparkContext")
    marks.around(WorkerGroup, "launch_all", after="job prepared")
    marks.around(WorkerGroup, "joined", before="Spark's first job; daemon with imports and kernels; a worker")
    marks.around(StatusBoard, "running", after="all workers connected and restored")
    marks.around(StatusBoard, "ended", before="rows, final checkpoint, commit; workers gone")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "startup.py")
        program.write_text(_PROGRAM)
        sys.argv = ["cutwater", "run", str(program), "--json"]
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(sys.stderr):
            cli.main()
    print(marks.table())


if __name__ == "__main__":
    main()
