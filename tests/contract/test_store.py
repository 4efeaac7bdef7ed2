"""The rules that every store keeps, run over all implementations."""

from __future__ import annotations

import pickle
import threading

import pytest

from cutwater.errors import ConfigError, CorruptSnapshotError, StorageError
from cutwater.storage.store.opening import another, joined, open_existing, open_store, parted, store_at
from elsewhere import elsewhere
from memory_store import MemoryStore

STORES = {
    "local": lambda path: open_store(path / "root"),
    "memory": lambda path: MemoryStore(),
    "elsewhere": lambda path: open_store(elsewhere(path / "bucket", "some/prefix")),
}
"""A store is one line here."""


@pytest.fixture(params=STORES)
def store(request, tmp_path):
    return STORES[request.param](tmp_path)


def write(store, path, *parts):
    file = store.write(path)
    for part in parts:
        file.write(part)
    store.close_durably(file)


def test_create_makes_a_file_with_folders(store):
    assert store.create("a/b/c.json", b"one") is True
    assert store.read("a/b/c.json") == b"one"


def test_create_leaves_an_existing_file_alone(store):
    store.create("a/x", b"one")
    assert store.create("a/x", b"two") is False
    assert store.read("a/x") == b"one"


def test_of_many_creators_exactly_one_succeeds_and_the_content_is_its(store):
    for round_ in range(20):
        results: dict[int, bool] = {}
        start = threading.Barrier(4)

        def attempt(who, round_=round_, results=results, start=start):
            start.wait()
            results[who] = store.create(f"race/{round_}", str(who).encode() * 1000)

        threads = [threading.Thread(target=attempt, args=(who,)) for who in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (winner,) = [who for who, made in results.items() if made]
        assert store.read(f"race/{round_}") == str(winner).encode() * 1000
    assert store.names("race") == sorted(str(r) for r in range(20)), "temporary files are gone"


def test_create_of_nothing_is_a_file_too(store):
    assert store.create("empty", b"") is True
    assert store.create("empty", b"x") is False
    assert store.read("empty") == b""


def test_overwrite_makes_a_file_and_then_changes_what_is_in_it(store):
    store.overwrite("a/b", b"one")
    assert store.read("a/b") == b"one"
    store.overwrite("a/b", b"two")
    assert store.read("a/b") == b"two"
    assert store.names("a") == ["b"]
    store.delete("a/b")
    store.overwrite("a/b", b"new")
    assert store.read("a/b") == b"new"


def test_written_file_holds_all_parts_in_order(store):
    write(store, "d/data", b"abc", b"", b"x" * 200_000, memoryview(b"end"))
    assert store.read("d/data") == b"abc" + b"x" * 200_000 + b"end"


def test_writing_an_existing_path_is_refused(store):
    store.create("d/data", b"old")
    with pytest.raises(StorageError, match="exists already"):
        store.write("d/data")
    assert store.read("d/data") == b"old"


def test_read_gives_the_range_asked_for(store):
    store.create("f", b"0123456789")
    assert store.read("f", 3) == b"3456789"
    assert store.read("f", 3, 4) == b"3456"
    assert store.read("f", 10) == b""
    assert store.read("f", 4, 0) == b""


@pytest.mark.parametrize(("offset", "length"), [(0, 11), (8, 3), (11, 1)])
def test_read_beyond_the_end_is_a_corrupt_snapshot(store, offset, length):
    store.create("f", b"0123456789")
    with pytest.raises(CorruptSnapshotError, match="f is too short"):
        store.read("f", offset, length)


def test_read_of_a_missing_file_names_it(store):
    with pytest.raises(CorruptSnapshotError, match="no/such is missing"):
        store.read("no/such")


def test_list_is_recursive_sorted_and_below_the_folder_only(store):
    for path in ("b/2", "b/1/z", "a", "bb/3"):
        store.create(path, b"")
    assert store.list() == ["a", "b/1/z", "b/2", "bb/3"]
    assert store.list("b") == ["b/1/z", "b/2"]
    assert store.list("none") == []


def test_names_are_direct_children_files_and_folders(store):
    for path in ("b/2", "b/1/z", "a", "bb/3"):
        store.create(path, b"")
    assert store.names() == ["a", "b", "bb"]
    assert store.names("b") == ["1", "2"]
    assert store.names("none") == []
    assert store.names("a") == store.names("a/b") == store.list("a/b") == [], "a file has nothing below it"


def test_delete_takes_a_file_or_a_folder_and_missing_is_fine(store):
    for path in ("b/2", "b/1/z", "a", "bb/3"):
        store.create(path, b"")
    store.delete("a")
    store.delete("b")
    store.delete("never/there")
    assert store.list() == ["bb/3"]


def test_a_deleted_folder_can_be_written_again(store):
    store.create("c/1", b"x")
    store.delete("c")
    assert store.create("c/1", b"y") is True
    write(store, "c/2", b"z")
    assert store.list("c") == ["c/1", "c/2"]


def test_the_root_is_never_deleted(store):
    store.create("a", b"")
    with pytest.raises(StorageError, match="whole checkpoint directory"):
        store.delete("")
    assert store.list() == ["a"]


def test_deleting_a_file_under_its_writer_does_not_harm_the_writer(store):
    file = store.write("c/data")
    file.write(b"x" * 100_000)
    store.delete("c/data")
    file.write(b"y" * 100_000)
    store.close_durably(file)
    assert store.list("c") == []


def test_a_made_folder_is_there_until_it_is_deleted_whatever_comes_and_goes_in_it(store):
    assert not store.exists("f/g")
    store.make_folder("f/g")
    store.make_folder("f/g")
    assert store.exists("f/g")
    assert (store.list(), store.names("f/g")) == ([], [])
    store.create("f/g/x", b"")
    assert store.delete_empty("f/g") is False
    store.delete("f/g/x")
    assert store.exists("f/g"), "it was made"
    assert store.delete_empty("f/g") is True
    assert store.delete_empty("f/g") is True, "there is none"
    assert not store.exists("f/g")


def test_a_folder_is_there_with_its_first_file_and_a_file_is_no_folder(store):
    store.create("a/b/c", b"")
    assert (store.exists(), store.exists("a"), store.exists("a/b"), store.exists("a/b/c")) == (True, True, True, False)


def test_a_place_in_the_file_system_is_told_or_refused(store):
    try:
        place = store.local_folder("a/b")
    except ConfigError:
        return
    assert parted(place) == (joined(store.uri, "a"), "b")


@pytest.fixture
def opened(store):
    if isinstance(store, MemoryStore):
        pytest.skip("ends with its process, so that nothing opens it")
    return store


def test_its_uri_opens_it_again(opened):
    opened.create("a/b", b"x")
    for again in (open_store(opened.uri), store_at(opened.uri), open_existing(opened.uri), another(opened, opened.uri)):
        assert (again.uri, again.read("a/b")) == (opened.uri, b"x")


def test_a_place_below_it_is_a_store_of_the_same_files(opened):
    opened.create("a/b/c", b"x")
    below = another(opened, joined(opened.uri, "a", "b"))
    assert (below.list(), below.read("c")) == (["c"], b"x")
    assert parted(below.uri) == (joined(opened.uri, "a"), "b")
    assert another(opened, parted(opened.uri)[0]).list(parted(opened.uri)[1])[0].endswith("a/b/c")


def test_a_worker_gets_it_by_pickle(opened):
    opened.create("a", b"x")
    assert pickle.loads(pickle.dumps(opened)).read("a") == b"x"


def test_nothing_is_made_where_a_store_is_only_looked_for(tmp_path):
    for uri in (str(tmp_path / "none"), elsewhere(tmp_path / "none")):
        assert not store_at(uri).exists()
        with pytest.raises(ConfigError, match="no folder"):
            open_existing(uri)
    assert list(tmp_path.iterdir()) == []
