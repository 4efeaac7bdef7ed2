"""The listing of the house on the architecture page names the folders that there are."""

from __future__ import annotations

import re

from source_tree import PACKAGE, ROOT, SOURCE


def listed_folders(page: str) -> set[str]:
    """Folders of the listing "The house" on the architecture page, "state/disk"; those of a room stand further in."""
    found, room = set[str](), ""
    for line in page.split("src/cutwater/\n")[1].split("\n\n")[0].splitlines():
        names = re.findall(r"\b(\w+)/", line.strip().split("  ")[0])
        if line.startswith(" " * 8):
            found |= {f"{room}/{name}" for name in names}
        else:
            room = names[0] if names else ""
            found |= {room} - {""}
    return found


def test_the_architecture_page_lists_the_folders_that_there_are():
    package = SOURCE / PACKAGE
    there = {path.parent.relative_to(package).as_posix() for path in package.rglob("*.py")} - {"."}
    assert listed_folders((ROOT / "docs" / "architecture.md").read_text()) == there


def test_a_folder_that_is_not_there_is_seen_in_the_listing():
    page = "src/cutwater/\n      state/    what a subtask remembers\n        disk/ lost/    files\n\nA folder"
    assert listed_folders(page) == {"state", "state/disk", "state/lost"}
