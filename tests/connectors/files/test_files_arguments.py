"""The arguments of ``cw.files``: those of the source, the sink and the formats, no more and no fewer."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from datetime import timedelta

import pytest

import cutwater as cw
from cutwater.connectors.files.part_formats import PART_FORMATS
from cutwater.connectors.files.sink import FileSink
from cutwater.connectors.files.source import FileSource
from cutwater.errors import ConfigError

ARGUMENTS = {n: p for n, p in inspect.signature(cw.files).parameters.items() if p.kind is p.KEYWORD_ONLY}
OF_SOURCE = {n: p for n, p in inspect.signature(FileSource).parameters.items() if n != "path"}
OF_SINK = {f.name: f for f in dataclasses.fields(FileSink) if f.name not in ("path", "parts", "guard")}
OF_FORMATS = {n: p for make in PART_FORMATS.values() for n, p in inspect.signature(make).parameters.items()}


def test_they_are_those_of_source_sink_and_formats():
    assert set(ARGUMENTS) == set(OF_SOURCE) | set(OF_SINK) | set(OF_FORMATS)


def test_defaults_are_the_same_wherever_they_are_said():
    for name, parameter in OF_SOURCE.items():
        assert ARGUMENTS[name].default == parameter.default, name
    for name, option in OF_SINK.items():
        assert ARGUMENTS[name].default == option.default, name
    assert cw.files("out").as_sink() == FileSink("out")
    assert cw.files("out", format="csv").as_sink().parts == PART_FORMATS["csv"]()


def test_each_has_a_type_and_a_line_of_documentation():
    text = inspect.getdoc(cw.files)
    for name, parameter in ARGUMENTS.items():
        assert parameter.annotation not in (inspect.Parameter.empty, "Any", typing.Any), name
        assert f"\n    {name}: " in text, name


def test_what_is_given_reaches_the_source_and_the_sink(tmp_path):
    source = cw.files(tmp_path, watch=True, rate=5, settle_ms="1 minute", discover_interval_ms=timedelta(seconds=2))
    made = source.as_source()
    assert (made.rate, made.discover_interval_ms, made.bounded) == (5, 2000.0, False)
    assert made._settle_ms == 60_000.0
    sink = cw.files(tmp_path, format="csv", delimiter=";", header=False, roll_rows=7, roll_interval_ms="1m").as_sink()
    assert (sink.roll_rows, sink.roll_interval_ms) == (7, 60_000.0)
    assert (sink.parts.delimiter, sink.parts.header) == (";", False)


@pytest.mark.parametrize(
    ("wrong", "near"),
    [("formt", "format"), ("schemas", "schema"), ("roll_row", "roll_rows"), ("settle", "settle_ms"), ("sep", None)],
)
def test_one_that_there_is_not_is_refused_with_the_nearest_that_there_is(wrong, near):
    with pytest.raises(ConfigError, match=rf"files has no option {wrong!r}") as caught:
        cw.files("in", **{wrong: 1})
    assert "There are: format, header" in caught.value.hint
    assert near is None or f"Did you mean {near!r}?" in caught.value.hint


@pytest.mark.parametrize(
    ("use", "options", "words"),
    [
        ("as_source", {"roll_rows": 5}, "as a source has no option 'roll_rows'. It is for writing"),
        ("as_source", {"compression": "gzip"}, "as a source has no option 'compression'. It is for writing"),
        ("as_sink", {"watch": True}, "as a parquet sink has no option 'watch'. It is for reading"),
        ("as_sink", {"schema": "k long"}, "as a parquet sink has no option 'schema'. It is for reading"),
        (
            "as_sink",
            {"format": "json", "header": False},
            "as a json sink has no option 'header'. It is for other formats",
        ),
    ],
)
def test_one_of_the_other_use_is_refused(use, options, words):
    with pytest.raises(ConfigError, match=words):
        getattr(cw.files("place", **options), use)()
