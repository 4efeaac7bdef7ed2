"""The engines we compare with, each in an environment of its own below ``.peers/``; nothing of them is a dependency."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from servers.jars import FetchError, fetched

__all__ = ["BYTEWAX", "FLINK", "PeerError", "bytewax_python", "flink_command", "jars"]

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / ".peers"
BYTEWAX, FLINK = "bytewax==0.21.1", "apache-flink-libraries==2.3.0"
_JOBS = ROOT / "benchmarks" / "flink"
_CLASSES = ROOT / "out" / "bench" / "flink"
_OPENED = ("util", "lang", "net", "nio", "util.concurrent", "time")
_LIBRARIES = Path("lib", f"python3.{sys.version_info.minor}", "site-packages", "pyflink", "lib")


class PeerError(Exception):
    """A peer cannot be had on this machine; says what is missing."""


def bytewax_python() -> str:
    """The Python that has Bytewax; made at the first call.

    Raises:
        PeerError: it cannot be installed.
    """
    return str(_environment("bytewax", [BYTEWAX, "numpy"]) / "bin" / "python")


def jars(name: str) -> Path:
    """The folder with the jars of ``benchmarks/<name>.lock``, fetched at the first call.

    Raises:
        PeerError: they cannot be fetched.
    """
    try:
        return fetched(name, locks=ROOT / "benchmarks", into=PEERS)
    except FetchError as e:
        raise PeerError(str(e)) from None


def flink_command(job: str, more: str = "") -> list[str]:
    """The command that runs a job on Flink, without its arguments; installed and compiled at the first call.

    Only jars are wanted: the package that holds them, not PyFlink with its Python dependencies.

    Args:
        job: name of the class with ``main`` in ``benchmarks/flink``, such as ``KeyedCount``.
        more: of the class path, such as ``"folder/*"``.

    Raises:
        PeerError: no JDK, or Flink cannot be installed or the job not be compiled.
    """
    if shutil.which("java") is None or shutil.which("javac") is None:
        raise PeerError("Flink needs a JDK of version 17 or 21 (java and javac on the PATH)")
    home = _environment("flink", ["--no-deps", FLINK])
    libraries, mark = home / _LIBRARIES, _CLASSES / ".compiled"
    sources = sorted(_JOBS.glob("*.java"))
    if not mark.exists() or mark.stat().st_mtime < max(source.stat().st_mtime for source in sources):
        _run(["javac", "-nowarn", "-cp", f"{libraries}/*", "-d", str(_CLASSES), *map(str, sources)])
        mark.touch()
    opens = [f"--add-opens=java.base/java.{name}=ALL-UNNAMED" for name in _OPENED]
    return [
        "java",
        "-Xmx4g",
        *opens,
        "-Dlog4j2.level=ERROR",
        "-cp",
        f"{_CLASSES}:{_JOBS}:{libraries}/*:{more}".strip(":"),
        job,
    ]


def _environment(name: str, packages: list[str]) -> Path:
    """A virtual environment with these packages; complete once its mark is there."""
    home = PEERS / name
    mark = home / ".installed"
    wanted = " ".join(packages)
    if mark.exists() and mark.read_text() == wanted:
        return home
    print(f"installing {packages[-1] if name == 'flink' else packages[0]} into .peers/{name} (once)", file=sys.stderr)
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.exists() else shutil.which("uv")
    python = str(home / "bin" / "python")
    if uv:
        _run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(home)])
        _run([uv, "pip", "install", "--quiet", "--python", python, *packages])
    else:
        _run([sys.executable, "-m", "venv", "--clear", str(home)])
        _run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages])
    mark.write_text(wanted)
    return home


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PeerError(f"{' '.join(command[:4])} ... failed:\n{(done.stderr or done.stdout).strip()[-1500:]}")
