"""A Python that cannot run workers is found before Spark starts one.  No Spark here: stand-ins for interpreters."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cutwater.errors import ConfigError
from cutwater.spark import session
from cutwater.spark.session import check_interpreter, require_interpreter

OURS = f"{sys.version_info[0]}.{sys.version_info[1]}"


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a ``python3`` that is first on the PATH, and does what a line of shell says."""

    def make(line: str) -> str:
        path = tmp_path / "bin" / "python3"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
        return str(path)

    return make


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("echo cutwater-probe 2.7 True", f"a Python 2.7, and this program runs on Python {OURS} .*cannot be sent"),
        (f"echo cutwater-probe {OURS} False", f"has no cutwater; this program's Python is {sys.executable}"),
        ("echo who is there; exit 3", "is no Python that runs: exit code 3"),
        ("echo first >&2; echo no such library >&2; exit 1", "is no Python that runs: no such library"),
    ],
    ids=["another version", "without the package", "no Python", "a broken one"],
)
def test_another_python_on_the_path_is_named_with_what_to_do(python: Any, line: str, says: str) -> None:
    path = python(line)
    with pytest.raises(ConfigError, match=f"Spark would start its workers with {path}, .*{says}") as refused:
        check_interpreter("python3")
    assert f"Set PYSPARK_PYTHON before the session is made, here to {sys.executable}" in refused.value.hint


def test_one_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="with 'python3', which is not there"):
        check_interpreter("python3")


def test_another_python_that_has_all_is_good(python: Any) -> None:
    python(f"echo started; echo cutwater-probe {OURS} True")
    check_interpreter("python3")


def test_files_that_the_session_ships_may_bring_the_package(python: Any) -> None:
    python(f"echo cutwater-probe {OURS} False")
    check_interpreter("python3", ships_files=True)


def test_the_programs_own_python_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, **__: object) -> None:
        raise AssertionError("it was asked")

    monkeypatch.setattr(session.subprocess, "run", run)
    check_interpreter(sys.executable)


def test_a_real_python_is_asked_and_has_the_package(tmp_path: Path) -> None:
    """The one of this environment, by another name in another folder: it is asked, and answers."""
    link = tmp_path / "python3"
    link.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    link.chmod(0o755)
    check_interpreter(str(link))


def test_a_link_to_the_base_python_is_another_environment(tmp_path: Path) -> None:
    """Environments share the file behind their links; a link elsewhere finds other packages."""
    link = tmp_path / "python3"
    link.symlink_to(os.path.realpath(sys.executable))
    with pytest.raises(ConfigError, match="has no cutwater"):
        check_interpreter(str(link))


class FakeContext:
    """As far as the check looks at a context."""

    __module__ = "pyspark.core.context"

    def __init__(self, master: str, python: str, files: str = "") -> None:
        conf = SimpleNamespace(get=lambda name, default: files or default)
        self.master, self.pythonExec, self._python_includes = master, python, list[str]()
        self.getConf = lambda: conf


@pytest.mark.parametrize("master", ["local[4]", "local-cluster[2,1,1024]"])
def test_a_session_on_this_machine_is_checked(master: str) -> None:
    with pytest.raises(ConfigError, match="'no-such-python', which is not there"):
        require_interpreter(FakeContext(master, "no-such-python"))


def test_on_other_machines_the_path_is_theirs_and_no_session_is_no_problem() -> None:
    require_interpreter(FakeContext("spark://elsewhere:7077", "/opt/theirs/python"))
    require_interpreter(None)
