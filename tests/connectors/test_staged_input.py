"""Rows that Spark staged, as a job that resumes reads them, without Spark: what was changed by itself is refused."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cutwater.connectors import spark_source
from cutwater.connectors.spark_source import (
    DataFrameSource,
    StagedFiles,
    StreamingDataFrameSource,
    list_of,
    make_private,
    seal_anew,
)
from cutwater.errors import CorruptSnapshotError, DataError, SealError, StorageError
from cutwater.storage.snapshot.staged_input import STAGED_FILE, Staged, differs, read_staged, sealed_staged
from cutwater.storage.store.seal import PLAIN, Seal
from reversal import Reversal

KEY, OTHER = b"0123456789abcdef", b"fedcba9876543210"
KEYED = Seal([KEY])
TURNING_ON = Seal([KEY], accept_unsealed=True)
SEALS = pytest.mark.parametrize("seal", [PLAIN, KEYED], ids=["plain", "sealed"])
SCHEMA = pa.schema({"n": pa.int64()})
ROWS = list(range(1000))


def staged(root: Path, seal: Seal) -> Path:
    folder = root / "input"
    folder.mkdir()
    pq.write_table(pa.table({"n": ROWS}, SCHEMA), folder / "part-0.parquet")
    (folder / STAGED_FILE).write_bytes(sealed_staged(list_of(folder, SCHEMA, seal), seal))
    return folder


def started(folder: Path, seal: Seal, *, own: bool = True) -> StagedFiles:
    """As a job that resumes does: what is staged is there, and the DataFrame is not asked."""
    frame = DataFrameSource(None)  # type: ignore[arg-type]
    frame.schema = SCHEMA
    files = frame.stage(str(folder), seal, own=own)
    assert isinstance(files, StagedFiles)
    return files


def rows_of(folder: Path, seal: Seal) -> list[int]:
    return read(StagedFiles(folder, seal, format="parquet", schema=SCHEMA))


def read(files: StagedFiles) -> list[int]:
    """As a worker reads them, which has no key."""
    context: Any = SimpleNamespace(step="in", subtask=0)
    found: list[int] = []
    for split in files.discover():
        reader = files.open(split, None, context)
        while not reader.exhausted:
            batch = reader.read(100)
            found += batch.column(0).to_pylist() if batch is not None else []
    return found


def changed(path: Path) -> None:
    """Another row, in a file of the same size that is as good as before."""
    before = path.stat().st_size
    pq.write_table(pa.table({"n": [*ROWS[:-1], 998]}, SCHEMA), path)
    body = bytearray(path.read_bytes())
    assert pq.read_table(path).num_rows == len(ROWS)
    path.write_bytes(bytes(body[:before]).ljust(before))


@SEALS
def test_staged_rows_are_read_as_they_were_written(tmp_path: Path, seal: Seal) -> None:
    assert rows_of(staged(tmp_path, seal), seal) == ROWS


@SEALS
def test_a_staged_file_that_was_changed_is_refused_before_it_is_read(tmp_path: Path, seal: Seal) -> None:
    folder = staged(tmp_path, seal)
    changed(folder / "part-0.parquet")
    with pytest.raises(DataError, match=r"part-0.parquet was changed since it was staged: .*differs from its digest"):
        rows_of(folder, seal)


@SEALS
def test_a_staged_file_of_another_size_is_refused_by_the_driver(tmp_path: Path, seal: Seal) -> None:
    folder = staged(tmp_path, seal)
    pq.write_table(pa.table({"n": [1]}, SCHEMA), folder / "part-0.parquet")
    with pytest.raises(StorageError, match=r"part-0.parquet has \d+ bytes, \d+ were written"):
        StagedFiles(folder, seal, format="parquet", schema=SCHEMA).discover()


@SEALS
def test_a_file_that_the_list_does_not_name_is_refused(tmp_path: Path, seal: Seal) -> None:
    folder = staged(tmp_path, seal)
    pq.write_table(pa.table({"n": [1]}, SCHEMA), folder / "part-1.parquet")
    with pytest.raises(StorageError, match=r"part-1.parquet has \d+ bytes, None were written"):
        StagedFiles(folder, seal, format="parquet", schema=SCHEMA).discover()


def test_with_a_key_staged_files_without_their_list_are_refused(tmp_path: Path) -> None:
    folder = staged(tmp_path, KEYED)
    (folder / STAGED_FILE).unlink()
    with pytest.raises(SealError, match="was staged without a key, or somebody put it there"):
        rows_of(folder, KEYED)


def test_with_a_key_a_list_that_somebody_made_anew_is_refused(tmp_path: Path) -> None:
    folder = staged(tmp_path, KEYED)
    changed(folder / "part-0.parquet")
    (folder / STAGED_FILE).write_bytes(sealed_staged(list_of(folder, SCHEMA, KEYED), PLAIN))
    with pytest.raises(SealError, match="is not sealed with the job's key"):
        rows_of(folder, KEYED)


def test_a_link_in_the_place_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    staged(tmp_path, PLAIN).rename(tmp_path / "elsewhere")
    (tmp_path / "input").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CorruptSnapshotError, match="input is a symbolic link, and those are not followed"):
        rows_of(tmp_path / "input", PLAIN)


@pytest.mark.parametrize(("access", "mode"), [("owner", 0o700), ("group", 0o770)])
def test_the_folder_that_spark_writes_into_is_its_owners_or_the_groups(tmp_path: Path, access: Any, mode: int) -> None:
    old = os.umask(0)
    try:
        make_private(tmp_path / "job" / "input", access)
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "job" / "input").stat().st_mode) == mode


# --------------------------------------------------------------------------------------------------- turning a key on


def of_an_older_release(folder: Path) -> None:
    """A list without digests."""
    sizes = {path.name: path.stat().st_size for path in folder.glob("part-*")}
    (folder / STAGED_FILE).write_bytes(sealed_staged(Staged("n int64", sizes), PLAIN))


@pytest.mark.parametrize("old", [False, True], ids=["with digests", "of an older release"])
def test_a_key_is_turned_on_by_one_start_and_then_staged_input_is_sealed(tmp_path: Path, old: bool) -> None:
    folder = staged(tmp_path, PLAIN)
    if old:
        of_an_older_release(folder)
    with pytest.raises(SealError, match=r"not sealed with the job's key.*accept_unsealed=True"):
        started(folder, KEYED)
    assert read(started(folder, TURNING_ON)) == ROWS
    assert read(started(folder, KEYED)) == ROWS
    content = (folder / STAGED_FILE).read_bytes()
    assert all(digest.startswith("sha256:") for digest in read_staged("x", content, KEYED).digests.values())
    with pytest.raises(SealError, match="no key was given"):
        started(folder, PLAIN)
    spark_source._compare.cache_clear()  # as in another process
    changed(folder / "part-0.parquet")
    with pytest.raises(DataError, match="was changed since it was staged"):
        read(started(folder, KEYED))


def of_a_stream(folder: Path, seal: Seal) -> StagedFiles:
    """Of a query that has ended."""
    (folder / "_END").touch()
    frame = StreamingDataFrameSource(None)  # type: ignore[arg-type]
    frame.schema = SCHEMA
    return frame.stage(str(folder), seal)


@pytest.mark.parametrize("listed", [True, False], ids=["with lists", "of a release without lists"])
def test_a_key_is_turned_on_by_one_start_and_then_batches_of_a_stream_are_sealed(tmp_path: Path, listed: bool) -> None:
    for batch in ("batch-000000000000", "batch-000000000001"):
        folder = staged(tmp_path, PLAIN)
        if not listed:
            (folder / STAGED_FILE).unlink()
        (tmp_path / "stream").mkdir(exist_ok=True)
        folder.rename(tmp_path / "stream" / batch)
    with pytest.raises(SealError, match=r"accept_unsealed=True"):
        of_a_stream(tmp_path / "stream", KEYED).discover()
    assert read(of_a_stream(tmp_path / "stream", TURNING_ON)) == [*ROWS, *ROWS]
    assert read(of_a_stream(tmp_path / "stream", KEYED)) == [*ROWS, *ROWS]


@pytest.mark.parametrize("change", ["a row", "a file more", "a file less", "a FIFO"])
def test_staged_input_that_was_changed_is_not_sealed(tmp_path: Path, change: str) -> None:
    folder = staged(tmp_path, PLAIN)
    before = (folder / STAGED_FILE).read_bytes()
    if change == "a row":
        changed(folder / "part-0.parquet")
    elif change == "a file less":
        (folder / "part-0.parquet").unlink()
    elif change == "a FIFO":
        os.mkfifo(folder / "part-1.parquet")
    else:
        pq.write_table(pa.table({"n": [1]}, SCHEMA), folder / "part-1.parquet")
    with pytest.raises(CorruptSnapshotError, match=r"is not as it was staged|part-1.parquet is not a file"):
        started(folder, TURNING_ON)
    assert (folder / STAGED_FILE).read_bytes() == before


def test_a_fork_for_which_a_key_is_turned_on_reads_what_its_leader_staged_and_seals_nothing(tmp_path: Path) -> None:
    folder = staged(tmp_path, PLAIN)
    before = (folder / STAGED_FILE).read_bytes()
    assert read(started(folder, TURNING_ON, own=False)) == ROWS
    assert (folder / STAGED_FILE).read_bytes() == before
    (folder / STAGED_FILE).unlink()
    assert rows_of(folder, TURNING_ON) == ROWS


def test_staged_input_keeps_the_seal_that_it_has(tmp_path: Path) -> None:
    folder = staged(tmp_path, Seal([OTHER]))
    before = (folder / STAGED_FILE).read_bytes()
    assert read(started(folder, Seal([KEY, OTHER], accept_unsealed=True))) == ROWS
    assert (folder / STAGED_FILE).read_bytes() == before
    with pytest.raises(SealError, match="the key given is"):
        started(folder, TURNING_ON)


# ----------------------------------------------------------------------------------------------------------- the alarm


def of(test: Callable[..., None], *arguments: object) -> Callable[[Path], None]:
    return lambda folder: test(folder, *arguments)


REVERSALS = {
    "digests are not compared": Reversal(
        differs,
        "digest and digest_text(hasher) != digest",
        "False",
        of(test_a_staged_file_that_was_changed_is_refused_before_it_is_read, KEYED),
    ),
    "readers do not compare": Reversal(
        StagedFiles.open,
        "if digest:",
        "if False:",
        of(test_a_staged_file_that_was_changed_is_refused_before_it_is_read, PLAIN),
    ),
    "readers are told no digest": Reversal(
        StagedFiles._splits,
        "if digest else s",
        "if False else s",
        of(test_a_staged_file_that_was_changed_is_refused_before_it_is_read, KEYED),
    ),
    "sizes are not compared": Reversal(
        StagedFiles._splits,
        "staged is not None and staged.files.get(path.name) != entry.size",
        "False",
        of(test_a_file_that_the_list_does_not_name_is_refused, KEYED),
    ),
    "a key without a list": Reversal(
        StagedFiles._splits,
        "staged is None and self._seal.refuses_unsealed",
        "False",
        test_with_a_key_staged_files_without_their_list_are_refused,
    ),
    "a link": Reversal(
        spark_source._list_in,
        "parted(folder)",
        "parted(folder.resolve())",
        test_a_link_in_the_place_of_the_folder_is_not_followed,
    ),
    "nothing is sealed anew": Reversal(
        seal_anew,
        "not seal.keyed or seal.refuses_unsealed",
        "True",
        of(test_a_key_is_turned_on_by_one_start_and_then_staged_input_is_sealed, False),
    ),
    "batches are not sealed anew": Reversal(
        StreamingDataFrameSource.stage,
        "seal_anew(batch, self.schema, seal, listed=False)",
        "pass",
        of(test_a_key_is_turned_on_by_one_start_and_then_batches_of_a_stream_are_sealed, True),
    ),
    "what was changed is sealed": Reversal(
        seal_anew,
        "problems or made.files != staged.files",
        "False",
        of(test_staged_input_that_was_changed_is_not_sealed, "a row"),
    ),
    "what was added is sealed": Reversal(
        seal_anew,
        "problems or made.files != staged.files",
        "problems",
        of(test_staged_input_that_was_changed_is_not_sealed, "a file more"),
    ),
    "a fork seals": Reversal(
        DataFrameSource.stage,
        "if own:",
        "if True:",
        test_a_fork_for_which_a_key_is_turned_on_reads_what_its_leader_staged_and_seals_nothing,
    ),
    "a seal is made anew": Reversal(
        seal_anew,
        "is_sealed_list(data) if data is not None else listed",
        "data is None and listed",
        test_staged_input_keeps_the_seal_that_it_has,
    ),
    "modes of the umask": Reversal(
        make_private,
        "mode=0o700, ",
        "",
        of(test_the_folder_that_spark_writes_into_is_its_owners_or_the_groups, "owner", 0o700),
    ),
}


@pytest.mark.parametrize("bug", REVERSALS)
def test_planted_bugs_are_found(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, bug: str
) -> None:
    REVERSALS[bug].is_seen(monkeypatch, tmp_path_factory)
