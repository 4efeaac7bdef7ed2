"""The package that ``docs/guide/connectors.md`` builds, taken from the page, perhaps with a mistake."""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from source_tree import ROOT

PAGE = ROOT / "docs" / "guide" / "connectors.md"
_FILES = re.compile(r"^`([\w./]+)`:\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PACKAGE, NAME = "cutwater_queue", "cutwater-queue"


def files() -> dict[str, str]:
    """The files of the page, by their names."""
    return dict(_FILES.findall(PAGE.read_text()))


def write(folder: Path, *mistakes: tuple[str, str, str]) -> None:
    """Write the files into a folder.

    Args:
        mistakes: a file, a text in it, which must be there once, and another one in its place.
    """
    texts = files()
    for name, right, wrong in mistakes:
        assert texts[name].count(right) == 1, f"{right!r} is {texts[name].count(right)} times in {name}"
        texts[name] = texts[name].replace(right, wrong)
    for name, text in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def install(folder: Path) -> None:
    """Say of the package in a folder what an installer would."""
    project = tomllib.loads(files()["pyproject.toml"])["project"]
    say_installed(folder, project["name"], project["version"], project["entry-points"])


def say_installed(folder: Path, name: str, version: str, entry_points: dict[str, dict[str, str]]) -> None:
    """Metadata of a package in a folder, as an installer writes it."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    text = "".join(
        f"[{group}]\n" + "".join(f"{n} = {v}\n" for n, v in of.items()) for group, of in entry_points.items()
    )
    (info / "entry_points.txt").write_text(text)


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """What lies in a folder can be imported; afterwards nothing of it is loaded."""
    mine = ("test_queue", PACKAGE)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.partition(".")[0] in mine]:
            del sys.modules[name]
