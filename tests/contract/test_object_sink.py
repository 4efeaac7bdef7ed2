"""The contract of every sink, for a file sink in a bucket: deaths and sleep at requests; and what is special to it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from bucket_target import KINDS, BucketFiles, files_in_bucket

import cutwater as cw
from cutwater.connectors.files import object_parts
from cutwater.connectors.files.object_parts import ObjectSink
from cutwater.connectors.staging_folders import StoreFolder
from cutwater.errors import ConfigError, StorageError
from cutwater.testing import SinkContract
from cutwater.testing.sink_job import SCHEMA, Identity, SinkJob


class TestInABucket(SinkContract):
    """It hands in again itself what is not committed, as all file sinks do."""

    keeps_handles = False
    seeds = 3

    @pytest.fixture(params=KINDS)
    def make_target(self, request: pytest.FixtureRequest, bucket: str) -> Callable[[Path], BucketFiles]:
        return lambda folder: files_in_bucket(request.param, f"{bucket}/{folder.name}")


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_visible_exactly_once_in_many_jobs(kind: str, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(100, 115):
        with monkeypatch.context() as patch:
            target = files_in_bucket(kind, f"{bucket}/{seed}")
            SinkJob(target, seed, patch, keeps_handles=False).run(100)


def _forgets_parts_of_aborted_checkpoints(patch: pytest.MonkeyPatch) -> None:
    real = object_parts.ObjectPartWriter.pre_commit

    def pre_commit(self: object_parts.ObjectPartWriter, checkpoint_id: int, final: bool) -> object:
        self._pending = []
        return real(self, checkpoint_id, final)

    patch.setattr(object_parts.ObjectPartWriter, "pre_commit", pre_commit)


def _does_not_take_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(object_parts.ObjectPartCommitter, "_take_back", lambda self, checkpoint_id, incarnation: None)


def _puts_parts_where_readers_look(patch: pytest.MonkeyPatch) -> None:
    real = object_parts._ObjectPart._make

    def make(self: object_parts._ObjectPart, name: str) -> object:
        made = real(self, name)
        data = bytes(self._folder.read(name, made.bytes))
        self._folder._store._bucket.put(f"{self._folder._store._prefix}/{name}", data)
        return made

    patch.setattr(object_parts._ObjectPart, "_make", make)


def _stages_nothing_between_parts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(object_parts.StagingLog, "append", lambda self, batch: None)


def _leaves_what_is_staged(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(object_parts.ObjectPartCommitter, "_left_over", lambda self, parts: [])
    patch.setattr(StoreFolder, "remove", lambda self, names: None)


BUGS = {
    _forgets_parts_of_aborted_checkpoints: "parquet, a file per checkpoint",
    _does_not_take_back: "parquet, a file per checkpoint",
    _puts_parts_where_readers_look: "parquet, a file per checkpoint",
    _stages_nothing_between_parts: "parquet, rolled by size",
    _leaves_what_is_staged: "parquet, a file per checkpoint",
}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_found(
    bug: Callable[[pytest.MonkeyPatch], None], bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(20):
        with monkeypatch.context() as patch:
            bug(patch)
            try:
                SinkJob(files_in_bucket(BUGS[bug], f"{bucket}/{seed}"), seed, patch, keeps_handles=False).run(60)
            except (AssertionError, StorageError):
                return
    pytest.fail("not found")


def test_a_bucket_is_named_and_there_before_anything_runs(bucket: str) -> None:
    sink = cw.files(f"{bucket}/out", format="json").as_sink()
    assert isinstance(sink, ObjectSink)
    sink.check(SCHEMA)
    with pytest.raises(StorageError, match="bucket 'no-such-bucket' is not there"):
        cw.files("s3://no-such-bucket/out").as_sink().check(SCHEMA)
    with pytest.raises(ConfigError, match="names a bucket and a prefix"):
        cw.files("s3://key:secret@bucket/out").as_sink()


def test_a_stream_without_rows_leaves_a_dataset_of_none(bucket: str) -> None:
    sink = ObjectSink(f"{bucket}/out")
    sink.check(SCHEMA)
    committer = sink.committer(SCHEMA, "c0ffee", "out")
    committer.settle(None, [], 1)
    sink.writer(SCHEMA, Identity(0, 1, 1), []).close()
    committer.finish(1)
    reader = BucketFiles(sink, f"{bucket}/out")
    (name,) = reader.names()
    assert name.endswith(".parquet")
    assert reader.rows() == []


def test_other_columns_and_many_rows(bucket: str) -> None:
    sink = ObjectSink(f"{bucket}/out", roll_interval_ms="1h")
    old = sink.writer(SCHEMA, Identity(0, 1, 1), [])
    old.write(pa.record_batch({"row": range(70_000), "text": ["x"] * 70_000}, schema=SCHEMA))
    state = json.loads(json.dumps(old.pre_commit(1, False)().state))
    wider = pa.schema([*SCHEMA, pa.field("more", pa.int64())])
    new = sink.writer(wider, Identity(0, 1, 1), [state])
    new.write(pa.record_batch({"row": [70_000], "text": ["y"], "more": [1]}, schema=wider))
    made = new.pre_commit(2, True)()
    sink.committer(wider, "c0ffee", "out").commit(2, made.handles)
    reader = BucketFiles(sink, f"{bucket}/out")
    assert len(reader.names()) == 2
    assert sorted(reader.rows()) == list(range(70_001))
