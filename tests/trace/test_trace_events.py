"""Traces as lines: nothing is lost on the way, and what is no trace is named."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import cutwater.trace
from cutwater.errors import DataError, FormatVersionError
from cutwater.trace.events import (
    Aborted,
    Committed,
    Completed,
    Crashed,
    Cut,
    Header,
    Link,
    MarkerSent,
    MarkerTaken,
    Recorded,
    Restored,
    Span,
    Step,
    Survived,
    Trace,
    decode,
    encode,
    read_trace,
    write_trace,
)

HEADER = Header(("p", "q"), (Link("c", "p", "q"), Link("d", "q", "p")), fifo=False, title="a title")
EVENTS = (
    Step(0.5, "p", 1, takes=(Span("d", 0, 3),), sends=(Span("c", 7, 2, ("a", "b")),), before="s", after="s'"),
    Cut(1.0, "p", 1, 4, "state"),
    MarkerSent(1.5, "p", 1, 4, "c", 9),
    MarkerTaken(2.0, "q", 1, 4, "c", 9),
    Recorded(2.5, "q", 1, 4, "c", (Span("c", 7, 2),)),
    Completed(3.0, "coordinator", 1, 4),
    Aborted(3.5, "coordinator", 1, 5),
    Crashed(4.0, "p", 1),
    Restored(4.5, "p", 2, None),
    Survived(4.5, "q", 2),
    Committed(5.0, "q", 2, 4, ("x",)),
)


def test_every_kind_of_event_comes_back_as_it_was(tmp_path):
    path = tmp_path / "run.trace"
    write_trace(path, Trace(HEADER, EVENTS))
    assert read_trace(path) == Trace(HEADER, EVENTS)
    assert path.read_text().count("\n") == 1 + len(EVENTS)


def test_a_torn_line_is_named():
    text = b"".join(map(encode, (HEADER, *EVENTS)))[:-9]
    with pytest.raises(DataError, match=r"run\.trace, line 12"):
        decode(text, "run.trace")


def test_another_version_is_refused_by_its_number():
    text = encode(HEADER).replace(b'"format":1', b'"format":2')
    with pytest.raises(FormatVersionError, match="format 2"):
        decode(text)


@pytest.mark.parametrize(
    "records",
    [(), EVENTS[:1], (HEADER, HEADER)],
    ids=["nothing", "no header", "two headers"],
)
def test_a_file_that_is_no_trace_is_refused(records):
    with pytest.raises(DataError, match="header"):
        decode(b"".join(map(encode, records)))


def test_a_missing_file_is_an_error_of_ours(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        read_trace(tmp_path / "none")


@pytest.mark.parametrize(
    ("processes", "channels"),
    [(("p", "p"), ()), (("p", "q"), (Link("c", "p", "q"),) * 2), (("p",), (Link("c", "p", "q"),))],
)
def test_names_of_a_header_mean_one_thing(processes, channels):
    with pytest.raises(DataError):
        Header(processes, channels)


@pytest.mark.parametrize("name", [m.name for m in pkgutil.iter_modules(cutwater.trace.__path__)])
def test_examples_in_docstrings(name):
    module = importlib.import_module(f"cutwater.trace.{name}")
    assert doctest.testmod(module).failed == 0
