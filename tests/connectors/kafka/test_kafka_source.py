"""Topics as a source: positions are exact, whatever is in the messages and whichever client reads them."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable
from typing import Any

import confluent_kafka as client
import pytest
from pyspark import cloudpickle
from servers.kafka import Broker

from cutwater.connectors.base import Source, SourceHooks, lag_of
from cutwater.connectors.kafka import reader as reader_module
from cutwater.connectors.kafka.kafka import Kafka
from cutwater.connectors.kafka.source import KafkaSource
from cutwater.errors import BuildError, ConfigError, DataError, StorageError


class Context:
    """Collects what is diverted."""

    step, subtask = "read", 0

    def __init__(self) -> None:
        self.dead: list[tuple[str, int, str, str]] = []

    def dead_letter(self, origin: str, position: int, reason: str, raw: str) -> None:
        self.dead.append((origin, position, reason, raw))


@pytest.fixture(params=["librdkafka", "python client"])
def either_client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python client":
        monkeypatch.setattr(reader_module, "library", lambda: None)
    return request.param


def rows_of(
    source: KafkaSource, positions: dict[str, Any] | None = None, most: int = 7, ctx: Context | None = None
) -> list[dict[str, Any]]:
    """All rows of a bounded source, in calls of a few rows, in the order of its splits."""
    rows: list[dict[str, Any]] = []
    ends = time.monotonic() + 30
    for split in source.discover():
        opened = cloudpickle.loads(cloudpickle.dumps(source)).open(
            split, (positions or {}).get(split.id), ctx or Context()
        )
        while not opened.exhausted:
            assert time.monotonic() < ends
            batch = opened.read(most)
            if batch is None:
                time.sleep(0.002)
            else:
                rows += batch.to_pylist()
        opened.close()
    return rows


def test_any_position_gives_the_rest(
    either_client: str, topic: str, produce: Callable[..., None], read: Callable[..., Kafka]
) -> None:
    produce(topic, [{"n": n, "t": f"x{n % 3}"} for n in range(100)])
    source = read(topic, schema="n long, t string", until="latest", metadata=["partition", "offset"]).as_source()
    rows = rows_of(source)
    assert sorted(row["n"] for row in rows) == list(range(100))
    assert all(row["n"] == 2 * row["offset"] + row["partition"] and row["t"] == f"x{row['n'] % 3}" for row in rows)
    for at in (0, 1, 49, 50):
        rest = rows_of(source, {f"{topic}-0": at, f"{topic}-1": 50})
        assert [row["n"] for row in rest] == list(range(2 * at, 100, 2))


def test_the_lag_is_what_is_left(
    either_client: str, topic: str, produce: Callable[..., None], read: Callable[..., Kafka]
) -> None:
    produce(topic, [{"n": n} for n in range(10)], partition=0)
    source = read(topic, schema="n long").as_source()
    opened = source.open(source.discover()[0], 3, Context())
    ends = time.monotonic() + 30
    while opened.read(4) is None:
        assert time.monotonic() < ends
        time.sleep(0.01)
    assert lag_of(opened) == 10 - opened.position
    opened.close()
    assert lag_of(opened) is None


def test_what_a_message_has_besides(
    either_client: str, topic: str, produce: Callable[..., None], read: Callable[..., Kafka]
) -> None:
    produce(topic, [{"n": 1}], key="k", timestamp=1_700_000_000_123, headers=[("h", b"v"), ("e", None)])
    produce(topic, [{"n": 2}])
    names = {"key": "who", "timestamp": "at", "topic": "topic", "headers": "headers"}
    first, second = rows_of(read(topic, schema="n long", until="latest", metadata=names).as_source())
    assert first == {
        "n": 1,
        "who": "k",
        "at": dt.datetime(2023, 11, 14, 22, 13, 20, 123000, dt.UTC),
        "topic": topic,
        "headers": [{"key": "h", "value": b"v"}, {"key": "e", "value": None}],
    }
    assert (second["who"], second["headers"]) == (None, None)


BAD = [b"nonsense", None, b'{"n": "seven"}', b'{"n": 1} {"n": 2}', b"\xff", b"[1]"]


def test_bad_messages_are_diverted_with_their_offsets(
    either_client: str, topic: str, produce: Callable[..., None], read: Callable[..., Kafka]
) -> None:
    produce(topic, [{"n": 0}, *BAD, b'{"n":\n7}', {"other": 1}], partition=0)
    source = read(topic, schema="n long", until="latest", bad_rows="dead_letter").as_source()
    ctx = Context()
    assert [row["n"] for row in rows_of(source, ctx=ctx)] == [0, 7, None]
    assert [(origin, position) for origin, position, *_ in ctx.dead] == [(f"{topic}-0", n) for n in range(1, 7)]
    assert ctx.dead[0][3] == "nonsense"
    for at in range(9):  # and again from any position
        again = Context()
        rows_of(source, {f"{topic}-0": at, f"{topic}-1": 0}, most=1, ctx=again)
        assert again.dead == [entry for entry in ctx.dead if entry[1] >= at]


def test_a_bad_message_fails_with_its_offset(
    topic: str, produce: Callable[..., None], read: Callable[..., Kafka]
) -> None:
    produce(topic, [{"n": 0}, {"n": 1}, b"nonsense"], partition=1)
    with pytest.raises(DataError, match=rf"{topic}-1 offset 2: .*: nonsense"):
        rows_of(read(topic, schema="n long", until="latest").as_source())


def test_keys_that_are_no_texts(topic: str, produce: Callable[..., None], read: Callable[..., Kafka]) -> None:
    produce(topic, [{"n": 0}], key=b"\xff")
    produce(topic, [{"n": 1}], key=b"ok")
    source = read(topic, schema="n long", until="latest", metadata=["key"], bad_rows="dead_letter").as_source()
    ctx = Context()
    assert [row["n"] for row in rows_of(source, ctx=ctx)] == [1]
    assert ctx.dead[0][2] == "the key is not UTF-8"
    binary = read(topic, schema="n long", until="latest", metadata=["key"], key_type="binary").as_source()
    assert [row["key"] for row in rows_of(binary)] == [b"\xff", b"ok"]


@pytest.mark.parametrize("format", ["text", "bytes"])
def test_values_as_they_are(format: str, topic: str, produce: Callable[..., None], read: Callable[..., Kafka]) -> None:
    produce(topic, [b"a\nb", None, "ñ".encode()], partition=0)
    values = [row["value"] for row in rows_of(read(topic, format=format, until="latest").as_source())]
    assert values == (["a\nb", None, "ñ"] if format == "text" else [b"a\nb", None, "ñ".encode()])


def test_rows_of_csv(topic: str, produce: Callable[..., None], read: Callable[..., Kafka]) -> None:
    produce(topic, [b'1,"a, b"', b"2,"], partition=0)
    rows = rows_of(read(topic, format="csv", schema="n long, t string", until="latest").as_source())
    assert rows == [{"n": 1, "t": "a, b"}, {"n": 2, "t": None}]


def test_open_and_aborted_transactions_are_not_seen(
    either_client: str, broker: Broker, topic: str, read: Callable[..., Kafka]
) -> None:
    producer = client.Producer({"bootstrap.servers": broker.address, "transactional.id": topic})
    producer.init_transactions()
    for value, commits in ((b'{"n": 1}', True), (b'{"n": 2}', False), (b'{"n": 3}', True)):
        producer.begin_transaction()
        producer.produce(topic, value, partition=0)
        producer.flush()
        (producer.commit_transaction if commits else producer.abort_transaction)()
    source = read(topic, schema="n long", until="latest", metadata=["offset"]).as_source()
    assert rows_of(source) == [{"n": 1, "offset": 0}, {"n": 3, "offset": 4}]  # it ends, behind a marker without a row


def test_where_to_begin(topic: str, produce: Callable[..., None], read: Callable[..., Kafka]) -> None:
    produce(topic, [{"n": n} for n in range(4)], timestamp=1_700_000_000_000)
    produce(topic, [{"n": n} for n in range(4, 8)], timestamp=1_750_000_000_000)

    def begins(start: Any) -> list[int]:
        return [split.data["start"] for split in read(topic, schema="n long", start=start).as_source().discover()]

    assert begins("earliest") == [0, 0]
    assert begins("latest") == [4, 4]
    assert begins(dt.datetime(2025, 1, 1, tzinfo=dt.UTC)) == [2, 2]
    assert begins(dt.datetime(2100, 1, 1, tzinfo=dt.UTC)) == [4, 4]
    assert begins({topic: {1: 3}}) == [0, 3]
    with pytest.raises(BuildError, match=f"{topic}-7"):
        begins({topic: {7: 3}})


def test_partitions_that_come_later_begin_at_their_first_message(
    broker: Broker, topic: str, produce: Callable[..., None], read: Callable[..., Kafka]
) -> None:
    produce(topic, [{"n": n} for n in range(4)])
    source = read(topic, schema="n long", start="latest").as_source()
    before = source.discover()
    admin = broker.admin
    admin.create_partitions([client.admin.NewPartitions(topic, 3)])[topic].result(30)
    time.sleep(0.5)
    produce(topic, [{"n": 9}], partition=2)
    later = source.discover()
    assert later[:2] == before
    assert (later[2].id, later[2].data["start"]) == (f"{topic}-2", 0)
    # A driver that begins anew resolves "latest" anew; what the snapshot does not know begins at its first message.
    fresh: Source = read(topic, schema="n long", start="latest").as_source()
    listed = fresh.discover()
    assert listed[2].data["start"] == 1
    goes_on = SourceHooks(fresh).goes_on({split.id: split.data for split in before}, listed)
    assert [split.data["start"] for split in goes_on] == [2, 2, 0]
    assert fresh.discover() == goes_on


def test_a_topic_made_anew_is_another_one(
    broker: Broker, topic: str, produce: Callable[..., None], read: Callable[..., Kafka]
) -> None:
    source = read(topic, schema="n long").as_source()
    before = source.discover()
    broker.delete_topic(topic)
    time.sleep(1)
    broker.create_topic(topic, 2)
    time.sleep(1)
    with pytest.raises(DataError, match="deleted and made again"):
        source.discover()
    fresh = read(topic, schema="n long").as_source()
    with pytest.raises(DataError, match="deleted and made again"):
        fresh.goes_on({split.id: split.data for split in before}, fresh.discover())


def test_an_offset_that_is_gone(
    either_client: str, broker: Broker, topic: str, produce: Callable[..., None], read: Callable[..., Kafka]
) -> None:
    produce(topic, [{"n": n} for n in range(10)], partition=0)
    admin = broker.admin
    admin.delete_records([client.TopicPartition(topic, 0, 6)])
    time.sleep(1)
    source = read(topic, schema="n long", until="latest").as_source()
    with pytest.raises(DataError, match=rf"{topic}-0: offset 2 is not there.*") as raised:
        rows_of(source, {f"{topic}-0": 2})
    assert "on_lost='earliest'" in str(raised.value)
    knowing = read(topic, schema="n long", until="latest", on_lost="earliest").as_source()
    assert [row["n"] for row in rows_of(knowing, {f"{topic}-0": 2})] == [6, 7, 8, 9]


def test_topics_by_a_pattern(
    broker: Broker, topic: str, produce: Callable[..., None], read: Callable[..., Kafka]
) -> None:
    broker.create_topic(f"{topic}.a", 1)
    source = read(topic_pattern=rf"{topic}\..*", schema="n long").as_source()
    assert [split.id for split in source.discover()] == [f"{topic}.a-0"]
    broker.create_topic(f"{topic}.b", 1)
    time.sleep(0.5)
    assert [split.id for split in source.discover()] == [f"{topic}.a-0", f"{topic}.b-0"]


def test_a_topic_that_a_pattern_finds_later_begins_at_its_first_message(
    broker: Broker, topic: str, produce: Callable[..., None], read: Callable[..., Kafka]
) -> None:
    source = read(topic_pattern=rf"{topic}\.late", schema="n long", start="latest").as_source()
    assert source.discover() == []
    broker.create_topic(f"{topic}.late", 2)
    time.sleep(0.5)
    produce(f"{topic}.late", [{"n": 1}])
    assert [split.data["start"] for split in source.discover()] == [0, 0]


def test_a_look_for_partitions_waits_as_long_as_readers_do(
    broker: Broker, topic: str, read: Callable[..., Kafka], monkeypatch: pytest.MonkeyPatch
) -> None:
    from cutwater.connectors.kafka import source as source_module
    from cutwater.connectors.kafka import topics

    monkeypatch.setattr(topics, "_TIMEOUT_S", 1.0)
    source = read(topic, schema="n long").as_source()
    before = source.discover()
    broker.pause()
    try:
        assert source.discover() == before
        with pytest.raises(StorageError):
            read(topic, schema="n long").as_source().discover()  # nothing is known yet
        monkeypatch.setattr(source_module, "PATIENCE_S", 0.0)
        with pytest.raises(StorageError):
            source.discover()
    finally:
        broker.go_on()


def test_what_is_wrong_is_said(topic: str, read: Callable[..., Kafka], monkeypatch: pytest.MonkeyPatch) -> None:
    from cutwater.connectors.kafka import topics
    from cutwater.connectors.kafka.kafka import kafka

    with pytest.raises(BuildError, match="kafka topic 'nowhere'"):
        read("nowhere", schema="n long").as_source().discover()
    monkeypatch.setattr(topics, "_TIMEOUT_S", 2.0)
    with pytest.raises(StorageError, match=r"127.0.0.1:1 does not answer.*refused"):
        kafka("127.0.0.1:1", topic, schema="n long").as_source().discover()
    with pytest.raises(ConfigError, match=r"no\.such\.option"):
        kafka("127.0.0.1:1", topic, schema="n long", options={"no.such.option": 1}).as_source().discover()
    with pytest.raises(BuildError, match="need a schema"):
        read(topic).as_source()
    with pytest.raises(BuildError, match="comes twice"):
        read(topic, schema="key string", metadata=["key"]).as_source()
    with pytest.raises(ConfigError, match="no option 'key'"):
        read(topic, schema="n long", key="n").as_source()
    with pytest.raises(ConfigError, match="messages have no 'ofset'"):
        read(topic, schema="n long", metadata=["ofset"]).as_source()
    with pytest.raises(ConfigError, match="needs a zone"):
        read(topic, schema="n long", start=dt.datetime(2026, 1, 1)).as_source()
