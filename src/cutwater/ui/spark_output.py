"""What Spark writes to standard error goes through the view, so that it does not tear a live display apart."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager


class SparkOutput:
    """Takes the standard error that a Spark session finds when it starts.

    On this machine that is also where the output of the workers ends: what users print in their functions.

    Args:
        show: called from a thread with every line that is not blank; it must not write to file descriptor 2, which is
            ours while ``taken``.
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
                if line.strip():
                    self._show(line.rstrip())
