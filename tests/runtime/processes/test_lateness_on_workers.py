"""W4 on processes: the same rows are late at three parallelisms, through kills and rescales; DuckDB is the oracle."""

from __future__ import annotations

import random
from pathlib import Path

import duckdb
import polars as pl
import pytest
from runtime_world import disturb

import cutwater as cw

BOUND_S = 10
ROWS = 1_200


def write_files(folder: Path, chance: random.Random, kind: str) -> None:
    """Files whose times overlap by chance; some rows are behind their own file by more than the bound."""
    folder.mkdir()
    number = 0
    for f in range(6):
        at, rows = chance.randrange(0, 300), []
        for place in range(ROWS // 6):
            at += chance.choice([0, 1, 3])
            behind = chance.choice([0] * 12 + [5, 9, 15, 60, 200])
            rows.append({"id": number, "k": chance.randrange(5), "s": max(0, at - behind), "place": place})
            number += 1
        frame = pl.DataFrame(rows).with_columns(
            t=pl.from_epoch(pl.col("s") + 1_600_000_000, time_unit="s")
            .dt.cast_time_unit("us")
            .dt.replace_time_zone("UTC"),
            f=pl.lit(f),
        )
        if kind == "parquet":
            frame.write_parquet(folder / f"{f}.parquet", row_group_size=50)
        else:
            text = frame.with_columns(pl.col("t").dt.strftime("%Y-%m-%dT%H:%M:%SZ"))
            text.write_csv(folder / f"{f}.csv") if kind == "csv" else text.write_ndjson(folder / f"{f}.json")


def expected_late(folder: Path, kind: str) -> list[int]:
    """Rows whose window of 20 s had ended by what their own file had reached before them, less the bound."""
    read = {"parquet": "read_parquet", "csv": "read_csv", "json": "read_json"}[kind]
    return [
        row[0]
        for row in duckdb.sql(
            f"""SELECT id
            FROM (SELECT id, s, max(s) OVER before AS newest FROM {read}('{folder}/*.{kind}')
                WINDOW before AS (PARTITION BY f ORDER BY place ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING))
            WHERE ((1600000000 + s) // 20 + 1) * 20 <= 1600000000 + newest - {BOUND_S}
            ORDER BY id"""
        ).fetchall()
    ]


def flow_over(folder: Path, out: Path, kind: str) -> cw.Dataflow:
    flow = cw.Dataflow("lateness")
    files = cw.files(str(folder / f"*.{kind}"), rate=800, schema="id long, k long, s long, t timestamp, f long")
    rows = flow.read("in", files, event_time="t", out_of_order=f"{BOUND_S}s")
    counted = rows.key_by("k").window("w", cw.tumbling("20s")).aggregate("n", n=cw.count(), ids=cw.sum("id"))
    counted.write("out", cw.files(str(out / "windows"), roll_rows=200))
    counted.late.write("late", cw.files(str(out / "late"), roll_rows=50))
    return flow


def check(start, folder: Path, seed: int) -> None:  # type: ignore[no-untyped-def]
    chance = random.Random(seed)
    kind = chance.choice(["parquet", "csv", "json"])
    write_files(folder / "in", chance, kind)
    late = expected_late(folder / "in", kind)
    assert late, "the files have late rows"
    for parallelism, then in ((1, 3), (2, 1), (3, 2)):
        out = folder / f"out-{parallelism}"
        recovery = chance.choice(["job", "task"])
        job = start(
            flow_over(folder / "in", out, kind),
            parallelism=parallelism,
            checkpoint=str(folder / f"chk-{parallelism}"),
            recovery=recovery,
        )
        disturb(job, chance, then, ROWS // 10)
        assert job.await_termination(60)
        found = duckdb.sql(f"SELECT id FROM '{out}/late/*.parquet' ORDER BY id").fetchall()
        assert [row[0] for row in found] == late, f"seed {seed}, parallelism {parallelism}, recovery {recovery}"
        n, ids = duckdb.sql(f"SELECT sum(n), sum(ids) FROM '{out}/windows/*.parquet'").fetchone() or (0, 0)
        assert (n, ids) == (ROWS - len(late), ROWS * (ROWS - 1) // 2 - sum(late))


def test_w4_a_kill_and_a_rescale_make_no_row_late(start, tmp_path: Path) -> None:
    check(start, tmp_path, 1)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2, 18))
def test_w4_kills_and_rescales_make_no_row_late(start, tmp_path: Path, seed: int) -> None:
    check(start, tmp_path, seed)
