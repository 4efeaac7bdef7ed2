"""Scratch folders of a process: nobody else can open them."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from unittest import mock

import pytest

from cutwater.errors import StorageError
from cutwater.state.disk.private_folder import PrivateFolder
from reversal import Reversal


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


def test_a_folder_of_another_owner_is_refused_whatever_its_mode(tmp_path: Path) -> None:
    """Somebody who makes it first could otherwise look into what we put there, and put there what we read."""
    (tmp_path / "scratch").mkdir(mode=0o700)
    another = os.getuid() + 1
    foreign = mock.patch.object(os, "getuid", return_value=another)
    with foreign, pytest.raises(StorageError, match="belongs to somebody else"):
        PrivateFolder(str(tmp_path / "scratch"))
    assert os.listdir(tmp_path / "scratch") == []


# ----------------------------------------------------------------------------------------------------------- the alarm

REVERSALS = {
    "the folder has the modes of the umask": Reversal(
        PrivateFolder.__init__,
        "os.makedirs(parent, mode=0o700, exist_ok=True)",
        "os.makedirs(parent, exist_ok=True)",
        test_nobody_else_can_open_a_scratch_folder,
    ),
    "others may read the folder": Reversal(
        PrivateFolder.__init__, " or found.st_mode & 0o077", "", test_a_folder_of_somebody_else_is_refused
    ),
    "each process's own has the modes of the umask": Reversal(
        PrivateFolder.__init__,
        "self.path = tempfile.mkdtemp(dir=parent)",
        "self.path = os.path.join(parent, 'one'); os.mkdir(self.path)",
        test_nobody_else_can_open_a_scratch_folder,
    ),
    "another owner": Reversal(
        PrivateFolder.__init__,
        "found.st_uid != os.getuid() or ",
        "",
        test_a_folder_of_another_owner_is_refused_whatever_its_mode,
    ),
}


@pytest.mark.parametrize("bug", REVERSALS)
def test_planted_bugs_are_found(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, bug: str
) -> None:
    REVERSALS[bug].is_seen(monkeypatch, tmp_path_factory)
