"""Whoever can write into a job's folder can do no more than be refused: random hostile manifests, handles and files.

Each case takes a folder as a job leaves it, writes what an attacker without the job's key might (with digests made
anew, since without a key anybody can), and then does what a driver, a worker and the command line do with it: restore,
settle sinks, commit, retire, collect, verify, list, inspect.  Nothing beside the folder may change, every error is one
of ours, and nothing hangs.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from cutwater.connectors.base import SinkSnapshot
from cutwater.connectors.files.sink import FileSink
from cutwater.connectors.foreach_batch import ForeachBatchSink
from cutwater.connectors.staging import Guard
from cutwater.errors import CutwaterError
from cutwater.state.segments import GROUP_COLUMN, Segment
from cutwater.state.table.keyed_segments import in_groups
from cutwater.storage.job_log import JobLog
from cutwater.storage.log_entries import attached_to
from cutwater.storage.reading import choose, open_snapshot
from cutwater.storage.snapshot.manifest import Manifest, StepRecord, SubtaskRecord
from cutwater.storage.snapshot.publish import publish
from cutwater.storage.snapshot.retention import Retention, list_jobs
from cutwater.storage.snapshot.savepoint import Claim, SavepointManifest, publish_savepoint
from cutwater.storage.snapshot.savepoint_files import SavepointWriter
from cutwater.storage.snapshot.segment_files import SnapshotWriter, load_manifest
from cutwater.storage.store.local import LocalStore
from cutwater.storage.store.seal import PLAIN, Seal
from cutwater.ui.inspect import inspect_snapshot, job_infos, render_inspect, render_verify, verify_snapshot

SCHEMA = pa.schema({"n": pa.int64()})
KEY = b"5f1d7a84db00d2fce4aa18d3"
MOST_S = 5
CASES = 300


@dataclass
class Identity:
    job_uid: str
    step: str
    incarnation: int = 1
    subtask: int = 0
    parallelism: int = 1


def a_job(root: Path, seal: Seal) -> None:
    """Two checkpoints with state in files, a sink with a part to commit and rows in progress, and a savepoint."""
    store = LocalStore.open(root / "chk", seal)
    log = JobLog(store, "job")
    log.begin_attempt("driver")
    sinks = [FileSink(str(root / "out"), roll_rows=3), ForeachBatchSink(print).bind(str(root / "chk/job/output/each"))]
    named = zip(sinks, ("out", "each"), strict=True)
    writers = [sink.guarded(Guard(seal)).writer(SCHEMA, Identity(log.state.uid, step), []) for sink, step in named]
    for n in (1, 2):
        made = []
        for writer in writers:
            writer.write(pa.record_batch({"n": list(range(5 * n))}))
            made.append(writer.pre_commit(n, False)())
        group = pa.array([0] * 40, pa.uint16())
        segment = Segment("agg", "base", pa.record_batch({GROUP_COLUMN: group, "n": range(40)}), (0, 64))
        files = SnapshotWriter(store, "job", n, log.attempt, 0, 100)
        entries = [*files.add("count", 0, [segment], shared=True), *files.add("small", 0, [segment])]
        files.close()
        record = SubtaskRecord(
            vertex=0,
            subtask=0,
            incarnation=1,
            protocol="aligned",
            handles={"out": made[0].handles, "each": made[1].handles},
            sinks={"out": made[0].state},
        )
        manifest = Manifest(
            "job",
            log.state.uid,
            n,
            log.attempt,
            "aligned",
            64,
            1,
            0,
            1,
            [StepRecord("count", "x", 1)],
            [record],
            entries,
        )
        publish(store, log, manifest)
    savepoint = LocalStore.open(root / "savepoints", seal)
    parts = SavepointWriter(savepoint, "sp").add_state("count", 0, range(64), [segment])
    publish_savepoint(savepoint, "sp", SavepointManifest.of(manifest, parts, committed_by=2))
    Claim(store, "job").take(str(root / "savepoints"), "sp", "0" * 32, 1)


# ----------------------------------------------------------------------------------------------------------- hostility

NAMES = [
    "../precious",
    "../../precious/thesis.txt",
    "/precious",
    "..",
    ".",
    "",
    "precious\0",
    "x" * 300,
    "a/b",
    "~",
    "link/x",
]
NUMBERS = [0, -1, 1, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63), 10**18]


def hostile(value: Any, rng: random.Random, precious: Path, share: float) -> Any:
    """The value with some names and numbers in it exchanged, at any depth."""
    if isinstance(value, dict):
        return {k: hostile(v, rng, precious, share) for k, v in value.items()}
    if isinstance(value, list):
        return [hostile(v, rng, precious, share) for v in value]
    if rng.random() >= share or value is None:
        return value
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice(NUMBERS)
    if isinstance(value, str):
        names = [
            *NAMES,
            str(precious / "thesis.txt"),
            os.path.relpath(precious / "thesis.txt", precious.parent / "out"),
        ]
        return rng.choice(names)
    return value


def content_of(path: Path) -> bytes:
    """Of a file; what was put in the place of one may be endless, or elsewhere."""
    if path.is_symlink() or not path.is_file() or path.stat().st_size > 1 << 20:
        raise OSError(f"{path} is no file any more")
    return path.read_bytes()


def replaced(path: Path, data: bytes) -> None:
    """A file with this content, whatever was there; unless its folder leads elsewhere by now."""
    if path.parent.is_symlink():
        raise OSError(f"{path.parent} is a link")
    path.unlink()
    path.write_bytes(data)


def rewrite_log(root: Path, rng: random.Random, change: Callable[[Any], Any]) -> None:
    """The newest checkpoint's manifest changed, and the log that names it, all with digests made anew."""
    store = LocalStore(root / "chk")
    folder = root / "chk/job/log"
    entries = sorted(folder.glob("0*.json"))
    data = content_of(entries[-1])
    entry = msgspec.json.decode(data.split(b"\n")[0])
    manifest = change(msgspec.json.decode(attached_to(data)))
    body = msgspec.json.encode(manifest) + b"\n"
    digest = PLAIN.digest("manifest", body)
    if rng.random() < 0.3:
        entry = change(entry)
    with contextlib.suppress(KeyError, TypeError, IndexError):
        entry["event"]["digest"] = entry["state"]["completed"][0]["digest"] = digest
    line = msgspec.json.encode(entry)
    replaced(entries[-1], b"\n".join([line, store.seal.digest("log", line).encode(), body]))


def rewrite_savepoint(root: Path, change: Callable[[Any], Any]) -> None:
    path = root / "savepoints/sp/savepoint.json"
    body = msgspec.json.encode(change(msgspec.json.decode(content_of(path).split(b"\n")[0])))
    replaced(path, body + b"\n" + PLAIN.digest("savepoint", body).encode() + b"\n")


def hostile_segment(root: Path, rng: random.Random) -> None:
    """A data file with something else in it, that the manifest names with the right digest."""
    kind = rng.choice(["compressed", "other columns", "offsets", "noise", "nothing", "dictionary"])
    sink = io.BytesIO()
    big = (
        pa.record_batch({"n": pa.array([0] * 20_000_000, pa.int64())})
        if kind == "compressed" and rng.random() < 0.1
        else None
    )
    batch = big or pa.record_batch({"x": ["a", "b"], GROUP_COLUMN: pa.array([9, 3], pa.uint16())})
    if kind == "dictionary":
        batch = pa.record_batch({"x": pa.array(["a", "b"]).dictionary_encode()})
    if kind == "offsets":
        offsets = pa.array([0, 2**30, 5], pa.int32()).buffers()[1]
        column = pa.StringArray.from_buffers(2, offsets, pa.py_buffer(b"hello"))
        batch = pa.RecordBatch.from_arrays([column], names=["x"])
    options = pa.ipc.IpcWriteOptions(compression="zstd" if kind == "compressed" else None)
    with pa.ipc.new_stream(sink, batch.schema, options=options) as stream:
        stream.write_batch(batch)
    data = {"noise": rng.randbytes(500), "nothing": b""}.get(kind, sink.getvalue())
    path = next((root / "chk/job/shared").iterdir())
    replaced(path, data)

    def change(manifest: Any) -> Any:
        for entry in manifest["entries"]:
            if entry.get("file", "").endswith(path.name):
                digest = PLAIN.digest("segment", data)
                entry |= {"offset": 0, "length": len(data), "digest": digest, "rows": batch.num_rows}
                if rng.random() < 0.5:
                    entry["ungrouped"] = [rng.choice([0, 1, 7, -1]), rng.choice([1, 64, 2**40, 0])]
        return manifest

    rewrite_log(root, rng, change)


def hostile_file(root: Path, rng: random.Random, precious: Path) -> None:
    """A FIFO, a socket, a link or something endless in the place of a file or folder."""
    place = rng.choice(sorted(p for name in ("chk", "out", "savepoints") for p in (root / name).rglob("*")))
    shutil.rmtree(place) if place.is_dir() else place.unlink()
    kind = rng.choice(["fifo", "socket", "link", "folder link", "device link", "sparse", "folder", "loop"])
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "socket" and len(str(place)) < 100:
        socket.socket(socket.AF_UNIX).bind(str(place))
    elif kind == "sparse":
        with place.open("wb") as file:
            file.truncate(1 << rng.choice([20, 33, 42]))
    elif kind == "folder":
        place.mkdir()
    else:
        targets = {"link": precious / "thesis.txt", "folder link": precious, "device link": Path("/dev/zero")}
        place.symlink_to(targets.get(kind, place))


def strike(root: Path, rng: random.Random, precious: Path) -> None:
    """One or two hostile changes."""
    share = rng.choice([0.02, 0.1, 0.5])
    for _ in range(rng.choice([1, 1, 2])):
        match rng.randrange(6):
            case 0 | 1:
                with contextlib.suppress(IndexError, OSError, ValueError, KeyError):
                    rewrite_log(root, rng, lambda m: hostile(m, rng, precious, share))
            case 2:
                with contextlib.suppress(OSError, ValueError):
                    rewrite_savepoint(root, lambda m: hostile(m, rng, precious, share))
            case 3:
                with contextlib.suppress(IndexError, OSError, ValueError, KeyError, StopIteration):
                    hostile_segment(root, rng)
            case 4:
                hostile_file(root, rng, precious)
            case _:
                claim = root / "chk/job/claim.json"
                with contextlib.suppress(OSError, ValueError):
                    data = msgspec.json.decode(content_of(claim))
                    data |= {"directory": str(precious.parent), "folder": "precious"}
                    replaced(claim, msgspec.json.encode(hostile(data, rng, precious, share)))


# ----------------------------------------------------------------------------------------------- what is done with it


def uses(root: Path, seal: Seal) -> Iterator[Callable[[], object]]:
    """What a driver, its workers and the command line do with the folder; each by itself."""
    store = LocalStore(root / "chk", seal)
    sinks = [FileSink(str(root / "out"), roll_rows=3), ForeachBatchSink(_taken).bind(str(root / "chk/job/output/each"))]

    def committers(uid: str) -> list[Any]:
        return [s.guarded(Guard(seal)).committer(SCHEMA, uid, n) for s, n in zip(sinks, ("out", "each"), strict=True)]

    def snapshots(manifest: Manifest) -> list[SinkSnapshot]:
        return [
            SinkSnapshot(
                manifest.checkpoint_id,
                [h for r in manifest.subtasks for h in r.handles.get(step, [])],
                [r.sinks[step] for r in manifest.subtasks if step in r.sinks],
            )
            for step in ("out", "each")
        ]

    def restore() -> None:
        log = JobLog(store, "job")
        log.begin_attempt("the next driver")
        found = choose(store, "job", log.read())
        if found is None:
            return  # the log tells of no checkpoint
        for committer, chosen in zip(committers(log.state.uid), snapshots(found.manifest), strict=True):
            committer.settle(chosen, [chosen], log.attempt)
        identity = Identity(log.state.uid, "out", log.attempt)
        sinks[0].guarded(Guard(seal)).writer(SCHEMA, identity, snapshots(found.manifest)[0].states)
        Retention(store, log).collect(ended=True)

    def commit_and_retire() -> None:
        log = JobLog(store, "job")
        state = log.read()
        for completed in state.completed:
            manifest = load_manifest(store, "job", completed)
            for committer, told in zip(committers(state.uid), snapshots(manifest), strict=True):
                committer.commit(manifest.checkpoint_id, told.handles)
                committer.retire(told, [])
        for committer in committers(state.uid):
            committer.finish(5)

    def claimed() -> None:
        Claim(store, "job").collect(range(100), needed=1)

    def looked_at() -> None:
        for job in list_jobs(store):
            render_verify(verify_snapshot(store, job))
            render_inspect(inspect_snapshot(store, job))

    def savepoint() -> None:
        snapshot = open_snapshot(str(root / "savepoints/sp"), seal)
        for step in {e.step for e in snapshot.manifest.entries}:
            for _ in snapshot.segments(step):
                pass
        render_verify(verify_snapshot(snapshot.store, snapshot.folder))

    yield from (looked_at, lambda: job_infos(store, lambda _: None), savepoint, restore, commit_and_retire, claimed)


def _taken(table: pa.Table, checkpoint_id: int) -> None:
    """What a user does with rows."""


def listing(folder: Path) -> list[tuple[str, int, bytes]]:
    files = sorted(folder.rglob("*"))
    return [(str(f.relative_to(folder)), f.lstat().st_mode, f.read_bytes() if f.is_file() else b"") for f in files]


def too_long(*_: object) -> None:
    raise AssertionError(f"something hangs for more than {MOST_S} s")


@pytest.fixture
def alarm() -> Iterator[None]:
    in_groups(pa.record_batch({"key": [5]}), 1, 64)  # what is compiled takes longer than all the rest
    old = signal.signal(signal.SIGALRM, too_long)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, old)


def run_cases(tmp_path: Path, seeds: range, seal: Seal) -> int:
    """How many uses were refused."""
    template, precious = tmp_path / "template", tmp_path / "precious"
    a_job(template, seal)
    (precious / "chapters").mkdir(parents=True)
    (precious / "thesis.txt").write_text("three years of work")
    (precious / "chapters" / "wal-00000-0000000001-000000.arrows").write_text("chapter one")
    before, refused = listing(precious), 0
    for seed in seeds:
        root = tmp_path / f"case-{seed}"
        for name in ("chk", "out", "savepoints"):
            shutil.copytree(template / name, root / name)
        claim = root / "chk/job/claim.json"
        claim.write_text(claim.read_text().replace(str(template), str(root)))
        rng = random.Random(seed)
        strike(root, rng, precious)
        for use in uses(root, seal):
            signal.alarm(MOST_S)
            try:
                use()
            except CutwaterError:
                refused += 1
            finally:
                signal.alarm(0)
            assert listing(precious) == before, f"seed {seed}: {use.__name__} touched what is not the job's"
        shutil.rmtree(root)
    return refused


def test_the_world_is_sound_where_nobody_is_hostile(tmp_path: Path) -> None:
    a_job(tmp_path, PLAIN)
    for use in uses(tmp_path, PLAIN):
        use()
    assert list((tmp_path / "out").glob("part-*"))


def test_hostile_folders_are_refused_or_harmless(tmp_path: Path, alarm: None) -> None:
    assert run_cases(tmp_path, range(CASES), PLAIN) > CASES


def test_with_a_key_whatever_was_changed_is_refused(tmp_path: Path, alarm: None) -> None:
    assert run_cases(tmp_path, range(CASES // 3), Seal([KEY])) > CASES // 3


@pytest.mark.full
def test_ten_thousand_hostile_folders(tmp_path: Path, alarm: None) -> None:
    assert run_cases(tmp_path, range(CASES, 10_000), PLAIN) > 10_000
