"""A job around one sink, driven by a random generator: the oracle of the sink contract.

The job reads ``SPLITS`` endless counters; row ``(split, n)`` is known by its number ``split * BIG + n``.  A checkpoint
records the position of every split when the barrier passed the subtask that reads it.  So the rows that may and must be
visible follow from the positions of completed checkpoints alone, whatever the sink does.

Sometimes the newest checkpoint turns out to be damaged, or the user asks for an older one: the job falls back to any
that is retained, and from then on only its rows may be visible.

A worker or driver may die in the middle of any call.  Or it sleeps there, its successor takes over, and it wakes up and
goes on with what it has seen of the target before.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from cutwater.connectors.base import Committer, Json, PreCommit, Sink, SinkHooks, SinkSnapshot, SinkWriter
from cutwater.errors import FencedError
from cutwater.testing.deaths import Killed, Moments, before_each_line
from cutwater.testing.forgetful_disk import ForgetfulDisk
from cutwater.testing.shipping import shipped

if TYPE_CHECKING:
    import pytest

SPLITS, BIG = 4, 1_000_000
SCHEMA = pa.schema({"row": pa.int64(), "text": pa.string()})
UID, STEP = "c0ffee", "out"
_CALLS, _LINES = 12, 200
"""Among so many system calls, or lines of the sink, it dies."""
_SLEEPS = 0.2
"""How probable it is that one sleeps in a call."""


@dataclass
class Identity:
    """One subtask of the step, see ``SinkContext``."""

    subtask: int
    parallelism: int
    incarnation: int
    job_uid: str = UID
    step: str = STEP


class SinkTarget:
    """A sink, and its target as somebody sees it who knows nothing of the sink.

    A subclass has ``rows``; the sink writes the columns ``row`` (int64) and ``text`` (string), and each number of a row
    comes once.

    Args:
        sink: with a target of its own, which is empty.
        files: the folder, if the output is files that the sink writes itself: then power losses are tried, too.
    """

    module: str | None = None
    """The module, or package, before each line of which the process may die; ``None``: that of the sink.

    Empty: it dies before system calls on files, or where ``watch`` says, only.
    """
    locks = False
    """True if the sink locks its target for as long as a call takes (in a transaction of a database).

    A successor would wait for one that sleeps there; so none sleeps in the middle of a call.
    """

    def __init__(self, sink: Sink, files: str | None = None) -> None:
        self.sink = sink
        self.files = files

    def rows(self) -> Sequence[int]:
        """The column ``row`` of all that a reader of the target sees now; none where there is no target yet."""
        raise AssertionError(f"{type(self).__name__} has no rows()")

    def process(self) -> Sink:
        """The sink as another process has it."""
        return shipped(self.sink)

    def watch(self, patch: pytest.MonkeyPatch, moment: Callable[[], None]) -> None:
        """Have ``moment`` called where the process may die or sleep, besides lines and system calls.

        Where a server does the work: before a request, and behind it, when it is done and nobody has heard of it.
        """

    def undo(self, checkpoint_id: int, rows: Sequence[int]) -> None:
        """What a user is to do at a restore where the sink takes nothing back: leave these rows, up to a checkpoint."""

    def leftovers(self) -> Sequence[object]:
        """What the sink has staged, and must be gone once the job has finished."""
        return ()

    @property
    def traced(self) -> str:
        """The module, or package, whose lines are counted."""
        own = type(self.sink).__module__
        return (own.rpartition(".")[0] or own) if self.module is None else self.module


@dataclass
class _Checkpoint:
    id: int
    final: bool
    positions: list[int | None]
    waiting: set[int]
    snapshots: dict[int, Callable[[], PreCommit]] = field(default_factory=dict[int, Callable[[], PreCommit]])
    parts: dict[int, PreCommit] = field(default_factory=dict[int, PreCommit])
    shown: set[int] = field(default_factory=set[int])
    """Rows that readers have seen before the next checkpoint was complete."""

    @property
    def snapshot(self) -> SinkSnapshot:
        handles = [handle for part in self.parts.values() for handle in part.handles]
        return SinkSnapshot(self.id, handles, [part.state for part in self.parts.values()])


@dataclass
class _Worker:
    """One subtask in a process of its own."""

    writer: SinkWriter
    committer: Committer
    kept: dict[int, list[Json]] = field(default_factory=dict[int, list[Json]])
    """Handles that are not committed yet, by their checkpoints."""
    deferred: dict[int, Callable[[], PreCommit]] = field(default_factory=dict[int, Callable[[], PreCommit]])
    """Of aborted checkpoints, which the snapshot thread comes to when others have begun."""

    def make_durable(self, checkpoint_id: int, make: Callable[[], PreCommit]) -> Json:
        """What its snapshot thread does, oldest first; the state is returned."""
        state: Json = None
        for known, deferred in [*self.deferred.items(), (checkpoint_id, make)]:
            made = deferred()
            self.deferred.pop(known, None)
            self.kept[known], state = json.loads(json.dumps([made.handles, made.state]))
        return state

    def handed_in(self, checkpoint_id: int) -> list[Json]:
        return [handle for known in sorted(self.kept) if known <= checkpoint_id for handle in self.kept[known]]

    def committed(self, checkpoint_id: int) -> None:
        self.kept = {known: handles for known, handles in self.kept.items() if known > checkpoint_id}


@dataclass
class _Driver:
    """A driver that took the log, and what it found there."""

    committer: Committer
    chosen: SinkSnapshot | None
    retained: list[SinkSnapshot]
    incarnation: int

    def settle(self) -> None:
        self.committer.settle(self.chosen, self.retained, self.incarnation)


def batch_of(rows: Sequence[int]) -> pa.RecordBatch:
    """These rows, with a text each."""
    return pa.RecordBatch.from_pydict({"row": list(rows), "text": [f"r{row}" for row in rows]}, SCHEMA)


class SinkJob:
    """The job.

    Args:
        target: sink and reader.
        seed: of all that happens.
        patch: undoes what is watched.
        keeps_handles: a handle that is not committed is handed in again with each checkpoint, as the engine does; else
            the sink is held to do so itself.
        promptness: how probable it is that a commit comes at once.
    """

    def __init__(
        self,
        target: SinkTarget,
        seed: int,
        patch: pytest.MonkeyPatch,
        *,
        keeps_handles: bool = True,
        promptness: float = 0.7,
    ) -> None:
        self.random = random.Random(seed)
        self.target, self._keeps = target, keeps_handles
        self.story: list[str] = []
        self.moments = Moments(self._look, every=1 if not target.traced else 9)
        self.disk = None if target.files is None else ForgetfulDisk(target.files, patch, self.moments.moment)
        target.watch(patch, self.moments.moment)
        self._exactly = target.sink.guarantee == "exactly-once"
        self._globally = SinkHooks(target.sink).commits_globally
        self.num_retained = self.random.choice([1, 2, 3])
        self.promptness = promptness
        self.retained: list[_Checkpoint] = []  # oldest first; the last one is what a restore takes
        self.bound: _Checkpoint | None = None  # no rows but its own may be visible
        self.late_commits: list[tuple[Committer, int, list[Json]]] = []
        self.paused_drivers: list[_Driver] = []
        self.next_id = 1
        self.incarnation = 0
        self.zombies: list[SinkWriter] = []
        self.workers: list[_Worker] = []
        self.deaths = self.sleepers = self.fenced = 0
        self._found: Exception | None = None
        self._lengths: dict[str, int] = {}
        self.start()
        self.read()

    def run(self, steps: int) -> None:
        """So many things happen, then the input ends."""
        try:
            for _ in range(steps):
                self.step()
            self.finish()
        finally:
            for writer in (*self.zombies, *(worker.writer for worker in self.workers)):
                with suppress(Exception):  # it may have been closed, and its files may be gone
                    writer.close()

    # ------------------------------------------------------------------------------------------------ life of a job

    def start(self) -> None:
        """A driver restores the published checkpoint and starts writers, perhaps at another parallelism (T2)."""
        self.positions = [position or 0 for position in self.published.positions] if self.published else [0] * SPLITS
        self.parallelism = self.target.sink.parallelism or self.random.choice([1, 2, 3])
        self.note(f"start p={self.parallelism} at {self.positions}")
        self.driver = driver = self.view()
        self.workers = []
        self.pending: _Checkpoint | None = None
        if not self._goes_on("settle", driver.settle):
            return
        self.target.undo(driver.chosen.checkpoint_id if driver.chosen else 0, self.expected(self.published))
        self.bound = self.published
        states = driver.chosen.states if driver.chosen else []
        for subtask in range(self.parallelism):
            sink = self.target.process()
            identity = Identity(subtask, self.parallelism, self.incarnation)
            writer = sink.writer(SCHEMA, identity, states[subtask :: self.parallelism])
            self.workers.append(_Worker(writer, sink.committer(SCHEMA, UID, STEP)))

    def view(self) -> _Driver:
        """What a driver that takes the log now finds in it."""
        self.incarnation += 1
        retained = [checkpoint.snapshot for checkpoint in self.retained]
        return _Driver(self.committer(), retained[-1] if retained else None, retained, self.incarnation)

    def committer(self) -> Committer:
        """One of a process that knows nothing."""
        return self.target.process().committer(SCHEMA, UID, STEP)

    @property
    def published(self) -> _Checkpoint | None:
        return self.retained[-1] if self.retained else None

    def crash(self, power: bool) -> None:
        self.note("power loss" if power else "crash")
        if power and self.disk is not None:
            self.zombies = []
            self.disk.lose_power()
        else:
            self.zombies += [worker.writer for worker in self.workers]
            if self.random.random() < 0.5:
                self.note("a driver takes the log and is paused")
                self.paused_drivers.append(self.view())
        self.start()

    def fall_back(self) -> None:
        """The newest checkpoints cannot be restored: the log says which one is, then their output is taken back."""
        self.retained = self.retained[: self.random.randrange(1, len(self.retained))]
        self.note(f"falls back to {self.retained[-1].id}")
        self.zombies += [worker.writer for worker in self.workers]
        self.start()

    @property
    def can_fall_back(self) -> bool:
        """There is an older checkpoint, and somebody takes back what came after it."""
        undoes = type(self.target).undo is not SinkTarget.undo
        return len(self.retained) > 1 and (undoes or not self._exactly or self.driver.committer.takes_back)

    def note(self, what: str) -> None:
        self.story.append(what)

    # ---------------------------------------------------------------------------------------------------- one sleeps

    def _goes_on(self, name: str, call: Callable[[], None]) -> bool:
        """A call of a committer; perhaps its process sleeps in it, and wakes up when a successor is at work.

        Returns:
            False if one is: the attempt has ended.
        """
        driver, before = self.driver, self.moments.count
        sleeps = not self.target.locks and self.random.random() < _SLEEPS
        moments = self.random.randrange(max(1, self._lengths.get(name, 0)))
        try:
            with self.moments.asleep_after(moments, self._overtake) if sleeps else nullcontext():
                call()
        except Exception as error:
            if self._found is not None:
                raise self._found from error
            if self.driver is driver:
                raise
            self.fenced += isinstance(error, FencedError)
            self.note(f"{name} of the one that slept: {error}")
        if self.driver is driver:
            self._lengths[name] = max(self._lengths.get(name, 0), self.moments.count - before)
        return self.driver is driver

    def _overtake(self) -> None:
        """A successor takes over while somebody sleeps.

        It goes back to an older checkpoint only where the sink knows of that.
        """
        self.sleepers += 1
        self.note("falls asleep; meanwhile:")
        try:
            if self.can_fall_back and self.driver.committer.takes_back and self.random.random() < 0.7:
                self.fall_back()
            else:
                self.crash(power=False)
        except Exception as error:
            self._found = error
            raise
        self.note("wakes up")

    # ----------------------------------------------------------------------------------------------------- one step

    def step(self) -> None:
        """Something happens; some of it is cut short by a death in the middle."""
        if self.moments.kill_in is None and self.random.random() < 0.3:
            self.moments.kill_in = self.random.randrange(_LINES if self.target.traced else _CALLS)
        names = ["write"] * 4 + ["checkpoint"] * 9 + ["abort", "crash", "power", "zombie", "zombie"]
        names += ["fall_back", "fall_back", "late_commit", "late_commit", "paused_driver", "paused_driver"]
        action = self.random.choice(names)
        while True:
            try:
                with self._watched():
                    getattr(self, f"do_{action}")()
                break
            except Killed:
                self.deaths += 1
                self.note(f"killed in {action}")
                action = self.random.choice(["crash", "power"])
        self.read()
        self._miss()

    def _watched(self) -> AbstractContextManager[None]:
        return before_each_line(self.target.traced, self.moments.moment) if self.target.traced else nullcontext()

    def do_write(self) -> None:
        subtask = self.random.randrange(self.parallelism)
        rows: list[int] = []
        for split in range(subtask, SPLITS, self.parallelism):
            count = self.random.randrange(5)
            rows += [split * BIG + self.positions[split] + i for i in range(count)]
            self.positions[split] += count
        self.note(f"write {len(rows)} by {subtask}")
        self.workers[subtask].writer.write(batch_of(rows))

    def do_checkpoint(self) -> None:
        """Some way on, perhaps to its end."""
        for _ in range(self.random.choice([1, 1, 3, 9])):
            self.advance()
            if self.pending is None:
                return

    def advance(self, final: bool = False) -> None:
        """The next bit of the checkpoint under way, or a new one."""
        if self.pending is None:
            self.pending = _Checkpoint(self.next_id, final, [None] * SPLITS, set(range(self.parallelism)))
            self.next_id += 1
        pending = self.pending
        if pending.waiting:
            subtask = self.random.choice(sorted(pending.waiting))
            pending.waiting.remove(subtask)
            self.note(f"barrier {pending.id} at {subtask}")
            pending.snapshots[subtask] = self.workers[subtask].writer.pre_commit(pending.id, pending.final)
            for split in range(subtask, SPLITS, self.parallelism):
                pending.positions[split] = self.positions[split]
        elif pending.snapshots:
            subtask = self.random.choice(sorted(pending.snapshots))
            self.note(f"snapshot {pending.id} of {subtask}")
            pending.parts[subtask] = self._made_durable(pending, subtask)
        else:
            self._publish(pending)

    def _made_durable(self, pending: _Checkpoint, subtask: int) -> PreCommit:
        """What a subtask acknowledges."""
        worker = self.workers[subtask]
        worker.kept = worker.kept if self._keeps else {}
        state = worker.make_durable(pending.id, pending.snapshots.pop(subtask))
        return PreCommit(worker.handed_in(pending.id), state)

    def _publish(self, pending: _Checkpoint) -> None:
        self.note(f"published {pending.id}")
        pending.shown = set(self.bound.shown) if self.bound is not None else set()
        self.retained.append(pending)
        self.pending, self.bound = None, pending
        commit = self._commit_globally if self._globally else self._commit_by_subtask
        if not commit(pending):
            return
        while len(self.retained) > self.num_retained:
            retired = self.retained.pop(0)
            self.note(f"retire {retired.id}")
            retained = [checkpoint.snapshot for checkpoint in self.retained]
            self.driver.committer.retire(retired.snapshot, retained)

    def _commit_by_subtask(self, pending: _Checkpoint) -> bool:
        """False: the attempt ended in the middle of it."""
        for subtask in self.random.sample(sorted(pending.parts), len(pending.parts)):
            worker = self.workers[subtask]
            due = {known: worker.kept[known] for known in sorted(worker.kept) if known <= pending.id}
            committer = self.random.choice([worker.committer, self.committer()])
            # A worker may be late with its commit, or never come to it before the next checkpoint.
            if pending.final or self.random.random() < self.promptness:
                self.note(f"commit {pending.id} by {subtask}")
                for known, handles in due.items():
                    if not self._goes_on("commit", partial(committer.commit, known, handles)):
                        return False
                worker.committed(pending.id)
            else:
                self.late_commits += [(committer, known, handles) for known, handles in due.items()]
        return True

    def _commit_globally(self, pending: _Checkpoint) -> bool:
        """In the driver, or later with those of a newer checkpoint; some subtasks may not hear of it."""
        handles = pending.snapshot.handles
        if pending.final or self.random.random() < self.promptness:
            self.note(f"commit {pending.id}")
            if not self._goes_on("commit", partial(self.driver.committer.commit, pending.id, handles)):
                return False
            for worker in self.workers:
                if self.random.random() < 0.7:
                    worker.committed(pending.id)
        else:
            self.late_commits.append((self.driver.committer, pending.id, handles))
        return True

    def do_fall_back(self) -> None:
        if self.can_fall_back:
            self.fall_back()

    def do_late_commit(self) -> None:
        """A worker (or driver) that was paused hears that a checkpoint completed, perhaps attempts ago.

        Or all that is left of it is what it was to commit, and a process that knows nothing else does so.
        """
        if self.late_commits:
            committer, checkpoint_id, handles = self.late_commits.pop(self.random.randrange(len(self.late_commits)))
            fresh = self.random.random() < 0.5
            self.note(f"late commit of {checkpoint_id}{', by another process' if fresh else ''}")
            self._by_one_of_before((self.committer() if fresh else committer).commit, checkpoint_id, handles)

    def do_paused_driver(self) -> None:
        """A driver goes on that took the log, was paused, and has lost the log since."""
        if self.paused_drivers:
            driver = self.paused_drivers.pop(self.random.randrange(len(self.paused_drivers)))
            self.note(f"driver {driver.incarnation} wakes up")
            self._by_one_of_before(driver.settle)

    def _by_one_of_before(self, call: Callable[..., None], *arguments: Any) -> None:
        try:
            self._goes_on("late", partial(call, *arguments))
        except FencedError:
            self.fenced += 1
            self.note("it is fenced off")

    def do_abort(self) -> None:
        """The checkpoint comes to nothing; what its subtasks froze is made durable all the same, at once or later."""
        pending, self.pending = self.pending, None
        if pending is not None:
            self.note(f"abort {pending.id}")
            for subtask in sorted(pending.snapshots) if self._keeps else ():
                if self.random.random() < 0.5:
                    self._made_durable(pending, subtask)
                else:
                    self.workers[subtask].deferred[pending.id] = pending.snapshots[subtask]

    def do_crash(self) -> None:
        self.crash(power=False)

    def do_power(self) -> None:
        self.crash(power=True)

    def do_zombie(self) -> None:
        """A writer of an older attempt goes on: writes, is even asked for a snapshot, or closes."""
        if not self.zombies:
            return
        index = self.random.randrange(len(self.zombies))
        writer = self.zombies[index]
        self.note("zombie")
        try:
            writer.write(batch_of([-1, -2]))
            if self.random.random() < 0.5:
                writer.pre_commit(self.next_id, final=False)()
            if self.random.random() < 0.3:
                writer.close()
                del self.zombies[index]
        except Exception as error:  # its files were swept away: a zombie may fail in any way
            self.note(f"zombie died: {error}")
            del self.zombies[index]

    def finish(self) -> None:
        """Write to the end of data, take the final checkpoint and commit it."""
        self.moments.kill_in = None
        self.do_abort()
        while self.published is None or not self.published.final:
            self.advance(final=True)
            if self.published and self.published.final and self.can_fall_back and self.random.random() < 0.3:
                self.fall_back()
        self._miss()
        self.driver.committer.finish(self.incarnation)
        self.read()
        visible, expected = Counter(self.target.rows()), Counter(self.expected(self.published))
        assert not expected - visible, self.tell(f"lost at the end: {sorted(expected - visible)[:5]}")
        if self._exactly:
            assert not visible - expected, self.tell(f"too many at the end: {sorted(visible - expected)[:5]}")
        left = list(self.target.leftovers())
        assert not left, self.tell(f"staged, and left there: {left[:5]}")

    # -------------------------------------------------------------------------------------------------- the oracle

    def expected(self, checkpoint: _Checkpoint | None) -> list[int]:
        """The rows up to a checkpoint."""
        positions = checkpoint.positions if checkpoint else [0] * SPLITS
        return [split * BIG + n for split, end in enumerate(positions) for n in range(end or 0)]

    def read(self) -> None:
        """Any reader at any time: valid files, no row twice, none before its checkpoint completed."""
        visible = Counter(self.target.rows())
        if not self._exactly:
            return
        assert max(visible.values(), default=1) == 1, self.tell(f"doubled: {visible.most_common(3)}")
        early = set(visible) - set(self.expected(self.bound))
        assert not early, self.tell(f"visible too early: {sorted(early)[:5]}")

    def _look(self) -> None:
        try:
            self.read()
        except AssertionError as error:
            self._found = error
            raise

    def _miss(self) -> None:
        """What readers have seen is still there, unless it came with checkpoints that the job has gone back behind."""
        if self._found is not None:
            raise self._found  # the sink took it for an error of its target
        if self._exactly and self.bound is not None:
            visible = set(self.target.rows())
            gone = self.bound.shown - visible
            assert not gone, self.tell(f"visible once, and no more: {sorted(gone)[:5]}")
            self.bound.shown |= visible

    def tell(self, what: str) -> str:
        return what + "\n  " + "\n  ".join(self.story[-40:])
