"""File sinks in a bucket, and how somebody else reads what they wrote: by another client, each format by a library that
did not write it."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
from collections.abc import Callable
from typing import Any

import obstore
import pyarrow.parquet as pq
import pytest
from obstore.store import S3Store
from sink_targets import OwnTarget

from cutwater.connectors.files.object_parts import ObjectSink
from cutwater.connectors.files.part_formats import CsvParts, JsonParts, ParquetParts
from cutwater.storage.store.bucket import Bucket


class BucketFiles(OwnTarget):
    """What a reader of the bucket sees.  A process dies or sleeps at a request: before it, or when it is answered."""

    def __init__(self, sink: ObjectSink, uri: str) -> None:
        super().__init__(sink)
        name, _, self._prefix = uri.removeprefix("s3://").partition("/")
        self._store = S3Store(name, client_options={"allow_http": True})
        self._random = random.Random(0)
        self._known: dict[tuple[str, str | None], list[int]] = {}

    def watch(self, patch: pytest.MonkeyPatch, moment: Callable[[], None]) -> None:
        real, random_ = Bucket._tries, self._random

        def tries(bucket: Bucket, what: str, key: str, call: Callable[[Any], Any]) -> Any:
            lost = random_.random() < 0.5
            if not lost:
                moment()
            answer = real(bucket, what, key, call)
            if lost:
                moment()  # it was done, and nobody hears of it
            return answer

        patch.setattr(Bucket, "_tries", tries)

    def names(self) -> list[str]:
        return [path for path, _ in self._objects()]

    def rows(self) -> list[int]:
        rows: list[int] = []
        for path, tag in self._objects():
            if (path, tag) not in self._known:
                self._known[path, tag] = _rows(path, bytes(obstore.get(self._store, path).bytes()))
            rows += self._known[path, tag]
        return rows

    def leftovers(self) -> list[str]:
        staged = [meta["path"] for some in obstore.list(self._store, f"{self._prefix}/_cutwater") for meta in some]
        return [path for path in staged if not path.endswith("/.folder")]

    def _objects(self) -> list[tuple[str, str | None]]:
        found = obstore.list_with_delimiter(self._store, self._prefix)["objects"]
        return [(m["path"], m["e_tag"]) for m in found if not m["path"].rpartition("/")[2].startswith((".", "_"))]


def _rows(path: str, data: bytes) -> list[int]:
    if path.endswith(".parquet"):
        return pq.ParquetFile(io.BytesIO(data)).read()["row"].to_pylist()
    text = io.StringIO((gzip.decompress(data) if path.endswith(".gz") else data).decode())
    if ".csv" in path:
        return [int(row["row"]) for row in csv.DictReader(text)]
    return [json.loads(line)["row"] for line in text]


_MAKE: dict[str, Callable[[str], ObjectSink]] = {
    "parquet, a file per checkpoint": lambda uri: ObjectSink(uri, roll_interval_ms=0),
    "parquet, rolled by size": lambda uri: ObjectSink(
        uri, ParquetParts(row_group_rows=4), roll_rows=12, roll_interval_ms="1h"
    ),
    "JSON lines, rolled at the end": lambda uri: ObjectSink(uri, JsonParts(), roll_interval_ms="1h"),
    "CSV, compressed": lambda uri: ObjectSink(uri, CsvParts("gzip"), roll_rows=20, roll_interval_ms="1h"),
}
KINDS = list(_MAKE)


def files_in_bucket(kind: str, uri: str) -> BucketFiles:
    """One of ``KINDS``, at a URI below which nothing lies."""
    return BucketFiles(_MAKE[kind](uri), uri)
