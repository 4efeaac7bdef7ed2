"""Files that lines are appended to: every whole line is read once, from any position, whatever a write ended with."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cutwater.connectors.base import SplitReader
from cutwater.connectors.files.look_interval import LookInterval
from cutwater.connectors.files.source import FileSource
from cutwater.errors import BuildError, ConfigError, DataError


class Context:
    step, subtask = "read", 0

    def dead_letter(self, origin: str, position: int, reason: str, raw: str) -> None:
        raise AssertionError(f"{origin} {position}: {reason}: {raw}")


def follow(folder: Path, **options: Any) -> FileSource:
    return FileSource(folder, watch=True, follow=True, schema="k long, t string", **options)


def opened(source: FileSource, position: Any = None) -> SplitReader:
    (split,) = source.discover()
    return source.open(split, position, Context())


def drain(reader: SplitReader, rows: list[tuple[int, str]]) -> None:
    while (batch := reader.read(3)) is not None:
        rows += [(row["k"], row["t"]) for row in batch.to_pylist()]


texts = st.text(st.sampled_from('ab,"\n é'), max_size=5)


@given(
    rows=st.lists(st.tuples(st.integers(0, 999), texts), max_size=12),
    kind=st.sampled_from(["csv", "json"]),
    data=st.data(),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_come_once_however_the_file_is_written_and_wherever_it_is_read_on(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, str]], kind: str, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("followed")
    if kind == "csv":
        text = io.StringIO()
        csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC).writerows([("k", "t"), *rows])
        content = text.getvalue().encode()
    else:
        content = "".join(json.dumps({"k": k, "t": t}, ensure_ascii=False) + "\n" for k, t in rows).encode()
    if data.draw(st.booleans()):
        content = content[:-1]  # what stands behind the last newline is a row once the marker is there
    file, marker = folder / f"one.{kind}", folder / "_END"
    source = follow(folder, end_marker="_END")
    got: list[tuple[int, str]] = []
    reader: SplitReader | None = None
    cuts = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=6)))
    with file.open("wb", buffering=0) as out:
        for start, end in zip([0, *cuts], [*cuts, len(content)], strict=True):
            out.write(content[start:end])
            if reader is None and source.discover():
                reader = opened(source)
            if reader is not None:
                drain(reader, got)
                assert not reader.exhausted
                if data.draw(st.booleans()):  # as after a failure
                    position = reader.position
                    reader.close()
                    reader = opened(follow(folder, end_marker="_END"), position)
    marker.touch()
    reader = reader or opened(source)
    drain(reader, got)
    assert reader.exhausted
    assert got == rows


def test_a_line_that_is_not_whole_is_no_row_yet(tmp_path: Path) -> None:
    file = tmp_path / "one.csv"
    file.write_text("k,t")
    source = follow(tmp_path)
    assert source.discover() == [], "not even its header is whole"
    file.write_text("k,t\n1,a\n2,")
    reader, rows = opened(source), list[tuple[int, str]]()
    drain(reader, rows)
    assert rows == [(1, "a")]
    with file.open("a") as out:
        out.write('"b\n')
    drain(reader, rows)
    assert rows == [(1, "a")], "a quote is open"
    with file.open("a") as out:
        out.write('c"\n')
    drain(reader, rows)
    assert rows == [(1, "a"), (2, "b\nc")]
    assert not reader.exhausted
    assert len(source.discover()) == 1


def test_a_bad_line_is_named_by_its_number_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "one.csv"
    file.write_text("k,t\n1,a\n")
    reader = opened(follow(tmp_path))
    assert reader.read(10) is not None
    with file.open("a") as out:
        out.write("2,b\nx,c\n")
    with pytest.raises(DataError, match=r"one\.csv line 4"):
        reader.read(10)


def test_a_file_that_shrinks_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "one.csv"
    file.write_text("k,t\n1,a\n")
    source = follow(tmp_path)
    reader = opened(source)
    with file.open("a") as out:
        out.write("2,b\n")
    drain(reader, [])
    position = reader.position
    file.write_text("k,t\n3,c\n")
    with pytest.raises(DataError, match="had been read up to byte 12"):
        opened(follow(tmp_path), position)
    file.write_text("k,t\n")
    with pytest.raises(DataError, match="shrank"):
        reader.read(1)
    with pytest.raises(DataError, match="changed or replaced"):
        source.discover()


@pytest.mark.parametrize("name", ["one.parquet", "one.csv.gz"])
def test_what_cannot_be_appended_to_is_not_followed(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"x\n")
    with pytest.raises(BuildError, match=r"cannot be followed"):
        follow(tmp_path).discover()


def test_following_needs_watching(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="follow needs watch=True"):
        FileSource(tmp_path, follow=True)


def test_without_following_a_file_that_grew_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one.csv").write_text("k,t\n1,a\n")
    source = FileSource(tmp_path, watch=True, settle_ms=0, schema="k long, t string")
    assert len(source.discover()) == 1
    with (tmp_path / "one.csv").open("a") as out:
        out.write("2,b\n")
    with pytest.raises(DataError, match="changed or replaced"):
        source.discover()


def test_looks_are_as_rare_as_they_are_dear_unless_it_is_said_how_often() -> None:
    interval = LookInterval("5s")
    interval.took(0.0)
    assert interval.interval_ms == 5000.0
    interval = LookInterval(None)
    for seconds, wanted in ((0.0001, 20.0), (0.002, 100.0), (3.0, 1000.0)):
        interval.took(seconds)
        assert interval.interval_ms == wanted
