"""``cutwater warm`` compiles where nothing is compiled, says where, and does nothing twice."""

from __future__ import annotations

from pathlib import Path

import pytest
from ui_world import run_main

from cutwater.runtime.chains import warm
from cutwater.state import kernels


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What was done; a compilation takes too long here."""
    done: list[str] = []

    def warm_up() -> None:
        done.append("compiled")
        marker = warm._marker()
        assert marker is not None
        marker.touch()

    monkeypatch.setattr(kernels, "cache_directory", lambda: str(tmp_path))
    monkeypatch.setattr(warm, "cache_directory", lambda: str(tmp_path))
    monkeypatch.setattr(warm, "warm_up", warm_up)
    return done


def test_it_compiles_once_and_says_where_the_kernels_are(capfd, compiled: list[str], tmp_path: Path) -> None:
    code, out, _ = run_main(capfd, "warm")
    assert (code, compiled) == (0, ["compiled"])
    assert out.endswith(f"They are kept in {tmp_path}\n")
    code, out, _ = run_main(capfd, "warm")
    assert (code, compiled) == (0, ["compiled"])
    assert out == f"The kernels of this installation were compiled before, and are kept in {tmp_path}\n"


def test_without_a_place_for_them_it_says_what_to_do(
    capfd, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "cache_directory", lambda: None)
    code, _, err = run_main(capfd, "warm")
    assert code != 0
    assert "NUMBA_CACHE_DIR" in err
    assert not compiled
