"""The common ground of joins: key types that match, and names of the columns that come out."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.types as pt

from cutwater.data.schema_text import ZONES_DIFFER_HINT, zones_differ
from cutwater.errors import BuildError
from cutwater.operators.stateless.expression_checks import unknown_column
from cutwater.state.keys import check_key_types


def common_key_type(left: pa.Field, right: pa.Field) -> pa.DataType:
    """The type in which two key columns are compared: their own, or the wider one of two integers, floats or texts.

    Raises:
        BuildError: values of the two types cannot be equal.

    >>> common_key_type(pa.field("a", pa.int32()), pa.field("b", pa.int64()))
    DataType(int64)
    """
    a, b = left.type, right.type
    if a == b:
        return a
    if pt.is_integer(a) and pt.is_integer(b) and pa.uint64() not in (a, b):
        return pa.int64()
    if pt.is_floating(a) and pt.is_floating(b):
        return pa.float64()
    for kinds in ((pa.string(), pa.large_string()), (pa.binary(), pa.large_binary())):
        if a in kinds and b in kinds:
            return kinds[1]
    raise BuildError(
        f"key columns of different types: {left.name!r} is {a}, {right.name!r} of the other side is {b}",
        hint=ZONES_DIFFER_HINT if zones_differ(a, b) else "Cast one of them before the join.",
    )


def common_key_types(
    left: pa.Schema, right: pa.Schema, left_keys: Sequence[str], right_keys: Sequence[str]
) -> tuple[pa.DataType, ...]:
    """The types in which the keys of two sides are compared, one for each pair of columns.

    Raises:
        BuildError: different numbers of columns, unknown ones, or types that do not fit.
    """
    if len(left_keys) != len(right_keys):
        raise BuildError(
            f"the left side has {len(left_keys)} key columns, the right side {len(right_keys)}",
            hint="Key both streams by the same number of columns.",
        )
    check_key_types(left, left_keys)
    check_key_types(right, right_keys)
    pairs = zip(left_keys, right_keys, strict=True)
    return tuple(common_key_type(left.field(a), right.field(b)) for a, b in pairs)


def check_times(left: pa.Schema, right: pa.Schema, left_time: str, right_time: str) -> None:
    """Check that the event times of two sides can be compared.

    Raises:
        BuildError: an unknown column, one that is not ``timestamp[us]``, or a time zone on one side only.
    """
    for schema, name in ((left, left_time), (right, right_time)):
        if schema.get_field_index(name) < 0:
            raise unknown_column(name, schema.names)
        kind = schema.field(name).type
        if not pt.is_timestamp(kind) or kind.unit != "us":
            raise BuildError(
                f"event time {name!r} is {kind}, a join needs timestamp[us]", hint="Cast it before the join."
            )
    if (left.field(left_time).type.tz is None) != (right.field(right_time).type.tz is None):
        raise BuildError(
            f"event times {left_time!r} and {right_time!r}: one has a time zone, the other has none",
            hint=ZONES_DIFFER_HINT,
        )


def joined_fields(
    left: pa.Schema, right: pa.Schema, dropped: Sequence[str], suffix: str, *, nullable: bool
) -> list[pa.Field]:
    """Fields of the right side as they come out beside those of the left: without ``dropped``, renamed on collision.

    Args:
        left: schema of the left side, which keeps its names.
        right: schema of the right side.
        dropped: right columns that do not come out.
        suffix: appended to a right name that the left side has too.
        nullable: right values may be missing (a left join).

    Raises:
        BuildError: a name still collides with the suffix.
    """
    taken = set(left.names)
    fields: list[pa.Field] = []
    for field in right:
        if field.name in dropped:
            continue
        name = field.name + suffix if field.name in left.names else field.name
        if name in taken:
            raise BuildError(
                f"two columns of the join would be named {name!r}", hint="Choose another suffix, or rename one of them."
            )
        taken.add(name)
        fields.append(field.with_name(name).with_nullable(nullable or field.nullable))
    return fields
