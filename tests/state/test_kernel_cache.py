"""The cache of compiled kernels: what lies there is loaded as code, so that it is the user's alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from unittest import mock

import pytest

from cutwater.state.kernels import _usable
from reversal import Reversal


def test_a_cache_that_is_the_users_alone_is_used(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        assert _usable(str(tmp_path / "cutwater" / "kernels"))
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "cutwater" / "kernels").stat().st_mode) == 0o700
    assert _usable(str(tmp_path / "cutwater" / "kernels"))


def test_a_cache_of_another_owner_is_not_used_whatever_its_mode(tmp_path: Path) -> None:
    """Somebody who makes it first could have us run code of his."""
    (tmp_path / "kernels").mkdir(mode=0o700)
    another = os.getuid() + 1
    with mock.patch.object(os, "getuid", return_value=another):
        assert not _usable(str(tmp_path / "kernels"))


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_cache_that_others_can_write_is_not_used(tmp_path: Path, mode: int) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels").chmod(mode)
    assert not _usable(str(tmp_path / "kernels"))


def test_a_file_in_the_place_of_the_cache_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "kernels").touch()
    assert not _usable(str(tmp_path / "kernels"))


# ----------------------------------------------------------------------------------------------------------- the alarm

REVERSALS = {
    "another owner": Reversal(
        _usable, "found.st_uid == os.getuid() and ", "", test_a_cache_of_another_owner_is_not_used_whatever_its_mode
    ),
    "others may write": Reversal(
        _usable,
        " and not found.st_mode & 0o022",
        "",
        lambda folder: test_a_cache_that_others_can_write_is_not_used(folder, 0o720),
    ),
    "made with the modes of the umask": Reversal(
        _usable, "mode=0o700, ", "", test_a_cache_that_is_the_users_alone_is_used
    ),
}


@pytest.mark.parametrize("bug", REVERSALS)
def test_planted_bugs_are_found(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, bug: str
) -> None:
    REVERSALS[bug].is_seen(monkeypatch, tmp_path_factory)
