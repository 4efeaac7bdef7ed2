"""What every sink promises: nothing lost, doubled or visible too early, whatever dies when."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from cutwater.connectors.base import (
    Committer,
    Json,
    Sink,
    SinkHooks,
    SinkSnapshot,
    SinkWriter,
    SubtaskCommitter,
    settles_subtasks,
)
from cutwater.errors import FencedError
from cutwater.testing.shipping import in_another_process, shipped
from cutwater.testing.sink_job import SCHEMA, STEP, UID, Identity, SinkJob, SinkTarget, batch_of

MakeTarget = Callable[[Path], SinkTarget]


class SinkBasicsContract:
    """The tests of a sink that nobody can read from.  A subclass has the fixture ``sink``."""

    @pytest.fixture
    def sink(self) -> Sink:
        """The sink; it takes the columns ``row`` (int64) and ``text`` (string)."""
        pytest.fail(f"{type(self).__name__} has no fixture 'sink'")

    def test_it_says_what_it_is(self, sink: Sink) -> None:
        assert sink.guarantee in ("exactly-once", "at-least-once")
        assert sink.parallelism is None or sink.parallelism >= 1
        assert isinstance(SinkHooks(sink).commits_globally, bool)
        assert isinstance(sink.committer(SCHEMA, UID, STEP).takes_back, bool)
        sink.check(SCHEMA)

    def test_a_shipped_copy_is_its_equal(self, sink: Sink) -> None:
        """As a worker has it, which gets the sink by Spark's pickler."""
        copy = shipped(sink)
        assert (type(copy), copy.guarantee, copy.parallelism) == (type(sink), sink.guarantee, sink.parallelism)
        copy.check(SCHEMA)

    def test_handles_and_states_survive_json(self, sink: Sink) -> None:
        sink.committer(SCHEMA, UID, STEP).settle(None, [], 1)
        writer = sink.writer(SCHEMA, Identity(0, 1, 1), [])
        for checkpoint_id, final in ((1, False), (2, True)):
            writer.write(batch_of([checkpoint_id]))
            made = writer.pre_commit(checkpoint_id, final)()
            try:
                kept = json.loads(json.dumps([made.handles, made.state]))
            except (TypeError, ValueError) as error:
                raise AssertionError(f"{made} cannot be written into a checkpoint: {error}") from error
            assert kept == [made.handles, made.state], "a checkpoint holds JSON values only"
        writer.close()


@dataclass
class Attempt:
    """An attempt of a job that writes to a sink: each subtask, and the driver, in a process of its own."""

    target: SinkTarget
    incarnation: int
    parallelism: int
    states: Sequence[Json] = ()
    job_uid: str = UID
    restored: SinkSnapshot | None = None
    retained: Sequence[SinkSnapshot] = ()
    writers: list[SinkWriter] = field(init=False)
    committer: Committer = field(init=False)
    """The driver's."""

    def __post_init__(self) -> None:
        self.committer = self.target.process().committer(SCHEMA, self.job_uid, STEP)
        retained = list(self.retained) or ([self.restored] if self.restored else [])
        self.committer.settle(self.restored, retained, self.incarnation)
        sinks = [self.target.process() for _ in range(self.parallelism)]
        self.writers = [
            sink.writer(SCHEMA, self.identity(n), list(self.states[n :: self.parallelism]))
            for n, sink in enumerate(sinks)
        ]
        self.committers = [self.committer if self.globally else s.committer(SCHEMA, self.job_uid, STEP) for s in sinks]

    def identity(self, subtask: int) -> Identity:
        return Identity(subtask, self.parallelism, self.incarnation, self.job_uid)

    @property
    def globally(self) -> bool:
        return SinkHooks(self.target.sink).commits_globally

    def write(self, *rows: int) -> None:
        """Row n goes to subtask n modulo their number."""
        for subtask, writer in enumerate(self.writers):
            writer.write(batch_of([row for row in rows if row % self.parallelism == subtask]))

    def parts(self, checkpoint_id: int, final: bool = False, roll: bool = False) -> list[SinkSnapshot]:
        """What a checkpoint has of each subtask."""
        if roll:
            for writer in self.writers:
                writer.roll()
        made = [make() for make in [writer.pre_commit(checkpoint_id, final) for writer in self.writers]]
        return [SinkSnapshot(checkpoint_id, part.handles, [part.state]) for part in made]

    def checkpoint(
        self, checkpoint_id: int, final: bool = False, roll: bool = False, earlier: Iterable[SinkSnapshot] = ()
    ) -> SinkSnapshot:
        """What a checkpoint has of the step; ``earlier``: of checkpoints that were not committed."""
        parts = self.parts(checkpoint_id, final, roll)
        handles = [handle for snapshot in (*earlier, *parts) for handle in snapshot.handles]
        return SinkSnapshot(checkpoint_id, handles, [state for part in parts for state in part.states])

    def commit(self, snapshot: SinkSnapshot) -> None:
        (self.committer if self.globally else self.committers[0]).commit(snapshot.checkpoint_id, snapshot.handles)

    def close(self) -> None:
        for writer in self.writers:
            writer.close()


class SinkContract(SinkBasicsContract):
    """The tests of a sink whose target somebody else can read.  A subclass has the fixture ``make_target``.

    That is a function of a folder, which it may use: it makes a sink whose target is a new one, and its reader.
    """

    seeds = 25
    """So many jobs with random crashes are tried."""
    steps = 60
    """So many things happen in each."""
    in_another_process = True
    """``False`` of a sink that keeps what it does in memory."""
    keeps_handles = True
    """The engine hands in again what is not committed; ``False`` holds the sink to do so itself, which it need not."""

    @pytest.fixture
    def make_target(self) -> MakeTarget:
        """Makes a target and its sink."""
        pytest.fail(f"{type(self).__name__} has no fixture 'make_target'")

    @pytest.fixture
    def target(self, make_target: MakeTarget, tmp_path: Path) -> SinkTarget:
        """One target."""
        return make_target(tmp_path)

    @pytest.fixture
    def sink(self, target: SinkTarget) -> Sink:
        """The target's sink."""
        return target.sink

    def sees(self, target: SinkTarget, *rows: int) -> None:
        """A reader sees these rows, each once (of a sink that is at least once: at least these)."""
        visible = Counter(target.rows())
        lost = Counter(rows) - visible
        assert not lost, f"a reader misses the rows {sorted(lost)}"
        if target.sink.guarantee == "exactly-once":
            more = visible - Counter(rows)
            assert not more, f"a reader sees rows that are not committed, or twice: {sorted(more.elements())}"

    def start(
        self, target: SinkTarget, incarnation: int = 1, parallelism: int = 2, restored: SinkSnapshot | None = None
    ) -> Attempt:
        """An attempt, at the sink's own parallelism where it has one."""
        states = restored.states if restored is not None else []
        return Attempt(target, incarnation, target.sink.parallelism or parallelism, states, restored=restored)

    # ------------------------------------------------------------------------------------------------------- tests

    def test_rows_are_invisible_until_their_checkpoint_is_committed(self, target: SinkTarget) -> None:
        job = self.start(target)
        job.write(1, 2, 3)
        self.sees(target)
        snapshot = job.checkpoint(1, roll=True)
        self.sees(target)
        job.write(4, 5)
        job.commit(snapshot)
        self.sees(target, 1, 2, 3)
        job.commit(job.checkpoint(2, final=True))
        self.sees(target, 1, 2, 3, 4, 5)
        job.close()
        job.committer.finish(1)
        self.sees(target, 1, 2, 3, 4, 5)
        assert not list(target.leftovers()), "the job has finished, and something staged is left"

    def test_the_cut_is_at_the_barrier(self, target: SinkTarget) -> None:
        """Rows that come before the snapshot thread has made the checkpoint's durable are not the checkpoint's."""
        job = self.start(target, parallelism=1)
        job.write(1)
        for writer in job.writers:
            writer.roll()
        makes = [writer.pre_commit(1, False) for writer in job.writers]
        job.write(2)
        handles = [handle for make in makes for handle in make().handles]
        job.commit(SinkSnapshot(1, handles))
        self.sees(target, 1)
        job.commit(job.checkpoint(2, final=True))
        self.sees(target, 1, 2)
        job.close()

    def test_a_commit_that_comes_again_counts_once(self, target: SinkTarget) -> None:
        """In the same process, in another one, and at a restore."""
        job = self.start(target)
        job.write(1, 2)
        snapshot = job.checkpoint(1, roll=True)
        job.commit(snapshot)
        job.commit(snapshot)
        self.sees(target, 1, 2)
        target.process().committer(SCHEMA, UID, STEP).commit(1, snapshot.handles)
        job.close()
        for incarnation in (2, 3):
            job = self.start(target, incarnation, restored=snapshot)
            job.close()
            self.sees(target, 1, 2)

    def test_another_process_commits(self, target: SinkTarget) -> None:
        """After a crash it is one that the writers never lived in: what it needs lies in the target, or in handles."""
        if not self.in_another_process:
            return
        job = self.start(target)
        job.write(1, 2)
        snapshot = job.checkpoint(1, roll=True)
        job.close()
        in_another_process(_commit, target.sink, snapshot)
        self.sees(target, 1, 2)

    def test_checkpoints_without_rows_are_fine(self, target: SinkTarget) -> None:
        job = self.start(target)
        job.write()
        for checkpoint_id in (1, 2):
            job.commit(job.checkpoint(checkpoint_id, final=checkpoint_id == 2))
        job.close()
        job.committer.finish(1)
        self.sees(target)

    def test_a_restore_commits_what_its_checkpoint_names_and_nothing_later(self, target: SinkTarget) -> None:
        """The job died when checkpoint 2 was complete and 3 was not; rows of 3 come again."""
        job = self.start(target)
        job.write(1, 2)
        first = job.checkpoint(1)
        job.commit(first)
        job.write(3, 4)
        second = job.checkpoint(2)
        job.write(5, 6)
        job.checkpoint(3)
        job.close()
        job = self.start(target, 2, restored=second)
        job.write(5, 6)
        job.commit(job.checkpoint(4, final=True))
        self.sees(target, *range(1, 7))
        job.close()

    def test_rows_in_progress_go_on_at_another_parallelism(self, target: SinkTarget) -> None:
        job = self.start(target, parallelism=3)
        job.write(*range(9))
        snapshot = job.checkpoint(1)
        job.close()
        for incarnation, parallelism in ((2, 1), (3, 4)):
            job = self.start(target, incarnation, parallelism, restored=snapshot)
            job.write(incarnation * 10)
            snapshot = job.checkpoint(incarnation)
            job.close()
        job = self.start(target, 4, 2, restored=snapshot)
        job.commit(job.checkpoint(4, final=True))
        self.sees(target, *range(9), 20, 30)
        job.close()

    def test_rows_of_an_aborted_checkpoint_come_with_the_next(self, target: SinkTarget) -> None:
        job = self.start(target)
        job.write(1, 2)
        aborted = job.checkpoint(1)
        job.write(3)
        job.commit(job.checkpoint(2, final=True, earlier=[aborted] if self.keeps_handles else []))
        self.sees(target, 1, 2, 3)
        job.close()

    def test_what_a_worker_or_driver_of_before_still_does_changes_nothing(self, target: SinkTarget) -> None:
        """It was paused, and the job goes on elsewhere, from an older checkpoint."""
        old = self.start(target)
        old.write(1, 2)
        first = old.checkpoint(1, roll=True)
        old.commit(first)
        old.write(3, 4)
        late = old.checkpoint(2, roll=True)
        job = self.start(target, 2, restored=first)
        job.write(3, 4)
        staged = job.checkpoint(3, roll=True)
        another = target.process().committer(SCHEMA, UID, STEP)  # of a process that was started late
        for committer in (old.committer,) if old.globally else (old.committers[0], another):
            with suppress(FencedError):
                committer.commit(2, late.handles)
        with suppress(FencedError):
            another.settle(first, [first], 1)
        self.sees(target, 1, 2)
        job.commit(staged)
        self.sees(target, 1, 2, 3, 4)
        old.close()
        job.close()
        self.sees(target, 1, 2, 3, 4)

    def test_going_back_to_an_older_checkpoint_takes_back_what_came_after(self, target: SinkTarget) -> None:
        """Of a sink whose committer says that it ``takes_back``; each retained checkpoint can be gone back to."""
        job = self.start(target)
        if not job.committer.takes_back:
            job.close()
            return
        snapshots: list[SinkSnapshot] = []
        for checkpoint_id in (1, 2, 3):
            job.write(checkpoint_id * 10, checkpoint_id * 10 + 1)
            snapshots.append(job.checkpoint(checkpoint_id, roll=True))
            job.commit(snapshots[-1])
        job.committer.retire(snapshots.pop(0), snapshots)
        job.close()
        job = Attempt(target, 2, job.parallelism, snapshots[0].states, restored=snapshots[0], retained=snapshots)
        self.sees(target, 10, 11, 20, 21)
        job.write(30, 31)
        job.commit(job.checkpoint(4, final=True))
        self.sees(target, 10, 11, 20, 21, 30, 31)
        job.close()

    def test_a_retired_checkpoint_takes_nothing_along_that_others_need(self, target: SinkTarget) -> None:
        """Its commit has not come yet: the next checkpoint names its rows, too."""
        job = self.start(target)
        job.write(1, 2)
        first = job.checkpoint(1, roll=True)
        job.write(3)
        second = job.checkpoint(2, roll=True, earlier=[first] if self.keeps_handles else [])
        job.committer.retire(first, [second])
        job.commit(second)
        self.sees(target, 1, 2, 3)
        job.close()

    def test_t3_a_fork_neither_commits_nor_aborts_nor_continues_what_another_uid_wrote(
        self, target: SinkTarget
    ) -> None:
        job = self.start(target)
        job.write(1, 2)
        snapshot = job.checkpoint(1)
        fork = target.process().committer(SCHEMA, "f0f0f0", STEP)
        fork.settle(snapshot, [snapshot], 9)
        fork.commit(1, snapshot.handles)
        fork.settle(None, [], 10)
        fork.retire(snapshot, [])
        if target.sink.guarantee == "exactly-once":
            self.sees(target)
        copy = Attempt(target, 11, job.parallelism, snapshot.states, "f0f0f0", retained=[snapshot])
        copy.write(100)
        copy.commit(copy.checkpoint(2, final=True))
        copy.close()
        copy.committer.finish(11)
        self.sees(target, 100)
        job.commit(job.checkpoint(3, final=True, earlier=[snapshot]))
        self.sees(target, 1, 2, 100)
        job.close()

    def test_a_savepoint_leaves_no_row_in_progress(self, target: SinkTarget) -> None:
        """``roll``: what it names can be committed, and nothing but that is needed."""
        job = self.start(target)
        job.write(1, 2, 3)
        snapshot = job.checkpoint(1, roll=True)
        job.commit(snapshot)
        self.sees(target, 1, 2, 3)
        job.close()

    def test_a_writer_that_closes_commits_nothing(self, target: SinkTarget) -> None:
        job = self.start(target)
        job.write(1, 2)
        job.checkpoint(1)
        job.write(3)
        job.close()
        self.sees(target)
        job = self.start(target, 2)
        job.commit(job.checkpoint(2, final=True))
        self.sees(target)
        job.close()

    def test_r2_subtasks_that_run_on_keep_their_rows_when_another_goes_back(self, target: SinkTarget) -> None:
        """Of a sink that can settle some of its subtasks: the others go back with it."""
        sink = target.sink
        if SinkHooks(sink).commits_globally or sink.parallelism not in (None, 3):
            return
        if settles_subtasks(sink.committer(SCHEMA, UID, STEP)):
            rows = partial_restart(target, _settle_the_failed_one)
            self.sees(target, *rows)
            assert not list(target.leftovers()), "the job has finished, and something staged is left"

    def test_rows_are_visible_exactly_once_and_not_before_their_checkpoint(
        self, make_target: MakeTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Jobs in which random things happen: crashes in the middle of a call, zombies, late commits, going back."""
        deaths = 0
        for seed in range(self.seeds):
            with monkeypatch.context() as patch:
                folder = tmp_path / f"seed-{seed}"
                folder.mkdir()
                promptness = 0.2 if seed % 3 == 2 else 0.7
                job = SinkJob(make_target(folder), seed, patch, keeps_handles=self.keeps_handles, promptness=promptness)
                job.run(self.steps)
            deaths += job.deaths
        assert deaths > self.seeds // 2, "nothing dies in the middle of a call: see SinkTarget.module and watch"


def _commit(sink: Sink, snapshot: SinkSnapshot) -> None:
    sink.committer(SCHEMA, UID, STEP).commit(snapshot.checkpoint_id, snapshot.handles)


_FAILED = 1
"""The subtask that goes back."""


def partial_restart(target: SinkTarget, settle: Callable[[Attempt, SinkSnapshot, SinkSnapshot], None]) -> list[int]:
    """One of three subtasks dies after a checkpoint that it has not committed, while another one is under way.

    Returns:
        the rows that must be visible.
    """
    job = Attempt(target, 1, 3)
    kept: list[list[Json]] = [[], [], []]

    def write(subtasks: Iterable[int], part: int) -> None:
        for subtask in subtasks:
            job.writers[subtask].write(batch_of(_rows_of(subtask, part)))

    def freeze(checkpoint_id: int, final: bool = False) -> list[SinkSnapshot]:
        made = job.parts(checkpoint_id, final)
        for subtask, part in enumerate(made):
            kept[subtask] += part.handles
        return [SinkSnapshot(checkpoint_id, list(kept[n]), part.states) for n, part in enumerate(made)]

    write(range(3), 0)
    first = freeze(1)
    whole = SinkSnapshot(1, [h for s in first for h in s.handles], [state for s in first for state in s.states])
    for subtask in {0, 1, 2} - {_FAILED}:
        job.committers[subtask].commit(1, kept[subtask])
        kept[subtask] = []
    write(range(3), 1)
    freeze(2)
    write(range(3), 2)
    job.writers[_FAILED].close()
    settle(job, first[_FAILED], whole)
    sink = target.process()
    job.writers[_FAILED] = sink.writer(SCHEMA, Identity(_FAILED, 3, 2), first[_FAILED].states)
    job.committers[_FAILED], kept[_FAILED] = sink.committer(SCHEMA, UID, STEP), []
    for part in (1, 2):
        write([_FAILED], part)
    write(range(3), 3)
    for subtask, snapshot in enumerate(freeze(3, final=True)):
        job.committers[subtask].commit(3, snapshot.handles)
    job.committer.finish(2)
    job.close()
    return [row for subtask in range(3) for part in range(4) for row in _rows_of(subtask, part)]


def _rows_of(subtask: int, part: int) -> list[int]:
    return [subtask * 1_000 + part * 10 + n for n in range(7)]


def _settle_the_failed_one(job: Attempt, restored: SinkSnapshot, whole: SinkSnapshot) -> None:
    committer = cast(SubtaskCommitter, job.committer)
    for _ in range(2):  # once more, after a crash half way
        committer.settle_subtasks(restored, [whole], 2, {_FAILED})
