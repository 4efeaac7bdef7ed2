"""Brings files into a table, one version for all subtasks.  See ``docs/decisions/0058-delta.md``."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence

import pyarrow as pa

from cutwater.connectors.base import Json, SinkSnapshot
from cutwater.connectors.delta.commit_number import CommitNumber
from cutwater.connectors.delta.log import FileAction, active_files, read_entry
from cutwater.connectors.delta.table import Conflict, Description, described
from cutwater.connectors.delta.target import DeltaTarget
from cutwater.connectors.delta.writer import DeltaHandle, own_handles
from cutwater.connectors.delta.written_table import NewFile, WrittenTable
from cutwater.connectors.files.part_commit import (
    PartHandle,
    checkpoint_of_part,
    part_statuses,
    part_stem,
    staged_pieces,
    verify_part,
)
from cutwater.connectors.staging import StagingArea, incarnation_of
from cutwater.connectors.staging_folders import TargetFolder, fsync_path, storage_errors
from cutwater.errors import CutwaterError, StorageError
from cutwater.storage.store.no_follow import opened_folder

_TRIES = 20
_PAUSE_S = 0.02


class Commits:
    """Commits of one step of a job into its table, each under a number that is read first.

    Args:
        target: the table, and what we ask of it.
        schema: of the rows, with Delta's types.
        job_uid, step: whose.
    """

    def __init__(self, target: DeltaTarget, schema: pa.Schema, job_uid: str, step: str) -> None:
        self.table = WrittenTable(target.path, f"cutwater-{job_uid}-{step}")
        self._target, self._schema, self._step = target, schema, step
        self.attempt: int | None = None
        """The fence that ``settle`` set up; before, each handle has that of its own writer."""
        self._fitting: Description | None = None
        """What the table said of itself when it was looked at last."""

    def perform(self, attempt: int, commit: Callable[[CommitNumber], None]) -> None:
        """Have the newest version, with the number in it, committed on; again if it is not the newest any more.

        Args:
            attempt: on whose word.
            commit: gets the number, and leaves what it says is in.

        Raises:
            FencedError: a later attempt has taken over.
            StorageError: the table does not take the rows.
        """
        for patience in range(_TRIES, -1, -1):
            state = self.table.newest()
            if state is None:
                self.table.create(self._schema, self._target.partition_by)
                continue
            number = CommitNumber.of(state.number)
            number.check(attempt, self.table.path)
            try:
                if self._fits(state.description):
                    commit(number)
                    return
            except Conflict:
                if not patience:
                    raise
                time.sleep(_PAUSE_S)
        raise StorageError(f"the Delta table {self.table.path!r} cannot be made, or changed")

    def _fits(self, description: Description) -> bool:
        """Whether the table takes our rows; False: it was changed, so that it will."""
        if description is self._fitting:
            return True
        missing = self._target.missing(description, self._schema)
        if missing:
            self._target.add_columns(self.table.handle(), missing)
            return False
        self._fitting = description
        return True

    def told(self, checkpoint_id: int) -> dict[str, str]:
        """What people find in the table's history."""
        return {"cutwater": f"step {self._step}, checkpoint {checkpoint_id}"}

    def tidy(self) -> None:
        """Put the log together now and then; that this fails does no harm to what is committed."""
        try:
            self.table.tidy(self._target.log_checkpoint_commits)
        except CutwaterError as error:
            logging.getLogger("cutwater").warning("step %s: %s", self._step, error)


class DeltaCommitter:
    """Commits the files of one write step.

    Args:
        commits: of the step.
        area: its staging; the root is the table.
    """

    takes_back = True

    def __init__(self, commits: Commits, area: StagingArea[TargetFolder]) -> None:
        self._commits, self._area = commits, area
        self._stem = part_stem(area.job_uid, area.step)

    def commit(self, checkpoint_id: int, handles: list[Json]) -> None:
        """See ``Committer.commit``: all files that are not in yet, in one version.

        Raises:
            CorruptSnapshotError: a handle names what this step does not write.
            FencedError: a later attempt has taken over.
            StorageError: the table does not take them; they stay for the next try.
        """
        own = own_handles(handles, self._area.job_uid, self._stem)
        if not own:
            return
        attempt = self._commits.attempt
        if attempt is None:
            attempt = max(handle.incarnation for handle in own)
        self._bring_in(checkpoint_id, own, attempt, settling=False)
        self._commits.tidy()

    def settle(self, restored: SinkSnapshot | None, retained: Sequence[SinkSnapshot], incarnation: int) -> None:
        """See ``Committer.settle``: the number of the new attempt, what is to come in and what to go, in one version.

        Raises:
            CorruptSnapshotError: a staged file differs from its digest; nothing was committed.
            FencedError: a later attempt has taken over.
            StorageError: the table does not take it, or rows cannot be taken back.
        """
        own = own_handles(restored.handles, self._area.job_uid, self._stem) if restored is not None else []
        self._bring_in(0 if restored is None else restored.checkpoint_id, own, incarnation, settling=True)
        self._commits.attempt = incarnation
        self._area.sweep(incarnation, keep=set(staged_pieces(retained)))

    def retire(self, retired: SinkSnapshot, retained: Sequence[SinkSnapshot]) -> None:
        """See ``Committer.retire``."""
        own = own_handles(retired.handles, self._area.job_uid, self._stem)
        shared = {piece for handle in own for piece in handle.part.shared}
        self._area.folder.remove(shared.union(staged_pieces([retired])).difference(staged_pieces(retained)))

    def finish(self, incarnation: int) -> None:
        """See ``Committer.finish``.

        Raises:
            StorageError: the staging cannot be removed.
        """
        if self._area.folder.exists():
            self._area.finish(incarnation)

    def _bring_in(self, checkpoint_id: int, own: Sequence[DeltaHandle], attempt: int, *, settling: bool) -> None:
        def commit(number: CommitNumber) -> None:
            due = [one for one in own if one.checkpoint_id > number.checkpoint_id]
            if not due and not settling:
                return
            back = settling and number.checkpoint_id > checkpoint_id
            removed = self._later_files(checkpoint_id, attempt) if back else []
            for one in due if settling or self._area.guard.seal.keyed else ():
                verify_part(self._area, one.part)
            self._publish(due)
            added = [NewFile(one.path, one.part.bytes, one.partition, one.stats) for one in due]
            after = CommitNumber(attempt, checkpoint_id).value
            self._commits.table.commit(added, removed, after, self._commits.told(checkpoint_id))

        self._commits.perform(attempt, commit)
        # What is in the table stays; its files hold the rows of these pieces.
        self._area.folder.remove(piece for handle in own for piece in handle.part.pieces)

    def _publish(self, due: Sequence[DeltaHandle]) -> None:
        """Move files to where the table has them; no reader sees them before the log names them.

        Raises:
            StorageError: one is in neither place, or the disk failed.
        """
        staged = part_statuses(self._area, [handle.part for handle in due])
        root = self._area.folder.root
        touched: set[str] = set()
        for handle, status in zip(due, staged, strict=True):
            path = os.path.join(root, handle.path)
            if status == "staged":
                self._move(handle.part, handle.folders)
                touched.add(os.path.dirname(path))
            elif not os.path.isfile(path):
                raise StorageError(
                    f"output file {handle.path!r} ({handle.part.rows} rows) is lost: it is neither staged nor in "
                    f"the Delta table {root!r}",
                    hint="Somebody removed it, or vacuumed the table with too short a retention. Start afresh with a "
                    "new checkpoint directory.",
                )
            else:
                touched.add(os.path.dirname(path))
        for folder in touched:
            while folder != root:
                fsync_path(folder)
                folder = os.path.dirname(folder)
        if due:
            fsync_path(root)

    def _move(self, part: PartHandle, folders: Sequence[str]) -> None:
        root = self._area.folder.root
        with storage_errors("cannot commit", os.path.join(root, *folders, part.final)):
            for depth, name in enumerate(folders):
                with opened_folder(root, list(folders[:depth])) as above, contextlib.suppress(FileExistsError):
                    os.mkdir(name, dir_fd=above)
            with self._area.folder.opened() as staging, opened_folder(root, list(folders)) as target:
                os.rename(part.staged, part.final, src_dir_fd=staging, dst_dir_fd=target)

    def _later_files(self, checkpoint_id: int, attempt: int) -> list[FileAction]:
        """Files of ours that later checkpoints brought in.

        Raises:
            StorageError: somebody has rewritten one, or the table lets nothing be removed.
        """
        handle = self._commits.table.handle()
        files = active_files(handle, self._stem)
        found = [action for action in files if self._is_later(action.file, checkpoint_id, attempt)]
        active = {action.file for action in found}
        rewritten = sorted(self._added_since(handle.version(), checkpoint_id, attempt) - active)
        if rewritten:
            raise StorageError(
                f"the rows that later checkpoints brought into the Delta table {self._area.folder.root!r} cannot be "
                f"taken back: somebody has rewritten or removed {len(rewritten)} of their files, first of all "
                f"{rewritten[0]!r}",
                hint="Restore the newest checkpoint; or bring the table back to an older version by hand "
                "(RESTORE TABLE), and start the job afresh with a new checkpoint directory.",
            )
        if found and described(handle).asked.append_only:
            raise StorageError(
                f"the rows that later checkpoints brought into the Delta table {self._area.folder.root!r} cannot be "
                "taken back: delta.appendOnly is set",
                hint="Restore the newest checkpoint, or unset the property for this start.",
            )
        return found

    def _added_since(self, version: int, checkpoint_id: int, attempt: int) -> set[str]:
        """Files that later checkpoints brought in, by the log, and that we have not taken back since."""
        added: set[str] = set()
        taken_back: set[str] = set()
        while (entry := read_entry(self._area.folder.root, version)) is not None:
            number = entry.number(self._commits.table.app)
            if number is not None:
                if CommitNumber.of(number).checkpoint_id <= checkpoint_id:
                    break
                taken_back |= {action.file for action in entry.removed}
                added |= {action.file for action in entry.added} - taken_back
            version -= 1
        return {path for path in added if self._is_later(path, checkpoint_id, attempt)}

    def _is_later(self, path: str, checkpoint_id: int, attempt: int) -> bool:
        name = path.rpartition("/")[2]
        if not name.startswith(self._stem):
            return False
        cut = checkpoint_of_part(name)
        return cut is not None and cut > checkpoint_id and incarnation_of(name) < attempt
