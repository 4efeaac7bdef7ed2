"""Row groups of Parquet that are left out by their statistics: what is left of the rows is the same."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cutwater.connectors.base import take_passed_over
from cutwater.connectors.files import row_group_filters
from cutwater.connectors.files.source import FileSource
from cutwater.errors import DataError
from cutwater.operators.row_filters import RowFilter

UTC = dt.UTC
START = dt.datetime(2026, 1, 1, tzinfo=UTC)


class Context:
    """Takes dead letters."""

    step, subtask = "", 0

    def __init__(self) -> None:
        self.letters: list[tuple[Any, ...]] = []

    def dead_letter(self, *letter: Any) -> None:
        self.letters.append(letter)


@pytest.fixture(autouse=True)
def small_files_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_group_filters, "_LEAST_ROWS", 0)


def table(groups: int = 8, rows: int = 10) -> pa.Table:
    """Every column rises with the rows."""
    n = groups * rows
    return pa.table(
        {
            "i": pa.array(range(n), pa.int32()),
            "u": pa.array([2**63 + i for i in range(n)], pa.uint64()),
            "f": pa.array([i / 2 for i in range(n)], pa.float32()),
            "s": [f"{i:04}" for i in range(n)],
            "d": pa.array([dt.date(2026, 1, 1) + dt.timedelta(days=i) for i in range(n)]),
            "t": pa.array([START + dt.timedelta(minutes=i) for i in range(n)], pa.timestamp("ms", "UTC")),
            "l": pa.array([START.replace(tzinfo=None) + dt.timedelta(minutes=i) for i in range(n)], pa.timestamp("us")),
            "e": pa.array([Decimal(i) / 4 for i in range(n)], pa.decimal128(9, 2)),
            "w": pa.array([Decimal(i) / 4 for i in range(n)], pa.decimal128(30, 2)),
            "b": [i >= n // 2 for i in range(n)],
            "x": pa.array([None if i < n // 2 else 1 for i in range(n)], pa.int64()),
        }
    )


def write(folder: Path, rows: pa.Table, **options: Any) -> str:
    path = folder / "rows.parquet"
    pq.write_table(rows, path, row_group_size=10, **options)
    return str(path)


def filtered(source: FileSource, condition: pl.Expr, event_time: str | None = None) -> FileSource:
    return source.passing_over((RowFilter(condition, {name: name for name in source.schema.names}),), event_time)


def read(source: FileSource, position: Any = None, rows: int = 7) -> tuple[list[dict[str, Any]], int, list[Any]]:
    """Rows, how many were left out, and the positions on the way."""
    found, passed, positions = list[dict[str, Any]](), 0, list[Any]()
    (split,) = source.discover()
    reader = source.open(split, position, Context())
    while not reader.exhausted:
        positions.append(reader.position)
        batch = reader.read(rows)
        found += batch.to_pylist() if batch is not None else []
        over = take_passed_over(reader)
        passed += over.rows if over is not None else 0
    reader.close()
    return found, passed, positions


CONDITIONS = [
    (pl.col("i") >= 60, 60),
    (pl.col("i").is_between(35, 36), 70),
    (pl.col("u") < 2**63 + 10, 70),
    (pl.col("f") < 5, 70),
    (pl.col("f").is_between(5.0, 6.0), 70),
    (pl.col("s") == "0042", 70),
    (pl.col("d") < dt.date(2026, 1, 11), 70),
    (pl.col("t") >= START + dt.timedelta(minutes=70), 70),
    (pl.col("t") < pl.datetime(2026, 1, 1, 0, 5, time_zone="UTC"), 70),
    (pl.col("l") < dt.datetime(2026, 1, 1, 0, 5), 70),
    (pl.col("e") > Decimal("17.5"), 70),
    (pl.col("w") < 1, 70),
    (pl.col("b"), 40),
    (pl.col("x").is_not_null(), 40),
    (pl.col("x").is_null(), 40),
    (pl.col("x") == 2, 80),
    ((pl.col("i") < 10) | (pl.col("i") > 75), 60),
    (pl.col("i") < 0, 80),
    (pl.col("i") >= 0, 0),
    (pl.col("i") * 2 < 10, 0),
]


@pytest.mark.parametrize(("condition", "left_out"), CONDITIONS)
@pytest.mark.parametrize(
    "options", [{}, {"store_decimal_as_integer": True}, {"version": "1.0"}, {"store_schema": False}]
)
def test_the_rows_that_pass_are_the_same(
    tmp_path: Path, condition: pl.Expr, left_out: int, options: dict[str, Any]
) -> None:
    path = write(tmp_path, table(), **options)
    expected = pl.read_parquet(path).filter(condition)["i"].to_list()
    rows, passed, _ = read(filtered(FileSource(path), condition))
    assert [
        row["i"] for row in pl.DataFrame(rows, schema=pl.read_parquet(path).schema).filter(condition).to_dicts()
    ] == expected
    if not (options.get("version") == "1.0" and "u" in condition.meta.root_names()):
        assert (passed, len(rows)) == (left_out, 80 - left_out)


def test_positions_are_rows_of_the_file_wherever_reading_goes_on(tmp_path: Path) -> None:
    path = write(tmp_path, table())
    source = filtered(FileSource(path), (pl.col("i") >= 30) & (pl.col("i") < 50) | (pl.col("i") >= 70))
    rows, passed, positions = read(source)
    assert [row["i"] for row in rows] == [*range(30, 50), *range(70, 80)]
    assert passed == 50
    assert positions[:3] == [{"row": 0}, {"row": 37}, {"row": 44}]
    for position in [*positions, *({"row": row} for row in range(81))]:  # of a version that read all, too
        rest, left_out, _ = read(source, position)
        assert [row["i"] for row in rest] == [row["i"] for row in rows if row["i"] >= position["row"]]
        assert left_out + len(rest) == 80 - position["row"]


def test_a_file_without_statistics_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, table(), write_statistics=["i"])
    for condition, left_out in ((pl.col("s") == "0042", 0), (pl.col("i") == 42, 70), (pl.col("x").is_null(), 0)):
        assert read(filtered(FileSource(path), condition))[1] == left_out
    assert read(filtered(FileSource(path), pl.col("i") == 42, event_time="t"))[1] == 0, "their times are not known"
    assert read(filtered(FileSource(path), pl.col("i") == 42, event_time=None))[1] == 70


def test_rows_without_a_time_are_not_left_out(tmp_path: Path) -> None:
    """They fail the job, or become dead letters."""
    times = pa.array([START, None, *[START] * 18], pa.timestamp("us", "UTC"))
    path = write(tmp_path, pa.table({"i": range(20), "t": times}))
    rows, passed, _ = read(filtered(FileSource(path), pl.col("i") < 0, event_time="t"))
    assert (len(rows), passed) == (10, 10)


def test_how_far_rows_that_were_left_out_had_come_is_told_with_the_next_rows(tmp_path: Path) -> None:
    path = write(tmp_path, table())
    source = filtered(FileSource(path), pl.col("i").is_in([25, 65]), event_time="t")
    (split,) = source.discover()
    reader = source.open(split, None, Context())
    told: list[tuple[int, Any]] = []
    while not reader.exhausted:
        batch = reader.read(100)
        told.append((0 if batch is None else batch.num_rows, take_passed_over(reader)))
    minute = 60_000_000
    zero = int(START.timestamp()) * 1_000_000
    assert told == [(10, (20, zero + 19 * minute)), (10, (30, zero + 59 * minute)), (0, (10, zero + 79 * minute))]


def test_a_narrower_type_in_the_file_is_compared_as_that_of_the_source(tmp_path: Path) -> None:
    path = write(tmp_path, table())
    source = FileSource(path, schema="i long, f double, t timestamp")
    for condition in (pl.col("i") > 2**40, pl.col("f") < -1e300, pl.col("t") > START + dt.timedelta(days=9)):
        assert read(filtered(source, condition))[1] == 80


def test_times_finer_than_the_source_are_rounded_outwards(tmp_path: Path) -> None:
    path = write(tmp_path, pa.table({"t": pa.array([1, 1999], pa.timestamp("ns"))}))
    source = FileSource(path)
    assert source.schema.field("t").type == pa.timestamp("ns")
    for low, expected in ((dt.datetime(1970, 1, 1, 0, 0, 0, 1), 0), (dt.datetime(1970, 1, 1, 0, 0, 0, 3), 2)):
        assert read(filtered(source, pl.col("t") >= low))[1] == expected


def test_texts_that_a_writer_cut_short_are_bounds_all_the_same(tmp_path: Path) -> None:
    """Polars writes whole ones; what is cut stands below the least and above the largest text."""
    long = "x" * 5000
    path = write(tmp_path, pa.table({"s": [long + "a"] * 10 + [long + "z"] * 10}))
    rows, passed, _ = read(filtered(FileSource(path), pl.col("s") == long + "z"))
    assert passed + len(rows) == 20
    assert sum(row["s"] == long + "z" for row in rows) == 10


def test_a_bad_value_in_a_row_group_that_is_left_out_passes_unless_bad_rows_are_wanted(tmp_path: Path) -> None:
    """Else it fails with file and row."""
    schema = pa.schema([("i", pa.int64()), pa.field("v", pa.int64(), nullable=False)])
    path = write(tmp_path, pa.table({"i": range(20), "v": [1, None, *[1] * 18]}))
    with pytest.raises(DataError, match=r"rows.parquet row 1: column 'v' is null"):
        read(FileSource(path, schema=schema))
    with pytest.raises(DataError, match=r"rows.parquet row 1: column 'v' is null"):
        read(filtered(FileSource(path, schema=schema), pl.col("i") < 5))
    rows, passed, _ = read(filtered(FileSource(path, schema=schema), pl.col("i") >= 10))
    assert (len(rows), passed) == (10, 10)
    source = filtered(FileSource(path, schema=schema, bad_rows="dead_letter"), pl.col("i") >= 10)
    context = Context()
    reader = source.open(source.discover()[0], None, context)
    while not reader.exhausted:
        reader.read(100)
    assert [(letter[1], letter[2]) for letter in context.letters] == [
        (1, "column 'v' is null and the schema says it is not")
    ]
