"""The door to the state of a subtask: tables, objects and rows, wherever they lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy.typing as npt
import pyarrow as pa

from cutwater.state.disk.rocks import OrderedStore, RocksStore
from cutwater.state.disk.tables import SortedRows
from cutwater.state.key_index import GroupIds
from cutwater.state.objects.memory_records import MemoryRecords
from cutwater.state.objects.records import Records
from cutwater.state.objects.stored_records import StoredRecords
from cutwater.state.objects.table import ObjectLayout, RocksObjects, RocksTable
from cutwater.state.rows.keyed_rows import RowSides, Wakes
from cutwater.state.rows.rows import LiveAt, Rows
from cutwater.state.table.keyed_table import Columns, KeyedTable, Layout
from cutwater.state.table.spill import Room
from cutwater.state.table.timed_table import TimedTable, Timing

V = TypeVar("V", bound=Columns)
T = TypeVar("T")


class Share(Protocol):
    """The part of a step's state that a subtask has."""

    key_groups: range
    """The owned ones."""
    max_parallelism: int
    """Number of all key groups."""
    state_memory_bytes: int | None
    """Memory that the state may take; ``None``: all of it lies there."""


def open_store(memory_bytes: int) -> OrderedStore:
    """The database on the worker's disk."""
    return RocksStore(memory_bytes)


class StateBackend:
    """Makes what a step keeps its state in.  ``close`` it when the step ends.

    Args:
        tables: how many tables share the memory.

    Raises:
        ConfigError: the package of the database is not installed.
        StorageError: the database cannot be opened.
    """

    def __init__(self, share: Share, tables: int = 1) -> None:
        self._share = share
        half_bytes = None if share.state_memory_bytes is None or not tables else share.state_memory_bytes // 2
        self._store = None if half_bytes is None else open_store(half_bytes)
        self._table_bytes = (half_bytes or 0) // max(tables, 1)

    @property
    def in_memory(self) -> bool:
        """True if everything lies in memory."""
        return self._store is None

    def room(self, hashed: int = 0) -> Room | None:
        """The place of rows that do not fit in memory; ``None``: all of them do."""
        return (
            None if self._store is None else Room(self._store, self._share.max_parallelism, self._table_bytes, hashed)
        )

    def table(
        self,
        key_types: Sequence[pa.DataType],
        layout: Layout[V],
        side_columns: Sequence[npt.DTypeLike] = (),
        *,
        hashed: int = 0,
        renumbered: Callable[[GroupIds], object] | None = None,
    ) -> KeyedTable[V]:
        """An empty table by key.

        Args:
            side_columns: types of further columns, which are the caller's.
            hashed: how many index columns lie before those whose hash decides the key group.
            renumbered: called when rows have left, with the group ids that stayed.
        """
        return KeyedTable(key_types, layout, side_columns, self.room(hashed), renumbered)

    def timed_table(
        self,
        key_types: Sequence[pa.DataType],
        layout: Layout[V],
        timing: Timing,
        read: Callable[[KeyedTable[V], GroupIds], T],
        opened: Callable[[int], object] | None = None,
    ) -> TimedTable[V, T]:
        """An empty table by time and key; see there for the arguments."""
        return TimedTable(key_types, layout, timing, read, self._share.key_groups, self.room(1), opened)

    def rows(self, types: RowSides, live: LiveAt, wakes: Wakes) -> Rows:
        """Rows of two sides by key, none yet; see there for the arguments."""
        return Rows(types, live, wakes, self._share.key_groups, self._share.max_parallelism, self.room())

    def sorted_rows(self, schema: pa.Schema) -> SortedRows | None:
        """Sorts what comes out of the state; ``None``: all of it lies in memory, and can be sorted there."""
        return None if self._store is None else SortedRows(self._store, schema)

    def records(self, key_types: Sequence[pa.DataType], layouts: Sequence[ObjectLayout]) -> Records:
        """The Python values of several states by key, none yet; ``layouts`` says of each state what its values are."""
        single = len(key_types) == 1
        if self._store is None:
            return MemoryRecords([layout.copy for layout in layouts], single=single)
        tables = [
            RocksObjects[Any](
                self._store, RocksTable(key_types, layout, self._share.max_parallelism, self._table_bytes)
            )
            for layout in layouts
        ]
        return StoredRecords(tables, single=single)

    def close(self) -> None:
        """Give everything up."""
        if self._store is not None:
            self._store.close()
