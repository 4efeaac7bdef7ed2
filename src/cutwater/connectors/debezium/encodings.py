"""How Debezium encodes the values of columns, and the columns that they become."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from cutwater.connectors.debezium import envelope_kernels as kernels
from cutwater.data.words import bytes_view, valid_rows

_CONNECT, _TIME, _DATA = "org.apache.kafka.connect.data.", "io.debezium.time.", "io.debezium.data."
DECIMAL, VARIABLE_DECIMAL = _CONNECT + "Decimal", _DATA + "VariableScaleDecimal"
ZONED = _TIME + "ZonedTimestamp"
_NS, _US, _MS, _DAY = 1, 1_000, 1_000_000, 86_400_000_000_000
_COUNTED: dict[str, tuple[str, int]] = {
    _TIME + "Date": ("date", _DAY),
    _CONNECT + "Date": ("date", _DAY),
    _TIME + "Timestamp": ("timestamp", _MS),
    _TIME + "MicroTimestamp": ("timestamp", _US),
    _TIME + "NanoTimestamp": ("timestamp", _NS),
    _CONNECT + "Timestamp": ("timestamp", _MS),
    _TIME + "Time": ("time", _MS),
    _TIME + "MicroTime": ("time", _US),
    _TIME + "NanoTime": ("time", _NS),
    _CONNECT + "Time": ("time", _MS),
    _TIME + "MicroDuration": ("duration", _US),
}
"""Numbers since the epoch, or midnight: of what, and the nanoseconds of one."""
NAMES = (*_COUNTED, DECIMAL, VARIABLE_DECIMAL, ZONED)
_UNITS = {"s": 1_000_000_000, "ms": _MS, "us": _US, "ns": _NS}
_MOST_DIGITS = 38
UNAVAILABLE = "__debezium_unavailable_value"
"""What Debezium writes for a large value that the database did not send, since it did not change."""


@dataclass(frozen=True)
class Encoding:
    """How the values of a column are written."""

    type: str = ""
    """Of Kafka Connect: ``"int64"``, ``"string"``, ``"bytes"``; empty: nobody says."""
    name: str = ""
    """What the values mean: one of ``NAMES``, or another one, which says nothing to us."""
    scale: int | None = None
    """Of a decimal."""


class Misfit(Exception):
    """A column cannot be what it is declared to be."""


class Converted(NamedTuple):
    """A column, and which of its values are wrong."""

    column: pa.Array
    bad: npt.NDArray[np.bool_] | None = None


@dataclass(frozen=True)
class Conversion:
    """From how values come to a column of the declared type."""

    wire: pa.DataType
    """As the format's own parser makes them."""
    convert: Callable[[pa.Array], Converted]


def full_name(name: str) -> str | None:
    """One of ``NAMES`` by its last word, or whole; ``None``: there is none.

    >>> full_name("MicroTimestamp")
    'io.debezium.time.MicroTimestamp'
    """
    return next((one for one in NAMES if name in (one, one.rpartition(".")[2])), None)


def declared_type(encoding: Encoding, plain: pa.DataType, precision: int) -> pa.DataType | None:
    """The type of a column for which none is declared; ``None``: it must be.

    Args:
        plain: of the values as they come.
        precision: of a decimal.
    """
    if encoding.name == ZONED:
        return pa.timestamp("us", "UTC")
    if encoding.name == DECIMAL:
        return pa.decimal128(min(precision, _MOST_DIGITS), encoding.scale or 0)
    if encoding.name == VARIABLE_DECIMAL:
        return None
    if encoding.name not in _COUNTED:
        return plain
    what, unit = _COUNTED[encoding.name]
    if what == "timestamp":
        return pa.timestamp("ns" if unit == _NS else "us")
    if what == "time":
        return pa.time32("ms") if unit == _MS else pa.time64("us" if unit == _US else "ns")
    return pa.date32() if what == "date" else pa.duration("us")


def conversion(wanted: pa.DataType, encoding: Encoding, plain: pa.DataType | None) -> Conversion:
    """How a column is made.

    Args:
        wanted: its type.
        encoding: of the values.
        plain: as they come; ``None``: as JSON, whose parser is told.

    Raises:
        Misfit: it cannot be made.
    """
    if encoding.name in _COUNTED:
        return _counted(wanted, encoding.name, plain)
    if encoding.name == VARIABLE_DECIMAL:
        return _variable(wanted, plain)
    if encoding.name == DECIMAL and encoding.type not in ("string", "float64"):
        if not pt.is_decimal128(wanted):
            raise Misfit(f"{encoding.name} is no {wanted}")
        return _of_bytes(plain, lambda array: _decimal(array, encoding.scale, wanted))
    if encoding.type == "bytes":
        if not (pt.is_binary(wanted) or plain is not None):
            raise Misfit(f"bytes are no {wanted}")
        return _of_bytes(plain, lambda array: _cast(array, wanted))
    if not encoding.type and plain is None:
        return _undeclared(wanted)
    if plain is None:
        texts = encoding.type == "string" and not pt.is_timestamp(wanted)
        plain = pa.string() if texts and not pt.is_nested(wanted) else wanted
    return Conversion(plain, lambda array: _cast(array, wanted))


def _undeclared(wanted: pa.DataType) -> Conversion:
    """JSON that comes without a schema: what most often is meant, where it can only be one thing."""
    if pt.is_binary(wanted):
        return _of_bytes(None, Converted)
    if pt.is_decimal128(wanted):
        return _of_bytes(None, lambda array: _decimal(array, None, wanted))
    if pt.is_date(wanted):
        return _counted(wanted, _TIME + "Date", None)
    if pt.is_time(wanted) or pt.is_duration(wanted) or (pt.is_timestamp(wanted) and wanted.tz is None):
        raise Misfit(
            f"messages without schema do not say how a {wanted} is written. Say it: "
            "cw.debezium(..., encodings={'column': 'MicroTimestamp'})"
        )
    return Conversion(wanted, Converted)


# ---------------------------------------------------------------------------------------------------------- numbers


def _counted(wanted: pa.DataType, name: str, plain: pa.DataType | None) -> Conversion:
    what, unit = _COUNTED[name]
    wire = pa.int64() if plain is None else plain
    if pt.is_integer(wanted) or wire == wanted:
        return Conversion(wanted if plain is None else wire, lambda array: _cast(array, wanted))
    fits = {"date": pt.is_date32, "timestamp": pt.is_timestamp, "time": pt.is_time, "duration": pt.is_duration}
    if not fits[what](wanted):
        raise Misfit(f"{name} is no {wanted}")
    if not pt.is_integer(wire):  # Avro's own types
        return Conversion(wire, lambda array: _cast(array, wanted))
    ours = _DAY if what == "date" else _UNITS[wanted.unit]
    return Conversion(wire, lambda array: _in_units(array, unit, ours, wanted))


def _in_units(array: pa.Array, unit: int, ours: int, wanted: pa.DataType) -> Converted:
    """Numbers of one unit in another one, cut to whole ones."""
    valid = valid_rows(array)
    values = np.asarray(array.cast(pa.int64()).fill_null(0))
    width = 2 ** (wanted.bit_width - 1)
    times = max(1, unit // ours)
    if times == 1:
        values = values // (ours // unit)
    bad = (values > (width - 1) // times) | (values < -(width // times))
    values = np.where(bad, 0, values) * times
    if pt.is_time(wanted):
        bad |= (values < 0) | (values >= _DAY // ours)
    values = np.where(bad, 0, values).astype(np.int32 if wanted.bit_width == 32 else np.int64)
    if valid is not None:
        bad &= valid
    mask = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
    made = pa.Array.from_buffers(wanted, len(values), [mask, pa.py_buffer(values)], array.null_count)
    return Converted(made, bad if bad.any() else None)


def _cast(array: pa.Array, wanted: pa.DataType) -> Converted:
    """A column of another type; what has no counterpart is wrong."""
    if array.type == wanted:
        return Converted(array)
    try:
        return Converted(array.cast(wanted))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        made, bad = [], np.zeros(len(array), np.bool_)
        for row in range(len(array)):
            try:
                made.append(array[row].cast(wanted))
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
                made.append(pa.scalar(None, wanted))
                bad[row] = True
        return Converted(pa.array([one.as_py() for one in made], wanted), bad)


# ------------------------------------------------------------------------------------------------------------ bytes


def _of_bytes(plain: pa.DataType | None, convert: Callable[[pa.Array], Converted]) -> Conversion:
    """Bytes as they are, or in JSON as Base64."""
    if plain is not None:
        return Conversion(plain, convert)

    def decoded(array: pa.Array) -> Converted:
        content, bad = from_base64(array)
        made = convert(content)
        return made if bad is None else Converted(made.column, bad if made.bad is None else bad | made.bad)

    return Conversion(pa.string(), decoded)


def from_base64(texts: pa.Array) -> Converted:
    """Bytes of texts in Base64.

    >>> from_base64(pa.array(["AQI=", None, "?"])).column.to_pylist()
    [b'\\x01\\x02', None, b'']
    """
    data, ends = bytes_view(texts)
    out: Any = np.empty(len(data) + 1, np.uint8)
    out_ends, bad = np.zeros(len(texts) + 1, np.int32), np.zeros(len(texts), np.bool_)
    _base64_bytes(data.ctypes.data, ends, out.ctypes.data, out_ends, bad)
    valid = valid_rows(texts)
    if valid is not None:
        bad &= valid
    mask = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
    buffers = [mask, pa.py_buffer(out_ends), pa.py_buffer(out)]
    made = pa.Array.from_buffers(pa.binary(), len(texts), buffers, texts.null_count)
    return Converted(made, bad if bad.any() else None)


_base64_bytes: Any = kernels.base64_bytes
_decimals: Any = kernels.decimals


def _decimal(array: pa.Array, scale: int | None, wanted: pa.DataType) -> Converted:
    """Big-endian numbers of hundredths or what the scale says (``None``: that of the declared type)."""
    own = wanted.scale if scale is None else scale
    words, bad = _words(array, wanted.precision if own == wanted.scale else _MOST_DIGITS)
    mask = _mask(array)
    kind = wanted if own == wanted.scale else pa.decimal128(_MOST_DIGITS, own)
    made = pa.Array.from_buffers(kind, len(array), [mask, pa.py_buffer(words)], array.null_count)
    cast = _cast(made, wanted)
    wrong = bad if cast.bad is None else bad | cast.bad
    return Converted(cast.column, wrong if wrong.any() else None)


def _words(array: pa.Array, digits: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.bool_]]:
    data, ends = bytes_view(array)
    most = 10**digits - 1
    out: Any = np.zeros(16 * len(array), np.uint8)
    bad = np.zeros(len(array), np.bool_)
    high, low = np.uint64(most >> 64), np.uint64(most & (2**64 - 1))
    _decimals(data.ctypes.data, ends, high, low, out.ctypes.data, bad)
    valid = valid_rows(array)
    return out, bad if valid is None else bad & valid


def _mask(array: pa.Array) -> pa.Buffer | None:
    valid = valid_rows(array)
    return None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))


def _variable(wanted: pa.DataType, plain: pa.DataType | None) -> Conversion:
    """Decimals that each have a scale of their own."""
    if not pt.is_decimal128(wanted):
        raise Misfit(f"{VARIABLE_DECIMAL} is no {wanted}")
    wire = pa.struct([("scale", pa.int32()), ("value", pa.string())]) if plain is None else plain

    def convert(array: Any) -> Converted:
        scales, values = (array.flatten()[array.type.get_field_index(name)] for name in ("scale", "value"))
        content, bad = Converted(values) if plain is not None else from_base64(values)
        words, wrong = _words(content, _MOST_DIGITS)
        wrong = wrong if bad is None else wrong | bad
        mask = _mask(values)
        found = np.asarray(scales.fill_null(0))
        made = pa.nulls(len(array), wanted)
        for scale in np.unique(found).tolist():
            here = found == scale
            if not -_MOST_DIGITS <= scale <= _MOST_DIGITS:
                wrong |= here
                continue
            kind = pa.decimal128(_MOST_DIGITS, scale)
            whole = pa.Array.from_buffers(kind, len(array), [mask, pa.py_buffer(words)], values.null_count)
            some = _cast(whole.filter(pa.array(here)), wanted)
            if some.bad is not None:
                wrong[np.flatnonzero(here)[some.bad]] = True
            made = pc.call_function("replace_with_mask", [made, pa.array(here), some.column])
        return Converted(made, wrong if wrong.any() else None)

    return Conversion(wire, convert)
