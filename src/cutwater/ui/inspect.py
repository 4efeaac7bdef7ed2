"""The jobs of a directory, contents of a snapshot, and whether it is whole: as JSON-able data, and as text.

Pure functions over a store: they change nothing and can look at a job that is running.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Collection
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from cutwater.data.text import age, lines_of_table, plural, shown_width, size
from cutwater.data.time import MAX_WATERMARK, MIN_WATERMARK
from cutwater.errors import ConfigError, SealError, StorageError
from cutwater.runtime.driver.lease import BEAT_S, Sign, process_state, read_sign
from cutwater.storage.job_log import JobLog
from cutwater.storage.log_entries import CheckpointCompleted, LogState
from cutwater.storage.reading import load_snapshot, verify_checkpoint
from cutwater.storage.snapshot.manifest import Entry, Manifest, SplitRecord, SubtaskRecord
from cutwater.storage.snapshot.retention import list_jobs, older_entries
from cutwater.storage.snapshot.savepoint import is_savepoint, savepoint_state
from cutwater.storage.snapshot.segment_files import load_manifest
from cutwater.storage.snapshot.staged_input import verify_inputs
from cutwater.storage.store.base import Store
from cutwater.storage.store.paths import SAVEPOINT_FILE

_ENDED = {"finished": "finished", "stopped": "was stopped", "cancelled": "was cancelled", "failed": "failed"}
_SPLITS_SHOWN_MAX = 40
"""Of each read step."""


def inspect_snapshot(store: Store, job: str, checkpoint_id: int | None = None) -> dict[str, Any]:
    """Contents of a completed checkpoint (default: the newest), without reading its data.

    Returns:
        ``job``, ``uid``, ``outcome`` of the job (empty while an attempt owns it), ``reason``, ``checkpoint_id``,
        ``attempt``, ``protocol``, ``final``, ``completed`` (ISO time), ``bytes``, ``files`` (``older_bytes``,
        ``older_files``: those written for older checkpoints, which it shares), ``savepoint`` (whether it is one),
        ``retained`` (ids, newest first), ``steps`` (id, kind, parallelism, rows, bytes, states), ``subtasks`` (vertex,
        subtask, watermark, positions per read step, handles per write step, channels).

    Raises:
        ConfigError: no such job or checkpoint; the hint lists what there is.
        CorruptSnapshotError: log or manifest are damaged.
    """
    state, completed = _find(store, job, checkpoint_id)
    manifest = load_snapshot(store, job, completed)
    older = older_entries(manifest)
    return {
        "job": manifest.job,
        "uid": manifest.uid,
        "outcome": state.outcome,
        "reason": state.reason,
        "checkpoint_id": manifest.checkpoint_id,
        "attempt": manifest.attempt,
        "protocol": manifest.protocol,
        "parallelism": manifest.parallelism,
        "max_parallelism": manifest.max_parallelism,
        "final": manifest.final,
        "completed": _iso(manifest.completed_ms),
        "duration_ms": manifest.completed_ms - manifest.triggered_ms,
        "format_version": manifest.format_version,
        "bytes": sum(e.length for e in manifest.entries),
        "files": len({e.file for e in manifest.entries if e.file}),
        "older_bytes": sum(e.length for e in older),
        "older_files": len({e.file for e in older}),
        "savepoint": completed.path == SAVEPOINT_FILE,
        "retained": [c.checkpoint_id for c in state.completed],
        "steps": _steps(manifest),
        "subtasks": [_subtask(s) for s in manifest.subtasks],
    }


def verify_snapshot(store: Store, job: str, checkpoint_id: int | None = None) -> dict[str, Any]:
    """Read every byte of one completed checkpoint, or of all retained ones, and compare it with its digest.

    What the job staged of DataFrames is read, too: every restore needs it.

    Returns:
        ``job``, ``ok``, ``checkpoints``: per checkpoint ``checkpoint_id``, ``ok``, ``files``, ``segments``, ``bytes``,
        ``problems`` (file, what); and ``inputs``: per step ``step``, ``ok``, ``files``, ``bytes``, ``problems``.

    Raises:
        ConfigError: no such job or checkpoint.
        CorruptSnapshotError: the log itself is damaged.
    """
    state, completed = _find(store, job, checkpoint_id)
    chosen = state.completed if checkpoint_id is None else (completed,)
    reports = [verify_checkpoint(store, job, c) for c in chosen]
    inputs = [] if is_savepoint(store, job) else list(verify_inputs(store, job))
    return {
        "job": job,
        "ok": all(r.ok for r in reports) and not any(i.problems for i in inputs),
        "checkpoints": [
            {
                "checkpoint_id": r.checkpoint_id,
                "ok": r.ok,
                "files": r.files,
                "segments": r.segments,
                "bytes": r.bytes,
                "problems": [asdict(p) for p in r.problems],
            }
            for r in reports
        ],
        "inputs": [
            {
                "step": i.step,
                "ok": not i.problems,
                "files": i.files,
                "bytes": i.bytes,
                "problems": [{"file": file, "what": what} for file, what in i.problems],
            }
            for i in inputs
        ],
    }


def render_inspect(info: dict[str, Any]) -> str:
    """The result of ``inspect_snapshot`` as text."""
    kind = "savepoint" if info["savepoint"] else "checkpoint"
    lines = [
        f"{kind} {info['checkpoint_id']} of {info['job']}{' (final)' if info['final'] else ''}",
        f"  {info['protocol']}, attempt {info['attempt']}, parallelism {info['parallelism']}"
        f" of at most {info['max_parallelism']}",
        f"  completed {info['completed']} after {info['duration_ms']} ms",
        f"  {size(info['bytes'])} in {plural(info['files'], 'file')} besides the manifest",
    ]
    if not info["savepoint"]:
        lines.append(f"  retained: {', '.join(map(str, info['retained']))}")
    if info["older_files"]:
        older = f"{size(info['older_bytes'])} of it in {plural(info['older_files'], 'file')} of older checkpoints"
        lines.insert(4, f"  {older}")
    if info["outcome"]:
        lines.append(f"  the job {_ENDED[info['outcome']]}{': ' if info['reason'] else ''}{info['reason']}")
    lines.append("")
    rows = [
        [s["id"], s["kind"], str(s["parallelism"]), f"{s['rows']:,}", size(s["bytes"]), ", ".join(s["states"])]
        for s in info["steps"]
    ]
    width = shown_width()
    lines += lines_of_table(["step", "kind", "subtasks", "rows", "size", "states"], rows, width=width)
    subtasks = list(map(_subtask_row, info["subtasks"]))
    lines += ["", *lines_of_table(["subtask", "watermark", "reads", "to commit"], subtasks, width=width)]
    lines += _positions(info["subtasks"], width)
    return "\n".join(lines) + "\n"


def render_verify(info: dict[str, Any]) -> str:
    """The result of ``verify_snapshot`` as text."""
    lines: list[str] = []
    for c in info["checkpoints"]:
        verdict = "ok" if c["ok"] else "DAMAGED"
        what = f"{plural(c['files'], 'file')}, {plural(c['segments'], 'segment')}, {size(c['bytes'])}"
        lines.append(f"checkpoint {c['checkpoint_id']}: {verdict} ({what})")
        lines += [f"  {p['file']}: {p['what']}" for p in c["problems"]]
    for i in info["inputs"]:
        verdict = "ok" if i["ok"] else "DAMAGED"
        lines.append(f"input {i['step']}: {verdict} ({plural(i['files'], 'file')}, {size(i['bytes'])})")
        lines += [f"  {p['file']}: {p['what']}" for p in i["problems"]]
    return "\n".join(lines) + "\n"


def _find(store: Store, job: str, checkpoint_id: int | None) -> tuple[LogState, CheckpointCompleted]:
    if is_savepoint(store, job):
        state = savepoint_state(store, job)
        return state, state.completed[0]
    jobs = list_jobs(store)
    if job not in jobs:
        raise ConfigError(f"no job {job!r} in {store!r}", hint=f"There are: {', '.join(jobs) or 'none'}.")
    state = JobLog(store, job).read()
    ids = [c.checkpoint_id for c in state.completed]
    if not ids:
        raise ConfigError(f"job {job!r} has completed no checkpoint yet")
    if checkpoint_id is None:
        return state, state.completed[0]
    if checkpoint_id not in ids:
        raise ConfigError(
            f"job {job!r} has no completed checkpoint {checkpoint_id}", hint=f"There are: {', '.join(map(str, ids))}."
        )
    return state, state.completed[ids.index(checkpoint_id)]


def _steps(manifest: Manifest) -> list[dict[str, Any]]:
    by_step: dict[str, list[Entry]] = {step.id: [] for step in manifest.steps}
    for entry in manifest.entries:
        by_step.setdefault(entry.step, []).append(entry)
    known = {step.id: step for step in manifest.steps}
    return [
        {
            "id": step,
            "kind": known[step].kind if step in known else "",
            "parallelism": known[step].parallelism if step in known else len({e.subtask for e in entries}),
            "rows": sum(e.rows for e in entries),
            "bytes": sum(e.length for e in entries),
            "states": sorted({e.name for e in entries}),
        }
        for step, entries in by_step.items()
    ]


def _subtask(record: SubtaskRecord) -> dict[str, Any]:
    return {
        "vertex": record.vertex,
        "subtask": record.subtask,
        "watermark": _time(record.watermark),
        "processing_time": _iso(record.processing_time_ms),
        "finished": record.finished,
        "positions": {step: [_split(s) for s in splits] for step, splits in record.splits.items()},
        "handles": record.handles,
        "channels": [
            {
                "edge": c.edge,
                "from": c.source,
                "next_row": c.next_row,
                "watermark": _time(c.watermark),
                "idle": c.idle,
                "ended": c.ended,
            }
            for c in record.inputs
        ],
    }


def _split(record: SplitRecord) -> dict[str, Any]:
    return {
        "split": record.id,
        "position": record.position,
        "max_time": _time(record.max_time),
        "done": record.done,
    }


def _subtask_row(info: dict[str, Any]) -> list[str]:
    reads = [
        f"{step}: {plural(len(splits), 'split')}, {sum(s['done'] for s in splits)} done"
        for step, splits in info["positions"].items()
        if splits
    ]
    handles = [f"{step}: {len(handles)}" for step, handles in info["handles"].items() if handles]
    name = f"{info['vertex']}.{info['subtask']}{' finished' if info['finished'] else ''}"
    return [name, info["watermark"] or "-", ", ".join(reads) or "-", ", ".join(handles) or "-"]


def _positions(subtasks: list[dict[str, Any]], width: int | None) -> list[str]:
    """Per read step its splits, one on a line; those that are not done come first."""
    by_step: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for info in subtasks:
        for step, splits in info["positions"].items():
            by_step.setdefault(step, []).extend((f"{info['vertex']}.{info['subtask']}", split) for split in splits)
    lines: list[str] = []
    for step, splits in by_step.items():
        shown = sorted(splits, key=lambda found: (found[1]["done"], found[1]["split"]))
        rows = [[s["split"], _position(s), s["max_time"] or "-", at] for at, s in shown[:_SPLITS_SHOWN_MAX]]
        head = [f"split of {step}", "position", "newest time", "subtask"]
        lines += ["", *lines_of_table(head, rows, width=width)] if rows else []
        if left := len(shown) - len(rows):
            lines.append(f"... {plural(left, 'split')} more (--json shows all)")
    return lines


def _position(split: dict[str, Any]) -> str:
    position = split["position"]
    return "done" if split["done"] else position if isinstance(position, str) else json.dumps(position)


def _time(microseconds: int) -> str | None:
    """ISO event time, "end" for the end of time, ``None`` before the first one."""
    if microseconds == MIN_WATERMARK:
        return None
    if microseconds == MAX_WATERMARK:
        return "end"
    try:
        return datetime.fromtimestamp(microseconds // 1_000_000, UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError):
        return f"{microseconds} us"


def _iso(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="milliseconds")


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
    deadline = time.monotonic() + max(watch_s, 2.5 * store.look_s)
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
