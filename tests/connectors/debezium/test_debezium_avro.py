"""Change events in Avro by a registry: the same rows as in JSON, by the names that Kafka Connect gives types."""

from __future__ import annotations

import datetime as dt
import decimal
import pickle
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from servers.schema_registry import SchemaRegistry

import avro_world
import cutwater as cw
from cutwater.connectors.debezium.formats import Debezium
from cutwater.connectors.messages import registry as registry_module
from cutwater.connectors.messages.base import Decoded, Values
from cutwater.connectors.messages.registry import KnownSchemas
from cutwater.errors import BuildError

T = "io.debezium.time."
PRICE = {
    "type": "bytes",
    "scale": 2,
    "precision": 64,
    "connect.version": 1,
    "connect.parameters": {"scale": "2", "connect.decimal.precision": "12"},
    "connect.name": "org.apache.kafka.connect.data.Decimal",
    "logicalType": "decimal",
}
FIELDS: list[tuple[Any, ...]] = [
    ("id", "long"),
    ("city", ["null", "string"], None),
    ("price", ["null", PRICE], None),
    ("at", ["null", {"type": "long", "connect.version": 1, "connect.name": T + "MicroTimestamp"}], None),
    ("day", ["null", {"type": "int", "connect.version": 1, "connect.name": T + "Date"}], None),
    ("zoned", ["null", {"type": "string", "connect.version": 1, "connect.name": T + "ZonedTimestamp"}], None),
]


def envelope(fields: list[tuple[Any, ...]] = FIELDS) -> dict[str, Any]:
    source = avro_world.record(("db", "string"), ("lsn", ["null", "long"], None), ("ts_ms", "long"), name="Source")
    return avro_world.record(
        ("before", ["null", avro_world.record(*fields, name="Value")], None),
        ("after", ["null", "Value"], None),
        ("source", source),
        ("op", "string"),
        ("ts_ms", ["null", "long"], None),
        name="Envelope",
    )


ROW: dict[str, Any] = {
    "id": 1,
    "city": "Graz",
    "price": decimal.Decimal("-1.50").scaleb(2).to_integral().__int__().to_bytes(2, "big", signed=True),
    "at": 1_000_001,
    "day": 3,
    "zoned": "1970-01-01T00:00:02Z",
}
EXPECTED = {
    "id": 1,
    "city": "Graz",
    "price": decimal.Decimal("-1.50"),
    "at": dt.datetime(1970, 1, 1, 0, 0, 1, 1),
    "day": dt.date(1970, 1, 4),
    "zoned": dt.datetime(1970, 1, 1, 0, 0, 2, tzinfo=dt.UTC),
}


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[SchemaRegistry]:
    monkeypatch.setattr(registry_module, "_WAITS_S", (0.0, 0.0, 0.0))
    monkeypatch.setattr(KnownSchemas, "_known", {})
    with SchemaRegistry() as started:
        yield started


def written(id: int, op: str, before: Any, after: Any, schema: Any = None) -> bytes:
    raw = schema or envelope()
    source = {"db": "shop", "lsn": 5, "ts_ms": 1}
    row = {"before": before, "after": after, "source": source, "op": op, "ts_ms": None}
    return b"\0" + id.to_bytes(4, "big") + avro_world.encoded(_plain(raw), row)


def _plain(schema: Any) -> Any:
    """Without the logical type, so that bytes are written as they are."""
    if isinstance(schema, dict):
        return {name: _plain(one) for name, one in schema.items() if name != "logicalType"}
    return [_plain(one) for one in schema] if isinstance(schema, list) else schema


def decode(format: Debezium, values: list[bytes | None]) -> Decoded:
    messages = pickle.loads(pickle.dumps(format.messages("orders")))
    found = messages.decoder(None, dictionaries=False).decode(Values.of(values), first_only=False)
    found.rows.validate(full=True)
    assert found.rows.schema.equals(messages.schema)
    return found


def test_each_operation_and_the_columns_of_the_schema(registry: SchemaRegistry) -> None:
    id = registry.register("orders-value", envelope())
    other = {**ROW, "city": None, "price": None, "at": None, "day": None, "zoned": None}
    values = [
        written(id, "c", None, ROW),
        written(id, "u", ROW, other),
        None,
        written(id, "d", other, None),
        written(id, "u", None, ROW),
        written(id, "t", None, None),
        written(id, "x", None, None),
        b"\0\0\0\0\x63",
    ]
    found = decode(cw.debezium(registry=registry.address), values)
    rows = [{"op": "+I", **EXPECTED}, {"op": "-U", **EXPECTED}]
    nothing = {**dict.fromkeys(EXPECTED), "id": 1}
    assert found.rows.to_pylist() == [*rows, {"op": "+U", **nothing}, {"op": "-D", **nothing}]
    assert found.rows.schema.field("price").type == pa.decimal128(12, 2)
    assert [bad.number for bad in found.bad] == [4, 5, 6, 7]
    assert "truncated" in found.bad[1].reason
    keyed = decode(cw.debezium(registry=registry.address, key="id", metadata=["lsn", "ts_ms", "db"]), values)
    assert [row["op"] for row in keyed.rows.to_pylist()] == ["+I", "+U", "-D", "+U"]
    last = keyed.rows.to_pylist()[-1]
    assert (last["lsn"], last["db"], last["ts_ms"].microsecond) == (5, "shop", 1000)


def test_columns_that_are_declared_and_schemas_that_change(registry: SchemaRegistry) -> None:
    old = registry.register("orders-value", envelope(FIELDS[:3]))
    registry.register("orders-value", envelope())
    value = written(old, "c", None, {name: ROW[name] for name in ("id", "city", "price")}, envelope(FIELDS[:3]))
    found = decode(cw.debezium("id long, price decimal(20, 4), at timestamp", registry=registry.address), [value])
    assert found.rows.to_pylist() == [{"op": "+I", "id": 1, "price": decimal.Decimal("-1.5000"), "at": None}]


def test_what_is_wrong_is_said_when_the_flow_is_built(registry: SchemaRegistry) -> None:
    address = registry.address
    with pytest.raises(BuildError, match="no schema for subject 'orders-value'"):
        cw.debezium(registry=address).messages("orders")
    with pytest.raises(BuildError, match="events of several topics"):
        cw.debezium(registry=address).messages(None)
    registry.register("plain-value", avro_world.record(("id", "long")))
    with pytest.raises(BuildError, match=r"no change event of Debezium.*unwrapped are ordinary records"):
        cw.debezium(registry=address).messages("plain")
    registry.register("orders-value", envelope())
    with pytest.raises(BuildError, match=r"column 'at': io.debezium.time.MicroTimestamp is no string"):
        cw.debezium("at string", registry=address).messages("orders")
    with pytest.raises(BuildError, match="key column 'no' is none of the table"):
        cw.debezium(registry=address, key="no").messages("orders")
