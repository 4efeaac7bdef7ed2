"""Change events in JSON to the rows of an updating stream: operations, encodings, and what is no event."""

from __future__ import annotations

import base64
import datetime as dt
import decimal
import json
import pickle
import random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cutwater as cw
import debezium_world as world
from cutwater.connectors.debezium.formats import Debezium
from cutwater.connectors.messages.base import Decoded, Values
from cutwater.data.changes import added_rows
from cutwater.data.schema_text import as_schema
from cutwater.errors import BuildError, ConfigError, DataError

ONE, TWO = {"id": 1, "name": "a"}, {"id": 1, "name": "b"}
FULL, KEYED = cw.debezium("id long, name string"), cw.debezium("id long, name string", key="id")


def decode(format: Debezium, values: list[bytes | None], columns: frozenset[str] | None = None) -> Decoded:
    messages = pickle.loads(pickle.dumps(format.messages("orders")))
    found = messages.decoder(columns, dictionaries=False).decode(Values.of(values, 1), first_only=False)
    found.rows.validate(full=True)
    assert found.rows.schema.equals(messages.schema)
    return found


def marks(found: Decoded) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in found.rows.to_pylist()]


@pytest.mark.parametrize("form", ["plain", "enveloped"])
def test_each_operation(form: world.Form) -> None:
    event = world.event
    values = [
        event("r", None, ONE, form),
        event("u", ONE, TWO, form),
        None,
        event("d", TWO, None, form),
        event("c", None, ONE, form),
    ]
    found = decode(FULL, values)
    assert marks(found) == [("+I", 1, "a"), ("-U", 1, "a"), ("+U", 1, "b"), ("-D", 1, "b"), ("+I", 1, "a")]
    assert found.good is not None
    assert found.good.tolist() == [0, 1, 1, 3, 4]
    keyed = decode(KEYED, values)
    assert marks(keyed) == [("+I", 1, "a"), ("+U", 1, "b"), ("-D", 1, None), ("+I", 1, "a")]
    assert keyed.good is not None
    assert keyed.good.tolist() == [0, 1, 3, 4]


def test_without_rows_before_a_key_is_needed() -> None:
    """REPLICA IDENTITY DEFAULT: nothing before an update, the key of a row that leaves."""
    values = [
        world.event("u", None, TWO),
        world.event("d", {"id": 1, "name": None}, None),
        world.event("d", None, None),
    ]
    found = decode(FULL, values)
    assert marks(found) == [("-D", 1, None)]
    assert "REPLICA IDENTITY FULL" in found.bad[0].reason
    assert "key='id'" in found.bad[0].reason
    keyed = decode(KEYED, values)
    assert marks(keyed) == [("+U", 1, "b"), ("-D", 1, None)]
    assert [bad.number for bad in keyed.bad] == [2]


def test_an_update_of_the_key_takes_the_old_row_out() -> None:
    moved = world.event("u", {"id": 1, "name": None}, {"id": 2, "name": "b"})
    same = world.event("u", {"id": 1, "name": "x"}, TWO)
    unsaid = world.event("u", {"id": None, "name": None}, TWO)
    assert marks(decode(KEYED, [moved, same, unsaid])) == [
        ("-D", 1, None),
        ("+U", 2, "b"),
        ("+U", 1, "b"),
        ("+U", 1, "b"),
    ]


BAD = {
    "truncate": (b'{"op":"t","before":null,"after":null}', "the table was truncated"),
    "log message": (b'{"op":"m","message":{"prefix":"p"}}', "a message of the database's log"),
    "unknown": (b'{"op":"x"}', "its operation is none of c, r, u and d"),
    "schema change": (b'{"source":{},"ddl":"CREATE TABLE t (id int)","tableChanges":[]}', "a change of a schema"),
    "transaction": (b'{"status":"BEGIN","id":"571","ts_ms":1}', "it has no operation"),
    "no row": (b'{"op":"c","after":null}', "it does not say what the row is now"),
    "wrong type": (b'{"op":"c","after":{"id":"x","name":"a"}}', "id"),
    "no object": (b"[]", "it is no JSON object"),
    "nothing": (b"", "it is no JSON object"),
    "cut short": (b'{"op":"c","after":{"id":1', "it is no JSON object"),
    "more behind": (b'{"op":"c","after":{"id":1}} {}', "it is no JSON object"),
    "in a string": (b'{"op":"c","after":{"id":1,"name":"a}', "it is no JSON object"),
    "payload": (b'{"schema":{},"payload":7}', "it is no JSON object"),
    "no key": (b'{"op":"c","after":{"name":"a"}}', "a column of the key is null"),
    "no key left": (b'{"op":"d","before":{"name":"a"}}', "which row left: a column of the key is null"),
    "unavailable": (
        b'{"op":"u","after":{"id":1,"name":"__debezium_unavailable_value"}}',
        "a column holds __debezium_unavailable_value",
    ),
    "a strange schema": (b'{"schema":{"fields":7},"payload":{"op":"c","after":{"id":1}}}', "none of Kafka Connect's"),
    "another schema": (
        b'{"schema":{"type":"struct","fields":[]},"payload":{"op":"c","after":{"id":1}}}',
        "no rows before and after",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_event_is_said_and_others_are_read(name: str) -> None:
    value, reason = BAD[name]
    good = world.event("c", None, ONE)
    found = decode(KEYED, [good, value, good])
    assert [bad.number for bad in found.bad] == [1]
    assert reason in found.bad[0].reason
    assert marks(found) == [("+I", 1, "a")] * 2
    messages = KEYED.messages("t").decoder(None, dictionaries=False)
    first = messages.decode(Values.of([good, value, value], 1), first_only=True)
    assert [bad.number for bad in first.bad] == [1]
    assert first.rows.num_rows == 0


def enveloped(fields: list[dict[str, Any]], after: dict[str, Any]) -> bytes:
    return world.event("c", None, after, "enveloped", world.connect_schema(fields))


T, C, D = "io.debezium.time.", "org.apache.kafka.connect.data.", "io.debezium.data."
AT = dt.datetime(2026, 1, 31, 12, 30, 15, 250_000)
MS = 1769862615250
MIDDAY = dt.time(12, 30, 15, 250_000)
MIDDAY_MS = 45015250
ENCODED: dict[str, tuple[dict[str, Any], Any, str | pa.DataType, Any]] = {
    "date": ({"type": "int32", "name": T + "Date"}, 20484, "date", dt.date(2026, 1, 31)),
    "connect date": ({"type": "int32", "name": C + "Date"}, -1, "date", dt.date(1969, 12, 31)),
    "millis": ({"type": "int64", "name": T + "Timestamp"}, MS, "timestamp_ntz", AT),
    "micros": ({"type": "int64", "name": T + "MicroTimestamp"}, MS * 1000, "timestamp_ntz", AT),
    "nanos": ({"type": "int64", "name": T + "NanoTimestamp"}, MS * 10**6 + 999, "timestamp_ntz", AT),
    "nanos kept": ({"type": "int64", "name": T + "NanoTimestamp"}, 1001, pa.timestamp("ns"), 1001),
    "connect time": ({"type": "int64", "name": C + "Timestamp"}, MS, "timestamp", AT.replace(tzinfo=dt.UTC)),
    "before the epoch": (
        {"type": "int64", "name": T + "NanoTimestamp"},
        -1,
        "timestamp_ntz",
        dt.datetime(1969, 12, 31, 23, 59, 59, 999_999),
    ),
    "zoned": (
        {"type": "string", "name": T + "ZonedTimestamp"},
        "2026-01-31T12:30:15.25Z",
        "timestamp",
        AT.replace(tzinfo=dt.UTC),
    ),
    "time": ({"type": "int32", "name": T + "Time"}, MIDDAY_MS, pa.time32("ms"), MIDDAY),
    "micro time": ({"type": "int64", "name": T + "MicroTime"}, MIDDAY_MS * 1000, pa.time64("us"), MIDDAY),
    "nano time": ({"type": "int64", "name": T + "NanoTime"}, MIDDAY_MS * 10**6, pa.time64("us"), MIDDAY),
    "duration": ({"type": "int64", "name": T + "MicroDuration"}, -5, pa.duration("us"), dt.timedelta(microseconds=-5)),
    "as number": ({"type": "int64", "name": T + "Timestamp"}, MS, "long", MS),
    "decimal": (
        {"type": "bytes", "name": C + "Decimal", "parameters": {"scale": "2"}},
        world.unscaled(-12345),
        "decimal(10, 2)",
        decimal.Decimal("-123.45"),
    ),
    "decimal of another scale": (
        {"type": "bytes", "name": C + "Decimal", "parameters": {"scale": "2"}},
        world.unscaled(12345),
        "decimal(12, 4)",
        decimal.Decimal("123.4500"),
    ),
    "large decimal": (
        {"type": "bytes", "name": C + "Decimal", "parameters": {"scale": "0"}},
        world.unscaled(-(10**38) + 1),
        "decimal(38, 0)",
        decimal.Decimal(-(10**38) + 1),
    ),
    "decimal as text": ({"type": "string"}, "-1.50", "decimal(10, 2)", decimal.Decimal("-1.50")),
    "decimal as number": ({"type": "double"}, 1.5, "double", 1.5),
    "variable decimal": (
        {"type": "struct", "name": D + "VariableScaleDecimal", "fields": []},
        {"scale": 3, "value": world.unscaled(1500)},
        "decimal(10, 3)",
        decimal.Decimal("1.500"),
    ),
    "bytes": ({"type": "bytes"}, base64.b64encode(b"\0\xff1").decode(), "binary", b"\0\xff1"),
    "bits": ({"type": "bytes", "name": D + "Bits"}, base64.b64encode(b"\5").decode(), "binary", b"\5"),
    "uuid": ({"type": "string", "name": D + "Uuid"}, "00010203", "string", "00010203"),
    "json": ({"type": "string", "name": D + "Json"}, '{"a": [1]}', "string", '{"a": [1]}'),
    "enum": ({"type": "string", "name": D + "Enum", "parameters": {"allowed": "a,b"}}, "b", "string", "b"),
    "boolean": ({"type": "boolean"}, True, "boolean", True),
    "double": ({"type": "double"}, 1.5, "double", 1.5),
    "array": ({"type": "array", "items": {"type": "string"}}, ["a", "b"], "array<string>", ["a", "b"]),
}


def declared_type(declared: str | pa.DataType) -> Any:
    return declared if isinstance(declared, pa.DataType) else as_schema(f"v {declared}").field("v").type


@pytest.mark.parametrize("name", ENCODED)
def test_encodings_are_those_of_the_schema_in_front(name: str) -> None:
    field, wire, declared, expected = ENCODED[name]
    schema: Any = (
        declared if isinstance(declared, pa.DataType) else cw.debezium(f"v {declared}").columns.field("v").type
    )
    format = cw.debezium(pa.schema([("v", schema)]))
    fields = [{**field, "optional": True, "field": "v"}]
    found = decode(format, [enveloped(fields, {"v": wire}), enveloped(fields, {"v": None}), enveloped(fields, {})])
    assert found.bad == []
    column = found.rows.column("v")
    assert column.type == schema
    value = column[0].cast(pa.int64()).as_py() if name == "nanos kept" else column[0].as_py()
    assert value == expected
    assert column.to_pylist()[1:] == [None, None]


OUT_OF_RANGE = {
    "time": ({"type": "int64", "name": T + "Timestamp"}, 2**62, "timestamp_ntz"),
    "time of day": ({"type": "int64", "name": T + "MicroTime"}, 86_400_000_000, pa.time64("us")),
    "a negative time of day": ({"type": "int32", "name": T + "Time"}, -1, pa.time32("ms")),
    "date": ({"type": "int64", "name": T + "Date"}, 2**31, "date"),
    "decimal": ({"type": "bytes", "name": C + "Decimal"}, world.unscaled(100), "decimal(2, 0)"),
    "decimal of no digits": ({"type": "bytes", "name": C + "Decimal"}, "", "decimal(2, 0)"),
    "finer decimal": (
        {"type": "bytes", "name": C + "Decimal", "parameters": {"scale": "2"}},
        world.unscaled(101),
        "decimal(9, 1)",
    ),
    "no base64": ({"type": "bytes"}, "a?==", "binary"),
    "base64 cut short": ({"type": "bytes"}, "AAA", "binary"),
    "no decimal": ({"type": "string"}, "one", "decimal(9, 2)"),
    "variable": (
        {"type": "struct", "name": D + "VariableScaleDecimal", "fields": []},
        {"scale": 99, "value": "AQ=="},
        "decimal(9, 2)",
    ),
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_a_value_that_the_column_cannot_hold_is_a_bad_row(name: str) -> None:
    field, wire, declared = OUT_OF_RANGE[name]
    schema: Any = (
        declared if isinstance(declared, pa.DataType) else cw.debezium(f"v {declared}").columns.field("v").type
    )
    fields = [{**field, "optional": True, "field": "v"}]
    format = cw.debezium(pa.schema([("v", schema)]))
    found = decode(format, [enveloped(fields, {"v": None}), enveloped(fields, {"v": wire})])
    assert [(bad.number, bad.reason) for bad in found.bad] == [(1, 'column "v": out of the range of its type')]
    assert found.rows.num_rows == 1


def test_a_column_that_cannot_be_what_is_declared_makes_bad_rows() -> None:
    fields = [{"type": "int64", "name": T + "MicroTimestamp", "field": "v"}]
    (bad,) = decode(cw.debezium("v string"), [enveloped(fields, {"v": 1})]).bad
    assert bad.reason == 'column "v": io.debezium.time.MicroTimestamp is no string'


def test_schemas_that_change_from_message_to_message() -> None:
    millis = [{"type": "int64", "name": T + "Timestamp", "field": "at"}, {"type": "int32", "field": "id"}]
    micros = [{"type": "int64", "name": T + "MicroTimestamp", "field": "at"}, {"type": "int32", "field": "id"}]
    values: list[bytes | None] = []
    for id in range(40):
        fields, wire = (millis, MS) if id % 3 else (micros, MS * 1000)
        values.append(enveloped(fields, {"id": id, "at": wire}))
        values.append(None if id % 7 else b"{}")
    found = decode(cw.debezium("id int, at timestamp_ntz"), values)
    assert [(row["id"], row["at"]) for row in found.rows.to_pylist()] == [(id, AT) for id in range(40)]
    assert [bad.number for bad in found.bad] == [2 * id + 1 for id in range(0, 40, 7)]


def test_without_a_schema_times_need_to_be_told() -> None:
    value = json.dumps({"op": "c", "after": {"id": 1, "at": MS * 1000}}).encode()
    told = cw.debezium("id long, at timestamp_ntz", encodings={"at": "MicroTimestamp"})
    assert decode(told, [value]).rows["at"].to_pylist() == [AT]
    with pytest.raises(DataError, match=r'column "at": messages without schema do not say .*encodings='):
        decode(cw.debezium("id long, at timestamp_ntz"), [value])


def test_metadata_and_columns_that_nobody_reads() -> None:
    format = cw.debezium("id long, name string", key="id", metadata={"lsn": "lsn", "ts_ms": "changed", "table": "of"})
    value = world.event("c", None, ONE, lsn=77, ts_ms=MS)
    without = json.dumps({"op": "c", "after": ONE}).encode()
    found = decode(format, [value, without, world.event("d", ONE, None, lsn=2**40)])
    at = AT.replace(tzinfo=dt.UTC)
    assert [tuple(row.values())[3:] for row in found.rows.to_pylist()] == [
        (77, at, "orders"),
        (None, None, None),
        (2**40, None, "orders"),
    ]
    few = decode(format, [value], frozenset({"op", "of"})).rows.to_pylist()
    assert few == [{"op": "+I", "id": 1, "name": None, "lsn": None, "changed": None, "of": "orders"}]


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_added_less_removed_rows_are_the_table(data: st.DataObject) -> None:
    orders = world.Orders(data.draw(st.integers(0, 2**32)), "full", "enveloped")
    values = [value for _, value in orders.events(data.draw(st.integers(0, 60)))]
    cut = data.draw(st.integers(0, len(values)))
    format = cw.debezium(world.SCHEMA)
    decoder = format.messages("t").decoder(None, dictionaries=False)
    left: dict[Any, int] = {}
    for part in (values[:cut], values[cut:]):
        rows = decoder.decode(Values.of(part, 1), first_only=False).rows
        for row, added in zip(rows.to_pylist(), added_rows(rows).tolist(), strict=True):
            key = tuple(row.values())[1:]
            left[key] = left.get(key, 0) + (1 if added else -1)
    now = {
        (
            row["id"],
            row["city"],
            None if row["cents"] is None else decimal.Decimal(row["cents"]).scaleb(-2),
            dt.datetime(1970, 1, 1) + dt.timedelta(microseconds=row["at"]),
        )
        for row in orders.table()
    }
    assert {key for key, count in left.items() if count} == now
    assert set(left.values()) <= {0, 1}


@given(st.binary(max_size=60), st.integers(0, 2**32))
@settings(deadline=None, max_examples=200)
def test_no_bytes_do_more_than_be_bad(noise: bytes, seed: int) -> None:
    chance = random.Random(seed)
    whole = world.event("u", ONE, TWO, "enveloped" if seed % 2 else "plain")
    values: list[bytes | None] = [noise]
    for _ in range(20):
        changed = bytearray(whole)
        for _ in range(chance.randrange(1, 4)):
            place = chance.randrange(len(changed) + 1)
            changed[place : place + chance.randrange(3)] = chance.choice([b'"', b"\\", b"{", b"}", b"[", noise[:3]])
        values.append(bytes(changed))
    found = decode(KEYED, values)
    assert all(bad.reason for bad in found.bad)
    json_rows = [number for number, value in enumerate(values) if _is_event(value)]
    assert set(json_rows) <= set(found.good.tolist() if found.good is not None else range(len(values))) | {
        bad.number for bad in found.bad
    }


def _is_event(value: bytes | None) -> bool:
    try:
        return isinstance(json.loads(value or b""), dict)
    except ValueError:
        return False


def test_what_is_wrong_is_said_when_the_flow_is_built() -> None:
    with pytest.raises(ConfigError, match="debezium needs a schema or a registry"):
        cw.debezium()
    with pytest.raises(ConfigError, match="subject and options are of a registry"):
        cw.debezium("id long", subject="x")
    with pytest.raises(ConfigError, match="encodings are for JSON"):
        cw.debezium(registry="http://localhost:1", encodings={"at": "Date"})
    with pytest.raises(BuildError, match="key column 'x' is none of the table"):
        cw.debezium("id long", key="x")
    with pytest.raises(BuildError, match="named 'op' already"):
        cw.debezium("id long, op string")
    with pytest.raises(ConfigError, match="changes have no 'lsm'"):
        cw.debezium("id long", key="id", metadata=["lsm"])
    with pytest.raises(ConfigError, match="metadata needs key="):
        cw.debezium("id long", metadata=["lsn"])
    with pytest.raises(BuildError, match="two columns are named 'table'"):
        cw.debezium("id long, table string", key="id", metadata=["table"])
    with pytest.raises(ConfigError, match="there is no encoding 'MicroTimestmp'"):
        cw.debezium("id long, at timestamp_ntz", encodings={"at": "MicroTimestmp"})
    with pytest.raises(BuildError, match="encodings names column 'x'"):
        cw.debezium("id long", encodings={"x": "Date"})
    with pytest.raises(BuildError, match="are read, not written"):
        cw.debezium("id long").encoder("t")
    flow = cw.Dataflow("f")
    with pytest.raises(BuildError, match="rows of an updating stream have no event time"):
        flow.read("a", cw.kafka("h:1", "t", format=cw.debezium("id long, at timestamp", key="id")), event_time="at")
    assert flow.read("b", cw.kafka("h:1", "t", format=cw.debezium("id long", key="id"))).type.changes == ("id",)
    assert flow.read("c", cw.kafka("h:1", "t", format=cw.debezium("id long"))).type.changes == ()
