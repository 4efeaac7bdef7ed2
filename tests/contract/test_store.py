"""The rules that every store keeps, run over all implementations."""

from __future__ import annotations

import pytest

from cutwater.errors import ConfigError
from cutwater.storage.store.opening import open_existing, open_store, store_at
from cutwater.testing import StoreContract
from elsewhere import elsewhere
from memory_store import MemoryStore
from object_world import BUCKET

STORES = {
    "local": lambda path: open_store(path / "root"),
    "memory": lambda path: MemoryStore(),
    "elsewhere": lambda path: open_store(elsewhere(path / "bucket", "some/prefix")),
    "s3": lambda path: open_store(f"s3://{BUCKET}/{path}"),
}
"""A store is one line here."""


class TestStores(StoreContract):
    @pytest.fixture(params=STORES)
    def store(self, request, tmp_path):
        if request.param == "s3":
            request.getfixturevalue("bucket")
        store = STORES[request.param](tmp_path)
        self.opens_again = not isinstance(store, MemoryStore)
        return store


def test_nothing_is_made_where_a_store_is_only_looked_for(tmp_path):
    for uri in (str(tmp_path / "none"), elsewhere(tmp_path / "none")):
        assert not store_at(uri).exists()
        with pytest.raises(ConfigError, match="no folder"):
            open_existing(uri)
    assert list(tmp_path.iterdir()) == []
