"""CSV and JSON lines: rows, line numbers and byte offsets against Python's own readers."""

from __future__ import annotations

import csv
import datetime as dt
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cutwater.connectors.files import line_blocks, text_reader
from cutwater.connectors.files.line_blocks import LineBlocks
from cutwater.connectors.files.listing import FileEntry
from cutwater.connectors.files.source import FileSource
from cutwater.connectors.files.text_formats import parse_times
from cutwater.errors import BuildError, DataError

UTC = dt.UTC


class Context:
    step, subtask = "read", 0

    def __init__(self) -> None:
        self.dead: list[tuple[str, int, str, str]] = []

    def dead_letter(self, origin: str, position: int, reason: str, raw: str) -> None:
        self.dead.append((Path(origin).name, position, reason, raw))


def rows_of(source: FileSource, ctx: Context | None = None, size: int = 3) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for split in source.discover():
        reader = source.open(split, None, ctx or Context())
        while not reader.exhausted:
            batch = reader.read(size)
            rows += batch.to_pylist() if batch is not None else []
        reader.close()
    return rows


def source_of(tmp: Path, name: str, data: bytes | str, **options: Any) -> FileSource:
    (tmp / name).write_bytes(data.encode() if isinstance(data, str) else data)
    return FileSource(tmp / name, **options)


# ------------------------------------------------------------------------------------------------- rows and their lines


fields = st.text(st.sampled_from('a",\n\r é ') | st.characters(codec="utf-8", exclude_characters="\0\r"), max_size=6)
settings.register_profile("files", suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@settings(settings.get_profile("files"), max_examples=150)
@given(st.lists(st.tuples(fields, fields), max_size=12), st.integers(1, 64), st.booleans())
def test_what_a_csv_writer_wrote_comes_back_however_blocks_are_cut(
    tmp_path: Path, rows: list[tuple[str, str]], block: int, final_newline: bool
) -> None:
    rows = [(a.replace("\r", ""), b.replace("\r", "")) for a, b in rows]
    out = io.StringIO(newline="")
    csv.writer(out, lineterminator="\n", quoting=csv.QUOTE_ALL).writerows(rows)
    text = out.getvalue()
    file = tmp_path / "a.csv"
    file.write_text(text if final_newline else text.removesuffix("\n"), newline="")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_reader, "BLOCK_BYTES", block)
        source = FileSource(file, header=False, schema="a string, b string")
        found = [(r["a"], r["b"]) for r in rows_of(source)]
    assert found == rows


plain = st.text("ab\", '\n", max_size=5)


@settings(settings.get_profile("files"), max_examples=300)
@given(st.lists(plain, max_size=30), st.integers(1, 40))
def test_rows_end_where_pythons_csv_reader_ends_them(tmp_path: Path, pieces: list[str], block: int) -> None:
    """Any text, also with quotes in the middle of fields; the reader of the standard library is the oracle."""
    text = "\n".join(pieces)
    file = tmp_path / "a.csv"
    file.write_text(text, newline="")
    blocks = LineBlocks(FileEntry(str(file), len(text), None), quote='"', block_bytes=block)
    found: list[tuple[int, str]] = []
    unclosed = False
    while not unclosed and (part := blocks.next_block()) is not None:
        unclosed = part.unclosed
        for start, end, line in zip(part.starts, part.ends, part.lines, strict=True):
            found.append((int(line), part.data[start:end].decode().removesuffix("\n")))
    blocks.close()
    reader = csv.reader(io.StringIO(text, newline=""))
    lines = text.split("\n")
    expected: list[tuple[int, str]] = []
    at = 0
    for row in reader:
        if row:
            expected.append((at + 1, "\n".join(lines[at : reader.line_num])))
        at = reader.line_num
    if unclosed:
        expected = [*expected[: len(found) - 1], (found[-1][0], lines[found[-1][0] - 1])]
    assert found == [
        (line, row.removesuffix("\n") if line + row.count("\n") > len(lines) else row) for line, row in expected
    ]


@settings(settings.get_profile("files"), max_examples=150)
@given(st.lists(plain, max_size=30), st.integers(1, 40))
def test_values_are_those_of_pythons_csv_reader(tmp_path: Path, pieces: list[str], block: int) -> None:
    text = "\n".join([*pieces, "end", ""])
    (tmp_path / "a.csv").write_text(text, newline="")
    source = FileSource(
        tmp_path / "a.csv", header=False, schema="a string", delimiter="\t", null_values=(), bad_rows="dead_letter"
    )
    ctx = Context()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_reader, "BLOCK_BYTES", block)
        found = [r["a"] for r in rows_of(source, ctx)]
    if not ctx.dead:  # a quote that is never closed is a bad row here; Python's reader takes the rest of the file
        assert found == [row[0] for row in csv.reader(io.StringIO(text, newline=""), delimiter="\t") if row]
    else:
        assert "never closed" in ctx.dead[0][2]


@pytest.mark.parametrize("compressed", [False, True])
def test_offsets_and_lines_are_those_of_the_text(tmp_path: Path, compressed: bool) -> None:
    text = b'k,v\r\n1,"a\nb"\n\n\r\n2,x\r\n"3",\xc3\xa9\n4,end'
    name = "a.csv.gz" if compressed else "a.csv"
    source = source_of(tmp_path, name, gzip.compress(text) if compressed else text)
    reader = source.open(source.discover()[0], None, Context())
    seen: list[tuple[Any, str]] = []
    while not reader.exhausted:
        position = reader.position
        if reader.read(1) is not None:
            seen.append((position, reader.origin.partition(" lines ")[2]))
    offsets = [text.index(row) for row in (b"1,", b"2,x", b'"3"', b"4,end")]
    assert [(p["offset"], p["line"]) for p, _ in seen] == [
        (offsets[0], 2), (offsets[1], 6), (offsets[2], 7), (offsets[3], 8)
    ]  # fmt: skip
    assert [lines for _, lines in seen] == ["2 to 2", "6 to 6", "7 to 7", "8 to 8"]
    assert reader.position == {"offset": len(text), "line": 8}


def test_quoted_and_empty_fields_tell_null_from_empty(tmp_path: Path) -> None:
    source = source_of(tmp_path, "a.csv", 'a,b\n,""\nNA,"NA"\n', schema="a string, b string", null_values=["", "NA"])
    assert rows_of(source) == [{"a": None, "b": ""}, {"a": None, "b": "NA"}]


def test_delimiters_headers_and_names(tmp_path: Path) -> None:
    assert rows_of(source_of(tmp_path, "a.tsv", "a\tb\n1\tx,y\n")) == [{"a": 1, "b": "x,y"}]
    assert rows_of(source_of(tmp_path, "b.csv", "1;x\n", header=False, delimiter=";")) == [{"_c0": 1, "_c1": "x"}]
    assert rows_of(source_of(tmp_path, "c.csv", "'a b',c\n1,'2,3'\n", quote="'")) == [{"a b": 1, "c": "2,3"}]
    assert rows_of(source_of(tmp_path, "d.csv", 'a\n"1\n', quote=None)) == [{"a": '"1'}]
    assert rows_of(source_of(tmp_path, "e.csv", "b,a\n1,2\n", schema="a long, b long")) == [{"a": 2, "b": 1}]


@pytest.mark.parametrize(("name", "data"), [("a.csv", "k\n7"), ("a.csv", "k\n7\n"), ("a.json", '{"k": 7}')])
def test_one_row(tmp_path: Path, name: str, data: str) -> None:
    assert rows_of(source_of(tmp_path, name, data)) == [{"k": 7}]


@pytest.mark.parametrize(("name", "data"), [("a.csv", ""), ("a.csv", "k\n"), ("a.json", ""), ("a.json", "\n \n")])
def test_empty_files_have_no_rows(tmp_path: Path, name: str, data: str) -> None:
    assert rows_of(source_of(tmp_path, name, data, schema="k long")) == []


# --------------------------------------------------------------------------------------------------------- bad rows


BAD_CSV = [
    ("x,1", "column 'k'.*int64.*'x'"),
    ("1", "Expected 2 columns, got 1"),
    ("1,2,3", "Expected 2 columns, got 3"),
    ("1,2\r3,4", "carriage return|values where 1"),
    ("9999999999999999999,1", "column 'k'"),
    (b"1,\xff", "UTF8|UTF-8"),
    ('1,"open', "never closed"),
]


@pytest.mark.parametrize(("line", "reason"), BAD_CSV)
def test_a_bad_csv_row_is_named_with_file_and_line_or_diverted(tmp_path: Path, line: str | bytes, reason: str) -> None:
    raw = line if isinstance(line, bytes) else line.encode()
    data = b'k,v\n1,"a\nb"\n' + raw + b"\n2,z\n"
    source = source_of(tmp_path, "a.csv", data, schema="k long, v string")
    with pytest.raises(DataError, match=rf"a\.csv line 4: .*({reason})"):
        rows_of(source)
    ctx = Context()
    assert rows_of(source.with_bad_rows("dead_letter"), ctx) == [{"k": 1, "v": "a\nb"}, {"k": 2, "v": "z"}]
    assert [(d[0], d[1], d[3]) for d in ctx.dead] == [("a.csv", 4, raw.decode(errors="backslashreplace"))]


BAD_JSON = [
    ('{"k": 1', "object"),
    ("[1]", "object"),
    ('"k"', "object"),
    ('{"k": "x"}', "k"),
    ('{"k": 1.5}', "1.5"),
    ('{"k": 1}{"k": 2}', "2 values where 1"),
    ('{"k": 1, "new": 2}', "field 'new' is new"),
    ('{"k": 1, "k": 2}', "twice"),
    (b'{"v": "\xff"}', "UTF8"),
    ('{"v": "a\tb"}', ""),
]


@pytest.mark.parametrize(("line", "reason"), BAD_JSON)
def test_a_bad_json_line_is_named_with_file_and_line_or_diverted(
    tmp_path: Path, line: str | bytes, reason: str
) -> None:
    (tmp_path / "a.jsonl").write_text('{"k": 1, "v": "a"}\n')
    raw = line if isinstance(line, bytes) else line.encode()
    (tmp_path / "b.jsonl").write_bytes(b'\n{"k": 1, "v": "a"}\n' + raw + b'\n{"k": 2}\n')
    source = FileSource(tmp_path)
    with pytest.raises(DataError, match=rf"b\.jsonl line 3: .*{reason}.*schema from .*a\.jsonl"):
        rows_of(source)
    ctx = Context()
    good = {"k": 1, "v": "a"}
    assert rows_of(source.with_bad_rows("dead_letter"), ctx) == [good, good, {"k": 2, "v": None}]
    assert [(d[0], d[1], d[3]) for d in ctx.dead] == [("b.jsonl", 3, raw.decode(errors="backslashreplace"))]


def test_lines_that_only_together_are_json_are_bad_even_if_the_count_comes_out_right(tmp_path: Path) -> None:
    data = '{"k":\n1}\n{"k": 2}{"k": 3}\n{"k": 4}\n'
    ctx = Context()
    source = source_of(tmp_path, "a.jsonl", data, schema="k long", bad_rows="dead_letter")
    assert rows_of(source, ctx) == [{"k": 4}]
    assert [d[1] for d in ctx.dead] == [1, 2, 3]


def test_lone_carriage_returns_are_bad_even_if_the_count_comes_out_right(tmp_path: Path) -> None:
    ctx = Context()
    source = source_of(
        tmp_path, "a.csv", 'k,v\n1,2\r3,4\n\r\r\n5,"6\r7"\n', bad_rows="dead_letter", schema="k long, v string"
    )
    assert rows_of(source, ctx) == [{"k": 5, "v": "6\r7"}]
    assert [d[1] for d in ctx.dead] == [2, 3]


def test_many_bad_rows_among_good_ones(tmp_path: Path) -> None:
    lines = [f"{n},x" if n % 7 else f"bad {n}" for n in range(1, 2000)]
    source = source_of(tmp_path, "a.csv", "\n".join(lines), schema="k long, v string", header=False)
    ctx = Context()
    rows = rows_of(source.with_bad_rows("dead_letter"), ctx, size=100)
    assert [r["k"] for r in rows] == [n for n in range(1, 2000) if n % 7]
    assert [(d[1], d[3]) for d in ctx.dead] == [(n, f"bad {n}") for n in range(7, 2000, 7)]


def test_a_null_where_the_schema_allows_none_is_a_bad_row(tmp_path: Path) -> None:
    source = source_of(tmp_path, "a.csv", "k,v\n1,\n,x\n", schema="k long not null, v string")
    with pytest.raises(DataError, match=r"line 3: column 'k' is null"):
        rows_of(source)


def test_a_row_without_end_is_an_error_and_not_endless_memory(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes(b"x" * 5000)
    blocks = LineBlocks(FileEntry(str(file), 5000, None), block_bytes=100, max_row_bytes=1000)
    with pytest.raises(DataError, match=r"a\.csv line 1: longer than 1000 bytes"):
        blocks.next_block()


@pytest.mark.parametrize("cut", [1, 9, 15, 200])
def test_a_truncated_gzip_file_is_named(tmp_path: Path, cut: int) -> None:
    data = gzip.compress(b"k\n" + b"\n".join(b"%d" % (n * n) for n in range(1000)))
    source = source_of(tmp_path, "a.csv.gz", data[:-cut], schema="k long")
    with pytest.raises(DataError, match=r"a\.csv\.gz is truncated"):
        rows_of(source)


def test_other_encodings_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.csv is UTF-16"):
        rows_of(source_of(tmp_path, "a.csv", "k\n1\n".encode("utf-16"), schema="k long"))
    with pytest.raises(DataError, match=r"is truncated or not compressed"):
        rows_of(source_of(tmp_path, "a.csv.gz", "k\n1\n", schema="k long"))


@pytest.mark.parametrize(
    ("header", "difference"),
    [("k", "column 'v' is missing"), ("k,v,w", "column 'w' is new"), ("k,v,v", "column 'v' is there more than once")],
)
def test_other_columns_in_a_later_csv_file_name_both_files(tmp_path: Path, header: str, difference: str) -> None:
    (tmp_path / "a.csv").write_text("k,v\n1,2\n")
    (tmp_path / "b.csv").write_text(f"{header}\n1,2,3\n")
    with pytest.raises(DataError, match=rf"b\.csv does not have the columns of .*a\.csv: .*{difference}"):
        rows_of(FileSource(tmp_path))


def test_a_file_without_header_must_have_as_many_columns(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="3 columns instead of 2"):
        rows_of(source_of(tmp_path, "a.csv", "1,2,3\n", header=False, schema="a long, b long"))


# ------------------------------------------------------------------------------------------------------- inference


def test_types_are_guessed_from_the_first_rows(tmp_path: Path) -> None:
    csv_text = (
        "i,f,b,s,d,t,z,none,h\n,,,,,,,,\n1,1.5,true,x,1950-01-02,1960-01-01 00:00:00,1960-01-01T00:00:00Z,,10:11:12\n"
    )
    source = source_of(tmp_path, "a.csv", csv_text)
    kinds = {f.name: str(f.type) for f in source.schema}
    assert kinds == {
        "i": "int64", "f": "double", "b": "bool", "s": "string", "d": "date32[day]",
        "t": "timestamp[us]", "z": "timestamp[us, tz=UTC]", "none": "string", "h": "string",
    }  # fmt: skip
    assert rows_of(source)[1]["z"] == dt.datetime(1960, 1, 1, tzinfo=UTC)
    row = {"i": 1, "t": "1960-01-01 00:00:00", "z": "1960-01-01T01:00:00+01:00", "n": {"l": [1.5], "t": "2020-01-01"}}
    source = source_of(tmp_path, "a.json", "broken\n" + json.dumps(row) + "\n" + json.dumps({"none": None}))
    assert {f.name: str(f.type) for f in source.schema} == {
        "i": "int64", "t": "timestamp[us]", "z": "timestamp[us, tz=UTC]",
        "n": "struct<l: list<item: double>, t: string>", "none": "string",
    }  # fmt: skip
    found = rows_of(source.with_bad_rows("dead_letter"))
    assert found[0]["z"] == dt.datetime(1960, 1, 1, tzinfo=UTC)
    assert found[0]["n"] == row["n"]


def test_the_first_file_with_a_row_tells_the_schema(tmp_path: Path) -> None:
    (tmp_path / "a.csv").touch()
    (tmp_path / "b.csv").write_text("k\n1\n")
    assert rows_of(FileSource(tmp_path)) == [{"k": 1}]
    assert FileSource(tmp_path / "b.csv").schema.field("k").type == pa.int64()


def test_a_type_that_the_first_rows_did_not_show_fails_with_a_hint(tmp_path: Path) -> None:
    source = source_of(tmp_path, "a.csv", "k\n" + "1\n" * 700_000 + "1.5\n")
    assert source.schema.field("k").type == pa.int64()
    with pytest.raises(DataError, match=r"line 700002: column 'k'.*1\.5.*give schema="):
        rows_of(source, size=100_000)


@pytest.mark.parametrize(
    ("name", "schema"),
    [("a.csv", "k array<int>"), ("a.csv", "k struct<x:int>"), ("a.json", "k map<string,int>")],
)
def test_types_that_a_format_cannot_hold_are_refused_at_build_time(tmp_path: Path, name: str, schema: str) -> None:
    with pytest.raises(BuildError, match="cannot"):
        _ = source_of(tmp_path, name, "k\n", schema=schema).schema


def test_json_rows_of_no_common_type_ask_for_a_schema(tmp_path: Path) -> None:
    source = source_of(tmp_path, "a.json", '{"k": 1}\n{"k": "x"}\n')
    with pytest.raises(BuildError, match=r"no common schema.*schema="):
        _ = source.schema


# ----------------------------------------------------------------------------------------------------------- times


@given(st.lists(st.datetimes(dt.datetime(1700, 1, 1), dt.datetime(2200, 1, 1)), min_size=1), st.integers(-23, 23))
def test_times_with_and_without_zone(times: list[dt.datetime], hours: int) -> None:
    zone = dt.timezone(dt.timedelta(hours=hours, minutes=30))
    texts = [t.replace(tzinfo=zone).isoformat() if i % 2 else t.isoformat(" ") for i, t in enumerate(times)]
    found = parse_times(pa.array([*texts, None]), pa.timestamp("us", "UTC"), ()).to_pylist()
    expected = [t.replace(tzinfo=zone if i % 2 else UTC) for i, t in enumerate(times)]
    assert found == [*expected, None]
    naive = parse_times(pa.array([t.isoformat() for t in times]), pa.timestamp("us"), ())
    assert naive.to_pylist() == times


def test_local_times_are_those_of_the_columns_zone() -> None:
    kind = pa.timestamp("us", "Europe/Berlin")
    found = parse_times(pa.array(["2020-07-01 12:00:00", "2020-07-01T12:00:00Z", "2020-07-01"]), kind, ())
    hours = [dt.datetime(2020, 7, 1, 10), dt.datetime(2020, 7, 1, 12), dt.datetime(2020, 6, 30, 22)]
    assert [t.astimezone(UTC).replace(tzinfo=None) for t in found.to_pylist()] == hours


def test_other_time_formats_are_tried_in_order(tmp_path: Path) -> None:
    data = "at\n31.12.1955 23:00:00\n12/31/1955\nnever\n"
    formats = ["%d.%m.%Y %H:%M:%S", "%m/%d/%Y"]
    source = source_of(tmp_path, "a.csv", data, schema="at timestamp", timestamp_formats=formats)
    ctx = Context()
    rows = rows_of(source.with_bad_rows("dead_letter"), ctx)
    assert [r["at"] for r in rows] == [
        dt.datetime(1955, 12, 31, 23, tzinfo=UTC),
        dt.datetime(1955, 12, 31, tzinfo=UTC),
    ]
    assert ctx.dead[0][1:] == (
        4,
        "column 'at': 'never' is no time of the form '%d.%m.%Y %H:%M:%S' or '%m/%d/%Y'",
        "never",
    )


def test_line_blocks_knows_compressions_by_name() -> None:
    names = ["a.csv", "a.csv.gz", "a.json.bz2", "a.zst"]
    assert [line_blocks.compression_of(n) for n in names] == [None, "gzip", "bz2", "zstd"]
