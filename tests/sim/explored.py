"""The guide's table of what the explorer has seen.  ``python tests/sim/explored.py`` writes it anew."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from cutwater.sim.explorer.explore import Explored, combinations, explore_world

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "simulator.md"
NUMBERS = ("states", "transitions", "ends", "depth", "checked")
_TABLE = re.compile(r"(<!-- generated: explored -->).*?(<!-- /generated: explored -->)", re.DOTALL)


def row(found: Explored) -> str:
    """A world under a protocol."""
    return f"| {found.world} | {found.protocol} | {' | '.join(f'{getattr(found, name):,}' for name in NUMBERS)} |"


def total(protocol: str, found: Iterable[Explored]) -> str:
    """All worlds of a protocol."""
    sums = [sum(getattr(one, name) for one in found) for name in NUMBERS[:3]]
    return f"| all | **{protocol}** | {' | '.join(f'{n:,}' for n in sums)} | | |"


def table(found: list[Explored]) -> str:
    """What was found, protocol by protocol."""
    rows = [
        "| world | protocol | states | transitions | ends | depth | checked |",
        "|---|---|" + "---:|" * len(NUMBERS),
    ]
    for protocol in dict.fromkeys(one.protocol for one in found):
        here = [one for one in found if one.protocol == protocol]
        rows += [*map(row, here), total(protocol, here)]
    return "\n".join(rows)


if __name__ == "__main__":
    made = table([explore_world(*pair) for pair in combinations()])
    text, count = _TABLE.subn(lambda m: f"{m[1]}\n{made}\n{m[2]}", PAGE.read_text())
    assert count == 1
    PAGE.write_text(text)
