"""The commands that look into state, on savepoints of known content."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner

import cutwater as cw
from cutwater.errors import ConfigError
from cutwater.ui.cli import cli


def run(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(cli, list(arguments))
    if isinstance(done.exception, cw.CutwaterError):
        raise done.exception
    assert done.exit_code == code, done.output
    return done.output


class Kept(cw.ProcessFunction):
    latest = cw.MapState("string", "timestamp")

    def process(self, row, ctx):
        return iter(())


def savepoint(folder: Path, counts: dict[str, tuple[int, float]], latest: dict[str, list] | None = None) -> str:
    flow = cw.Dataflow("job")
    keyed = flow.read("in", cw.memory([], schema="k string, v double")).key_by("k")
    keyed.aggregate("counts", n=cw.count(), most=cw.max("v")).write("a", cw.discard())
    keyed.process("logic", Kept(), "k string").write("b", cw.discard())
    table = pa.table({"k": list(counts), "n": [n for n, _ in counts.values()], "most": [m for _, m in counts.values()]})
    kind = pa.map_(pa.string(), pa.timestamp("us", "UTC"))
    values = pa.table(
        {"k": pa.array(list(latest or {}), pa.string()), "value": pa.array((latest or {}).values(), kind)}
    )
    return cw.write_savepoint(folder, {"counts": table, "logic.latest": values}, flow=flow)


@pytest.fixture
def first(tmp_path: Path) -> str:
    return savepoint(tmp_path / "first", {"JFK": (3, 1.5), "LGA": (2, 7.0), "EWR": (1, float("nan"))})


@pytest.fixture
def second(tmp_path: Path) -> str:
    counts = {"JFK": (5, 2.5), "EWR": (1, float("nan")), "BOS": (9, 0.0)}
    return savepoint(tmp_path / "second", counts, {"JFK": [("a", 0)]})


def test_states_lists_tables_with_their_columns(first: str) -> None:
    lines = run("states", first).splitlines()
    assert lines[0].split() == ["step", "state", "kind", "stored", "rows", "size", "columns"]
    assert lines[1].split()[:4] == ["counts", "aggregates", "aggregate", "3"]
    assert "k string, n int64, most double, key_group int32" in lines[1]
    (counts, latest) = json.loads(run("states", first, "--json"))
    assert (counts["columns"]["most"], counts["keys"], counts["stored_rows"]) == ("double", ["k"], 3)
    assert (latest["step"], latest["state"]) == ("logic", "latest")


def test_state_shows_rows_in_each_format(first: str, second: str) -> None:
    table = run("state", first, "counts", "--columns", "k,n").splitlines()
    assert sorted(table[1:4]) == ["EWR  1", "JFK  3", "LGA  2"]
    assert table[-1] == "3 rows"
    assert run("state", first, "counts", "--limit", "1").splitlines()[-1] == "1 row"
    lines = run("state", first, "counts", "--columns", "k,n", "--format", "json").splitlines()
    assert sorted(json.loads(line)["n"] for line in lines) == [1, 2, 3]
    assert "LGA,2,7.0" in run("state", first, "counts", "--columns", "k,n,most", "--format", "csv").splitlines()
    one = run("state", second, "logic", "--format", "json").splitlines()
    assert json.loads(one[0])["value"] == [["a", "1970-01-01T00:00:00+00:00"]]


def test_state_finds_a_key_and_answers_sql(first: str) -> None:
    found = run("state", first, "counts", "--key", "k=LGA", "--format", "json").splitlines()
    assert [json.loads(line)["n"] for line in found] == [2]
    query = "SELECT count(*) AS keys, sum(n) AS total FROM state WHERE most < 100"
    assert run("state", first, "counts.aggregates", "--sql", query, "--format", "csv").splitlines() == [
        "keys,total",
        "2,5",
    ]


def test_diff_tells_what_changed_and_exits_with_1(first: str, second: str) -> None:
    lines = run("diff", first, second, code=1).splitlines()
    assert sorted(lines[:-2]) == [
        "+ counts.aggregates k=BOS  n: 9, most: 0.0",
        "+ logic.latest k=JFK  value: " + '{"a": "1970-01-01T00:00:00+00:00"}',
        "- counts.aggregates k=LGA  n: 2, most: 7.0",
        "~ counts.aggregates k=JFK  n: 3 -> 5, most: 1.5 -> 2.5",
    ]
    assert lines[-2:] == ["counts.aggregates: 1 added, 1 removed, 1 changed", "logic.latest: 1 added"]
    found = [json.loads(line) for line in run("diff", first, second, "counts", "--json", code=1).splitlines()]
    changed = next(d for d in found if d["change"] == "changed")
    assert changed["key"] == {"k": "JFK"}
    assert (changed["before"]["n"], changed["after"]["n"]) == (3, 5)
    assert run("diff", first, second, "--limit", "1", code=1).splitlines()[1] == "... 3 more"


def test_a_snapshot_does_not_differ_from_itself(first: str) -> None:
    assert run("diff", first, first) == "no difference\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("state", "HERE", "count"), "There are: counts.aggregates, logic.latest"),
        (("state", "HERE", "counts", "--sql", "SELECT x FROM state"), "the query fails"),
        (("state", "HERE", "counts", "--key", "n=1"), r"Its key is \(k\)"),
        (("state", "HERE", "counts", "--key", "x=1"), "names no column"),
        (("diff", "HERE", "HERE", "count"), "no state 'count'"),
    ],
)
def test_a_wrong_word_is_told_with_the_right_ones(arguments: tuple[str, ...], says: str, first: str) -> None:
    with pytest.raises(ConfigError, match=says):
        run(*(a.replace("HERE", first) for a in arguments))
