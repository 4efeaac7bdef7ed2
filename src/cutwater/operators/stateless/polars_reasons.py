"""What Polars says of an expression that does not work, without its plans: one line, and what to do about it."""

from __future__ import annotations

import re

import pyarrow as pa
import pyarrow.types as pt

_DUMP = re.compile(r"\n\s*\n(Resolved plan|This error occurred|If you would like).*", re.DOTALL)
_SHOWN_COLUMNS = 20


def reason(exc: BaseException) -> str:
    """What went wrong, without the dumps of plans and contexts that follow.

    >>> reason(ValueError("no field 'b'\\n\\nResolved plan until failure:\\n..."))
    "no field 'b'"
    """
    text = " ".join(_DUMP.sub("", str(exc)).split()).rstrip(".")
    if type(exc).__name__ == "StructFieldNotFoundError":
        return f"the struct has no field {text!r}"
    return text or type(exc).__name__


def columns_read(schema: pa.Schema, names: tuple[str, ...]) -> str:
    """Columns with their types: those named, or all if none is; many are cut short.

    >>> columns_read(pa.schema({"s": pa.string(), "n": pa.int64()}), ("n",))
    'n int64'
    """
    shown = [schema.field(name) for name in names if name in schema.names] or list(schema)
    text = ", ".join(f"{f.name} {f.type}" for f in shown[:_SHOWN_COLUMNS])
    return f"{text} and {len(shown) - _SHOWN_COLUMNS} more" if len(shown) > _SHOWN_COLUMNS else text


def advice(text: str, schema: pa.Schema, names: tuple[str, ...]) -> str:
    """What to do about ``reason``'s text."""
    kinds = {name: schema.field(name).type for name in names if name in schema.names}
    if any(map(pt.is_timestamp, kinds.values())):
        if "Datetime" in text:
            return (
                "A time with a zone does not meet one without: write datetime(..., tzinfo=timezone.utc), or change "
                "the column by .dt.replace_time_zone('UTC') or .dt.replace_time_zone(None)."
            )
        if "string" in text or "str" in text:
            return "Write a time as a time: datetime(2026, 1, 1), with tzinfo=timezone.utc if the column has a zone."
    texts = [name for name, kind in kinds.items() if pt.is_string(kind)]
    if "str" in text and texts:
        column = f"pl.col({texts[0]!r})"
        return f"Cast the text first: {column}.cast(pl.Int64), or {column}.str.to_datetime('%Y-%m-%d %H:%M:%S')."
    structs = [kind for kind in kinds.values() if pt.is_struct(kind)]
    if "has no field" in text and structs:
        return f"There are: {', '.join(kind.field(i).name for kind in structs for i in range(kind.num_fields))}."
    first = next(iter(kinds), "name")
    return f"Cast it first, pl.col({first!r}).cast(...), or use a function: map, map_batches."
