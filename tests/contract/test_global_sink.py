"""The contract of sinks with one commit for all subtasks, in the driver: Delta and Iceberg tables, stream writers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from global_targets import MAKE

from cutwater.connectors.base import SinkSnapshot
from cutwater.connectors.data_source import committer as data_source_committer
from cutwater.connectors.delta import committer as delta_committer
from cutwater.connectors.delta import written_table
from cutwater.connectors.delta.committer import DeltaCommitter
from cutwater.connectors.delta.written_table import State, WrittenTable
from cutwater.connectors.files import part_draft
from cutwater.connectors.files import sink as file_sink
from cutwater.connectors.iceberg import catalog as catalog_module
from cutwater.connectors.iceberg import committer as committer_module
from cutwater.connectors.iceberg import writer as writer_module
from cutwater.connectors.iceberg.commit_record import NOTHING, CommitRecord
from cutwater.connectors.iceberg.committer import IcebergCommitter
from cutwater.errors import CutwaterError
from cutwater.testing import SinkContract, SinkTarget
from cutwater.testing.sink_job import SCHEMA, Identity, SinkJob, batch_of

EACH, ROLLED, TABLE, ROWS = (
    "delta, a file per checkpoint",
    "delta, rolled by size",
    "iceberg",
    "a stream writer of rows",
)


class TestGlobally(SinkContract):
    @pytest.fixture(params=MAKE)
    def make_target(self, request: pytest.FixtureRequest) -> Callable[[Path], SinkTarget]:
        self.in_another_process = request.param in (EACH, TABLE, ROWS)
        self.seeds = 2 if "iceberg" in request.param else 8
        return MAKE[request.param]


@pytest.mark.full
@pytest.mark.parametrize("name", MAKE)
def test_rows_are_visible_exactly_once_in_many_jobs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sleepers = fenced = 0
    for seed in range(100, 112 if "iceberg" in name else 160):
        with monkeypatch.context() as patch:
            folder = tmp_path / str(seed)
            folder.mkdir()
            job = SinkJob(MAKE[name](folder), seed, patch, promptness=0.2 if seed % 3 == 2 else 0.7)
            job.run(60)
        sleepers, fenced = sleepers + job.sleepers, fenced + job.fenced
    assert sleepers > 0, "nobody has slept in the middle of a commit"
    assert fenced > 0, "no driver of before was refused"


def _commits_lower_numbers(patch: pytest.MonkeyPatch) -> None:
    """A fresh handle takes any number: only a look before the commit tells that it is too late."""
    patch.setattr(delta_committer.CommitNumber, "check", lambda self, attempt, path: None)


def _does_not_fence(patch: pytest.MonkeyPatch) -> None:
    real = DeltaCommitter._bring_in

    def bring_in(self: DeltaCommitter, checkpoint_id: int, own: Any, attempt: int, *, settling: bool) -> None:
        if own or not settling:
            real(self, checkpoint_id, own, attempt, settling=settling)

    patch.setattr(DeltaCommitter, "_bring_in", bring_in)


def _commits_again_what_is_in(patch: pytest.MonkeyPatch) -> None:
    def newest(self: WrittenTable) -> State | None:
        state = real(self)
        return None if state is None else state._replace(number=state.number >> 32 << 32)

    real = WrittenTable.newest
    patch.setattr(WrittenTable, "newest", newest)


def _takes_nothing_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeltaCommitter, "_later_files", lambda self, checkpoint_id, attempt: [])


def _takes_back_the_restored_checkpoint_too(patch: pytest.MonkeyPatch) -> None:
    real = DeltaCommitter._is_later
    patch.setattr(DeltaCommitter, "_is_later", lambda self, path, n, attempt: real(self, path, n - 1, attempt))


def _leaves_the_log_where_a_power_loss_takes_it(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(written_table, "fsync_path", lambda path: None)


def _leaves_files_where_a_power_loss_takes_them(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(delta_committer, "fsync_path", lambda path: None)


def _removes_staged_rows_before_the_commit(patch: pytest.MonkeyPatch) -> None:
    real = DeltaCommitter._publish

    def publish(self: DeltaCommitter, due: Any) -> None:
        self._area.folder.remove(piece for handle in due for piece in (*handle.part.pieces, *handle.part.shared))
        real(self, due)

    patch.setattr(DeltaCommitter, "_publish", publish)


def _no_sync_of_parts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(part_draft, "sync_part", lambda fd: None)


def _forgets_parts_of_aborted_checkpoints(patch: pytest.MonkeyPatch) -> None:
    real = file_sink.PartWriter.pre_commit

    def pre_commit(self: file_sink.PartWriter, checkpoint_id: int, final: bool) -> object:
        self._pending = []
        return real(self, checkpoint_id, final)

    patch.setattr(file_sink.PartWriter, "pre_commit", pre_commit)


def _lets_the_library_retry(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(catalog_module, "without_retries", lambda table: table)


def _asks_for_no_record(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(committer_module, "_above", lambda files, checkpoint_id: list(files))


def _leaves_the_record_as_it_was(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(committer_module, "record_of", lambda metadata, key: NOTHING)


def _fences_nobody(patch: pytest.MonkeyPatch) -> None:
    real = IcebergCommitter._perform

    def perform(self: IcebergCommitter, table: Any, change: Any) -> None:
        if change.added or change.removed:
            real(self, table, change)

    patch.setattr(IcebergCommitter, "_perform", perform)


def _fences_by_the_property_alone(patch: pytest.MonkeyPatch) -> None:
    """Whoever has looked at the table before builds on the same snapshot as ever."""
    real = IcebergCommitter._perform

    def perform(self: IcebergCommitter, table: Any, change: Any) -> None:
        if change.added or change.removed:
            real(self, table, change)
        else:
            with table.transaction() as transaction:
                transaction.set_properties({self._key: change.record.text()})

    patch.setattr(IcebergCommitter, "_perform", perform)


def _trusts_whoever_comes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(IcebergCommitter, "_check_authority", lambda self, record, files: None)


def _takes_no_file_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(IcebergCommitter, "_later_files", lambda self, table, goal, incarnation: [])


def _rolls_the_table_back(patch: pytest.MonkeyPatch) -> None:
    """All that came later goes, rows of others as well."""
    real = IcebergCommitter._later_files

    def later(self: IcebergCommitter, table: Any, goal: int, incarnation: int) -> list[Any]:
        mine = real(self, table, goal, incarnation)
        return [task.file for task in table.scan().plan_files()] if mine else []

    patch.setattr(IcebergCommitter, "_later_files", later)


def _takes_back_files_of_the_restored_checkpoint(patch: pytest.MonkeyPatch) -> None:
    real = IcebergCommitter._is_later
    patch.setattr(IcebergCommitter, "_is_later", lambda self, path, goal, *more: real(self, path, goal - 1, *more))


def _writes_the_record_by_itself(patch: pytest.MonkeyPatch) -> None:
    real = IcebergCommitter._perform

    def perform(self: IcebergCommitter, table: Any, change: Any) -> None:
        before = CommitRecord.parsed(table.metadata.properties.get(self._key, "0.0"))
        real(self, table, change._replace(record=before))
        with self._table.loaded().transaction() as transaction:
            transaction.set_properties({self._key: change.record.text()})

    patch.setattr(IcebergCommitter, "_perform", perform)


def _forgets_what_a_barrier_cut(patch: pytest.MonkeyPatch) -> None:
    real = writer_module.IcebergWriter._handles

    def handles(self: writer_module.IcebergWriter, until: int) -> list[Any]:
        self._cut = self._cut[-1:]
        return real(self, until)

    patch.setattr(writer_module.IcebergWriter, "_handles", handles)


def _forgets_who_has_settled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(data_source_committer.GlobalCommitter, "_check_fence", lambda self, incarnation: None)


def _commits_the_newest_cut_only(patch: pytest.MonkeyPatch) -> None:
    real = data_source_committer.GlobalCommitter._decoded

    def decoded(self: data_source_committer.GlobalCommitter, handles: Any) -> Any:
        found = real(self, handles)
        newest = max((handle.checkpoint_id for handle in found), default=0)
        return [handle for handle in found if handle.checkpoint_id == newest]

    patch.setattr(data_source_committer.GlobalCommitter, "_decoded", decoded)


def _gives_up_what_is_restored(patch: pytest.MonkeyPatch) -> None:
    real = data_source_committer.GlobalCommitter.settle

    def settle(self: data_source_committer.GlobalCommitter, restored: Any, retained: Any, incarnation: int) -> None:
        self._give_up(incarnation)
        real(self, restored, retained, incarnation)

    patch.setattr(data_source_committer.GlobalCommitter, "settle", settle)


FIRST = {
    _commits_lower_numbers: 7,
    _trusts_whoever_comes: 2,
    _writes_the_record_by_itself: 3,
    _forgets_what_a_barrier_cut: 3,
    _commits_the_newest_cut_only: 12,
}
"""The jobs before these find nothing, and take their time."""
MUTANTS: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    _commits_lower_numbers: EACH,
    _does_not_fence: EACH,
    _commits_again_what_is_in: EACH,
    _takes_nothing_back: EACH,
    _takes_back_the_restored_checkpoint_too: EACH,
    _leaves_the_log_where_a_power_loss_takes_it: EACH,
    _leaves_files_where_a_power_loss_takes_them: EACH,
    _removes_staged_rows_before_the_commit: ROLLED,
    _no_sync_of_parts: EACH,
    _forgets_parts_of_aborted_checkpoints: EACH,
    _lets_the_library_retry: TABLE,
    _asks_for_no_record: TABLE,
    _leaves_the_record_as_it_was: TABLE,
    _fences_nobody: TABLE,
    _fences_by_the_property_alone: TABLE,
    _trusts_whoever_comes: TABLE,
    _takes_no_file_back: TABLE,
    _rolls_the_table_back: TABLE,
    _takes_back_files_of_the_restored_checkpoint: TABLE,
    _writes_the_record_by_itself: TABLE,
    _forgets_what_a_barrier_cut: TABLE,
    _forgets_who_has_settled: ROWS,
    _commits_the_newest_cut_only: ROWS,
    _gives_up_what_is_restored: ROWS,
}


@pytest.mark.parametrize("plant", MUTANTS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = FIRST.get(plant, 0)
    for seed in range(first, first + 200):
        with monkeypatch.context() as patch:
            plant(patch)
            folder = tmp_path / str(seed)
            folder.mkdir()
            try:
                SinkJob(
                    MAKE[MUTANTS[plant]](folder),
                    seed,
                    patch,
                    keeps_handles=plant is not _forgets_parts_of_aborted_checkpoints,
                    promptness=0.2 if plant is _forgets_who_has_settled else 0.7,
                ).run(60)
            except (AssertionError, CutwaterError):
                return
    pytest.fail("the planted bug went unseen")


@pytest.mark.parametrize("name", [name for name in MAKE if name.startswith("delta")])
def test_t3_a_fork_leaves_every_file_of_another_uid_alone(name: str, tmp_path: Path) -> None:
    table, target = MAKE[name](tmp_path), tmp_path / "out"
    sink = table.sink
    driver = sink.committer(SCHEMA, "c0ffee", "out")
    driver.settle(None, [], 1)
    writer = sink.writer(SCHEMA, Identity(0, 1, 1), [])
    parts = []
    for checkpoint_id in (1, 2):
        writer.roll()
        writer.write(batch_of([checkpoint_id]))
        parts.append(writer.pre_commit(checkpoint_id, final=False)())
        if checkpoint_id == 1:
            driver.commit(1, parts[0].handles)
    snapshot = SinkSnapshot(2, parts[1].handles, [parts[1].state])
    before = sorted(path for path in target.rglob("*") if "_delta_log" not in str(path))
    fork = sink.committer(SCHEMA, "f0f0f0", "out")
    fork.settle(SinkSnapshot(0), [], 9)
    fork.commit(2, snapshot.handles)
    fork.retire(snapshot, [])
    fork.finish(9)
    assert sorted(path for path in target.rglob("*") if "_delta_log" not in str(path)) == before
    assert table.rows() == [1]
    driver.commit(2, snapshot.handles)
    assert sorted(table.rows()) == [1, 2]
