"""The tables of the guide that come from the code.  ``python tests/docs/generated.py`` writes them anew."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from pathlib import Path

import msgspec

from cutwater import config, errors

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide"
PAGES = {"settings": GUIDE / "settings.md", "errors": GUIDE / "errors.md"}


def settings() -> str:
    """Names, defaults and docstrings of ``JobConfig`` and ``RestartConfig``."""
    return "\n\n".join(_fields(c) for c in (config.JobConfig, config.RestartConfig))


def _fields(cls: type[msgspec.Struct]) -> str:
    notes = _notes(cls)
    rows = [f"| `{cls.__name__}` | default | |", "|---|---|---|"]
    for field in msgspec.structs.fields(cls):
        default = field.default
        shown = f"`{type(default).__name__}()`" if isinstance(default, msgspec.Struct) else f"`{default!r}`"
        rows.append(f"| `{field.name}` | {shown} | {notes.get(field.name, '')} |")
    return "\n".join(rows)


def _notes(cls: type) -> dict[str, str]:
    """The text below each field."""
    body = ast.parse(inspect.getsource(cls)).body[0].body
    notes: dict[str, str] = {}
    for field, note in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(note, ast.Expr) and isinstance(note.value, ast.Constant):
            notes[field.target.id] = " ".join(str(note.value.value).split()).replace("``", "`")
    return notes


def errors_table() -> str:
    """Each error with its exit code and meaning."""
    rows = ["| error | exit code | |", "|---|---:|---|"]
    for name in errors.__all__:
        cls = getattr(errors, name)
        if not isinstance(cls, type):
            continue
        meaning = " ".join((cls.__doc__ or "").split("\n\n")[0].split()).replace("``", "`")
        rows.append(f"| `{name}` | {cls.exit_code} | {meaning} |")
    return "\n".join(rows)


TABLES = {"settings": settings, "errors": errors_table}


def filled(name: str) -> str:
    """The page as it should be."""
    marker = re.compile(f"(<!-- generated: {name} -->).*?(<!-- /generated: {name} -->)", re.DOTALL)
    text, count = marker.subn(lambda m: f"{m[1]}\n{TABLES[name]()}\n{m[2]}", PAGES[name].read_text())
    assert count == 1, name
    return text


if __name__ == "__main__":
    for page in PAGES:
        PAGES[page].write_text(filled(page))
