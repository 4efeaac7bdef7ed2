"""Times written as text, by one rule for CSV and JSON lines.

A text with a zone is an instant: a column that has any is ``timestamp[us, UTC]``.  One without is a time of the wall
clock, ``timestamp[us]``; in a column of instants it counts as UTC.  In a column of the wall clock a zone is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute

pc: Any = pyarrow.compute
"""Its functions are made at import: the type checker does not know them."""

_ZONE = r"\d:\d\d\S*(?:[zZ]|[+-]\d\d(?::?\d\d)?)$|T\d\d(?:Z|[+-]\d\d(?::?\d\d)?)$"
"""A time of day that ends with a zone (the end of a plain date looks like an offset, too)."""
_TIME = r"^\d{4}-\d\d-\d\d(?:[T ]|$)"
_DATE = r"^\d{4}-\d\d-\d\d$"
_FINER = r"\.\d{7,}"
_ISO_HINT = "write 2026-01-31T12:00:00.5Z, or give timestamp_formats"


def time_type(texts: pa.ChunkedArray, formats: Sequence[str]) -> pa.DataType | None:
    """The type of a column of texts that are times or dates, all of them; ``None`` if they are not.

    >>> time_type(pa.chunked_array([["2026-01-01T00:00:00.5+01:00", None, "2026-01-01 00:00:00"]]), ())
    TimestampType(timestamp[us, tz=UTC])
    >>> time_type(pa.chunked_array([["2026-01-01"]]), ())
    DataType(date32[day])
    """
    seen = texts.drop_null().combine_chunks()
    if not len(seen):
        return None
    if formats:
        kind = pa.timestamp("us", "UTC" if any("%z" in pattern for pattern in formats) else None)
    elif not _every(seen, _TIME):
        return None
    elif _every(seen, _DATE):
        kind = pa.date32()
    else:
        zoned = pc.any(pc.match_substring_regex(seen, _ZONE)).as_py()
        kind = pa.timestamp("us", "UTC" if zoned else None)
    try:
        _ = parse_dates(seen) if kind == pa.date32() else parse_times(seen, kind, formats)
    except (pa.ArrowInvalid, ValueError):
        return None
    return kind


def parse_times(texts: pa.Array, kind: pa.DataType, formats: Sequence[str]) -> pa.Array:
    """Texts as timestamps: ISO 8601, or the first ``strptime`` format that fits.

    A text without zone in a column with zone is local time there.

    Raises:
        ValueError: a text is no such time, or has a zone where the column has none.

    >>> texts = pa.array(["1969-12-31 23:00:00", "1970-01-01T00:00+01:00"])
    >>> parse_times(texts, pa.timestamp("us", "UTC"), ()).cast("int64").to_pylist()
    [-3600000000, -3600000000]
    """
    if formats:
        return _by_format(texts, kind, formats)
    try:
        return _iso(texts, kind)
    except pa.ArrowInvalid as e:
        raise ValueError(_why(texts, kind)) from e


def parse_dates(texts: pa.Array) -> pa.Array:
    """Texts as dates, ``2026-01-31``.

    Raises:
        ValueError: a text is no such date.

    >>> parse_dates(pa.array(["1970-01-02", None])).cast("int32").to_pylist()
    [1, None]
    """
    try:
        return texts.cast(pa.date32())
    except pa.ArrowInvalid:
        wrong = next(t for t in texts.to_pylist() if t is not None and not _is_date(t))
        raise ValueError(f"{wrong!r} is no date: write 2026-01-31") from None


def _iso(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    if kind.tz is None:
        return texts.cast(kind)
    zoned = pc.match_substring_regex(texts, _ZONE)
    if zoned.null_count == 0 and zoned.true_count == len(zoned):
        return texts.cast(kind)
    missing = pa.scalar(None, texts.type)
    with_zone = pc.if_else(zoned, texts, missing).cast(kind)
    local = pc.if_else(zoned, missing, texts).cast(pa.timestamp(kind.unit))
    return pc.coalesce(with_zone, pc.assume_timezone(local, kind.tz).cast(kind))


def _why(texts: pa.Array, kind: pa.DataType) -> str:
    """What is wrong with the first text that is no time of this kind."""
    for text in texts.to_pylist():
        one = pa.array([text], texts.type)
        try:
            _iso(one, kind)
        except pa.ArrowInvalid:
            if kind.tz is None and _every(one, _ZONE):
                return f"{text!r} has a zone, and {kind} (timestamp_ntz) has none: give the column type timestamp"
            if _matches(one, _FINER):
                return f"{text!r} is finer than {kind}: read it as string"
            return f"{text!r} is no ISO 8601 time: {_ISO_HINT}"
    return f"not {kind}"


def _by_format(texts: pa.Array, kind: pa.DataType, formats: Sequence[str]) -> pa.Array:
    result = pa.nulls(len(texts), kind)
    for pattern in formats:
        times = pc.strptime(texts, format=pattern, unit=kind.unit, error_is_null=True)
        if kind.tz is not None and times.type.tz is None:
            times = pc.assume_timezone(times, kind.tz)
        result = pc.coalesce(result, times.cast(kind))
    if result.null_count > texts.null_count:
        bad = texts.filter(pc.and_(pc.is_null(result), pc.is_valid(texts)))
        raise ValueError(f"{bad[0].as_py()!r} is no time of the form {' or '.join(map(repr, formats))}")
    return result


def _is_date(text: str) -> bool:
    try:
        pa.array([text]).cast(pa.date32())
    except pa.ArrowInvalid:
        return False
    return True


def _every(texts: pa.Array, pattern: str) -> bool:
    return bool(pc.all(pc.match_substring_regex(texts, pattern)).as_py())


def _matches(texts: pa.Array, pattern: str) -> bool:
    return bool(pc.any(pc.match_substring_regex(texts, pattern)).as_py())
