"""The tables of the guide that come from the code.  ``python tests/docs/generated.py`` writes them anew."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from pathlib import Path

import msgspec
import pyarrow as pa

from cutwater import config, errors
from cutwater.api import aggregates
from cutwater.operators.aggregate.accumulators import Aggregate

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide"
PAGES = {"settings": GUIDE / "settings.md", "errors": GUIDE / "errors.md", "aggregates": GUIDE / "dataflow.md"}


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


COLUMN_TYPES: dict[str, tuple[pa.DataType, ...]] = {
    "integers": tuple(
        make() for make in (pa.int8, pa.int16, pa.int32, pa.int64, pa.uint8, pa.uint16, pa.uint32, pa.uint64)
    ),
    "float, double": (pa.float32(), pa.float64()),
    "boolean": (pa.bool_(),),
    "decimal": (pa.decimal128(10, 2), pa.decimal128(38, 0)),
    "string, binary": (pa.string(), pa.binary()),
    "date, timestamp": (pa.date32(), pa.timestamp("us"), pa.timestamp("us", "UTC")),
    "array, struct, map": (pa.list_(pa.int64()), pa.struct({"x": pa.int64()}), pa.map_(pa.string(), pa.int64())),
}
"""Types by the names that they have in the guide."""


def aggregates_table() -> str:
    """What each aggregate makes of a column of each type, as the code that checks it says."""
    rows = [f"| aggregate | {' | '.join(COLUMN_TYPES)} |", "|---" * (len(COLUMN_TYPES) + 1) + "|"]
    for name in aggregates.__all__:
        results = (_result(name, kinds) for kinds in COLUMN_TYPES.values())
        rows.append(f"| `{name}` | {' | '.join(results)} |")
    return "\n".join(rows)


def result_type(name: str, kind: pa.DataType) -> pa.DataType | None:
    """Type of an aggregate of a column, ``None`` if it does not take such columns."""
    call = getattr(aggregates, name)("v")
    try:
        return Aggregate("a", call.kind, "v", call.precision).result_type(pa.schema({"v": kind}))
    except errors.BuildError:
        return None


def _result(name: str, kinds: tuple[pa.DataType, ...]) -> str:
    found = {"the same" if made == kind else str(made) for kind in kinds if (made := result_type(name, kind))}
    if len(found) > 1:  # of several types one is the same by chance
        found = {str(result_type(name, kind)) for kind in kinds}
    taken = [kind for kind in kinds if result_type(name, kind)]
    if not taken:
        return "no"
    assert len(taken) == len(kinds), f"{name} takes some of {kinds}: put them into groups of their own"
    (text,) = found
    return {"int64": "long"}.get(text, text)


TABLES = {"settings": settings, "errors": errors_table, "aggregates": aggregates_table}


def filled(name: str) -> str:
    """The page as it should be."""
    marker = re.compile(f"(<!-- generated: {name} -->).*?(<!-- /generated: {name} -->)", re.DOTALL)
    text, count = marker.subn(lambda m: f"{m[1]}\n{TABLES[name]()}\n{m[2]}", PAGES[name].read_text())
    assert count == 1, name
    return text


if __name__ == "__main__":
    for page in PAGES:
        PAGES[page].write_text(filled(page))
