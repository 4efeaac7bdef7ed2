"""The console sink: what it shows, what it leaves out, what it says of itself."""

from __future__ import annotations

import logging
from pathlib import Path

import pyarrow as pa
import pytest
from sink_identity import SCHEMA, Identity, numbers

import cutwater as cw
from cutwater.connectors.console import CONSOLE_LOGGER, show_rows
from cutwater.errors import ConfigError


def test_the_first_rows_of_each_checkpoint_are_shown_and_the_others_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, CONSOLE_LOGGER)
    writer = cw.console(rows=3).writer(SCHEMA, Identity(subtask=1), [])
    for batch in (numbers(1, 2), numbers(30, 4, 5)):
        writer.write(batch)
    first = writer.pre_commit(7, False)
    writer.write(numbers(6))
    second = writer.pre_commit(8, True)
    assert caplog.messages == [], "nothing is written in the loop's thread"
    made = first()
    assert (made.handles, made.state) == ([], None)
    second()
    assert caplog.messages == [
        "-- out, subtask 1, checkpoint 7: 5 rows, the first 3\n n\n--\n 1\n 2\n30",
        "-- out, subtask 1, checkpoint 8: 1 row\nn\n-\n6",
    ]
    writer.pre_commit(9, False)()
    writer.close()
    assert len(caplog.messages) == 2, "a checkpoint without rows shows nothing"


def test_without_checkpoints_rows_are_shown_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, CONSOLE_LOGGER)
    writer = cw.console().writer(SCHEMA, Identity(), [])
    writer.write(numbers(1))
    writer.close()
    assert caplog.messages == ["-- out, subtask 0, at the end: 1 row\nn\n-\n1"]


def test_values_are_shown_in_one_line_each() -> None:
    rows = [{"a": "x\ny", "b": [1, 2]}, {"a": "z" * 100, "b": None}]
    assert show_rows(["a", "b"], rows).splitlines() == [
        "a" + " " * 59 + " | b",
        "-" * 60 + "-+-" + "-" * 6,
        "x\\ny" + " " * 56 + " | [1, 2]",
        "z" * 57 + "... | null",
    ]


def test_a_value_that_python_cannot_hold_is_shown_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, CONSOLE_LOGGER)
    schema = pa.schema({"t": pa.timestamp("us")})
    writer = cw.console().writer(schema, Identity(), [])
    writer.write(pa.RecordBatch.from_arrays([pa.array([2**62], schema.field("t").type)], schema=schema))
    writer.pre_commit(1, False)()
    assert "4611686018427387904 as timestamp[us]" in caplog.messages[0]


def test_it_says_that_it_shows_rows_at_least_once(tmp_path: Path) -> None:
    flow = cw.Dataflow("shown")
    flow.read("in", cw.memory([{"n": 1}])).write("show", cw.console())
    assert "output  show: at-least-once" in flow.explain(protocol="aligned")
    flow = cw.Dataflow("refused")
    flow.read("in", cw.memory([{"n": 1}])).foreach_batch("each", lambda rows, id: None, idempotent=False)
    assert "refused" in flow.explain(protocol="aligned"), "other sinks that repeat rows are refused"
    with pytest.raises(ConfigError, match="rows must be at least 1"):
        cw.console(rows=0)
