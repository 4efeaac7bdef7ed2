"""The operators behind ``ProcessorSpec``: what both forms share, the form of rows, the form of pandas DataFrames."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from cutwater.data.python_values import column_values
from cutwater.data.rows import Row, event_times, shorten_value
from cutwater.data.time import MAX_WATERMARK, MIN_WATERMARK
from cutwater.errors import CutwaterError, UserCodeError
from cutwater.operators.base import Context, Outputs
from cutwater.operators.process.object_operator import TIMERS_PER_SLICE, ObjectOperator
from cutwater.operators.row_output import RowBuilder, to_dicts, user_error
from cutwater.operators.stateful_processor.handle import Handle
from cutwater.operators.stateful_processor.spark_types import (
    TimeMode,
    expired_timer_info,
    local_zone,
    row_maker,
    timer_values,
)
from cutwater.operators.stateful_processor.spec import ProcessorSpec
from cutwater.operators.stateful_processor.states import Record, codec
from cutwater.state.keys import hash_keys, key_groups, require_valid_keys
from cutwater.state.objects.timers import PREFIX, TimerDomain
from cutwater.state.segments import GROUP_COLUMN, Segment

_NO_FIELDS: dict[str, list[str]] = {}


class TupleBuilder(RowBuilder):
    """Collects ``Row`` objects and tuples.

    A ``Row`` with the names of the declared columns is taken by name, any other row by position, as Spark does it.

    >>> builder = TupleBuilder(print, pa.schema({"k": pa.string(), "n": pa.int64()}))
    >>> builder.add(("a", 1), {}, 0)
    >>> [(n, batch.to_pydict()) for n, batch in builder.take(0, lambda index: {})]
    [(0, {'k': ['a'], 'n': [1]})]
    """

    def __init__(self, fn: object, schema: pa.Schema) -> None:
        super().__init__(fn, schema)
        self.unit = "key"
        self._order: list[str] = schema.names
        self._sorted = sorted(self._order)
        self._stores = [codec(field.type).store for field in schema]

    def extend(self, rows: list[Any], index: int) -> None:
        """Rows made from input key ``index``; ``take`` looks at them."""
        self._made += rows
        self._origins += [index] * len(rows)

    def add(self, out: object, row: Row, index: int) -> None:
        """One row made from input key ``index``."""
        self.extend([out], index)

    def take(self, output: int, origin: Callable[[int], Row]) -> Outputs:
        """The rows so far as batches for an output.

        Raises:
            UserCodeError: one is no row, has not as many values as there are columns, or a value does not fit.
        """
        width, made = len(self._order), self._made
        for row, index in zip(made, self._origins, strict=True):
            if not isinstance(row, tuple):
                raise self.misfit(f"made {type(row).__name__} instead of a Row", origin(index), index)
            if len(row) != width:  # pyright: ignore[reportUnknownArgumentType]
                raise self.misfit(f"made a row of {len(row)} values for {width} columns", origin(index), index)  # pyright: ignore[reportUnknownArgumentType]
        order = self._order
        for number, row in enumerate(made):
            fields = getattr(row, "__dict__", _NO_FIELDS).get("__fields__")
            if fields is not None and fields != order and sorted(fields) == self._sorted:
                made[number] = tuple([row[fields.index(name)] for name in order])
        return super().take(output, origin)

    def _columns(self, origin: Callable[[int], Row]) -> list[list[Any]]:
        columns = map(list, zip(*self._made, strict=True))
        return [
            column if store is None else [None if value is None else store(value) for value in column]
            for column, store in zip(columns, self._stores, strict=True)
        ]


Key = tuple[Hashable, ...]

_INITIAL = PREFIX + "initial"
"""Segment that names the key groups whose initial state was taken."""


class ProcessorOperator(ObjectOperator):
    """Groups a slice by key, binds states and timers to each key in turn, and calls the user's processor."""

    def __init__(self, spec: ProcessorSpec, processor: Any) -> None:
        states = {name: declaration.make() for name, declaration in spec.states.items()}
        fires = spec.time_mode is not TimeMode.NONE
        super().__init__(spec.key_fields, states, fires=fires, name=spec.user, handler="time mode")
        self._spec, self._processor, self._mode = spec, processor, spec.time_mode
        self._key_record = Record(pa.schema(spec.key_fields))
        self._last_watermark = MIN_WATERMARK  # before the end of the input
        self._initialised: set[int] = set()  # key groups whose initial state was taken
        self._opened = False

    def open(self, ctx: Context) -> None:
        super().open(ctx)
        timers = self._timers[self._mode.domain]
        self._handle = Handle(self._spec.user, self._mode, self._states, self._records, timers)

    @abstractmethod
    def _handle_rows(self, batch: pa.RecordBatch) -> Outputs:
        """Call the processor with the rows of each key."""

    @abstractmethod
    def _initial(self, batch: pa.RecordBatch) -> Iterator[tuple[Key, Any]]:
        """The initial state of each key, as the processor takes it."""

    @abstractmethod
    def _add(self, result: Any, row: Row, index: int) -> None:
        """Keep what the processor made of unit ``index``."""

    @abstractmethod
    def _take(self, origin: Callable[[int], Row], unit: str = "key") -> Outputs:
        """What was kept, as batches."""

    # ------------------------------------------------------------------------------------------------------- rows

    def process(self, input: int, batch: pa.RecordBatch) -> Outputs:
        if batch.num_rows == 0:
            return []
        require_valid_keys(batch, self._spec.keys)
        self._open()
        late: Outputs = []
        if self._mode is TimeMode.EVENT:
            batch, late = self._without_late_rows(batch)
        return [*(self._handle_rows(batch) if batch.num_rows else []), *late]

    def _without_late_rows(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, Outputs]:
        """As in Spark: rows at or behind the watermark are late."""
        assert self._spec.event_time is not None
        times = event_times(batch, self._spec.event_time)
        reached: Any = self._watermarks.current
        if self._watermarks.differ:
            reached = np.array(self._watermarks_of(batch, self._spec.keys))
        late = times <= np.maximum(reached, self.late_before)
        outputs = self._late(batch, late)
        return (batch.filter(pa.array(~late)) if outputs else batch), outputs

    def _bind(self, key: Key) -> Key:
        """States and timers are about this key from now on; returns it as the processor sees it."""
        self._records.bind(key[0] if self._records.single else key)
        return key if self._plain_keys else tuple(r(v) if r else v for r, v in zip(self._key_revives, key, strict=True))

    def _times(self, key: Key | None = None, timer: int | None = None) -> Any:
        """What the processor is told of the time.

        Args:
            key: whose watermark is told, where they differ.
            timer: the event-time timer that is being handled, microseconds.
        """
        if self._mode is TimeMode.NONE:
            return timer_values(-1, -1)
        now_ms = self.ctx.processing_time_ms()
        if self._mode is TimeMode.PROCESSING:
            return timer_values(now_ms, -1)
        reached = self._watermarks.current if key is None else self._watermark_of_key(key)
        if reached == MAX_WATERMARK:  # the end of time is no time to reckon with
            reached = self._last_watermark if timer is None else max(self._last_watermark, timer)
        self._handle.watermark_ms = max(reached // 1000, 0)
        return timer_values(now_ms, self._handle.watermark_ms)

    def _call(self, method: Callable[..., Any], arguments: tuple[Any, ...], row: Row, index: int, unit: str) -> Any:
        """What the processor makes, complete: its states may be bound to another key then."""
        try:
            return [*method(*arguments)]
        except Exception as exc:
            raise self._error(method, exc, row, index, unit) from exc

    def _error(self, method: Callable[..., Any], exc: Exception, row: Row, index: int, unit: str) -> UserCodeError:
        error = user_error(method, exc, row=row, index=index, unit=unit)
        if isinstance(exc, CutwaterError):
            error.hint = exc.hint
        elif isinstance(exc, TypeError) and "after * must be an iterable" in str(exc):
            error.hint = "Yield what it makes, or return an iterator; if there is nothing: return iter([])."
        return error

    def _keys_of(self, batch: pa.RecordBatch) -> Iterator[Key]:
        """The key of each row."""
        return zip(*(column_values(batch.column(name)) for name in self._spec.keys), strict=True)

    def _key_row(self, key: Key) -> Row:
        return dict(zip(self._spec.keys, key, strict=True))

    # ----------------------------------------------------------------------------------------------------- timers

    def _watermark_rose(self) -> None:
        if self._watermarks.current < MAX_WATERMARK:
            self._last_watermark = self._watermarks.current

    def _fire(self, domain: TimerDomain, until: int) -> Outputs:
        fired: list[Row] = []
        call, unit = self._processor.handleExpiredTimer, self._mode.unit
        for time, key in self._timers[domain].due(until, TIMERS_PER_SLICE):
            self._open()
            # As in Spark, where a query that has ended leaves timers behind: what timers set now would have no end.
            self._handle.at_end = domain == self._mode.domain and until == MAX_WATERMARK
            seen, times = self._bind(key), self._times(key, time)
            self._handle.firing_ms = time // unit
            row = {**self._key_row(key), "time": time // unit}
            made = self._call(call, (seen, times, expired_timer_info(time // unit)), row, len(fired), "timer")
            self._handle.firing_ms = None
            for result in made:
                self._add(result, row, len(fired))
            fired.append(row)
        if self._handle.ignored_timers:
            self.ctx.count("timers_after_end", self._handle.ignored_timers)
            self._handle.ignored_timers = 0
        return self._take(fired.__getitem__, "timer") if fired else []

    # --------------------------------------------------------------------------------------------------- lifecycle

    def _open(self) -> None:
        """With the first row or timer, or the initial state: a user's ``init`` may be slow."""
        if self._opened:
            return
        self._opened = True
        self._key_revives = [column.revive for column in self._key_record.columns]
        self._plain_keys = not any(self._key_revives)
        try:
            self._processor.init(self._handle)
        except CutwaterError:
            raise
        except Exception as exc:
            raise user_error(self._processor.init, exc) from exc
        self._handle.running = True
        self._take_initial_state()

    def _take_initial_state(self) -> None:
        if self._spec.initial is None:
            return
        wanted = np.array([g for g in self.ctx.key_groups if g not in self._initialised], np.uint16)
        self._initialised = set(self.ctx.key_groups)
        for batch in self._spec.initial.load().combine_chunks().to_batches():
            require_valid_keys(batch, self._spec.keys)
            groups = key_groups(hash_keys([batch.column(k) for k in self._spec.keys]), self.ctx.max_parallelism)
            mine = batch.filter(pa.array(np.isin(groups, wanted)))
            if mine.num_rows:
                self._handle_initial(mine)

    def _handle_initial(self, batch: pa.RecordBatch) -> None:
        call, times = self._processor.handleInitialState, self._times()
        for index, (key, initial) in enumerate(self._initial(batch)):
            arguments = (self._bind(key), initial, times)
            try:
                call(*arguments)
            except Exception as exc:
                raise user_error(call, exc, row=self._key_row(key), index=index) from exc

    def _more_parts(self) -> list[Callable[[], Iterable[Segment]]]:
        if self._spec.initial is None:
            return []
        groups = self.ctx.key_groups
        batch = pa.record_batch({GROUP_COLUMN: np.array(sorted(self._initialised), np.uint16)})
        return [lambda: [Segment(_INITIAL, "base", batch, (groups.start, groups.stop))]]

    def _more_names(self) -> Collection[str]:
        return () if self._spec.initial is None else (_INITIAL,)

    def _restore_more(self, segments: Mapping[str, list[Segment]]) -> None:
        for segment in segments.get(_INITIAL, ()):
            self._initialised.update(segment.batch.column(GROUP_COLUMN).to_pylist())
        if self._spec.initial is not None and not self.ctx.repeatable:  # or with the next call, at the time of then
            self._open()

    def close(self) -> None:
        try:
            if self._opened:
                self._processor.close()
        finally:
            super().close()


class RowProcessorOperator(ProcessorOperator):
    """Gives and takes ``Row`` objects."""

    def __init__(self, spec: ProcessorSpec, processor: Any) -> None:
        super().__init__(spec, processor)
        self._record = Record(spec.input_schema)
        self._made = TupleBuilder(processor.handleInputRows, spec.output_schema)

    def _handle_rows(self, batch: pa.RecordBatch) -> Outputs:
        groups = self._grouped(batch)
        make, call, keep = row_maker(self._record.names), self._processor.handleInputRows, self._made.extend
        records, plain, differ = self._records, self._plain_keys, self._watermarks.differ
        times = self._times()
        found = records.of(records.bare(list(groups)))
        for index, ((key, rows), record) in enumerate(zip(groups.items(), found, strict=True)):
            if plain and record is not None:
                seen, records.key = key, key[0] if records.single else key
                records.show(record)
            else:
                seen = self._bind(key)
            if differ:
                times = self._times(key)
            try:
                keep([*call(seen, map(make, rows), times)], index)
            except Exception as exc:
                raise self._error(call, exc, self._key_row(key), index, "key") from exc
        keys = list(groups)
        return self._take(lambda index: self._key_row(keys[index]))

    def _grouped(self, batch: pa.RecordBatch) -> dict[Key, list[tuple[Any, ...]]]:
        """The rows of each key, in the order in which the keys came."""
        try:
            keys = self._keys_of(batch)
            rows = zip(*self._record.seen(batch.columns), strict=True)
        except (OverflowError, ValueError):
            to_dicts(batch)  # says which row has no Python value
            raise
        groups: dict[Key, list[tuple[Any, ...]]] = {}
        for key, row in zip(keys, rows, strict=True):
            found = groups.get(key)
            if found is None:
                groups[key] = [row]
            else:
                found.append(row)
        return groups

    def _initial(self, batch: pa.RecordBatch) -> Iterator[tuple[Key, Any]]:
        record = Record(batch.schema)
        rows = map(row_maker(record.names), zip(*record.seen(batch.columns), strict=True))
        return zip(self._keys_of(batch), rows, strict=True)

    def _add(self, result: Any, row: Row, index: int) -> None:
        self._made.add(result, row, index)

    def _take(self, origin: Callable[[int], Row], unit: str = "key") -> Outputs:
        self._made.unit = unit
        return self._made.take(0, origin)


class PandasProcessorOperator(ProcessorOperator):
    """Gives each key's rows as one DataFrame and takes DataFrames."""

    def __init__(self, spec: ProcessorSpec, processor: Any) -> None:
        super().__init__(spec, processor)
        self._made: list[tuple[Any, int]] = []
        self._names: list[str] = spec.output_schema.names
        self._in_order = True  # the columns of all DataFrames made are the declared ones, in their order

    def _handle_rows(self, batch: pa.RecordBatch) -> Outputs:
        call, times = self._processor.handleInputRows, self._times()
        rows: list[Row] = []
        self._records.begin()
        for index, (key, frame) in enumerate(self._frames(batch)):
            seen, row = self._bind(key), self._key_row(key)
            rows.append(row)
            if self._watermarks.differ:
                times = self._times(key)
            for made in self._call(call, (seen, iter((frame,)), times), row, index, "key"):
                self._add(made, row, index)
        return self._take(rows.__getitem__)

    def _initial(self, batch: pa.RecordBatch) -> Iterator[tuple[Key, Any]]:
        return self._frames(batch)

    def _frames(self, batch: pa.RecordBatch) -> Iterator[tuple[Key, Any]]:
        """Each key and its rows, in the order in which the keys came.  The batch is converted once."""
        numbers: dict[Key, int] = {}
        group = np.array([numbers.setdefault(key, len(numbers)) for key in self._keys_of(batch)], np.int64)
        import pandas as pd

        order = np.argsort(group, kind="stable")
        whole = _to_pandas(batch.take(pa.array(order))).copy()  # what comes of Arrow may not be written to
        ends = np.cumsum(np.bincount(group, minlength=len(numbers))).tolist()
        for key, start, end in zip(numbers, [0, *ends[:-1]], ends, strict=True):
            frame = whole[start:end]
            frame.index = pd.RangeIndex(end - start)
            frame._is_copy = None  # no other looks at these rows: pandas need not warn of assignments
            yield key, frame

    def _add(self, result: Any, row: Row, index: int) -> None:
        import pandas as pd

        if not isinstance(result, pd.DataFrame):
            raise self._misfit(f"made {type(result).__name__} instead of a DataFrame", row, index)
        schema = self._spec.output_schema
        names = result.columns.tolist()
        if names == self._names:
            if len(result):
                self._made.append((result, index))
            return
        self._in_order = False
        names = [str(name) for name in names]
        if set(names) != set(schema.names):
            if len(names) != len(schema):
                listed = ", ".join(map(repr, names)) or "no columns"
                raise self._misfit(f"made a DataFrame with {listed}", row, index)
            # As in Spark: other names are no matter if they are no texts.
            if any(isinstance(name, str) for name in result.columns):
                unknown = ", ".join(repr(name) for name in names if name not in schema.names)
                raise self._misfit(f"made a DataFrame with the undeclared columns {unknown}", row, index)
            result = result.set_axis(schema.names, axis=1)
        if len(result):
            self._made.append((result, index))

    def _take(self, origin: Callable[[int], Row], unit: str = "key") -> Outputs:
        made, self._made = self._made, []
        in_order, self._in_order = self._in_order, True
        if not made:
            return []
        import pandas as pd

        frames = [result for result, _ in made]
        try:
            arrays = _arrays(frames, self._spec.output_schema) if in_order else None
            if arrays is not None:
                return [(0, self._of_columns(arrays))]
            return [(0, self._to_batch(pd.concat(frames, ignore_index=True) if len(frames) > 1 else frames[0]))]
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            return [(0, self._to_batch_or_say(result, origin(index), index)) for result, index in made]

    def _to_batch(self, frame: Any) -> pa.RecordBatch:
        schema = self._spec.output_schema
        return self._of_columns(
            pa.RecordBatch.from_pandas(_localised(frame, schema), schema, preserve_index=False).columns
        )

    def _of_columns(self, columns: list[pa.Array]) -> pa.RecordBatch:
        schema = self._spec.output_schema
        for field, column in zip(schema, columns, strict=True):
            if column.null_count and not field.nullable:
                raise ValueError(f"null for column {field.name!r}, which is declared not null")
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    def _to_batch_or_say(self, frame: Any, row: Row, index: int) -> pa.RecordBatch:
        try:
            return self._to_batch(frame)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as exc:
            raise self._misfit(f"made values that do not fit ({exc}) from", row, index) from exc

    def _misfit(self, what: str, row: Row, index: int) -> UserCodeError:
        declared = ", ".join(f"{f.name} {f.type}" for f in self._spec.output_schema)
        error = UserCodeError(f"{self._spec.user} {what}, of key {shorten_value(row)}", hint=f"Declared is {declared}.")
        error.row = index
        return error


def _arrays(frames: list[Any], schema: pa.Schema) -> list[pa.Array] | None:
    """The columns of DataFrames that have those of a schema, one DataFrame after the other.

    What ``pd.concat`` and ``RecordBatch.from_pandas`` make of them, without the time that those take for each of many
    small DataFrames.  ``None`` if a column is not of one of NumPy's own types, the same everywhere.
    """
    arrays: list[pa.Array] = []
    columns = zip(*(frame._iter_column_arrays() for frame in frames), strict=True)
    for field, parts in zip(schema, columns, strict=True):
        dtypes = {part.dtype for part in parts}
        dtype = dtypes.pop()
        if dtypes or not isinstance(dtype, np.dtype) or (dtype.kind == "M" and field.type != pa.timestamp("us")):
            return None
        arrays.append(pa.array(np.concatenate(parts), field.type, from_pandas=True))
    return arrays


def _to_pandas(batch: pa.RecordBatch) -> Any:
    """As Spark gives DataFrames: timestamps naive, in local time; dates as objects."""
    frame = batch.to_pandas(date_as_object=True)
    for field in batch.schema:
        if pa.types.is_timestamp(field.type) and field.type.tz is not None:
            frame[field.name] = frame[field.name].dt.tz_convert(local_zone()).dt.tz_localize(None)
    return frame


def _localised(frame: Any, schema: pa.Schema) -> Any:
    """Naive timestamps are local time where the schema has a zone."""
    for field in schema:
        if pa.types.is_timestamp(field.type) and field.type.tz is not None:
            column = frame[field.name]
            if getattr(column.dtype, "kind", "") == "M" and getattr(column.dtype, "tz", None) is None:
                frame = frame.assign(**{field.name: column.dt.tz_localize(local_zone(), ambiguous=False)})
    return frame
