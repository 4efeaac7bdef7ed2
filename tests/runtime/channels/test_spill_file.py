"""Rows that overflow to disk: nobody else can open them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from wire_ends import batch

from cutwater.runtime.channels.spill import SpillFile
from reversal import Reversal


def test_rows_on_disk_lie_in_a_file_without_a_name_that_only_the_owner_could_open(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        file = SpillFile(str(tmp_path))
        stored = file.store(batch(0, 10))
    finally:
        os.umask(old)
    assert stored.equals(batch(0, 10))
    assert list(tmp_path.iterdir()) == []
    assert file._fd is not None
    assert stat.S_IMODE(os.fstat(file._fd).st_mode) == 0o600
    file.close()


def test_a_planted_bug_is_found(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    Reversal(
        SpillFile._open,
        'tempfile.TemporaryFile(dir=self._folder, prefix="cutwater-spill-")',
        'open(f"{self._folder}/spill", "w+b")',
        test_rows_on_disk_lie_in_a_file_without_a_name_that_only_the_owner_could_open,
    ).is_seen(monkeypatch, tmp_path_factory)
