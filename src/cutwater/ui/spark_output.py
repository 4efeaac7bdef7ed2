"""What Spark's JVM writes to standard error: its greeting is dropped, everything later is shown above the progress."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

__all__ = ["SparkOutput"]

_GREETING = re.compile(
    r"WARNING: Using incubator modules|Using Spark's default log4j profile|Setting (default|Spark) log level to"
    r"|To adjust logging level use|.* WARN (Utils: (Your hostname|Set SPARK_LOCAL_IP)|NativeCodeLoader: Unable to load)"
)


class SparkOutput:
    """Takes the standard error that a Spark session inherits when it starts.

    The workers' own output comes the same way on this machine: what users print in their functions must be seen, and
    must not tear a live display apart.

    Args:
        show: called from a thread with every line that is not part of the greeting; it must not write to file
            descriptor 2, which is ours while ``taken``.
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show

    @contextmanager
    def taken(self) -> Generator[None]:
        """Processes started inside write their standard error to us, for as long as they live."""
        reader, writer = os.pipe()
        own = os.dup(2)
        threading.Thread(target=self._pass_on, args=(reader,), name="cutwater-spark-output", daemon=True).start()
        os.dup2(writer, 2)
        os.close(writer)
        try:
            yield
        finally:
            os.dup2(own, 2)
            os.close(own)

    def _pass_on(self, reader: int) -> None:
        with open(reader, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.strip() and not _GREETING.match(line):
                    self._show(line.rstrip())
