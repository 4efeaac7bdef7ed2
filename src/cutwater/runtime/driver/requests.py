"""Requests to a running driver from another process: files in the job's folder, which every driver host can see.

A request is ``control/<id>-request.json``; ``<id>`` is random, so that no name is ever used twice.  Exactly one process
decides its fate by atomic create of ``control/<id>-claim.json``: the driver that takes it, or the sender, who withdraws
it after a while.  So a request that its sender has given up is never performed later, and no two drivers perform the
same one.  The driver answers with ``control/<id>-done.json``; the sender then removes the three files.

A driver takes only requests that were not there when it began to watch (they were meant for its predecessor), and only
while the job log says that it owns the job: a paused driver that wakes up must not answer for its successor.

With a key all three are sealed, each for its own path, so that none can stand in for another.  A driver refuses a
request that is not sealed, and one that is old: it was performed once, and somebody brings it again.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Literal, Protocol, TypeAlias, TypeVar

import msgspec

from cutwater.data.decoding import prepare
from cutwater.errors import CorruptSnapshotError, CutwaterError, SealError, StorageError
from cutwater.runtime.driver.forks import Successor
from cutwater.storage.job_log import JobLog, wall_clock_ms
from cutwater.storage.store.base import Store
from cutwater.storage.store.paths import control_folder, request_paths

POLL_S = 0.5
_FRESH_MS = 600_000
"""As long as a sender waits for an answer."""

RequestKind = Literal["cancel", "stop", "rescale", "savepoint", "hand over", "promote"]


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Contents of a request file."""

    kind: RequestKind
    sender: str
    time_ms: int
    parallelism: int = 0
    """Of a rescale."""
    savepoint: str = ""
    """Directory for a savepoint, absolute."""
    drain: bool = False
    """With a stop and a savepoint."""
    successor: tuple[str, str, str] | None = None
    """Of a hand-over: checkpoint directory, name and uid of the job that goes on."""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Decision over a request."""

    accepted: bool
    """``False``: the sender withdrew it."""
    by: str


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of an accepted request."""

    ok: bool
    by: str
    detail: str = ""
    """Reason of a failure."""
    savepoint: str = ""
    """Folder of the savepoint that was asked for."""


prepare(Request, Claim, Answer)


Action: TypeAlias = Callable[[Request], str | None]
"""Performs a request; what it returns is the answer's ``savepoint``."""

_Read = TypeVar("_Read", Request, Claim, Answer)


class Handle(Protocol):
    """Receiver of requests (``Job``)."""

    def cancel(self) -> None: ...

    def stop(self, savepoint: str | None = None, *, drain: bool = False) -> str | None: ...

    def savepoint(self, directory: str) -> str: ...

    def rescale(self, parallelism: int) -> None: ...

    def hand_over(self, to: Successor, savepoint: str) -> str: ...

    def promote(self, savepoint: str | None = None) -> str: ...


def actions_of(handle: Handle) -> Mapping[RequestKind, Action]:
    """Actions by kind of request."""
    return {
        "cancel": lambda _: handle.cancel(),
        "stop": lambda r: handle.stop(r.savepoint or None, drain=r.drain),
        "savepoint": lambda r: handle.savepoint(r.savepoint),
        "rescale": lambda r: handle.rescale(r.parallelism),
        "hand over": lambda r: handle.hand_over(Successor(*r.successor or ("", "", "")), r.savepoint),
        "promote": lambda r: handle.promote(r.savepoint or None),
    }


def watch(
    store: Store,
    job: str,
    *,
    attempt: Callable[[], int],
    actions: Mapping[RequestKind, Action],
    ended: threading.Event,
    poll_s: float = POLL_S,
) -> Callable[[], None]:
    """Perform requests to a job until it ends.  Starts a thread.

    Args:
        store: the checkpoint directory.
        job: folder of the job.
        attempt: the attempt that this driver is at; requests wait until it is the one that owns the job.
        actions: by kind, what performs a request; returns when that is done.
        ended: set when the job ends; the thread ends with it.
        poll_s: seconds between two looks at the folder.

    Returns:
        A function that ends the watch; it waits until a request that is being answered has its answer.
    """
    watcher = _Watcher(store, job, attempt, actions, ended, poll_s)
    watcher.thread.start()
    return watcher.close


def send(
    store: Store,
    job: str,
    kind: RequestKind,
    *,
    parallelism: int = 0,
    savepoint: str = "",
    drain: bool = False,
    successor: tuple[str, str, str] | None = None,
    claim_s: float = 10.0,
    done_s: float = 600.0,
) -> Answer | None:
    """Ask the driver of a job for something and wait for its answer.

    Args:
        store: the checkpoint directory.
        job: folder of the job.
        kind: what is asked for.
        parallelism: of a rescale.
        savepoint: directory for a savepoint, as driver and workers see it.
        drain: stop as if the sources were exhausted.
        successor: of a hand-over: checkpoint directory, name and uid of the job that goes on.
        claim_s: seconds until a driver must have taken the request; after that it is withdrawn.
        done_s: seconds that performing it may take.

    Returns:
        The answer; ``None`` if no driver took the request: nothing happened, and nothing will.

    Raises:
        StorageError: the folder cannot be used, or the request was taken and not answered in time.
    """
    names = _Names(job, uuid.uuid4().hex)
    sender, now = _me(), wall_clock_ms()
    request = Request(
        kind=kind,
        sender=sender,
        time_ms=now,
        parallelism=parallelism,
        savepoint=savepoint,
        drain=drain,
        successor=successor,
    )
    _write(store, names.request, request)
    if not _appears(store, job, names.claim, claim_s):
        claim = Claim(accepted=False, by=_me())
        if _write(store, names.claim, claim):
            names.remove(store)
            return None
    if not _appears(store, job, names.done, done_s):
        by = _read(store, names.claim, Claim)
        raise StorageError(
            f"driver {by.by if by else '?'} of job {job!r} took the request to {kind} and did not finish it "
            f"in {done_s:.0f} s",
            hint="Look at the driver's own output; it may be waiting for a last checkpoint.",
        )
    answer = _read(store, names.done, Answer)
    names.remove(store)
    return answer


class _Names:
    """Paths of one request."""

    def __init__(self, job: str, id: str) -> None:
        self.request, self.claim, self.done = request_paths(job, id)

    def remove(self, store: Store) -> None:
        """The request first: a driver that claims what is gone sees that it is gone."""
        for path in (self.request, self.claim, self.done):
            store.delete(path)


class _Watcher:
    def __init__(
        self,
        store: Store,
        job: str,
        attempt: Callable[[], int],
        actions: Mapping[RequestKind, Action],
        ended: threading.Event,
        poll_s: float,
    ) -> None:
        self._store, self._job, self._attempt = store, job, attempt
        self._actions, self._ended, self._poll_s = actions, ended, poll_s
        self._closed = threading.Event()
        self._seen = set(_requests(store, job))
        self.thread = threading.Thread(target=self._run, name=f"cutwater-requests-{job}", daemon=True)

    def close(self) -> None:
        self._closed.set()
        if threading.current_thread() is not self.thread:
            self.thread.join()

    def _run(self) -> None:
        poll_s = max(self._poll_s, self._store.look_s / 2)
        while not (self._ended.wait(poll_s) or self._closed.is_set()):
            try:
                self._look()
            except CutwaterError:
                continue  # the store may be back at the next look; a sender that waits gets told after its time

    def _look(self) -> None:
        for id in _requests(self._store, self._job):
            if id not in self._seen and JobLog(self._store, self._job).read().attempt == self._attempt():
                self._seen.add(id)
                self._take(_Names(self._job, id))

    def _take(self, names: _Names) -> None:
        claim = Claim(accepted=True, by=_me())
        if not _write(self._store, names.claim, claim):
            return
        try:
            request = _read(self._store, names.request, Request)
        except SealError as error:
            _write(self._store, names.done, Answer(ok=False, by=_me(), detail=str(error)))
            return
        if request is None:  # withdrawn and removed between the look and the claim
            self._store.delete(names.claim)
            return
        try:
            if self._store.seal.keyed and abs(wall_clock_ms() - request.time_ms) > _FRESH_MS:
                raise CutwaterError("the request is old, or the clocks differ", hint="Ask again.")
            answer = Answer(ok=True, by=_me(), savepoint=self._actions[request.kind](request) or "")
        except Exception as error:  # whatever it was, the sender must hear of it
            answer = Answer(ok=False, by=_me(), detail=str(error))
        _write(self._store, names.done, answer)


def _requests(store: Store, job: str) -> list[str]:
    names = store.names(control_folder(job))
    return [n.removesuffix("-request.json") for n in names if n.endswith("-request.json")]


def _appears(store: Store, job: str, path: str, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    name = path.rpartition("/")[2]
    while name not in store.names(control_folder(job)):
        if time.monotonic() >= deadline:
            return False
        time.sleep(max(0.05, store.look_s / 4))
    return True


def _write(store: Store, path: str, message: Request | Claim | Answer) -> bool:
    """One line, and with a key another one, its seal; false if there is one already."""
    body = msgspec.json.encode(message)
    seal = f"\n{store.seal.digest('request', _covered(path, body))}".encode() if store.seal.keyed else b""
    return store.create(path, body + seal)


def _read(store: Store, path: str, type: type[_Read]) -> _Read | None:
    """A message; ``None`` if there is none, or what is there is no such message.

    Raises:
        SealError: with a key, it is not sealed with it.
    """
    try:
        body, _, seal = bytes(store.read(path)).partition(b"\n")
        if store.seal.keyed and store.seal.problem("request", _covered(path, body), seal.decode("ascii", "replace")):
            raise SealError(f"{path} was changed by somebody who does not have the job's key")
        return msgspec.json.decode(body, type=type)
    except SealError:
        raise
    except (CorruptSnapshotError, msgspec.MsgspecError):
        return None


def _covered(path: str, body: bytes) -> bytes:
    return path.encode() + b"\n" + body


def _me() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"
