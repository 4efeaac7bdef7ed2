"""Entries of the job log: what can happen, the state that results, and how both lie in a file.

A file has two lines: the entry as JSON, and the digest of that line, or its seal.  Behind them may lie the manifest of
the checkpoint that the entry publishes, under a digest that the entry names: damage there is damage to the checkpoint,
not to the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec

from cutwater.data.decoding import prepare
from cutwater.errors import CorruptSnapshotError, FormatVersionError
from cutwater.storage.store.paths import entry_at, log_path
from cutwater.storage.store.seal import Seal, is_sealed

LOG_VERSION = 3
_KNOWN_VERSIONS = (1, 2, LOG_VERSION)
"""3: sealed.  2: a manifest may lie behind it.  1: neither; those without attachment and key still have it."""
DAMAGED_HINT = "Nothing was changed. Bring the file back from a copy, or start under another job name from a savepoint."


class Fork(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A job that began from a snapshot of another one, its leader, and writes nothing of the user's until promoted."""

    directory: str
    """The leader's checkpoint directory."""
    job: str
    """The leader."""
    uid: str
    """Of the leader."""
    snapshot: str
    """Snapshot that the fork began from, as ``resolve_snapshot`` takes it."""
    follow: bool = True
    """It reads what the leader has checkpointed, and not beyond."""
    cut: int = 0
    """The leader's checkpoint in that snapshot; 0: the fork has not begun."""
    promoted: int = 0
    """The checkpoint from which on it serves; 0: its sinks are shadows."""


class JobCreated(msgspec.Struct, frozen=True, tag="job_created", forbid_unknown_fields=True, omit_defaults=True):
    """The job's first start, entry number 1."""

    uid: str
    name: str
    time_ms: int
    fork: Fork | None = None


class AttemptBegan(msgspec.Struct, frozen=True, tag="attempt_began", forbid_unknown_fields=True, omit_defaults=True):
    """From here on only this attempt may publish."""

    attempt: int
    driver: str
    """Host, process and start time of the driver, for people."""
    time_ms: int
    rescaled: tuple[int, int] | None = None
    """The parallelism that the program asks for, and the one that the job was rescaled to; ``None``: they agree."""


class CheckpointCompleted(msgspec.Struct, frozen=True, tag="checkpoint_completed", forbid_unknown_fields=True):
    """A checkpoint is published: its sinks may commit."""

    checkpoint_id: int
    attempt: int
    digest: str
    """Of the manifest's bytes: xxh3_128, hex, or a seal."""
    path: str
    """Of the manifest, relative to the job's folder: mostly the entry's own, with the manifest attached."""
    time_ms: int
    kind: str = "checkpoint"
    """"checkpoint", "savepoint" or "final"."""


class RolledBack(msgspec.Struct, frozen=True, tag="rolled_back", forbid_unknown_fields=True):
    """The attempt restores an older checkpoint than the newest: those after it are no longer part of the history.

    Written before any sink takes their output back.  So completed checkpoints always follow from one another.
    """

    attempt: int
    checkpoint_id: int
    """The one restored."""
    time_ms: int


class JobFinished(msgspec.Struct, frozen=True, tag="job_finished", forbid_unknown_fields=True):
    """Nothing is left to do; ``checkpoint_id`` is the final checkpoint (0: none was taken)."""

    attempt: int
    checkpoint_id: int
    time_ms: int


class HandedOver(msgspec.Struct, frozen=True, tag="handed_over", forbid_unknown_fields=True):
    """All output up to a checkpoint is committed, and none will follow: a fork goes on from there.

    The one entry that decides who serves.  The job can only be taken back by a start that names a snapshot.
    """

    attempt: int
    checkpoint_id: int
    """The newest one."""
    directory: str
    """Of the fork's checkpoints."""
    job: str
    """The fork."""
    uid: str
    """Of the fork."""
    savepoint: str
    """Of the same moment."""
    time_ms: int


class Forked(msgspec.Struct, frozen=True, tag="forked", forbid_unknown_fields=True):
    """The fork begins from a checkpoint of its leader: the newest one, if its snapshot names none."""

    attempt: int
    checkpoint_id: int
    time_ms: int


class Promoted(msgspec.Struct, frozen=True, tag="promoted", forbid_unknown_fields=True):
    """The fork has read exactly what its leader had read when it handed over; its own sinks write from here on."""

    attempt: int
    checkpoint_id: int
    """The newest one; those before it can be restored no more: what follows them was the leader's to write."""
    time_ms: int


EndedEarly: TypeAlias = Literal["stopped", "cancelled", "failed"]


class JobEnded(msgspec.Struct, frozen=True, tag="job_ended", forbid_unknown_fields=True):
    """The driver gave the job up before everything was done; a later attempt may go on.

    For people: nothing is decided by it, and a driver that was killed never writes it.
    """

    attempt: int
    outcome: EndedEarly
    reason: str
    """One line."""
    time_ms: int


Event: TypeAlias = (
    JobCreated
    | AttemptBegan
    | CheckpointCompleted
    | RolledBack
    | Forked
    | HandedOver
    | Promoted
    | JobFinished
    | JobEnded
)


class LogState(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """State of the log after its newest entry."""

    uid: str = ""
    """Empty: the job was never started."""
    name: str = ""
    attempt: int = 0
    """The attempt that owns the job; 0: none yet."""
    driver: str = ""
    began_ms: int = 0
    completed: tuple[CheckpointCompleted, ...] = ()
    """Retained checkpoints, newest first."""
    newest_id: int = 0
    """Highest checkpoint id ever completed."""
    finished: bool = False
    """Nothing is left to do."""
    ended: EndedEarly | None = None
    """Last word of a driver that gave the job up; ``None``: it finished, runs, or its driver could not tell."""
    reason: str = ""
    """Of ``ended``, one line."""
    rescaled: tuple[int, int] | None = None
    """Of the attempt (``AttemptBegan``)."""
    fork: Fork | None = None
    """The leader of the job, if it is a fork."""
    handed_over: HandedOver | None = None
    """To whom the job was handed over."""

    @property
    def outcome(self) -> str:
        """Outcome: "finished", "stopped", "cancelled", "failed"; empty while an attempt owns the job."""
        return "finished" if self.finished else self.ended or ""

    @property
    def latest(self) -> CheckpointCompleted | None:
        """The newest completed checkpoint."""
        return self.completed[0] if self.completed else None


class LogEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry: what happened, what is so since then, and its place in the log."""

    version: int
    seq: int
    base: int
    """All numbers from here to ``seq`` are there; lower ones may have been deleted."""
    previous: str
    """Digest of the entry before; empty for number 1."""
    event: Event
    state: LogState
    """After the event."""


class _Versioned(msgspec.Struct):
    version: int


prepare(_Versioned, LogEntry)


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """A log entry as found in the store."""

    entry: LogEntry
    data: bytes
    """Of its file."""
    digest: str


def apply_event(state: LogState, event: Event, num_retained: int) -> LogState:
    """The state after an event; only the newest ``num_retained`` completed checkpoints stay in it."""
    replace = msgspec.structs.replace
    match event:
        case JobCreated():
            return LogState(uid=event.uid, name=event.name, fork=event.fork)
        case AttemptBegan():
            state = replace(state, finished=False, ended=None, reason="", rescaled=event.rescaled, handed_over=None)
            return replace(state, attempt=event.attempt, driver=event.driver, began_ms=event.time_ms)
        case CheckpointCompleted():
            completed = (event, *state.completed)[:num_retained]
            return replace(state, completed=completed, newest_id=event.checkpoint_id)
        case RolledBack():
            return replace(state, completed=tuple(c for c in state.completed if c.checkpoint_id <= event.checkpoint_id))
        case Forked():
            assert state.fork is not None
            return replace(state, fork=replace(state.fork, cut=event.checkpoint_id))
        case HandedOver():
            return replace(state, handed_over=event)
        case Promoted():
            assert state.fork is not None
            fork = replace(state.fork, promoted=event.checkpoint_id)
            return replace(
                state, fork=fork, completed=tuple(c for c in state.completed if c.checkpoint_id == event.checkpoint_id)
            )
        case JobFinished():
            return replace(state, finished=True)
        case JobEnded():
            return replace(state, ended=event.outcome, reason=event.reason)


def next_entry(
    known: StoredEntry | None, event: Event, manifest: bytes = b"", *, num_retained: int, keep: int, seal: Seal
) -> StoredEntry:
    """The entry after another one, in the oldest format that can tell it.

    Args:
        manifest: of the checkpoint that the event publishes, to lie behind the entry.
        num_retained: completed checkpoints that stay in the state.
        keep: so many entries stay, and those that hold manifests of retained checkpoints.
    """
    seq, base, previous = (known.entry.seq + 1, known.entry.base, known.digest) if known else (1, 1, "")
    if manifest and isinstance(event, CheckpointCompleted):
        event = msgspec.structs.replace(event, path=log_path(seq))
    state = apply_event(known.entry.state if known else LogState(), event, num_retained)
    needed = min([seq - keep, *(at for c in state.completed if (at := entry_at(c.path)) is not None)])
    if needed - base >= keep:  # many at once: a trim lists the folder
        base = needed
    version = LOG_VERSION if seal.keyed else 2 if manifest else 1
    entry = LogEntry(version, seq, base, previous, event, state)
    body = msgspec.json.encode(entry)
    digest = seal.digest("log", body)
    return StoredEntry(entry, b"\n".join([body, digest.encode(), manifest]), digest)


def attached_to(data: bytes | memoryview) -> bytes:
    """Bytes behind an entry in its file; none where the entry is not whole."""
    return b"".join(bytes(data).split(b"\n", 2)[2:])


def check_version(path: str, format: str, version: int, known: Sequence[int]) -> None:
    """Refuse a file that a newer release wrote, before more of it is decoded."""
    if version not in known:
        raise FormatVersionError(
            f"{path} has {format} version {version}, this release knows {', '.join(map(str, known))}",
            hint="Use the release that wrote it, or a newer one.",
        )


def parse_entry(path: str, seq: int, data: bytes, seal: Seal) -> StoredEntry:
    """The entry in a file's bytes; the digest is compared before anything is decoded.

    Raises:
        CorruptSnapshotError: torn, changed, or another number's entry; names the file.
        SealError: it is not sealed with the job's key.
        FormatVersionError: written by a newer release.
    """
    body, _, tail = data.partition(b"\n")
    digest = tail.partition(b"\n")[0].decode("ascii", errors="replace") if b"\n" in tail else ""
    if not digest or seal.problem("log", body, digest, f"log entry {path}"):
        raise CorruptSnapshotError(
            f"log entry {path} is damaged: its content differs from its digest", hint=DAMAGED_HINT
        )
    try:
        version = msgspec.json.decode(body, type=_Versioned).version
        check_version(path, "log format", version, _KNOWN_VERSIONS)
        entry = msgspec.json.decode(body, type=LogEntry)
    except msgspec.MsgspecError as error:
        raise CorruptSnapshotError(f"{path} is not a log entry ({error})", hint=DAMAGED_HINT) from error
    if entry.seq != seq:
        raise CorruptSnapshotError(f"log entry {path} is entry {entry.seq} in the wrong place", hint=DAMAGED_HINT)
    if not 1 <= entry.base <= seq:  # all from there on would be looked for
        raise CorruptSnapshotError(f"log entry {path} is damaged: its base is {entry.base}", hint=DAMAGED_HINT)
    if (entry.version == LOG_VERSION) != is_sealed(digest):
        raise CorruptSnapshotError(f"log entry {path} is damaged: its version is {entry.version}", hint=DAMAGED_HINT)
    if entry.version == 1 and attached_to(data):
        raise CorruptSnapshotError(f"log entry {path} is damaged: something lies behind it", hint=DAMAGED_HINT)
    return StoredEntry(entry, data, digest)
