"""Which files count, when, and what happens when they change."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cutwater.connectors.files import listing, parquet_reader, text_reader
from cutwater.connectors.files.source import FileSource
from cutwater.errors import BuildError, ConfigError, DataError


class Context:
    step, subtask = "read", 0

    def dead_letter(self, origin: str, position: int, reason: str, raw: str) -> None:
        raise AssertionError(raw)


def write(path: Path, *values: int, age_s: float = 3600) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"k": pa.array(values, pa.int64())}), path)
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def names(source: FileSource) -> list[str]:
    return [Path(s.id).name for s in source.discover()]


def test_only_finished_data_files_count_in_the_order_of_their_paths(tmp_path: Path) -> None:
    for name in ["b.parquet", "a.parquet", "sub/c.parquet", ".hidden", "_SUCCESS", "x.tmp", ".a.parquet.crc"]:
        write(tmp_path / name, 1)
    write(tmp_path / "_temporary" / "0" / "part.parquet", 1)
    assert names(FileSource(tmp_path)) == ["a.parquet", "b.parquet", "c.parquet"]
    assert names(FileSource(f"{tmp_path}/*.parquet")) == ["a.parquet", "b.parquet"]
    assert names(FileSource(f"{tmp_path}/**/*.parquet")) == ["a.parquet", "b.parquet", "c.parquet"]
    assert names(FileSource([tmp_path / "sub", tmp_path / "b.parquet", tmp_path])) == names(FileSource(tmp_path))
    assert names(FileSource(tmp_path / "_SUCCESS", format="parquet")) == ["_SUCCESS"]


def test_a_path_is_found_from_another_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.parquet", 1)
    monkeypatch.chdir(tmp_path)
    source = FileSource("a.parquet")
    monkeypatch.chdir("/")
    assert names(source) == ["a.parquet"]


def test_a_name_with_glob_characters_may_be_meant_as_it_is(tmp_path: Path) -> None:
    write(tmp_path / "a[1].parquet", 1)
    assert names(FileSource(tmp_path / "a[1].parquet")) == ["a[1].parquet"]


@pytest.mark.parametrize("path", ["nothing", "*.parquet"])
def test_a_path_without_files_is_an_error_at_build_time(tmp_path: Path, path: str) -> None:
    source = FileSource(tmp_path / path, schema="k long")
    with pytest.raises(BuildError, match=r"there is no|nothing matches"):
        source.discover()


def test_an_empty_directory_needs_a_schema_and_then_has_no_rows(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="no rows in"):
        _ = FileSource(tmp_path).schema
    source = FileSource(tmp_path, schema="k long", format="parquet")
    assert source.discover() == []
    assert source.schema.names == ["k"]


def test_a_partitioned_directory_is_refused_since_a_column_would_be_missing(tmp_path: Path) -> None:
    write(tmp_path / "day=2020-01-01" / "a.parquet", 1)
    with pytest.raises(BuildError, match="partitioned by 'day'"):
        FileSource(tmp_path).discover()
    with pytest.raises(BuildError, match="partitioned by 'day'"):
        FileSource(f"{tmp_path}/*/a.parquet").discover()
    assert names(FileSource(f"{tmp_path}/day=2020-01-01/*")) == ["a.parquet"]


def test_other_places_and_unknown_formats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"cannot read ftp://"):
        FileSource("ftp://server/x")
    (tmp_path / "a.xml").write_text("<a/>")
    with pytest.raises(BuildError, match=r"cannot tell the format of .*a\.xml"):
        _ = FileSource(tmp_path).schema
    with pytest.raises(BuildError, match="empty list"):
        FileSource([])


@pytest.mark.parametrize(
    "options",
    [
        {"bad_rows": "skip"},
        {"delimiter": "||"},
        {"quote": ""},
        {"settle_ms": -1},
        {"discover_interval_ms": 0},
        {"end_marker": "x"},
    ],
)
def test_a_wrong_option_is_named(tmp_path: Path, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        FileSource(tmp_path, **options)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------- growing directory


def test_a_watched_file_counts_once_it_was_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [50.0]
    monkeypatch.setattr("cutwater.connectors.files.source.time.monotonic", lambda: now[0])
    write(tmp_path / "old.parquet", 1)
    source = FileSource(tmp_path, watch=True, settle_ms=2000)
    assert not source.bounded
    write(tmp_path / "new.parquet", 1, age_s=-1000)  # a clock that goes ahead: only watching tells
    assert names(source) == ["old.parquet"]
    now[0] += 1.9
    write(tmp_path / "new.parquet", 1, 2, 3, age_s=-1001)
    assert names(source) == ["old.parquet"]
    now[0] += 1.9
    assert names(source) == ["old.parquet"]
    now[0] += 0.2
    assert names(source) == ["new.parquet", "old.parquet"]


def test_a_file_renamed_in_counts_at_once_where_writers_do_so(tmp_path: Path) -> None:
    source = FileSource(tmp_path, watch=True, settle_ms=0, schema="k long", format="parquet")
    half = write(tmp_path / "_a.parquet", 1, age_s=0)
    assert source.discover() == []
    half.rename(tmp_path / "a.parquet")
    assert names(source) == ["a.parquet"]


def test_the_end_marker_ends_the_stream_one_call_after_the_last_splits(tmp_path: Path) -> None:
    source = FileSource(
        tmp_path, watch=True, settle_ms=1e9, schema="k long", format="parquet", end_marker=str(tmp_path / "_END")
    )
    assert source.discover() == []
    write(tmp_path / "a.parquet", 1, age_s=0)
    (tmp_path / "_END").touch()
    assert names(source) == ["a.parquet"]  # whoever writes the marker says that the files are whole
    assert not source.bounded
    assert names(source) == ["a.parquet"]
    assert source.bounded
    assert source.ended
    again = FileSource(tmp_path, watch=True, schema="k long", format="parquet", end_marker=str(tmp_path / "_END"))
    again.discover()
    assert again.bounded


class TestWhereTheEndMarkerLies:
    """A bare name lies in the watched directory, anything with a slash is a path; nothing is ignored in silence."""

    @pytest.mark.parametrize("what", ["", "*.parquet", "**/*.parquet"])
    def test_a_bare_name_is_looked_for_in_the_watched_directory(self, tmp_path, monkeypatch, what):
        inbox, elsewhere = tmp_path / "in", tmp_path / "cwd"
        inbox.mkdir()
        elsewhere.mkdir()
        monkeypatch.chdir(elsewhere)
        write(inbox / "a.parquet", 1)
        source = FileSource(inbox / what, watch=True, schema="k long", end_marker="_DONE")
        (elsewhere / "_DONE").touch()
        source.discover()
        assert not source.bounded
        (inbox / "_DONE").touch()
        assert names(source) == names(source) == ["a.parquet"]
        assert source.bounded

    def test_a_path_is_a_path(self, tmp_path, monkeypatch):
        inbox, elsewhere = tmp_path / "in", tmp_path / "cwd"
        inbox.mkdir()
        elsewhere.mkdir()
        monkeypatch.chdir(elsewhere)
        source = FileSource(inbox, watch=True, schema="k long", format="parquet", end_marker="./_DONE")
        (inbox / "_DONE").touch()
        source.discover()
        assert not source.bounded
        (elsewhere / "_DONE").touch()
        source.discover()
        source.discover()
        assert source.bounded

    def test_the_marker_is_no_input_whatever_its_name(self, tmp_path):
        write(tmp_path / "a.parquet", 1)
        (tmp_path / "complete.parquet").write_text("yes")
        source = FileSource(tmp_path, watch=True, end_marker="complete.parquet")
        assert names(source) == ["a.parquet"]
        assert source.bounded
        assert source.schema.names == ["k"]

    def test_a_bare_name_and_two_directories_is_refused(self, tmp_path):
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        with pytest.raises(BuildError, match=r"'_DONE' could lie in .*a' or .*b'. Write it as a path: end_marker="):
            FileSource([tmp_path / "a", tmp_path / "b"], watch=True, end_marker="_DONE")

    def test_a_path_into_nowhere_is_refused(self, tmp_path):
        with pytest.raises(BuildError, match=r"there is no .*nowhere.* bare name lies in the watched directory"):
            FileSource(tmp_path, watch=True, end_marker=tmp_path / "nowhere" / "_DONE")
        with pytest.raises(BuildError, match="names no file"):
            FileSource(tmp_path, watch=True, end_marker="")


@pytest.mark.parametrize("watch", [False, True])
def test_a_file_that_changes_after_it_was_found_fails_the_source(tmp_path: Path, watch: bool) -> None:
    file = write(tmp_path / "a.parquet", 1)
    source = FileSource(tmp_path, watch=watch)
    source.discover()
    write(file, 1, 2, age_s=3000)
    with pytest.raises(DataError, match=r"a\.parquet was changed"):
        source.discover()


def test_a_consumed_file_may_be_removed(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", 1)
    source = FileSource(tmp_path, watch=True)
    source.discover()
    file.unlink()
    assert source.discover() == []


@pytest.mark.parametrize("kind", ["parquet", "csv"])
@pytest.mark.parametrize("change", ["vanish", "replace", "shrink", "grow"])
def test_a_file_that_is_no_longer_the_listed_one_is_not_read(tmp_path: Path, kind: str, change: str) -> None:
    file = tmp_path / f"a.{kind}"
    write(file, 1, 2, 3)
    if kind == "csv":
        file.write_text("k\n1\n2\n")
    source = FileSource(tmp_path, schema="k long")
    split = source.discover()[0]
    data = file.read_bytes()
    if change == "vanish":
        file.unlink()
    elif change == "replace":
        file.unlink()
        file.write_bytes(data)
        os.utime(file, (1, 1))
    else:
        file.write_bytes(data[:-1] if change == "shrink" else data + b"\n")
    with pytest.raises(DataError, match=f"a.{kind}.*{'vanished' if change == 'vanish' else 'changed or replaced'}"):
        source.open(split, None, Context())


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_a_file_that_changes_while_it_is_read_fails_the_read(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / f"a.{kind}"
    if kind == "csv":
        monkeypatch.setattr(text_reader, "BLOCK_BYTES", 1 << 20)
        file.write_bytes(b"k\n" + b"1234567890123456\n" * 200_000)
    else:
        monkeypatch.setattr(parquet_reader, "_BATCH_ROWS", 10)
        write(file, *range(1000))
    source = FileSource(tmp_path, schema="k long")
    reader = source.open(source.discover()[0], None, Context())
    assert reader.read(5) is not None
    with file.open("r+b") as out:
        out.seek(0, os.SEEK_END)
        out.write(b"1\n")
    with pytest.raises(DataError, match="grew"):
        while not reader.exhausted:
            reader.read(100_000)


# --------------------------------------------------------------------------------------------------------- schemas


def parquet(path: Path, **columns: pa.Array) -> None:
    pq.write_table(pa.table(columns), path)


def rows_of(source: FileSource) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for split in source.discover():
        reader = source.open(split, None, Context())
        while not reader.exhausted:
            batch = reader.read(1000)
            rows += batch.to_pylist() if batch is not None else []
    return rows


def test_narrower_types_in_later_parquet_files_are_widened_and_order_of_columns_is_free(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", k=pa.array([1], pa.int64()), x=pa.array([0.5], pa.float64()))
    parquet(tmp_path / "b.parquet", x=pa.array([1.5], pa.float32()), k=pa.array([2], pa.int32()))
    assert rows_of(FileSource(tmp_path)) == [{"k": 1, "x": 0.5}, {"k": 2, "x": 1.5}]


@pytest.mark.parametrize(
    ("later", "difference"),
    [
        ({"k": pa.array([1], pa.int64())}, "column 'x' is missing"),
        ({"k": pa.array([1]), "x": pa.array([1.0]), "y": pa.array([1])}, "column 'y' is new"),
        ({"k": pa.array(["1"]), "x": pa.array([1.0])}, "column 'k' is string instead of int64"),
        ({"k": pa.array([1], pa.uint64()), "x": pa.array([1.0])}, "column 'k' is uint64 instead of int64"),
    ],
)
def test_other_columns_in_a_later_file_name_both_files_and_the_difference(
    tmp_path: Path, later: dict[str, pa.Array], difference: str
) -> None:
    parquet(tmp_path / "a.parquet", k=pa.array([1], pa.int64()), x=pa.array([0.5], pa.float64()))
    parquet(tmp_path / "b.parquet", **later)
    with pytest.raises(DataError, match=rf"b\.parquet does not have the columns of .*a\.parquet: {difference}"):
        rows_of(FileSource(tmp_path))


def test_a_given_schema_picks_columns(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", k=pa.array([1], pa.int32()), x=pa.array([0.5], pa.float64()))
    (tmp_path / "b.csv").write_text("x,other,k\n1.5,z,2\n")
    assert rows_of(FileSource(tmp_path, schema="k long, x double")) == [{"k": 1, "x": 0.5}, {"k": 2, "x": 1.5}]


def test_dictionary_view_and_large_types_become_plain_and_nested_ones_pass(tmp_path: Path) -> None:
    nested = [{"a": [1, None]}]
    parquet(
        tmp_path / "a.parquet",
        d=pa.array(["x"]).dictionary_encode(),
        large=pa.array(["y"], pa.large_string()),
        raw=pa.array([b"z"], pa.large_binary()),
        view=pa.array(["v"], pa.string_view()),
        nested=pa.array(nested, pa.struct([("a", pa.large_list(pa.int32()))])),
    )
    source = FileSource(tmp_path)
    inner = pa.struct([("a", pa.list_(pa.field("element", pa.int32())))])
    assert source.schema.types == [pa.string(), pa.string(), pa.binary(), pa.string(), inner]
    assert rows_of(source) == [{"d": "x", "large": "y", "raw": b"z", "view": "v", "nested": nested[0]}]


@pytest.mark.parametrize("keep", [0, 3, 8, 200, -1, -20])
def test_a_truncated_parquet_file_is_named(tmp_path: Path, keep: int) -> None:
    write(tmp_path / "a.parquet", *range(100))
    broken = write(tmp_path / "b.parquet", *range(100))
    broken.write_bytes(broken.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"b\.parquet is (empty|truncated)"):
        rows_of(FileSource(tmp_path))


def test_a_parquet_file_with_damaged_pages_is_named_with_the_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_reader, "_BATCH_ROWS", 500)
    table = pa.table({"k": pa.array(range(5000), pa.int64())})
    file = tmp_path / "a.parquet"
    pq.write_table(table, file, write_page_checksum=True, compression="none", use_dictionary=False, row_group_size=1000)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(DataError, match=r"a\.parquet is damaged at or after row 2000"):
        rows_of(FileSource(tmp_path))


def test_a_big_parquet_file_is_shared_by_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "SPLIT_BYTES", 2000)
    table = pa.table({"k": pa.array(range(1000), pa.int64())})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=100, compression="none", use_dictionary=False)
    source = FileSource(tmp_path)
    splits = source.discover()
    assert [s.id.partition("#")[2] for s in splits] == ["rg0-2", "rg3-5", "rg6-8", "rg9-9"]
    assert [row["k"] for row in rows_of(source)] == list(range(1000))
    reader = source.open(splits[1], {"row": 250}, Context())
    batch = reader.read(1000)
    assert batch is not None
    assert batch.column("k").to_pylist() == list(range(550, 600))
    assert reader.origin.endswith("rows 550 to 599")


@pytest.mark.parametrize("row", [0, 9, 10, 99, 100, 537, 999])
def test_a_position_is_found_across_batches_and_row_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: int
) -> None:
    monkeypatch.setattr(parquet_reader, "_BATCH_ROWS", 10)
    pq.write_table(pa.table({"k": pa.array(range(1000), pa.int64())}), tmp_path / "a.parquet", row_group_size=100)
    source = FileSource(tmp_path)
    batch = source.open(source.discover()[0], {"row": row}, Context()).read(1)
    assert batch is not None
    assert batch.column("k").to_pylist() == [row]


def test_a_row_that_does_not_fit_the_given_schema_is_named(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", t=pa.array([0, 1000, 1001], pa.timestamp("ns")), k=pa.array([1, None, 3]))
    with pytest.raises(DataError, match=r"a\.parquet row 2: .*lose data.*1970"):
        rows_of(FileSource(tmp_path, schema="t timestamp_ntz"))
    with pytest.raises(DataError, match=r"a\.parquet row 1: column 'k' is null"):
        rows_of(FileSource(tmp_path, schema="k long not null"))


def test_times_before_1970_of_old_spark_files_are_read_as_utc(tmp_path: Path) -> None:
    times = pa.array([-(10**15), 0, 250 * 10**15, None], pa.timestamp("us"))  # up to the year 9892
    pq.write_table(pa.table({"t": times}), tmp_path / "a.parquet", use_deprecated_int96_timestamps=True)
    rows = rows_of(FileSource(tmp_path, schema="t timestamp"))
    assert [r["t"] for r in rows] == times.cast(pa.timestamp("us", "UTC")).to_pylist()


def test_ten_megabyte_strings_come_through_every_format(tmp_path: Path) -> None:
    big = "ab\n" * 3_500_000
    parquet(tmp_path / "a.parquet", s=pa.array([big, "x"] * 3))
    (tmp_path / "b.csv").write_text(f's\n"{big}"\nx\n' + f'"{big}"\nx\n')
    (tmp_path / "c.jsonl").write_text(json.dumps({"s": big}) + '\n{"s": "x"}\n')
    rows = rows_of(FileSource(tmp_path, schema="s string"))
    assert [r["s"] == (big, "x")[i % 2] for i, r in enumerate(rows)] == [True] * 12
