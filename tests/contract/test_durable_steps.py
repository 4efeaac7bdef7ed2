"""A death before every system call of a job's life: write, sync, link, rename, log entry, commit, collection.

The driver's own code (``Publisher``), the workers' (``SnapshotWriter``, the sink's writer and committer), real files,
on a disk that forgets what was not synced.  What comes after the death restores the newest checkpoint that the log has,
whole, and readers see exactly what it and those before it committed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from sink_targets import Output

import cutwater as cw
from cutwater.config import JobConfig
from cutwater.connectors.base import PreCommit, SinkWriter
from cutwater.connectors.files.sink import FileSink
from cutwater.errors import CutwaterError
from cutwater.plan.planner import make_plan
from cutwater.runtime.chains.chain import SinkIdentity
from cutwater.runtime.driver import publisher
from cutwater.runtime.driver.publisher import Publisher
from cutwater.state.segments import GROUP_COLUMN, Segment
from cutwater.storage.snapshot.data_file import Continued
from cutwater.storage.snapshot.manifest import Entry, SplitRecord, SubtaskRecord
from cutwater.storage.snapshot.segment_files import SnapshotWriter, read_segment
from cutwater.storage.store.local import LocalStore
from cutwater.testing.deaths import Killed, Moments
from cutwater.testing.forgetful_disk import ForgetfulDisk

WORKERS, ROWS, CHECKPOINTS = 2, 3, 3
SCHEMA = pa.schema([("row", pa.int64())])
CONFIG = JobConfig(parallelism=WORKERS, num_retained=2)
ROLLING = {"a file at every checkpoint": {"roll_interval_ms": 0}, "a file of several": {"roll_rows": ROWS + 1}}
QUICK = [("a file at every checkpoint", False), ("a file of several", True)]
ALL = [pytest.param(r, p, marks=[] if (r, p) in QUICK else [pytest.mark.full]) for r in ROLLING for p in (False, True)]
"""How files end, and whether power is lost or only a process."""


class Life:
    """A job whose rows are 0, 1, 2 ...; ``ROWS`` of them for each worker belong to each checkpoint.

    Args:
        folder: for the output and the checkpoints.
        rolling: when the sink's files end.
    """

    def __init__(self, folder: Path, rolling: dict[str, int]) -> None:
        self.folder, self.rolling = folder, rolling
        self.sink = FileSink(str(folder / "out"), **rolling)
        flow = cw.Dataflow("life")
        flow.read("in", cw.memory(schema="row long")).write("out", self.sink)
        self.plan = make_plan(flow, WORKERS, 128)
        self.published = 0
        """Newest checkpoint of which the driver knows that it is in the log."""
        self.next_row = 0

    def begin(self) -> int:
        """A driver takes the job and restores; the id of what it restores, after a look at all of it."""
        self.store = LocalStore.open(self.folder / "chk")
        self.publisher = Publisher(self.store, self.plan, CONFIG)
        self.attempt = self.publisher.log.state.attempt + 1
        self.publisher.begin_attempt(self.attempt)
        found = self.publisher.choose()
        assert self.publisher.warnings == [], "a death is no damage"
        self.publisher.settle_sinks(found.manifest if found else None)
        self.next_row = found.manifest.subtasks[0].splits["in"][0].position if found else 0
        states = [record.sinks.get("out") for record in found.manifest.subtasks] if found else [None] * WORKERS
        self.files = [Continued(1) for _ in range(WORKERS)]
        self.writers: list[SinkWriter] = []
        for worker, state in enumerate(states):
            identity = SinkIdentity(self.publisher.uid, "out", worker, WORKERS, self.attempt)
            self.writers.append(self.sink.writer(SCHEMA, identity, [] if state is None else [state]))
        if found is None:
            return 0
        values = [read_segment(self.store, "life", entry).batch["row"].to_pylist() for entry in found.manifest.entries]
        assert values == [[self.next_row] * 50] * WORKERS, "states of other checkpoints"
        return found.completed.checkpoint_id

    def checkpoint(self, *, final: bool = False) -> None:
        """Some rows, and a checkpoint behind them."""
        id = self.publisher.next_checkpoint_id()
        made: list[Callable[[], PreCommit]] = []
        for writer in self.writers:
            writer.write(pa.record_batch({"row": range(self.next_row, self.next_row + ROWS)}, SCHEMA))
            self.next_row += ROWS
            made.append(writer.pre_commit(id, final))
        parts: list[tuple[SubtaskRecord, list[Entry]]] = []
        for worker, make_durable in enumerate(made):
            pre_commit = make_durable()
            record = SubtaskRecord(
                vertex=0,
                subtask=worker,
                incarnation=self.attempt,
                protocol="aligned",
                splits={"in": [SplitRecord("memory-0", 0, self.next_row)]},
                handles={"out": pre_commit.handles},
                sinks={} if pre_commit.state is None else {"out": pre_commit.state},
            )
            parts.append((record, self._write_state(id, worker)))
        manifest = self.publisher.manifest(id, attempt=self.attempt, final=final, triggered_ms=0, parts=parts)
        self.publisher.publish(manifest)
        self.published = id
        for file in self.files:
            file.completed(id)
        for record, _ in parts:
            self.sink.committer(SCHEMA, self.publisher.uid, "out").commit(id, record.handles["out"])
        assert self.publisher.collect() == []

    def _write_state(self, id: int, worker: int) -> list[Entry]:
        """The first into a file of its own; the third goes on with the second's."""
        group = pa.array([64 * worker] * 50, pa.uint16())
        batch = pa.record_batch({GROUP_COLUMN: group, "row": pa.array([self.next_row] * 50, pa.int64())})
        file = self.files[worker].take(id)
        writer = SnapshotWriter(self.store, "life", id, self.attempt, worker, 100, file)
        segment = Segment("agg", "base", batch, (64 * worker, 64 * worker + 64))
        entries = writer.add("in", 0, [segment], shared=id > 1)
        if (file := writer.close(go_on=True)) is not None:
            self.files[worker].leave(id, file)
        return entries

    def live(self) -> None:
        self.begin()
        for _ in range(CHECKPOINTS):
            self.checkpoint()

    @property
    def visible(self) -> list[int]:
        return sorted(Output(str(self.folder / "out")).rows())


def rows_of(checkpoint_id: int) -> int:
    """How many rows belong to it and those before it, where none was aborted."""
    return checkpoint_id * WORKERS * ROWS


def assert_recovers(life: Life) -> int:
    """A new driver restores the newest checkpoint in the log, goes on, and in the end each row is there once."""
    known, before = life.published, life.visible
    restored = life.begin()
    assert restored in (known, known + 1), f"{known} was known to be in the log, {restored} was restored"
    assert life.next_row == rows_of(restored)
    visible = life.visible
    assert set(before) <= set(visible) <= set(range(rows_of(restored)))
    assert len(visible) == len(set(visible))
    if "roll_interval_ms" in life.rolling:
        assert visible == list(range(rows_of(restored)))
    life.checkpoint(final=True)
    assert life.visible == list(range(rows_of(restored + 1)))
    return restored


def struck(folder: Path, rolling: str, deaths: Sequence[int | None], *, power: bool) -> tuple[int, list[int]]:
    """A life that ends before the given system call, so do the recoveries after it; the last one does not.

    Returns what is restored in the end, and how many calls there were each time (``None``: no death).
    """
    calls: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publisher, "_COLLECT_EVERY_S", 0.0)  # a death may come while old checkpoints are removed
        moments = Moments(lambda: None)
        disk = ForgetfulDisk(str(folder / "out"), patch, moments.moment, store=str(folder / "chk"))
        life = Life(folder, ROLLING[rolling])
        for death in deaths:
            moments.count, moments.kill_in = 0, death
            with suppress(Killed):
                if calls:
                    life.begin()
                else:
                    life.live()
            moments.kill_in = None
            calls.append(moments.count)
            if power:
                disk.lose_power()
        return assert_recovers(life), calls


@pytest.mark.parametrize(("rolling", "power"), ALL)
def test_a_death_before_every_system_call(tmp_path: Path, rolling: str, power: bool) -> None:
    restored, (total,) = struck(tmp_path / "whole", rolling, [None], power=power)
    assert restored == CHECKPOINTS
    found = [struck(tmp_path / str(k), rolling, [k], power=power)[0] for k in range(total)]
    assert found == sorted(found), "up to the log entry the previous one, from then on the new one"
    assert set(found) == set(range(CHECKPOINTS + 1))
    assert total > 100


@pytest.mark.full
@pytest.mark.parametrize(("rolling", "power"), ALL)
def test_a_death_before_every_system_call_of_every_recovery(tmp_path: Path, rolling: str, power: bool) -> None:
    total = struck(tmp_path / "whole", rolling, [None], power=power)[1][0]
    pairs = 0
    for k in range(total * 2 // 3, total):  # of the last checkpoints: there is something to commit and to retire
        _, (_, calls) = struck(tmp_path / f"{k}", rolling, [k, None], power=power)
        for m in range(calls):
            struck(tmp_path / f"{k}-{m}", rolling, [k, m], power=power)
            pairs += 1
    assert pairs > 500


BUGS = {
    "the log entry is not synced": ("cutwater.storage.store.local", "_sync_names"),
    "parts are not synced": ("cutwater.connectors.files.part_draft", "sync_part"),
    "staged rows are not synced": ("cutwater.connectors.staging_folders", "fsync_path"),
}


def test_what_goes_on_with_a_file_must_be_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: only the first checkpoint in a file is."""
    real = LocalStore.sync

    def sync(self: LocalStore, file: Any) -> None:
        if file.named:
            file.flush()
        else:
            real(self, file)

    monkeypatch.setattr(LocalStore, "sync", sync)
    with pytest.raises((AssertionError, CutwaterError)):
        for k in range(300):
            struck(tmp_path / str(k), "a file of several", [k], power=True)


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    """Not syncing is noticed at a power loss."""
    module, name = BUGS[bug]
    monkeypatch.setattr(f"{module}.{name}", lambda path: None)
    with pytest.raises((AssertionError, CutwaterError)):
        for k in range(300):
            struck(tmp_path / str(k), "a file of several", [k], power=True)
