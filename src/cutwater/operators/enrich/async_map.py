"""Async enrichment: a user's function that waits for something else, many calls at a time.

The calls run outside the subtask's thread (``async_calls``); here the rows wait for their results.  They lie in
*segments*, which watermarks divide: a watermark goes on when all rows before it have, so that it overtakes none.
Within a segment results leave in the order of their rows, or as they come.

A snapshot has the rows whose results have not left.  After a restore they are asked for again: a call may happen twice,
its result comes out once.

Which results are there when rows leave, and what they are, nothing but chance has decided.  So where calls of this
operator may have to be made once more (R0), what leaves at one time is a choice: for which rows, counted in the order
in which they came, and the rows made of them.  Whoever does it once more asks nobody until it is at the end of that.
A call that fails leaves no trace: the replacement asks again.
"""

from __future__ import annotations

import inspect
import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
import pyarrow as pa

from cutwater.data.rows import describe_row, row_contents
from cutwater.data.schema_text import as_schema
from cutwater.data.time import MIN_WATERMARK
from cutwater.errors import BuildError, CutwaterError, NondeterminismError, UserCodeError
from cutwater.operators.base import Context, OneInputSpec, Operator, Outputs
from cutwater.operators.enrich.async_calls import AsyncCalls, Call
from cutwater.operators.row_output import RowBuilder, function_name, rows_of, to_dicts, user_error
from cutwater.state.segments import Frozen, FrozenSegments, Segment
from cutwater.storage.snapshot.manifest import Shape, TableRecord


class Run(NamedTuple):
    """Neighbours, of the rows that are kept in the order in which they came, that leave together."""

    skipped: int
    """Rows between the run before and this one: they stay."""
    rows: int
    late: bool
    """They got no answer in time, and leave as they came."""


class _Taken(NamedTuple):
    runs: list[Run]
    made: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Taken).decode


def encode_results(runs: list[Run], made: pa.RecordBatch | None) -> bytes:
    """What leaves at one time.

    Args:
        runs: of which rows.
        made: the rows made of those that are not late; ``None``: none.

    >>> made = pa.record_batch({"n": [4, 9]})
    >>> decode_results(encode_results([Run(1, 2, False)], made), made.schema)[0]
    [Run(skipped=1, rows=2, late=False)]
    """
    return _encode(_Taken(runs, b"" if made is None else made.serialize().to_pybytes()))


def decode_results(data: bytes, schema: pa.Schema) -> tuple[list[Run], pa.RecordBatch | None]:
    """The same again; ``schema`` is that of the rows made."""
    runs, made = _decode(data)
    return runs, pa.ipc.read_record_batch(pa.py_buffer(made), schema) if made else None


_Result: TypeAlias = Mapping[str, Any] | None
AsyncFunction: TypeAlias = Callable[..., Awaitable[_Result | Sequence[_Result]] | _Result | Sequence[_Result]]

_STATE = "in flight"
_LATE_BEFORE = b"cutwater.late_before"


@dataclass(frozen=True)
class AsyncMapSpec(OneInputSpec):
    """One row for each row, from a function that is called for many rows at a time.

    Args:
        fn: ``async def fn(row: dict) -> dict | None``, or a plain function, which then runs in threads.  With
            ``batch_rows`` it takes a list of rows and returns a list as long.
        output_schema: schema of the rows that it makes, or a text.
        ordered: results leave in the order of their rows; else as they come, but never across a watermark.
        capacity: rows that wait for results at most; a full step takes no more.
        timeout_ms: time for a result, retries included.
        retries: how often a call that raised is tried again.
        retry_delay_ms: pause before the first retry; each further one is twice as long.
        on_timeout: "error" fails the job, "dead_letter" gives the row to output 1.
        batch_rows: rows per call at most; ``None``: one, not in a list.

    Raises:
        BuildError: ``fn`` is not callable, the schema is none, or a number is out of range.
    """

    repeatable = True
    ends_chain = True

    fn: AsyncFunction
    output_schema: pa.Schema
    ordered: bool = True
    capacity: int = 100
    timeout_ms: float = 5_000.0
    retries: int = 0
    retry_delay_ms: float = 100.0
    on_timeout: Literal["error", "dead_letter"] = "error"
    batch_rows: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "output_schema", as_schema(self.output_schema))
        if not callable(self.fn):
            raise BuildError(f"a function is needed, got {type(self.fn).__name__}")
        if inspect.isasyncgenfunction(self.fn) or inspect.isgeneratorfunction(self.fn):
            raise BuildError(
                f"{function_name(self.fn)} yields", hint="Return one row for each row; use flat_map for more than one."
            )
        names = self.output_schema.names
        if not names or len(set(names)) < len(names):
            raise BuildError(f"the output schema of {function_name(self.fn)} has no columns, or two of one name")
        for name, least in (("capacity", 1), ("retries", 0), ("batch_rows", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise BuildError(f"{name} must be at least {least}, got {value}")
        if self.timeout_ms <= 0:
            raise BuildError("timeout must be above 0", hint="Write for example timeout='5s'.")
        if self.on_timeout not in ("error", "dead_letter"):
            raise BuildError(f"on_timeout={self.on_timeout!r} is unknown", hint="Choose 'error' or 'dead_letter'.")
        if self.batch_rows is not None and self.batch_rows > self.capacity:
            raise BuildError(f"batch_rows {self.batch_rows} is above capacity {self.capacity}")

    @property
    def outputs(self) -> tuple[pa.Schema, ...]:
        sides = (self.input_schema,) if self.on_timeout == "dead_letter" else ()
        return (self.output_schema, *sides)

    @property
    def state_tables(self) -> tuple[TableRecord, ...]:
        return (TableRecord(_STATE, "requests", Shape.REQUESTS),)

    def build(self) -> AsyncMapOperator:
        return AsyncMapOperator(self)


class _Segment:
    """Rows between two watermarks, with one ``late_before``."""

    __slots__ = ("closing", "late_before", "over", "waiting")

    def __init__(self) -> None:
        self.waiting: dict[int, Call] = {}
        """By their number, in the order in which the rows came; those that are over and have not left are here, too."""
        self.over = 0
        """How many of them are over."""
        self.closing: int | None = None
        """The watermark that follows."""
        self.late_before = MIN_WATERMARK


class AsyncMapOperator(Operator):
    """Keeps rows until their results are there.  Counts ``rows_dead_letter`` and ``calls_retried``."""

    def __init__(self, spec: AsyncMapSpec) -> None:
        self._spec = spec
        self._calls: AsyncCalls | None = None
        self._segments: deque[_Segment] = deque([_Segment()])
        self._unsent: deque[Call] = deque()
        self._done: deque[Call] = deque()  # filled by the thread of the calls
        self._kept = self._sent = 0  # rows in all; rows of calls under way
        self._held = False  # rows have come that nobody may be asked about yet
        self._batch_rows = spec.batch_rows or 1
        self._number = self._rows_seen = 0
        self._passed = MIN_WATERMARK
        self._made = RowBuilder(spec.fn, spec.output_schema)

    def open(self, ctx: Context) -> None:
        super().open(ctx)
        self._calls = AsyncCalls(self._spec.fn, self._spec, f"cutwater-async-{ctx.step}", self._finished)

    # ------------------------------------------------------------------------------------------------------- the seam

    def process(self, input: int, batch: pa.RecordBatch) -> Outputs:
        self._keep(batch, self.late_before)
        self._send()
        return []

    def _keep(self, batch: pa.RecordBatch, late_before: int) -> None:
        if self._segments[-1].late_before != late_before:
            if self._segments[-1].waiting:
                self._segments[-1].closing = MIN_WATERMARK
                self._segments.append(_Segment())
            self._segments[-1].late_before = late_before
        rows = to_dicts(batch)
        self._held |= self.ctx.repeating
        size = 1 if self._held else self._batch_rows
        for start in range(0, batch.num_rows, size):
            stop = min(start + size, batch.num_rows)
            call = Call(self._number, batch, start, rows[start:stop], self._rows_seen)
            self._number += 1
            self._segments[-1].waiting[call.number] = call
            self._unsent.append(call)
        self._kept += batch.num_rows
        self._rows_seen += batch.num_rows

    def on_watermark(self, watermark: int) -> Outputs:
        last = self._segments[-1]
        if not self._kept:
            self._passed = watermark
        elif last.waiting:
            last.closing = watermark
            self._segments.append(_Segment())
        else:
            self._segments[-2].closing = watermark
        return []

    @property
    def room(self) -> int | None:
        return max(0, self._spec.capacity - self._kept)

    @property
    def held_watermark(self) -> int | None:
        return self._passed if self._kept else None

    @property
    def answered(self) -> bool:
        return bool(self._done) or self._may_send or self._may_leave

    def take_results(self) -> tuple[Outputs, bytes]:
        """Results that may leave, up to the next watermark."""
        while self._done:
            self._take(self._done.popleft())
        self._send()
        segment = self._segments[0]
        self.late_before = segment.late_before
        runs, leaving = self._leaving(segment)
        made = self._made_of([call for call in leaving if not call.timed_out])
        taken = encode_results(runs, made) if leaving and self.ctx.repeatable else b""
        return self._leave([(segment, call) for call in leaving], made), taken

    def repeat_results(self, taken: bytes) -> Outputs:
        runs, made = decode_results(taken, self._spec.output_schema)
        kept = ((segment, call) for segment in self._segments for call in segment.waiting.values())
        leaving: list[tuple[_Segment, Call]] = []
        for skipped, rows, late in runs:
            found = list(itertools.islice(kept, skipped, skipped + rows))  # each of one row, as long as nobody is asked
            if len(found) < rows:
                raise NondeterminismError(f"somebody has results of {rows - len(found)} rows that have not come again")
            for segment, call in found:
                call.timed_out, call.over = late, True
                segment.over += 1
            leaving += found
            self.late_before = found[0][0].late_before  # all are of one segment, as they were then
        return self._leave(leaving, made)

    def freeze(self, checkpoint_id: int) -> Frozen:
        kept: list[tuple[int, list[pa.RecordBatch]]] = []
        for segment in self._segments:
            if not kept or kept[-1][0] != segment.late_before:
                kept.append((segment.late_before, []))
            kept[-1][1].extend(call.slice() for call in segment.waiting.values())

        def segments() -> Iterator[Segment]:
            for late_before, slices in kept:
                if slices:
                    late = None if late_before == MIN_WATERMARK else {_LATE_BEFORE: b"%d" % late_before}
                    table = pa.Table.from_batches(slices).combine_chunks().replace_schema_metadata(late)
                    yield from (Segment(_STATE, "base", batch) for batch in table.to_batches())

        return FrozenSegments(segments)

    def restore(self, segments: Iterable[Segment]) -> None:
        for segment in segments:
            if segment.name == _STATE:
                late = (segment.batch.schema.metadata or {}).get(_LATE_BEFORE)
                batch = segment.batch.replace_schema_metadata(None)
                # Asked for with the first turn: no call is made while others still restore.
                self._keep(batch, MIN_WATERMARK if late is None else int(late))

    def close(self) -> None:
        if self._calls is not None:
            self._calls.close()

    # -------------------------------------------------------------------------------------------------------- results

    def _finished(self, call: Call) -> None:
        """In the thread of the calls."""
        self._done.append(call)
        self.ctx.wake()

    def _send(self) -> None:
        """Begin calls up to the capacity (a batch that came, or was restored, may be larger)."""
        if self._held and not self.ctx.repeating:
            self._held = False
            self._group()
        ready: list[Call] = []
        while self._may_send:
            ready.append(self._unsent.popleft())
            self._sent += len(ready[-1].rows)
        if ready and self._calls is not None:
            self._calls.begin(ready)

    def _group(self) -> None:
        """Nobody knows another answer: what is left will be asked for, several rows at a time if that is wished."""
        self._unsent.clear()
        for segment in self._segments:
            single, segment.waiting = segment.waiting, {}
            for call in single.values():
                before = self._unsent[-1] if segment.waiting else None
                if before is not None and len(before.rows) < self._batch_rows and before.may_join(call):
                    before.join(call)
                else:
                    segment.waiting[call.number] = call
                    self._unsent.append(call)

    @property
    def _may_send(self) -> bool:
        unsent = self._unsent
        if not unsent or self.ctx.repeating:
            return False
        return not self._sent or self._sent + len(unsent[0].rows) <= self._spec.capacity

    def _take(self, call: Call) -> None:
        """A call is over."""
        self._sent -= len(call.rows)
        if call.retried:
            self.ctx.count("calls_retried", call.retried)
        if call.error is not None:
            raise self._located(self._failed(call, call.error), call)
        if call.timed_out and self._spec.on_timeout == "error":
            error = UserCodeError(
                f"{function_name(self._spec.fn)} gave no result within {self._spec.timeout_ms:g} ms for row "
                f"{call.start}, {describe_row(call.rows[0])}",
                hint="Raise timeout, or divert such rows: on_timeout='dead_letter'.",
            )
            error.row = call.start
            raise self._located(error, call)
        call.over = True
        next(s for s in self._segments if call.number in s.waiting).over += 1

    @property
    def _may_leave(self) -> bool:
        segment = self._segments[0]
        if not self._spec.ordered or not segment.over:
            return segment.over > 0
        return next(iter(segment.waiting.values())).over

    def _leaving(self, segment: _Segment) -> tuple[list[Run], list[Call]]:
        """Calls whose rows may leave, in the order in which these came, and where they stand."""
        runs: list[Run] = []
        calls: list[Call] = []
        skipped = 0
        for call in segment.waiting.values():
            if len(calls) == segment.over or (self._spec.ordered and not call.over):
                break
            rows = len(call.rows)
            if not call.over:
                skipped += rows
                continue
            calls.append(call)
            if runs and not skipped and runs[-1].late == call.timed_out:
                runs[-1] = runs[-1]._replace(rows=runs[-1].rows + rows)
            else:
                runs.append(Run(skipped, rows, call.timed_out))
            skipped = 0
        return runs, calls

    def _leave(self, calls: list[tuple[_Segment, Call]], made: pa.RecordBatch | None) -> Outputs:
        """The rows of these calls are not kept any more; nor are watermarks that waited for them."""
        for segment, call in calls:
            del segment.waiting[call.number]
            segment.over -= 1
            self._kept -= len(call.rows)
        while (closing := self._segments[0].closing) is not None and not self._segments[0].waiting:
            self._passed = max(self._passed, closing)
            self._segments.popleft()
        outputs: Outputs = [] if made is None else [(0, made)]
        late = [call.slice() for _, call in calls if call.timed_out]
        if late:
            outputs.append((1, pa.concat_batches(late)))
            self.ctx.count("rows_dead_letter", outputs[-1][1].num_rows)
        return outputs

    def _made_of(self, calls: list[Call]) -> pa.RecordBatch | None:
        """The results of calls, as one batch: where a batch ends must not hang on how rows came."""
        parts: Outputs = []
        for index, call in enumerate(calls):
            try:
                for offset, made in enumerate(self._results(call)):
                    if made is not None:
                        self._made.add(made, call.rows[offset], call.start + offset)
                if index + 1 == len(calls) or calls[index + 1].batch is not call.batch:
                    parts += self._made.take(0, partial(row_contents, call.batch))
            except CutwaterError as error:
                raise self._located(error, call) from error
        return pa.concat_batches([batch for _, batch in parts]) if parts else None

    def _results(self, call: Call) -> Sequence[Any]:
        if self._spec.batch_rows is None:
            return [call.result]
        made = rows_of(call.result)
        if made is None or len(made) != len(call.rows):
            returned = f"{len(made)} rows" if made is not None else type(call.result).__name__
            what = f"returned {returned} for {len(call.rows)} rows"
            raise self._made.misfit(what, call.rows[0], call.start)
        return made

    def _failed(self, call: Call, exc: BaseException) -> UserCodeError:
        tried = f" (tried {call.retried + 1} times)" if call.retried else ""
        if not isinstance(exc, Exception):  # a function that exits or is interrupted
            exc = RuntimeError(f"{type(exc).__name__}: {exc}")
        error = user_error(self._spec.fn, exc, row=call.rows[0], index=call.start)
        headline, newline, story = error.message.partition("\n")
        error.message = f"{headline}{tried}{newline}{story}"
        return error

    def _located(self, error: CutwaterError, call: Call) -> CutwaterError:
        """The error with the place of its row: the batch it came in is long gone when a result fails."""
        row = call.first_row + (call.start if error.row is None else error.row)
        headline, newline, story = error.message.partition("\n")
        where = f"in subtask {self.ctx.subtask}, row {row} since it started"
        error.message = f"{headline} ({where}){newline}{story}"
        return error
