"""The README and the documentation, taken apart."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    p for p in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
)
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, text and first line."""

    language: str
    text: str
    line: int


def blocks(page: Path, language: str) -> list[Block]:
    text = page.read_text()
    return [Block(m[1], m[2], text.count("\n", 0, m.start()) + 2) for m in _FENCE.finditer(text) if m[1] == language]


def links(page: Path) -> list[str]:
    """Targets of links that are no addresses."""
    prose = _FENCE.sub("", page.read_text())
    return [t.partition("#")[0] for t in _LINK.findall(prose) if "://" not in t and not t.startswith("#")]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))
