"""The jobs in a checkpoint directory: as JSON-able data, and as text for the command line."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Collection
from typing import Any

from cutwater.data.text import age, lines_of_table, shown_width, size
from cutwater.errors import SealError, StorageError
from cutwater.runtime.driver.lease import BEAT_S, Sign, process_state, read_sign
from cutwater.storage.log.entries import LogState
from cutwater.storage.log.job_log import JobLog
from cutwater.storage.snapshot.retention import list_jobs
from cutwater.storage.snapshot.segment_files import load_manifest
from cutwater.storage.store.base import Store

_WATCH_S = 2.5 * BEAT_S
"""So long the beat of a driver on another host is watched for a change."""
_POLL_S = 0.1


def job_infos(
    store: Store,
    driver_state: Callable[[str], bool | None],
    *,
    only: Collection[str] | None = None,
    watch_s: float = _WATCH_S,
) -> list[dict[str, Any]]:
    """Facts on every job, without asking its driver.

    Args:
        store: the checkpoint directory.
        driver_state: whether the process that the job log names lives; ``None`` where that cannot be seen from here.
            Asked for drivers that left no sign of themselves.
        only: these jobs.
        watch_s: how long to look whether a driver on another host beats, if there is one.

    Returns:
        Per job ``job``, ``uid``, ``state``, ``reason`` (why it was stopped, cancelled or failed), ``attempt``,
        ``driver``, ``began_ms``, ``checkpoint_id`` (0: none), ``completed_ms``, ``bytes``, ``problem``.

        ``state`` is the phase that a living driver is in (forming, deploying, running, draining, restarting, ending),
        "paused" if its process is, "silent" if it is on another host and its beat stands still; without a driver how
        the job ended (finished, stopped, cancelled, failed), or "dead": its driver died without a word.  "damaged":
        the log cannot be read; "sealed": with a key that was not given; "unknown": the driver of an older release, on
        another host.
    """
    names = [job for job in list_jobs(store) if only is None or job in only]
    signs = {job: sign for job in names if (sign := read_sign(store, job)) is not None}
    seen = _watched(store, signs, watch_s)
    return [_info(store, job, signs.get(job), seen.get(job, ""), driver_state) for job in names]


def _watched(store: Store, signs: dict[str, Sign], watch_s: float) -> dict[str, str]:
    """ "dead", "alive", "paused" or "silent" by job.  Clocks of other hosts say nothing: their beat must change."""
    seen = {job: process_state(sign) for job, sign in signs.items()}
    afar = {job for job, state in seen.items() if not state}
    deadline = time.monotonic() + watch_s
    while afar and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        for job in sorted(afar):
            now = read_sign(store, job)
            if now is None or (now.driver, now.beat) != (signs[job].driver, signs[job].beat):
                signs[job] = now or signs[job]
                seen[job] = "dead" if now is None else "alive"
                afar.discard(job)
    return {job: state or "silent" for job, state in seen.items()}


def _info(
    store: Store, job: str, sign: Sign | None, seen: str, driver_state: Callable[[str], bool | None]
) -> dict[str, Any]:
    info: dict[str, Any] = {"job": job, "uid": "", "state": "damaged", "attempt": 0, "driver": "", "began_ms": 0}
    info |= {"checkpoint_id": 0, "completed_ms": 0, "bytes": 0, "problem": "", "reason": ""}
    try:
        state = JobLog(store, job).read()
        info |= {"uid": state.uid, "attempt": state.attempt, "driver": state.driver, "began_ms": state.began_ms}
        info["reason"] = state.reason
        if state.latest is not None:
            info |= {"checkpoint_id": state.latest.checkpoint_id, "completed_ms": state.latest.time_ms}
            info["bytes"] = sum(e.length for e in load_manifest(store, job, state.latest).entries)
        info["state"] = _state(state, sign, seen, driver_state)
        if sign is not None:
            info["driver"] = f"{sign.host}:{sign.pid}"
    except SealError as error:  # a wrong key, or none, says nothing of the job
        info |= {"state": "sealed", "problem": str(error)}
    except StorageError as error:
        info["problem"] = str(error)
    return info


def _state(state: LogState, sign: Sign | None, seen: str, driver_state: Callable[[str], bool | None]) -> str:
    if state.finished:
        return "finished"
    if sign is not None and seen == "alive" and sign.phase != "ended":
        return sign.phase
    if seen in ("paused", "silent"):
        return seen
    if state.outcome:
        return state.outcome
    runs = driver_state(state.driver) if state.driver and sign is None else False
    return {True: "running", False: "dead", None: "unknown"}[runs]


def driver_runs(driver: str) -> bool | None:
    """True if the process of a driver ("host:pid") lives; ``None`` if it is on another host.

    >>> driver_runs(f"{socket.gethostname()}:{os.getpid()}"), driver_runs("elsewhere.example:1")
    (True, None)
    """
    host, _, pid = driver.rpartition(":")
    if host != socket.gethostname() or not pid.isdecimal():
        return None
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it lives, and is another user's
        return True
    return True


def render_jobs(infos: list[dict[str, Any]], now_ms: int) -> str:
    """The result of ``job_infos`` as text."""
    if not infos:
        return "no jobs\n"
    head = ["job", "state", "attempt", "checkpoint", "age", "size", "driver"]
    lines = lines_of_table(head, [_row(i, now_ms) for i in infos], right=(2, 3, 4, 5), width=shown_width())
    lines += [f"{i['job']}: {i['problem']}" for i in infos if i["problem"]]
    lines += [f"{i['job']}: {i['reason']}" for i in infos if i["state"] == "failed"]
    return "\n".join(lines) + "\n"


def _row(info: dict[str, Any], now_ms: int) -> list[str]:
    newest = ["-", "-", "-"]
    if info["checkpoint_id"]:
        newest = [str(info["checkpoint_id"]), age(now_ms - info["completed_ms"]), size(info["bytes"])]
    return [info["job"], info["state"], str(info["attempt"]), *newest, info["driver"] or "-"]
