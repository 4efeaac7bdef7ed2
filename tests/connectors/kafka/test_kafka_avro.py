"""Topics of Avro: rows go in and out through a broker, schemas evolve on the way, and what is no row is diverted."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from fastavro.schema import parse_schema
from servers.kafka import Broker
from servers.schema_registry import SchemaRegistry
from test_kafka_sink import Identity
from test_kafka_source import Context, either_client, rows_of

import avro_world as world
import cutwater as cw
from cutwater.connectors.kafka.kafka import Kafka, kafka
from cutwater.errors import BuildError, ConfigError, DataError, StorageError

__all__ = ["either_client"]

OLD = world.record(("n", "int"), ("t", "string"), name="Click")
NEW = world.record(("t", "string"), ("n", "long"), ("tags", {"type": "array", "items": "string"}, []), name="Click")


@pytest.fixture
def registry() -> Iterator[SchemaRegistry]:
    with SchemaRegistry() as started:
        yield started


def headed(id: int, value: bytes) -> bytes:
    return struct.pack(">bI", 0, id) + value


def test_rows_of_a_schema_that_is_given(
    either_client: str, topic: str, produce: Callable[..., None], read: Callable[..., Kafka]
) -> None:
    produce(topic, [world.encoded(OLD, {"n": n, "t": f"x{n}"}) for n in range(100)])
    source = read(topic, format=cw.avro(OLD), until="latest", metadata=["offset", "partition"]).as_source()
    assert source.schema.field("n").type == pa.int32()
    rows = rows_of(source)
    assert sorted(row["n"] for row in rows) == list(range(100))
    assert all(row["n"] == 2 * row["offset"] + row["partition"] and row["t"] == f"x{row['n']}" for row in rows)
    assert all(row["t"] is None for row in rows_of(source.reading(frozenset({"n"}))))


def test_bad_messages_are_diverted_with_their_offsets(
    either_client: str, topic: str, registry: SchemaRegistry, produce: Callable[..., None], read: Callable[..., Kafka]
) -> None:
    old, new = registry.register(f"{topic}-value", OLD), registry.register(f"{topic}-value", NEW)
    first = headed(old, world.encoded(OLD, {"n": 1, "t": "a"}))
    second = headed(new, world.encoded(NEW, {"n": 2, "t": "b", "tags": ["c"]}))
    values = [
        first,
        b"",
        second,
        None,
        b"{}",
        headed(99, b"\2\2a"),
        first[:-1],
        first + b"x",
        second,
        headed(new, b"\xff"),
    ]
    produce(topic, values, partition=0)
    options: dict[str, Any] = {"format": cw.avro(registry=registry.address), "until": "latest"}
    source = read(topic, bad_rows="dead_letter", **options).as_source()
    ctx = Context()
    rows = rows_of(source, ctx=ctx, most=4)
    one, two = {"t": "a", "n": 1, "tags": []}, {"t": "b", "n": 2, "tags": ["c"]}
    assert rows == [one, two, two]
    assert [(origin, position) for origin, position, *_ in ctx.dead] == [
        (f"{topic}-0", n) for n in (1, 3, 4, 5, 6, 7, 9)
    ]
    reasons = [reason for _, _, reason, _ in ctx.dead]
    assert reasons[3].endswith("knows no schema 99")
    assert reasons[4:6] == ['field "t": the value ends in it', "bytes are left behind the last field"]
    for at in range(len(values)):  # and again from any position
        again = Context()
        rows_of(source, {f"{topic}-0": at, f"{topic}-1": 0}, most=1, ctx=again)
        assert again.dead == [entry for entry in ctx.dead if entry[1] >= at]
    with pytest.raises(DataError, match=rf"{topic}-0 offset 1: the value has fewer than 5 bytes"):
        rows_of(read(topic, **options).as_source())


def test_a_registry_that_is_down_diverts_nothing(
    topic: str, registry: SchemaRegistry, produce: Callable[..., None], read: Callable[..., Kafka]
) -> None:
    produce(topic, [headed(1, b"\2\2a")], partition=0)
    registry.close()
    format = cw.avro(OLD, registry=registry.address)
    source = read(topic, format=format, until="latest", bad_rows="dead_letter").as_source()
    ctx = Context()
    with pytest.raises(StorageError, match=f"registry at {registry.address}: it does not answer"):
        rows_of(source, ctx=ctx)
    assert ctx.dead == []


def test_rows_go_in_and_out(
    broker: Broker, topic: str, registry: SchemaRegistry, read: Callable[..., Kafka], tmp_path: Path
) -> None:
    sink = kafka(
        broker.address, topic, format=cw.avro(NEW, registry=registry.address), guarantee="at-least-once"
    ).as_sink()
    rows = pa.record_batch({"n": [1, 2, 3], "t": ["a", "b", "c"], "tags": [[], ["x"], ["y", "z"]]})
    sink.check(rows.schema)
    writer = sink.writer(rows.schema, Context(), [])
    writer.write(rows)
    writer.pre_commit(1, False)()
    writer.close()
    messages = [message.value() for message in broker.committed(topic)]
    assert {value[:5] for value in messages} == {headed(1, b"")}
    theirs = [fastavro.schemaless_reader(io.BytesIO(value[5:]), parse_schema(NEW), None) for value in messages]
    ours = rows_of(read(topic, format=cw.avro(registry=registry.address), until="latest").as_source())
    assert sorted(ours, key=str) == sorted(theirs, key=str)
    assert sorted(ours, key=lambda row: row["n"]) == [
        {"t": r["t"], "n": r["n"], "tags": r["tags"]} for r in rows.to_pylist()
    ]


def test_another_schema_beside_is_refused(read: Callable[..., Kafka]) -> None:
    with pytest.raises(ConfigError, match=r"messages of Avro have the schema that cw.avro names"):
        read("clicks", format=cw.avro(OLD), schema="n long").as_source()


NULLS = pa.schema({"n": pa.int64(), "t": pa.string()})
TIMES = pa.list_(pa.timestamp("s"))
REFUSED: dict[str, tuple[Any, pa.RecordBatch, str]] = {
    "avro": (
        cw.avro(world.record(("n", "long"), ("t", "string"))),
        pa.record_batch([[1], [None]], schema=NULLS),
        "column 't' cannot be written as Avro: it is null",
    ),
    "csv": ("csv", pa.record_batch([[1], ["a\nb"]], schema=NULLS), "a text with a newline"),
    "json": ("json", pa.record_batch({"at": [[2**62]]}, pa.schema({"at": TIMES})), "column 'at'"),
}


@pytest.mark.parametrize("format", REFUSED)
def test_a_row_that_cannot_be_written_is_refused_before_a_checkpoint_has_it(
    format: str, broker: Broker, topic: str, tmp_path: Path
) -> None:
    """Else the checkpoint is complete, and its rows can never be committed."""
    given, rows, message = REFUSED[format]
    sink = kafka(broker.address, topic, format=given).as_sink().bind(str(tmp_path))
    writer = sink.writer(rows.schema, Identity(0, 1), [])
    with pytest.raises((DataError, BuildError), match=message):
        writer.write(rows)
        writer.pre_commit(1, False)
    writer.close()


def test_a_schema_that_the_registry_refuses_is_said_before_a_checkpoint_has_rows(
    broker: Broker, topic: str, registry: SchemaRegistry, tmp_path: Path
) -> None:
    registry.refuse = True
    format = cw.avro(world.record(("n", "long")), registry=registry.address)
    rows = pa.record_batch({"n": [1]})
    writer = (
        kafka(broker.address, topic, format=format)
        .as_sink()
        .bind(str(tmp_path))
        .writer(rows.schema, Identity(0, 1), [])
    )
    with pytest.raises(StorageError, match="refuses the schema"):
        writer.write(rows)
        writer.pre_commit(1, False)
    writer.close()


def test_rows_come_exactly_once(broker: Broker, topic: str, registry: SchemaRegistry, tmp_path: Path) -> None:
    sink = kafka(broker.address, topic, key="n", format=cw.avro(NEW, registry=registry.address)).as_sink()
    sink = sink.bind(str(tmp_path))
    rows = pa.record_batch({"n": [1, 2], "t": ["a", "b"], "tags": [[], ["x"]]})
    writer = sink.writer(rows.schema, Identity(0, 1), [])
    writer.write(rows)
    handles = writer.pre_commit(1, False)().handles
    for _ in range(2):
        sink.committer(rows.schema, Identity.job_uid, Identity.step).commit(1, handles)
    writer.close()
    found = {message.key(): message.value()[5:] for message in broker.committed(topic)}
    assert len(broker.committed(topic)) == 2
    assert world.decoded(NEW, found[b"2"]) == {"n": 2, "t": "b", "tags": ["x"]}


def test_an_upsert_writes_records_and_tombstones(
    broker: Broker, topic: str, registry: SchemaRegistry, tmp_path: Path
) -> None:
    """The mark of a change is no field, and a key that leaves has neither record nor header."""
    schema = world.record(("k", "long"), ("n", "long"), name="Total")
    format = cw.avro(schema, registry=registry.address)
    sink = kafka(broker.address, topic, key="k", mode="upsert", format=format).as_sink()
    sink = sink.bind(str(tmp_path)).applying(("k",))
    changes = pa.record_batch(
        {"op": ["+I", "+I", "-U", "+U", "-D"], "k": [1, 2, 1, 1, 2], "n": [10, 20, 10, 11, 20]},
    )
    sink.check(changes.schema)
    writer = sink.writer(changes.schema, Identity(0, 1), [])
    writer.write(changes)
    handles = writer.pre_commit(1, False)().handles
    sink.committer(changes.schema, Identity.job_uid, Identity.step).commit(1, handles)
    writer.close()
    found: dict[bytes, list[Any]] = {}
    for message in broker.committed(topic):
        value = message.value()
        record = None if value is None else world.decoded(schema, value[5:])
        found.setdefault(message.key(), []).append(record)
    assert found == {b"1": [{"k": 1, "n": 10}, {"k": 1, "n": 11}], b"2": [{"k": 2, "n": 20}, None]}
    source = kafka(broker.address, topic, format=format, until="latest", bad_rows="dead_letter").as_source()
    context = Context()
    assert sorted(row["n"] for row in rows_of(source, ctx=context)) == [10, 11, 20]
    assert len(context.dead) == 1, "a tombstone is no record"
