"""What JSON lines and CSV files hold, read back by libraries that did not write them."""

from __future__ import annotations

import base64
import csv
import datetime as dt
import gzip
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

import cutwater as cw
from cutwater.connectors.base import Source
from cutwater.connectors.files.part_commit import write_part
from cutwater.connectors.files.part_formats import CsvParts, JsonParts, PartFormat
from cutwater.errors import BuildError, ConfigError, DataError

NOON = dt.datetime(2024, 5, 1, 12, 0, 0, 250)
FLAT = pa.schema(
    {
        "n": pa.int64(),
        "x": pa.float64(),
        "s": pa.string(),
        "ok": pa.bool_(),
        "d": pa.decimal128(12, 2),
        "day": pa.date32(),
        "at": pa.timestamp("us"),
        "utc": pa.timestamp("us", tz="UTC"),
    }
)
ROWS: list[dict[str, Any]] = [
    {
        "n": 2**63 - 1,
        "x": 0.1,
        "s": 'a "quoted", text;\nwith a line',
        "ok": True,
        "d": Decimal("1234567890.12"),
        "day": dt.date(2024, 5, 1),
        "at": NOON,
        "utc": NOON.replace(tzinfo=dt.UTC),
    },
    dict.fromkeys(FLAT.names),
    {"n": -1, "x": 1e300, "s": "", "ok": False, "d": Decimal("0.00"), "day": None, "at": None, "utc": None},
]


def written(directory: Path, parts: PartFormat, schema: pa.Schema, rows: list[dict[str, Any]]) -> Path:
    path = directory / f"part{parts.suffix}"
    staged = parts.schema(schema)
    path.unlink(missing_ok=True)
    write_part(
        path.open("xb", 0), str(path), parts, staged, iter([pa.RecordBatch.from_pylist([row], staged) for row in rows])
    )
    return path


def read_back(source: Source) -> list[dict[str, Any]]:
    class Context:
        step, subtask = "in", 0

        def dead_letter(self, *_: object) -> None:
            raise AssertionError("a bad row")

    found: list[dict[str, Any]] = []
    for split in source.discover():
        reader = source.open(split, None, Context())
        while not reader.exhausted:
            batch = reader.read(1_000)
            if batch is None:
                break
            found += batch.to_pylist()
    return found


@pytest.mark.parametrize(
    "parts", [JsonParts(), JsonParts("gzip"), CsvParts(), CsvParts("gzip"), CsvParts(delimiter=";")], ids=repr
)
def test_what_was_written_is_read_back_by_the_source(parts: PartFormat, tmp_path: Path) -> None:
    schema, rows, options = FLAT, ROWS, {}
    if isinstance(parts, CsvParts):
        options = {"delimiter": parts.delimiter}
    else:  # Arrow reads no dates from JSON
        schema = schema.remove(schema.get_field_index("day"))
        rows = [{name: row[name] for name in schema.names} for row in rows]
    path = written(tmp_path, parts, schema, rows)
    assert read_back(cw.files(path, schema=schema, **options).as_source()) == rows


DUCKDB_TYPES = (
    "{'n': 'BIGINT', 'x': 'DOUBLE', 's': 'VARCHAR', 'ok': 'BOOLEAN', 'd': 'DECIMAL(12,2)', 'day': 'DATE', "
    "'at': 'TIMESTAMP', 'utc': 'VARCHAR'}"
)


@pytest.mark.parametrize(
    ("parts", "reader", "more"), [(JsonParts(), "read_json", ""), (CsvParts(), "read_csv", ", header=true")]
)
def test_duckdb_reads_the_same_values(parts: PartFormat, reader: str, more: str, tmp_path: Path) -> None:
    path = written(tmp_path, parts, FLAT, ROWS)
    found = duckdb.sql(f"SELECT * EXCLUDE (utc) FROM {reader}('{path}', columns={DUCKDB_TYPES}{more})").fetchall()
    expected = [tuple(row[name] for name in FLAT.names[:-1]) for row in ROWS]
    if reader == "read_csv":  # DuckDB takes "" for null, too
        expected = [tuple(None if value == "" else value for value in row) for row in expected]
    assert found == expected


def test_json_holds_nested_columns_and_binary_at_any_depth(tmp_path: Path) -> None:
    schema = pa.schema(
        {
            "who": pa.struct([("name", pa.string()), ("face", pa.binary())]),
            "tags": pa.list_(pa.struct([("t", pa.string()), ("raw", pa.large_binary())])),
            "bytes": pa.binary(),
        }
    )
    rows = [
        {"who": {"name": "a", "face": b"\x00\xff"}, "tags": [{"t": "x", "raw": b"yz"}, None], "bytes": b"abc"},
        {"who": None, "tags": None, "bytes": None},
        {"who": {"name": None, "face": None}, "tags": [], "bytes": b""},
    ]
    found = [json.loads(line) for line in written(tmp_path, JsonParts(), schema, rows).read_text().splitlines()]
    assert [row.keys() for row in found] == [{"who", "tags", "bytes"}] * 3

    def decoded(value: Any, like: Any) -> Any:
        if isinstance(like, bytes):
            return base64.b64decode(value)
        if isinstance(like, dict):
            return {name: decoded(value[name], part) for name, part in like.items()}
        if isinstance(like, list):
            return [decoded(one, part) for one, part in zip(value, like, strict=True)]
        return value

    assert [decoded(row, like) for row, like in zip(found, rows, strict=True)] == rows


def test_json_has_no_nan(tmp_path: Path) -> None:
    schema = pa.schema({"x": pa.float64()})
    path = written(tmp_path, JsonParts(), schema, [{"x": float("nan")}, {"x": float("-inf")}, {"x": 1.0}])
    assert [json.loads(line)["x"] for line in path.read_text().splitlines()] == [None, None, 1.0]


def test_csv_begins_with_the_names_once_and_quotes_where_needed(tmp_path: Path) -> None:
    schema = pa.schema({"a,b": pa.string(), "n": pa.int64()})
    rows = [{"a,b": "", "n": 1}, {"a,b": None, "n": 2}, {"a,b": 'x"', "n": 3}]
    path = written(tmp_path, CsvParts(), schema, rows)
    assert path.read_text() == '"a,b",n\n"",1\n,2\n"x""",3\n'
    assert next(csv.reader(path.read_text().splitlines())) == ["a,b", "n"]
    assert written(tmp_path, CsvParts(header=False), schema, rows[:1]).read_text() == '"",1\n'


def test_a_csv_file_without_rows_is_its_header(tmp_path: Path) -> None:
    assert written(tmp_path, CsvParts("gzip"), FLAT, []).suffixes == [".csv", ".gz"]
    assert gzip.decompress((tmp_path / "part.csv.gz").read_bytes()).decode() == ",".join(FLAT.names) + "\n"
    assert written(tmp_path, JsonParts(), FLAT, []).read_bytes() == b""


def test_a_csv_row_that_would_be_an_empty_line_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"column 's' is null.*readers skip.*format='json'"):
        written(tmp_path, CsvParts(), pa.schema({"s": pa.string()}), [{"s": "a"}, {"s": None}])


@pytest.mark.parametrize(
    ("format", "kind", "fix"),
    [
        ("csv", pa.list_(pa.int64()), "format='json'"),
        ("csv", pa.struct([("a", pa.int64())]), "columns of their own"),
        ("csv", pa.map_(pa.string(), pa.int64()), "format='json'"),
        ("csv", pa.binary(), "base64"),
        ("csv", pa.duration("us"), "int64"),
        ("json", pa.duration("us"), "int64"),
        ("json", pa.list_(pa.struct([("a", pa.duration("us"))])), "int64"),
        ("json", pa.map_(pa.int64(), pa.int64()), "cast the keys"),
    ],
)
def test_a_type_that_does_not_fit_is_refused_when_the_dataflow_is_built(
    format: str, kind: pa.DataType, fix: str, tmp_path: Path
) -> None:
    flow = cw.Dataflow("refused")
    rows = flow.read("in", cw.memory([], schema=pa.schema({"n": pa.int64(), "c": kind})))
    with pytest.raises(BuildError, match=f"step 'out': column 'c' of type .* cannot be written .*{fix}"):
        rows.write("out", cw.files(tmp_path / "out", format=format))
    assert not (tmp_path / "out").exists()


def test_wrong_settings_of_a_format_are_refused() -> None:
    for format, wrong, match in [
        ("parquet", {"compression": "brotli"}, "'zstd', 'snappy', 'gzip', 'lz4' or 'none'"),
        ("parquet", {"compression": "zstd", "compression_level": 23}, "'zstd' has no level 23.*'zstd' 1 to 22"),
        ("parquet", {"compression": "snappy", "compression_level": 1}, "'snappy' has no level 1"),
        ("parquet", {"row_group_rows": 0}, "row_group_rows must be at least 1, got 0"),
        ("json", {"compression": "snappy"}, "'gzip', 'zstd' or 'none'"),
        ("json", {"compression": "gzip", "compression_level": 0}, "'gzip' has no level 0.*'gzip' 1 to 9"),
        ("json", {"compression_level": 3}, "'none' has no level 3"),
        ("csv", {"row_group_rows": 5}, "as a csv sink has no option 'row_group_rows'. It is for other formats"),
        ("json", {"delimiter": ","}, "as a json sink has no option 'delimiter'"),
        ("csv", {"delimiter": "||"}, "one ASCII character"),
        ("csv", {"delimiter": '"'}, "one ASCII character"),
    ]:
        with pytest.raises(ConfigError, match=match):
            cw.files("/data/out", format=format, **wrong).as_sink()
    with pytest.raises(BuildError, match=r"does not write 'orc'.*'parquet', 'json', 'csv'"):
        cw.files("/data/out", format="orc").as_sink()
