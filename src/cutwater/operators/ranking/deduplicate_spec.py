"""Deduplicate: one row of each key, the first or the latest, for ever or for a stretch of event time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from cutwater.data.changes import OP, marked_schema, row_type
from cutwater.data.time import MAX_SPAN_US
from cutwater.errors import BuildError
from cutwater.operators.aggregate.accumulators import Aggregate
from cutwater.operators.base import KeyedSpec, Operator
from cutwater.state.keys import check_key_types

ROW = ".row"
"""State column: the row kept."""
EXPIRES = ".expires"
"""State column: the event time from which a row of the key is no duplicate."""


@dataclass(frozen=True)
class DeduplicateSpec(KeyedSpec):
    """Output 0: ``keep="first"`` lets the first row of each key through; ``"last"`` is an updating stream (see
    ``changes``) of the latest row.  First and latest are meant in the order in which the rows come.

    With ``within_us`` a row at event time t makes those of its key before t + ``within_us`` duplicates of it; the next
    one is a first row again.  A row behind the watermark is *late*: it goes to output 1 as it is, and counts in
    ``rows_late``.  So what is a duplicate depends on event times only, and a key can be forgotten at
    t + ``within_us``.  Rows of ``keep="first"`` that are dropped count in ``rows_duplicate``.

    Of an updating stream the latest row of a key is that of the last change; a removal takes out the row that is kept,
    whatever else it says.  One of a row that is not there counts in ``rows_unmatched``.

    Args:
        keep: which row of a key.
        updating: the rows are of an updating stream; only with ``keep="last"``, for ever.
        event_time: column of type ``timestamp[us]``; only with ``within_us``.
        within_us: how long a key is remembered, microseconds of event time; ``None``: for ever.

    Raises:
        BuildError: unknown columns, types that do not fit, or a column that is named ``op`` already.

    >>> rows = pa.schema({"id": pa.int64(), "text": pa.string()})
    >>> DeduplicateSpec(rows, ("id",), "last").outputs[0].names
    ['op', 'id', 'text']
    """

    repeatable = True

    keep: Literal["first", "last"] = "first"
    event_time: str | None = None
    within_us: int | None = None
    updating: bool = False

    def __post_init__(self) -> None:
        check_key_types(self.input_schema, self.keys)
        if self.keep not in ("first", "last"):
            raise BuildError(f"keep is 'first' or 'last', not {self.keep!r}")
        if self.within_us is not None:
            self._check_time()
        _ = self.outputs

    def _check_time(self) -> None:
        assert self.within_us is not None
        if not 0 < self.within_us <= MAX_SPAN_US:
            raise BuildError(f"within {self.within_us} us is not between 1 and {MAX_SPAN_US}")
        if self.event_time is None or self.input_schema.get_field_index(self.event_time) < 0:
            raise BuildError(f"no such event-time column {self.event_time!r}")
        kind = self.input_schema.field(self.event_time).type
        if not pa.types.is_timestamp(kind) or kind.unit != "us":
            raise BuildError(f"event-time column {self.event_time!r} is {kind}, not timestamp[us]", hint="Cast it.")

    @property
    def rows(self) -> pa.Schema:
        """Of the rows, without marks."""
        if not self.updating:
            return self.input_schema
        return pa.schema([field for field in self.input_schema if field.name != OP])

    @property
    def outputs(self) -> tuple[pa.Schema, ...]:
        kept = self.input_schema if self.keep == "first" else marked_schema(self.rows)
        return (kept,) if self.within_us is None else (kept, self.input_schema)

    @property
    def held_schema(self) -> pa.Schema:
        """Columns of which the state keeps the latest value by key."""
        fields: list[pa.Field] = []
        if self.within_us is not None:
            fields.append(pa.field(EXPIRES, pa.timestamp("us")))
        if self.keep == "last":
            fields.append(pa.field(ROW, row_type(self.rows)))
        return pa.schema(fields)

    @property
    def held(self) -> tuple[Aggregate, ...]:
        """What the state keeps by key, over rows of ``held_schema``."""
        return tuple(Aggregate(name, "last", name) for name in self.held_schema.names)

    @property
    def settings(self) -> dict[str, str]:
        return {"keep": self.keep, **({"updating": "yes"} if self.updating else {})}

    @property
    def state_schema(self) -> pa.Schema:
        return pa.schema([*self.key_fields, *self.held_schema])

    def build(self) -> Operator:
        from cutwater.operators.ranking import deduplicate_operator as operators  # Numba: only where rows flow

        return operators.LatestOfChanges(self) if self.updating else operators.Deduplicate(self)
