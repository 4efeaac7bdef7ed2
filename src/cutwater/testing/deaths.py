"""Deaths of a process at a chosen moment: an exception that nothing in a connector may catch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Killed(BaseException):
    """The process dies here."""


class Moments:
    """The moments at which a process may die or fall asleep, and a reader may look, told one by one.

    Args:
        look: called at some of them: what another process sees then.
        every: a look at each so-many-th moment.
    """

    def __init__(self, look: Callable[[], None], every: int = 1) -> None:
        self.count = 0
        self.kill_in: int | None = None
        self._sleep_in, self._meanwhile = 0, list[Callable[[], None]]()
        self._look, self._every = look, every

    def moment(self) -> None:
        """Look, and sleep or die if it is time.

        Raises:
            Killed: it is.
        """
        self.count += 1
        if self.count % self._every == 0:
            self._look()
        if self._meanwhile:
            self._sleep_in -= 1
            if self._sleep_in < 0:
                self._meanwhile.pop()()
        if self.kill_in is not None:
            self.kill_in -= 1
            if self.kill_in < 0:
                self.kill_in = None
                raise Killed

    @contextmanager
    def asleep_after(self, moments: int, meanwhile: Callable[[], None]) -> Generator[None]:
        """In the block the process sleeps once, after so many moments if there are as many; others go on meanwhile."""
        self._sleep_in, self._meanwhile = moments, [meanwhile]
        try:
            yield
        finally:
            self._meanwhile = []


@contextmanager
def before_each_line(module: str, moment: Callable[[], None]) -> Generator[None]:
    """Call ``moment`` before each line of a module (and of those below it) that this thread runs in the block.

    A tracer that was there before (of a debugger, of coverage) is put back afterwards.
    """
    inside = False

    def on_line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal inside
        if event == "line" and not inside:
            inside = True
            try:
                moment()
            finally:
                inside = False
        return on_line

    def on_call(frame: FrameType, event: str, argument: Any) -> Any:
        name = str(frame.f_globals.get("__name__", ""))
        return on_line if name == module or name.startswith(f"{module}.") else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield
    finally:
        sys.settrace(before)
