"""A fork behind its leader: it reads what the leader has checkpointed, and takes over when the leader hands over.

Reading no further has three uses.  Whatever the leader hands over later, the fork has not read beyond it, so that it
need never go back.  The fork comes to rest at positions of the leader's checkpoints, where outputs can be compared.
And what the leader took back after a failure, the fork has never seen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cutwater.data.time import MIN_WATERMARK
from cutwater.errors import ConfigError, CutwaterError
from cutwater.runtime.control.read_limit import Limits, ReadLimit, StepLimit, is_before
from cutwater.storage.log.entries import Fork, HandedOver
from cutwater.storage.log.job_log import JobLog
from cutwater.storage.snapshot.channel_log import CHANNEL_KIND
from cutwater.storage.snapshot.manifest import Manifest, SplitRecord, SubtaskRecord
from cutwater.storage.snapshot.segment_files import load_manifest
from cutwater.storage.store.base import Store
from cutwater.storage.store.opening import open_existing
from cutwater.storage.store.paths import LOG_FOLDER
from cutwater.storage.store.seal import Seal

POLL_S = 0.1
"""Between two looks at the leader's log."""
_PATIENCE = 20
"""So many looks in a row may fail before the user hears of it."""


@dataclass(frozen=True)
class Lead:
    """The leader's progress."""

    checkpoint_id: int
    """Its newest checkpoint."""
    limits: Limits
    """Its positions at that checkpoint, by the fork's names of the read steps."""
    handed_over: HandedOver | None
    finished: bool


@dataclass
class Leader:
    """The job that a fork was made from, as its log tells of it.

    Args:
        fork: where it is.
        seal: of its directory.
        step_ids: the fork's ids of its steps, where they differ.
    """

    fork: Fork
    seal: Seal
    step_ids: Mapping[str, str] = field(default_factory=dict[str, str])
    _seen: list[str] = field(default_factory=list[str])

    @property
    def store(self) -> Store:
        return open_existing(self.fork.directory, self.seal)

    def look(self) -> Lead | None:
        """The leader's progress now; ``None`` if nothing is new since the last look.

        Raises:
            CutwaterError: its directory cannot be read, or it has no checkpoint.
        """
        store, job = self.store, self.fork.job
        names = sorted(store.names(f"{job}/{LOG_FOLDER}"))[-3:]
        if names == self._seen:
            return None
        state = JobLog(store, job).read()
        if state.uid != self.fork.uid or state.latest is None:
            raise ConfigError(
                f"there is no job {job!r} with checkpoints in {self.fork.directory}, of which this one is a fork",
                hint="Bring it back; or fork with follow=False (--no-follow), which reads without regard to it.",
            )
        manifest = load_manifest(store, job, state.latest)
        self._seen = names
        limits = limits_of(manifest, self.step_ids, announce=state.handed_over is not None)
        return Lead(manifest.checkpoint_id, limits, state.handed_over, state.finished)


def limits_of(manifest: Manifest, step_ids: Mapping[str, str], *, announce: bool = False) -> Limits:
    """Positions of a checkpoint in its sources."""
    limits: dict[str, dict[str, ReadLimit]] = {}
    for record in manifest.subtasks:
        for step, splits in record.splits.items():
            limits.setdefault(step, {}).update({s.id: ReadLimit(s.position, s.done) for s in splits})
    return {
        step_ids.get(step, step): StepLimit(splits, _event_time(manifest, step), announce)
        for step, splits in limits.items()
    }


def _event_time(manifest: Manifest, step: str) -> int:
    """The watermark that all subtasks of a read step have told, but for those that are idle."""
    told = [r.watermark for r in manifest.subtasks if step in r.splits and not _idle(r)]
    return min(told, default=MIN_WATERMARK)


def _idle(record: SubtaskRecord) -> bool:
    return bool(record.output_rows) and all(channel.idle for channel in record.output_rows)


def not_reached(manifest: Manifest, limits: Limits) -> str:
    """A split that a checkpoint has not read exactly up to the limits, for messages; empty if there is none.

    A split that the leader has read to its end must be at its end here too; elsewhere, the position must be the same.
    """
    known: dict[str, dict[str, SplitRecord]] = {}
    for record in manifest.subtasks:
        for step, splits in record.splits.items():
            known.setdefault(step, {}).update({s.id: s for s in splits})
    for step, limit in limits.items():
        if step not in {s.id for s in manifest.steps}:
            continue  # the program has it no more
        own = known.get(step, {})
        for split in own.keys() | limit.splits.keys():
            if not _same(own.get(split, SplitRecord(split)), limit.splits.get(split, ReadLimit(None, False))):
                return f"split {split!r} of step {step!r}"
        if limit.announce and _event_time(manifest, step) < limit.watermark:
            return f"the event time of step {step!r}"
    return ""


def _same(own: SplitRecord, limit: ReadLimit) -> bool:
    if limit.done:
        return own.done
    return not is_before(own.position, limit.position) and not is_before(limit.position, own.position)


def is_at_rest(manifest: Manifest, limits: Limits) -> bool:
    """True if a checkpoint holds exactly the effects of the rows before the limits, with none on its way."""
    return not any(e.kind == CHANNEL_KIND for e in manifest.entries) and not not_reached(manifest, limits)


class Following:
    """Looks after the leader, from a thread of its own.

    Args:
        leader: the job to follow.
        moved: called, from that thread, with what the leader has done; again and again once it has handed over.
        warn: called if the leader cannot be read for a while; this job waits where it is.

    Raises:
        CutwaterError: the leader cannot be read.
    """

    def __init__(self, leader: Leader, moved: Callable[[Lead], None], warn: Callable[[str], None]) -> None:
        first = leader.look()
        assert first is not None  # nothing was seen before
        self.lead = first
        self._leader, self._moved, self._warn = leader, moved, warn
        self._closed = threading.Event()
        self._failed = 0

    def start(self) -> None:
        """Begin to look."""
        threading.Thread(target=self._run, name=f"cutwater-follow-{self._leader.fork.job}", daemon=True).start()

    def close(self) -> None:
        """Look no more."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(POLL_S):
            try:
                found = self._leader.look()
            except CutwaterError as e:  # it may just be removing what was to be read
                self._failed += 1
                if self._failed == _PATIENCE:
                    self._warn(f"the job that this one is a fork of cannot be read: {e}")
                continue
            self._failed = 0
            if found is not None:
                self.lead = found
            if found is not None or self.lead.handed_over is not None:
                self._moved(self.lead)
