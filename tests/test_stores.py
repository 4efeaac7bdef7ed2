"""Nobody but `storage` knows which stores there are, and what lies where in them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "cutwater"
_STORES = re.compile(r"\b(LocalStore|MemoryStore)\b")
_PLACES = re.compile(
    r"(^|/)((chk|manifest|savepoint)-|(log|input|output|shadow|shared|control)/|savepoints/?$|_staged|claim\.json)"
)


def breaches(text: str, path: str) -> list[str]:
    """Names of stores, and texts that are places in a checkpoint directory."""
    found = [f"{path} names {name}" for name in sorted(set(_STORES.findall(text)))]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.JoinedStr):
            told = "".join(str(v.value) if isinstance(v, ast.Constant) else "x" for v in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            told = node.value
        else:
            continue
        if _PLACES.search(told) and not re.search(r"\s", told):
            found.append(f"{path}:{node.lineno} composes {told!r}")
    return found


def test_stores_and_places_are_known_in_storage_only() -> None:
    files = [file for file in SRC.rglob("*.py") if file.relative_to(SRC).parts[0] not in ("storage", "sim")]
    assert len(files) > 200
    assert [b for file in files for b in breaches(file.read_text(), str(file.relative_to(SRC)))] == []


@pytest.mark.parametrize(
    "text",
    [
        "store = LocalStore(folder)",
        "isinstance(store, MemoryStore)",
        'path = f"{job}/chk-{id}"',
        'names = store.names(f"{job}/log/old")',
        'os.path.join(directory, "savepoints")',
        'folder = job + "/input/" + step',
    ],
)
def test_a_breach_is_seen(text: str) -> None:
    assert breaches(text, "x.py")
