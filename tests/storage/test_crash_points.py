"""A fault at every single store operation of a checkpoint: what comes after is the previous or the new one, whole."""

from __future__ import annotations

import itertools

import pytest
from storage_world import JOB, expected_values, restored_values, take_checkpoint

from cutwater.errors import StorageError
from cutwater.storage.job_log import JobLog
from cutwater.storage.reading import choose, next_checkpoint_id
from cutwater.storage.snapshot.retention import Retention
from memory_store import Fault, MemoryStore, SimulatedCrash


def prepared():
    """Checkpoints 1 to 4 are completed; the next one retires one and trims the log."""
    store = MemoryStore()
    log = open_log(store)
    log.begin_attempt("first")
    for checkpoint_id in range(1, 5):
        take_checkpoint(store, log, checkpoint_id)
    return store, log


def open_log(store):
    return JobLog(store, JOB, num_retained=2, keep=2)


def run(faults):
    """Checkpoint 5 under faults.  Returns the store, the log and whether the sinks were told to commit 5."""
    store, log = prepared()
    before = len(store.operations)
    store._faults, store._counts = list(faults), [0] * len(faults)
    retention = Retention(store, log)
    committed = False
    failed = None
    try:
        take_checkpoint(store, log, 5)
        committed = True
        retention.collect()
    except (SimulatedCrash, StorageError) as error:
        failed = error
    return store, log, committed, failed, len(store.operations) - before


OPERATIONS = run([])[4]


def restored(store, log):
    """What a restore finds: the id, after a check that all of it belongs to that checkpoint."""
    found = choose(store, JOB, log.state)
    assert found is not None
    assert found.passed_over == (), "a fault is no damage: nothing that counts was ever half there"
    assert restored_values(store, found) == expected_values(found.completed.checkpoint_id)
    return found.completed.checkpoint_id


def test_the_enumeration_covers_writing_publishing_trimming_and_retention():
    store, _, committed, failed, operations = run([])
    assert committed
    assert failed is None
    assert operations > 30
    kinds = {kind for kind, _ in store.operations[-operations:]}
    assert kinds == {"open", "append", "close", "create", "read", "names", "delete"}
    assert "delays/chk-1" in [path for kind, path in store.operations[-operations:] if kind == "delete"]
    assert any(kind == "delete" and "/log/" in path for kind, path in store.operations[-operations:])


@pytest.mark.parametrize("kind", ["crash", "crash_after"])
def test_crash_at_every_operation_leaves_the_previous_or_the_new_checkpoint(kind):
    ids = []
    for nth, keep in itertools.product(range(1, OPERATIONS + 1), (0.0, 0.5, 1.0)):
        store, _, committed, failed, _ = run([Fault(nth, kind)])
        assert isinstance(failed, SimulatedCrash), nth
        durable = store.after_crash(keep=keep)
        successor = open_log(durable)
        assert successor.begin_attempt("second") == 2
        found = restored(durable, successor)
        assert found in (4, 5), nth
        assert found == 5 or not committed, "what sinks committed is restored"
        ids.append(found)
        # The successor goes on, and leaves nothing behind in the end.
        first = next_checkpoint_id(durable, JOB, successor.state)
        assert first > found
        for following in (first, first + 1):
            take_checkpoint(durable, successor, following)
        assert Retention(durable, successor).collect() == []
        assert restored(durable, successor) == first + 1
        assert durable.names(JOB) == [f"chk-{first}", f"chk-{first + 1}", "log"]
    assert set(ids) == {4, 5}
    assert ids == sorted(ids), "before the log entry it is the previous one, from then on the new one"


@pytest.mark.parametrize("kind", ["error", "full", "torn"])
def test_a_failing_store_declines_the_checkpoint_and_the_job_goes_on(kind):
    declined = 0
    for nth in range(1, OPERATIONS + 1):
        store, log, committed, failed, _ = run([Fault(nth, kind)])
        assert not isinstance(failed, SimulatedCrash)
        declined += failed is not None
        if log.in_doubt:
            with pytest.raises(StorageError, match="not known whether the last log entry"):
                take_checkpoint(store, log, 6)
            log.begin_attempt("again")
        elif failed is not None:
            assert not committed
            assert restored(store, log) == 4
        following = next_checkpoint_id(store, JOB, log.read())
        take_checkpoint(store, log, following)
        assert Retention(store, log).collect() == []
        assert restored(store, log) == following
        assert restored(store, open_log_read(store)) == following
        kept = {f"chk-{c.checkpoint_id}" for c in log.state.completed}
        assert set(store.names(JOB)) == {*kept, "log"}, "no partial files are left"
    assert declined > 10


def open_log_read(store):
    log = open_log(store)
    log.read()
    return log


def test_an_entry_that_may_be_durable_ends_the_attempt_and_counts_for_the_next():
    """The log entry is made, but its sync fails: this attempt must not go on as if the checkpoint did not exist."""
    store, log = prepared()
    store._faults, store._counts = [Fault(1, "doubt", "create", "/log/")], [0]
    with pytest.raises(StorageError):
        take_checkpoint(store, log, 5)
    assert log.in_doubt
    assert Retention(store, log).collect() == [], "nothing is deleted while in doubt"
    with pytest.raises(StorageError, match="Begin a new attempt"):
        take_checkpoint(store, log, 6)
    assert log.begin_attempt("again") == 2
    assert restored(store, log) == 5


def test_an_unreadable_answer_to_a_create_is_doubt_too():
    store, log = prepared()
    store._faults = [Fault(1, "error", "create", "/log/"), Fault(1, "error", "read", "/log/")]
    store._counts = [0, 0]
    with pytest.raises(StorageError):
        take_checkpoint(store, log, 5)
    assert log.in_doubt


def test_a_failed_publish_can_be_tried_again_with_the_same_manifest():
    from storage_world import manifest_of, write_parts

    from cutwater.storage.snapshot.publish import publish

    store, log = prepared()
    manifest = manifest_of(log, 5, write_parts(store, 5, log.attempt))
    store._faults, store._counts = [Fault(1, "full", "create", "/log/")], [0]
    with pytest.raises(StorageError):
        publish(store, log, manifest)
    assert not log.in_doubt
    publish(store, log, manifest)
    assert restored(store, log) == 5
