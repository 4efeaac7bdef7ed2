"""Going back to an older checkpoint although newer ones had committed: each row comes out once all the same (T2)."""

from __future__ import annotations

import json
import os
import random
import re
import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_host import FakeHost, FakeSpark, adopt, context, server_address
from runtime_world import (
    assert_running_counts,
    counting,
    flip,
    gated,
    open_gate,
    query,
    wait_until,
    written_for,
)

import cutwater as cw
from cutwater.api.jobs import job as job_module
from cutwater.api.jobs.job import Job
from cutwater.connectors.files.part_commit import PartCommitter
from cutwater.runtime.driver.publisher import Sinks
from cutwater.storage.job_log import JobLog
from cutwater.storage.snapshot.segment_files import load_manifest
from cutwater.storage.store.local import LocalStore

ROWS = 12_000
EACH, ACROSS = 1, 12
"""Rows after which a file ends: at every checkpoint; about every second one, so that files hold rows of several."""


SLOW, FAST = 300.0, 60_000.0
"""Rows per second: so that there are rows in every checkpoint until the stop, on any machine; for the rest."""


def flow_of(folder: Path, roll_rows: int, rate: float = SLOW) -> cw.Dataflow:
    return counting("back", gated(folder, ROWS, rate=rate), folder / "out", roll_rows=roll_rows)


def stopped(start: Any, folder: Path, roll_rows: int, more: int = 6, **settings: Any) -> Job:
    """The job, started and stopped after some more checkpoints."""
    job = start(flow_of(folder, roll_rows), inline_threshold_bytes=0, **settings)
    wait_until(lambda: job.status.checkpoints.completed >= more, "checkpoints")
    job.stop()
    return job


def retained(folder: Path) -> list[Path]:
    """What publishes the checkpoints that can be restored, with their manifests, oldest first."""
    state = JobLog(LocalStore(str(folder / "chk")), "back").read()
    return [folder / "chk" / "back" / completed.path for completed in reversed(state.completed)]


def number(checkpoint: Path) -> int:
    """Of a log entry with the manifest behind it, or of a large manifest by itself."""
    line = json.loads(checkpoint.read_bytes().splitlines()[0])
    return line.get("event", line)["checkpoint_id"]


def damage(checkpoints: list[Path]) -> None:
    """Something that was written for each of them alone: older checkpoints stay whole."""
    found = [(each, written_for(each.parents[1], number(each))) for each in checkpoints]
    for checkpoint, entries in found:
        if entries:
            flip(checkpoint.parents[1], entries[0])
        else:  # nothing had changed
            checkpoint.write_bytes(checkpoint.read_bytes()[:-1])


def committed_by(folder: Path) -> dict[int, list[str]]:
    """Names of the visible files by the checkpoint that they belong to."""
    found: dict[int, list[str]] = {}
    for path in (folder / "out").glob("*.parquet"):
        found.setdefault(int(path.name.split("-")[-3]), []).append(path.name)
    return found


def finish(start: Any, folder: Path, roll_rows: int, **settings: Any) -> Job:
    open_gate(folder)
    job = start(flow_of(folder, roll_rows, FAST), **settings)
    assert job.await_termination(40)
    assert_running_counts(folder / "out", ROWS)
    assert not (folder / "out" / "_cutwater").exists()
    return job


@pytest.mark.parametrize(("at_least", "roll_rows"), [(1, EACH), (2, ACROSS)])
def test_rows_that_a_damaged_checkpoint_had_committed_come_once(
    start, tmp_path: Path, at_least: int, roll_rows: int
) -> None:
    """The newest checkpoints are damaged, so many that one of them had committed a file."""
    stopped(start, tmp_path, roll_rows, num_retained=6)
    checkpoints = retained(tmp_path)
    newest = max(committed_by(tmp_path))
    damaged = max(at_least, len([c for c in checkpoints if number(c) >= newest]))
    victims, chosen = checkpoints[-damaged:], number(checkpoints[-damaged - 1])
    damage(victims)
    later = {name for n, names in committed_by(tmp_path).items() if n > chosen for name in names}
    assert later, "void: nothing was committed after the checkpoint that is restored"
    job = finish(start, tmp_path, roll_rows)
    assert job.status.checkpoints.restored_id == chosen
    assert not later & {path.name for path in (tmp_path / "out").iterdir()}
    for victim in victims:
        assert any(f"Checkpoint {number(victim)} " in w and "is taken back" in w for w in job.status.warnings), (
            job.status.warnings
        )


def test_restoring_an_older_checkpoint_of_its_own_takes_the_later_output_back(start, tmp_path: Path) -> None:
    job = stopped(start, tmp_path, ACROSS, num_retained=5)
    checkpoints = retained(tmp_path)
    chosen = number(checkpoints[0])
    assert any(n > chosen for n in committed_by(tmp_path)), "void: nothing was committed after it"
    job = finish(start, tmp_path, ACROSS, restore=f"{job.checkpoint_dir}@{chosen}")
    assert job.status.checkpoints.restored_id == chosen
    assert any(f"goes back to checkpoint {chosen}" in w for w in job.status.warnings), job.status.warnings


def test_a_restart_in_between_keeps_what_older_checkpoints_need(start, tmp_path: Path) -> None:
    job = stopped(start, tmp_path, ACROSS, num_retained=50)
    store = LocalStore(str(tmp_path / "chk"))
    older = JobLog(store, "back").read().completed[1:]
    staging = [e for e in older if any(s for r in load_manifest(store, "back", e).subtasks for s in r.sinks.values())]
    assert staging, "void: no older checkpoint has rows in staging"
    stopped(start, tmp_path, ACROSS, more=1, num_retained=50)
    chosen = staging[-1].checkpoint_id
    job = finish(start, tmp_path, ACROSS, restore=f"{job.checkpoint_dir}@{chosen}")
    assert job.status.checkpoints.restored_id == chosen


@pytest.mark.parametrize("large", [False, True], ids=["manifests in the log", "large manifests"])
def test_after_going_back_what_came_later_cannot_be_restored(
    start, tmp_path: Path, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:
        monkeypatch.setattr("cutwater.storage.snapshot.publish.ATTACHED_BYTES", 0)
    job = stopped(start, tmp_path, EACH)
    old, new = number(retained(tmp_path)[0]), number(retained(tmp_path)[-1])
    stopped(start, tmp_path, EACH, more=1, restore=f"{job.checkpoint_dir}@{old}")
    assert new not in map(number, retained(tmp_path))
    with pytest.raises(cw.ConfigError, match=f"no completed checkpoint .*@{new}"):
        start(flow_of(tmp_path, EACH), restore=f"{job.checkpoint_dir}@{new}").await_termination(20)
    finish(start, tmp_path, EACH)


@pytest.mark.parametrize("seed", range(2))
def test_back_and_forth_any_number_of_times(start, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    roll_rows = rng.choice([EACH, ACROSS])
    settings: dict[str, Any] = {}
    for _ in range(3):
        job = stopped(start, tmp_path, roll_rows, more=rng.randrange(1, 5), parallelism=rng.choice([1, 2]), **settings)
        settings, checkpoints = {}, retained(tmp_path)
        if rng.random() < 0.5:
            if len(checkpoints) > 1:
                damage(checkpoints[-1:])
        else:
            settings = {"restore": f"{job.checkpoint_dir}@{number(rng.choice(checkpoints))}"}
    finish(start, tmp_path, roll_rows, **settings)


# ---------------------------------------------------------------------------------------------------- drivers that die


def drive(folder: str, server: str, restore: str, moment: str) -> None:
    """A driver that dies, or is paused, while it restores."""
    adopt(server)
    job_module.SparkHost = FakeHost  # type: ignore[misc]
    path = Path(folder)

    def strike() -> None:
        os.kill(os.getpid(), signal.SIGSTOP if moment.startswith("paused") else signal.SIGKILL)

    settle, take_back, unlink = Sinks.settle, PartCommitter._take_back, os.unlink
    removed = [0]

    def at_settle(self: Sinks, *args: Any) -> None:
        strike()
        settle(self, *args)

    def at_take_back(self: PartCommitter, *args: Any) -> None:
        def second(name: Any, **rest: Any) -> None:
            removed[0] += 1
            if removed[0] == 2:
                strike()
            unlink(name, **rest)

        os.unlink = second
        take_back(self, *args)

    if "settle" in moment:
        Sinks.settle = at_settle  # type: ignore[method-assign]
    else:
        PartCommitter._take_back = at_take_back  # type: ignore[method-assign]
    flow, settings = flow_of(path, EACH), {"interval": "50ms"}
    job = flow.start(FakeSpark(), checkpoint=path / "chk", restore=restore, **settings)  # type: ignore[arg-type]
    job.await_termination()


@pytest.mark.parametrize("moment", ["killed before settle", "killed in the middle of the parts"])
def test_a_driver_that_dies_while_taking_back_has_gone_back(start, tmp_path: Path, moment: str) -> None:
    job = stopped(start, tmp_path, EACH, num_retained=5)
    chosen = number(retained(tmp_path)[0])
    later = sum(len(names) for n, names in committed_by(tmp_path).items() if n > chosen)
    assert later > 2, "void"
    process = context().Process(
        target=drive, args=(str(tmp_path), server_address(), f"{job.checkpoint_dir}@{chosen}", moment)
    )
    process.start()
    process.join(90)
    assert process.exitcode == -signal.SIGKILL, "void: the driver never came to that moment"
    left = sum(len(names) for n, names in committed_by(tmp_path).items() if n > chosen)
    assert left == (later - 1 if "middle" in moment else later)
    job = finish(start, tmp_path, EACH)  # the same command, but without restore=
    assert job.status.checkpoints.restored_id == chosen


def state_of(pid: int) -> str:
    return re.sub(r".*\)", "", Path(f"/proc/{pid}/stat").read_text()).split()[0]


def test_a_driver_that_was_paused_while_taking_back_spoils_nothing_of_its_successor(start, tmp_path: Path) -> None:
    job = stopped(start, tmp_path, EACH, num_retained=5)
    address = f"{job.checkpoint_dir}@{number(retained(tmp_path)[0])}"
    process = context().Process(target=drive, args=(str(tmp_path), server_address(), address, "paused before settle"))
    process.start()
    try:
        wait_until(lambda: state_of(process.pid) == "T", "the pause")
        successor = start(flow_of(tmp_path, EACH, FAST), takeover=True)
        wait_until(lambda: successor.status.checkpoints.completed >= 4, "checkpoints of the successor")
        os.kill(process.pid, signal.SIGCONT)
        process.join(90)
        assert process.exitcode == 1, "it is fenced at the latest when it publishes"
    finally:
        process.kill()
    open_gate(tmp_path)
    assert successor.await_termination(40)
    assert successor.status.restarts == 0
    assert_running_counts(tmp_path / "out", ROWS)


# -------------------------------------------------------------------------------------------------------- other sinks


def test_a_collected_result_is_exact_after_going_back(start, tmp_path: Path) -> None:
    def flow(rate: float) -> cw.Dataflow:
        flow = cw.Dataflow("back")
        flow.read("in", gated(tmp_path, ROWS, rate=rate)).collect("result")
        return flow

    job = start(flow(SLOW), num_retained=4)
    wait_until(lambda: job.status.checkpoints.completed >= 4, "checkpoints")
    job.stop()
    open_gate(tmp_path)
    job = start(flow(FAST), restore=f"{job.checkpoint_dir}@{number(retained(tmp_path)[0])}")
    assert job.await_termination(40)
    (folder,) = (tmp_path / "chk" / "back" / "output").glob("result*")
    assert query("SELECT count(*), count(DISTINCT value) FROM {out}", out=folder) == [(ROWS, ROWS)]


def test_foreach_batch_cannot_take_back_and_says_from_where_on_the_rows_come_again(start, tmp_path: Path) -> None:
    out = tmp_path / "batches"
    out.mkdir()

    def write(rows: pa.Table, checkpoint_id: int) -> None:
        fresh = out / f".{checkpoint_id}-{os.getpid()}"
        pq.write_table(rows, fresh)
        fresh.replace(out / f"{checkpoint_id}.parquet")

    def flow(rate: float) -> cw.Dataflow:
        flow = cw.Dataflow("back")
        flow.read("in", gated(tmp_path, ROWS, rate=rate)).foreach_batch("each", write)
        return flow

    job = start(flow(SLOW), num_retained=4)
    wait_until(lambda: job.status.checkpoints.completed >= 6, "checkpoints")
    job.stop()
    chosen = number(retained(tmp_path)[0])
    later = [path for path in out.iterdir() if int(path.stem) > chosen]
    assert later, "void"
    for path in later:
        path.unlink()  # as the warning asks for
    open_gate(tmp_path)
    job = start(flow(FAST), restore=f"{job.checkpoint_dir}@{chosen}")
    assert job.await_termination(40)
    assert any(
        f"'each' cannot take back what it handed out after checkpoint {chosen}" in w for w in job.status.warnings
    )
    assert not any(path.exists() for path in later), "the rows come under new ids"
    assert query("SELECT count(*), count(DISTINCT value) FROM {out}", out=out) == [(ROWS, ROWS)]
