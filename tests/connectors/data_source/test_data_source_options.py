"""What ``cw.data_source`` is given: which reader it becomes, what it refuses, and where secrets are."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from pyspark import cloudpickle
from pyspark.sql.datasource import DataSource

import cutwater as cw
from cutwater.connectors.data_source.batch_source import BatchDataSource
from cutwater.connectors.data_source.hosted import Hosted
from cutwater.connectors.data_source.simple_source import SimpleDataSource
from cutwater.connectors.data_source.stream_source import StreamDataSource
from cutwater.errors import BuildError, ConfigError, UserCodeError
from data_source_world import Files, Numbers, Simple, Ticks


class Both(Numbers, Ticks):
    """A batch and a stream."""


class Fails(DataSource):
    def __init__(self, options: Any) -> None:
        super().__init__(options)
        raise ValueError(f"cannot log in with {options['password']}")

    def schema(self) -> str:
        return "id long"

    def reader(self, schema: Any) -> Any:
        raise AssertionError


class NoSchema(Numbers):
    def schema(self) -> str:
        raise LookupError("nothing there to look at")


@pytest.mark.parametrize(
    ("cls", "options", "kind"),
    [
        (Numbers, {}, BatchDataSource),
        (Ticks, {}, StreamDataSource),
        (Simple, {"replayable": True}, SimpleDataSource),
        (Both, {"stream": True}, StreamDataSource),
        (Both, {"stream": False}, BatchDataSource),
    ],
)
def test_which_reader_it_becomes(cls: Any, options: dict[str, Any], kind: type) -> None:
    source = cw.data_source(cls, **options).as_source()
    assert type(source) is kind
    assert source.schema.names == ["id", "text"]
    assert source.repeats is (kind is not StreamDataSource)
    assert "Seal" not in repr(cloudpickle.loads(cloudpickle.dumps(source)))


@pytest.mark.parametrize(
    ("cls", "options", "error", "says"),
    [
        (Both, {}, BuildError, r"stream=True\), or False"),
        (Ticks, {"stream": False}, BuildError, r"Ticks has no reader\(\)"),
        (Numbers, {"stream": True}, BuildError, r"Numbers has no streamReader\(\) or simpleStreamReader\(\)"),
        (Files, {}, BuildError, r"Files has no reader\(\)"),
        (Numbers, {"until": "latest"}, ConfigError, "until is for streams"),
        (Ticks, {"until": "now"}, ConfigError, "until is 'latest' or None"),
        (Ticks, {"splits": 0}, ConfigError, "splits must be at least 1"),
        (Numbers, {"rate": -1}, BuildError, "a rate is a number"),
        (Numbers, {"idempotent": False}, ConfigError, "as a source has no option 'idempotent'"),
        (NoSchema, {}, BuildError, r"(?s)NoSchema: schema\(\) failed.*nothing there.*schema='id long'"),
        (Numbers, {"schema": "id lnog"}, BuildError, "unknown type 'lnog'"),
    ],
)
def test_what_is_refused_as_a_source(cls: Any, options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        cw.data_source(cls, **options).as_source()


def test_what_is_refused_as_a_sink() -> None:
    with pytest.raises(ConfigError, match="as a sink has no option 'replayable'"):
        cw.data_source(Files, replayable=True).as_sink()
    with pytest.raises(ConfigError, match="parallelism must be at least 1"):
        cw.data_source(Files, parallelism=0).as_sink()
    sink = cw.data_source(Numbers).as_sink()
    with pytest.raises(BuildError, match=r"Numbers has no streamWriter\(\)"):
        sink.check(cw.data_source(Numbers).as_source().schema)
    assert cw.data_source(Files).as_sink().guarantee == "exactly-once"
    assert cw.data_source(Files, idempotent=False).as_sink().guarantee == "at-least-once"


def test_other_arguments() -> None:
    with pytest.raises(ConfigError, match=r"has no option 'optoins'. Did you mean 'options'"):
        cw.data_source(Numbers, optoins={})  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="str is no DataSource of PySpark"):
        cw.data_source("numbers")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="an instance of Numbers has its options already"):
        cw.data_source(Numbers({}), options={"a": 1})
    assert cw.data_source(Numbers({"count": "5"})).as_source().planned().partitions
    options = cw.data_source(Numbers, options={"Path": Path("/x"), "n": 1, "on": True}).hosted.made().options
    assert (options["PATH"], options["N"], options["oN"]) == ("/x", "1", "true")


def test_a_secret_is_where_it_is_said_to_be_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA_SOURCE_PASSWORD", "hunter2")
    with pytest.raises(ConfigError, match="holds a secret, which must not travel"):
        cw.data_source(Numbers, secrets={"password": "hunter2"})
    hosted = Hosted(Numbers, {"count": "3"}, {"password": "env:DATA_SOURCE_PASSWORD"})
    assert hosted.made().options["password"] == "hunter2"
    source = BatchDataSource(hosted, None, repeats=True, rate=None, discover_interval_ms=100)
    shipped = cloudpickle.dumps(source)
    plan = source.planned()  # with the reader, which holds the options
    assert b"hunter2" not in shipped
    assert b"hunter2" not in pickle.dumps((plan.reader, plan.partitions))
    assert "hunter2" not in repr(hosted.made().options)
    with pytest.raises(UserCodeError, match=r"cannot log in with \*\*\*") as raised:
        Hosted(Fails, {}, {"password": "env:DATA_SOURCE_PASSWORD"}).made()
    assert "hunter2" not in str(raised.value)
    monkeypatch.delenv("DATA_SOURCE_PASSWORD")
    with pytest.raises(ConfigError, match="no variable 'DATA_SOURCE_PASSWORD'"):
        hosted.made()
