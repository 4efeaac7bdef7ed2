"""Python data sources in whole jobs on worker processes: each row once, whatever dies when."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_host import FakeSpark
from runtime_world import kill_some, wait_until

import cutwater as cw
from cutwater.errors import DataError, UserCodeError
from data_source_world import Files, Numbers, Simple, Ticks, Whims, grow, logged, visible


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows"
    path.touch()
    return path


def copying(source: Any, sink: Any) -> cw.Dataflow:
    flow = cw.Dataflow("copy")
    flow.read("in", source).write("out", sink)
    return flow


def ids(folder: Path) -> list[int]:
    return sorted(row["id"] for row in visible(folder))


@pytest.mark.parametrize("kind", ["tuples", "rows", "batches"])
def test_a_batch(start: Any, out: Path, tmp_path: Path, kind: str) -> None:
    options = {"count": 30_000, "parts": 6, "kind": kind}
    sink = cw.data_source(Files, options={"path": out, "log": tmp_path / "log", "arrow": kind == "batches"})
    job = start(copying(cw.data_source(Numbers, options=options), sink))
    assert job.await_termination(60)
    assert job.outcome == "finished"
    assert sorted((row["id"], row["text"]) for row in visible(out)) == [(n, f"r{n}") for n in range(30_000)]
    assert not [p for p in out.iterdir() if p.name.startswith("_")]
    batches = [int(line.split()[1]) for line in logged(tmp_path / "log")]
    assert batches == sorted(set(batches))


@pytest.mark.parametrize(
    ("source", "kind", "replayable"),
    [(Ticks, "whims", None), (Ticks, "new", True), (Ticks, "now", None), (Simple, "", None), (Simple, "", True)],
    ids=["staged", "with a limit", "in parts", "simple, staged", "simple, replayable"],
)
def test_a_stream_up_to_its_newest_offset(
    start: Any, out: Path, rows: Path, tmp_path: Path, source: Any, kind: str, replayable: bool | None
) -> None:
    grow(rows, 2_000)
    options = {"rows": rows, "parts": 3, "kind": kind, "log": tmp_path / "log"}
    made = cw.data_source(source, options=options, until="latest", replayable=replayable)
    job = start(copying(made, cw.data_source(Files, options={"path": out})))
    assert job.await_termination(60)
    assert ids(out) == list(range(2_000))
    assert "commit 2000" in logged(tmp_path / "log")


STREAMS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "staged": lambda options: cw.data_source(Ticks, options={**options, "kind": "whims"}),
    "replayable": lambda options: cw.data_source(Ticks, options=options, replayable=True),
    "simple, staged": lambda options: cw.data_source(Simple, options={**options, "kind": "whims"}),
    "simple, replayable": lambda options: cw.data_source(Simple, options=options, replayable=True),
}


@pytest.mark.parametrize(
    "stream", ["staged", *(pytest.param(name, marks=pytest.mark.full) for name in STREAMS if name != "staged")]
)
def test_a_stream_through_kills_a_rescale_and_a_new_start(
    start: Any, fake_spark: FakeSpark, out: Path, rows: Path, tmp_path: Path, stream: str
) -> None:
    log, sent = tmp_path / "log", 0
    commits = tmp_path / "commits"
    source = STREAMS[stream]({"rows": rows, "parts": 3, "log": log})
    flow = copying(source, cw.data_source(Files, options={"path": out, "log": commits}))

    def more(count: int) -> None:
        nonlocal sent
        grow(rows, count)
        sent += count

    def seen(count: int) -> None:
        wait_until(lambda: len(ids(out)) >= count, f"{count} rows", job=job)

    job = start(flow, parallelism=2)
    for seed in range(2):
        more(3_000)
        seen(sent - 2_000)
        kill_some(job, fake_spark, 1, seed=seed)
        more(1_000)
    job.rescale(3)
    more(1_000)
    seen(sent)
    job.stop()
    more(1_000)
    job = start(flow, parallelism=1)
    seen(sent)
    more(500)
    seen(sent)
    wait_until(lambda: f"commit {sent}" in logged(log), "the commit", job=job)
    job.stop()
    assert ids(out) == list(range(sent))
    ends = [int(line.split()[1]) for line in logged(log) if line.startswith("commit")]
    assert ends == sorted(ends)
    left = [p.name for p in (tmp_path / "chk/copy/input/in").iterdir() if p.name.isdigit()]
    assert len(left) <= 12, "ranges that no checkpoint needs stay"
    assert_committed_as_told(logged(commits))


def assert_committed_as_told(lines: list[str]) -> None:
    """A batch id always comes with the same messages, ids rise, and nothing is both committed and given up."""
    told: dict[str, str] = {}
    order: list[int] = []
    aborted: set[str] = set()
    for line in lines:
        method, batch, messages = line.split(" ", 2)
        if method == "abort":
            aborted |= set(messages.strip("[]").split(", "))
        else:
            assert told.setdefault(batch, messages) == messages
            order.append(int(batch))
    assert order == sorted(order)
    assert not aborted & {name for messages in told.values() for name in messages.strip("[]").split(", ")}


def test_a_batch_that_does_not_repeat_itself_is_found(
    start: Any, fake_spark: FakeSpark, out: Path, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    source = cw.data_source(Whims, options={"count": 5_000, "gate": gate, "hold": 4_000})
    job = start(copying(source, cw.data_source(Files, options={"path": out})), restart="none")
    wait_until(lambda: len(ids(out)) > 100, "rows", job=job)
    job.stop()
    gate.touch()
    job = start(copying(source, cw.data_source(Files, options={"path": out})), restart="none")
    with pytest.raises(UserCodeError, match=r"(?s)Whims: partition 0.* read once more, the rows are others"):
        job.await_termination(60)


def test_made_durable_it_is_read_once(start: Any, fake_spark: FakeSpark, out: Path, tmp_path: Path) -> None:
    source = cw.data_source(Whims, options={"count": 50_000}, replayable=False, rate=40_000)
    flow = copying(source, cw.data_source(Files, options={"path": out}))
    job = start(flow)
    wait_until(lambda: len(ids(out)) > 10_000, "rows", job=job)
    before = {row["id"]: row["text"] for row in visible(out)}
    kill_some(job, fake_spark, 2, seed=1)
    assert job.await_termination(60)
    after = {row["id"]: row["text"] for row in visible(out)}
    assert ids(out) == list(range(50_000))
    assert before.items() <= after.items()


def test_a_batch_goes_on_where_its_checkpoint_is(start: Any, fake_spark: FakeSpark, out: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    source = cw.data_source(Numbers, options={"count": 60_000, "parts": 4, "log": log}, rate=40_000)
    job = start(copying(source, cw.data_source(Files, options={"path": out})))
    for seed in range(2):
        wait_until(lambda at=seed: len(ids(out)) > 10_000 * (at + 1), "rows", job=job)
        kill_some(job, fake_spark, 1, seed=seed)
    assert job.await_termination(60)
    assert ids(out) == list(range(60_000))
    assert logged(log) == ["partitions"]


def test_an_answer_to_a_commit_that_is_lost(start: Any, out: Path, tmp_path: Path) -> None:
    """The job goes back, and the same messages come with the same id."""
    faulty, commits = tmp_path / "faulty", tmp_path / "commits"
    faulty.touch()
    options = {"path": out, "log": commits, "faulty": faulty}
    source = cw.data_source(Numbers, options={"count": 40_000, "parts": 2}, rate=40_000)
    job = start(copying(source, cw.data_source(Files, options=options)))
    assert job.await_termination(60)
    assert ids(out) == list(range(40_000))
    assert_committed_as_told(logged(commits))
    ids_of = [line.split()[1] for line in logged(commits) if line.startswith("commit")]
    assert len(ids_of) == len(set(ids_of)) + 1, "the batch whose answer was lost comes twice, and no other"


@pytest.mark.parametrize(
    ("source", "sink", "says"),
    [
        (
            {"kind": "fails"},
            {},
            r"Numbers: partition 0, Part\(0, 1000\), cannot be read, behind row \d+:.*no such thing",
        ),
        ({}, {"fail": 700}, r"Files: write\(\) failed on the rows of subtask \d:.*this row is cursed"),
    ],
    ids=["read", "write"],
)
def test_what_the_users_code_raises(
    start: Any, out: Path, source: dict[str, Any], sink: dict[str, Any], says: str
) -> None:
    made = cw.data_source(Numbers, options={"count": 1_000, **source})
    job = start(copying(made, cw.data_source(Files, options={"path": out, **sink})), restart="none")
    with pytest.raises(UserCodeError, match=f"(?s){says}"):
        job.await_termination(60)
    assert visible(out) == []


@pytest.mark.parametrize("recovery", ["region", pytest.param("task", marks=pytest.mark.full)])
def test_parts_of_a_job_that_go_back(
    start: Any, fake_spark: FakeSpark, out: Path, rows: Path, tmp_path: Path, recovery: str
) -> None:
    commits = tmp_path / "commits"
    source = cw.data_source(Ticks, options={"rows": rows, "parts": 2}, replayable=True)
    flow = copying(source, cw.data_source(Files, options={"path": out, "log": commits}))
    job = start(flow, recovery=recovery)
    for n in range(3):
        grow(rows, 2_000)
        wait_until(lambda sent=2_000 * (n + 1): len(ids(out)) >= sent - 1_000, "rows", job=job)
        kill_some(job, fake_spark, 1, seed=n)
    wait_until(lambda: len(ids(out)) >= 6_000, "all rows", job=job)
    job.stop()
    assert ids(out) == list(range(6_000))
    assert_committed_as_told(logged(commits))


def test_a_sealed_job_and_its_savepoint(
    start: Any, fake_spark: FakeSpark, out: Path, rows: Path, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_text("0123456789abcdef of this test\n")
    source = cw.data_source(Ticks, options={"rows": rows, "parts": 2, "kind": "whims"})
    flow = copying(source, cw.data_source(Files, options={"path": out}))
    settings = {"key_file": key, "interval": "50ms"}
    job = start(flow, **settings)
    grow(rows, 3_000)
    wait_until(lambda: len(ids(out)) >= 1_000, "rows", job=job)
    kill_some(job, fake_spark, 1, seed=1)
    wait_until(lambda: job.status.phase == "running", "the recovery", job=job)
    savepoint = job.stop(savepoint=tmp_path / "savepoint")
    grow(rows, 500)
    job = start(flow, restore=savepoint, **settings)
    wait_until(lambda: len(ids(out)) >= 3_500, "all rows", job=job)
    job.stop()
    assert ids(out) == list(range(3_500))
    with pytest.raises(DataError, match="the snapshot says how far another job has read Ticks"):
        start(flow, restore=savepoint, checkpoint=tmp_path / "other", **settings).await_termination(30)
