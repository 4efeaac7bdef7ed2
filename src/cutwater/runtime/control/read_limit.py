"""Reading a split exactly up to a position that another job has reached.

Positions are the connectors' own values.  All that is asked of them is that they grow while a split is read: numbers,
or lists or mappings of numbers that are compared one after the other.  How many rows lie between two of them is only
guessed; a read that went too far is taken back by opening the split again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, cast

import msgspec
import pyarrow as pa

from cutwater.connectors.base import Json, SplitReader
from cutwater.errors import DataError

Numbers: TypeAlias = tuple[float, ...]


class ReadLimit(msgspec.Struct, frozen=True, array_like=True):
    """Limit of reading a split: as far as the leader of a fork has."""

    position: Any
    done: bool
    """To its end."""


class StepLimit(msgspec.Struct, frozen=True):
    """Limit of a read step: as far as that of the leader."""

    splits: dict[str, ReadLimit]
    """By id; of a split that is not there nothing may be read."""
    watermark: int
    """The event time that the leader's step had told to all; the fork's does not go beyond it."""
    announce: bool = False
    """The fork's goes there, too, once everything is read: the leader has written what was due by then."""


Limits: TypeAlias = dict[str, StepLimit]
"""By read step; of one that is not there everything may be read."""


def is_before(position: Json, limit: Json) -> bool:
    """True if a split was read less far at one position than at the other; ``None`` is its beginning.

    Raises:
        DataError: positions without an order.

    >>> is_before(None, 7), is_before({"offset": 9, "line": 2}, {"offset": 9, "line": 2}), is_before([0, 5], [1, 0])
    (True, False, True)
    """
    if limit is None:
        return False
    return position is None or _numbers(position) < _numbers(limit)


def read_up_to(
    reader: SplitReader, limit: Json, max_rows: int, reopen: Callable[[Json], SplitReader]
) -> tuple[SplitReader, pa.RecordBatch | None]:
    """The next rows before ``limit``, and the reader to go on with; its position is ``limit`` once none are left.

    Args:
        reopen: opens the split at a position and forgets what came with the last read (bad rows).

    Raises:
        DataError: positions without an order.
    """
    start = reader.position
    if not is_before(start, limit):
        return reader, None
    rows = max(1, min(max_rows, _most_rows(start, limit, max_rows)))
    while True:
        batch = reader.read(rows)
        if not is_before(limit, reader.position):
            return reader, batch
        reader.close()
        if rows == 1 or batch is None:  # the next row lies behind the limit
            return reopen(limit), None
        reader = reopen(start)
        rows = max(1, min(rows, batch.num_rows) // 2)


def _most_rows(start: Json, limit: Json, any_number: int) -> int:
    """A guess: of a mapping every number counts rows, or more than that; a list counts them with its last one."""
    first, last = _numbers(limit) if start is None else _numbers(start), _numbers(limit)
    if start is None or (isinstance(limit, list | tuple) and first[:-1] != last[:-1]):
        return any_number
    return int(min((b - a for a, b in zip(first, last, strict=True) if b > a), default=1))


def _numbers(position: Json) -> Numbers:
    if isinstance(position, int | float):
        return (position,)
    found = cast("list[object]", list(position.values() if isinstance(position, dict) else position))  # pyright: ignore
    if isinstance(position, list | tuple | dict) and all(isinstance(n, int | float) for n in found):
        return tuple(cast("list[float]", found))
    raise DataError(
        f"the position {position!r} has no order, so that the split cannot be read up to the one of another job",
        hint="Fork the job with follow=False (--no-follow).",
    )
