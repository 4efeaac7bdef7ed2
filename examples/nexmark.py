"""A query of Nexmark, the benchmark of streaming systems: an auction house with people, auctions and bids.

    python examples/nexmark.py q7 --events 1_000_000

The queries are in nexmark_queries.py, each with the SQL that says what it means; the events in nexmark_data.py.
"""

from __future__ import annotations

import argparse
import shutil

import polars as pl
from nexmark_queries import QUERIES, Tables

import cutwater as cw
from cutwater.spark.session import session


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("query", nargs="?", default="q7", choices=QUERIES)
    parser.add_argument("--events", type=int, default=300_000)
    parser.add_argument("--interval", default="500ms", help="between checkpoints")
    arguments = parser.parse_args()
    query = QUERIES[arguments.query]
    folder = f"out/nexmark/{query.name}"
    shutil.rmtree(folder, ignore_errors=True)

    flow = cw.Dataflow(query.name)
    query.build(Tables(flow, arguments.events)).write("out", cw.files(f"{folder}/rows"))
    job = flow.run(session(2), checkpoint=f"{folder}/checkpoints", interval=arguments.interval)
    rows = pl.read_parquet(f"{folder}/rows/*.parquet")
    print(f"{query.name}, {query.about}: {arguments.events:,} events, {rows.height:,} rows, {job.status.outcome}")
    print(rows.head(10))


if __name__ == "__main__":
    main()
