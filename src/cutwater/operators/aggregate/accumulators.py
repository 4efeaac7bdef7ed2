"""Aggregates: an ``Aggregate`` is a column to compute, an ``AggregateFunction`` its kind, an ``Accumulator`` its state.

Nulls are skipped, as in SQL; a result is null while no value has been seen (a count is 0).
"""

from __future__ import annotations

import importlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, TypeVar

import pyarrow as pa

from cutwater.errors import BuildError, did_you_mean

if TYPE_CHECKING:
    from cutwater.state.growing_array import GrowingArray, Values
    from cutwater.state.key_index import GroupIds

_HOMES = ["cutwater.operators.aggregate.functions"]
"""Modules that hold aggregate functions."""
_REGISTERS = re.compile(r"(.*), 2\*\*([0-9]+) registers\)", re.DOTALL)


@dataclass(frozen=True)
class AggregateCall:
    """An aggregate before it has a name: what ``cw.sum("delay")`` returns."""

    kind: str
    column: str | None = None
    precision: int | None = None


@dataclass(frozen=True)
class Aggregate:
    """One aggregate column: its name in the output, its kind (that of a function) and the column it reads.

    ``precision`` is for ``approx_count_distinct``: log2 of its registers, 4 to 16.

    >>> schema = pa.schema([("k", pa.string()), ("v", pa.int32())])
    >>> Aggregate("total", "sum", "v").result_type(schema)
    DataType(int64)
    """

    name: str
    kind: str
    column: str | None = None
    precision: int | None = None
    ordered: bool = False
    """True: the state keeps the order of arrival of its value, so that states merge in any order."""

    def __str__(self) -> str:
        registers = "" if self.precision is None else f", 2**{self.precision} registers"
        return f"{self.kind}({self.column or ''}{registers})"

    @classmethod
    def parse(cls, name: str, text: str) -> Aggregate | None:
        """The aggregate that a snapshot describes by the text that ``str`` made; ``None``: an unknown kind.

        >>> Aggregate.parse("n", str(Aggregate("n", "approx_count_distinct", "user", 12)))
        Aggregate(name='n', kind='approx_count_distinct', column='user', precision=12, ordered=False)
        >>> Aggregate.parse("n", "top 3 by price")
        """
        kind, _, rest = text.partition("(")
        function = aggregate_functions().get(kind)
        if function is None:
            return None
        if function.has_precision and (found := _REGISTERS.match(rest)):
            return cls(name, kind, found[1], int(found[2]))
        return cls(name, kind, rest.rpartition(")")[0] or None)

    @property
    def function(self) -> AggregateFunction:
        """The function of its kind.

        Raises:
            BuildError: there is none.
        """
        found = aggregate_functions().get(self.kind)
        if found is None:
            hint = did_you_mean(self.kind, tuple(aggregate_functions()))
            raise BuildError(f"no such aggregate {self.kind!r}", hint=hint)
        return found

    def column_type(self, schema: pa.Schema) -> pa.DataType:
        """Arrow type of the column it reads, null without one.

        Raises:
            BuildError: unknown kind or column, no column where one is needed, or a type that does not fit.
        """
        function = self.function
        if self.column is None:
            if not function.needs_column:
                return pa.null()
            raise BuildError(f"{self.kind} {self.name!r} needs a column", hint=f"Write {self.kind}('column').")
        if schema.get_field_index(self.column) < 0:
            raise BuildError(
                f"{self.kind} {self.name!r}: no such column {self.column!r}",
                hint=did_you_mean(self.column, schema.names),
            )
        kind = schema.field(self.column).type
        if not function.fits(kind):
            raise BuildError(
                f"{self.kind} {self.name!r}: column {self.column!r} of type {kind} does not fit",
                hint=f"{self.kind} takes {function.takes}: cast it first.",
            )
        return kind

    def result_type(self, schema: pa.Schema) -> pa.DataType:
        """Arrow type of the result.

        Raises:
            BuildError: as ``column_type``.
        """
        return self.function.result_type(self.column_type(schema))

    def state_fields(self, schema: pa.Schema) -> list[pa.Field]:
        """Columns of the aggregate's state in a segment, readable as they are."""
        parts = self.function.state(self.column_type(schema))
        fields = [pa.field(f"{self.name}.{part}" if part else self.name, kind) for part, kind in parts.items()]
        return [*fields, pa.field(f"{self.name}.order", pa.int64())] if self.ordered else fields

    @property
    def columns_read(self) -> frozenset[str] | None:
        """Columns that it reads; ``None``: whole rows."""
        return frozenset(() if self.column is None else (self.column,))

    def mergeable(self) -> Aggregate:
        """The same with a state that can be put together with others in any order."""
        return replace(self, ordered=True) if self.function.by_arrival else self

    def description(self, schema: pa.Schema) -> str:
        """A text that is the same for two aggregates over ``schema`` only if their states are."""
        return f"{self}{self.function.state_text(self.column_type(schema))}"

    def accumulator(self, schema: pa.Schema) -> Accumulator:
        """An empty accumulator for rows of ``schema``.

        Raises:
            BuildError: as ``column_type``.
        """
        return self.function.accumulator(self, self.column_type(schema))


class AggregateFunction(ABC):
    """A kind of aggregate: which columns it takes, what comes out, what a snapshot keeps of it, and how it is computed.

    A class is registered for one kind or several by ``aggregate_function``, in a module that ``_HOMES`` names.  Such a
    module must not load Numba, because a dataflow is built with it: accumulators with kernels are imported by
    ``accumulator``, where rows flow.
    """

    takes: ClassVar[str] = "any column"
    """Types that fit, in words."""
    needs_column: ClassVar[bool] = True
    has_precision: ClassVar[bool] = False
    """True: it is an estimate of a chosen ``precision``."""
    by_arrival: ClassVar[bool] = False
    """True: the result depends on the order of rows, so that parts put together later keep it (``ordered``)."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def fits(self, column: pa.DataType) -> bool:
        """True for the types of column that it takes."""
        return True

    def result_type(self, column: pa.DataType) -> pa.DataType:
        """Type of the result over a column of a type that fits: by default that type."""
        return column

    def state(self, column: pa.DataType) -> dict[str, pa.DataType]:
        """Types of the columns that a snapshot keeps, by name; "" is the column named like the aggregate.

        The names must not depend on the type.
        """
        return {"": self.result_type(column)}

    @abstractmethod
    def accumulator(self, aggregate: Aggregate, column: pa.DataType) -> Accumulator:
        """An empty accumulator."""

    def state_text(self, column: pa.DataType) -> str:
        """Words that tell states apart which the column's name does not: " of integers"; empty for none."""
        return ""

    # -- reading snapshots

    def column_of(self, stored: Sequence[pa.DataType]) -> pa.DataType:
        """A type of column whose state is stored in columns of these types: the reverse of ``state``."""
        return stored[0]

    @property
    def plain(self) -> bool:
        """True if what is stored is the result."""
        return list(self.state(pa.float64())) == [""]

    def results(self, aggregate: Aggregate, stored: Sequence[pa.Array]) -> pa.Array:
        """Results of stored states, one row each; not called where they are plain."""
        import numpy as np

        rows = np.arange(len(stored[0]), dtype=np.int32)
        accumulator = self.accumulator(aggregate, self.column_of([array.type for array in stored]))
        accumulator.reserve(len(rows))
        accumulator.restore(rows, list(stored))
        return accumulator.result(rows)


F = TypeVar("F", bound=AggregateFunction)
_functions: dict[str, AggregateFunction] = {}


def aggregate_function(*kinds: str) -> Callable[[type[F]], type[F]]:
    """Register a class for these kinds."""

    def register(cls: type[F]) -> type[F]:
        for kind in kinds:
            _functions[kind] = cls(kind)
        return cls

    return register


def aggregate_functions() -> dict[str, AggregateFunction]:
    """All functions by kind.

    >>> list(aggregate_functions())[:3]
    ['count', 'sum', 'mean']
    """
    for home in _HOMES:
        importlib.import_module(home)
    return _functions


class Accumulator(ABC):
    """State of one aggregate, in arrays by group id.  Called from one thread; a frozen one serves another thread.

    ``columns`` are the arrays that change in place.  A table captures them for a snapshot before it lets rows change
    (see ``cutwater.state.table.keyed_table.Capture``); whatever else an accumulator holds must never be changed in
    place.
    """

    columns: Sequence[GrowingArray]

    @property
    def varying_bytes(self) -> int:
        """What it holds besides ``columns``, roughly."""
        return 0

    @abstractmethod
    def reserve(self, gids: int) -> None:
        """Group ids 0 .. ``gids`` - 1 are in use; new ones have seen nothing."""

    @abstractmethod
    def update(self, gids: GroupIds, batch: pa.RecordBatch) -> None:
        """Take the rows of a batch; ``gids[i]`` is the group id of row i."""

    @abstractmethod
    def running(self, gids: GroupIds, batch: pa.RecordBatch) -> pa.Array:
        """Like ``update``; returns the result after each row, in row order: row i has seen the rows 0 .. i."""

    @abstractmethod
    def result(self, gids: GroupIds) -> pa.Array:
        """The results of some group ids."""

    @abstractmethod
    def state(self, gids: GroupIds) -> list[pa.Array]:
        """The state of some group ids, one array per field of ``Aggregate.state_fields``."""

    @abstractmethod
    def restore(self, gids: GroupIds, columns: list[pa.Array]) -> None:
        """Set the state of some (reserved) group ids to what ``state`` returned."""

    @abstractmethod
    def merge(self, gids: GroupIds, columns: list[pa.Array]) -> None:
        """Fold what ``state`` returned, here or elsewhere, into some (reserved) group ids; several rows may go to
        one.

        The result is that of all the values together; for ``first`` and ``last`` as if they came now, in this order.
        """

    @abstractmethod
    def keep(self, gids: GroupIds) -> None:
        """Forget all group ids but these, which become 0, 1, 2 ..."""

    @abstractmethod
    def frozen(self, columns: Sequence[Values]) -> Accumulator:
        """The accumulator as it is now, for ``state`` and ``result`` in another thread.

        Args:
            columns: captured copies of ``columns``, filled by the time they are read.
        """
