"""Change events in JSON, with or without the schema that Kafka Connect's converter puts around each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.connectors.debezium import envelope_kernels as k
from cutwater.connectors.debezium.encodings import DECIMAL, Conversion, Encoding, Misfit, conversion
from cutwater.connectors.debezium.events import NO_OPERATION, NOWHERE, Events, Images, Numbers, Table
from cutwater.connectors.files.text_formats import JsonFormat
from cutwater.connectors.messages.base import Values
from cutwater.connectors.messages.lines import LineDecoder
from cutwater.data.words import read_only
from cutwater.errors import DataError

_scan: Any = k.scan
_gather: Any = k.gather
_MOST_SCHEMAS = 256
"""Schemas that are remembered."""
_JSON = JsonFormat(ignore_unknown=True)


@dataclass(frozen=True)
class _Lines:
    """How JSON objects become columns."""

    decoder: LineDecoder
    conversions: tuple[Conversion, ...]
    names: tuple[str, ...]


@dataclass(frozen=True)
class _Plan:
    """How events of one schema are read."""

    before: _Lines
    after: _Lines


class JsonEvents:
    """Reads events in JSON.

    Args:
        table: what is read of them.
        encodings: of columns, where the messages have no schema that says so.
    """

    gap = 1

    def __init__(self, table: Table, encodings: Mapping[str, str]) -> None:
        self._table, self._encodings = table, encodings
        self._plans: dict[bytes, _Plan | str] = {}
        """By the schema in front of messages; none, too."""
        self._source = _lines(table.source, {name: _SOURCE[name] for name in table.source.names})

    def read(self, values: Values) -> Events:
        """See ``EventReader``."""
        count = len(values)
        kinds, ops = np.empty(count, np.uint8), np.empty(count, np.uint8)
        places, runs = np.empty((count, 2 * k.PARTS), np.int64), np.empty(count, np.int64)
        starts, ends = read_only(values.starts), read_only(values.ends[1:])
        _scan(values.data.address, starts, ends, values.valid, kinds, ops, places, runs)
        bad = dict.fromkeys(np.flatnonzero(kinds == k.NO_OBJECT).tolist(), "it is no JSON object")
        none = (kinds == k.GOOD) & (ops == 0)
        bad |= dict.fromkeys(np.flatnonzero(none).tolist(), NO_OPERATION)
        bad |= dict.fromkeys(np.flatnonzero(none & (places[:, 2 * k.DDL] >= 0)).tolist(), _OF_SCHEMA)
        numbers = np.flatnonzero((kinds == k.GOOD) & ~none)
        plans = self._chosen(values, places, runs, numbers)
        parts = [
            self._of_plan(values, places, numbers[np.isin(runs[numbers], list(these))], plan, bad)
            for plan, these in plans
        ]
        numbers, before, after = _joined(parts, self._table)
        source = _images(values, places, numbers, k.SOURCE, self._source, bad)
        return Events(numbers, ops[numbers], before, after, source, bad)

    def _chosen(
        self, values: Values, places: npt.NDArray[np.int64], runs: npt.NDArray[np.int64], numbers: Numbers
    ) -> list[tuple[_Plan | str, set[int]]]:
        """The plans of the runs of messages with the same schema."""
        found: dict[bytes, set[int]] = {}
        of, firsts = np.unique(runs[numbers], return_index=True)
        for run, first in zip(of.tolist(), numbers[firsts].tolist(), strict=True):
            begin, end = (int(one) for one in places[first, 2 * k.SCHEMA : 2 * k.SCHEMA + 2])
            schema = values.data[begin:end].to_pybytes() if begin >= 0 else b""
            found.setdefault(schema, set()).add(run)
        for schema in found:
            if schema not in self._plans:
                if len(self._plans) >= _MOST_SCHEMAS:
                    self._plans.clear()
                self._plans[schema] = self._plan(schema)
        return [(self._plans[schema], these) for schema, these in found.items()]

    def _plan(self, schema: bytes) -> _Plan | str:
        try:
            encodings = self._without_schema() if not schema else encodings_of(json.loads(schema))
            return _Plan(_lines(self._table.before, encodings), _lines(self._table.columns, encodings))
        except Misfit as error:
            if not schema:
                raise DataError(f"messages of Debezium: {error}") from None
            return str(error)
        except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
            return "the schema in front of it is none of Kafka Connect's"

    def _without_schema(self) -> dict[str, Encoding]:
        return {name: Encoding(name=full) for name, full in self._encodings.items()}

    def _of_plan(
        self, values: Values, places: npt.NDArray[np.int64], numbers: Numbers, plan: _Plan | str, bad: dict[int, str]
    ) -> tuple[Numbers, Images, Images]:
        if isinstance(plan, str):
            bad.update(dict.fromkeys(numbers.tolist(), plan))
            return numbers[:0], _nothing(self._table.before), _nothing(self._table.columns)
        before = _images(values, places, numbers, k.BEFORE, plan.before, bad)
        return numbers, before, _images(values, places, numbers, k.AFTER, plan.after, bad)


_OF_SCHEMA = "it tells of a change of a schema, and of no row: read the topic of a table"
_SOURCE = {
    "lsn": Encoding("int64"),
    "ts_ms": Encoding("int64", "io.debezium.time.Timestamp"),
    "db": Encoding("string"),
    "schema": Encoding("string"),
    "table": Encoding("string"),
    "txId": Encoding("int64"),
    "file": Encoding("string"),
    "pos": Encoding("int64"),
    "gtid": Encoding("string"),
}


def encodings_of(schema: Any) -> dict[str, Encoding]:
    """The encodings of a table's columns by a schema of Kafka Connect's.

    Raises:
        Misfit: it is not of a change event.
    """
    for part in schema["fields"]:
        if part.get("field") in ("before", "after") and part.get("type") == "struct":
            return {one["field"]: _encoding(one) for one in part["fields"]}
    raise Misfit("the schema in front of it has no rows before and after: it is of no change event")


def _encoding(one: Any) -> Encoding:
    name, scale = str(one.get("name") or ""), (one.get("parameters") or {}).get("scale")
    return Encoding(str(one["type"]), name, int(scale) if name == DECIMAL and scale is not None else None)


def _lines(schema: pa.Schema, encodings: Mapping[str, Encoding]) -> _Lines:
    made: list[Conversion] = []
    for one in schema:
        try:
            made.append(conversion(one.type, encodings.get(one.name, Encoding()), None))
        except Misfit as error:
            raise Misfit(f'column "{one.name}": {error}') from None
    wire = pa.schema([pa.field(one.name, how.wire) for one, how in zip(schema, made, strict=True)])
    return _Lines(LineDecoder(_JSON, wire, None, dictionaries=False), tuple(made), tuple(schema.names))


def _images(
    values: Values, places: npt.NDArray[np.int64], numbers: Numbers, part: int, lines: _Lines, bad: dict[int, str]
) -> Images:
    """The rows in one part of messages."""
    begins = places[numbers, 2 * part]
    there = np.flatnonzero(begins >= 0) if lines.names else np.empty(0, np.int64)
    lengths = places[numbers[there], 2 * part + 1] - begins[there]
    starts = np.zeros(len(there) + 1, np.int64)
    np.cumsum(lengths + 1, out=starts[1:])
    out: Any = np.empty(int(starts[-1]), np.uint8)
    _gather(values.data.address, begins[there], lengths, out.ctypes.data, starts)
    ends = np.zeros(len(there) + 1, np.int32)
    ends[1:] = starts[1:] - 1
    piece = Values(pa.py_buffer(out), starts[:-1].astype(np.int32), ends, np.ones(len(there), np.bool_), 0)
    decoded = lines.decoder.decode(piece, first_only=False)
    for number, reason in decoded.bad:
        bad.setdefault(int(numbers[there[number]]), reason)
    good = there if decoded.good is None else there[decoded.good]
    columns: list[pa.Array] = []
    for name, how, column in zip(lines.names, lines.conversions, decoded.rows.columns, strict=True):
        made = how.convert(column)
        columns.append(made.column)
        if made.bad is not None:
            for row in np.flatnonzero(made.bad).tolist():
                bad.setdefault(int(numbers[good[row]]), f'column "{name}": out of the range of its type')
    at = np.full(len(numbers), NOWHERE, np.int64)
    at[good] = np.arange(len(good))
    return Images(columns, at)


def _nothing(schema: pa.Schema) -> Images:
    return Images([pa.array([], one.type) for one in schema], np.empty(0, np.int64))


def _joined(parts: list[tuple[Numbers, Images, Images]], table: Table) -> tuple[Numbers, Images, Images]:
    """Events of several schemas in the order of their messages."""
    if len(parts) == 1:
        return parts[0]
    numbers = np.concatenate([part[0] for part in parts]) if parts else np.empty(0, np.int64)
    order = np.argsort(numbers, kind="stable")
    images: list[Images] = []
    for which, schema in ((1, table.before), (2, table.columns)):
        all_of = [cast(Images, part[which]) for part in parts]
        columns = [
            pa.concat_arrays([pa.array([], one.type), *(images.columns[n] for images in all_of)])
            for n, one in enumerate(schema)
        ]
        at: list[Numbers] = []
        begin = 0
        for one in all_of:
            at.append(np.where(one.at >= 0, one.at + begin, NOWHERE))
            begin += len(one.columns[0]) if one.columns else 0
        images.append(Images(columns, np.concatenate(at)[order] if at else np.empty(0, np.int64)))
    return numbers[order], images[0], images[1]
