"""Text files in, running word counts out: a function of a row, a key, an aggregate.

The counts of one word are 1, 2, 3 ... in the table, each exactly once.
"""

from __future__ import annotations

from pathlib import Path

import polars as pl

import cutwater as cw

OUT = Path("out/words").absolute()


def build() -> cw.Dataflow:
    flow = cw.Dataflow("words")
    lines = flow.read("lines", cw.files(OUT / "in", format="csv", schema="line string", header=False, delimiter="\t"))
    words = lines.flat_map("split", lambda row: [{"word": w.lower()} for w in row["line"].split()], "word string")
    words.key_by("word").aggregate("so-far", n=cw.count()).write("counts", cw.files(OUT / "counts"))
    return flow


if __name__ == "__main__":
    (OUT / "in").mkdir(parents=True, exist_ok=True)
    (OUT / "in" / "one.txt").write_text("row row row your boat\ngently down the stream\n")
    job = build().run(checkpoint=OUT / "checkpoints", interval="500ms")
    counts = pl.read_parquet(OUT / "counts" / "*.parquet").group_by("word").agg(pl.max("n")).sort("n", "word")
    print(job.status.outcome, dict(counts.tail(3).iter_rows()))
