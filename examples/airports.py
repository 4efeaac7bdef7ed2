"""The graph of the airports of 2013, kept up to date while routes open and close: three loops in one dataflow.

A route is there in a month if somebody flew it in that month.  Cutwater keeps, for each airport, the component it
belongs to (of all routes ever flown), the number of flights to take from JFK, and the shortest way from JFK in miles,
both over the routes of the day.  Each airport tells its neighbours what it knows; what they learn goes round the loop
until nobody learns anything new.  The job ends by itself: a snapshot has found every loop empty.

    python examples/airports.py            one worker is killed on the way; the result is compared with NetworkX
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flights_data
import networkx as nx
import polars as pl

import cutwater as cw

OUT = Path("out/airports").absolute()
HUB = "JFK"
Row = dict[str, Any]

MESSAGE = "airport string, peer string, kind string, miles long, text string, number long"
"""To ``airport``, about or from ``peer``: kind "opened", "closed", or "heard" (what the peer knows)."""

RESULT = "airport string, version long, text string, number long"
"""What is known of an airport; the highest version counts.  Versions are 1, 2, 3 ..., each exactly once."""


class _Airport(cw.ProcessFunction):
    """One airport: the routes it has, what it heard over them, what it knows.  Subclasses say how it learns."""

    routes = cw.MapState("string", "long")
    version = cw.ValueState("long")

    def tell(self, ctx: cw.ProcessContext, peers: list[str], **known: Any) -> Iterator[Row]:
        for peer in peers:
            yield {"airport": peer, "peer": ctx.key, "kind": "heard", "miles": 0, **known}

    def publish(self, ctx: cw.ProcessContext, **known: Any) -> None:
        self.version.value = self.version.get(0) + 1
        ctx.emit("known", {"airport": ctx.key, "version": self.version.value, **known})


class Component(_Airport):
    """The least name of all airports that can be reached over routes ever flown."""

    least = cw.ValueState("string")

    def process(self, row: Row, ctx: cw.ProcessContext) -> Iterator[Row]:
        if row["kind"] == "closed":
            return
        before = self.least.value
        self.least.value = min(ctx.key, before or ctx.key, row["text"] or ctx.key)
        if row["kind"] == "opened":
            self.routes[row["peer"]] = row["miles"]
        if self.least.value != before:
            self.publish(ctx, text=self.least.value)
            yield from self.tell(ctx, list(self.routes), text=self.least.value)
        elif row["kind"] == "opened":
            yield from self.tell(ctx, [row["peer"]], text=before)


class Distance(_Airport):
    """How far it is from the hub over the routes of the day; ``limit`` and more means that no way is left.

    Every airport keeps what each peer told it last, and takes the best over the routes that it has.  When a way is
    lost, airports that went through each other count upwards until they find another way or come to the limit.
    """

    heard = cw.MapState("string", "long")
    known = cw.ValueState("long")

    def __init__(self, limit: int, *, flights: bool) -> None:
        self.limit, self.flights = limit, flights

    def process(self, row: Row, ctx: cw.ProcessContext) -> Iterator[Row]:
        peer = row["peer"]
        if row["kind"] == "heard":
            self.heard[peer] = row["number"]
        elif row["kind"] == "opened":
            self.routes[peer] = 1 if self.flights else row["miles"]
        else:
            self.routes.pop(peer, None)
        ways = [self.heard.get(peer, self.limit) + length for peer, length in self.routes.items()]
        best = 0 if ctx.key == HUB else min([*ways, self.limit])
        if best != self.known.value:
            self.known.value = best
            self.publish(ctx, number=best)
            yield from self.tell(ctx, list(self.routes), number=best)
        elif row["kind"] == "opened":
            yield from self.tell(ctx, [peer], number=best)


def build(changes: object, out: Path) -> cw.Dataflow:
    """Routes that open and close in, three tables out."""
    flow = cw.Dataflow("airports")
    routes = flow.read("routes", changes)
    both_ends = routes.flat_map("both-ends", _both_ends, MESSAGE)
    functions = {
        "components": Component(),
        "flights": Distance(150, flights=True),
        "miles": Distance(20_000, flights=False),
    }
    for name, function in functions.items():
        news = flow.loop(f"{name}-news", both_ends)
        airports = news.key_by("airport").process(name, function, MESSAGE, side={"known": RESULT})
        news.feed_back(airports)
        airports.side("known").write(f"{name}-out", cw.files(out / name))
    return flow


def _both_ends(row: Row) -> Iterator[Row]:
    for airport, peer in ((row["origin"], row["destination"]), (row["destination"], row["origin"])):
        yield {"airport": airport, "peer": peer, "kind": row["kind"], "miles": row["miles"]}


def route_changes() -> pl.DataFrame:
    """Routes in the order in which they opened and closed, month by month."""
    with zipfile.ZipFile(flights_data.package_folder() / "flights.csv.zip") as archive:
        flights = pl.read_csv(archive.read("flights.csv"), columns=["month", "origin", "dest", "distance"])
    flown = flights.select("month", "origin", destination="dest", miles="distance").unique().sort(pl.all())
    changes: list[Row] = []
    open_routes: dict[tuple[str, str], int] = {}
    for (_,), of_month in flown.group_by("month", maintain_order=True):
        now = {(r["origin"], r["destination"]): r["miles"] for r in of_month.iter_rows(named=True)}
        for kind, routes in (("closed", open_routes.keys() - now), ("opened", now.keys() - open_routes)):
            miles = {**open_routes, **now}
            changes += [{"kind": kind, "origin": a, "destination": b, "miles": miles[a, b]} for a, b in sorted(routes)]
        open_routes = now
    return pl.DataFrame(changes)


def expected(changes: pl.DataFrame) -> dict[str, dict[str, Any]]:
    """The three tables by NetworkX."""
    ever, today = nx.Graph(), nx.Graph()
    for row in changes.iter_rows(named=True):
        ever.add_edge(row["origin"], row["destination"])
        if row["kind"] == "opened":
            today.add_edge(row["origin"], row["destination"], miles=row["miles"])
        else:
            today.remove_edge(row["origin"], row["destination"])
    flights = nx.single_source_shortest_path_length(today, HUB)
    miles = nx.single_source_dijkstra_path_length(today, HUB, weight="miles")
    return {
        "components": {airport: min(group) for group in nx.connected_components(ever) for airport in group},
        "flights": {airport: flights.get(airport, 150) for airport in ever},
        "miles": {airport: miles.get(airport, 20_000) for airport in ever},
    }


def found(out: Path) -> dict[str, dict[str, Any]]:
    """The last version of each airport; every version must be there exactly once."""
    tables: dict[str, dict[str, Any]] = {}
    for name, column in (("components", "text"), ("flights", "number"), ("miles", "number")):
        rows = pl.read_parquet(out / name / "*.parquet").sort("airport", "version")
        versions = rows.group_by("airport").agg(pl.col("version"))
        for airport, seen in versions.iter_rows():
            assert seen == list(range(1, len(seen) + 1)), f"{name}: versions of {airport} are {seen}"
        tables[name] = dict(rows.group_by("airport").agg(pl.col(column).last()).iter_rows())
    return tables


def main() -> int:
    shutil.rmtree(OUT, ignore_errors=True)
    changes = route_changes()
    source = cw.memory(changes.to_dicts(), rate=len(changes) / 6)
    job = build(source, OUT).start(checkpoint=OUT / "checkpoints", interval="200ms", parallelism=2)
    while job.is_active and job.status.checkpoints.completed < 8:
        time.sleep(0.05)
    if job.is_active:
        os.kill(job.status.workers[1].pid, signal.SIGKILL)
        print("killed a worker after", job.status.checkpoints.completed, "checkpoints")
    job.await_termination()
    tables, wanted = found(OUT), expected(changes)
    for name, table in tables.items():
        far = sum(1 for value in table.values() if value in (150, 20_000))
        print(f"{name:<12} {len(table)} airports, {far} without a way", "equal to NetworkX:", table == wanted[name])
    return 0 if tables == wanted else 1


if __name__ == "__main__":
    sys.exit(main())
