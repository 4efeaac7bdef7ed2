"""From what operators store to what a user means: a mean instead of its sum and count, times instead of numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute

from cutwater.data.time import MAX_WATERMARK, MIN_WATERMARK
from cutwater.data.words import fixed_view, from_words
from cutwater.operators.aggregate.accumulators import Aggregate
from cutwater.operators.ranking.top_spec import ROWS
from cutwater.operators.window.kinds import Period
from cutwater.state.key_index import NullableIndex
from cutwater.state.keys import key_group_owner
from cutwater.state.objects.ttl import stamped_type
from cutwater.state.segments import GROUP_COLUMN
from cutwater.state_reader.layout import SUBTASK, VALUE, WINDOW_START, TableLayout
from cutwater.storage.snapshot.manifest import Shape

_compute: Any = pyarrow.compute

_WINDOW_END = "window_end"
TIME, DOMAIN, RANK = "__time", "__domain", "__rank"
_EVENT, _CLOCK = pa.timestamp("us", "UTC"), pa.timestamp("ms", "UTC")

Times = npt.NDArray[np.int64]
Compute = Callable[[pa.RecordBatch], pa.Array]


@dataclass(frozen=True)
class Column:
    """One column of a table as it is shown, and how it is made from a batch of stored ones."""

    name: str
    type: pa.DataType
    of: Compute


@dataclass(frozen=True)
class StoredAggregate:
    """An aggregate, and the stored columns that hold its state."""

    aggregate: Aggregate
    stored: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.aggregate.name

    @property
    def plain(self) -> bool:
        """True if what is stored (in the first column) is the result."""
        return self.aggregate.function.plain

    def column_type(self, schema: pa.Schema) -> pa.DataType:
        """A type of column whose aggregate is stored so in rows of ``schema``."""
        return self.aggregate.function.column_of([schema.field(name).type for name in self.stored])


def stored_aggregates(layout: TableLayout) -> list[StoredAggregate]:
    """The aggregates of a table, as far as their columns are there."""
    assert layout.record is not None
    found: list[StoredAggregate] = []
    for name, text in layout.record.parts:
        aggregate = Aggregate.parse(name, text)
        if aggregate is None:
            continue  # rows of a top: they are stored as they are meant
        parts = aggregate.function.state(pa.float64())
        stored = tuple(f"{name}.{part}" if part else name for part in parts)
        if f"{name}.order" in layout.stored.names and aggregate.function.by_arrival:
            aggregate, stored = aggregate.mergeable(), (*stored, f"{name}.order")
        if all(part in layout.stored.names for part in stored):
            found.append(StoredAggregate(aggregate, stored))
    return found


def columns_of(layout: TableLayout, max_parallelism: int, *, raw: bool = False) -> list[Column]:
    """Columns that a table shows, for the shapes that have key groups.

    Args:
        raw: the stored columns as they are, and the key group.
    """
    stored = [field for field in layout.stored if not field.name.startswith("__")]
    if raw:
        shown = [_as_stored(field) for field in layout.stored if field.name != GROUP_COLUMN]
    elif layout.shape is Shape.AGGREGATES:
        shown = _aggregates(layout, stored)
    elif layout.shape is Shape.OBJECT:
        shown = [*map(_as_stored, stored), *_user_value(layout.stored.field(VALUE), stored)]
    elif layout.shape is Shape.ELEMENTS:
        shown = [_renamed(layout.stored.field(name), name[2:]) for name in (SUBTASK, "__position")]
        shown += _user_value(layout.stored.field(VALUE), [])
    elif layout.shape is Shape.WATERMARKS:
        shown = _watermark(layout)
    elif layout.shape is Shape.TIMERS:
        shown = [*map(_as_stored, stored), *_timer(stored)]
    elif layout.shape is Shape.TOP:
        shown = _kept_rows(layout)
    else:
        shown = [_renamed(field, field.name.lstrip(".")) for field in stored]
    shown.append(_group(shown))
    if layout.record is not None and layout.shape is not Shape.ELEMENTS:
        shown.append(_owner(shown, layout.record.parallelism, max_parallelism))
    return shown


def free_name(name: str, taken: Iterable[str]) -> str:
    """A name that no column has yet.

    >>> free_name("value", ["k", "value"])
    '_value'
    """
    while name in set(taken):
        name = f"_{name}"
    return name


def _as_stored(field: pa.Field) -> Column:
    return _renamed(field, field.name)


def _renamed(field: pa.Field, name: str) -> Column:
    return Column(name, field.type, lambda batch: batch.column(field.name))


def _group(shown: Sequence[Column]) -> Column:
    name = free_name("key_group", (c.name for c in shown))
    return Column(name, pa.int32(), lambda batch: batch.column(GROUP_COLUMN).cast(pa.int32()))


def _owner(shown: Sequence[Column], parallelism: int, max_parallelism: int) -> Column:
    owners = pa.array([key_group_owner(g, parallelism, max_parallelism) for g in range(max_parallelism)], pa.int32())
    name = free_name("subtask", (c.name for c in shown))
    return Column(name, pa.int32(), lambda batch: owners.take(batch.column(GROUP_COLUMN)))


# ---------------------------------------------------------------------------------------------------- aggregates


def _aggregates(layout: TableLayout, stored: list[pa.Field]) -> list[Column]:
    """Keys and window as stored, its end where it follows from the start, then results."""
    aggregates = stored_aggregates(layout)
    parts = {name: aggregate for aggregate in aggregates for name in aggregate.stored}
    sliced = layout.segments == ("slice",)
    shown: list[Column] = []
    for field in stored:
        aggregate = parts.get(field.name)
        if aggregate is None:
            if field.name == "window_fired" and sliced:
                continue  # a slice does not fire
            if field.name == WINDOW_START and sliced:
                shown.append(_renamed(field, "slice_start"))
                continue
            shown.append(_renamed(field, field.name.lstrip(".")))
            if field.name == WINDOW_START and not sliced and _WINDOW_END not in layout.stored.names:
                shown += _end(layout, field)
        elif field.name == aggregate.stored[0]:
            shown.append(_result(aggregate, layout.stored))
    return shown


def _end(layout: TableLayout, start: pa.Field) -> list[Column]:
    if layout.period is None:
        return []
    size = pa.scalar(layout.period.size_us, pa.duration("us"))
    return [Column(_WINDOW_END, start.type, lambda batch: _compute.add(batch.column(start.name), size))]


def _result(of: StoredAggregate, stored: pa.Schema) -> Column:
    if of.plain:
        return _renamed(stored.field(of.stored[0]), of.name)
    function = of.aggregate.function

    def result(batch: pa.RecordBatch) -> pa.Array:
        return function.results(of.aggregate, [batch.column(name) for name in of.stored])

    return Column(of.name, function.result_type(of.column_type(stored)), result)


# --------------------------------------------------------------------------------------------------- user logic


def _user_value(field: pa.Field, others: Sequence[pa.Field]) -> list[Column]:
    """A value; one with a time to live as two columns."""
    name = free_name("value", (other.name for other in others))
    kind = field.type
    if pa.types.is_struct(kind) and kind.num_fields == 2 and kind == stamped_type(kind.field(0).type):
        expires = free_name("expires", (other.name for other in others))
        return [
            Column(name, kind.field(0).type, lambda batch: _compute.struct_field(batch.column(field.name), 0)),
            Column(expires, _CLOCK, lambda batch: _compute.struct_field(batch.column(field.name), 1).cast(_CLOCK)),
        ]
    return [_renamed(field, name)]


def _watermark(layout: TableLayout) -> list[Column]:
    name = layout.stored.names[1]

    def time(batch: pa.RecordBatch) -> pa.Array:
        raw = batch.column(name)
        none = _compute.is_in(raw, value_set=pa.array([MIN_WATERMARK, MAX_WATERMARK]))
        return _compute.if_else(none, pa.scalar(None, pa.int64()), raw).cast(_EVENT)

    def ended(batch: pa.RecordBatch) -> pa.Array:
        return _compute.equal(batch.column(name), pa.scalar(MAX_WATERMARK))

    return [Column("watermark", _EVENT, time), Column("ended", pa.bool_(), ended)]


def _timer(keys: Sequence[pa.Field]) -> list[Column]:
    taken = [key.name for key in keys]
    return [
        Column(free_name("domain", taken), pa.string(), lambda batch: batch.column(DOMAIN)),
        Column(free_name("time", taken), _EVENT, lambda batch: batch.column(TIME).cast(_EVENT)),
    ]


# -------------------------------------------------------------------------------------------------------- top rows


def _kept_rows(layout: TableLayout) -> list[Column]:
    row = layout.stored.field(ROWS).type.value_type
    fields = [row.field(number) for number in range(row.num_fields)]
    rank = free_name("rank", (field.name for field in fields))
    return [Column(rank, pa.int64(), lambda batch: batch.column(RANK)), *map(_as_stored, fields)]


def exploded(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The rows in the lists of ``top``, each with its rank, instead of a list for each key."""
    lists = batch.column(ROWS)
    parents: Any = _compute.list_parent_indices(lists)
    lengths = _compute.fill_null(_compute.list_value_length(lists), 0).to_numpy()
    first = np.repeat(np.cumsum(lengths) - lengths, lengths)
    rows = _compute.list_flatten(lists)
    ranks = pa.array(np.arange(len(rows)) - first + 1, pa.int64())
    names = [rows.type.field(number).name for number in range(rows.type.num_fields)]
    return pa.RecordBatch.from_arrays(
        [batch.column(GROUP_COLUMN).take(parents), ranks, *rows.flatten()], names=[GROUP_COLUMN, RANK, *names]
    )


# ------------------------------------------------------------------------------------------------- windows of slices


def windows_of(period: Period, starts: Times) -> tuple[npt.NDArray[np.int64], Times]:
    """For each window of each slice: the number of the slice, and the start of the window.

    >>> numbers, begins = windows_of(Period(20, 10, 0), np.array([5, 30]))
    >>> numbers.tolist(), begins.tolist()
    ([0, 0, 1, 1], [0, -10, 30, 20])
    """
    last = (starts - period.offset_us) // period.every_us * period.every_us + period.offset_us
    counts = np.maximum((period.size_us - 1 - (starts - last)) // period.every_us + 1, 0)
    numbers = np.repeat(np.arange(len(starts)), counts)
    back = np.arange(len(numbers)) - np.repeat(np.cumsum(counts) - counts, counts)
    return numbers, last[numbers] - back * period.every_us


def can_be_put_together(layout: TableLayout) -> bool:
    """True if the places of the windows and all their aggregates are known here."""
    assert layout.record is not None
    return layout.period is not None and len(stored_aggregates(layout)) == len(layout.record.parts)


def open_windows(layout: TableLayout, slices: pa.RecordBatch, watermarks: Times) -> pa.RecordBatch:
    """The windows that will still come out, put together from the slices that they share as the operator will do: what
    they hold so far, as the columns of ``layout.stored``.

    Args:
        watermarks: by key group: what ends at or before it has come out.
    """
    assert layout.record is not None
    assert layout.period is not None
    numbers, begins = windows_of(layout.period, fixed_view(slices.column(WINDOW_START), np.int64))
    groups = slices.column(GROUP_COLUMN).to_numpy()[numbers]
    ahead = begins + (layout.period.size_us - 1) > watermarks[groups]
    numbers, begins, groups = numbers[ahead], begins[ahead], groups[ahead]
    parts = slices.take(pa.array(numbers))
    keys = [parts.column(name) for name in layout.record.keys]
    kind = layout.stored.field(WINDOW_START).type
    index = NullableIndex([kind, *(key.type for key in keys)], len(numbers))
    gids = index.upsert([from_words(begins, kind), *keys])
    of_gid = np.empty(len(index), np.int64)
    of_gid[gids] = groups
    everything = np.arange(len(index), dtype=np.int32)
    start, *found = index.columns(everything)
    columns = {WINDOW_START: start, **dict(zip(layout.record.keys, found, strict=True))}
    columns[GROUP_COLUMN] = pa.array(of_gid.astype(np.uint16))
    for of in stored_aggregates(layout):
        accumulator = of.aggregate.function.accumulator(of.aggregate, of.column_type(layout.stored))
        accumulator.reserve(len(index))
        accumulator.merge(gids, [parts.column(name) for name in of.stored])
        columns |= zip(of.stored, accumulator.state(everything), strict=True)
    columns["window_fired"] = pa.array(np.zeros(len(index), np.bool_))
    return pa.RecordBatch.from_arrays([columns[name] for name in layout.stored.names], schema=layout.stored)
