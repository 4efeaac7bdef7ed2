"""Sending a user's own modules to workers that do not have them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

__all__ = ["main_folder", "own_modules", "ship_by_value"]


def ship_by_value(folder: Path) -> None:
    """From now on Spark sends functions and classes of the modules below ``folder`` whole, instead of by name.

    A name would have to be found again on every worker, where the user's files are not installed.  Installed packages
    go by name.
    """
    from pyspark import cloudpickle

    for module in own_modules(folder):
        cloudpickle.register_pickle_by_value(module)


def own_modules(folder: Path) -> list[ModuleType]:
    """The loaded modules whose files lie below ``folder`` and are no installed packages."""
    found = [m for m in list(sys.modules.values()) if _is_below(folder, getattr(m, "__file__", None))]
    return [m for m in found if m.__name__ != "__main__" and m.__name__.partition(".")[0] != "cutwater"]


def main_folder() -> Path | None:
    """Where the program lies that runs in this process; in a notebook or a shell the current folder.

    ``None`` if the program is an installed one, such as a test runner.
    """
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    folder = Path(file).absolute().parent if file else Path.cwd()
    return None if _installed(folder) or folder.is_relative_to(sys.base_prefix) else folder


def _is_below(folder: Path, file: str | None) -> bool:
    # A virtual environment in the same folder is installed software, which has its own way to the workers.
    return file is not None and Path(file).is_relative_to(folder) and not _installed(Path(file).relative_to(folder))


def _installed(path: Path) -> bool:
    return any(part in ("site-packages", "dist-packages") for part in path.parts)
