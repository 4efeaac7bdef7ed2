"""Data sources and writers as users write them: rows are known by unique ids, and writers write files."""

from __future__ import annotations

import itertools
import json
import os
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import Row
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    InputPartition,
    SimpleDataSourceStreamReader,
    WriterCommitMessage,
)

SCHEMA = "id long, text string"


class Part(InputPartition):
    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def __repr__(self) -> str:
        return f"Part({self.first}, {self.count})"


def said(options: Any, what: str) -> None:
    """Into the log of calls, if there is one."""
    if "log" in options:
        with open(options["log"], "a") as log:
            log.write(what + "\n")


def wait_for_gate(options: Any, id: int) -> None:
    """Rows from option ``hold`` on come only once the file ``gate`` is there."""
    if "gate" in options and id == int(options["hold"]):
        while not os.path.exists(options["gate"]):
            time.sleep(0.01)


def rows_of(options: Any, part: Part) -> Iterator[tuple[int, str]]:
    for id in range(part.first, part.first + part.count):
        wait_for_gate(options, id)
        yield id, f"r{id}"


class Numbers(DataSource):
    """A batch of ``count`` rows in ``parts`` partitions."""

    @classmethod
    def name(cls) -> str:
        return "numbers"

    def schema(self) -> str:
        return SCHEMA

    def reader(self, schema: Any) -> DataSourceReader:
        return NumbersReader(self.options)


class NumbersReader(DataSourceReader):
    def __init__(self, options: Any) -> None:
        self.options = options
        self.asked = False

    def partitions(self) -> list[InputPartition]:
        said(self.options, "partitions")
        self.asked = True  # Spark pickles the reader behind this
        count, parts = int(self.options["count"]), int(self.options.get("parts", 1))
        size = count // parts
        return [Part(n * size, size) for n in range(parts)]

    def read(self, partition: Part) -> Iterator[Any]:
        assert self.asked
        kind = self.options.get("kind", "tuples")
        rows = rows_of(self.options, partition)
        if kind == "tuples":
            yield from rows
        elif kind == "rows":
            yield from (Row(text=text, id=id) for id, text in rows)
        elif kind == "fails":
            yield from itertools.islice(rows, 100)
            raise ValueError("no such thing as 100")
        else:
            for first in range(partition.first, partition.first + partition.count, 1000):
                ids = list(range(first, min(first + 1000, partition.first + partition.count)))
                for id in ids:
                    wait_for_gate(self.options, id)
                yield pa.record_batch({"text": [f"r{id}" for id in ids], "id": ids})


class Whims(Numbers):
    """Other texts at each read, and no partitions, as sources of made-up data are."""

    def reader(self, schema: Any) -> DataSourceReader:
        return WhimsReader(self.options)


class WhimsReader(NumbersReader):
    def partitions(self) -> list[InputPartition]:
        raise NotImplementedError

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert partition.value is None
        said(self.options, "read")
        for id, _ in rows_of(self.options, Part(0, int(self.options["count"]))):
            yield id, uuid.uuid4().hex


class Ticks(DataSource):
    """A stream of as many rows as a file's size says; each range has ``parts`` partitions of consecutive ids."""

    def schema(self) -> str:
        return SCHEMA

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        kinds = {"new": NewTicksReader, "whims": WhimsTicksReader, "now": AvailableNowReader}
        return kinds.get(self.options.get("kind", ""), TicksReader)(self.options)


def grow(path: Path, rows: int) -> None:
    """So many more rows are there to read."""
    with path.open("ab") as file:
        file.truncate((path.stat().st_size if path.exists() else 0) + rows)


class TicksReader(DataSourceStreamReader):
    def __init__(self, options: Any) -> None:
        self.options = options

    def initialOffset(self) -> dict[str, int]:
        return {"id": 0}

    def latestOffset(self) -> dict[str, int]:  # type: ignore[override] - as before 4.2
        return {"id": os.path.getsize(self.options["rows"])}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        parts = int(self.options.get("parts", 1))
        size = -(-(end["id"] - start["id"]) // parts)
        firsts = range(start["id"], end["id"], size)
        return [Part(first, min(size, end["id"] - first)) for first in firsts]

    def read(self, partition: Part) -> Iterator[Any]:
        said(self.options, f"read {partition}")
        return rows_of(self.options, partition)

    def commit(self, end: dict[str, int]) -> None:
        said(self.options, f"commit {end['id']}")

    def stop(self) -> None:
        said(self.options, "stop")


class NewTicksReader(TicksReader):
    """As from 4.2 on: a start, and a limit."""

    def latestOffset(self, start: dict[str, int], limit: Any) -> dict[str, int]:  # type: ignore[override]
        most = getattr(limit, "max_rows", 10**9)
        return {"id": min(start["id"] + most, os.path.getsize(self.options["rows"]))}

    def getDefaultReadLimit(self) -> Any:
        from pyspark.sql.streaming.datasource import ReadMaxRows

        return ReadMaxRows(700)


class AvailableNowReader(NewTicksReader):
    """Fixes its end when it is told to."""

    def prepareForTriggerAvailableNow(self) -> None:
        self.fixed = os.path.getsize(self.options["rows"])

    def latestOffset(self, start: dict[str, int], limit: Any) -> dict[str, int]:  # type: ignore[override]
        with open(self.options["rows"], "ab") as file:  # more come all the time
            file.truncate(os.path.getsize(self.options["rows"]) + 10)
        return {"id": min(start["id"] + 700, self.fixed)}


class WhimsTicksReader(TicksReader):
    """Other texts at each read."""

    def read(self, partition: Part) -> Iterator[Any]:
        said(self.options, f"read {partition}")
        for id, _ in rows_of(self.options, partition):
            yield id, uuid.uuid4().hex


class Simple(DataSource):
    """The same as a simple stream; a read gives at most 500 rows."""

    def schema(self) -> str:
        return SCHEMA

    def simpleStreamReader(self, schema: Any) -> SimpleDataSourceStreamReader:
        return SimpleReader(self.options)


class SimpleReader(SimpleDataSourceStreamReader):
    def __init__(self, options: Any) -> None:
        self.options = options

    def initialOffset(self) -> dict[str, int]:
        return {"id": 0}

    def read(self, start: dict[str, int]) -> tuple[Iterator[Any], dict[str, int]]:
        end = {"id": min(start["id"] + 500, os.path.getsize(self.options["rows"]))}
        if end != start:
            said(self.options, f"read {start['id']}")
        return self._rows(start, end), end

    def readBetweenOffsets(self, start: dict[str, int], end: dict[str, int]) -> Iterator[Any]:
        said(self.options, f"again {start['id']} {end['id']}")
        return self._rows(start, end)

    def _rows(self, start: dict[str, int], end: dict[str, int]) -> Iterator[Any]:
        whims = self.options.get("kind") == "whims"
        for id, text in rows_of(self.options, Part(start["id"], end["id"] - start["id"])):
            yield id, uuid.uuid4().hex if whims else text

    def commit(self, end: dict[str, int]) -> None:
        said(self.options, f"commit {end['id']}")


# -------------------------------------------------------------------------------------------------------------- writers


@dataclass
class Written(WriterCommitMessage):
    file: str
    rows: int


class Files(DataSource):
    """Writes a file for each call of ``write``; a commit renames them by batch id, so that it can come again."""

    def streamWriter(self, schema: Any, overwrite: bool) -> DataSourceStreamWriter:
        assert overwrite is False
        kind = FilesOfBatches if self.options.get("arrow") == "true" else FilesWriter
        return kind(self.options, schema)


class FilesWriter(DataSourceStreamWriter):
    def __init__(self, options: Any, schema: Any) -> None:
        self.options, self.schema = options, schema
        self.folder = Path(options["path"])

    def write(self, iterator: Iterator[Any]) -> Written:
        name, rows = uuid.uuid4().hex, 0
        with open(self.folder / f"_{name}", "w") as file:
            for row in iterator:
                if self.options.get("fail") and row["id"] == int(self.options["fail"]):
                    raise ValueError("this row is cursed")
                file.write(json.dumps(row.asDict()) + "\n")
                rows += 1
            file.flush()
            os.fsync(file.fileno())
        return Written(name, rows)

    def commit(self, messages: list[Any], batchId: int) -> None:
        said(self.options, f"commit {batchId} {sorted(m.file for m in messages)}")
        for message in messages:
            source, target = self.folder / f"_{message.file}", self.folder / f"{batchId}-{message.file}"
            if not target.exists():
                os.rename(source, target)
        fault(self.options, batchId)

    def abort(self, messages: list[Any], batchId: int) -> None:
        said(self.options, f"abort {batchId} {sorted(m.file for m in messages)}")
        for message in messages:
            (self.folder / f"_{message.file}").unlink(missing_ok=True)


class FilesOfBatches(DataSourceStreamArrowWriter, FilesWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        name, rows = uuid.uuid4().hex, 0
        with open(self.folder / f"_{name}", "w") as file:
            for batch in iterator:
                assert isinstance(batch, pa.RecordBatch)
                file.writelines(json.dumps(row) + "\n" for row in batch.to_pylist())
                rows += batch.num_rows
        return Written(name, rows)


def fault(options: Any, batch: int) -> None:
    """A commit fails once, behind what it did: ``faulty`` names the file that says that it has not."""
    if "faulty" in options and os.path.exists(options["faulty"]):
        os.unlink(options["faulty"])
        raise ConnectionError(f"the answer to commit {batch} was lost")


def visible(folder: Path) -> list[dict[str, Any]]:
    """Rows of committed files."""
    files = [p for p in folder.iterdir() if not p.name.startswith("_")]
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


def logged(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
