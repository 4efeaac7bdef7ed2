"""Values of messages to columns and back, a second and core: Avro and JSON, beside fastavro.

    python -m benchmarks.message_formats [--rows 65536] [--rounds 5]

One thread, and no broker: the values lie in memory as a consumer leaves them.  Rows have two longs, two texts and a
time; a second case has what costs more: nulls, an enum, a decimal, and an array of texts.
"""

from __future__ import annotations

import argparse
import datetime as dt
import decimal
import io
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
from fastavro.schema import parse_schema

from benchmarks.machine import facts
from cutwater.connectors.avro.decoder import AvroDecoder
from cutwater.connectors.avro.encoder import AvroEncoder
from cutwater.connectors.avro.schemas import SchemaText, parsed
from cutwater.connectors.files.part_formats import JsonParts
from cutwater.connectors.messages.base import ValueDecoder, Values
from cutwater.connectors.messages.encoders import Encoded, LineEncoder
from cutwater.connectors.messages.lines import JsonMessages

__all__ = ["main"]

_MICROS = {"type": "long", "logicalType": "timestamp-micros"}
_KIND = {"type": "enum", "name": "Kind", "symbols": ["view", "click", "buy"]}
_PRICE = {"type": "bytes", "logicalType": "decimal", "precision": 12, "scale": 2}
_AT = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
FIELDS: dict[str, dict[str, Any]] = {
    "five columns": {"user": "long", "cents": "long", "page": "string", "kind": "string", "at": _MICROS},
    "nested": {
        "user": ["null", "long"],
        "price": _PRICE,
        "kind": _KIND,
        "tags": {"type": "array", "items": "string"},
        "at": _MICROS,
    },
}


def schema_of(case: str) -> dict[str, Any]:
    return {"type": "record", "name": "Click", "fields": [{"name": n, "type": t} for n, t in FIELDS[case].items()]}


def rows_of(case: str, count: int) -> list[dict[str, Any]]:
    """Rows as fastavro takes them."""
    rng = np.random.default_rng(1)
    users = rng.integers(1_000_000, 10_000_000, count).tolist()
    cents = rng.integers(10_000, 100_000, count).tolist()
    pages = [f"p{page:03}" for page in rng.integers(0, 1000, count).tolist()]
    kinds = np.array(["view", "click", "buy"])[rng.choice(3, count, p=[0.5, 0.35, 0.15])].tolist()
    times = [_AT + dt.timedelta(microseconds=600 * n) for n in range(count)]
    if case == "five columns":
        columns: list[list[Any]] = [users, cents, pages, kinds, times]
    else:
        prices = [decimal.Decimal(one).scaleb(-2) for one in cents]
        tags = [pages[n : n + n % 4] for n in range(count)]
        columns = [[user if user % 10 else None for user in users], prices, kinds, tags, times]
    return [dict(zip(FIELDS[case], row, strict=True)) for row in zip(*columns, strict=True)]


def per_second(rows: int, rounds: int, call: Callable[[], object]) -> float:
    """Millions of rows a second of processor time: the median of rounds of half a second at least."""
    call()
    found: list[float] = []
    for _ in range(rounds):
        began, calls = time.process_time(), 0
        while time.process_time() - began < 0.5:
            call()
            calls += 1
        found.append(calls * rows / (time.process_time() - began) / 1e6)
    return statistics.median(found)


def cases_of(case: str, count: int) -> dict[str, Callable[[], object]]:
    """What is measured."""
    schema, rows = schema_of(case), rows_of(case, count)
    text = SchemaText(json.dumps(schema))
    theirs: Any = parse_schema(json.loads(text.json))

    def by_fastavro() -> list[bytes]:
        made: list[bytes] = []
        for row in rows:
            out = io.BytesIO()
            fastavro.schemaless_writer(out, theirs, row)
            made.append(out.getvalue())
        return made

    values = by_fastavro()
    newer = SchemaText(
        json.dumps({**schema, "fields": [*schema["fields"], {"name": "n", "type": "int", "default": 7}]})
    )
    writer = parsed(text)
    decoder = AvroDecoder(text, None, dictionaries=False)
    table = pa.Table.from_batches([decode(decoder, values)])
    plain = LineEncoder(JsonParts())
    lines = lines_of(plain.encode(table))
    ours = {
        "Avro to columns": decoding(decoder, values),
        "Avro to columns, two of them read": decoding(
            AvroDecoder(text, frozenset({"user", "at"}), dictionaries=False), values
        ),
        "Avro to columns, by the id of an older schema": decoding(
            AvroDecoder(newer, None, dictionaries=False, schema_of=lambda id: writer),
            [b"\0\0\0\0\1" + value for value in values],
        ),
        "Avro to dicts, fastavro": lambda: [fastavro.schemaless_reader(io.BytesIO(v), theirs, None) for v in values],
        "columns to Avro": lambda: AvroEncoder(text).encode(table),
        "dicts to Avro, fastavro": by_fastavro,
        "columns to JSON": lambda: plain.encode(table),
    }
    if case == "five columns":
        ours["JSON to columns"] = decoding(JsonMessages(table.schema).decoder(None, dictionaries=False), lines)
    assert decode(decoder, values).to_pylist()[:100] == rows[:100]
    encoded = AvroEncoder(text).encode(table)
    assert [encoded.value(n) for n in range(100)] == values[:100]
    return ours


def decode(decoder: ValueDecoder, values: list[bytes]) -> pa.RecordBatch:
    return decoder.decode(Values.of(values, decoder.gap), first_only=False).rows


def decoding(decoder: ValueDecoder, values: list[bytes]) -> Callable[[], object]:
    made = Values.of(values, decoder.gap)
    return lambda: decoder.decode(made, first_only=False)


def lines_of(encoded: Encoded) -> list[bytes]:
    return [encoded.value(n) for n in range(len(encoded.starts))]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=65_536)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    print(facts())
    for case in FIELDS:
        print(f"\n| {case} | M rows/s and core |\n|---|---:|")
        for name, call in cases_of(case, arguments.rows).items():
            print(f"| {name} | {per_second(arguments.rows, arguments.rounds, call):.2f} |", flush=True)


if __name__ == "__main__":
    main()
