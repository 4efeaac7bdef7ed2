"""What every source promises: any recorded position gives exactly the rest, whatever the batches' sizes."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import cutwater as cw
from cutwater.connectors.base import Source
from cutwater.connectors.files import listing
from cutwater.connectors.files.source import FileSource
from cutwater.connectors.generate import generate, rate
from cutwater.connectors.memory import BAD, END, PAUSE, memory
from cutwater.testing import SourceContract
from iceberg_world import Warehouse

ROWS = 57
WIDE_ROWS = 2500  # more than one block of a text file


def text(n: int) -> str | None:
    return None if n % 5 == 0 else f'line "{n}",\nñ' if n % 7 == 0 else f"t{n}"


def table(first: int = 0, rows: int = ROWS) -> pa.Table:
    numbers = range(first, first + rows)
    return pa.table(
        {
            "n": pa.array(numbers, pa.int64()),
            "text": pa.array([text(n) for n in numbers], pa.string()),
            "at": pa.array([(n - 30) * 86_400_000_000 + n for n in numbers], pa.timestamp("us", tz="UTC")),
            "x": pa.array([None if n % 11 == 3 else n / 3 for n in numbers], pa.float64()),
        }
    )


def as_csv(rows: pa.Table) -> bytes:
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\r\n")
    writer.writerow(rows.column_names)
    for row in rows.to_pylist():
        writer.writerow([row["n"], row["text"], row["at"].isoformat(), row["x"]])
    return out.getvalue().encode()


def as_json(rows: pa.Table) -> bytes:
    lines = [json.dumps({**row, "at": row["at"].isoformat()}, ensure_ascii=False) for row in rows.to_pylist()]
    return "\n\n".join(lines).encode()


def parquet_source(tmp: Path) -> Source:
    for i in range(3):
        pq.write_table(table(i * ROWS), tmp / f"part-{i}.parquet", row_group_size=10)
    pq.write_table(table(0, 0), tmp / "part-9.parquet")
    return FileSource(str(tmp))


def split_parquet_source(tmp: Path) -> Source:
    pq.write_table(table(), tmp / "big.parquet", row_group_size=5, compression="none")
    return FileSource(str(tmp / "*.parquet"))


def bad_parquet_source(tmp: Path) -> Source:
    pq.write_table(table(), tmp / "nulls.parquet", row_group_size=13)
    return FileSource(str(tmp), schema="n long, text string not null", bad_rows="dead_letter")


def csv_source(tmp: Path) -> Source:
    (tmp / "a.csv").write_bytes(b"\xef\xbb\xbf" + as_csv(table()))
    (tmp / "b.csv").write_bytes(as_csv(table(ROWS, 3))[:-2])
    (tmp / "c.csv").write_bytes(b"")
    (tmp / "d.csv").write_bytes(b"n,text,at,x\n")
    (tmp / "e.csv.gz").write_bytes(gzip.compress(as_csv(table(ROWS))[:300]) + gzip.compress(as_csv(table(ROWS))[300:]))
    return FileSource(str(tmp), schema="n long, text string, at timestamp, x double")


def bad_csv_source(tmp: Path) -> Source:
    good = as_csv(table(0, 20)).split(b"\r\n")
    bad = [b"1,2", b"x,,2020-01-01,1", b"", b"5,\xff,2020-01-01,1"]
    lines = good[:5] + bad + good[5:9] + [b"seven"] + good[9:-1] + [b"last", b'9,"open', good[2], b"very last"]
    (tmp / "bad.csv").write_bytes(b"\n".join(lines))
    return FileSource(str(tmp), schema="n long, text string, at timestamp, x double", bad_rows="dead_letter")


def json_source(tmp: Path) -> Source:
    (tmp / "a.jsonl").write_bytes(as_json(table()))
    (tmp / "b.json.bz2").write_bytes(bz2.compress(as_json(table(ROWS)) + b"\n"))
    return FileSource([str(tmp / "b.json.bz2"), str(tmp / "a.jsonl")])


def bad_json_source(tmp: Path) -> Source:
    lines = as_json(table()).split(b"\n\n")
    lines[3:3] = [b"{", b"[1]", b'{"n": "seven"}', b"   ", b'{"n": 1} {"n": 2}']
    (tmp / "a.jsonl").write_bytes(b"\n".join([*lines, b"end"]))
    return FileSource(str(tmp), schema="n long, text string, at timestamp, x double", bad_rows="dead_letter")


def several_blocks_source(tmp: Path) -> Source:
    rows = b"".join(b"%d,%s\n" % (n, b"x" * 1000) for n in range(WIDE_ROWS))
    (tmp / "many.csv").write_bytes(b"n,text\n" + rows)
    return FileSource(str(tmp))


def rows_from_numbers(start: int, count: int) -> pa.RecordBatch:
    return table(start, count).to_batches()[0]


def generated_source(tmp: Path) -> Source:
    return generate(rows_from_numbers, rows=ROWS, partitions=3, start=5, stripe_rows=4)


def rate_source(tmp: Path) -> Source:
    return rate(100.0, rows=600, partitions=2)


def memory_source(tmp: Path) -> Source:
    rows = table().to_batches()[0]
    items = [rows.slice(0, 0), rows.slice(0, 20), PAUSE(0.0), rows.slice(20, 1), BAD("?"), rows.slice(21), END(), rows]
    return memory(items, [], [rows], [rows, BAD("!")]).with_bad_rows("dead_letter")


def delta_source(tmp: Path) -> Source:
    for i in range(3):
        deltalake.write_deltalake(tmp, table(i * ROWS), mode="append")
    return cw.delta(tmp, start=0, until=2).as_source()


def iceberg_source(tmp: Path) -> Source:
    warehouse = Warehouse(tmp)
    made = warehouse.make(schema=table().schema, properties={"write.parquet.row-group-limit": "10"})
    for i in range(3):
        made.append(table(i * ROWS))
    return warehouse.named(until="latest").as_source()


SOURCES: list[Callable[[Path], Source]] = [
    delta_source,
    iceberg_source,
    parquet_source,
    split_parquet_source,
    bad_parquet_source,
    csv_source,
    bad_csv_source,
    json_source,
    bad_json_source,
    several_blocks_source,
    generated_source,
    rate_source,
    memory_source,
]


ROWS_OF = {
    "parquet": 3 * ROWS,
    "bad_parquet": 45,
    "csv": [ROWS, 3, 0, 0, ROWS],
    "bad_csv": [21],
    "json": 2 * ROWS,
    "bad_json": ROWS,
    "several_blocks": [WIDE_ROWS],
    "rate": 600,
    "memory": [ROWS, 0, ROWS, ROWS],
    "delta": 3 * ROWS,
    "iceberg": [0, ROWS, ROWS, ROWS],
}
BAD_ROWS_OF = {"bad_parquet": 12, "bad_csv": 7, "bad_json": 5, "memory": 2}


class TestSources(SourceContract):
    @pytest.fixture(params=SOURCES, ids=lambda make: make.__name__.removesuffix("_source"))
    def source(self, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
        if request.param is several_blocks_source:  # which has them in one split
            self.sizes = (100, 4096)
        else:
            monkeypatch.setattr(listing, "SPLIT_BYTES", 1000)
        return request.param(tmp_path)

    @pytest.fixture
    def rows(self, request: pytest.FixtureRequest) -> list[int] | int:
        return ROWS_OF.get(request.node.callspec.id, ROWS)

    @pytest.fixture
    def bad_rows(self, request: pytest.FixtureRequest) -> int:
        return BAD_ROWS_OF.get(request.node.callspec.id, 0)


def test_ours_are_bounded(tmp_path: Path) -> None:
    for make in SOURCES:
        (tmp_path / make.__name__).mkdir()
        assert make(tmp_path / make.__name__).bounded
