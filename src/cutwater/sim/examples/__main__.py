"""``python -m cutwater.sim.examples DIRECTORY``: draw all pictures, and fill the measured table of the page beside."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from cutwater.errors import ConfigError
from cutwater.sim.examples.pictures import PICTURES, measured

PAGE = "what-does-not-work.md"
_TABLE = re.compile(r"(<!-- measured -->\n).*?(<!-- /measured -->)", re.DOTALL)


def filled(page: str, table: str) -> str:
    """The page with this table."""
    return _TABLE.sub(lambda found: f"{found[1]}{table}\n{found[2]}", page)


def main(directory: Path) -> None:
    """Write everything."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        (directory / f"{name}.svg").write_text(draw(), encoding="utf-8")
    page = directory.parent / PAGE
    if page.exists():
        page.write_text(filled(page.read_text(encoding="utf-8"), measured()), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise ConfigError(
            "say where the pictures go", hint="For example: python -m cutwater.sim.examples docs/pictures."
        )
    main(Path(sys.argv[1]))
