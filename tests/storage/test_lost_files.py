"""Files of a job's folder are lost, one or two at random, under a running driver or before a start.

Either the job goes on, and all that it restores is what was written, or it refuses with an error that names a file.
Nothing fails again and again.  The oracle computes what each checkpoint holds without the storage code.
"""

from __future__ import annotations

import itertools
import random
import re

import msgspec
import pytest
from storage_world import JOB, manifest_of, restored_values, segment, take_checkpoint

from cutwater.errors import CorruptSnapshotError, FencedError, StorageError
from cutwater.storage.job_log import JobLog
from cutwater.storage.reading import choose, next_checkpoint_id
from cutwater.storage.snapshot.increments import extended
from cutwater.storage.snapshot.manifest import Entry
from cutwater.storage.snapshot.publish import publish
from cutwater.storage.snapshot.retention import Retention, list_shared, shared_files
from cutwater.storage.snapshot.segment_files import SnapshotWriter, load_manifest
from memory_store import MemoryStore

ROWS = 40
CHAIN = 4


class Driver:
    """One driver of a job whose checkpoints build on each other, as its publisher uses the storage."""

    def __init__(self, store: MemoryStore, name: str) -> None:
        self.store = store
        self.log = JobLog(store, JOB, num_retained=3, keep=4)
        self.log.create()
        self.begin(name)

    def begin(self, name: str) -> None:
        """A new attempt, restored from the newest checkpoint that is usable; as after the loss of a worker."""
        after = self.log.attempt or None
        self.log.begin_attempt(name, after=after)
        found = choose(self.store, JOB, self.log.read())
        self.entries: list[Entry] = list(found.manifest.entries) if found else []
        self.held = list(restored_values(self.store, found)) if found else []
        self.restored = found.completed.checkpoint_id if found else 0
        self.next_id = next_checkpoint_id(self.store, JOB, self.log.state)
        self.retention = Retention(self.store, self.log)

    def checkpoint(self) -> list[str]:
        """One more; returns warnings."""
        checkpoint_id, self.next_id = self.next_id, self.next_id + 1
        older = self.entries if len(self.entries) < CHAIN else []
        writer = SnapshotWriter(self.store, JOB, checkpoint_id, self.log.attempt, 0, 100)
        written = writer.add("count", 0, [segment(checkpoint_id, 0, ROWS)], shared=True)
        writer.close()
        changes = [msgspec.structs.replace(entry, kind="delta") for entry in written]
        entries = extended(older, changes) if older else written
        manifest = manifest_of(self.log, checkpoint_id, entries)
        self.retention.shared.check(manifest)
        self.retention.shared.published(publish(self.store, self.log, manifest), manifest)
        self.entries = entries
        return self.retention.collect()


def expected_values(driver: Driver) -> list[int]:
    """What the newest checkpoint holds: the rows of each checkpoint of its chain."""
    return [e_id * 1000 + i for e_id in chain_of(driver) for i in range(ROWS)]


def chain_of(driver: Driver) -> list[int]:
    return [e.written or int(e.file.split("/")[1].split("-")[0]) for e in driver.entries]


def healthy(large: bool, patch: pytest.MonkeyPatch, checkpoints: int = 6) -> tuple[MemoryStore, Driver]:
    if large:
        patch.setattr("cutwater.storage.snapshot.publish.ATTACHED_BYTES", 0)
    store = MemoryStore()
    driver = Driver(store, "first")
    for _ in range(checkpoints):
        assert driver.checkpoint() == []
    return store, driver


def lose(store: MemoryStore, paths: tuple[str, ...]) -> None:
    for path in paths:
        del store.files[path]


def nothing_needed_is_gone(driver: Driver) -> None:
    """Every readable retained manifest still has its files, but for those that were lost."""
    there = {file for file, _ in list_shared(driver.store, JOB)}
    for completed in driver.log.state.completed:
        try:
            manifest = load_manifest(driver.store, JOB, completed)
        except CorruptSnapshotError:
            continue
        assert shared_files(manifest.entries) <= there | LOST_NOW, completed


LOST_NOW: set[str] = set()
NAMED = re.compile(rf"{JOB}/(log|chk-\d+|shared)/")


def started_or_refused(store: MemoryStore) -> Driver | None:
    """A driver's start after the loss; ``None``: it was refused, and the error names a file."""
    try:
        return Driver(store, "second")
    except CorruptSnapshotError as error:
        if not NAMED.search(str(error)):
            raise
        return None


def lost_of(paths: tuple[str, ...]) -> set[str]:
    return {path.removeprefix(f"{JOB}/") for path in paths}


def every_loss(store: MemoryStore, pairs: int) -> list[tuple[str, ...]]:
    """Each file by itself, and some pairs."""
    files = sorted(store.files)
    both = list(itertools.combinations(files, 2))
    random.Random(1).shuffle(both)
    logs = [pair for pair in itertools.combinations(files, 2) if all("/log/" in path for path in pair)]
    return [(path,) for path in files] + logs + both[:pairs]


@pytest.mark.parametrize("large", [False, True], ids=["manifests in the log", "large manifests"])
def test_under_a_running_driver_the_job_goes_on_or_stops_at_once(large: bool, monkeypatch) -> None:
    """Every later checkpoint is complete; only what the newest one needs, or who owns the job, stops it."""
    origin, _ = healthy(large, monkeypatch)
    went_on = 0
    for paths in every_loss(origin, pairs=120):
        store, driver = healthy(large, monkeypatch)
        LOST_NOW.clear()
        LOST_NOW.update(lost_of(paths))
        newest_entry = max(path for path in store.files if "/log/" in path)
        lose(store, paths)
        if newest_entry in paths:
            for _ in range(2):
                with pytest.raises(FencedError, match=f"{newest_entry}, the newest that attempt 1 knew, is gone"):
                    driver.checkpoint()
            continue
        for _ in range(5):
            driver.checkpoint()
            nothing_needed_is_gone(driver)
        went_on += 1
        driver.begin("first, once more")  # the newest chain began after the loss
        assert driver.held == expected_values(driver)
        driver.checkpoint()
    assert went_on > 50


@pytest.mark.parametrize("large", [False, True], ids=["manifests in the log", "large manifests"])
def test_before_a_start_the_job_goes_on_from_what_is_whole_or_refuses(large: bool, monkeypatch) -> None:
    """No checkpoint after the start fails, and old damage is told, once for each checkpoint."""
    origin, before = healthy(large, monkeypatch)
    newest = before.log.state.newest_id
    outcomes: dict[str, int] = {}
    for paths in every_loss(origin, pairs=120):
        store, _ = healthy(large, monkeypatch)
        LOST_NOW.clear()
        LOST_NOW.update(lost_of(paths))
        lose(store, paths)
        driver = started_or_refused(store)
        if driver is None:
            outcomes["refused"] = outcomes.get("refused", 0) + 1
            continue
        assert driver.held == expected_values(driver)
        outcome = "newest" if driver.restored == newest else "older"
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        warnings: list[str] = []
        for _ in range(5):
            warnings += driver.checkpoint()
            nothing_needed_is_gone(driver)
        named = [w for w in warnings if "cannot be restored any more" in w]
        assert len(named) == len(set(named)) <= 2, warnings
        assert warnings == named
        driver.begin("second, once more")
        assert driver.held == expected_values(driver)
        assert driver.restored == driver.log.state.newest_id > newest - 2
    assert outcomes["newest"] > 40
    assert outcomes["older"] > 5


@pytest.mark.parametrize("anew", [False, True], ids=["the next builds on older ones", "the next begins anew"])
def test_a_missing_manifest_of_an_old_checkpoint_is_told_and_no_new_one_fails(monkeypatch, anew: bool) -> None:
    """Also if the next checkpoint does not look at older ones, and takes its place before anything is collected."""
    monkeypatch.setattr("cutwater.storage.snapshot.publish.ATTACHED_BYTES", 0)
    store, driver = healthy(True, monkeypatch)
    old = driver.log.state.completed[-1]
    store.delete(f"{JOB}/{old.path}")
    kept = {file for file, writer in list_shared(store, JOB) if writer[0] <= old.checkpoint_id}
    assert kept
    driver = Driver(store, "second")
    if anew:
        driver.entries = []
    (warning,) = driver.checkpoint()
    assert warning == (
        f"checkpoint {old.checkpoint_id} cannot be restored any more and no longer counts as retained: "
        f"{JOB}/{old.path} is missing. The job goes on; files that it may need stay until newer ones have replaced it"
    )
    assert old not in driver.log.state.completed  # the newer one took its place
    while old in driver.log.state.completed:
        assert kept <= {file for file, _ in list_shared(store, JOB)}
        assert driver.checkpoint() == []
    for _ in range(CHAIN + 2):
        assert driver.checkpoint() == []
    assert not kept & {file for file, _ in list_shared(store, JOB)}, "what nobody may need any more goes"


def test_a_checkpoint_that_builds_on_nothing_counts_where_older_manifests_cannot_be_read_just_now(
    monkeypatch,
) -> None:
    store, driver = healthy(False, monkeypatch)
    driver = Driver(store, "second")
    reading = store.read

    def read(path: str) -> bytes:
        if path.endswith(driver.log.state.completed[-1].path):
            raise StorageError("the store does not answer")
        return reading(path)

    older, driver.entries = driver.entries, []
    store.read = read  # type: ignore[method-assign]
    driver.retention.shared.check(manifest_of(driver.log, driver.next_id, []))
    with pytest.raises(StorageError, match="does not answer"):
        driver.retention.shared.check(manifest_of(driver.log, driver.next_id, older))


def test_what_an_unreadable_manifest_may_name_stays_while_it_is_retained(monkeypatch) -> None:
    """Files of its own id and below; those above cannot be its."""
    store = MemoryStore()
    log = JobLog(store, JOB, num_retained=2)
    log.begin_attempt("first")
    for n in (1, 2):
        take_checkpoint(store, log, n)
    for n in (1, 2, 3):
        store.files[f"{JOB}/shared/{n}-1-0.data"] = b"named by nobody who can be read"
    path = log.state.completed[1].path  # of checkpoint 1
    store.files[f"{JOB}/{path}"] = store.files[f"{JOB}/{path}"][:-1]
    log = JobLog(store, JOB, num_retained=2)
    log.begin_attempt("second")
    retention = Retention(store, log)
    assert len(retention.collect()) == 1
    assert [file for file, _ in list_shared(store, JOB)] == [
        "shared/1-1-0.data",
        "shared/2-1-0.data",
        "shared/3-1-0.data",
    ]
    take_checkpoint(store, log, 4)  # 1 is retired
    assert retention.collect() == []
    assert [file for file, _ in list_shared(store, JOB)] == []


def test_a_checkpoint_may_build_on_what_an_unreadable_manifest_may_name() -> None:
    store = MemoryStore()
    log = JobLog(store, JOB, num_retained=2)
    log.begin_attempt("first")
    writer = SnapshotWriter(store, JOB, 1, 1, 0, 100)
    base = writer.add("count", 0, [segment(1, 0, ROWS)], shared=True)
    writer.close()
    publish(store, log, manifest_of(log, 1, base))
    path = f"{JOB}/{log.state.completed[0].path}"
    store.files[path] = store.files[path][:-1]
    retention = Retention(store, log)
    assert len(retention.collect()) == 1
    retention.shared.check(manifest_of(log, 2, base))
    store.delete(f"{JOB}/{base[0].file}")
    with pytest.raises(StorageError, match="no retained checkpoint names"):
        retention.shared.check(manifest_of(log, 2, base))
