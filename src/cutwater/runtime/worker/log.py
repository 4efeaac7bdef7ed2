"""Log records of a worker, of a user's functions for example, go to the driver."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from cutwater.config import LogLevelName
from cutwater.connectors.console import CONSOLE_LOGGER
from cutwater.runtime.control import reports as cr

LINES_PER_S = 100
"""A function that logs each of a million rows must not drown the driver: of what comes faster it gets the number."""


@contextmanager
def log_to_driver(send: Callable[[cr.Log], None], level: LogLevelName) -> Generator[None]:
    """Send what this process logs, from this level on.

    Spark gives a process to the next task when this one is done: so all is as before afterwards.
    """
    root = logging.getLogger()
    handler, before = _ToDriver(send), root.level
    root.addHandler(handler)
    root.setLevel(level.upper())
    try:
        yield
    finally:
        root.setLevel(before)
        root.removeHandler(handler)


class _ToDriver(logging.Handler):
    def __init__(self, send: Callable[[cr.Log], None]) -> None:
        super().__init__()
        self._send = send
        self._second, self._lines, self._left_out = 0, 0, 0

    def emit(self, record: logging.LogRecord) -> None:
        """Send one line; what a console sink shows is output, and comes whole."""
        if record.name == CONSOLE_LOGGER:
            self._send(cr.Log(cr.CONSOLE, self.format(record)))
            return
        second = int(time.monotonic())
        if second != self._second:
            left_out, self._second, self._lines, self._left_out = self._left_out, second, 0, 0
            if left_out:
                self._send(
                    cr.Log("warning", f"{left_out:,} lines of this worker's log were left out: it logs too much")
                )
        self._lines += 1
        if self._lines > LINES_PER_S:
            self._left_out += 1
        else:
            self._send(cr.Log(record.levelname.lower(), self.format(record)))
