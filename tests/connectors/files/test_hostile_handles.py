"""Names in a snapshot that somebody changed: what does not belong to the step is refused, and nothing is touched."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from sink_identity import SCHEMA, Identity, numbers, parts

from cutwater.connectors import staging
from cutwater.connectors.base import PreCommit, SinkSnapshot
from cutwater.connectors.files import part_commit
from cutwater.connectors.files.part_commit import (
    LogState,
    PartCommitter,
    PartHandle,
    check_part,
    part_status,
    part_stem,
)
from cutwater.connectors.files.sink import FileSink
from cutwater.connectors.foreach_batch import EpochCommitter, EpochHandle
from cutwater.connectors.staging import PieceCut, check_piece, open_piece, read_piece, staging_beside, staging_in_store
from cutwater.connectors.staging_folders import TargetFolder
from cutwater.errors import CorruptSnapshotError, StorageError
from cutwater.storage.snapshot.limits import check_name
from reversal import Reversal

STEM = part_stem("uid", "out")
SUFFIX = "00000-0000000001-0000000001-0000.parquet"
PART, PIECE = STEM + SUFFIX, "wal-00000-0000000001-000000.arrows"
THESIS = "three years of work"

ELSEWHERE = [
    "/etc/passwd",
    "../precious/thesis",
    "..",
    ".",
    "",
    "sub/{}",
    "../{}",
    "/{}",
    "{}/..",
    "{}\0",
    "{}\n",
    ".{}",
]
"""Forms of a name that lead elsewhere; with the right one in them, too."""
FOREIGN_PARTS = {
    "another job's": part_stem("other", "out") + SUFFIX,
    "another step's": part_stem("uid", "tuo") + SUFFIX,
    "a longer step's": part_stem("uid", "out-more") + SUFFIX,
    "no suffix": STEM,
    "a folder behind the stem": f"{STEM}../../{SUFFIX}",
    "another ending": PART.replace(".parquet", ".sh"),
    "something behind it": PART + ".tmp",
    "a piece": PIECE,
} | {form: form.format(PART) for form in ELSEWHERE}
FOREIGN_PIECES = {"a part": PART, "another ending": PIECE + "x", "no number": "wal-0-0-0.arrows"} | {
    form: form.format(PIECE) for form in ELSEWHERE
}


def handle(**changed: object) -> PartHandle:
    return msgspec.structs.replace(PartHandle("uid", PART, PART, 1, 1, [PIECE], [PIECE]), **changed)


def test_names_as_a_step_gives_them_are_taken() -> None:
    assert check_part(handle(), STEM) == handle()


@pytest.mark.parametrize("form", FOREIGN_PARTS)
def test_a_part_that_this_step_does_not_write_is_refused(form: str) -> None:
    name = FOREIGN_PARTS[form]
    for changed in ({"staged": name, "final": name}, {"staged": name}, {"final": name}):
        with pytest.raises(CorruptSnapshotError, match="is no file that this step writes"):
            check_part(handle(**changed), STEM)


def test_a_part_that_would_become_another_part_of_the_step_is_refused() -> None:
    another = PART.replace("-0000.parquet", "-0001.parquet")
    for changed in ({"staged": another}, {"final": another}):
        with pytest.raises(CorruptSnapshotError, match="is no file that this step writes"):
            check_part(handle(**changed), STEM)


@pytest.mark.parametrize("field", ["pieces", "shared"])
@pytest.mark.parametrize("form", FOREIGN_PIECES)
def test_a_piece_that_no_sink_stages_is_refused(form: str, field: str) -> None:
    with pytest.raises(CorruptSnapshotError, match="is no file that a sink stages"):
        check_part(handle(**{field: [PIECE, FOREIGN_PIECES[form]]}), STEM)
    with pytest.raises(CorruptSnapshotError, match="is no file that a sink stages"):
        check_piece(FOREIGN_PIECES[form])


@pytest.mark.parametrize("name", ["/etc", "..", ".", "", "a/b", "../uid", "a\0", "a\n", ".hidden", "x" * 129])
def test_a_uid_or_step_that_is_no_plain_name_is_refused(tmp_path: Path, name: str) -> None:
    for uid, step in ((name, "out"), ("uid", name)):
        with pytest.raises(CorruptSnapshotError, match="names no file or folder of Cutwater's"):
            staging_beside(str(tmp_path), uid, step)
        with pytest.raises(CorruptSnapshotError, match="names no file or folder of Cutwater's"):
            staging_in_store(str(tmp_path), uid, step)
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------- where handles are used


def staged(root: Path) -> tuple[FileSink, PreCommit]:
    """A part that is not committed yet, beside what is not the job's."""
    sink = FileSink(str(root / "out"), roll_interval_ms=0)
    writer = sink.writer(SCHEMA, Identity(), [])
    writer.write(numbers(1, 2))
    made = writer.pre_commit(1, False)()
    (root / "precious").mkdir()
    (root / "precious" / "thesis").write_text(THESIS)
    return sink, made


def test_a_committer_touches_nothing_that_a_changed_handle_names(tmp_path: Path) -> None:
    sink, made = staged(tmp_path)
    thesis = "../../../../precious/thesis"
    for changed in ({"staged": thesis}, {"final": thesis}, {"pieces": [thesis]}, {"shared": [thesis]}):
        told = SinkSnapshot(1, [made.handles[0] | changed], [])
        committer = sink.committer(SCHEMA, "uid", "out")
        for use in (
            lambda told=told, committer=committer: committer.commit(1, told.handles),
            lambda told=told, committer=committer: committer.settle(told, [told], 2),
            lambda told=told, committer=committer: committer.settle_subtasks(told, [told], 2, {0}),
            lambda told=told, committer=committer: committer.retire(told, []),
        ):
            with pytest.raises(CorruptSnapshotError, match="is no file that"):
                use()
    assert (tmp_path / "precious" / "thesis").read_text() == THESIS
    assert not list((tmp_path / "out").glob("part-*"))
    sink.committer(SCHEMA, "uid", "out").commit(1, made.handles)
    assert parts(tmp_path / "out") == [[1, 2]]


def test_a_handle_of_another_jobs_uid_is_left_to_that_job(tmp_path: Path) -> None:
    sink, made = staged(tmp_path)
    sink.committer(SCHEMA, "uid", "out").commit(1, [made.handles[0] | {"uid": "other"}])
    assert not list((tmp_path / "out").glob("part-*"))


def test_a_state_that_names_what_is_no_piece_is_neither_read_nor_removed(tmp_path: Path) -> None:
    sink, _ = staged(tmp_path)
    cut = PieceCut("../../../../precious/thesis", len(THESIS), 1, "")
    state = msgspec.to_builtins(LogState("uid", [cut]))
    told = SinkSnapshot(1, [], [state])
    with pytest.raises(CorruptSnapshotError, match="is no file that a sink stages"):
        sink.committer(SCHEMA, "uid", "out").retire(told, [])
    with pytest.raises(CorruptSnapshotError, match="is no file that a sink stages"):
        open_piece(staging_beside(sink.path, "uid", "out"), cut, verify=False)
    assert (tmp_path / "precious" / "thesis").read_text() == THESIS


@pytest.mark.parametrize("form", FOREIGN_PIECES)
def test_an_epoch_whose_rows_lie_elsewhere_is_refused(form: str) -> None:
    epoch = EpochHandle("uid", 1, 0, 1, PieceCut(FOREIGN_PIECES[form], 1, 1, ""))
    with pytest.raises(CorruptSnapshotError, match="is no file that a sink stages"):
        EpochCommitter.decode([msgspec.to_builtins(epoch)])


LINKS: dict[str, Callable[[Path], None]] = {
    "a link to the right bytes": lambda path: (path.rename(path.with_name("moved")), path.symlink_to("moved"))[-1],
    "a link to nothing": lambda path: (path.unlink(), path.symlink_to("nowhere"))[-1],
    "a folder": lambda path: (path.unlink(), path.mkdir())[-1],
    "a FIFO": lambda path: (path.unlink(), os.mkfifo(path))[-1],
}


@pytest.mark.parametrize("kind", LINKS)
def test_a_staged_part_that_is_no_file_is_not_taken_for_a_committed_one(tmp_path: Path, kind: str) -> None:
    """Its rows would be in no file, and nobody would say so."""
    sink, made = staged(tmp_path)
    part = msgspec.convert(made.handles[0], PartHandle)
    area = staging_beside(sink.path, "uid", "out")
    assert part_status(area, part) == "staged"
    LINKS[kind](Path(area.path(part.staged)))
    committer, told = sink.committer(SCHEMA, "uid", "out"), SinkSnapshot(1, made.handles, [])
    for use in (
        lambda: part_status(area, part),
        lambda: committer.commit(1, made.handles),
        lambda: committer.settle(told, [told], 2),
    ):
        with pytest.raises(CorruptSnapshotError, match=f"{part.staged}' is not a file"):
            use()
    assert not list((tmp_path / "out").glob("part-*"))


def test_a_link_in_the_place_of_the_staging_folder_does_not_make_a_part_committed(tmp_path: Path) -> None:
    sink, made = staged(tmp_path)
    folder = tmp_path / "out" / "_cutwater" / "uid"
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CorruptSnapshotError, match="uid is a symbolic link, and those are not followed"):
        sink.committer(SCHEMA, "uid", "out").commit(1, made.handles)


def test_a_staging_folder_that_cannot_be_looked_into_does_not_make_a_part_committed(tmp_path: Path) -> None:
    sink, made = staged(tmp_path)
    folder = tmp_path / "out" / "_cutwater" / "uid"
    folder.rename(tmp_path / "elsewhere")
    folder.touch()
    with pytest.raises(StorageError, match=r"cannot look at .*Not a directory"):
        sink.committer(SCHEMA, "uid", "out").commit(1, made.handles)


# ----------------------------------------------------------------------------------------------------------- the alarm

A_STATE = test_a_state_that_names_what_is_no_piece_is_neither_read_nor_removed
REVERSALS = {
    "a part becomes another": Reversal(
        check_part,
        "name != part.final or ",
        "",
        lambda _: test_a_part_that_would_become_another_part_of_the_step_is_refused(),
    ),
    "parts of another job": Reversal(
        check_part,
        "not name.startswith(stem) or ",
        "",
        lambda _: test_a_part_that_this_step_does_not_write_is_refused("another job's"),
    ),
    "parts of another step": Reversal(
        check_part,
        "not name.startswith(stem) or ",
        "",
        lambda _: test_a_part_that_this_step_does_not_write_is_refused("another step's"),
    ),
    "anything behind the stem": Reversal(
        check_part,
        " or _SUFFIX.fullmatch(name, len(stem)) is None",
        "",
        lambda _: test_a_part_that_this_step_does_not_write_is_refused("a folder behind the stem"),
    ),
    "more behind the suffix": Reversal(
        check_part,
        "_SUFFIX.fullmatch(name",
        "_SUFFIX.match(name",
        lambda _: test_a_part_that_this_step_does_not_write_is_refused("something behind it"),
    ),
    "what a part is made of": Reversal(
        check_part,
        "(*part.pieces, *part.shared)",
        "part.shared",
        lambda _: test_a_piece_that_no_sink_stages_is_refused("..", "pieces"),
    ),
    "what others need, too": Reversal(
        check_part,
        "(*part.pieces, *part.shared)",
        "part.pieces",
        lambda _: test_a_piece_that_no_sink_stages_is_refused("..", "shared"),
    ),
    "any piece": Reversal(
        check_piece,
        "not _PIECE.fullmatch(name)",
        "False",
        lambda _: test_a_piece_that_no_sink_stages_is_refused("../precious/thesis", "pieces"),
    ),
    "more behind a piece": Reversal(
        check_piece,
        "_PIECE.fullmatch(name)",
        "_PIECE.match(name)",
        lambda _: test_a_piece_that_no_sink_stages_is_refused("another ending", "pieces"),
    ),
    "any uid": Reversal(
        staging._parts,
        'check_name(job_uid, "the job\'s uid")',
        "job_uid",
        lambda folder: test_a_uid_or_step_that_is_no_plain_name_is_refused(folder, ".."),
    ),
    "any step": Reversal(
        staging._parts,
        'check_name(step, "the step")',
        "step",
        lambda folder: test_a_uid_or_step_that_is_no_plain_name_is_refused(folder, "a/b"),
    ),
    "any name": Reversal(
        check_name,
        "not _NAME.fullmatch(name)",
        "False",
        lambda folder: test_a_uid_or_step_that_is_no_plain_name_is_refused(folder, ".hidden"),
    ),
    "handles are not checked": Reversal(
        PartCommitter._own,
        "check_part(decoded, self._stem)",
        "decoded",
        test_a_committer_touches_nothing_that_a_changed_handle_names,
    ),
    "uids are not compared": Reversal(
        PartCommitter._own,
        "decoded.uid == self._area.job_uid",
        "True",
        test_a_handle_of_another_jobs_uid_is_left_to_that_job,
    ),
    "states are not checked": Reversal(part_commit.staged_pieces, "check_piece(cut.file)", "cut.file", A_STATE),
    "pieces are not checked": Reversal(read_piece, "check_piece(cut.file)", "cut.file", A_STATE),
    "epochs are not checked": Reversal(
        EpochCommitter.decode,
        "check_piece(handle.piece.file)",
        "pass",
        lambda _: test_an_epoch_whose_rows_lie_elsewhere_is_refused(".."),
    ),
    "a link is no file, and so committed": Reversal(
        TargetFolder._is_file,
        "not stat.S_ISREG(mode)",
        "False",
        lambda folder: test_a_staged_part_that_is_no_file_is_not_taken_for_a_committed_one(folder, "a folder"),
    ),
    "links are followed": Reversal(
        TargetFolder._is_file,
        ", follow_symlinks=False",
        "",
        lambda folder: test_a_staged_part_that_is_no_file_is_not_taken_for_a_committed_one(
            folder, "a link to the right bytes"
        ),
    ),
    "what cannot be looked at is not there": Reversal(
        TargetFolder.there,
        "contextlib.suppress(FileNotFoundError)",
        "contextlib.suppress(OSError)",
        test_a_staging_folder_that_cannot_be_looked_into_does_not_make_a_part_committed,
    ),
}


@pytest.mark.parametrize("bug", REVERSALS)
def test_planted_bugs_are_found(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, bug: str
) -> None:
    REVERSALS[bug].is_seen(monkeypatch, tmp_path_factory)
