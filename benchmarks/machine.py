"""Facts about the machine and its idleness, which belong beside every number."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import threading
import time
from importlib import metadata
from typing import Any

__all__ = ["QUIET_CPUS", "MemoryUse", "busy_cpus", "facts", "stalls_ms"]

QUIET_CPUS = 0.15
"""Processors that others may use while nothing of ours runs, for the machine to count as quiet."""


def facts() -> dict[str, Any]:
    """Processor, memory, kernel and versions."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu": _first("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
        "java": java_version(),
        "versions": {name: metadata.version(name) for name in ("cutwater", "pyspark", "pyarrow", "numba", "numpy")},
    }


def java_version() -> str | None:
    """First line of ``java -version``; None without Java."""
    try:
        said = subprocess.run(["java", "-version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return said.stderr.splitlines()[0]


def busy_cpus(seconds: float = 0.5) -> float:
    """Processors in use over the next moment; called while nothing of ours runs, it tells how busy others are."""
    before = _busy_ticks()
    time.sleep(seconds)
    return round((_busy_ticks() - before) / os.sysconf("SC_CLK_TCK") / seconds, 2)


def stalls_ms(seconds: int = 5) -> list[float]:
    """Of each second, how long the machine stopped a thread for that does nothing but look at the clock.

    On a shared machine that is milliseconds.  No engine's gaps are shorter.
    """
    found: list[float] = []
    for _ in range(seconds):
        last = time.monotonic_ns()
        until, longest = last + 10**9, 0
        while last < until:
            now = time.monotonic_ns()
            longest = max(longest, now - last)
            last = now
        found.append(longest / 1e6)
    return found


class MemoryUse:
    """The most memory that programs have taken within a ``with``; files that the machine keeps in memory do not count.

    Attributes:
        most_gib: more than at the beginning.
    """

    def __init__(self) -> None:
        self.most_gib = 0.0
        self._ended = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> MemoryUse:
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._watch.join()

    def _look(self) -> None:
        begun_kib = _available_kib()
        while not self._ended.wait(0.2):
            self.most_gib = max(self.most_gib, round((begun_kib - _available_kib()) / 2**20, 2))


def _available_kib() -> int:
    return int(_first("/proc/meminfo", "MemAvailable").split()[0])


def _busy_ticks() -> int:
    with open("/proc/stat") as stat:
        user, nice, system, _idle, _iowait, irq, softirq, steal = (int(x) for x in stat.readline().split()[1:9])
    return user + nice + system + irq + softirq + steal


def _first(path: str, name: str) -> str:
    with open(path) as lines:
        return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), "")
