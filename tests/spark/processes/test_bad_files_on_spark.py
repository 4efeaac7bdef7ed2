"""A program as a user writes it from the guide, over files with all that can be wrong, killed and rescaled on Spark."""

from __future__ import annotations

import bz2
import gzip
import random
import re
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from spark_world import Killer, wait_until

import cutwater as cw
from cutwater.errors import CutwaterError

pytestmark = [pytest.mark.spark, pytest.mark.full]
SCHEMA = "id long, at timestamp, page string, cents long, note string"
LONG = b"x" * (10 << 20)
FILES, SHARE = 12, 3_000


def line(kind: str, row: dict[str, Any], note: bytes) -> bytes:
    at = f"2026-01-01T{row['s'] // 3600:02}:{row['s'] // 60 % 60:02}:{row['s'] % 60:02}Z".encode()
    if kind == "csv":
        return b"%d,%s,%s,%d,%s" % (row["id"], at, row["page"].encode(), row["cents"], note)
    return b'{"id":%d,"at":"%s","page":"%s","cents":%d,"note":"%s"}' % (
        *(row["id"], at, row["page"].encode(), row["cents"]),
        note,
    )


def bad_lines(kind: str) -> list[bytes]:
    """Each is a row that cannot be read, in a column that somebody reads."""
    at = b"2026-01-01T00:00:00Z"
    if kind == "csv":
        return [b"1,%s,\xff,2,n" % at, b"%s,%s,p,2,n" % (b"9" * 25, at), b"1,2,3", b"1,%s,p,many,n" % at]
    start = b'{"id":1,"at":"%s","page":' % at
    return [
        start + b'"\xff","cents":2}',
        b'{"id":%s,"at":"%s","page":"p","cents":2}' % (b"9" * 25, at),
        start + b'"p","page":"q","cents":2}',
        start + b'"p","cents":"many"}',
        start,
    ]


def write_files(folder: Path, kind: str, end: str, chance: random.Random) -> tuple[pl.DataFrame, set[tuple[str, int]]]:
    """Files with good and bad lines; returns the good rows, and file and line of each bad one."""
    folder.mkdir()
    rows: list[dict[str, Any]] = []
    bad: set[tuple[str, int]] = set()
    for number in range(FILES):
        path = folder / f"{number:02}.{kind}{end}"
        lines = [b"id,at,page,cents,note"] if kind == "csv" else []
        mixed = number % 3 == 0
        for place in range(SHARE):
            row = {"id": number * SHARE + place, "s": number * 600 + place // 5, "page": f"p{chance.randrange(50)}"}
            row["cents"] = chance.randrange(10_000)
            rows.append(row)
            note = LONG if number == 4 and place == 77 else b"\xff" if place % 501 == 7 and kind == "json" else b"n"
            lines.append(line(kind, row, note))
            if chance.random() < 0.002:
                lines.append(chance.choice(bad_lines(kind)))
                bad.add((str(path), len(lines)))
            if mixed and chance.random() < 0.01:
                lines.append(b"")
        ends = [b"\r\n" if mixed and chance.random() < 0.5 else b"\n" for _ in lines]
        data = (b"\xef\xbb\xbf" if number == 2 else b"") + b"".join(a + b for a, b in zip(lines, ends, strict=True))
        if number == 5 and not end:
            lines.append(bad_lines(kind)[-1] if kind == "json" else b"1,2")
            bad.add((str(path), len(lines)))
            data += lines[-1]  # the writer was stopped in the middle of a line
        path.write_bytes(packed(data, end))
    return pl.DataFrame(rows), bad


def packed(data: bytes, end: str) -> bytes:
    if end == ".zst":
        out = pa.BufferOutputStream()
        with pa.CompressedOutputStream(out, "zstd") as stream:
            stream.write(data)
        return out.getvalue().to_pybytes()
    return {"": lambda: data, ".gz": lambda: gzip.compress(data, 1), ".bz2": lambda: bz2.compress(data)}[end]()


def program(folder: Path, out: Path, rate: float | None) -> cw.Dataflow:
    flow = cw.Dataflow("shop")
    files = cw.files(folder, schema=SCHEMA, rate=rate)
    events = flow.read("events", files, event_time="at", out_of_order="10s", bad_rows="dead_letter")
    dear = events.filter("dear", pl.col("cents") > 500)
    minutes = dear.key_by("page").window("minute", cw.tumbling("1m"))
    sums = minutes.aggregate("sums", n=cw.count(), ids=cw.sum("id"), cents=cw.sum("cents"))
    sums.write("out", cw.files(str(out / "sums")))
    events.dead_letters.write("bad", cw.files(str(out / "bad")))
    return flow


@pytest.mark.parametrize(
    ("kind", "end", "rate", "first", "then"),
    [
        ("json", "", 8_000, 1, 3),
        ("json", ".gz", 12_000, 3, 2),
        ("json", ".zst", 8_000, 2, 1),
        ("csv", "", 12_000, 2, 3),
        ("csv", ".bz2", 8_000, 3, 1),
        ("csv", ".zst", 12_000, 1, 2),
    ],
)
def test_every_good_row_counts_once_and_every_bad_one_is_told_once(
    spark: SparkSession, tmp_path: Path, kind: str, end: str, rate: float, first: int, then: int
) -> None:
    chance = random.Random(f"{kind}{end}")
    good, bad = write_files(tmp_path / "in", kind, end, chance)
    out = tmp_path / "out"
    job = program(tmp_path / "in", out, rate).start(
        spark, checkpoint=tmp_path / "chk", interval="300ms", parallelism=first
    )
    wait_until(lambda: job.status.rows_read > 3_000, "rows")
    Killer(job, chance).kill()
    job.rescale(then)
    wait_until(lambda: job.status.phase == "running", "the restart")
    Killer(job, chance).kill()
    assert job.await_termination(120)
    expected = duckdb.sql(
        "SELECT s // 60 * 60 + 1767225600 AS w, page, count(*), sum(id)::bigint, sum(cents)::bigint FROM good "
        "WHERE cents > 500 GROUP BY ALL ORDER BY ALL"
    ).fetchall()
    found = duckdb.sql(
        f"SELECT epoch(window_start)::bigint AS w, page, n, ids, cents FROM '{out}/sums/*.parquet' ORDER BY ALL"
    ).fetchall()
    assert len(good) == FILES * SHARE
    assert found == expected
    letters = duckdb.sql(f"SELECT origin, position FROM '{out}/bad/*.parquet'").fetchall()
    assert sorted(letters) == sorted(bad)


@pytest.mark.parametrize("kind", ["json", "csv"])
def test_what_is_wrong_with_a_file_itself_stops_the_job_and_names_it(
    spark: SparkSession, tmp_path: Path, kind: str
) -> None:
    write_files(tmp_path / "in", kind, ".gz", random.Random(3))
    damaged = tmp_path / "in" / f"07.{kind}.gz"
    damaged.write_bytes(damaged.read_bytes()[:-1_000])
    flow = program(tmp_path / "in", tmp_path / "out", None)
    with pytest.raises(CutwaterError, match=re.escape(damaged.name) + ".* is truncated"):
        flow.run(spark, checkpoint=str(tmp_path / "chk"), parallelism=2)
