"""Bugs planted by a change of the source: a function as it reads without one of its protections."""

from __future__ import annotations
import __future__

import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

__all__ = ["Reversal"]


class Reversal(NamedTuple):
    """A protection taken out of a function, and a test that has to see that.

    Whoever changes the line is told to change the reversal with it.

    >>> from cutwater.data.text import plural
    >>> def test() -> None:
    ...     assert plural(1, "row") == "1 row"
    >>> with pytest.MonkeyPatch.context() as patch:
    ...     Reversal(plural, "number == 1", "False", test).is_seen(patch)
    """

    function: Any
    line: str
    """Part of its source, there once."""
    instead: str
    test: Callable[..., None]

    def is_seen(self, monkeypatch: pytest.MonkeyPatch, folders: pytest.TempPathFactory | None = None) -> None:
        """Pass if the test passes as things are and fails with the reversal.

        Args:
            folders: makes the test's argument, another one each time; without it the test has none.
        """
        self.test(*_arguments(folders))
        monkeypatch.setattr(self.function, "__code__", self._code())
        with pytest.raises((Exception, pytest.fail.Exception)):  # type: ignore[arg-type]
            self.test(*_arguments(folders))

    def _code(self) -> Any:
        source = textwrap.dedent(inspect.getsource(self.function))
        assert source.count(self.line) == 1, f"{self.line!r} is not once in {self.function.__qualname__}"
        lines = textwrap.indent(source.replace(self.line, self.instead), "    ")
        whole = f"def around(__class__):\n{lines}\n    return {self.function.__name__}"  # as super() wants it
        made = dict(self.function.__globals__)
        exec(compile(whole, "<reversal>", "exec", __future__.annotations.compiler_flag, True), made)
        without = made["around"](None)
        return getattr(without, "fget", getattr(without, "__func__", without)).__code__


def _arguments(folders: pytest.TempPathFactory | None) -> list[Path]:
    return [] if folders is None else [folders.mktemp("reversal")]
