"""What every source promises: any recorded position gives exactly the rest, whatever the batches' sizes."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark import cloudpickle

from cutwater.connectors.base import Source, Split
from cutwater.connectors.files import listing
from cutwater.connectors.files.source import FileSource
from cutwater.connectors.generate import generate, rate
from cutwater.connectors.memory import BAD, END, PAUSE, memory

ROWS = 57
WIDE_ROWS = 2500  # more than one block of a text file


class Context:
    """Collects the bad rows of one reader."""

    step, subtask = "read", 0

    def __init__(self) -> None:
        self.dead: list[tuple[str, int, str, str]] = []

    def dead_letter(self, origin: str, position: int, reason: str, raw: str) -> None:
        self.dead.append((origin, position, reason, raw))


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


SOURCES: list[Callable[[Path], Source]] = [
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


@pytest.fixture(params=SOURCES, ids=lambda make: make.__name__.removesuffix("_source"))
def source(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    if request.param is not several_blocks_source:  # which has them in one split
        monkeypatch.setattr(listing, "SPLIT_BYTES", 1000)
    return request.param(tmp_path)


def drain(source: Source, split: Split, position: Any, size: int) -> tuple[pa.Table, list[Any], Context]:
    """Rows, (position, rows so far, dead letters so far) after every read, and the context."""
    ctx = Context()
    reader = source.open(split, position, ctx)
    batches: list[pa.RecordBatch] = []
    marks: list[Any] = [(reader.position, 0, 0)]
    idle = seen = 0
    while not reader.exhausted:
        batch = reader.read(size)
        if batch is None:
            idle += 1
            assert idle < 1000, "nothing to read, yet not exhausted"
        else:
            assert 1 <= batch.num_rows <= size
            assert batch.schema.equals(source.schema, check_metadata=True)
            batch.validate(full=True)
            batches.append(batch)
            seen += batch.num_rows
            assert reader.origin
        marks.append((json.loads(json.dumps(reader.position)), seen, len(ctx.dead)))
    assert reader.read(size) is None
    reader.close()
    return pa.Table.from_batches(batches, source.schema), marks, ctx


def test_any_recorded_position_gives_exactly_the_rest(source: Source) -> None:
    for split in source.discover():
        whole, _, letters = drain(source, split, None, 1_000_000)
        for size in (1, 2, 7, 1000) if len(whole) < 1000 else (100, 4096):
            rows, marks, ctx = drain(source, split, None, size)
            assert rows.equals(whole)
            assert ctx.dead == letters.dead
            for position, seen, dead in marks[:: max(1, len(marks) // 15)] + marks[-1:]:
                rest, _, again = drain(source, split, position, 1000)
                assert rest.equals(whole.slice(seen))
                assert again.dead == letters.dead[dead:]


def test_splits_together_hold_every_row_once(source: Source, request: pytest.FixtureRequest) -> None:
    counts = [len(drain(source, split, None, 1000)[0]) for split in source.discover()]
    expected = {
        "parquet": 3 * ROWS,
        "bad_parquet": 45,
        "csv": [ROWS, 3, 0, 0, ROWS],
        "bad_csv": [21],
        "json": 2 * ROWS,
        "bad_json": ROWS,
        "several_blocks": [WIDE_ROWS],
        "rate": 600,
        "memory": [ROWS, 0, ROWS, ROWS],
    }.get(request.node.callspec.id, ROWS)
    assert (counts if isinstance(expected, list) else sum(counts)) == expected


def test_splits_are_found_again_with_the_same_ids_and_survive_json(source: Source) -> None:
    splits = source.discover()
    assert [json.loads(json.dumps([s.id, s.data])) for s in source.discover()] == [[s.id, s.data] for s in splits]
    assert len({s.id for s in splits}) == len(splits)


def test_a_shipped_copy_reads_the_same(source: Source) -> None:
    schema, splits = source.schema, source.discover()
    copy = cloudpickle.loads(cloudpickle.dumps(source))
    assert copy.schema.equals(schema)
    assert copy.discover() == splits
    for split in splits:
        assert drain(copy, split, None, 100)[0].equals(drain(source, split, None, 100)[0])


def test_an_exhausted_position_stays_exhausted(source: Source) -> None:
    for split in source.discover():
        _, marks, _ = drain(source, split, None, 1000)
        reader = source.open(split, marks[-1][0], Context())
        assert reader.read(10) is None
        assert reader.exhausted
        reader.close()


def test_it_is_bounded_and_can_be_rewound(source: Source) -> None:
    assert source.bounded
    assert source.replayable
    assert source.discover_interval_ms > 0
