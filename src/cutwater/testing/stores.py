"""The rules that every store keeps."""

from __future__ import annotations

import threading

import pytest

from cutwater.errors import ConfigError, CorruptSnapshotError, StorageError
from cutwater.storage.store.base import Store
from cutwater.storage.store.opening import another, joined, open_existing, open_store, parted, store_at
from cutwater.testing.shipping import shipped


class StoreContract:
    """The tests of a store.  A subclass has the fixture ``store``: a new one, without files."""

    opens_again = True
    """``False`` of one that ends with its process."""

    @pytest.fixture
    def store(self) -> Store:
        """The store."""
        pytest.fail(f"{type(self).__name__} has no fixture 'store'")

    def test_create_makes_a_file_with_folders(self, store: Store) -> None:
        assert store.create("a/b/c.json", b"one") is True
        assert store.read("a/b/c.json") == b"one"

    def test_create_leaves_an_existing_file_alone(self, store: Store) -> None:
        store.create("a/x", b"one")
        assert store.create("a/x", b"two") is False
        assert store.read("a/x") == b"one"

    def test_of_many_creators_exactly_one_succeeds_and_the_content_is_its(self, store: Store) -> None:
        for round_ in range(20):
            results: dict[int, bool] = {}
            start = threading.Barrier(4)

            def attempt(
                who: int, round_: int = round_, results: dict[int, bool] = results, start: threading.Barrier = start
            ) -> None:
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

    def test_create_of_nothing_is_a_file_too(self, store: Store) -> None:
        assert store.create("empty", b"") is True
        assert store.create("empty", b"x") is False
        assert store.read("empty") == b""

    def test_overwrite_makes_a_file_and_then_changes_what_is_in_it(self, store: Store) -> None:
        store.overwrite("a/b", b"one")
        assert store.read("a/b") == b"one"
        store.overwrite("a/b", b"two")
        assert store.read("a/b") == b"two"
        assert store.names("a") == ["b"]
        store.delete("a/b")
        store.overwrite("a/b", b"new")
        assert store.read("a/b") == b"new"

    def test_written_file_holds_all_parts_in_order(self, store: Store) -> None:
        _write(store, "d/data", b"abc", b"", b"x" * 200_000, memoryview(b"end"))
        assert store.read("d/data") == b"abc" + b"x" * 200_000 + b"end"

    def test_writing_an_existing_path_is_refused(self, store: Store) -> None:
        store.create("d/data", b"old")
        with pytest.raises(StorageError, match="exists already"):  # where an upload counts as a whole, at its end
            store.close_durably(store.write("d/data"))
        assert store.read("d/data") == b"old"

    def test_read_gives_the_range_asked_for(self, store: Store) -> None:
        store.create("f", b"0123456789")
        assert store.read("f", 3) == b"3456789"
        assert store.read("f", 3, 4) == b"3456"
        assert store.read("f", 10) == b""
        assert store.read("f", 4, 0) == b""

    @pytest.mark.parametrize(("offset", "length"), [(0, 11), (8, 3), (11, 1)])
    def test_read_beyond_the_end_is_a_corrupt_snapshot(self, store: Store, offset: int, length: int) -> None:
        store.create("f", b"0123456789")
        with pytest.raises(CorruptSnapshotError, match="f is too short"):
            store.read("f", offset, length)

    def test_read_of_a_missing_file_names_it(self, store: Store) -> None:
        with pytest.raises(CorruptSnapshotError, match="no/such is missing"):
            store.read("no/such")

    def test_list_is_recursive_sorted_and_below_the_folder_only(self, store: Store) -> None:
        for path in ("b/2", "b/1/z", "a", "bb/3"):
            store.create(path, b"")
        assert store.list() == ["a", "b/1/z", "b/2", "bb/3"]
        assert store.list("b") == ["b/1/z", "b/2"]
        assert store.list("none") == []

    def test_names_are_direct_children_files_and_folders(self, store: Store) -> None:
        for path in ("b/2", "b/1/z", "a", "bb/3"):
            store.create(path, b"")
        assert store.names() == ["a", "b", "bb"]
        assert store.names("b") == ["1", "2"]
        assert store.names("none") == []
        assert store.names("a") == store.names("a/b") == store.list("a/b") == [], "a file has nothing below it"

    def test_delete_takes_a_file_or_a_folder_and_missing_is_fine(self, store: Store) -> None:
        for path in ("b/2", "b/1/z", "a", "bb/3"):
            store.create(path, b"")
        store.delete("a")
        store.delete("b")
        store.delete("never/there")
        assert store.list() == ["bb/3"]

    def test_a_deleted_folder_can_be_written_again(self, store: Store) -> None:
        store.create("c/1", b"x")
        store.delete("c")
        assert store.create("c/1", b"y") is True
        _write(store, "c/2", b"z")
        assert store.list("c") == ["c/1", "c/2"]

    def test_the_root_is_never_deleted(self, store: Store) -> None:
        store.create("a", b"")
        with pytest.raises(StorageError, match="whole checkpoint directory"):
            store.delete("")
        assert store.list() == ["a"]

    def test_deleting_a_file_under_its_writer_does_not_harm_the_writer(self, store: Store) -> None:
        file = store.write("c/data")
        file.write(b"x" * 100_000)
        store.delete("c/data")
        file.write(b"y" * 100_000)
        store.close_durably(file)
        assert store.list("c") in ([], ["c/data"]), "gone, or not there before its end, and left to the next delete"

    def test_a_made_folder_is_there_until_it_is_deleted_whatever_comes_and_goes_in_it(self, store: Store) -> None:
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

    def test_a_folder_is_there_with_its_first_file_and_a_file_is_no_folder(self, store: Store) -> None:
        store.create("a/b/c", b"")
        assert (store.exists(), store.exists("a"), store.exists("a/b"), store.exists("a/b/c")) == (
            True,
            True,
            True,
            False,
        )

    def test_a_place_in_the_file_system_is_told_or_refused(self, store: Store) -> None:
        try:
            place = store.local_folder("a/b")
        except ConfigError:
            return
        assert parted(place) == (joined(store.uri, "a"), "b")

    def test_its_uri_opens_it_again(self, store: Store) -> None:
        if not self.opens_again:
            return
        store.create("a/b", b"x")
        for again in (open_store(store.uri), store_at(store.uri), open_existing(store.uri), another(store, store.uri)):
            assert (again.uri, again.read("a/b")) == (store.uri, b"x")

    def test_a_place_below_it_is_a_store_of_the_same_files(self, store: Store) -> None:
        if not self.opens_again:
            return
        store.create("a/b/c", b"x")
        below = another(store, joined(store.uri, "a", "b"))
        assert (below.list(), below.read("c")) == (["c"], b"x")
        assert parted(below.uri) == (joined(store.uri, "a"), "b")
        assert another(store, parted(store.uri)[0]).list(parted(store.uri)[1])[0].endswith("a/b/c")

    def test_a_worker_gets_it_by_spark(self, store: Store) -> None:
        if not self.opens_again:
            return
        store.create("a", b"x")
        assert shipped(store).read("a") == b"x"


def _write(store: Store, path: str, *parts: bytes | memoryview) -> None:
    file = store.write(path)
    for part in parts:
        file.write(part)
    store.close_durably(file)
