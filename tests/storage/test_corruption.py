"""Damage of every kind at every place of a small checkpoint: found before use, named, answered by the previous one."""

from __future__ import annotations

import itertools

import pytest
from storage_world import JOB, expected_values, manifest_of, restored_values, take_checkpoint, write_shared

from cutwater.errors import CorruptSnapshotError, FormatVersionError, StorageError
from cutwater.storage.job_log import JobLog
from cutwater.storage.log_entries import attached_to
from cutwater.storage.reading import choose, verify_checkpoint
from cutwater.storage.snapshot.publish import publish
from cutwater.storage.snapshot.segment_files import load_manifest, read_segment
from damage import flipped, truncated
from memory_store import Fault, MemoryStore


@pytest.fixture(scope="module", params=["manifests in the log", "large manifests"])
def healthy(request):
    store = MemoryStore()
    log = JobLog(store, JOB)
    log.begin_attempt("driver")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "large manifests":
            patch.setattr("cutwater.storage.snapshot.publish.ATTACHED_BYTES", 0)
        for checkpoint_id in (1, 2):
            take_checkpoint(store, log, checkpoint_id)
    assert (f"{JOB}/chk-2/manifest-1.json" in store.files) == (request.param == "large manifests")
    return dict(store.files)


def damaged(files, **changes):
    store = MemoryStore()
    store.files = {**files, **changes.pop("to", {})}
    for path in changes.pop("without", ()):
        del store.files[path]
    return store


def outcome(store, path):
    """ "refused", "told" or "previous" when damage to ``path`` was noticed in the right way; "unnoticed" otherwise."""
    log = JobLog(store, JOB)
    try:
        state = log.read()
    except CorruptSnapshotError as error:
        return "refused" if path in str(error) else f"refused without naming {path}: {error}"
    found = choose(store, JOB, state)
    if found.completed.checkpoint_id == 2:
        assert restored_values(store, found) == expected_values(2)
        return "told" if any(path in problem for problem in log.damaged.values()) else "unnoticed"
    (report,) = found.passed_over
    assert report.problems[0].file == path
    assert path.rpartition("/")[2] in found.warnings[0]
    assert "instead" in found.warnings[0]
    assert restored_values(store, found) == expected_values(1)
    return "previous"


def entry_bytes(files, path):
    """How long the entry in a file of the log is; behind it lies a manifest, or nothing."""
    return len(files[path]) - len(attached_to(files[path])) if "/log/" in path else 0


def of_older(files, path, at):
    """This byte is of the manifest of an older checkpoint, which nobody reads."""
    return 0 < entry_bytes(files, path) <= at and path != newest_entry(files)


def wanted(files, path, at):
    """What damage at this byte leads to: who owns the job is said by the newest entry, of older ones it is told."""
    if at >= entry_bytes(files, path):
        return "previous"
    return "refused" if path == newest_entry(files) else "told"


def of_newest(files):
    """Files that a restore of the newest checkpoint depends on."""
    return [path for path in files if "/log/" in path or "/chk-2/" in path]


def newest_entry(files):
    return max(path for path in files if "/log/" in path)


def test_undamaged_it_is_the_newest(healthy):
    assert outcome(damaged(healthy), "") == "unnoticed"
    assert {p.rpartition("/")[2][-5:] for p in of_newest(healthy)} == {".json", ".data"}


def test_every_flipped_byte_is_found(healthy):
    mutations = 0
    for path in of_newest(healthy):
        for i, other in enumerate(flipped(healthy[path])):
            if of_older(healthy, path, i):
                continue
            assert outcome(damaged(healthy, to={path: other}), path) == wanted(healthy, path, i), (path, i)
            mutations += 1
    assert mutations > 5_000


def test_every_truncation_is_found(healthy):
    mutations = 0
    for path in of_newest(healthy):
        for other in truncated(healthy[path]):
            at = len(other)
            if of_older(healthy, path, at):
                continue
            assert outcome(damaged(healthy, to={path: other}), path) == wanted(healthy, path, at), (path, at)
            mutations += 1
    assert mutations > 5_000


def test_appended_bytes_are_found_or_never_read(healthy):
    for path in of_newest(healthy):
        result = outcome(damaged(healthy, to={path: healthy[path] + b"\n"}), path)
        if path.endswith(".data"):
            expected = "unnoticed"
        elif "/log/" in path and not attached_to(healthy[path]):
            expected = "refused" if path == newest_entry(healthy) else "told"
        else:
            expected = "previous" if path == newest_entry(healthy) or "/chk-2/" in path else "unnoticed"
        assert result == expected, path


def test_every_missing_file_is_found(healthy):
    for path in of_newest(healthy):
        if path != newest_entry(healthy):
            assert outcome(damaged(healthy, without=[path]), path) == wanted(healthy, path, 0), path


def test_loss_of_the_newest_log_entry_is_as_if_it_was_never_published(healthy):
    store = damaged(healthy, without=[newest_entry(healthy)])
    found = choose(store, JOB, JobLog(store, JOB).read())
    assert restored_values(store, found) == expected_values(1)


def test_every_pair_of_swapped_files_is_found(healthy):
    for one, two in itertools.combinations(of_newest(healthy), 2):
        store = damaged(healthy, to={one: healthy[two], two: healthy[one]})
        log = JobLog(store, JOB)
        if newest_entry(healthy) in (one, two):
            with pytest.raises(CorruptSnapshotError):
                log.read()
            continue
        state, newest_hit = log.read(), any("/chk-2/" in p for p in (one, two))
        assert len(log.damaged) == sum("/log/" in p for p in (one, two))
        if newest_hit and any(attached_to(healthy[p]) for p in (one, two) if "/log/" in p):  # of checkpoint 1
            with pytest.raises(CorruptSnapshotError, match="no completed checkpoint"):
                choose(store, JOB, state)
            continue
        assert choose(store, JOB, state).completed.checkpoint_id == (1 if newest_hit else 2), (one, two)


def test_every_stale_file_is_found(healthy):
    for path in of_newest(healthy):
        older = path.replace("chk-2", "chk-1")
        if older != path:
            assert outcome(damaged(healthy, to={path: healthy[older]}), path) == "previous"


class TestFilesOfSeveralCheckpoints:
    """Checkpoint 3 is what changed since 2, whose file it names; 1 stands alone."""

    @pytest.fixture(scope="class")
    def chained(self):
        store = MemoryStore()
        log = JobLog(store, JOB)
        log.begin_attempt("driver")
        entries = []
        for checkpoint_id in (1, 2, 3):
            entries = write_shared(store, checkpoint_id, log.attempt, entries if checkpoint_id == 3 else [])
            publish(store, log, manifest_of(log, checkpoint_id, entries))
        return dict(store.files)

    FALL_BACK = {"shared/3-1-0.data": 2, "shared/2-1-0.data": 1}
    VALUES = {1: [1000], 2: [2000], 3: [2000, 3000]}
    """Of each checkpoint, the first value of each file; 40 follow each other."""

    def outcome(self, files, path):
        """Id of the checkpoint that is restored in place of 3, after checks that it is whole, and 3 named."""
        store = damaged(files)
        found = choose(store, JOB, JobLog(store, JOB).read())
        restored = found.completed.checkpoint_id
        values = [value + i for value in self.VALUES[restored] for i in range(40)]
        assert restored_values(store, found) == values
        assert [r.checkpoint_id for r in found.passed_over] == list(range(3, restored, -1))
        assert all(r.problems[0].file == path for r in found.passed_over)
        return restored

    def test_undamaged_it_is_the_newest(self, chained):
        assert self.outcome(chained, "") == 3
        assert {f"{JOB}/{path}" for path in self.FALL_BACK} <= set(chained)

    def test_every_flipped_byte_and_truncation_is_found(self, chained):
        mutations = 0
        for path, expected in self.FALL_BACK.items():
            path = f"{JOB}/{path}"
            for other in itertools.chain(flipped(chained[path]), truncated(chained[path])):
                assert self.outcome({**chained, path: other}, path) == expected, path
                mutations += 1
        assert mutations > 2_000

    def test_a_manifest_of_another_checkpoint_behind_the_entry_is_found(self, chained):
        path, others = newest_entry(chained), {attached_to(data) for file, data in chained.items() if "/log/" in file}
        entry = chained[path][: entry_bytes(chained, path)]
        for other in others - {attached_to(chained[path])}:
            assert self.outcome({**chained, path: entry + other}, path) == 2
        assert len(others) == 4  # of three checkpoints, and nothing

    def test_every_missing_or_stale_or_exchanged_file_is_found(self, chained):
        for (path, expected), other in itertools.product(self.FALL_BACK.items(), chained):
            if chained[other] != chained[f"{JOB}/{path}"]:
                files = {**chained, f"{JOB}/{path}": chained[other]}
                assert self.outcome(files, f"{JOB}/{path}") == expected, (path, other)
        for path, expected in self.FALL_BACK.items():
            files = {p: data for p, data in chained.items() if p != f"{JOB}/{path}"}
            assert self.outcome(files, f"{JOB}/{path}") == expected, path


def test_a_log_entry_of_another_job_is_found(healthy):
    other = MemoryStore()
    log = JobLog(other, JOB)
    log.begin_attempt("another")
    for checkpoint_id in (1, 2):
        take_checkpoint(other, log, checkpoint_id)
    paths = sorted(path for path in healthy if "/log/" in path)
    for path in paths[-2:]:  # which of the two is the stranger?
        with pytest.raises(CorruptSnapshotError, match="does not follow"):
            JobLog(damaged(healthy, to={path: other.files[path]}), JOB).read()
    for path in paths[:-2]:
        log = JobLog(damaged(healthy, to={path: other.files[path]}), JOB)
        assert choose(log._store, JOB, log.read()).completed.checkpoint_id == 2
        assert any("does not follow" in problem and path in problem for problem in log.damaged.values())
    strangers = {path: other.files[path] for path in paths[:-1]}
    with pytest.raises(CorruptSnapshotError):
        JobLog(damaged(healthy, to=strangers), JOB).read()
    with pytest.raises(CorruptSnapshotError, match="of another job"):  # and the one that would tell is gone
        JobLog(damaged(healthy, to={p: strangers[p] for p in paths[:-2]}, without=[paths[-2]]), JOB).read()


def test_damage_to_an_older_checkpoint_does_not_matter_but_is_reported_by_verify(healthy):
    (path,) = [p for p in healthy if p.endswith("chk-1/1-0.data")]
    store = damaged(healthy, to={path: healthy[path][:-1]})
    state = JobLog(store, JOB).read()
    assert choose(store, JOB, state).completed.checkpoint_id == 2
    report = verify_checkpoint(store, JOB, state.completed[1])
    assert [p.file for p in report.problems] == [path]


def test_no_usable_checkpoint_is_an_error_and_never_a_fresh_start(healthy):
    paths = [p for p in healthy if p.endswith(".data")]
    store = damaged(healthy, to=dict.fromkeys(paths, b""))
    with pytest.raises(CorruptSnapshotError, match=r"no completed checkpoint .* is usable: checkpoint 2.*checkpoint 1"):
        choose(store, JOB, JobLog(store, JOB).read())


def test_without_verify_only_the_manifest_is_read_and_segments_are_verified_when_used(healthy):
    (path,) = [p for p in healthy if p.endswith("chk-2/1-0.data")]
    store = damaged(healthy, to={path: healthy[path][:-8] + b"12345678"})
    found = choose(store, JOB, JobLog(store, JOB).read(), verify=False)
    assert found.completed.checkpoint_id == 2
    bad = [e for e in found.manifest.entries if e.file.endswith("1-0.data")]
    with pytest.raises(CorruptSnapshotError, match=r"chk-2/1-0.data at offset 0 is damaged: expected digest"):
        read_segment(store, JOB, bad[0])


def test_a_report_counts_what_was_read(healthy):
    store = damaged(healthy)
    completed = JobLog(store, JOB).read().completed[0]
    whole = verify_checkpoint(store, JOB, completed)
    (path, *_) = held = {e.file for e in whole.manifest.entries if e.file}
    assert (whole.files, whole.segments) == (1 + len(held), len(whole.manifest.entries))
    alone = verify_checkpoint(store, JOB, completed, data=False)
    assert (alone.files, alone.bytes, alone.segments, alone.ok) == (1, 0, 0, True)
    rest = verify_checkpoint(store, JOB, completed, {path})
    passed_over = [e.length for e in whole.manifest.entries if e.file == path]
    assert (rest.files, rest.bytes) == (whole.files - 1, whole.bytes - sum(passed_over))


def test_a_store_that_cannot_be_read_now_is_not_taken_for_damage(healthy):
    store = damaged(healthy)
    state = JobLog(store, JOB).read()
    store._faults, store._counts = [Fault(1, "error", "read", ".data")], [0]
    with pytest.raises(StorageError, match="injected") as caught:
        choose(store, JOB, state)
    assert not isinstance(caught.value, CorruptSnapshotError)


def test_a_newer_format_is_refused_with_its_version(healthy):
    import msgspec
    import xxhash

    store = damaged(healthy)
    state = JobLog(store, JOB).read()
    newest = state.completed[0]
    path = f"{JOB}/{newest.path}"
    entry = store.files[path][: entry_bytes(store.files, path)]
    raw = msgspec.json.decode(store.files[path][len(entry) :])
    raw["format_version"] = 9
    changed = msgspec.json.encode(raw)
    store.files[path] = entry + changed
    digest = xxhash.xxh3_128_hexdigest(changed)
    with pytest.raises(FormatVersionError, match="format version 9, this release knows 1"):
        load_manifest(store, JOB, msgspec.structs.replace(newest, digest=digest))
