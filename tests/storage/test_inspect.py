"""What `inspect` and `verify` say of a snapshot."""

from __future__ import annotations

import json

import pytest
from storage_world import JOB, take_checkpoint

from cutwater.errors import ConfigError
from cutwater.storage.job_log import JobLog
from cutwater.storage.log_entries import JobEnded
from cutwater.ui.inspect import inspect_snapshot, render_inspect, render_verify, verify_snapshot
from memory_store import MemoryStore


@pytest.fixture
def store():
    store = MemoryStore()
    log = JobLog(store, JOB)
    log.begin_attempt("driver")
    for checkpoint_id in (1, 2):
        take_checkpoint(store, log, checkpoint_id)
    return store


def test_inspect_counts_rows_and_bytes_per_step(store):
    info = inspect_snapshot(store, JOB)
    assert json.loads(json.dumps(info)) == info
    assert (info["checkpoint_id"], info["retained"]) == (2, [2, 1])
    assert {s["id"]: (s["rows"], s["states"]) for s in info["steps"]} == {"count": (80, ["agg"]), "small": (2, ["agg"])}
    in_files = sum(len(data) for path, data in store.files.items() if "chk-2" in path and path.endswith(".data"))
    assert info["steps"][0]["bytes"] == in_files
    assert info["bytes"] == sum(s["bytes"] for s in info["steps"])


def test_inspect_shows_positions_and_handles_of_the_checkpoint_asked_for(store):
    info = inspect_snapshot(store, JOB, 1)
    assert info["subtasks"][1]["positions"] == {
        "read": [{"split": "split-1", "position": 10, "max_time": None, "done": False}]
    }
    assert info["subtasks"][1]["handles"] == {"out": [{"staged": "1-1"}]}


def test_inspect_as_text(store):
    text = render_inspect(inspect_snapshot(store, JOB))
    assert text.startswith("checkpoint 2 of delays\n  aligned, attempt 1, parallelism 2 of at most 128\n")
    assert "completed 1970-01-01T00:00:01.010+00:00 after 10 ms" in text
    assert "count  aggregate  2         80" in text
    assert "split-1        20        -            0.1\n" in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_inspect_says_how_the_job_ended(store):
    assert inspect_snapshot(store, JOB)["outcome"] == ""
    assert "the job" not in render_inspect(inspect_snapshot(store, JOB))
    log = JobLog(store, JOB)
    log.begin_attempt("driver")
    log.append(JobEnded(2, "failed", "no space left", 5))
    info = inspect_snapshot(store, JOB)
    assert (info["outcome"], info["reason"]) == ("failed", "no space left")
    assert "  the job failed: no space left\n" in render_inspect(info)


def test_inspect_does_not_read_data(store):
    store.operations.clear()
    inspect_snapshot(store, JOB)
    assert not [path for kind, path in store.operations if kind == "read" and path.endswith(".data")]
    assert {kind for kind, _ in store.operations} == {"read", "names"}, "it changes nothing"


def test_verify_of_a_whole_job(store):
    info = verify_snapshot(store, JOB)
    assert info["ok"]
    assert [c["checkpoint_id"] for c in info["checkpoints"]] == [2, 1]
    assert render_verify(info).startswith("checkpoint 2: ok (3 files, 4 segments, ")


def test_verify_names_the_damaged_file(store):
    path = f"{JOB}/chk-1/1-1.data"
    store.files[path] = store.files[path][:-1] + b"!"
    info = verify_snapshot(store, JOB)
    assert not info["ok"]
    assert json.loads(json.dumps(info)) == info
    text = render_verify(info)
    assert "checkpoint 2: ok" in text
    assert f"checkpoint 1: DAMAGED (3 files, 4 segments, {text.rpartition('segments, ')[2].partition(')')[0]})" in text
    assert f"  {path}: {path} at offset 0 is damaged" in text
    assert verify_snapshot(store, JOB, 2)["ok"]


def test_what_is_not_there_is_answered_with_what_is(store):
    with pytest.raises(ConfigError, match=r"no job 'delay' in .*There are: delays"):
        inspect_snapshot(store, "delay")
    with pytest.raises(ConfigError, match=r"no completed checkpoint 9\. There are: 2, 1"):
        verify_snapshot(store, JOB, 9)
    JobLog(store, "new").begin_attempt("x")
    with pytest.raises(ConfigError, match="completed no checkpoint yet"):
        inspect_snapshot(store, "new")
