"""What an operator of windows asks of the table in which their values lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.operators.aggregate.keyed_table import KeyedTable
from cutwater.operators.base import Outputs
from cutwater.state.index.key_index import Slots
from cutwater.state.segments import Segment
from cutwater.state.table.changes import Changed
from cutwater.state.table.keyed_segments import RestoredRows

Times: TypeAlias = npt.NDArray[np.int64]


class MakeSegments(Protocol):
    """Makes the segments of a frozen table: all of them, or those of what changed."""

    def __call__(self, name: str, groups: int, changed: Changed | None = None, /) -> Iterator[Segment]: ...


class Windows(Protocol):
    """Where the values of windows lie: slots, one for each window of a key."""

    table: KeyedTable

    def due(self, watermark: int) -> Slots:
        """What fires now, in the order of time; each window fires once."""
        ...

    def fire_on_disk(self, watermark: int, groups: range) -> Iterator[Outputs] | None:
        """What comes out of what memory does not hold, in portions; ``None``: nothing.

        Call it before ``due``, and take from it when all that was due has come out.

        Args:
            watermark: has risen to this.
            groups: key groups of the subtask.
        """
        ...

    @property
    def next_instant(self) -> int | None:
        """At which watermark windows want to be looked at next: none fires before; ``None``: none is waiting."""
        ...

    def changed(self, passed: Callable[[Slots], Any], most: int) -> Slots:
        """What comes out early, in the order of time: windows that have not fired, with rows that have not come out.

        Args:
            passed: for some slots, whether it is time for them (one answer for all, or a mask).
            most: how many slots at most.
        """
        ...

    def changed_on_disk(self, passed: Callable[..., Any]) -> Iterator[Outputs]:
        """What comes out early of windows that memory does not hold, in portions; goes on where another one stopped.

        Args:
            passed: as above; it is given the slots of a table, and a function that gives their keys.
        """
        ...

    def keys(self, slots: Slots) -> list[pa.Array]:
        """The key columns of some slots."""
        ...

    def times(self, slots: Slots) -> Times:
        """By which they come out, one before the other."""
        ...

    def times_in(self, batch: pa.RecordBatch) -> Times:
        """``times`` of results."""
        ...

    def results(self, slots: Slots) -> Outputs:
        """The results of some slots; what is discarded is gone then."""
        ...

    def forget(self, watermark: int) -> None:
        """Everything that is due has come out: drop windows that take no more rows."""
        ...

    def frozen(self, checkpoint_id: int) -> tuple[KeyedTable, MakeSegments]:
        """The table as it is now, and a function that makes its segments."""
        ...

    @property
    def restored(self) -> RestoredRows:
        """What a restore fills."""
        ...

    def index(self, identity: list[pa.Array]) -> list[pa.Array]:
        """The columns of the table's index, from those by which snapshots tell windows apart."""
        ...

    def restore(self, batch: pa.RecordBatch) -> None:
        """Set rows of the specification's ``state_schema``."""
        ...
