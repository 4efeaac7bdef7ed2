"""Files of every format through a filter and windows, with a kill and a rescale on the way; DuckDB is the oracle.

Lines are plain and odd by turns, so that both ways of parsing take part; what nobody reads is bad now and then; bad
rows are dead letters.  Or all rows are good, files are read in many parts, and texts of Parquet come as dictionaries.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pytest
from runtime_world import disturb

import cutwater as cw
from cutwater.connectors.files import listing
from cutwater.connectors.files.source import FileSource
from cutwater.connectors.text.text_dictionary import FEW_ROWS

FILES = 6
PAGES = ["p1", "p2", 'a "page"', "日本語", "\U0001f600", "tab\there", "x" * 40]
UNQUOTED = [page for page in PAGES if '"' not in page]
SCHEMA = "id long, s long, at timestamp, page string, kind string, cents double, more long"


class Nobody:
    """Whom no row is handed to."""

    step, subtask = "rows", 0

    def dead_letter(self, origin: str, position: int, reason: str, raw: str) -> None:
        raise AssertionError(reason)


def rows_of(chance: random.Random, rows: int, pages: list[str]) -> list[dict[str, Any]]:
    """In order of time; ``cents`` of few and of many digits."""
    made: list[dict[str, Any]] = []
    for id in range(rows):
        cents = chance.choice([chance.randint(1, 999) / 4, chance.random(), None])
        kind = chance.choice(["view", "view", "click", "buy"])
        made.append({"id": id, "s": id // 20, "page": chance.choice(pages), "kind": kind, "cents": cents})
    return made


def write_files(folder: Path, chance: random.Random, kind: str, rows: list[dict[str, Any]], *, good: bool) -> int:
    """The rows in files that follow each other in time, with bad lines between; returns how many those are."""
    folder.mkdir()
    share, bad = len(rows) // FILES, 0
    for number in range(FILES):
        part = rows[number * share : (number + 1) * share]
        path = folder / f"{number}.{kind}"
        if kind == "parquet":
            frame = pl.DataFrame(part).with_columns(at=times(), more=pl.lit(1))
            frame.write_parquet(path, row_group_size=100)
            continue
        lines = ["id,s,at,page,kind,cents,more"] if kind == "csv" else []
        for row in part:
            lines.append(csv_line(chance, row, quotes=not good) if kind == "csv" else json_line(chance, row))
            if not good and chance.random() < 0.01:
                bad += 1
                lines.append('"?",1,2,3,4,5,6' if kind == "csv" else '{"id": "?"}')
        path.write_text("\n".join(lines) + "\n")
    return bad


def times() -> pl.Expr:
    return pl.from_epoch(pl.col("s") + 1_600_000_000, time_unit="s").cast(pl.Datetime("us", "UTC"))


def time_text(row: dict[str, Any]) -> str:
    minutes, seconds = divmod(1_600_000_000 + row["s"] - 1_599_998_400, 60)
    return f"2020-09-13T{12 + minutes // 60:02}:{minutes % 60:02}:{seconds:02}Z"


def json_line(chance: random.Random, row: dict[str, Any]) -> str:
    """An object whose fields come in any order; texts with escapes or without; ``more`` is whatever."""
    fields = {**row, "at": time_text(row), "more": chance.choice([1, 1, 1, "no number", [1, {"b": "}"}]])}
    names = chance.sample(list(fields), len(fields)) if chance.random() < 0.1 else list(fields)
    return json.dumps({name: fields[name] for name in names}, ensure_ascii=chance.random() < 0.3)


def csv_line(chance: random.Random, row: dict[str, Any], *, quotes: bool) -> str:
    page = row["page"]
    if '"' in page or (quotes and chance.random() < 0.2):
        page = '"' + page.replace('"', '""') + '"'
    id = f"{row['id']:06}" if chance.random() < 0.05 else row["id"]
    cents = "" if row["cents"] is None else repr(row["cents"])
    more = chance.choice(["1", "1", "no number", ""])
    return f"{id},{row['s']},{time_text(row)},{page},{row['kind']},{cents},{more}"


def flow_over(folder: Path, out: Path, kind: str, rate: float, *, good: bool) -> cw.Dataflow:
    flow = cw.Dataflow("first-job")
    files = cw.files(str(folder / f"*.{kind}"), schema=SCHEMA, rate=rate)
    bad_rows = "fail" if good else "dead_letter"
    events = flow.read("events", files, event_time="at", out_of_order="10s", bad_rows=bad_rows)
    paid = events.filter("paid", pl.col("kind") != "view").key_by("page").window("w", cw.tumbling("20s"))
    sums = paid.aggregate("sums", n=cw.count(), ids=cw.sum("id"), cents=cw.max("cents"))
    sums.write("out", cw.files(str(out / "windows"), roll_rows=500))
    if not good:
        events.dead_letters.write("bad", cw.files(str(out / "bad"), roll_rows=50))
    return flow


def check(
    start: Any,
    folder: Path,
    seed: int,
    kind: str,
    *shapes: tuple[int, int],
    good: bool = False,
    rate: int | None = None,
) -> None:
    """``shapes``: parallelisms of a job, at first and after the rescale; ``good``: there are no bad rows."""
    chance = random.Random(seed)
    rate = rate or chance.choice([800, 4_000])
    rows = rows_of(chance, 2 * rate, UNQUOTED if good else PAGES)
    rows = rows[: len(rows) // FILES * FILES]
    bad = write_files(folder / "in", chance, kind, rows, good=good)
    frame = pl.DataFrame(rows)  # noqa: F841 - DuckDB reads it
    expected = duckdb.sql(
        "SELECT (1600000000 + s) // 20 * 20 AS start, page, count(*) AS n, sum(id)::bigint AS ids, max(cents) AS cents "
        "FROM frame WHERE kind <> 'view' GROUP BY ALL ORDER BY start, page"
    ).fetchall()
    for parallelism, then in shapes:
        out = folder / f"out-{parallelism}"
        recovery = chance.choice(["job", "task"])
        checkpoints = str(folder / f"checkpoints-{parallelism}")
        flow = flow_over(folder / "in", out, kind, rate, good=good)
        job = start(flow, parallelism=parallelism, checkpoint=checkpoints, recovery=recovery)
        disturb(job, chance, then, len(rows) // 10)
        assert job.await_termination(60)
        found = duckdb.sql(
            f"SELECT epoch(window_start)::bigint, page, n, ids, cents FROM '{out}/windows/*.parquet' ORDER BY ALL"
        ).fetchall()
        assert found == expected, f"{kind}, seed {seed}, rate {rate}, parallelism {parallelism}, recovery {recovery}"
        if bad:
            assert duckdb.sql(f"SELECT count(*) FROM '{out}/bad/*.parquet'").fetchone() == (bad,)


@pytest.mark.parametrize(("kind", "shape"), [("json", (1, 3)), ("csv", (3, 2)), ("parquet", (2, 1))])
def test_windows_over_files_are_whole_through_a_kill_and_a_rescale(
    start: Any, tmp_path: Path, kind: str, shape: tuple[int, int]
) -> None:
    check(start, tmp_path, 1, kind, shape)


@pytest.fixture
def small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "SPLIT_BYTES", 2_000)


@pytest.mark.usefixtures("small_splits")
@pytest.mark.parametrize(("kind", "shape"), [("json", (3, 2)), ("csv", (1, 3)), ("parquet", (2, 3))])
def test_windows_over_parts_of_files_are_whole_through_a_kill_and_a_rescale(
    start: Any, tmp_path: Path, kind: str, shape: tuple[int, int]
) -> None:
    check(start, tmp_path, 1, kind, shape, good=True)
    splits = FileSource(str(tmp_path / f"in/*.{kind}"), schema=SCHEMA).discover()
    assert len(splits) >= 2 * FILES


@pytest.mark.parametrize(("kind", "shape"), [("json", (2, 3)), ("csv", (3, 1))])
def test_windows_over_texts_as_dictionaries_are_whole_through_a_kill_and_a_rescale(
    start: Any, tmp_path: Path, kind: str, shape: tuple[int, int]
) -> None:
    """Files of so many rows that columns of few texts come as dictionaries."""
    check(start, tmp_path, 1, kind, shape, good=True, rate=4 * FEW_ROWS)
    source = FileSource(str(tmp_path / f"in/0.{kind}"), schema=SCHEMA)
    read = frozenset({"id", "at", "page", "kind", "cents"})
    reader = source.reading(read, dictionaries=True).open(source.discover()[0], None, Nobody())
    first = reader.read(10_000)
    assert first is not None
    assert isinstance(first["page"], pa.DictionaryArray)


@pytest.mark.full
@pytest.mark.usefixtures("small_splits")
@pytest.mark.parametrize("seed", range(2, 8))
@pytest.mark.parametrize("kind", ["json", "csv", "parquet"])
def test_windows_over_parts_of_files_are_whole_at_any_rate(start: Any, tmp_path: Path, seed: int, kind: str) -> None:
    check(start, tmp_path, seed, kind, (1, 3), (3, 2), (2, 1), good=True)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2, 8))
@pytest.mark.parametrize("kind", ["json", "csv", "parquet"])
def test_windows_over_files_are_whole_at_any_rate(start: Any, tmp_path: Path, seed: int, kind: str) -> None:
    check(start, tmp_path, seed, kind, (1, 3), (3, 2), (2, 1))
