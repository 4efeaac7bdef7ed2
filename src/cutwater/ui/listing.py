"""The jobs in a checkpoint directory: as JSON-able data, and as text for the command line."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

from cutwater.errors import StorageError
from cutwater.storage.base import Store
from cutwater.storage.log import JobLog, LogState
from cutwater.storage.retention import list_jobs
from cutwater.storage.snapshot import load_manifest
from cutwater.ui.text import age, lines_of_table, size

__all__ = ["driver_runs", "job_infos", "render_jobs"]


def job_infos(store: Store, driver_state: Callable[[str], bool | None]) -> list[dict[str, Any]]:
    """What is known of every job, without asking its driver.

    Args:
        store: the checkpoint directory.
        driver_state: whether a driver's process lives; ``None`` where that cannot be seen from here.

    Returns:
        Per job ``job``, ``uid``, ``state``, ``reason`` (why it was stopped, cancelled or failed), ``attempt``,
        ``driver``, ``began_ms``, ``checkpoint_id`` (0: none), ``completed_ms``, ``bytes``, ``problem``.

        ``state`` is what the log says (finished, stopped, cancelled, failed, damaged), else what is seen of the
        driver's process: running, ended (it died without a word), unknown.
    """
    return [_info(store, job, driver_state) for job in list_jobs(store)]


def _info(store: Store, job: str, driver_state: Callable[[str], bool | None]) -> dict[str, Any]:
    info: dict[str, Any] = {"job": job, "uid": "", "state": "damaged", "attempt": 0, "driver": "", "began_ms": 0}
    info |= {"checkpoint_id": 0, "completed_ms": 0, "bytes": 0, "problem": "", "reason": ""}
    try:
        state = JobLog(store, job).read()
        info |= {"uid": state.uid, "attempt": state.attempt, "driver": state.driver, "began_ms": state.began_ms}
        info["reason"] = state.reason
        if state.latest is not None:
            info |= {"checkpoint_id": state.latest.checkpoint_id, "completed_ms": state.latest.time_ms}
            info["bytes"] = sum(e.length for e in load_manifest(store, job, state.latest).entries)
        info["state"] = _state(state, driver_state)
    except StorageError as error:
        info["problem"] = str(error)
    return info


def _state(state: LogState, driver_state: Callable[[str], bool | None]) -> str:
    if state.outcome:
        return state.outcome
    runs = driver_state(state.driver) if state.driver else False
    return {True: "running", False: "ended", None: "unknown"}[runs]


def driver_runs(driver: str) -> bool | None:
    """Whether the process of a driver ("host:pid") lives; ``None`` if it is on another host.

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
    lines = lines_of_table(head, [_row(i, now_ms) for i in infos], right=(2, 3, 4, 5))
    lines += [f"{i['job']}: {i['problem']}" for i in infos if i["problem"]]
    lines += [f"{i['job']}: {i['reason']}" for i in infos if i["state"] == "failed"]
    return "\n".join(lines) + "\n"


def _row(info: dict[str, Any], now_ms: int) -> list[str]:
    newest = ["-", "-", "-"]
    if info["checkpoint_id"]:
        newest = [str(info["checkpoint_id"]), age(now_ms - info["completed_ms"]), size(info["bytes"])]
    return [info["job"], info["state"], str(info["attempt"]), *newest, info["driver"] or "-"]
