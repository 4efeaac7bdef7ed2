"""Process functions: a user's logic with state and timers, row by row or batch by batch.

One Python call for each row makes the former some 10 to 100 times slower than the built-in steps; use it for what those
cannot say.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.data.rows import Row
from cutwater.data.time import MAX_WATERMARK, MIN_WATERMARK
from cutwater.errors import UserCodeError
from cutwater.operators.process.operator_state import OperatorState
from cutwater.operators.process.states import KeyedState
from cutwater.state.objects.timers import TimerDomain, TimerService


@dataclass(frozen=True)
class GroupedRows:
    """The distinct keys of a batch, and which of them each row has.

    Attributes:
        keys: each key once, as a tuple of the values of the key columns.
        codes: per row, the place of its key in ``keys``.
    """

    keys: list[tuple[Hashable, ...]]
    codes: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.keys)


def group_rows(batch: pa.RecordBatch, keys: Sequence[str]) -> GroupedRows:
    """Group by key columns; null is a key like any other.

    Raises:
        UserCodeError: there is no key.

    >>> grouped = group_rows(pa.record_batch({"k": ["a", "b", "a"], "n": [1, 1, 2]}), ["k"])
    >>> grouped.keys, grouped.codes.tolist()
    ([('a',), ('b',)], [0, 1, 0])
    """
    if not keys:
        raise UserCodeError("rows without key cannot be grouped", hint="Call key_by(...) before process(...).")
    encoded = [batch.column(name).dictionary_encode("encode") for name in keys]
    codes: npt.NDArray[np.int64] = np.zeros(batch.num_rows, np.int64)
    for column in encoded:
        codes = codes * max(len(column.dictionary), 1) + column.indices.to_numpy()
        if len(encoded) > 1:  # compact after each column, so that the product stays small
            _, codes = np.unique(codes, return_inverse=True)
    count = int(codes.max(initial=-1)) + 1
    first = np.empty(count, np.int64)
    first[codes[::-1]] = np.arange(batch.num_rows - 1, -1, -1)
    values = [column.dictionary.take(column.indices.take(pa.array(first))).to_pylist() for column in encoded]
    found = list(zip(*values, strict=True))
    if not any(pa.types.is_floating(batch.column(name).type) for name in keys):
        return GroupedRows(found, codes)
    places: dict[tuple[Hashable, ...], int] = {}
    renumbered = np.array([places.setdefault(key, len(places)) for key in found], np.int64)
    if len(places) == count:
        return GroupedRows(found, codes)
    return GroupedRows(list(places), renumbered[codes])  # 0.0 and -0.0 are one key


Made: TypeAlias = Iterable[Mapping[str, Any]] | None
"""Rows as dicts; a column that is missing is null."""


class ProcessContext:
    """What a process function may ask of the world.

    Attributes:
        key: the current key; a tuple if there are several key columns, ``None`` for rows without key.
        watermark: event time up to which all rows have come, microseconds since the epoch; the lowest number if none.
        timers: sets and deletes timers of the current key.
        step, subtask: where the function runs.
    """

    __slots__ = ("_count", "_emit", "_now_ms", "key", "step", "subtask", "timers", "watermark")

    def __init__(self, step: str, subtask: int, emit: Any, count: Any, now_ms: Any, timers: TimerService) -> None:
        self.key: Any = None
        self.step, self.subtask = step, subtask
        self.watermark = MIN_WATERMARK
        self.timers = timers
        self._emit, self._count, self._now_ms = emit, count, now_ms

    def emit(self, side: str, row: Mapping[str, Any] | pa.RecordBatch) -> None:
        """A row for a side output, or a batch of them.

        Raises:
            UserCodeError: the step has no such side output, or the row is not of its schema.
        """
        self._emit(side, row)

    def count(self, metric: str, amount: int = 1) -> None:
        """Add to a counter of the step that the driver shows."""
        self._count(metric, amount)

    @property
    def at_end(self) -> bool:
        """The bounded input has ended: every event-time timer fires now."""
        return self.watermark == MAX_WATERMARK

    def processing_time_ms(self) -> int:
        """Processing time, milliseconds since the epoch.  It never falls, not even over a restore."""
        return self._now_ms()


class BatchContext(ProcessContext):
    """What a process function of batches may ask of the world; ``key`` is that of ``use``."""

    __slots__ = ("_bind", "_keys")

    def connect(self, keys: Sequence[str], bind: Callable[[tuple[Hashable, ...]], None]) -> BatchContext:
        """Tell it the key columns, and how a key becomes the current one."""
        self._keys, self._bind = keys, bind
        return self

    def group(self, batch: pa.RecordBatch) -> GroupedRows:
        """The distinct keys of the batch, and which of them each row has."""
        return group_rows(batch, self._keys)

    def use(self, key: tuple[Hashable, ...]) -> None:
        """Let ``timers``, and states that are used without naming keys, be about this key (one of ``group``)."""
        self._bind(key)


class StatefulFunction(ABC):
    """What all process functions have: states as class attributes, timers, ``open`` and ``close``.

    The states are in every snapshot; whatever else the object holds is not, so it must not change while rows flow.
    """

    takes: ClassVar[tuple[str, ...]]
    """The methods that take the rows of each input."""

    def open(self, ctx: ProcessContext) -> None:
        """Called once in each subtask, before the first row or timer."""
        return

    def on_timer(self, time: int, domain: TimerDomain, ctx: ProcessContext) -> Made:
        """A timer that ``ctx.timers`` was told to set is due; return or yield rows, as for a row.

        Args:
            time: of the timer: microseconds since the epoch for "event", milliseconds for "processing".
            domain: "event" or "processing".
            ctx: its key is that of the timer.
        """
        raise TypeError(f"{type(self).__name__} has no on_timer")

    def close(self) -> None:
        """Called once in each subtask, also after a failure."""
        return


class ProcessFunction(StatefulFunction):
    """Logic with state: subclass it, declare states as class attributes, write ``process``.

    Keyed states are about the key of the row.

    >>> import cutwater as cw
    >>> class Gaps(cw.ProcessFunction):
    ...     last = cw.ValueState("long")
    ...
    ...     def process(self, row, ctx):
    ...         if self.last.value is not None and row["n"] > self.last.value + 1:
    ...             yield {"sensor": ctx.key, "missing": row["n"] - self.last.value - 1}
    ...         self.last.value = row["n"]
    """

    takes = ("process",)

    @abstractmethod
    def process(self, row: Row, ctx: ProcessContext) -> Made:
        """Take one row; return or yield rows for the main output."""


class BatchProcessFunction(StatefulFunction):
    """Logic with state over whole batches: one call for a few thousand rows, so that columns can be worked on at once.

    The states are read and written for many keys together: ``get_many``, ``put_many``.  Where a batch ends is no matter
    of the data (it adapts to the load): what comes out must not depend on it.

    >>> import cutwater as cw
    >>> import numpy as np, pyarrow as pa
    >>> class Counts(cw.BatchProcessFunction):
    ...     n = cw.ValueState("long")
    ...
    ...     def process_batch(self, batch, ctx):
    ...         groups = ctx.group(batch)
    ...         n = np.array(self.n.get_many(groups.keys, 0)) + np.bincount(groups.codes)
    ...         self.n.put_many(groups.keys, n)
    ...         yield pa.record_batch({"key": [key for (key,) in groups.keys], "n": n})
    """

    takes = ("process_batch",)

    @abstractmethod
    def process_batch(self, batch: pa.RecordBatch, ctx: BatchContext) -> Iterable[pa.RecordBatch] | None:
        """Take a batch; return or yield batches for the main output."""


class CoProcessFunction(StatefulFunction):
    """Logic over the rows of two streams, which share the states: ``left.connect(right).process(...)``.

    Rows of the two sides come in no particular order.

    >>> import cutwater as cw
    >>> class Priced(cw.CoProcessFunction):
    ...     price = cw.ValueState("long")
    ...
    ...     def process_left(self, order, ctx):
    ...         yield {"item": ctx.key, "cents": order["count"] * self.price.get(0)}
    ...
    ...     def process_right(self, price, ctx):
    ...         self.price.value = price["cents"]
    """

    takes = ("process_left", "process_right")

    @abstractmethod
    def process_left(self, row: Row, ctx: ProcessContext) -> Made:
        """Take one row of the left stream."""

    @abstractmethod
    def process_right(self, row: Row, ctx: ProcessContext) -> Made:
        """Take one row of the right stream."""


class BroadcastProcessFunction(StatefulFunction):
    """Logic over a stream and rows that every subtask gets: ``stream.connect(rules.broadcast()).process(...)``.

    Broadcast rows have no key.  They alone may change a ``BroadcastState``, and should do so in a way that does not
    depend on their order, because that may differ from subtask to subtask.

    >>> import cutwater as cw
    >>> class Limited(cw.BroadcastProcessFunction):
    ...     limits = cw.BroadcastState("string", "long")
    ...
    ...     def process(self, row, ctx):
    ...         if row["n"] > self.limits.get(row["kind"], 0):
    ...             yield row
    ...
    ...     def process_broadcast(self, rule, ctx):
    ...         self.limits[rule["kind"]] = rule["limit"]
    """

    takes = ("process", "process_broadcast")

    @abstractmethod
    def process(self, row: Row, ctx: ProcessContext) -> Made:
        """Take one row of the stream."""

    @abstractmethod
    def process_broadcast(self, row: Row, ctx: ProcessContext) -> Made:
        """Take one broadcast row."""


def declared_states(function: StatefulFunction) -> dict[str, KeyedState]:
    """The keyed states that the class of a function declares, by name."""
    return {name: state for name, state in _declared(function).items() if isinstance(state, KeyedState)}


def declared_operator_states(function: StatefulFunction) -> dict[str, OperatorState]:
    """The states without key that the class of a function declares, by name."""
    return {name: state for name, state in _declared(function).items() if isinstance(state, OperatorState)}


def _declared(function: StatefulFunction) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for cls in reversed(type(function).__mro__):
        found.update(vars(cls))
    return found
