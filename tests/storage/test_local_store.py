"""The file system store: durability, damage to the directory, and the messages that say so."""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from storage_world import JOB, manifest_of, segment

from cutwater.errors import ConfigError, CorruptSnapshotError, StorageError
from cutwater.storage.job_log import JobLog
from cutwater.storage.snapshot.publish import publish
from cutwater.storage.snapshot.segment_files import SnapshotWriter
from cutwater.storage.store import local
from cutwater.storage.store.local import TEMP_PREFIX, LocalStore
from cutwater.storage.store.opening import open_store, require_exactly_once


@pytest.fixture
def store(tmp_path):
    return LocalStore.open(tmp_path / "root")


@pytest.fixture
def syncs(monkeypatch):
    """Paths synced so far."""
    seen: list[str] = []
    real = os.fsync

    def fsync(fd):
        seen.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    return seen


def failing(monkeypatch, name, code, *, when=lambda *_: True):
    real = getattr(os, name)

    def fail(*args, **kwargs):
        if when(*args):
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    monkeypatch.setattr(os, name, fail)


def test_create_syncs_content_before_the_name_and_the_folder_after(store, monkeypatch):
    events = []
    real_fsync, real_link = os.fsync, os.link

    def fsync(fd):
        events.append(("sync", Path(os.readlink(f"/proc/self/fd/{fd}")).name))
        real_fsync(fd)

    def link(src, dst, **at):
        events.append(("link", Path(dst).name))
        real_link(src, dst, **at)

    store.create("f/warm", b"")
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", link)
    store.create("f/x", b"1")
    assert [kind for kind, _ in events] == ["sync", "link", "sync"]
    assert events[1] == ("link", "x")
    assert events[2] == ("sync", "f")


def test_a_new_folder_is_synced_into_its_parent_once(store, syncs):
    store.create("f/g/x", b"")
    assert syncs.count(str(store.root)) == 1
    assert syncs.count(str(store.root / "f")) == 1
    store.create("f/g/y", b"")
    assert syncs.count(str(store.root / "f")) == 1


def test_another_process_syncs_a_folder_it_did_not_make(store, syncs):
    store.create("f/x", b"")
    syncs.clear()
    LocalStore(store.root).create("f/y", b"")
    assert str(store.root) in syncs, "the maker of the folder may have died before its sync"


@pytest.mark.parametrize(("attached", "publishing"), [(True, 2), (False, 5)])
def test_a_checkpoint_of_two_workers_costs_few_syncs(store, syncs, monkeypatch, attached, publishing):
    if not attached:
        monkeypatch.setattr("cutwater.storage.snapshot.publish.ATTACHED_BYTES", 0)
    workers = [LocalStore(store.root), LocalStore(store.root)]
    log = JobLog(store, JOB)
    log.begin_attempt("driver")
    for warm in (store, *workers):
        warm.create(f"{JOB}/chk-1/warm-{id(warm)}", b"")
    syncs.clear()
    entries = []
    for number, worker in enumerate(workers):
        writer = SnapshotWriter(worker, JOB, 2, log.attempt, number, 0)
        entries += writer.add("count", number, [segment(2, number, 5), segment(2, number, 6)])
        writer.close()
    publish(store, log, manifest_of(log, 2, entries))
    assert len(syncs) == 2 * 3 + publishing


def test_a_temporary_file_is_never_listed_and_gone_after_a_failed_create(store, monkeypatch):
    seen = []
    real = os.link

    def link(src, dst, **at):
        seen.extend([store.list(), store.names("f")])
        assert len(os.listdir(store.root / "f")) == 1
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(StorageError, match="cannot create f/x"):
        store.create("f/x", b"1")
    monkeypatch.setattr(os, "link", real)
    assert seen == [[], []]
    assert os.listdir(store.root / "f") == []


def test_full_disk_says_so_and_leaves_nothing(store, monkeypatch):
    store.create("f/x", b"1")
    failing(monkeypatch, "writev", errno.ENOSPC)
    with pytest.raises(StorageError, match=r"cannot create f/y: the file system of .* is full\. Free space"):
        store.create("f/y", b"1")
    assert os.listdir(store.root / "f") == ["x"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk_while_writing_a_file(store, monkeypatch):
    real = local.NewFile.__init__

    def on_full_device(self, path, fd, errors):
        real(self, path, fd, errors)
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, self.fileno())
        os.close(full)

    monkeypatch.setattr(local.NewFile, "__init__", on_full_device)
    file = store.write("f/data")
    with pytest.raises(StorageError, match="is full"):
        file.write(b"x" * 2_000_000)
    with pytest.raises(StorageError, match="is full"):
        file.write(b"x")
        store.close_durably(file)


def test_root_deleted_during_the_run(store):
    store.create("f/x", b"1")
    file = store.write("f/open")
    for path in sorted(store.root.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    store.root.rmdir()
    for action in (
        lambda: store.create("f/y", b""),
        lambda: store.write("f/z"),
        lambda: store.read("f/x"),
        lambda: store.names("f"),
        lambda: store.close_durably(file),
    ):
        with pytest.raises(StorageError, match="is gone, it was deleted during the run"):
            action()
    assert not store.root.exists(), "a deleted directory is not made anew silently"


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_a_place_that_cannot_be_written_says_why(store, monkeypatch, code):
    store.create("f/x", b"")
    failing(monkeypatch, "open", code, when=lambda path, flags, *_: bool(flags & os.O_CREAT))
    with pytest.raises(StorageError, match=r"no permission in .*Check owner, mode and mount options"):
        store.create("f/y", b"1")


def test_file_system_without_hard_links_is_refused_for_exactly_once(tmp_path, monkeypatch):
    failing(monkeypatch, "link", errno.EOPNOTSUPP)
    store = LocalStore.open(tmp_path)
    assert not store.atomic_create
    assert os.listdir(tmp_path) == []
    with pytest.raises(ConfigError, match="no atomic create"):
        require_exactly_once(store)
    with pytest.raises(StorageError, match="has no hard links"):
        store.create("x", b"")


def test_a_store_with_atomic_create_is_accepted(store):
    require_exactly_once(store)


def test_lost_answer_to_a_link_that_worked_counts_as_made(store, monkeypatch):
    real = os.link

    def link(src, dst, **at):
        real(src, dst, **at)
        raise FileExistsError(errno.EEXIST, "repeated request")

    monkeypatch.setattr(os, "link", link)
    assert store.create("x", b"mine") is True


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "a\0b"])
def test_paths_out_of_the_root_are_refused(store, path):
    for action in (store.read, store.write, store.delete, lambda p: store.create(p, b"")):
        with pytest.raises(StorageError, match="leads out of"):
            action(path)


def test_delete_does_not_follow_links(store, tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("x")
    store.create("f/x", b"")
    os.symlink(tmp_path / "precious", store.root / "f" / "link")
    store.delete("f")
    assert (tmp_path / "precious" / "file").exists()


def test_sweep_removes_temporary_files_of_dead_processes_only(store):
    code = (
        "import os, sys; from cutwater.storage.store import local\n"
        "s = local.LocalStore(sys.argv[1])\n"
        "def die(*a, **k): os._exit(9)\n"
        "os.link = die; s.create('f/x', b'1')"
    )
    done = subprocess.run([sys.executable, "-c", code, str(store.root)], check=False)
    assert done.returncode == 9
    folder = os.open(store.root / "f", os.O_RDONLY)
    _, living = store._open_new(folder)
    os.close(folder)
    assert len(os.listdir(store.root / "f")) == 2
    assert store.sweep() == 1
    assert os.listdir(store.root / "f") == [living]
    old = store.root / "f" / f"{TEMP_PREFIX}otherhost-1-x"
    old.touch()
    assert store.sweep() == 0
    os.utime(old, (0, 0))
    assert store.sweep() == 1


def test_pickles_as_its_root(store):
    copy = pickle.loads(pickle.dumps(store))
    store.create("x", b"1")
    assert copy.read("x") == b"1"


@pytest.mark.parametrize("make", [str, Path, lambda p: f"file://{p}", lambda p: f"file://localhost{p}"])
def test_open_store_takes_paths_and_file_uris(tmp_path, make):
    store = open_store(make(tmp_path / "a b" / "c"))
    store.create("x", b"1")
    assert (tmp_path / "a b" / "c" / "x").read_bytes() == b"1"


def test_open_store_decodes_uris(tmp_path):
    open_store(f"file://{tmp_path}/a%20b")
    assert (tmp_path / "a b").is_dir()


@pytest.mark.parametrize("uri", ["dbfs:/x", "hdfs://h/x", "file://other/x", ""])
def test_open_store_says_what_there_is(uri):
    with pytest.raises(ConfigError, match=r"path or a file:// URI"):
        open_store(uri)


def test_open_store_on_a_file(tmp_path):
    (tmp_path / "f").write_text("")
    with pytest.raises(ConfigError, match="/f is a file"):
        open_store(tmp_path / "f")
    with pytest.raises(ConfigError, match=r"/f/deeper/still would lie below .*/f, a file. Give a folder"):
        open_store(tmp_path / "f" / "deeper" / "still")


@pytest.mark.skipif(
    not os.path.isdir("/proc/self"), reason="needs a folder in which nobody, root included, can make one"
)
def test_open_store_where_no_folder_can_be_made():
    with pytest.raises(StorageError, match=r"cannot make the checkpoint directory /proc/c: .* write in /proc."):
        open_store("/proc/c")


def test_many_bytes_are_read_whole_from_any_place_and_stay_while_they_are_held(tmp_path: Path) -> None:
    store = LocalStore.open(tmp_path)
    content = np.random.default_rng(3).bytes(5 << 20)
    store.create("f", content)
    first = store.read("f", 1_000, 2 << 20)
    others = [store.read("f", start, 3 << 20) for start in (0, 7, 1 << 20)]
    assert first == content[1_000 : 1_000 + (2 << 20)]
    assert [len(other) for other in others] == [3 << 20] * 3
    assert store.read("f") == content
    with pytest.raises(CorruptSnapshotError, match="too short: 5242880 bytes expected at offset 1, 5242879 there"):
        store.read("f", 1, 5 << 20)
