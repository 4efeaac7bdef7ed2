"""What the plan of a restore says of every step: by pairs of programs, an old one and a new one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest

import cutwater as cw
from cutwater.errors import BuildError, ConfigError
from cutwater.operators.process.states import ValueState
from cutwater.plan.compatibility import check_compatible, compare, edge_records, step_records
from cutwater.plan.graph import PhysicalPlan
from cutwater.plan.planner import make_plan
from cutwater.plan.upgrade import Upgrade, upgrade_of
from cutwater.storage.snapshot.manifest import Entry, Manifest, SplitRecord, SubtaskRecord

SCHEMA = "t timestamp, k long, v int"


class Last(cw.ProcessFunction):
    last = ValueState("int")

    def process(self, row: Any, ctx: Any) -> Iterator[dict[str, Any]]:
        yield row


class Wider(cw.ProcessFunction):
    last = ValueState("long")
    most = ValueState("long")

    def process(self, row: Any, ctx: Any) -> Iterator[dict[str, Any]]:
        yield row


class Renamed(cw.ProcessFunction):
    latest = ValueState("int")

    def process(self, row: Any, ctx: Any) -> Iterator[dict[str, Any]]:
        yield row


def program(
    *,
    read: str = "in",
    filtered: str = "",
    agg: str = "agg",
    key: str = "k",
    schema: str = SCHEMA,
    aggregates: Any = None,
    logic: Any = None,
    logic_id: str = "logic",
    sink: str = "out",
    parallelism: int = 2,
    max_parallelism: int = 128,
    name: str = "job",
) -> PhysicalPlan:
    flow = cw.Dataflow(name)
    rows = flow.read(read, cw.memory([], schema=schema), event_time="t")
    if filtered:
        rows = rows.filter(filtered, pl.col("v") > 0)
    keyed = rows.key_by(key)
    if agg:
        keyed.aggregate(agg, **(aggregates or {"n": cw.count(), "most": cw.max("v")})).write(sink, cw.discard())
    if logic is not None:
        keyed.process(logic_id, logic, schema).write("logic-out", cw.discard())
    return make_plan(flow, parallelism, max_parallelism)


def snapshot(plan: PhysicalPlan, on_edges: int = 0) -> Manifest:
    """A checkpoint with positions, state of 12 rows per step, rows in staging, and perhaps rows on every edge."""
    steps = {s.id: s for s in step_records(plan)}
    source = next(s.id for s in plan.steps.values() if s.role == "source")
    sinks = {s.id: {"n": 1} for s in plan.steps.values() if s.role == "sink"}
    subtask = SubtaskRecord(0, 0, 1, "unaligned", splits={source: [SplitRecord("a", position=5)]}, sinks=sinks)
    entries = [Entry(s.id, 0, "s", "base", 12, 340, "d") for s in steps.values() if s.state is not None]
    entries += [
        Entry(e.target_step, 0, e.name, "channel", on_edges, 8, "d", channel=(e.index, 0, 0)) for e in plan.edges
    ]
    made = Manifest(
        plan.name, "u", 7, 1, "unaligned", plan.max_parallelism, plan.parallelism, 0, 0,
        steps=list(steps.values()), subtasks=[subtask], entries=entries, edges=edge_records(plan),
    )  # fmt: skip
    return msgspec.json.decode(msgspec.json.encode(made), type=Manifest)


# Old program, new program, what is said of the upgrade, verdicts, what the page says besides.
TABLE: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, str], list[str]]] = {
    "nothing": ({}, {}, {}, {"in": "bound", "agg": "bound", "out": "bound"}, []),
    "a filter comes": ({}, {"filtered": "f"}, {}, {"in": "bound", "f": "new", "agg": "bound", "out": "bound"}, []),
    "a filter goes": ({"filtered": "f"}, {}, {}, {"in": "bound", "agg": "bound", "out": "bound", "f": "gone"}, []),
    "a filter is called otherwise": (
        {"filtered": "f"},
        {"filtered": "g"},
        {},
        {"in": "bound", "g": "new", "agg": "bound", "out": "bound", "f": "gone"},
        [],
    ),
    "rescaled": ({}, {"parallelism": 3}, {}, {"in": "bound", "agg": "bound", "out": "bound"}, ["2 -> 3"]),
    "an aggregate comes, one goes": (
        {},
        {"aggregates": {"n": cw.count(), "total": cw.sum("v")}},
        {},
        {"in": "bound", "agg": "changed", "out": "bound"},
        ["most: dropped (max(v))", "total: added (sum(v))"],
    ),
    "wider": (
        {},
        {"schema": "t timestamp, k long, v long"},
        {},
        {"in": "bound", "agg": "changed", "out": "bound"},
        ["most: widened from int32 to int64"],
    ),
    "narrower": (
        {"schema": "t timestamp, k long, v long"},
        {},
        {},
        {"in": "bound", "agg": "refused", "out": "bound"},
        ["NOT POSSIBLE: step 'agg', aggregate 'most': column 'most' was int64 and is int32, which is not wider"],
    ),
    "another key type": (
        {},
        {"schema": "t timestamp, k string, v int"},
        {},
        {"in": "bound", "agg": "refused", "out": "bound"},
        ["column 'k' was int64 and is string"],
    ),
    "another key": (
        {},
        {"key": "v"},
        {},
        {"in": "bound", "agg": "refused", "out": "bound"},
        ["step 'agg' was keyed by (k) and is keyed by (v)"],
    ),
    "renamed, and it did not say so": (
        {},
        {"agg": "counts"},
        {},
        {"in": "bound", "counts": "new", "out": "bound", "agg": "orphaned"},
        ["step 'agg' (aggregate) is gone, its state would be lost", "renamed to 'counts'?", "--map agg=counts"],
    ),
    "renamed": (
        {},
        {"agg": "counts", "read": "rows"},
        {"step_ids": {"agg": "counts", "in": "rows"}},
        {"rows": "bound", "counts": "bound", "out": "bound"},
        ["was agg", "was in"],
    ),
    "a write step with rows in staging is renamed": (
        {},
        {"sink": "table"},
        {"step_ids": {"out": "table"}},
        {"in": "bound", "agg": "bound", "table": "refused"},
        ["step 'out' has uncommitted rows, which are named by its id"],
    ),
    "a step goes": (
        {"logic": Last()},
        {},
        {},
        {"in": "bound", "agg": "bound", "out": "bound", "logic": "orphaned", "logic-out": "orphaned"},
        ["--allow-dropped-state", "12  340 B"],
    ),
    "a step may go": (
        {"logic": Last()},
        {},
        {"allow_dropped_state": True},
        {"in": "bound", "agg": "bound", "out": "bound", "logic": "dropped", "logic-out": "dropped"},
        ["without what is dropped"],
    ),
    "a state comes, one gets wider": (
        {"logic": Last()},
        {"logic": Wider()},
        {},
        {"in": "bound", "agg": "bound", "out": "bound", "logic": "changed", "logic-out": "bound"},
        ["last: widened from int32 to int64", "most: added"],
    ),
    "a state goes": (
        {"logic": Last()},
        {"logic": Renamed()},
        {},
        {"in": "bound", "agg": "bound", "out": "bound", "logic": "refused", "logic-out": "bound"},
        ["state 'last' is gone"],
    ),
    "a state is renamed": (
        {"logic": Last()},
        {"logic": Renamed()},
        {"state_names": {"logic/last": "latest"}},
        {"in": "bound", "agg": "bound", "out": "bound", "logic": "changed", "logic-out": "bound"},
        ["last: renamed to latest"],
    ),
    "another number of key groups": (
        {},
        {"max_parallelism": 64},
        {},
        {"in": "bound", "agg": "bound", "out": "bound"},
        ["max_parallelism was 128 and is 64"],
    ),
}


def page(plan: PhysicalPlan, manifest: Manifest, upgrade: Upgrade) -> tuple[Any, str]:
    from cutwater.api.jobs.restore_plan import ReadingTime, RestorePlan

    report = compare(plan, manifest, upgrade).report
    made = RestorePlan(
        program=plan.name, snapshot="chk/job", job=manifest.job, checkpoint_id=7, parallelism=plan.parallelism,
        was_parallelism=2, outlook=report, reading=ReadingTime(bytes=9, sample_bytes=9, bytes_per_s=None),
    )  # fmt: skip
    json.dumps(made.to_dict())
    return report, str(made)


@pytest.mark.parametrize("case", TABLE)
def test_every_step_is_told_of(case: str) -> None:
    before, after, said, verdicts, told = TABLE[case]
    plan, manifest = program(**after), snapshot(program(**before))
    upgrade, _ = upgrade_of(said)
    report, text = page(plan, manifest, upgrade)
    assert {s.id: s.verdict for s in report.steps} == verdicts
    for words in told:
        assert words in text
    possible = not {"orphaned", "refused"} & {*verdicts.values()} and "max_parallelism" not in after
    assert report.ok == possible
    assert ("CANNOT begin" in text) != possible
    if possible:
        check_compatible(plan, manifest, upgrade)
    else:
        with pytest.raises(BuildError, match="cannot go on from checkpoint 7"):
            check_compatible(plan, manifest, upgrade)


def test_rows_on_their_way_follow_their_edge_to_its_new_name() -> None:
    plan = program(agg="counts", read="rows")
    said = Upgrade(step_ids={"agg": "counts", "in": "rows"})
    bound = check_compatible(plan, snapshot(program(), on_edges=5), said)
    assert [e.name for e in bound.manifest.entries if e.kind == "channel"] == ["rows.0>counts.0"]
    assert [(e.name, e.rows, e.verdict) for e in bound.report.edges] == [("rows.0>counts.0", 5, "bound")]
    assert bound.manifest.subtasks[0].splits.keys() == {"rows"}
    assert {e.step for e in bound.manifest.entries} == {"counts"}


def test_rows_on_their_way_that_lack_a_column_are_refused_and_fewer_columns_are_fine() -> None:
    more = {"aggregates": {"n": cw.count(), "most": cw.max("v"), "late": cw.max("t")}}
    with pytest.raises(
        BuildError, match=r"(?s)edge in\.0>agg\.0 has the column 'v' .* now, 5 rows on the way.*Take a savepoint"
    ):
        check_compatible(program(**more), snapshot(program(key="k", aggregates={"n": cw.count()}), on_edges=5))
    check_compatible(program(aggregates={"n": cw.count()}), snapshot(program(**more), on_edges=5))


def test_rows_on_the_way_to_a_step_that_may_go_go_with_it() -> None:
    bound = check_compatible(program(), snapshot(program(logic=Last()), on_edges=5), Upgrade(allow_dropped_state=True))
    assert {e.step for e in bound.manifest.entries} == {"agg"}
    assert "5 rows on their way along in.0>logic.0 dropped." in bound.report.warnings
    assert "State of step 'logic' (process) dropped: 12 rows, 340 bytes." in bound.report.warnings


def test_another_job_leaves_uncommitted_rows_to_the_one_that_wrote_them() -> None:
    manifest = snapshot(program())
    check_compatible(program(name="b", sink="elsewhere"), manifest, foreign=True)
    with pytest.raises(BuildError, match="uncommitted rows"):
        check_compatible(program(sink="elsewhere"), manifest)


def test_what_was_said_of_the_upgrade_may_stay() -> None:
    said = Upgrade(step_ids={"agg": "counts"}, state_names={"counts/n": "n"}, allow_dropped_state=True)
    plan = program(agg="counts")
    assert check_compatible(plan, snapshot(plan), said).report.steps[1].verdict == "bound"


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"step_ids": {"agg": "nowhere"}}, "'agg' is to be 'nowhere', which is no step"),
        ({"step_ids": {"agg": "counts", "in": "counts"}}, "two steps are to be 'counts'"),
        ({"step_ids": {"never": "more"}}, "checkpoint 7 has no step 'never'"),
        ({"step_ids": {"agg": "out"}}, "the checkpoint has a step of that id too"),
        ({"state_names": {"counts": "x"}}, "'counts' is no name of a state"),
        ({"state_names": {"nowhere/n": "x"}}, "'nowhere/n' is no name of a state"),
        ({"step_ids": 7}, "of the wrong type"),
    ],
)
def test_mistakes_in_mappings_are_told(said: dict[str, Any], why: str) -> None:
    plan = program(agg="counts", filtered="more")
    with pytest.raises(ConfigError, match=why):
        compare(plan, snapshot(program()), upgrade_of(said)[0])


def test_snapshots_of_before_that_tell_less_go_on_where_nothing_changed() -> None:
    manifest = snapshot(program(logic=Last()))
    steps = [msgspec.structs.replace(s, parts=[], vertex=-1) for s in manifest.steps]
    old = msgspec.structs.replace(manifest, steps=steps, edges=[])
    check_compatible(program(logic=Last()), old)
    with pytest.raises(BuildError, match="aggregates of step 'agg'"):
        check_compatible(program(aggregates={"n": cw.count()}, logic=Last()), old)


def test_the_rate_is_told_only_where_it_was_measured(tmp_path: Path) -> None:
    from cutwater.api.jobs.restore_plan import ReadingTime

    assert ReadingTime(bytes=100, sample_bytes=100, bytes_per_s=None).seconds is None
    assert ReadingTime(bytes=3_000_000, sample_bytes=2_000_000, bytes_per_s=1e6).seconds == 6


def test_the_command_line_tells_the_same_and_exits_with_3_where_it_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from cutwater.storage.job_log import JobLog
    from cutwater.storage.snapshot.publish import publish
    from cutwater.storage.store.local import LocalStore
    from cutwater.ui.cli import main

    def run(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["cutwater", "plan", str(tmp_path / "chk" / "job"), *map(str, arguments)])
        with pytest.raises(SystemExit) as exited:
            main()
        return int(str(exited.value.code)), capsys.readouterr().out

    (tmp_path / "chk").mkdir()
    log = JobLog(LocalStore(str(tmp_path / "chk")), "job")
    log.create()
    log.begin_attempt("here", after=0)
    manifest = msgspec.structs.replace(snapshot(program()), uid=log.state.uid, checkpoint_id=1, entries=[])
    publish(LocalStore(str(tmp_path / "chk")), log, manifest)
    file = tmp_path / "renamed_steps.py"
    file.write_text(
        "import cutwater as cw\n"
        "flow = cw.Dataflow('job')\n"
        f"rows = flow.read('in', cw.memory([], schema='{SCHEMA}'), event_time='t')\n"
        "rows.key_by('k').aggregate('counts', n=cw.count(), most=cw.max('v')).write('out', cw.discard())\n"
    )
    code, text = run(file, "--parallelism", 3)
    assert code == 3
    assert "--map agg=counts" in text
    assert "parallelism 2 -> 3" in text
    code, text = run(file, "--map", "agg=counts", "--map", "counts/n=n", "--json")
    assert code == 0
    assert [(s["id"], s["verdict"], s["was_id"]) for s in json.loads(text)["steps"]] == [
        ("in", "bound", ""),
        ("counts", "bound", "agg"),
        ("out", "bound", ""),
    ]
    assert run(file, "--allow-dropped-state")[0] == 0
    assert run(file, "--max-parallelism", 64, "--map", "agg=counts")[0] == 3
    assert run(file, "--map", "agg")[0] == 2
