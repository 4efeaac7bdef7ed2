"""Differences of two schemas, in words."""

from __future__ import annotations

import pyarrow as pa


def schema_differences(expected: pa.Schema, other: pa.Schema) -> list[str]:
    """What ``other`` does differently: one sentence per missing, extra, mistyped or misplaced column.

    >>> schema_differences(pa.schema({"a": pa.int64()}), pa.schema({"a": pa.string(), "b": pa.int8()}))
    ["column 'a' is string instead of int64", "column 'b' is extra"]
    """
    found: list[str] = []
    for field in expected:
        index = other.get_field_index(field.name)
        if index < 0:
            found.append(f"column {field.name!r} is missing")
        elif other.field(index).type != field.type:
            found.append(f"column {field.name!r} is {other.field(index).type} instead of {field.type}")
    found += [f"column {name!r} is extra" for name in other.names if name not in expected.names]
    if not found and other.names != expected.names:
        found.append(f"columns are in the order {', '.join(other.names)} instead of {', '.join(expected.names)}")
    return found
