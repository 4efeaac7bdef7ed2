"""Colours and strokes of the diagrams, for light and dark backgrounds."""

from __future__ import annotations

FONT = 13.0
"""Size of the letters, in pixels."""

COLOURS = (("#1f5fd0", "#7fb0ff"), ("#8a2fb8", "#d79bff"), ("#0a7f5f", "#4fd1a8"), ("#a85b00", "#ffb65c"))
"""Of the first, second ... snapshot, on light and on dark paper; readable for all kinds of colour vision."""

_SHAPES = f"""
text{{font:{FONT:.0f}px system-ui,"DejaVu Sans",Arial,sans-serif;fill:#222}}
.title{{font-size:15px;font-weight:600}}
.process{{font-weight:600}}
.legend,.state,.label{{font-size:11px}}
.state{{fill:#666}}
.label{{paint-order:stroke;stroke:#fff;stroke-width:3px;stroke-linejoin:round}}
text.label{{fill:#555}}
.event-name{{font-style:italic;paint-order:stroke;stroke:#fff;stroke-width:3px}}
.name,text.note[class*=" s"]{{font-weight:600}}
path{{fill:none}}
.paper{{fill:#fff}}
.life{{stroke:#999;stroke-width:1.5}}
.down{{stroke-dasharray:2 5;stroke:#bbb}}
.event{{fill:#222}}
.message{{stroke:#777;stroke-width:1.4}}
.head{{fill:#777;stroke:none!important}}
.marker{{stroke:#d11a1a;stroke-width:1.4;stroke-dasharray:5 4}}
.marker.head{{fill:#d11a1a}}
.lost{{opacity:.55}}
.again{{stroke:#a85b00;stroke-dasharray:2 3}}
.again.head{{fill:#a85b00}}
.backwards,.missed,.extra{{stroke:#d1008f;stroke-width:3}}
.missed{{stroke-dasharray:7 5}}
.extra{{stroke-dasharray:2 3}}
.backwards.head,.missed.head,.extra.head,text.backwards,text.missed,text.extra,.wrong{{fill:#d1008f}}
.wrong{{font-size:20px;font-weight:700;paint-order:stroke;stroke:#fff;stroke-width:3px}}
.cut{{stroke-width:4;stroke-linecap:round;opacity:.85}}
.past{{opacity:.07}}
.waits{{opacity:.18}}
.records{{opacity:.38}}
.crash{{stroke:#d11a1a;stroke-width:3}}
.restored{{fill:#a85b00}}
.survived{{fill:none;stroke:#a85b00;stroke-width:2}}
.committed{{stroke:#0a7f5f;stroke-width:2.5}}
.other{{fill:#999}}
text.label[class*="message"]{{stroke:#fff;stroke-width:3px}}
"""

_DARK = """
text,.event{fill:#eee}
.paper{fill:#14171c}
.state,text.label{fill:#aaa}
.label,.event-name,.wrong,text.label[class*="message"]{stroke:#14171c}
.life{stroke:#777}
.down{stroke:#555}
.message{stroke:#9a9a9a}
.head{fill:#9a9a9a}
.marker,.crash{stroke:#ff6b6b}
.marker.head{fill:#ff6b6b}
.again{stroke:#ffb65c}
.again.head,.restored{fill:#ffb65c}
.backwards,.missed,.extra{stroke:#ff5cc4}
.backwards.head,.missed.head,.extra.head,text.backwards,text.missed,text.extra,.wrong{fill:#ff5cc4}
.survived{stroke:#ffb65c}
.committed{stroke:#4fd1a8}
"""


def _of_snapshots(shade: int) -> str:
    lines: list[str] = []
    for i, colours in enumerate(COLOURS):
        c = colours[shade]
        lines.append(f"path.s{i}{{stroke:{c}}}path.message.s{i}{{stroke-width:3}}path.head.s{i}{{fill:{c}}}")
        lines.append(f"rect.s{i},path.past.s{i}{{fill:{c};stroke:none}}text.s{i}{{fill:{c}}}")
    return "\n".join(lines)


STYLE = f"{_SHAPES}{_of_snapshots(0)}\n@media (prefers-color-scheme:dark){{{_DARK}{_of_snapshots(1)}}}\n"
"""A style sheet for a picture that stands alone or in an image element."""
