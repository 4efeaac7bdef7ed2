"""A real run written down, judged by a checker that shares nothing with the engine, and drawn.

The picture of one of its checkpoints is in docs/worked-examples.md.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import polars as pl

import cutwater as cw
from cutwater.trace.checker import check
from cutwater.trace.diagram import diagram
from cutwater.trace.events import Cut, Recorded
from cutwater.trace.parts import read_run

OUT = Path("out/traced").absolute()


def build() -> cw.Dataflow:
    """Rows go round a loop over two workers, until nothing is left of them."""
    flow = cw.Dataflow("traced")
    numbers = flow.read("numbers", cw.rate(400, rows=200))
    turn = flow.loop("turn", numbers.select("start", left=pl.col("value") % 6, at=pl.col("value") % 13))
    moved = turn.with_columns("move", at=(pl.col("at") * 7 + 1) % 13)
    turn.feed_back(moved.filter("again", pl.col("left") > 0).with_columns("less", left=pl.col("left") - 1).key_by("at"))
    moved.write("out", cw.files(OUT / "table"))
    return flow


if __name__ == "__main__":
    shutil.rmtree(OUT, ignore_errors=True)
    job = build().run(checkpoint=OUT / "checkpoints", interval="50ms", trace_dir=OUT / "trace")
    trace = read_run([OUT / "trace"])
    result = check(trace, drained=True)
    print(job.status.outcome, "-", result)
    recorded = [event.snapshot for event in trace.events if isinstance(event, Recorded)]
    cuts = [event.snapshot for event in trace.events if isinstance(event, Cut)]
    chosen = max(set(recorded or cuts), key=recorded.count)
    (OUT / "cut.svg").write_text(diagram(trace, snapshot=chosen, notes=[str(result)]))
    print(f"cutwater diagram {OUT / 'trace'} --snapshot {chosen} --check -o cut.svg")
