"""Sliding windows that have not come out: put together from the slices that they share, as the operator will do."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.config import parse_duration_ms
from cutwater.data.words import fixed_view, from_words
from cutwater.state.index.nullable import NullableIndex
from cutwater.state.segments import GROUP_COLUMN
from cutwater.state_reader.layout import WINDOW_START, TableLayout
from cutwater.state_reader.values import stored_aggregates

_SLIDING = re.compile(r"sliding (?P<size>.+?), every (?P<every>.+?), offset (?P<offset>[^,]+)")

Times = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Sliding:
    """How the windows of a step lie: from ``offset_us`` on, one begins every ``every_us``."""

    size_us: int
    every_us: int
    offset_us: int

    def windows_of(self, starts: Times) -> tuple[npt.NDArray[np.int64], Times]:
        """For each window of each slice: the number of the slice, and where the window begins.

        >>> numbers, begins = Sliding(20, 10, 0).windows_of(np.array([5, 30]))
        >>> numbers.tolist(), begins.tolist()
        ([0, 0, 1, 1], [0, -10, 30, 20])
        """
        last = (starts - self.offset_us) // self.every_us * self.every_us + self.offset_us
        counts = np.maximum((self.size_us - 1 - (starts - last)) // self.every_us + 1, 0)
        numbers = np.repeat(np.arange(len(starts)), counts)
        back = np.arange(len(numbers)) - np.repeat(np.cumsum(counts) - counts, counts)
        return numbers, last[numbers] - back * self.every_us


def sliding_of(layout: TableLayout) -> Sliding | None:
    """How the windows lie; ``None`` for others, and where an aggregate is not known here."""
    assert layout.record is not None
    found = _SLIDING.match(layout.record.settings.get("windows", ""))
    if found is None or len(stored_aggregates(layout)) < len(layout.record.parts):
        return None
    return Sliding(*(round(1000 * parse_duration_ms(found[name])) for name in ("size", "every", "offset")))


def open_windows(layout: TableLayout, slices: pa.RecordBatch, watermarks: Times, sliding: Sliding) -> pa.RecordBatch:
    """The windows that will still come out, with what they hold so far, as the columns of ``layout.stored``.

    Args:
        layout: of the windows.
        slices: stored rows of the slices.
        watermarks: by key group: what ends at or before it has come out.
        sliding: how the windows lie.
    """
    numbers, begins = sliding.windows_of(fixed_view(slices.column(WINDOW_START), np.int64))
    groups = slices.column(GROUP_COLUMN).to_numpy()[numbers]
    ahead = begins + (sliding.size_us - 1) > watermarks[groups]
    numbers, begins, groups = numbers[ahead], begins[ahead], groups[ahead]
    assert layout.record is not None
    parts = slices.take(pa.array(numbers))
    keys = [parts.column(name) for name in layout.record.keys]
    kind = layout.stored.field(WINDOW_START).type
    index = NullableIndex([kind, *(key.type for key in keys)], len(numbers))
    slots = index.upsert([from_words(begins, kind), *keys])
    of_slot = np.empty(len(index), np.int64)
    of_slot[slots] = groups
    everything = np.arange(len(index), dtype=np.int32)
    start, *found = index.columns(everything)
    columns = {WINDOW_START: start, **dict(zip(layout.record.keys, found, strict=True))}
    columns[GROUP_COLUMN] = pa.array(of_slot.astype(np.uint16))
    for of in stored_aggregates(layout):
        accumulator = of.aggregate.function.accumulator(of.aggregate, of.column_type(layout.stored))
        accumulator.reserve(len(index))
        accumulator.merge(slots, [parts.column(name) for name in of.stored])
        columns |= zip(of.stored, accumulator.state(everything), strict=True)
    columns["window_fired"] = pa.array(np.zeros(len(index), np.bool_))
    return pa.RecordBatch.from_arrays([columns[name] for name in layout.stored.names], schema=layout.stored)
