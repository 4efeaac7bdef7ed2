"""Lease of a job: a sign of life of its driver in the job's folder, so that nobody takes a job over by mistake.

This is politeness, and nothing is right because of it: the job log is the fence, and a driver that is taken over
commits nothing more, whatever its lease says.  So a lease is not durable, a beat that cannot be written is left out,
and of two drivers that start in the same moment both may come through: the log stops one.

A driver beats once a second, or less often where a beat costs something (``Store.look_s``), into
``control/driver.json``.  Clocks of different hosts are never compared: who wants to
know whether a driver lives looks whether its beat changes.  On the driver's own host that is not needed to see that it
is dead, since the process is named with the moment of its start; so a start after a crash loses no time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from cutwater.data.decoding import prepare
from cutwater.errors import CorruptSnapshotError, CutwaterError, FencedError
from cutwater.runtime.status.status import JobStatus
from cutwater.storage.job_log import JobLog, wall_clock_ms
from cutwater.storage.store.base import Store
from cutwater.storage.store.paths import SIGN_FILE, control_folder, sign_path

BEAT_S = 1.0
LEASE_S = 10.0
"""So long the beat must stay the same before a driver that may live on is taken for dead."""
_LOOK_S = 0.2
"""Between two looks of a driver at the phase that its job is in."""
_POLL_S = 0.1
_SILENT_S = 2 * BEAT_S
"""After so long without a beat the user is told why nothing happens."""
_BYTES = 1024
"""Of the file, always: so that a beat is written over the one before, and no more is ever read."""

LEASE_LOGGER = "cutwater.lease"
_LOG = logging.getLogger(LEASE_LOGGER)


class Sign(msgspec.Struct, frozen=True, kw_only=True):
    """Sign of life of a driver."""

    driver: str
    """Of this start, random."""
    generation: int
    """One more than that of the driver before: a paused driver that wakes up does not write over its successor's."""
    beat: int
    host: Annotated[str, msgspec.Meta(pattern=r"^[\w.:-]{1,255}$")]
    """Is printed: nothing that a terminal would obey."""
    space: str
    """In which process ids mean something: the boot and the name space."""
    pid: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
    started: int
    """Start of the process, in the units of its system; 0: not known."""
    since_ms: int
    """Wall clock of its host, for people."""
    phase: Literal["forming", "deploying", "running", "draining", "restarting", "ending", "ended"]
    attempt: int


prepare(Sign)


@dataclass(frozen=True, slots=True)
class Turn:
    """The job may be started."""

    generation: int
    note: str = ""
    """Text for the user: that another driver may be alive."""


def await_turn(store: Store, job: str, *, takeover: bool = False, lease_s: float = LEASE_S) -> Turn:
    """Return once no other driver is seen to drive the job; changes nothing.

    Instantly if there is none, or its process on this host is dead; else the beat of the other one decides, within
    ``lease_s``.

    Args:
        store: the checkpoint directory.
        job: folder of the job.
        takeover: do not care whether another driver lives.
        lease_s: how long to wait for a beat.

    Raises:
        FencedError: another driver drives the job; says which, and what to do.
    """
    first = _raw(store, job)
    sign = _decoded(first)
    generation = sign.generation + 1 if sign is not None else 1
    if first is None:
        return Turn(generation)
    if takeover:
        return Turn(generation, f"takes over from the driver {_named(sign)}, as it was asked to")
    began_s, told = time.monotonic(), False
    while sign is None or process_state(sign) != "dead":
        silent_s = time.monotonic() - began_s
        if silent_s >= lease_s:
            return Turn(generation, f"takes over from the driver {_named(sign)}: no sign of life for {lease_s:.0f} s")
        if silent_s >= _SILENT_S and not told:
            told = True
            _LOG.warning(
                "job %r: its driver %s gives no sign of life; taken over in %.0f s if it stays so",
                job,
                _named(sign),
                lease_s - silent_s,
            )
        time.sleep(max(_POLL_S, store.look_s / 4))
        now = _raw(store, job)
        if now is None:  # it has come to its end meanwhile
            break
        if now != first and (fresh := _decoded(now)) is not None:
            raise _refused(store, job, fresh)
    return Turn(generation)


def read_sign(store: Store, job: str) -> Sign | None:
    """Last sign of a job's driver; ``None`` if there is none that can be read."""
    return _decoded(_raw(store, job))


def process_state(sign: Sign) -> str:
    """Of the process that a sign is of, as far as it can be seen from here.

    Returns:
        "dead", "alive", "paused" (by a signal), or "" if it belongs to another host or container.
    """
    if (sign.host, sign.space) != (socket.gethostname(), _process_space()):
        return ""
    found = _process(sign.pid)
    if found is None:
        return "dead"
    letter, started = found
    if letter in "ZX" or (sign.started and started and started != sign.started):
        return "dead"
    return "paused" if letter in "Tt" else "alive"


class Lease:
    """Keeps the sign of this driver alive until the job ends.  Starts a thread.

    Args:
        store: the checkpoint directory.
        job: folder of the job; its log is there.
        turn: what ``await_turn`` returned.
    """

    def __init__(self, store: Store, job: str, turn: Turn) -> None:
        self._store, self._job = store, job
        pid = os.getpid()
        found = _process(pid)
        self._sign = Sign(
            driver=uuid.uuid4().hex,
            generation=turn.generation,
            beat=0,
            host=socket.gethostname(),
            space=_process_space(),
            pid=pid,
            started=found[1] if found is not None else 0,
            since_ms=wall_clock_ms(),
            phase="forming",
            attempt=0,
        )
        self._look: Callable[[], JobStatus] | None = None
        self._ended = self._closed = threading.Event()
        self._beat()
        self._thread = threading.Thread(target=self._run, name=f"cutwater-lease-{job}", daemon=True)
        self._thread.start()

    def follow(self, look: Callable[[], JobStatus], ended: threading.Event) -> None:
        """Tell from now on the state that ``look`` returns, until ``ended``."""
        self._look, self._ended = look, ended

    def close(self) -> None:
        """Give the job up; returns when nobody is kept from starting it."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        beat_s, every_s = time.monotonic(), max(BEAT_S, self._store.look_s)
        while not (self._ended.wait(_LOOK_S) or self._closed.is_set()):
            if self._changed() or time.monotonic() >= beat_s + every_s:
                beat_s = time.monotonic()
                self._beat()
        with contextlib.suppress(CutwaterError):
            there = read_sign(self._store, self._job)
            if there is not None and there.driver == self._sign.driver:
                self._store.delete(sign_path(self._job))

    def _changed(self) -> bool:
        """The job is in another phase than was told last."""
        if self._look is None:
            return False
        before, status = self._sign, self._look()
        self._sign = msgspec.structs.replace(before, phase=status.phase, attempt=status.attempt)
        return self._sign != before

    def _beat(self) -> None:
        self._sign = msgspec.structs.replace(self._sign, beat=self._sign.beat + 1)
        with contextlib.suppress(CutwaterError):  # the job has other ways to find out that its folder is lost
            there = read_sign(self._store, self._job)
            if there is None or there.driver == self._sign.driver or there.generation < self._sign.generation:
                self._store.overwrite(sign_path(self._job), msgspec.json.encode(self._sign).ljust(_BYTES))


def _raw(store: Store, job: str) -> bytes | None:
    """The file's bytes; empty if it is not one of ours, ``None`` if there is none."""
    try:
        return bytes(store.read(sign_path(job), 0, _BYTES))
    except CorruptSnapshotError:
        return b"" if SIGN_FILE in store.names(control_folder(job)) else None
    except CutwaterError:
        return b""


def _decoded(raw: bytes | None) -> Sign | None:
    try:
        return msgspec.json.decode(raw, type=Sign) if raw else None
    except msgspec.MsgspecError:  # caught while it was written, or damaged
        return None


def _named(sign: Sign | None) -> str:
    return "that cannot be read from control/driver.json" if sign is None else f"{sign.host}:{sign.pid}"


def _refused(store: Store, job: str, sign: Sign) -> FencedError:
    latest = JobLog(store, job).read().latest
    newest = "no checkpoint yet"
    if latest is not None:
        newest = f"newest checkpoint {latest.checkpoint_id} of {_time(latest.time_ms)}"
    return FencedError(
        f"job {job!r} has a driver already: process {sign.pid} on host {sign.host}, since {_time(sign.since_ms)}, "
        f"{sign.phase}, {newest}",
        hint="Nothing was started. Stop that one (cutwater stop DIR JOB), or take the job from it: takeover=True, on "
        "the command line --takeover.",
    )


def _time(ms: int) -> str:
    try:
        return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return f"{ms} ms"


def _process(pid: int) -> tuple[str, int] | None:
    """State letter and start of a process of this host; ``None`` if there is none."""
    try:
        # The name, in parentheses, may hold anything: what is wanted lies behind it.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], int(fields[19])
    except (OSError, ValueError, IndexError):
        pass
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError, ValueError):
        return None
    except PermissionError:  # it lives, and is another user's
        pass
    return "R", 0


def _process_space() -> str:
    parts: list[str] = []
    for read in (
        lambda: Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        lambda: str(os.stat("/proc/self/ns/pid").st_ino),
    ):
        try:
            parts.append(read())
        except OSError:
            parts.append("")
    return "/".join(parts)
