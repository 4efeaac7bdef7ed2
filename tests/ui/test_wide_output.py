"""What has many columns or long texts, on a terminal of a certain width and in a file."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutwater.data import text
from cutwater.data.text import lines_of_table
from cutwater.ui import inspect as inspect_module
from cutwater.ui import states as states_module
from cutwater.ui.inspect import render_inspect


def snapshot(files: int) -> dict[str, Any]:
    """What is inspected: one source that has read some of its files."""
    splits = [
        {"split": f"in/flights-2026-{n:05}.parquet", "position": 100 * n, "max_time": None, "done": n % 5 > 0}
        for n in range(files)
    ]
    subtask = {"vertex": 0, "watermark": None, "finished": False, "handles": {}}
    return {
        "job": "flights",
        "savepoint": False,
        "final": False,
        "checkpoint_id": 7,
        "protocol": "aligned",
        "attempt": 1,
        "parallelism": 2,
        "max_parallelism": 128,
        "completed": "2026-11-23T09:39:16.921+00:00",
        "duration_ms": 25,
        "bytes": 864,
        "files": 0,
        "older_files": 0,
        "retained": [7],
        "outcome": "",
        "reason": "",
        "steps": [{"id": "in", "kind": "read", "parallelism": 2, "rows": 0, "bytes": 0, "states": []}],
        "subtasks": [{**subtask, "subtask": i, "positions": {"in": splits[i::2]}} for i in range(2)],
    }


def test_inspect_shows_each_file_on_a_line_of_its_own_those_that_are_read_first() -> None:
    lines = render_inspect(snapshot(25)).splitlines()
    assert max(map(len, lines)) < 80
    at = lines.index("split of in                    position  newest time  subtask")
    rows = [line.split() for line in lines[at + 1 :]]
    assert [r[0] for r in rows[:5]] == [f"in/flights-2026-{n:05}.parquet" for n in (0, 5, 10, 15, 20)]
    assert rows[1][1:] == ["500", "-", "0.1"]
    assert {r[1] for r in rows[5:]} == {"done"}
    assert len(rows) == 25
    assert "0.0      -          in: 13 splits, 10 done  -" in lines


def test_inspect_of_very_many_files_shows_some_and_counts_the_others() -> None:
    lines = render_inspect(snapshot(10_000)).splitlines()
    assert len(lines) < 70
    assert lines[-1] == "... 9,960 splits more (--json shows all)"


def test_inspect_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect_module, "shown_width", lambda: 60)
    lines = render_inspect(snapshot(3)).splitlines()
    assert max(map(len, lines)) <= 60
    assert "".join(line.split()[0] for line in lines[-6:]).count("parquet") == 3


def test_a_file_has_no_width_and_a_terminal_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: shutil.os.terminal_size((72, 20)))
    assert text.shown_width() is None
    monkeypatch.setattr("sys.stdout", type("Terminal", (), {"isatty": lambda self: True})())
    assert text.shown_width() == 72


words = st.text("abcdefgh ,_", max_size=40).map(str.strip)


@given(st.lists(st.tuples(words, words, words), max_size=5), st.integers(45, 200))
def test_a_table_keeps_to_its_width_and_loses_nothing(rows: list[tuple[str, str, str]], width: int) -> None:
    """As far as every column has twelve characters."""
    head = ["one", "two", "three"]
    lines = lines_of_table(head, rows, width=width)
    assert max(map(len, lines)) <= width
    letters = sorted(c for cell in (*head, *(c for row in rows for c in row)) for c in cell if c != " ")
    assert sorted(c for line in lines for c in line if c != " ") == letters


def test_numbers_are_never_folded() -> None:
    lines = lines_of_table(["state", "rows"], [["a " * 40, "1,234,567,890"]], right=[1], width=30)
    assert lines[1].endswith("1,234,567,890")
    assert max(map(len, lines)) <= 30


def test_rows_of_too_many_columns_become_tables_of_their_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"column_{n}" for n in range(30)]
    rows = [{name: f"value {n} of row {row}" for n, name in enumerate(names)} for row in range(2)]
    monkeypatch.setattr(states_module, "shown_width", lambda: 80)
    states_module._print_table(names, rows, iter(()), False)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[:2] == ["column     value", "column_0   value 0 of row 0"]
    assert lines[32] == "column     value"
    assert lines[-1] == "2 rows"
