"""Statistics of a file for Delta's log, from the footer that its writer left.

Readers pass over files by them.  So a bound that is not sure is left out: of floating-point numbers, since NaN is in no
footer; of texts that are long, since those are cut.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

_COLUMNS = 32
"""So many columns have statistics, as with other writers (``delta.dataSkippingNumIndexedCols``)."""
_TEXT_LENGTH = 32
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def statistics_of(footer: pq.FileMetaData, schema: pa.Schema) -> str:
    """``numRecords``, and smallest, largest value and nulls of columns, as JSON.

    Args:
        footer: of the file.
        schema: of its columns.
    """
    places = {footer.schema.column(c).path: c for c in range(footer.num_columns)}
    groups = [footer.row_group(g) for g in range(footer.num_row_groups)]
    lowest: dict[str, object] = {}
    highest: dict[str, object] = {}
    nulls: dict[str, int] = {}
    for field in list(schema)[:_COLUMNS]:
        if field.name not in places or pt.is_nested(field.type):
            continue
        chunks = [group.column(places[field.name]).statistics for group in groups]
        if any(chunk is None or not chunk.has_null_count for chunk in chunks):
            continue
        nulls[field.name] = sum(chunk.null_count for chunk in chunks)
        text = _text_of(field.type)
        filled = [chunk for chunk in chunks if chunk.num_values]
        if text is None or not filled or not all(chunk.has_min_max for chunk in filled):
            continue
        low, high = text(min(map(_low, filled))), text(max(map(_high, filled)))
        if low is not None and high is not None:
            lowest[field.name], highest[field.name] = low, high
    found = {"numRecords": footer.num_rows, "minValues": lowest, "maxValues": highest, "nullCount": nulls}
    return json.dumps(found, separators=(",", ":"))


def _low(chunk: Any) -> Any:
    return chunk.min_raw if chunk.physical_type in ("INT32", "INT64") else chunk.min


def _high(chunk: Any) -> Any:
    return chunk.max_raw if chunk.physical_type in ("INT32", "INT64") else chunk.max


def _text_of(kind: pa.DataType) -> Callable[[Any], object | None] | None:
    """What makes JSON of a bound; ``None`` for types whose bounds are left out."""
    if pt.is_integer(kind):
        return lambda value: value
    if pt.is_string(kind):
        return lambda value: value if len(value) <= _TEXT_LENGTH else None
    if pt.is_date(kind):
        return lambda value: _moment(value * 86_400_000_000, "%Y-%m-%d")
    if pt.is_timestamp(kind):
        return lambda value: _moment(value, "%Y-%m-%dT%H:%M:%S.%f" + ("" if kind.tz is None else "Z"))
    return None


def _moment(us: int, form: str) -> str | None:
    """A time as text; none of years that have no four digits.

    >>> _moment(1, "%Y-%m-%dT%H:%M:%S.%f")
    '1970-01-01T00:00:00.000001'
    """
    try:
        moment = _EPOCH + timedelta(microseconds=us)
    except OverflowError:
        return None
    return moment.strftime(form) if moment.year >= 1000 else None
