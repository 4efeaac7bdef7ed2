"""The operator seam: a step's specification, and its operator, which does to a batch what the step says.

The subtask loop calls an operator from one thread only, with *slices*: ``process`` must not block, must not read a
clock and should stay near ``slice_budget_ms`` for the rows it is given (the loop adapts their number).  Barriers never
reach an operator: the loop calls ``freeze`` when the protocol says so.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.data.time import MIN_WATERMARK
from cutwater.errors import BuildError
from cutwater.state.segments import EMPTY, Frozen, Segment
from cutwater.storage.snapshot.manifest import TableRecord

if TYPE_CHECKING:
    from cutwater.operators.evolution import Evolution, Former
    from cutwater.operators.row_filters import RowFilter

Outputs: TypeAlias = list[tuple[int, pa.RecordBatch]]
"""Batches with the number of the output they go to (0 is the main output; side outputs count from 1)."""


class Context(Protocol):
    """What an operator may know and ask of the world: the only door to anything non-deterministic."""

    step: str
    subtask: int
    parallelism: int
    max_parallelism: int
    key_groups: range
    """Key groups that this subtask owns (contiguous)."""
    incremental: bool
    """Whether a snapshot may ask for what changed since an older one: then changes are to be kept track of."""
    state_memory_bytes: int | None
    """Memory that keyed state may take, the rest lying elsewhere; ``None``: all of it lies in memory."""
    repeatable: bool
    """Calls may be made once more after a restore, and must give out the same rows in the same order (R0): what comes
    out together is then ordered by what it is, not by where it happens to lie."""

    @property
    def repeating(self) -> bool:
        """Calls are being made once more, or it is not known yet whether they will be: nobody outside is asked for
        anything, because the answer may be known (``Operator.repeat_results``).
        """
        ...

    def processing_time_ms(self) -> int:
        """Processing time, milliseconds since the epoch.  It is in every snapshot, and never falls: not when the wall
        clock is set back, and not over a restore (W2).
        """
        ...

    def count(self, metric: str, amount: int = 1) -> None:
        """Add to a counter that the driver shows (for example ``rows_late``)."""
        ...

    def wake(self) -> None:
        """Give the subtask a turn soon: something that its operator waited for is there.  From any thread."""
        ...


class Operator:
    """One subtask's instance of a step.  By default it is stateless, passes rows on, and has nothing pending."""

    ctx: Context
    late_before: int = MIN_WATERMARK
    """Set before rows are brought: what ends at this event time or before is over for them, whatever the watermark is
    (rule W4; ``MIN_WATERMARK`` for rows that keep the promise of their split).  The operator sets it itself where it
    gives out rows that it kept (``take_results``, ``repeat_results``)."""

    def open(self, ctx: Context) -> None:
        """Called once, before ``restore`` and before any row."""
        self.ctx = ctx

    def process(self, input: int, batch: pa.RecordBatch) -> Outputs:
        """Rows of one input, in the order of their channel."""
        return [(0, batch)]

    def on_watermark(self, watermark: int) -> Outputs:
        """The combined watermark of all inputs rose to ``watermark`` (microseconds since the epoch; never falls).

        The loop sends the watermark on only after ``pending`` is false: event-time timers fire before.  At the end of
        bounded input it is ``MAX_WATERMARK``.
        """
        return []

    @property
    def pending(self) -> bool:
        """True while a bounded slice of the last call's work (timers, windows to fire) is left: call ``resume``."""
        return False

    def resume(self) -> Outputs:
        """The next slice of pending work."""
        return []

    @property
    def next_processing_time_ms(self) -> int | None:
        """When the operator next wants ``on_processing_time``, milliseconds since the epoch; ``None``: it waits for
        nothing.  Looked at before every action of the subtask, so it must be cheap.
        """
        return None

    @property
    def timers_pending(self) -> bool:
        """Whether the clock alone may make the operator give out rows: a loop it lies in has not ended then (C6)."""
        return False

    def on_processing_time(self, now_ms: int) -> Outputs:
        """The clock has reached ``next_processing_time_ms``: a bounded slice of what is due (timers, cleanup).

        What is left stays due, so that the loop calls again, with rows and barriers in between: unlike the work of
        ``resume`` it holds nothing up and may lie on both sides of a freeze.  Windows, which come out whole, leave the
        rest ``pending`` instead.  Not called after the end of input.
        """
        return []

    @property
    def answered(self) -> bool:
        """Something is to be done that nothing inside has brought about: an answer has come that it waited for.  The
        loop calls ``take_results`` between other calls, never while work is pending.
        """
        return False

    def take_results(self) -> tuple[Outputs, bytes]:
        """What comes of the answers that are there, and where calls may have to be made once more (``ctx.repeatable``)
        all that is needed to give out the same without anybody's answer; empty where nothing came of them.
        """
        return [], b""

    def repeat_results(self, taken: bytes) -> Outputs:
        """The same once more, from what ``take_results`` gave, in the place of then.

        Raises:
            NondeterminismError: it is about rows that are not there.
        """
        return []

    @property
    def room(self) -> int | None:
        """How many more rows it takes now; ``None``: any number.  At 0 the loop brings it none until it ``wake``s.

        A wish, not a promise: steps before it in the chain may make more rows than they were given.
        """
        return None

    @property
    def held_watermark(self) -> int | None:
        """The operator keeps rows back (requests under way): this watermark may go on, those above it may not.

        ``None``: it keeps none.  Only a step that ends its chain may keep rows (``ends_chain`` of its spec).

        What is kept belongs to the state, counts as rows in a loop, and must leave before the end of data does.
        """
        return None

    def freeze(self, checkpoint_id: int) -> Frozen:
        """State as it is now.  Cheap; called only while ``pending`` is false."""
        return EMPTY

    def restore(self, segments: Iterable[Segment]) -> None:
        """Rebuild state from segments; rows of key groups outside ``ctx.key_groups`` are skipped."""
        for _ in segments:
            pass

    def close(self) -> None:
        """Release resources.  Called once, also after a failure."""
        return

    def _drained(self) -> Outputs:
        """All pending work."""
        outputs: Outputs = []
        while self.pending:
            outputs += self.resume()
        return outputs

    def _late(self, batch: pa.RecordBatch, late: npt.NDArray[np.bool_], output: int = 1) -> Outputs:
        """The late rows of a batch, counted, for a side output."""
        count = int(np.count_nonzero(late))
        if not count:
            return []
        self.ctx.count("rows_late", count)
        return [(output, batch.filter(pa.array(late)))]


class OperatorSpec(ABC):
    """A step as the plan carries it: a frozen value that says what the step makes, what it keeps and what may be done
    with it, and builds its operator in the worker.

    Spark ships it with the worker's code; making one checks everything that can be checked before rows flow, and raises
    ``BuildError`` then.  Whatever the rest of the house wants to know of a step it asks here.
    """

    repeatable: ClassVar[bool] = False
    """True: given the same state, rows and choices, an operator that is made anew sends the same rows under the same
    numbers (R0).  Recovery of a part of a job relies on it (R3, R4)."""
    takes_dictionaries: ClassVar[bool] = False
    """True: texts of its input may come as dictionaries, whatever the schema says."""
    ends_chain: ClassVar[bool] = False
    """True: its rows leave the chain in any case, because it keeps some back, and watermarks behind them."""

    @property
    @abstractmethod
    def outputs(self) -> tuple[pa.Schema, ...]:
        """Schema of each output, main output first."""

    @abstractmethod
    def build(self) -> Operator:
        """An operator for one subtask.  Called in the worker; only then kernels may be loaded."""

    @property
    def input_schemas(self) -> tuple[pa.Schema, ...]:
        """Schema of the rows that each input takes, as far as the step says so."""
        return ()

    @property
    def columns_read(self) -> frozenset[str] | None:
        """Input columns that output 0 depends on; ``None``: all.  The others need not be sent if only it is read."""
        return None

    def columns_for(self, wanted: frozenset[str] | None) -> frozenset[str] | None:
        """Input columns that are read where nobody reads more than ``wanted`` of output 0, and nothing else.

        Args:
            wanted: columns of output 0; ``None``: all.
        """
        return self.columns_read

    def narrowed(self, wanted: frozenset[str]) -> OperatorSpec:
        """The same step without the columns of output 0 that nobody reads, if leaving them out saves work."""
        return self

    @property
    def row_filters(self) -> tuple[RowFilter, ...]:
        """Conditions on input rows: one that does not fulfil each of them leads to nothing, and need not come."""
        return ()

    def passing_dictionaries(self) -> OperatorSpec:
        """The same step; texts that it passes on as they came stay dictionaries, whatever the schema says."""
        return self

    @property
    def keeps_every_row(self) -> bool:
        """True if output 0 has at least one row for each row: alone in a loop such steps would go round for ever."""
        return False

    def fused(self, after: OperatorSpec) -> OperatorSpec | None:
        """This step and the one after it as one; ``None``: they stay two."""
        return None

    def pinned(self) -> OperatorSpec:
        """The step with files outside the job, that it reads, as they are now: every worker then reads the same.

        Raises:
            BuildError: they cannot be read.
        """
        return self

    @property
    def state_schema(self) -> pa.Schema | None:
        """Schema of the keyed state (for upgrade checks), ``None`` for a stateless step."""
        return None

    @property
    def state_parts(self) -> dict[str, str]:
        """Function or kind of each part of the state, by name: of each aggregate, of each state of user logic."""
        return {}

    @property
    def state_tables(self) -> tuple[TableRecord, ...]:
        """Tables of the state, for those who read a snapshot: by default one of keys and values, "table"."""
        return () if self.state_schema is None else (TableRecord("table"),)

    @property
    def settings(self) -> dict[str, str]:
        """Meaning of the state besides its schema, as text by name: a snapshot whose settings differ does not fit.

        A lateness is none of it, for example: it only says when state goes.
        """
        return {}

    def evolve(self, former: Former, renames: Mapping[tuple[str, ...], str], *, drop: bool) -> Evolution | None:
        """The way from the state of an earlier version to this one; ``None``: both must be the same.

        Args:
            former: the state as the snapshot tells it.
            renames: new names by old ones: ``(aggregate or state,)``, ``(state, column)``.
            drop: whether states that the program no longer has may go.
        """
        return None

    def explanation(self) -> Iterator[str]:
        """Parts of the step's line in ``flow.explain()``."""
        if self.settings:
            yield ", ".join(f"{name} {value}" for name, value in self.settings.items())


@dataclass(frozen=True, eq=False)
class OneInputSpec(OperatorSpec):
    """A step over the rows of one stream.

    Args:
        input_schema: schema of the rows.
    """

    input_schema: pa.Schema

    @property
    def input_schemas(self) -> tuple[pa.Schema, ...]:
        return (self.input_schema,)


@dataclass(frozen=True, eq=False)
class KeyedSpec(OneInputSpec):
    """A step over the rows of one stream by key.

    Args:
        keys: key columns.
    """

    keys: tuple[str, ...]

    @property
    def key_fields(self) -> list[pa.Field]:
        """The key columns."""
        return [self.input_schema.field(name) for name in self.keys]


def check_names(names: Sequence[str], hint: str) -> None:
    """Refuse two columns of one name.

    Raises:
        BuildError: names it.
    """
    for position, name in enumerate(names):
        if name in names[:position]:
            raise BuildError(f"two columns would be named {name!r}", hint=hint)
