"""Faults as data: each happens where it stands and as often as it says, over process deaths too."""

from __future__ import annotations

import multiprocessing
import signal
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

from cutwater.connectors.memory import BAD, END, FAIL, KILL, PAUSE, MemorySource, memory
from cutwater.errors import BuildError, DataError


class Context:
    step, subtask = "read", 0

    def __init__(self) -> None:
        self.dead: list[tuple[str, int, str, str]] = []

    def dead_letter(self, origin: str, position: int, reason: str, raw: str) -> None:
        self.dead.append((origin, position, reason, raw))


def drain(source: MemorySource, position: Any = None, ctx: Context | None = None) -> list[Any]:
    reader = source.open(source.discover()[0], position, ctx or Context())
    rows: list[Any] = []
    while not reader.exhausted:
        batch = reader.read(2)
        rows += batch.to_pylist() if batch is not None else []
    return rows


def test_a_pause_gives_nothing_and_does_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("cutwater.connectors.memory.time.monotonic", lambda: now[0])
    reader = memory([{"k": 1}, PAUSE(5.0), {"k": 2}]).open(memory([{"k": 1}]).discover()[0], None, Context())
    assert reader.read(9) is not None
    assert reader.read(9) is None
    now[0] += 4.9
    assert reader.read(9) is None
    assert not reader.exhausted
    now[0] += 0.2
    batch = reader.read(9)
    assert batch is not None
    assert batch.to_pylist() == [{"k": 2}]


def test_a_failure_happens_as_often_as_it_says_and_is_then_passed_over(tmp_path: Path) -> None:
    source = memory([{"k": 1}, FAIL("boom", times=2, marker=str(tmp_path / "boom")), {"k": 2}])
    for _ in range(2):
        with pytest.raises(DataError, match="memory-0, item 1: boom"):
            drain(source)
    assert drain(source) == [{"k": 1}, {"k": 2}]


def test_a_failure_without_marker_happens_always() -> None:
    source = memory([{"k": 1}, FAIL("boom")])
    for _ in range(3):
        with pytest.raises(DataError, match="boom"):
            drain(source)


def test_a_kill_takes_the_process_once(tmp_path: Path) -> None:
    source = memory([{"k": 1}, KILL(str(tmp_path / "kill")), {"k": 2}])
    victim = multiprocessing.get_context("fork").Process(target=drain, args=(source,))
    victim.start()
    victim.join()
    assert victim.exitcode == -signal.SIGKILL
    assert drain(source) == [{"k": 1}, {"k": 2}]


def test_a_bad_row_fails_or_goes_to_the_dead_letters() -> None:
    source = memory([{"k": 1}, BAD("k=?", "no number"), {"k": 2}])
    with pytest.raises(DataError, match=r"item 1: no number: k=\?"):
        drain(source)
    ctx = Context()
    assert drain(source.with_bad_rows("dead_letter"), None, ctx) == [{"k": 1}, {"k": 2}]
    assert ctx.dead == [("memory-0", 1, "no number", "k=?")]


def test_what_follows_the_end_is_never_read() -> None:
    assert drain(memory([{"k": 1}, END(), {"k": 2}])) == [{"k": 1}]


def test_rows_batches_and_tables_may_be_mixed() -> None:
    table = pa.table({"k": pa.array([2, 3], pa.int64())})
    source = memory([{"k": 1}, table, table.to_batches()[0], {"k": None}])
    assert [row["k"] for row in drain(source)] == [1, 2, 3, 2, 3, None]


@pytest.mark.parametrize(
    ("items", "schema", "message"),
    [
        ([], None, "no rows to take a schema from"),
        ([{"k": 1}, {"k": "x"}], None, "no common schema"),
        ([{"k": 1, "v": 2}], "k long", "column 'v' is not in the schema"),
        ([{"k": "x"}], "k long", "does not fit"),
        ([pa.record_batch({"k": ["x"]})], "k long", "column 'k' is string instead of int64"),
        ([pa.record_batch({"v": [1]})], "k long", "column 'k' is missing; column 'v' is new"),
        ([7], "k long", "not int"),
    ],
)
def test_wrong_items_are_refused_at_once(items: list[Any], schema: str | None, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        memory(items, schema=schema)


@pytest.mark.parametrize(
    ("items", "schema", "words"),
    [
        ([{"k": 1, "v": 1.5}, {"k": 2, "v": "z"}], None, ["split 1, row 1, column 'v'", "str 'z'", "float 1.5"]),
        ([{"k": 1, "v": 1}, {"k": 2, "v": "z"}], "k long, v long", ["split 1, row 1, column 'v'", "'z'", "int64"]),
        ([{"k": 1}, PAUSE(0.1), {"k": 2**40}], "k int", ["split 1, row 2, column 'k'", "int32"]),
        ([{"k": 1}, {"k": None}], "k long not null", ["split 1, row 1, column 'k'", "not null"]),
        ([{"k": 1}, {}], "k long not null", ["split 1, row 1, column 'k'", "not null"]),
        ([{"at": datetime(2026, 1, 1, tzinfo=UTC)}], "at timestamp_ntz", ["column 'at'", "with a zone", "timestamp"]),
    ],
)
def test_a_value_that_does_not_fit_is_named_with_split_row_and_column(items, schema, words) -> None:
    first = [dict.fromkeys(items[0])] if schema and "not null" not in schema else []
    with pytest.raises(BuildError) as caught:
        memory(first, items, schema=schema)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("given", [{"k": 1}, pa.table({"k": [1]}), "rows", pl.DataFrame({"k": [1]})])
def test_what_is_no_list_of_rows_is_refused_with_what_to_write(given) -> None:
    with pytest.raises(BuildError, match=r"the list of one split's rows, not a .*Write cw.memory\(\["):
        memory(given)
