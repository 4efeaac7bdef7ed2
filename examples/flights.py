"""A year of departures from New York, as a stream, while worker processes die.

``make run`` executes this file.  ``build`` is the whole Cutwater program; the rest starts it, kills a worker with
SIGKILL in the middle, and compares every table with what plain Spark SQL computes from the same rows.

    python examples/flights.py                 one worker is killed
    python examples/flights.py --kills 3       three of them, one after the other
    python examples/flights.py --rate 50000    replay faster (flights per second)
    python examples/flights.py --keep          keep out/flights/ of the last run beside the new one
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import polars as pl
import pyarrow as pa

import cutwater as cw

HOME = Path(__file__).resolve().parent.parent
FLIGHTS, WEATHER_REPORTS = 336_776, 26_115
REPLAY_S = 20


def build(data: Path, airlines: pa.Table, out: Path, rate: float) -> cw.Dataflow:
    """Departures and weather in, four tables out.  Building runs nothing."""
    flow = cw.Dataflow("flights")
    flights = cw.files(data / "flights", rate=rate)
    weather = cw.files(data / "weather", rate=rate * WEATHER_REPORTS / FLIGHTS)

    # Flights come in the order in which they left; what counts is when they should have: a day of delay at most.
    departures = flow.read("departures", flights, event_time="scheduled", out_of_order="1d")
    weather_reports = flow.read("weather", weather, event_time="observed")

    # Each airport, hour by hour.  A cancelled flight has no delay: count("delay") leaves it out.
    (
        departures.key_by("origin")
        .window("hour", cw.tumbling("1h"))
        .aggregate("hourly", flights=cw.count(), departed=cw.count("delay"), worst=cw.max("delay"))
        .write("airports", cw.files(out / "airports"))
    )

    # Each airline, day by day, with its name.
    (
        departures.key_by("carrier")
        .window("day", cw.tumbling("1d"))
        .aggregate("daily", flights=cw.count(), miles=cw.sum("distance"), mean=cw.mean("delay"), worst=cw.max("delay"))
        .enrich("name", airlines, on="carrier")
        .write("airlines", cw.files(out / "airlines"))
    )

    # Each flight with the weather of its hour.
    (
        departures.key_by("origin")
        .join("observed", weather_reports.key_by("origin"), within=("-59m", 0))
        .select("report", "scheduled", "carrier", "flight", "origin", "delay", "wind", "visibility")
        .write("weather_at_departure", cw.files(out / "weather_at_departure"))
    )

    # Each cancellation, numbered by airline as it comes: the first, the second ... none left out, none twice.
    (
        departures.filter("cancelled", pl.col("delay").is_null())
        .key_by("carrier")
        .aggregate("so-far", nth=cw.count())
        .select("numbered", "carrier", "nth")
        .write("cancellations", cw.files(out / "cancellations"))
    )
    return flow


def main() -> int:
    arguments = argparse.ArgumentParser(description="Exactly-once on real flights, while workers are killed.")
    arguments.add_argument("--kills", type=int, default=1, help="workers to kill (default 1)")
    arguments.add_argument("--rate", type=float, default=FLIGHTS / REPLAY_S, help="flights per second")
    arguments.add_argument("--keep", action="store_true", help="keep the folder of the last run")
    options = arguments.parse_args()

    import demo_support as demo

    return demo.run(
        build, out=HOME / "out" / "flights", kills=options.kills, rate=options.rate, keep=options.keep, flights=FLIGHTS
    )


if __name__ == "__main__":
    sys.exit(main())
