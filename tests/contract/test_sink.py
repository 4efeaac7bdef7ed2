"""The contract of every sink: nothing lost, doubled or visible too early, whatever dies when."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from sink_targets import Calls, target_of

from cutwater.connectors import foreach_batch, staging, staging_folders, table_sink
from cutwater.connectors.base import Sink, SinkSnapshot
from cutwater.connectors.console import console
from cutwater.connectors.discard import discard
from cutwater.connectors.files import part_commit, part_draft
from cutwater.connectors.files import sink as file_sink
from cutwater.connectors.files.part_formats import CsvParts, JsonParts, ParquetParts
from cutwater.connectors.files.sink import CollectSink, FileSink
from cutwater.connectors.foreach_batch import ForeachBatchSink
from cutwater.connectors.table_sink import table
from cutwater.errors import CutwaterError
from cutwater.testing import SinkBasicsContract, SinkContract, SinkTarget
from cutwater.testing.sink_job import SCHEMA, Identity, SinkJob, batch_of

Make = Callable[[str], Sink]

TRANSACTIONAL: dict[str, Make] = {
    "parquet, a file per checkpoint": lambda path: FileSink(path, roll_interval_ms=0),
    "parquet, rolled by size": lambda path: FileSink(path, roll_rows=12, roll_interval_ms="1h"),
    "parquet, rolled at the end": lambda path: FileSink(path, roll_interval_ms="1h"),
    "parquet, small row groups": lambda path: FileSink(
        path, ParquetParts(row_group_rows=4), roll_rows=30, roll_interval_ms="1h"
    ),
    "JSON lines": lambda path: FileSink(path, JsonParts(), roll_rows=12, roll_interval_ms="1h"),
    "CSV, compressed": lambda path: FileSink(path, CsvParts("gzip"), roll_interval_ms=0),
    "CSV, compressed, rolled by size": lambda path: FileSink(
        path, CsvParts("gzip"), roll_rows=20, roll_interval_ms="1h"
    ),
    "foreach_batch": lambda path: ForeachBatchSink(Calls()).bind(path),
    "foreach_batch of three": lambda path: ForeachBatchSink(Calls(), parallelism=3).bind(path),
    "table, appended": lambda path: table(f"sqlite:///{path}.db", "t").bind(path),
    "table, appended by three": lambda path: table(f"sqlite:///{path}.db", "t", parallelism=3).bind(path),
    "table, upserted": lambda path: table(f"sqlite:///{path}.db", "t", mode="upsert", key="row").bind(path),
}
ALL: dict[str, Make] = TRANSACTIONAL | {
    "collect": lambda path: CollectSink().bind(path),
    "discard": lambda path: discard(),
    "console": lambda path: console(),
}
SEEDS = 25


@pytest.fixture(autouse=True)
def small_books(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of epochs are put together all the time."""
    monkeypatch.setattr(table_sink, "_COMPACT_EVERY", 1)


def target_in(make: Make, folder: Path) -> SinkTarget:
    return target_of(make(str(folder / "out")), str(folder / "out"))


class TestTransactional(SinkContract):
    """They hand in again themselves what is not committed: so they did before the engine promised it."""

    keeps_handles = False

    @pytest.fixture(params=TRANSACTIONAL)
    def make_target(self, request: pytest.FixtureRequest) -> Callable[[Path], SinkTarget]:
        self.in_another_process = request.param in (PARQUET, TABLE)
        self.seeds = SEEDS if "table" not in request.param else SEEDS // 3  # a database takes its time
        return lambda folder: target_in(TRANSACTIONAL[request.param], folder)


class TestEverySink(SinkBasicsContract):
    @pytest.fixture(params=sorted(ALL.keys() - TRANSACTIONAL.keys()))
    def sink(self, request: pytest.FixtureRequest, tmp_path: Path) -> Sink:
        return ALL[request.param](str(tmp_path))


def _no_sync(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(staging.StagingLog, "make_durable", lambda self, cuts: None)


def _no_sync_of_parts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(part_draft, "sync_part", lambda fd: None)


def _forgets_parts_of_aborted_checkpoints(patch: pytest.MonkeyPatch) -> None:
    real = file_sink.PartWriter.pre_commit

    def pre_commit(self: file_sink.PartWriter, checkpoint_id: int, final: bool) -> object:
        self._pending = []
        return real(self, checkpoint_id, final)

    patch.setattr(file_sink.PartWriter, "pre_commit", pre_commit)


def _reads_behind_the_cut(patch: pytest.MonkeyPatch) -> None:
    def whole_piece(area: staging.StagingArea[Any], cut: staging.PieceCut, verify: bool) -> pa.RecordBatchReader:
        length = os.path.getsize(area.path(cut.file))
        return staging.open_piece(area, staging.PieceCut(cut.file, length, cut.rows, cut.digest), verify=False)

    patch.setattr(file_sink, "open_piece", whole_piece)


def _takes_over_what_lies_behind_the_cut(patch: pytest.MonkeyPatch) -> None:
    def whole_piece(area: staging.StagingArea[Any], cut: staging.PieceCut, verify: bool) -> pa.Buffer:
        return area.folder.read(cut.file, os.path.getsize(area.path(cut.file)))

    patch.setattr(part_draft, "read_piece", whole_piece)


def _goes_on_with_the_draft_of_another(patch: pytest.MonkeyPatch) -> None:
    """Its bytes are linked, not copied, although the old writer may go on with them."""

    def begun(self: part_draft.PartDraft) -> staging.PieceFile:
        if self._piece is None and len(self._inherited) == 1:
            self.name = self._inherited[0].file
            file = io.FileIO(self._area.path(self.name), "a")
            self._piece = staging.PieceFile(self._area, self.name, file)  # type: ignore[arg-type]
        return real(self)

    real = part_draft.PartDraft._begun
    patch.setattr(part_draft.PartDraft, "_begun", begun)


def _leaves_rows_in_the_log_that_are_encoded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(file_sink.PartWriter, "_absorb_log", lambda self: None)


def _counts_what_was_pre_committed_last_as_all_that_is_named(patch: pytest.MonkeyPatch) -> None:
    """Pieces that a draft has absorbed are in states of older checkpoints only."""
    real = file_sink.PartWriter._named_parts

    def named_parts(self: file_sink.PartWriter, checkpoint_id: int) -> object:
        self._named.intersection_update(self._last if hasattr(self, "_last") else set(self._named))
        made = real(self, checkpoint_id)
        self._last = {cut.file for cut in (*self._draft.cuts(), *self._log.cuts())}
        return made

    patch.setattr(file_sink.PartWriter, "_named_parts", named_parts)


def _no_footer_at_a_barrier(patch: pytest.MonkeyPatch) -> None:
    real = part_draft.PartDraft.cuts

    def cuts(self: part_draft.PartDraft) -> object:
        self._whole = True
        return real(self)

    patch.setattr(part_draft.PartDraft, "cuts", cuts)


def _commits_with_the_snapshot(patch: pytest.MonkeyPatch) -> None:
    real = file_sink.PartWriter._snapshot

    def snapshot(self: file_sink.PartWriter, *args: object) -> object:
        made = real(self, *args)  # type: ignore[arg-type]
        stem = part_commit.part_stem(self._ctx.job_uid, self._ctx.step)
        part_commit.PartCommitter(self._area, self._parts, SCHEMA, stem).commit(0, made.handles)
        return made

    patch.setattr(file_sink.PartWriter, "_snapshot", snapshot)


def _sweeps_what_the_snapshot_names(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(part_commit, "staged_pieces", lambda snapshots: ())


def _takes_nothing_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(part_commit.PartCommitter, "_take_back", lambda self, checkpoint_id, incarnation: None)


def _takes_back_without_a_sync(patch: pytest.MonkeyPatch) -> None:
    real = part_commit.PartCommitter._take_back

    def take_back(self: part_commit.PartCommitter, checkpoint_id: int, incarnation: int) -> None:
        with patch.context() as inner:
            inner.setattr(part_commit, "fsync_path", lambda path: None)
            real(self, checkpoint_id, incarnation)

    patch.setattr(part_commit.PartCommitter, "_take_back", take_back)


def _takes_back_the_restored_checkpoint_too(patch: pytest.MonkeyPatch) -> None:
    real = part_commit.PartCommitter._take_back
    patch.setattr(part_commit.PartCommitter, "_take_back", lambda self, n, incarnation: real(self, n - 1, incarnation))


def _takes_back_what_a_successor_committed(patch: pytest.MonkeyPatch) -> None:
    real = part_commit.PartCommitter._take_back
    patch.setattr(part_commit.PartCommitter, "_take_back", lambda self, n, below: real(self, n, 10**9))


def _sweeps_what_a_successor_staged(patch: pytest.MonkeyPatch) -> None:
    real = staging.StagingArea.sweep
    patch.setattr(
        staging.StagingArea, "sweep", lambda self, _, keep=(), subtasks=None: real(self, 10**9, keep, subtasks)
    )


def _commit_removes_what_older_checkpoints_need(patch: pytest.MonkeyPatch) -> None:
    real = part_draft.StagedPart.name_it
    patch.setattr(part_draft.StagedPart, "name_it", lambda self, name, shared: real(self, name, ()))


def _retires_what_newer_checkpoints_need(patch: pytest.MonkeyPatch) -> None:
    real = part_commit.PartCommitter.retire
    patch.setattr(part_commit.PartCommitter, "retire", lambda self, retired, retained: real(self, retired, []))


def _keeps_only_what_the_restored_checkpoint_needs(patch: pytest.MonkeyPatch) -> None:
    real = part_commit.PartCommitter.settle
    patch.setattr(
        part_commit.PartCommitter,
        "settle",
        lambda self, restored, retained, incarnation: real(self, restored, [restored] if restored else [], incarnation),
    )


def _no_sync_of_the_target(patch: pytest.MonkeyPatch) -> None:
    def sync_staging_only(path: str) -> None:
        if "_cutwater" in path:
            staging_folders.fsync_path(path)

    patch.setattr(part_commit, "fsync_path", sync_staging_only)
    patch.setattr(part_draft, "fsync_path", sync_staging_only)


def _forgets_epochs_of_aborted_checkpoints(patch: pytest.MonkeyPatch) -> None:
    real = foreach_batch.EpochWriter.pre_commit

    def pre_commit(self: foreach_batch.EpochWriter, checkpoint_id: int, final: bool) -> object:
        self._pending = []
        return real(self, checkpoint_id, final)

    patch.setattr(foreach_batch.EpochWriter, "pre_commit", pre_commit)


def _removes_an_epoch_before_the_call(patch: pytest.MonkeyPatch) -> None:
    def open_and_remove(area: staging.StagingArea[Any], cut: staging.PieceCut, verify: bool) -> pa.RecordBatchReader:
        reader = staging.open_piece(area, cut, verify=verify)
        area.folder.remove([cut.file])
        return reader

    patch.setattr(foreach_batch, "open_piece", open_and_remove)


def _commits_rows_without_their_epoch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(table_sink.EpochRecords, "enter", lambda self, connection, epoch: epoch.checkpoint_id)


def _splits_the_transaction_in_two(patch: pytest.MonkeyPatch) -> None:
    def take(self: table_sink.TableCommitter, rows: pa.Table, epoch: foreach_batch.EpochHandle) -> None:
        with self._records.transaction() as connection:
            number = self._records.enter(connection, epoch)
        if number is not None:
            with self._records.transaction() as connection:
                connection.cursor().executemany(self._statement, self._values(rows, number))

    patch.setattr(table_sink.TableCommitter, "_take", take)


def _takes_no_rows_back(patch: pytest.MonkeyPatch) -> None:
    real = table_sink.EpochRecords.fence
    patch.setattr(table_sink.EpochRecords, "fence", lambda self, n, number, target: real(self, n, number, None))


def _takes_back_rows_of_a_successor(patch: pytest.MonkeyPatch) -> None:
    real = table_sink.EpochRecords.fence
    patch.setattr(table_sink.EpochRecords, "fence", lambda self, n, incarnation, target: real(self, n, 10**9, target))


def _compacts_too_much(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(table_sink, "_COMPACT_EVERY", 1)
    patch.setattr(table_sink, "_epochs", lambda snapshot: [])


PARQUET, EPOCHS, TABLE = "parquet, rolled by size", "foreach_batch", "table, appended"
GROUPS, LINES = "parquet, small row groups", "CSV, compressed, rolled by size"
MUTANTS: list[tuple[str, Callable[[pytest.MonkeyPatch], None]]] = [
    (PARQUET, _no_sync),
    (PARQUET, _no_sync_of_parts),
    (PARQUET, _forgets_parts_of_aborted_checkpoints),
    (PARQUET, _reads_behind_the_cut),
    (PARQUET, _commits_with_the_snapshot),
    (PARQUET, _sweeps_what_the_snapshot_names),
    (PARQUET, _no_sync_of_the_target),
    (PARQUET, _takes_nothing_back),
    (PARQUET, _takes_back_without_a_sync),
    (PARQUET, _takes_back_the_restored_checkpoint_too),
    (PARQUET, _takes_back_what_a_successor_committed),
    (PARQUET, _sweeps_what_a_successor_staged),
    (PARQUET, _commit_removes_what_older_checkpoints_need),
    (PARQUET, _retires_what_newer_checkpoints_need),
    (PARQUET, _keeps_only_what_the_restored_checkpoint_needs),
    (GROUPS, _no_sync),
    (GROUPS, _no_sync_of_parts),
    (GROUPS, _takes_over_what_lies_behind_the_cut),
    (GROUPS, _leaves_rows_in_the_log_that_are_encoded),
    (GROUPS, _counts_what_was_pre_committed_last_as_all_that_is_named),
    (GROUPS, _no_footer_at_a_barrier),
    (LINES, _no_sync),
    (LINES, _takes_over_what_lies_behind_the_cut),
    (LINES, _goes_on_with_the_draft_of_another),
    (LINES, _commit_removes_what_older_checkpoints_need),
    (EPOCHS, _no_sync),
    (EPOCHS, _forgets_epochs_of_aborted_checkpoints),
    (EPOCHS, _removes_an_epoch_before_the_call),
    (TABLE, _commits_rows_without_their_epoch),
    (TABLE, _splits_the_transaction_in_two),
    (TABLE, _takes_no_rows_back),
    (TABLE, _takes_back_rows_of_a_successor),
    (TABLE, _compacts_too_much),
]


@pytest.mark.parametrize(("name", "plant"), MUTANTS, ids=lambda value: getattr(value, "__name__", value))
def test_the_model_catches_a_planted_bug(
    name: str, plant: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(16 * SEEDS):
        with monkeypatch.context() as patch:
            plant(patch)
            try:
                target = target_in(TRANSACTIONAL[name], tmp_path / str(seed))
                # Records are compacted away too early only where an epoch waits for its commit for long.
                promptness = 0.2 if plant is _compacts_too_much else 0.7
                SinkJob(target, seed, patch, keeps_handles=False, promptness=promptness).run(60)
            except (AssertionError, CutwaterError):
                return
    pytest.fail("the planted bug went unseen")


@pytest.mark.parametrize("make", TRANSACTIONAL.values(), ids=TRANSACTIONAL.keys())
def test_t3_a_fork_leaves_every_file_of_another_uid_alone(make: Make, tmp_path: Path) -> None:
    target = tmp_path / "out"
    sink = make(str(target))
    writer = sink.writer(SCHEMA, Identity(0, 1, 1), [])
    writer.write(batch_of([1, 2]))
    made = writer.pre_commit(1, final=False)()
    before = sorted(target.rglob("*"))
    fork = sink.committer(SCHEMA, "f0f0f0", "out")
    fork.commit(1, made.handles)
    snapshot = SinkSnapshot(1, made.handles, [made.state])
    fork.settle(snapshot, [snapshot], 9)
    fork.settle(None, [], 9)
    fork.retire(snapshot, [])
    fork.finish(9)
    assert sorted(target.rglob("*")) == before
    copy = sink.writer(SCHEMA, Identity(0, 1, 2, job_uid="f0f0f0"), [made.state])
    copied = copy.pre_commit(2, final=True)()
    assert [handle["type"] for handle in copied.handles] == ["end"]
