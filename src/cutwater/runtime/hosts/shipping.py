"""Sending a user's own modules to workers that do not have them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType


def ship_by_value(folder: Path, *more: ModuleType) -> None:
    """From now on Spark sends functions and classes of a program's own modules whole, instead of by name.

    A name would have to be found again on every worker, where the user's files are not installed.
    """
    from pyspark import cloudpickle

    for module in (*own_modules(folder), *more):
        cloudpickle.register_pickle_by_value(module)


def own_modules(folder: Path) -> list[ModuleType]:
    """The loaded modules that Python found because ``folder`` is the program's: workers do not look there."""
    if _installed(folder):
        return []
    return [m for name, m in list(sys.modules.items()) if name != "__main__" and _lies_in(folder, m)]


def _lies_in(folder: Path, module: ModuleType) -> bool:
    """True if the way from the folder to the module's file is the module's name."""
    file = getattr(module, "__file__", None)
    if file is None or not Path(file).is_relative_to(folder):
        return False
    first = Path(file).relative_to(folder).parts[0]
    return first.partition(".")[0] == module.__name__.partition(".")[0]


def main_folder() -> Path | None:
    """Folder of the program that runs in this process; in a notebook or a shell the current one.

    ``None`` if the program is an installed one, such as a test runner.
    """
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    folder = Path(file).absolute().parent if file else Path.cwd()
    return None if _installed(folder) or folder.is_relative_to(sys.base_prefix) else folder


def _installed(path: Path) -> bool:
    return any(part in ("site-packages", "dist-packages") for part in path.parts)
