"""Running aggregates: for every row, the aggregates of its key so far."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from cutwater.errors import BuildError
from cutwater.operators.aggregate.accumulators import Aggregate
from cutwater.operators.aggregate.evolution import aggregate_parts, evolve_aggregates
from cutwater.operators.base import KeyedSpec, Operator, check_names
from cutwater.operators.evolution import Evolution, Former
from cutwater.state.keys import check_key_types
from cutwater.storage.snapshot.manifest import Shape, TableRecord


@dataclass(frozen=True)
class RunningAggregateSpec(KeyedSpec):
    """One output row per input row: the key columns, the event time if there is one, and the aggregates up to this row.

    Args:
        aggregates: what to compute.
        event_time: event-time column to pass on.

    Raises:
        BuildError: a column is missing, a type does not fit, or two output columns have the same name.

    >>> rows = pa.schema([("user", pa.string()), ("clicks", pa.int32())])
    >>> spec = RunningAggregateSpec(rows, ("user",), (Aggregate("total", "sum", "clicks"),), None)
    >>> spec.outputs[0].names
    ['user', 'total']
    """

    repeatable = True

    aggregates: tuple[Aggregate, ...]
    event_time: str | None = None

    def __post_init__(self) -> None:
        check_key_types(self.input_schema, self.keys)
        if self.event_time is not None and self.input_schema.get_field_index(self.event_time) < 0:
            raise BuildError(f"no such event-time column {self.event_time!r}")
        if not self.aggregates:
            raise BuildError("no aggregate given", hint="Name at least one, for example n=cw.count().")
        for names in (self.outputs[0].names, self.state_schema.names):
            check_names(names, "Give the aggregate another name.")

    @property
    def passed_columns(self) -> tuple[str, ...]:
        """Input columns that come out as they are."""
        event_time = self.event_time
        return self.keys if event_time is None or event_time in self.keys else (*self.keys, event_time)

    @property
    def keeps_every_row(self) -> bool:
        return True

    @property
    def columns_read(self) -> frozenset[str] | None:
        return read_by(self.aggregates, self.passed_columns)

    @property
    def outputs(self) -> tuple[pa.Schema, ...]:
        passed = [self.input_schema.field(name) for name in self.passed_columns]
        results = [pa.field(a.name, a.result_type(self.input_schema)) for a in self.aggregates]
        return (pa.schema([*passed, *results]),)

    @property
    def state_schema(self) -> pa.Schema:
        return pa.schema([*self.key_fields, *(f for a in self.aggregates for f in a.state_fields(self.input_schema))])

    @property
    def state_parts(self) -> dict[str, str]:
        return aggregate_parts(self.aggregates, self.input_schema)

    @property
    def state_tables(self) -> tuple[TableRecord, ...]:
        return (TableRecord("agg", "aggregates", Shape.AGGREGATES),)

    @property
    def settings(self) -> dict[str, str]:
        return {"aggregates": ", ".join(f"{a.name}={a}" for a in self.aggregates)}

    def evolve(self, former: Former, renames: Mapping[tuple[str, ...], str], *, drop: bool) -> Evolution:
        return evolve_aggregates(former, self.state_schema, self.aggregates, self.input_schema, renames)

    def explanation(self) -> Iterator[str]:
        yield ", ".join(f"{a.name} = {a}" for a in self.aggregates)

    def build(self) -> Operator:
        from cutwater.operators.aggregate.keyed_operator import RunningAggregate  # Numba: only where rows flow

        return RunningAggregate(self)


def read_by(aggregates: Sequence[Aggregate], others: Iterable[str]) -> frozenset[str] | None:
    """Columns that aggregates read, and ``others``; ``None``: all columns."""
    found = frozenset(others)
    for aggregate in aggregates:
        if aggregate.columns_read is None:
            return None
        found |= aggregate.columns_read
    return found
