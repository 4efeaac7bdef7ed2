"""A broker that demands TLS and a password: both ends pass them on, and nobody sees the password."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark import cloudpickle
from servers.kafka import PASSWORD, USER, Broker
from test_kafka_sink import SCHEMA, Identity, batch
from test_kafka_source import rows_of

from cutwater.connectors.kafka import topics
from cutwater.connectors.kafka.kafka import Kafka, kafka
from cutwater.errors import ConfigError, StorageError


@pytest.fixture(scope="module")
def secured() -> Iterator[Broker]:
    with Broker(secured=True) as broker:
        broker.create_topic("closed", 2)
        yield broker


@pytest.fixture(autouse=True)
def the_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA_PASSWORD", PASSWORD)
    monkeypatch.setattr(topics, "_TIMEOUT_S", 3.0)


def closed(broker: Broker, **more: Any) -> Kafka:
    options = {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "PLAIN",
        "sasl.username": USER,
        "sasl.password": "env:KAFKA_PASSWORD",
        "ssl.ca.location": str(broker.authority),
    }
    return kafka(broker.secured, "closed", **{"options": options, **more})


def test_rows_go_in_and_out(secured: Broker, tmp_path: Path) -> None:
    sink = closed(secured).as_sink().bind(str(tmp_path))
    sink.check(SCHEMA)
    writer = sink.writer(SCHEMA, Identity(0, 1), [])
    writer.write(batch(1, 2))
    sink.committer(SCHEMA, "c0ffee", "out").commit(1, writer.pre_commit(1, False)().handles)
    writer.close()
    source = closed(secured, schema="row long", until="latest").as_source()
    assert sorted(row["row"] for row in rows_of(source)) == [1, 2]


def test_the_password_is_in_no_plan_and_no_message(
    secured: Broker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source, sink = closed(secured, schema="row long").as_source(), closed(secured).as_sink()
    for value in (source, sink):
        assert PASSWORD.encode() not in cloudpickle.dumps(value)
        assert PASSWORD not in repr(value)
    monkeypatch.setenv("KAFKA_PASSWORD", "wrong-word")
    with pytest.raises(StorageError, match="Authentication failed") as refused:
        source.discover()
    assert "wrong-word" not in str(refused.value)
    monkeypatch.delenv("KAFKA_PASSWORD")
    with pytest.raises(ConfigError, match="no variable 'KAFKA_PASSWORD' here"):
        closed(secured, schema="row long").as_source().discover()
    (tmp_path / "password").write_text(f"{PASSWORD}\n")
    by_file = dict(source._cluster.options) | {"sasl.password": f"file:{tmp_path}/password"}
    assert len(kafka(secured.secured, "closed", schema="row long", options=by_file).as_source().discover()) == 2
    with pytest.raises(ConfigError, match="holds a secret"):
        kafka(secured.secured, "closed", options={"sasl.password": PASSWORD})


def test_without_tls_nothing_is_said(secured: Broker) -> None:
    with pytest.raises(StorageError, match="does not answer"):
        kafka(secured.secured, "closed", schema="row long").as_source().discover()


def test_a_reader_that_is_refused_fails(secured: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    source = closed(secured, schema="row long").as_source()
    splits = source.discover()
    monkeypatch.setenv("KAFKA_PASSWORD", "wrong-word")
    with pytest.raises(StorageError, match="refuses the connection") as refused:
        rows_of(_Fixed(source, splits))
    assert "wrong-word" not in str(refused.value)


class _Fixed:
    """A source whose splits are known."""

    def __init__(self, source: Any, splits: Any) -> None:
        self._source, self._splits = source, [type(s)(s.id, {**s.data, "start": 0, "end": 9}) for s in splits]

    def discover(self) -> Any:
        return self._splits

    def open(self, *arguments: Any) -> Any:
        return self._source.open(*arguments)
