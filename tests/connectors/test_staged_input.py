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
from cutwater.connectors.spark_source import StagedFiles, list_of, make_private
from cutwater.errors import CorruptSnapshotError, DataError, SealError, StorageError
from cutwater.storage.snapshot.staged_input import STAGED_FILE, differs, sealed_staged
from cutwater.storage.store.seal import PLAIN, Seal
from reversal import Reversal

KEYED = Seal([b"0123456789abcdef"])
SEALS = pytest.mark.parametrize("seal", [PLAIN, KEYED], ids=["plain", "sealed"])
SCHEMA = pa.schema({"n": pa.int64()})
ROWS = list(range(1000))


def staged(root: Path, seal: Seal) -> Path:
    folder = root / "input"
    folder.mkdir()
    pq.write_table(pa.table({"n": ROWS}, SCHEMA), folder / "part-0.parquet")
    (folder / STAGED_FILE).write_bytes(sealed_staged(list_of(folder, SCHEMA, seal), seal))
    return folder


def rows_of(folder: Path, seal: Seal) -> list[int]:
    """As a worker reads them, which has no key."""
    files = StagedFiles(folder, seal, format="parquet", schema=SCHEMA)
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
        "staged is None and self._seal.keyed",
        "False",
        test_with_a_key_staged_files_without_their_list_are_refused,
    ),
    "a link": Reversal(
        spark_source.read_list,
        "parted(folder)",
        "parted(folder.resolve())",
        test_a_link_in_the_place_of_the_folder_is_not_followed,
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
