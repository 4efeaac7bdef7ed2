"""A check that the columns of one file fit the schema of the source."""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa
import pyarrow.types as pt


class SchemaOrigin(NamedTuple):
    """Origin of the source's schema."""

    name: str
    """The first file, or the words "the given schema"."""
    given: bool
    """Given by the user: columns of a file that it does not name are not read."""


def column_differences(found: pa.Schema, wanted: pa.Schema, origin: SchemaOrigin) -> list[str]:
    """The reason why a file cannot be read with the source's schema; empty if it can.

    Columns may stand in any order.  A type may be narrower than the source's (``int32`` for ``int64``, ``float32``
    for ``float64``), never wider.
    """
    differences = [f"column {name!r} is missing" for name in wanted.names if name not in found.names]
    repeated = sorted({name for name in found.names if found.names.count(name) > 1})
    differences += [f"column {name!r} is there more than once" for name in repeated]
    if not origin.given:
        differences += [f"column {name!r} is new" for name in found.names if name not in wanted.names]
    for field in wanted:
        index = found.get_field_index(field.name)
        if index >= 0 and not widens(found.field(index).type, field.type, given=origin.given):
            differences.append(f"column {field.name!r} is {found.field(index).type} instead of {field.type}")
    return differences


def widens(found: pa.DataType, wanted: pa.DataType, *, given: bool) -> bool:
    """True if every value of ``found`` has its place in ``wanted`` (timestamps: if it is as fine as the wanted unit).

    With a schema given by the user, times without zone count as UTC where it says so: Spark's old INT96 timestamps
    are such.

    >>> widens(pa.int32(), pa.int64(), given=False), widens(pa.int64(), pa.int32(), given=False)
    (True, False)
    """
    if found.equals(wanted) or pt.is_null(found):
        return True
    if pt.is_integer(found) and pt.is_integer(wanted):
        signed, to_signed = pt.is_signed_integer(found), pt.is_signed_integer(wanted)
        return (signed == to_signed or to_signed) and found.bit_width < wanted.bit_width
    if pt.is_floating(found) and pt.is_floating(wanted):
        return found.bit_width < wanted.bit_width
    if pt.is_decimal(found) and pt.is_decimal(wanted):
        whole = wanted.precision - wanted.scale >= found.precision - found.scale
        return whole and wanted.scale >= found.scale
    if pt.is_timestamp(found) and pt.is_timestamp(wanted):
        return (found.tz is None) == (wanted.tz is None) or (given and found.tz is None and wanted.tz == "UTC")
    return _nested_widens(found, wanted, given)


def _nested_widens(found: pa.DataType, wanted: pa.DataType, given: bool) -> bool:
    if pt.is_list(found) and pt.is_list(wanted):
        return widens(found.value_type, wanted.value_type, given=given)
    if pt.is_map(found) and pt.is_map(wanted):
        keys = widens(found.key_type, wanted.key_type, given=given)
        return keys and widens(found.item_type, wanted.item_type, given=given)
    if pt.is_struct(found) and pt.is_struct(wanted):
        fields = [(found.field(i), wanted.field(i)) for i in range(min(found.num_fields, wanted.num_fields))]
        same = found.num_fields == wanted.num_fields
        return same and all(a.name == b.name and widens(a.type, b.type, given=given) for a, b in fields)
    return False
