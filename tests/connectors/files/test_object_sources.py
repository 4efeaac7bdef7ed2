"""Files in a bucket as a source: which are read, each row once and from any row on, and what happens to them."""

from __future__ import annotations

import gzip
import io
import json
import pickle
from collections.abc import Callable

import obstore
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from obstore.store import S3Store

from cutwater.connectors.files import listing
from cutwater.connectors.files.source import FileSource
from cutwater.errors import BuildError, ConfigError, DataError
from object_proxy import Proxy, half_answered, told

Put = Callable[[str, bytes], None]


@pytest.fixture
def put(bucket: str) -> Put:
    """``put(name, data)``: with another client than the engine's."""
    prefix = bucket.removeprefix("s3://").partition("/")[2]

    def put(name: str, data: bytes) -> None:
        store = S3Store(bucket.removeprefix("s3://").partition("/")[0], client_options={"allow_http": True})
        obstore.put(store, f"{prefix}/{name}", data)

    return put


def parquet(values: range, **options: object) -> bytes:
    table = pa.table({"id": pa.array(values, pa.int64()), "text": [f"row {value}" for value in values]})
    file = io.BytesIO()
    pq.write_table(table, file, **options)
    return file.getvalue()


def lines(values: range) -> bytes:
    return b"".join(json.dumps({"id": value, "text": f"row {value}"}).encode() + b"\n" for value in values)


def csv(values: range) -> bytes:
    return b"id,text\n" + b"".join(f"{value},row {value}\n".encode() for value in values)


def read(source: FileSource, *, reopen_after: int = 0, max_rows: int = 10_000) -> list[int]:
    """All ids; with ``reopen_after`` a new reader goes on after so many reads, as after a failure."""
    source = pickle.loads(pickle.dumps(source))
    found: list[int] = []
    for split in source.discover():
        reader = source.open(split, None, None)
        reads = 0
        while not reader.exhausted:
            batch = reader.read(max_rows)
            if batch is None:
                continue
            found += batch.column("id").to_pylist()
            reads += 1
            if reopen_after and reads % reopen_after == 0:
                position = json.loads(json.dumps(reader.position))
                reader.close()
                reader = source.open(split, position, None)
        reader.close()
    return found


MAKERS = {"parquet": parquet, "json": lines, "csv": csv, "json.gz": lambda values: gzip.compress(lines(values))}


@pytest.mark.parametrize("format", MAKERS)
def test_every_format_is_read_once_and_from_any_row_on(bucket: str, put: Put, format: str) -> None:
    put(f"in/a.{format}", MAKERS[format](range(3000)))
    put(f"in/b/c.{format}", MAKERS[format](range(3000, 5000)))
    source = FileSource(f"{bucket}/in")
    assert source.schema.names == ["id", "text"]
    assert read(source) == list(range(5000))
    assert read(source, reopen_after=1, max_rows=700) == list(range(5000))


def test_which_objects_count(bucket: str, put: Put) -> None:
    for name in ("day-1/a.json", "day-1/_SUCCESS", "day-1/.a.json.crc", "day-2/x/b.json", "_tmp/c.json", "other.csv"):
        put(f"in/{name}", lines(range(1)))
    put("in/day-1", b"")  # as some tools mark a folder
    put("part/k=1/a.json", lines(range(1)))

    def found(path: str) -> list[str]:
        return [e.path.removeprefix(f"{bucket}/in/") for e in listing.list_files([path], may_be_empty=False)]

    assert found(f"{bucket}/in/**/*.json") == ["day-1/a.json", "day-2/x/b.json"]
    assert found(f"{bucket}/in/day-*") == ["day-1/a.json", "day-2/x/b.json"]
    assert found(f"{bucket}/in/*.csv") == ["other.csv"]
    assert found(f"{bucket}/in/day-2/x/b.json") == ["day-2/x/b.json"]
    assert found(f"{bucket}/in") == ["day-1/a.json", "day-2/x/b.json", "other.csv"]
    for path in (f"{bucket}/none", f"{bucket}/in/*.orc"):
        with pytest.raises(BuildError, match=r"(there is no|nothing matches) 's3://cutwater-tests/"):
            found(path)
    with pytest.raises(BuildError, match="partitioned by 'k'"):
        found(f"{bucket}/part")


@pytest.mark.parametrize("format", ["parquet", "json", "csv"])
def test_a_large_object_is_split_among_readers(
    bucket: str, put: Put, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    monkeypatch.setattr(listing, "SPLIT_BYTES", 100_000)
    options = {"row_group_size": 5000, "compression": "none"} if format == "parquet" else {}
    data = MAKERS[format](range(40_000), **options)
    put(f"in/large.{format}", data)
    source = FileSource(f"{bucket}/in/large.{format}")
    splits = source.discover()
    assert len(splits) >= 4
    proxy.requests.clear()
    assert read(source) == list(range(40_000))
    asked = [request for request in proxy.requests if request.kind == "get"]
    assert all("Range" in {name.title() for name in request.headers} for request in asked)
    assert read(source, reopen_after=2, max_rows=1000) == list(range(40_000))


def test_an_object_that_is_replaced_is_told_and_not_mixed(bucket: str, put: Put) -> None:
    put("in/a.json", lines(range(1000)))
    source = FileSource(f"{bucket}/in", schema="id long")
    (split,) = source.discover()
    put("in/a.json", lines(range(1000, 2000))[: len(lines(range(1000)))])
    with pytest.raises(DataError, match=r"a.json was changed or replaced after the job had found it"):
        source.open(split, None, None).read(10)
    with pytest.raises(DataError, match="was changed or replaced"):
        source.discover()


def test_an_object_that_is_gone_is_told(bucket: str, put: Put) -> None:
    put("in/a.json", lines(range(1000)))
    source = FileSource(f"{bucket}/in", schema="id long")
    (split,) = source.discover()
    store = S3Store(bucket.removeprefix("s3://").partition("/")[0], client_options={"allow_http": True})
    obstore.delete(store, f"{bucket.partition('//')[2].partition('/')[2]}/in/a.json")
    with pytest.raises(DataError, match=r"a.json was changed or replaced after the job had found it: it is gone"):
        source.open(split, None, None).read(10)


def test_a_watched_prefix_gives_what_comes_until_the_marker(bucket: str, put: Put, proxy: Proxy) -> None:
    source = FileSource(f"{bucket}/in", watch=True, schema="id long", format="json", end_marker="_DONE")
    assert source.discover() == []
    put("in/a", lines(range(10)))
    assert [split.id for split in source.discover()] == [f"{bucket}/in/a"]
    put("in/b", lines(range(10, 20)))
    proxy.requests.clear()
    assert len(source.discover()) == 2
    assert proxy.count() <= 2, "a listing, and the marker"
    assert not source.bounded
    put("in/_DONE", b"")
    assert len(source.discover()) == 2
    source.discover()
    assert source.bounded
    assert source.discover_interval_ms >= 2000, "each look is paid for"


def test_what_cannot_be_is_told_before_anything_runs(bucket: str) -> None:
    with pytest.raises(BuildError, match="objects cannot be followed"):
        FileSource(f"{bucket}/in", watch=True, follow=True)
    with pytest.raises(ConfigError, match="names a bucket and a prefix"):
        FileSource("s3://key:secret@bucket/in")


def test_a_network_that_fails_is_read_through(bucket: str, put: Put, proxy: Proxy) -> None:
    put("in/a.parquet", parquet(range(20_000)))
    put("in/b.json", lines(range(20_000, 30_000)))
    source = FileSource(f"{bucket}/in", schema="id long")
    proxy.add("get", told(503, "SlowDown"), times=2)
    proxy.add("get", half_answered, times=2)
    proxy.add("list", told(500, "InternalError"), times=1)
    assert read(source) == list(range(30_000))
