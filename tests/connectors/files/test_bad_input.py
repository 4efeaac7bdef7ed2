"""Input that is wrong in one place: the error, or the dead letter, names file and line; what nobody reads passes."""

from __future__ import annotations

import bz2
import gzip
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cutwater.connectors.files.source import FileSource
from cutwater.errors import DataError

SCHEMA = "a long, b string, c long"
LONG = b"x" * (10 << 20)


class Context:
    """Takes dead letters."""

    step, subtask = "", 0

    def __init__(self) -> None:
        self.letters: list[tuple[int, str]] = []

    def dead_letter(self, origin: str, position: int, reason: str, raw: str) -> None:
        self.letters.append((position, reason))
        assert len(raw) <= 10_000


def json_with(value: bytes) -> bytes:
    """Line 3 has the value; one line is blank, and one ends otherwise."""
    return b'{"a":1,"b":"x","c":1}\n\n{"a":2,"b":"y","c":' + value + b'}\r\n{"a":3,"b":"z","c":3}\n'


def csv_with(value: bytes) -> bytes:
    """Line 4 has the value."""
    return b"a,b,c\n1,x,1\n\n2,y," + value + b"\r\n3,z,3\n"


def read(path: Path, columns: set[str] | None, context: Context, bad_rows: Any = "fail") -> list[int]:
    """The values of column a."""
    source = FileSource(str(path), schema=SCHEMA, bad_rows=bad_rows)
    if columns is not None:
        source = source.reading(frozenset(columns))
    found: list[int] = []
    for split in source.discover():
        reader = source.open(split, None, context)
        while not reader.exhausted:
            batch = reader.read(1000)
            found += batch["a"].to_pylist() if batch is not None else []
        reader.close()
    return found


IN_C = {
    "not UTF-8": (json_with(b'"\xff"'), csv_with(b"\xff")),
    "beyond 64 bits": (json_with(b"9" * 25), csv_with(b"9" * 25)),
    "ten megabytes": (json_with(b'"' + LONG + b'"'), csv_with(LONG)),
    "twice in an object": (json_with(b'2,"c":5'), None),
    "behind a byte order mark": (b"\xef\xbb\xbf" + json_with(b"?"), b"\xef\xbb\xbf" + csv_with(b"?")),
}
NOT_READ = {"behind a byte order mark"}
"""No JSON at all, whoever reads what."""


@pytest.mark.parametrize("what", IN_C)
@pytest.mark.parametrize("kind", ["json", "csv"])
def test_a_bad_value_is_named_with_its_line_and_passes_where_nobody_reads_it(
    tmp_path: Path, what: str, kind: str
) -> None:
    data, line = (IN_C[what][0], 3) if kind == "json" else (IN_C[what][1], 4)
    if data is None:
        return
    path = tmp_path / f"rows.{kind}"
    path.write_bytes(data)
    with pytest.raises(DataError, match=rf"rows.{kind} line {line}: ") as error:
        read(path, None, Context())
    assert len(str(error.value)) < 2000
    context = Context()
    assert read(path, None, context, "dead_letter") == [1, 3]
    assert [position for position, _ in context.letters] == [line]
    assert all(len(reason) <= 500 for _, reason in context.letters)
    if kind == "csv" or what not in NOT_READ:
        for bad_rows in ("fail", "dead_letter"):
            context = Context()
            assert read(path, {"a"}, context, bad_rows) == [1, 2, 3]
            assert context.letters == []


@pytest.mark.parametrize(
    ("kind", "data", "line"),
    [
        ("json", json_with(b"2") + b'{"a":4,"b":', 5),
        ("csv", csv_with(b"2") + b"4,x", 6),
        ("json", json_with(b"2") + b'{"a":4,"a":5}\n', 5),
        ("json", json_with(b"2") + b'{"a":"x"}\n', 5),
        ("csv", csv_with(b"2") + b"x,4,5\n", 6),
        ("csv", csv_with(b"2") + b'4,"x,5\n', 6),
    ],
)
def test_what_is_wrong_with_a_row_or_a_column_that_is_read_does_not_pass(
    tmp_path: Path, kind: str, data: bytes, line: int
) -> None:
    path = tmp_path / f"rows.{kind}"
    path.write_bytes(data)
    for columns in (None, {"a"}):
        with pytest.raises(DataError, match=rf"rows.{kind} line {line}: "):
            read(path, columns, Context())
        context = Context()
        assert read(path, columns, context, "dead_letter") == [1, 2, 3]
        assert [position for position, _ in context.letters] == [line]


@pytest.mark.parametrize("end", ["gz", "bz2", "zst"])
@pytest.mark.parametrize("columns", [None, {"a"}])
def test_a_compressed_file_that_is_cut_off_is_no_dead_letter(
    tmp_path: Path, end: str, columns: set[str] | None
) -> None:
    rows = b"".join(b'{"a":%d,"b":"x","c":1}\n' % number for number in range(100_000))
    stream = pa.BufferOutputStream()
    with pa.CompressedOutputStream(stream, "zstd") as out:
        out.write(rows)
    packed = {"gz": gzip.compress(rows), "bz2": bz2.compress(rows), "zst": stream.getvalue().to_pybytes()}[end]
    path = tmp_path / f"rows.json.{end}"
    path.write_bytes(packed[: len(packed) // 2])
    for bad_rows in ("fail", "dead_letter"):
        context = Context()
        with pytest.raises(DataError, match=rf"rows.json.{end} is truncated"):
            read(path, columns, context, bad_rows)
        assert context.letters == []


def test_a_column_that_is_gone_from_a_later_file_is_an_error_though_nobody_reads_it(tmp_path: Path) -> None:
    (tmp_path / "0.csv").write_text("a,b,c\n1,x,1\n")
    (tmp_path / "1.csv").write_text("a,b\n2,x\n")
    with pytest.raises(DataError, match=r"1.csv does not have the columns .*: column 'c' is missing"):
        read(tmp_path, {"a"}, Context())
