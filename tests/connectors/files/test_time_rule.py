"""One rule for times in every format: with a zone an instant, without one the wall clock; DuckDB is the oracle.

Texts are cast by DuckDB itself, Parquet files are written by it, and what our sinks write is read again.
"""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import cutwater as cw
from cutwater.errors import BuildError, DataError

INSTANT, WALL = pa.timestamp("us", "UTC"), pa.timestamp("us")
WITHOUT = (
    *("2026-01-01T00:00:00", "2026-01-01 00:00:00", "2026-01-01T12:30", "1969-12-31T23:59:59"),
    *("2026-01-01T00:00:00.5", "2026-01-01T00:00:00.123", "2026-01-01 00:00:00.123456"),
)
WITH = (
    *("2026-01-01T00:00:00Z", "2026-01-01 00:00:00Z", "2026-01-01T00:00:00.5Z", "2026-01-01T00:00:00.123456Z"),
    *("2026-01-01T00:00:00+00:00", "2026-01-01T00:00:00.123456+00:00", "2026-01-01T01:00:00+01:00"),
    *("2026-06-30 00:00:00-08:00", "2026-01-01T05:45:00+0545", "2026-01-01T00:00:00+01", "1969-12-31T23:00:00-05:00"),
)
TEXTS = ("csv", "json")


def text_file(folder: Path, form: str, values: list[str | None]) -> str:
    path = folder / f"rows.{form}"
    if form == "csv":
        path.write_text("k,at\n" + "".join(f"{k},{'' if v is None else v}\n" for k, v in enumerate(values)))
    else:
        path.write_text("".join(json.dumps({"k": k, "at": v}) + "\n" for k, v in enumerate(values)))
    return str(path)


def column(source: Any) -> pa.Array:
    """Column ``at`` of all rows, read through the source."""
    source = source.as_source() if hasattr(source, "as_source") else source
    batches = []
    for split in source.discover():
        reader = source.open(split, None, None)
        while not reader.exhausted:
            batch = reader.read(1000)
            batches += [] if batch is None else [batch]
        reader.close()
    found = pa.Table.from_batches(batches, source.schema).column("at")
    return found.combine_chunks()


def micros(found: pa.Array) -> list[int | None]:
    return found.cast(pa.int64()).to_pylist()


def expected(values: list[str | None], kind: pa.DataType) -> list[int | None]:
    """DuckDB's microseconds since 1970; its session is in UTC, so that a time without zone counts as UTC."""
    with duckdb.connect() as db:
        db.execute("SET TimeZone = 'UTC'")
        sql = "TIMESTAMPTZ" if kind.tz else "TIMESTAMP"
        return [db.execute(f"SELECT epoch_us(CAST(? AS {sql}))", [v]).fetchone()[0] for v in values]


@pytest.mark.parametrize("form", TEXTS)
class TestTexts:
    @pytest.mark.parametrize("text", WITHOUT)
    def test_without_a_zone_it_is_the_wall_clock(self, tmp_path, form, text):
        path = text_file(tmp_path, form, [text, None])
        found = column(cw.files(path))
        assert found.type == WALL
        assert micros(found) == expected([text, None], WALL)
        given = column(cw.files(path, schema="k long, at timestamp"))
        assert given.type == INSTANT
        assert micros(given) == expected([text, None], INSTANT)
        assert column(cw.files(path, schema="k long, at timestamp_ntz")).equals(found)

    @pytest.mark.parametrize("text", WITH)
    def test_with_a_zone_it_is_an_instant(self, tmp_path, form, text):
        path = text_file(tmp_path, form, [text, None])
        found = column(cw.files(path))
        assert found.type == INSTANT
        assert micros(found) == expected([text, None], INSTANT)
        assert column(cw.files(path, schema="k long, at timestamp")).equals(found)
        with pytest.raises(DataError, match=r"column 'at': .* has a zone, and .*timestamp_ntz.* has none"):
            column(cw.files(path, schema="k long, at timestamp_ntz"))

    def test_a_column_with_both_holds_instants_and_one_without_zone_is_utc(self, tmp_path, form):
        values = [WITHOUT[0], None, *WITH, WITHOUT[4]]
        found = column(cw.files(text_file(tmp_path, form, values)))
        assert found.type == INSTANT
        assert micros(found) == expected(values, INSTANT)

    def test_dates_are_dates_unless_a_time_is_among_them(self, tmp_path, form):
        days = ["2026-01-01", None, "1969-12-31"]
        found = column(cw.files(text_file(tmp_path, form, days)))
        assert found.type == pa.date32()
        assert found.to_pylist() == [None if d is None else dt.date.fromisoformat(d) for d in days]
        given = column(cw.files(text_file(tmp_path, form, days), schema="k long, at date"))
        assert given.equals(found)
        mixed = ["2026-01-01", WITHOUT[2]]
        assert micros(column(cw.files(text_file(tmp_path, form, mixed)))) == expected(mixed, WALL)

    @pytest.mark.parametrize(
        "text",
        [
            *("2026-01-01T00:00:00.123456789Z", "2026-01-01T00:00:00z", "2026-01-01 00:00:00 UTC", "01/02/2026"),
            *("2026-01-01 00:00:00 +01:00", "12:30:00", "2026-01-01T25:00:00", "2026-02-30", "20260101"),
        ],
    )
    def test_what_is_none_stays_text_and_is_told_of_where_a_time_is_asked_for(self, tmp_path, form, text):
        path = text_file(tmp_path, form, [WITH[0], f"x{text}" if text.isdigit() else text])
        assert column(cw.files(path)).type == pa.string()
        words = "finer than" if "789" in text else "no ISO 8601 time: write .* or give timestamp_formats"
        with pytest.raises(DataError, match=rf"line \d: column 'at': '.*' is {words}"):
            column(cw.files(path, schema="k long, at timestamp"))

    def test_formats_that_are_given_decide_alone(self, tmp_path, form):
        path = text_file(tmp_path, form, ["31.01.2026 12:00", None])
        assert column(cw.files(path, timestamp_formats=["%d.%m.%Y %H:%M"])).type == WALL
        zoned = text_file(tmp_path, form, ["31.01.2026 12:00+0100"])
        found = column(cw.files(zoned, timestamp_formats=["%d.%m.%Y %H:%M%z"]))
        assert found.type == INSTANT
        assert micros(found) == expected(["2026-01-31T12:00:00+01:00"], INSTANT)


class TestTypedFormats:
    @pytest.mark.parametrize(("sql", "kind"), [("TIMESTAMP", WALL), ("TIMESTAMPTZ", INSTANT)])
    def test_parquet_says_it_itself(self, tmp_path, sql, kind):
        path = str(tmp_path / "rows.parquet")
        with duckdb.connect() as db:
            db.execute("SET TimeZone = 'America/New_York'")
            db.execute(
                f"COPY (SELECT 1 AS k, TIMESTAMP '2026-01-01 00:00:00.5'::{sql} AS at) TO '{path}' (FORMAT parquet)"
            )
            wanted = db.execute("SELECT epoch_us(r.at) FROM read_parquet(?) r", [path]).fetchall()[0]
        found = column(cw.files(path))
        assert found.type == kind
        assert micros(found) == list(wanted)
        assert micros(column(cw.files(path, schema="at timestamp"))) == list(wanted)

    def test_the_old_form_of_spark_holds_instants(self, tmp_path):
        path = str(tmp_path / "rows.parquet")
        moment = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)
        table = pa.table({"at": pa.array([moment], pa.timestamp("us", "UTC"))})
        pq.write_table(table, path, use_deprecated_int96_timestamps=True, store_schema=False)
        for source in (cw.files(path), cw.files(path, schema="at timestamp")):
            assert column(source).type == INSTANT
            assert column(source).to_pylist() == [moment]
        assert column(cw.files(path, schema="at timestamp_ntz")).to_pylist() == [moment.replace(tzinfo=None)]

    @pytest.mark.parametrize("hours", [0, 1, -8])
    def test_datetimes_in_memory(self, hours):
        zone = dt.timezone(dt.timedelta(hours=hours))
        aware, naive = dt.datetime(2026, 1, 1, tzinfo=zone), dt.datetime(2026, 1, 1)
        instants = column(cw.memory([{"at": aware}, {"at": None}]))
        assert instants.type == INSTANT
        assert micros(instants) == expected([aware.isoformat(), None], INSTANT)
        wall = column(cw.memory([{"at": naive}]))
        assert wall.type == WALL
        assert micros(wall) == micros(column(cw.memory([{"at": naive}], schema="at timestamp")))
        both = column(cw.memory([{"at": naive}, {"at": aware}]))
        assert both.type == INSTANT
        assert micros(both) == expected([naive.isoformat(), aware.isoformat()], INSTANT)
        with pytest.raises(BuildError, match="with a zone"):
            cw.memory([{"at": aware}], schema="at timestamp_ntz")


@pytest.mark.parametrize("form", ["parquet", *TEXTS])
def test_what_a_sink_writes_is_read_again_as_it_was(tmp_path, form):
    from cutwater.connectors.files.part_commit import write_part
    from cutwater.connectors.files.part_formats import PART_FORMATS

    moment = dt.datetime(2026, 1, 1, 0, 0, 0, 123_456)
    for name, kind in (("instant", INSTANT), ("wall", WALL), ("day", pa.date32())):
        value = moment.date() if name == "day" else moment
        batch = pa.record_batch({"k": pa.array([1]), "at": pa.array([value], kind)})
        parts = PART_FORMATS[form]()
        path = tmp_path / f"{name}{parts.suffix}"
        write_part(path.open("xb", 0), str(path), parts, parts.schema(batch.schema), iter([batch]))
        found = column(cw.files(path))
        assert found.type == kind
        assert found.equals(batch.column("at"))
