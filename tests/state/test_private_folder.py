"""Scratch folders of a process: nobody else can open them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from cutwater.errors import StorageError
from cutwater.state.disk.private_folder import PrivateFolder


def test_nobody_else_can_open_a_scratch_folder(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        folder = PrivateFolder(str(tmp_path / "scratch"))
    finally:
        os.umask(old)
    for path in (tmp_path / "scratch", Path(folder.path)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    folder.remove()


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir(mode=0o755)
    with pytest.raises(StorageError, match="others may read it"):
        PrivateFolder(str(tmp_path / "scratch"))
