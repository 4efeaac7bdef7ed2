"""Jobs with a key, on real worker processes: what is sealed, who is refused, how a key is turned on and changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_host import FakeSpark
from runtime_world import assert_running_counts, counting, gated, open_gate, query, wait_until

import cutwater as cw
from cutwater.api.jobs.job import Job
from cutwater.connectors import spark_source
from cutwater.errors import StorageError
from cutwater.runtime.driver.requests import send
from cutwater.storage.job_log import JobLog
from cutwater.storage.reading import open_snapshot
from cutwater.storage.snapshot.manifest import Manifest
from cutwater.storage.snapshot.segment_files import load_manifest
from cutwater.storage.snapshot.staged_input import verify_inputs
from cutwater.storage.store.local import LocalStore
from cutwater.storage.store.seal import Seal, is_sealed

ROWS, KEYS = 8_000, 20
KEY, NEW_KEY = b"5f1d7a84db00d2fce4aa18d3", b"c0ffee84db00d2fce4aa9999"


def key_file(folder: Path, *keys: bytes) -> Path:
    path = folder / "key"
    path.touch(0o600)
    path.write_bytes(b"# of this test\n" + b"".join(key + b"\n" for key in keys))
    return path


def flow_of(folder: Path, rate: float | None = 8_000) -> cw.Dataflow:
    return counting("first", gated(folder, ROWS, rate=rate), folder / "out", keys=KEYS, roll_rows=500)


def some_checkpoints(job: Job, more: int = 4) -> None:
    so_far = job.status.checkpoints.completed
    wait_until(lambda: job.status.checkpoints.completed >= so_far + more, "checkpoints", job=job)


def newest(folder: Path, *keys: bytes) -> Manifest:
    store = LocalStore(folder / "chk", Seal(keys))
    latest = JobLog(store, "first").read().latest
    assert latest is not None
    return load_manifest(store, "first", latest)


def digests(value: Any) -> list[str]:
    """All that is called a digest, at any depth."""
    if isinstance(value, dict):
        return [d for k, v in value.items() for d in ([v] if k == "digest" else digests(v))]
    return [d for v in value for d in digests(v)] if isinstance(value, list) else []


def everything_below(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "key")


def test_a_sealed_job_survives_kills_and_its_key_is_nowhere_but_in_its_file(
    start: Callable[..., Job], fake_spark: FakeSpark, tmp_path: Path
) -> None:
    job = start(flow_of(tmp_path), key_file=key_file(tmp_path, KEY), state_replicas=1)
    some_checkpoints(job)
    os.kill(next(iter(fake_spark.pids)), 9)
    some_checkpoints(job)
    manifest = newest(tmp_path, KEY)
    assert all(is_sealed(entry.digest) for entry in manifest.entries)
    handed = digests([[*r.handles.values(), *r.sinks.values()] for r in manifest.subtasks])
    assert handed
    assert all(map(is_sealed, handed))
    for pid in [os.getpid(), *fake_spark.pids]:
        assert KEY not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert KEY not in Path(f"/proc/{pid}/environ").read_bytes()
    open_gate(tmp_path)
    assert job.await_termination(40)
    assert_running_counts(tmp_path / "out", ROWS, keys=KEYS)
    assert KEY not in everything_below(tmp_path)


@pytest.mark.parametrize(
    ("keys", "message"),
    [((), r"sealed with key '\w{8}', and no key was given"), ((NEW_KEY,), r"sealed with key .*; the key given is")],
)
def test_without_its_key_a_sealed_job_is_refused(
    start: Callable[..., Job], tmp_path: Path, keys: tuple[bytes, ...], message: str
) -> None:
    job = start(flow_of(tmp_path), key_file=key_file(tmp_path, KEY))
    some_checkpoints(job)
    job.stop()
    before = everything_below(tmp_path / "chk")
    settings = {"key_file": key_file(tmp_path, *keys)} if keys else {}
    with pytest.raises(StorageError, match=message):
        start(flow_of(tmp_path), **settings)
    assert everything_below(tmp_path / "chk") == before


def test_a_key_is_turned_on_by_one_start_and_then_everything_is_sealed(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    first = start(flow_of(tmp_path, rate=4_000))
    some_checkpoints(first)
    first.stop()
    file = key_file(tmp_path, KEY)
    with pytest.raises(StorageError, match=r"not sealed with the job's key.*accept_unsealed=True"):
        start(flow_of(tmp_path), key_file=file)
    second = start(flow_of(tmp_path, rate=4_000), key_file=file, accept_unsealed=True)
    some_checkpoints(second)
    second.stop()
    assert all(is_sealed(entry.digest) for entry in newest(tmp_path, KEY).entries)
    third = start(flow_of(tmp_path), key_file=file)
    some_checkpoints(third, 1)
    open_gate(tmp_path)
    assert third.await_termination(40)
    assert_running_counts(tmp_path / "out", ROWS, keys=KEYS)


def test_a_key_is_turned_on_for_a_job_that_reads_a_dataframe(
    start: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = pa.schema({"value": pa.int64()})

    def stage(_: object, folder: Path) -> None:
        """In Spark's place."""
        folder.mkdir()
        pq.write_table(pa.table({"value": range(ROWS)}, schema), folder / "part-0.parquet")

    monkeypatch.setattr(spark_source, "write_parquet", stage)

    def flow(rate: float | None) -> cw.Dataflow:
        frame = spark_source.DataFrameSource(None, rate=rate)  # type: ignore[arg-type]
        frame.schema = schema
        return counting("first", frame, tmp_path / "out", keys=KEYS, roll_rows=500)

    first = start(flow(1_000))
    some_checkpoints(first)
    first.stop()
    file = key_file(tmp_path, KEY)
    with pytest.raises(StorageError, match=r"not sealed with the job's key.*accept_unsealed=True"):
        start(flow(1_000), key_file=file)
    second = start(flow(1_000), key_file=file, accept_unsealed=True)
    some_checkpoints(second)
    second.stop()
    told = digests(
        [[split.data for split in record.splits["in"]] for record in newest(tmp_path, KEY).subtasks if record.splits]
    )
    assert [digest[:7] for digest in told] == ["sha256:"], "a digest that the first start made would do for a forger"
    third = start(flow(None), key_file=file)
    assert third.await_termination(40)
    assert_running_counts(tmp_path / "out", ROWS, keys=KEYS)
    assert all(not report.problems for report in verify_inputs(LocalStore(tmp_path / "chk", Seal([KEY])), "first"))


def test_a_new_key_seals_while_the_old_one_is_read_and_can_then_go(start: Callable[..., Job], tmp_path: Path) -> None:
    first = start(flow_of(tmp_path, rate=4_000), key_file=key_file(tmp_path, KEY))
    some_checkpoints(first)
    first.stop()
    second = start(flow_of(tmp_path, rate=4_000), key_file=key_file(tmp_path, NEW_KEY, KEY))
    some_checkpoints(second)
    second.stop()
    assert all(Seal([NEW_KEY]).is_current(entry.digest) for entry in newest(tmp_path, NEW_KEY).entries)
    third = start(flow_of(tmp_path), key_file=key_file(tmp_path, NEW_KEY))
    open_gate(tmp_path)
    assert third.await_termination(40)
    assert_running_counts(tmp_path / "out", ROWS, keys=KEYS)


def test_a_sealed_savepoint_is_restored_with_the_key_only(start: Callable[..., Job], tmp_path: Path) -> None:
    file = key_file(tmp_path, KEY)
    job = start(flow_of(tmp_path), key_file=file)
    some_checkpoints(job)
    savepoint = job.stop(str(tmp_path / "savepoints"))
    assert savepoint is not None
    with pytest.raises(StorageError, match="no key was given"):
        open_snapshot(savepoint)
    assert open_snapshot(savepoint, Seal([KEY])).manifest.format_version == 2
    open_gate(tmp_path)
    flow = counting("second", gated(tmp_path, ROWS), tmp_path / "second", keys=KEYS)
    second = start(flow, checkpoint=tmp_path / "other", restore=savepoint, key_file=file)
    assert second.await_termination(40)
    (low,) = query("select min(n) from {second}", second=tmp_path / "second")[0]
    assert low > 1, "the counts began anew"


def test_a_request_to_a_sealed_job_needs_the_key_and_cannot_be_brought_again(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    job = start(flow_of(tmp_path), key_file=key_file(tmp_path, KEY))
    some_checkpoints(job, 1)
    stranger = send(LocalStore(tmp_path / "chk"), "first", "cancel")
    assert stranger is not None
    assert not stranger.ok
    assert "sealed" in stranger.detail
    assert job.is_active
    store = LocalStore(tmp_path / "chk", Seal([KEY]))
    caught: dict[str, bytes] = {}
    real = store.delete

    def delete(path: str) -> None:
        caught[path] = bytes(store.read(path))
        real(path)

    store.delete = delete  # type: ignore[method-assign]
    known = send(store, "first", "savepoint", savepoint=str(tmp_path / "savepoints"))
    assert known is not None
    assert known.ok
    (request,) = [data for path, data in caught.items() if path.endswith("-request.json")]
    assert LocalStore(tmp_path / "chk").create("first/control/0123-request.json", request)
    done = tmp_path / "chk/first/control/0123-done.json"
    wait_until(done.exists, "the answer", job=job)
    assert b'"ok":false' in done.read_bytes()
    assert len(list((tmp_path / "savepoints").iterdir())) == 1
    job.cancel()
