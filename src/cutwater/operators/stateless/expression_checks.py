"""Is an expression local to a row?  Found out when the dataflow is built, on probe rows.

A stream is cut into batches wherever it suits the runtime, so an expression whose value depends on the other rows of
its batch (a mean, a shift, a rank) would give results that nobody can reproduce.  Two nets catch them: what Polars
says of each part of the expression, and a trial on probe rows, taken together and one by one.
"""

from __future__ import annotations

import datetime as dt
import math
import re
import warnings
from collections.abc import Iterable, Sequence
from decimal import Decimal
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.types as pt

from cutwater.errors import BuildError, did_you_mean

if TYPE_CHECKING:
    import polars as pl

PROBE_ROWS = 23
"""A prime, so that columns whose values repeat with other periods do not fall into step."""

_LAST_BITS = 1e-9
_STRPTIME = re.compile(r"\.str\.strptime\(\[[^\]]*\]\)$")
"""A text read as a time; Polars does not print the format, but judges those with a format row-separable."""

_HINT_AGGREGATE = "For results over several rows use key_by(...).aggregate(...) or a window."
_TEXTS = (
    *("b", "a", None, "12", "", "a", "2024-02-29", "Hello World", "-3.5", "2024-02-29T13:45:00", "a,b", "true"),
    *("2024-02-29 13:45:00", '{"a": 1, "b": [2]}', "13:45:00", "Zoë", "https://example.org/x?q=1", "2023-12-31"),
)
_DAYS = (0, 19_782, None, -1, 19_783, 19_782, -25_000, 11_016, 365)


def unknown_column(name: str, known: Iterable[str]) -> BuildError:
    """The error for a column that is not there, with the nearest name that is.

    >>> str(unknown_column("dealy", ["origin", "delay"]))
    "no such column 'dealy'. Did you mean 'delay'? There are: origin, delay."
    """
    return BuildError(f"no such column {name!r}", hint=did_you_mean(name, known))


def probe_rows(schema: pa.Schema) -> pl.DataFrame:
    """Rows of a schema with values of many kinds: nulls, NaN, negatives, repeats, extremes, texts that parse.

    >>> probe_rows(pa.schema({"n": pa.int8()})).height
    23
    """
    import polars as pl

    columns = {field.name: _column(field.type, 5 * number) for number, field in enumerate(schema)}
    return pl.DataFrame(pa.table(columns, schema=pa.schema([pa.field(f.name, f.type) for f in schema])))


def _column(type: pa.DataType, start: int) -> pa.Array:
    values = list(islice(cycle(_values(type)), start, start + PROBE_ROWS))
    return pa.array(values, type)


def _values(type: pa.DataType) -> Sequence[Any]:
    """Some values of a type, unsorted, with a null and a repeat."""
    if pt.is_boolean(type):
        return (True, False, None, True, False, False, True)
    if pt.is_unsigned_integer(type):
        return (3, 0, None, 7, 7, 1, 2 ** (type.bit_width - 1), 100, 2, 12, 40)
    if pt.is_signed_integer(type):
        return (3, 0, None, -1, 7, 7, 2 ** (type.bit_width - 2), -100, 2, 1, -(2 ** (type.bit_width - 2)), 12)
    if pt.is_floating(type):
        return (3.5, 0.0, None, -1.25, 7.0, 7.0, float("nan"), -100.5, 2.0, 1.0, 30_000.0, float("inf"), 0.5)
    if pt.is_decimal(type):
        return [None if n is None else Decimal(n).scaleb(-type.scale) for n in (3, 0, None, -1, 7, 7, -9, 2)]
    if pt.is_date(type):
        return [None if n is None else dt.date(1970, 1, 1) + dt.timedelta(days=n) for n in _DAYS]
    if pt.is_timestamp(type) or pt.is_duration(type) or pt.is_time(type):
        return _times(type)
    return _nested_or_bytes(type)


def _times(type: pa.DataType) -> Sequence[Any]:
    per_second = {"s": 1, "ms": 1000, "us": 10**6, "ns": 10**9}[type.unit]
    if pt.is_time(type):
        seconds = (3600, 0, None, 86_399, 43_200, 43_200, 60, 7)
    else:
        seconds = [None if n is None else n * 86_400 + n % 7919 for n in _DAYS]
    storage = pa.int32() if pt.is_time32(type) else pa.int64()
    return pa.array([None if n is None else n * per_second for n in seconds], storage).cast(type).to_pylist()


def _nested_or_bytes(type: pa.DataType) -> Sequence[Any]:
    if pt.is_fixed_size_binary(type):
        return [None if n is None else bytes([n]) * type.byte_width for n in (3, 0, None, 7, 7, 255, 2)]
    if pt.is_binary(type) or pt.is_large_binary(type) or pt.is_binary_view(type):
        return [None if text is None else text.encode() for text in _TEXTS]
    if pt.is_string(type) or pt.is_large_string(type) or pt.is_string_view(type):
        return _TEXTS
    if pt.is_fixed_size_list(type):
        inner = _values(type.value_type)
        return [None if n is None else list(islice(cycle(inner), n, n + type.list_size)) for n in (0, 1, None, 3, 3, 5)]
    if pt.is_map(type):
        keys, items = [k for k in _values(type.key_type) if k is not None], cycle(_values(type.item_type))
        return [list(zip(keys[:n], islice(items, n), strict=True)) for n in (1, 0, 2)] + [None]
    if pt.is_list(type) or pt.is_large_list(type) or pt.is_list_view(type) or pt.is_large_list_view(type):
        inner = _values(type.value_type)
        return [None if n is None else list(inner[:n]) for n in (2, 0, None, 1, 4, 4, 5)]
    if pt.is_struct(type):
        fields = [(type.field(i).name, cycle(_values(type.field(i).type))) for i in range(type.num_fields)]
        return [{name: next(values) for name, values in fields} for _ in range(11)] + [None]
    return (None,)


def check_row_local(expr: pl.Expr, frame: pl.DataFrame) -> None:
    """Refuse an expression whose value for a row depends on other rows, or that is not one value per row.

    Probe rows on which the expression fails even alone (a strict cast of a text) are left out.

    Raises:
        BuildError: it looks across rows, changes the number of rows, or is not deterministic.
    """
    import polars as pl

    _check_parts(expr, str(expr))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone: list[pl.DataFrame] = []
        kept: list[int] = []
        for row in range(frame.height):
            try:
                alone.append(frame.slice(row, 1).select(expr))
                kept.append(row)
            except pl.exceptions.ShapeError as exc:
                raise _length_changing(expr, reason(exc)) from exc
            except (Exception, pl.exceptions.PanicException):
                continue  # rows that fail alone tell nothing about their neighbours
        if not kept:
            return
        rows = frame[kept]
        try:
            together = rows.select(expr)
        except (Exception, pl.exceptions.PanicException) as exc:
            raise _across_rows(expr, f"they fail together ({reason(exc)})") from exc
    _compare(expr, together, alone, rows)


def _check_parts(expr: pl.Expr, whole: str) -> None:
    """Walk the expression with what Polars knows of each part; parts it cannot judge are left to the trial."""
    separable = getattr(expr.meta, "is_row_separable", None)
    judged: bool | None = None
    try:
        judged = None if separable is None else bool(separable())
        parts = expr.meta.pop()
    except Exception:
        try:  # list.eval and Python functions need a schema to be judged, their inputs do not
            parts = [part for part in expr.meta.pop() if part.meta.root_names()]
        except Exception:
            return
    if judged is False and not expr.meta.is_literal():
        if _STRPTIME.search(str(expr.meta.undo_aliases())):
            raise BuildError(
                f"expression {whole} guesses the format of its times from the rows of a batch, "
                "which could differ from batch to batch",
                hint="Say the format: pl.col('at').str.to_datetime('%Y-%m-%d %H:%M:%S'), with '%.f' for fractions and "
                "'%z' for a zone. A source reads times by itself: cw.files(..., schema='at timestamp').",
            )
        what = "" if str(expr) == whole else f": its part {expr} does"
        raise BuildError(f"expression {whole} looks across the rows of a batch{what}", hint=_HINT_AGGREGATE)
    for part in parts:
        _check_parts(part, whole)


def _compare(expr: pl.Expr, together: pl.DataFrame, alone: list[pl.DataFrame], rows: pl.DataFrame) -> None:
    import polars as pl

    odd = next((one.height for one in alone if one.height != 1), None)
    if odd is not None:
        raise _length_changing(expr, f"one row became {odd}")
    if together.height not in (1, rows.height):
        raise _length_changing(expr, f"{rows.height} rows became {together.height}")
    if together.height == 1:
        together = pl.concat([together] * rows.height)
    for row, one in enumerate(alone):
        if not _same(one, together.slice(row, 1)):
            values = rows.row(row, named=True)
            shown = {name: values[name] for name in expr.meta.root_names() if name in values} or values
            raise _across_rows(expr, f"row {shown} gives {together.row(row)} among others, {one.row(0)} alone")


def _same(one: pl.DataFrame, other: pl.DataFrame) -> bool:
    """Equal, but for the last bits of a float: over many rows Polars divides by multiplying with the inverse."""
    if one.equals(other, null_equal=True):
        return True
    a, b = one.to_series(), other.to_series()
    if not (a.dtype.is_float() and a.dtype == b.dtype):
        return False
    return None not in (a[0], b[0]) and math.isclose(a[0], b[0], rel_tol=_LAST_BITS)


def _across_rows(expr: pl.Expr, why: str) -> BuildError:
    return BuildError(
        f"expression {expr} looks across the rows of a batch, or is not deterministic: on probe rows, {why}",
        hint=_HINT_AGGREGATE,
    )


def _length_changing(expr: pl.Expr, why: str) -> BuildError:
    return BuildError(
        f"expression {expr} does not give one value per row: {why}",
        hint="Use filter(...) to drop rows, flat_map(...) to make several of one.",
    )


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
