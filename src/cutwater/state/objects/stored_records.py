"""Records of keys whose values lie in tables on disk: made when a key is looked up, good until the next one is."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Final, Generic, TypeVar

from cutwater.state.objects.records import NOTHING, KeyRecord, Records, StateColumn
from cutwater.state.objects.table import KeyedObjects, RocksObjects

V = TypeVar("V")

_KEYS_AHEAD: Final = 256
"""Keys whose states are asked for at once."""


class StoredRecords(Records):
    """Records of what tables on disk hold, one table for each state."""

    def __init__(self, tables: Sequence[RocksObjects[Any]], *, single: bool) -> None:
        super().__init__(single=single)
        self._tables = tables
        self.columns = [StoredColumn[Any](self, table) for table in tables]

    def find(self, key: Hashable) -> KeyRecord:
        whole, record = self.whole(key), None
        for table in reversed(self._tables):
            record = KeyRecord(table.get(whole), 0, None, record)
        return NOTHING if record is None else record

    def begin(self) -> None:
        """Nothing is to be tidied up."""

    def of(self, keys: Sequence[Hashable]) -> Iterator[KeyRecord | None]:
        return map(self.find, self._read_ahead(iter(keys)))

    def _read_ahead(self, keys: Iterator[Hashable]) -> Iterator[Hashable]:
        """The keys; those of many have been asked for at once before they are given out."""
        while part := list(islice(keys, _KEYS_AHEAD)):
            wanted = [self.whole(key) for key in dict.fromkeys(part)]
            for table in self._tables:
                table.get_many(wanted)
            yield from part


class StoredColumn(StateColumn[V], Generic[V]):
    """One state of ``StoredRecords``.  No record is ever written in its epoch: the table is to hear of each value."""

    epoch = 1

    def __init__(self, records: StoredRecords, table: RocksObjects[V]) -> None:
        self.record = KeyRecord()
        self._records, self._table = records, table

    @property
    def objects(self) -> KeyedObjects[V]:
        return self._table

    def fill(self, keys: Sequence[Hashable], values: Iterable[V]) -> None:
        self._table.put_many(map(self._records.whole, keys), values)

    def claim(self, record: Any, key: Hashable, value: V) -> KeyRecord:
        self._table.put(self._records.whole(key), value)
        return record

    def owned(self, record: Any, key: Hashable) -> V | None:
        record.held = held = self._table.own(self._records.whole(key))
        return held

    def vacate(self, record: Any, key: Hashable) -> None:
        if record.held is not None:
            self._table.remove(self._records.whole(key))
            record.held = None
