"""Times and dates as texts: what Polars writes, which knows nothing of these kernels."""

from __future__ import annotations

import io
import json

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from cutwater.connectors.files.part_formats import CsvParts, JsonParts
from cutwater.connectors.text.time_texts import date_texts, time_texts
from cutwater.errors import DataError

ROWS = 4_000
TICKS = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
YEAR_0_S, YEAR_10000_S = -62_167_219_200, 253_402_300_800


def some_times(unit: str) -> pa.Array:
    """Any time of a year with four digits, more or less round, with nulls; ends and beginnings of days among them."""
    random = np.random.default_rng(7)
    a_second = TICKS[unit]
    first, last = YEAR_0_S * a_second, YEAR_10000_S * a_second - 1
    if unit == "ns":
        first, last = -(2**63), 2**63 - 1
    ticks = random.integers(first, last, ROWS, endpoint=True)
    for rows in range(3):
        step = max(a_second // 1_000**rows, 1)
        ticks[rows::4] = ticks[rows::4] // step * step
    ticks[ROWS // 2 :] = ticks[ROWS // 2] + np.arange(ROWS // 2) * 777  # many of one day
    ticks[:6] = [first, last, 0, -1, 1, -a_second]
    null = random.random(ROWS) < 0.1
    null[:6] = False
    return pa.array(np.clip(ticks, first, last), pa.timestamp(unit), mask=null)


def csv_fields(column: pl.Series) -> list[str | None]:
    return [line or None for line in column.to_frame().write_csv(include_header=False).splitlines()]


def json_values(column: pl.Series) -> list[str | None]:
    return [json.loads(line)[column.name] for line in column.to_frame().write_ndjson().splitlines()]


def series(array: pa.Array) -> pl.Series:
    made = pl.from_arrow(array)
    assert isinstance(made, pl.Series)
    return made.rename("t")


@pytest.mark.parametrize("unit", TICKS)
def test_times_are_written_as_polars_writes_them(unit: str) -> None:
    times = some_times(unit)
    for some in (times, times.slice(ROWS // 2 - 100, 777), times.slice(2, 0)):
        zoned = series(some.cast(pa.timestamp(unit, "UTC")))
        assert time_texts(some, "T").to_pylist() == csv_fields(series(some))
        assert time_texts(some, " ", shorter=True).to_pylist() == json_values(series(some))
        assert time_texts(some, "T", "+00:00", shorter=True).to_pylist() == json_values(zoned)


def test_dates_are_written_as_polars_writes_them() -> None:
    days = np.random.default_rng(8).integers(-719_528, 2_932_896, ROWS, endpoint=True)
    days[:8] = [-719_528, 2_932_896, 0, -1, -719_468, -719_469, 59, 11_016]
    column = pa.array(days.astype(np.int32), pa.date32(), mask=np.arange(ROWS) % 10 == 9)
    for some in (column, column.slice(777, 1_001)):
        assert date_texts(some).to_pylist() == csv_fields(series(some))


@pytest.mark.parametrize("unit", ["s", "ms", "us"])
def test_a_year_of_five_digits_is_left_to_others(unit: str) -> None:
    for seconds, ticks in ((YEAR_0_S, -1), (YEAR_10000_S, 0)):
        beyond = pa.array([None, seconds * TICKS[unit] + ticks], pa.timestamp(unit))
        assert time_texts(beyond, "T") is None
        assert time_texts(beyond.take(pa.array([0, 0])), "T").to_pylist() == [None, None]
    for day in (-719_529, 2_932_897):
        assert date_texts(pa.array([0, day], pa.date32())) is None


def test_files_hold_what_polars_makes_of_any_time() -> None:
    ticks = pa.array([0, 1, -1, None, 86_400_000_000, 1_500_000, 20_000_000_000])
    far = pa.array([0, YEAR_10000_S * 1_000_000, None, YEAR_0_S * 1_000_000 - 1, 1, 2, 3])
    rows = pa.table(
        {
            **{f"wall {unit}": ticks.cast(pa.timestamp(unit)) for unit in TICKS},
            **{f"utc {unit}": ticks.cast(pa.timestamp(unit, "UTC")) for unit in TICKS},
            "oslo": ticks.cast(pa.timestamp("us", "Europe/Oslo")),
            "day": pa.array([0, -1, None, 1, 2, 3, 4], pa.int32()).cast(pa.date32()),
            "far": far.cast(pa.timestamp("us")),
            "far utc": far.cast(pa.timestamp("us", "UTC")),
            "clock": pa.array([0, 1, 2, 3, None, 5, 86_399_999_999], pa.time64("us")),
        }
    )
    rows = pa.concat_tables([rows.slice(0, 3), rows.slice(3)])
    frame = pl.from_arrow(rows)
    assert isinstance(frame, pl.DataFrame)
    assert b"".join(JsonParts().text(rows.schema, rows)) == frame.write_ndjson().encode()
    zoned = [name for name, kind in frame.schema.items() if isinstance(kind, pl.Datetime) and kind.time_zone]
    into = io.BytesIO()
    texts = frame.with_columns(pl.col(zoned).dt.to_string("%Y-%m-%dT%H:%M:%S%.f%:z"))
    texts.write_csv(into, include_header=False)
    assert b"".join(CsvParts().text(rows.schema, rows)) == into.getvalue()


MORE = pa.map_(pa.string(), pa.list_(pa.timestamp("ms", "UTC")))
NESTED = pa.list_(pa.struct({"at": pa.timestamp("us"), "more": MORE}))


def test_times_in_lists_structs_and_maps_are_written_as_polars_writes_them() -> None:
    def row(n: int) -> list[object] | None:
        entry = {"at": n * 77_777_777, "more": [("a", [n, None]), ("b", None), ("c", [])]}
        return [None, [], [entry, None], [{"at": None, "more": None}, entry]][n % 4]

    far = [{"at": YEAR_10000_S * 1_000_000, "more": None}]
    for numbers in (range(50), range(-50, 0)):
        nested = pa.array([row(n) for n in numbers], NESTED)
        days = pa.array([[n, None, -n] for n in numbers], pa.list_(pa.int32())).cast(pa.list_(pa.date32()))
        for last in ([], [far]):  # what is left to Polars, all of it
            table = pa.table({"n": pa.concat_arrays([nested, pa.array(last, NESTED)]), "other": [1] * (50 + len(last))})
            table = table.append_column("d", pa.concat_arrays([days, pa.nulls(len(last), days.type)]))
            frame = pl.from_arrow(table.slice(3))
            assert isinstance(frame, pl.DataFrame)
            assert b"".join(JsonParts().text(table.schema, table.slice(3))) == frame.write_ndjson().encode()


def test_what_lies_under_a_null_does_not_count() -> None:
    beyond, hidden = pa.array([2**63 - 1, 1]).cast(pa.timestamp("us")), pa.array([True, False])
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), beyond, mask=hidden)
    table = pa.table(
        {
            "list": lists,
            "struct": pa.StructArray.from_arrays([beyond], ["x"], mask=hidden),
            "both": pa.StructArray.from_arrays([lists.fill_null([1])], ["x"], mask=hidden),
        }
    )
    first, second = map(json.loads, b"".join(JsonParts().text(table.schema, table)).splitlines())
    assert first == {"list": None, "struct": None, "both": None}
    at = "1970-01-01 00:00:00.000001"
    assert second == {"list": [at], "struct": {"x": at}, "both": {"x": [at]}}
    assert b"".join(JsonParts().text(table.schema, table.slice(1))).count(at.encode()) == 3


BEYOND = "a time beyond the years -262143 to 262142"
TOO_LATE: dict[pa.DataType, tuple[int, str]] = {
    pa.timestamp("us"): (2**63 - 1, BEYOND),
    pa.timestamp("ms", "UTC"): (2**63 - 1, BEYOND),
    pa.timestamp("us", "Europe/Oslo"): (-(2**63), BEYOND),
    pa.date32(): (2**31 - 1, BEYOND),
    pa.date64(): (2**62 // 86_400_000 * 86_400_000, BEYOND),
    pa.time32("s"): (86_400, "a time of day below 0 or beyond 24 hours"),
    pa.time64("us"): (-1, "a time of day below 0 or beyond 24 hours"),
}


@pytest.mark.parametrize(
    ("parts", "nested"),
    [(CsvParts(), None), *((JsonParts(), nested) for nested in (None, "list", "struct", "map"))],
)
@pytest.mark.parametrize("kind", TOO_LATE, ids=str)
def test_a_time_that_no_text_holds_is_an_error_that_names_its_column(
    parts: JsonParts | CsvParts, kind: pa.DataType, nested: str | None, capfd: pytest.CaptureFixture[str]
) -> None:
    value, what = TOO_LATE[kind]
    at = pa.array([0, value], pa.int32() if kind.bit_width == 32 else pa.int64()).view(kind)
    ends, keys = pa.array([0, 1, 2], pa.int32()), pa.array(["a", "b"])
    if nested == "list":
        at = pa.ListArray.from_arrays(ends, at)
    elif nested == "struct":
        at = pa.StructArray.from_arrays([keys, at], ["key", "at"])
    elif nested == "map":
        at = pa.MapArray.from_arrays(ends, keys, at)
    rows = pa.table({"n": [1, 2], "at": at})
    with pytest.raises(DataError, match=f"column 'at': {what} cannot be written as text"):
        parts.text(rows.schema, rows)
    assert "panicked" not in capfd.readouterr().err
