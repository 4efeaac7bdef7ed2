"""The form of pandas DataFrames."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from cutwater.data.rows import Row, shorten_value
from cutwater.errors import UserCodeError
from cutwater.operators.base import Outputs
from cutwater.operators.row_output import user_error
from cutwater.operators.stateful_processor.operator import Key, ProcessorOperator
from cutwater.operators.stateful_processor.spark_types import local_zone
from cutwater.operators.stateful_processor.spec import ProcessorSpec


class PandasProcessorOperator(ProcessorOperator):
    """Gives each key's rows as one DataFrame and takes DataFrames."""

    def __init__(self, spec: ProcessorSpec, processor: Any) -> None:
        super().__init__(spec, processor)
        self._made: list[tuple[Any, int]] = []

    def _handle_rows(self, batch: pa.RecordBatch) -> Outputs:
        call, times = self._processor.handleInputRows, self._times()
        rows: list[Row] = []
        for index, (key, frame) in enumerate(self._frames(batch)):
            seen, row = self._bind(key), self._key_row(key)
            if self._watermarks.differ:
                times = self._times(key)
            for made in self._call(call, (seen, iter((frame,)), times), row, index, "key"):
                self._add(made, row, index)
            rows.append(row)
        return self._take(rows.__getitem__)

    def _handle_initial(self, batch: pa.RecordBatch) -> None:
        times = self._times()
        for index, (key, frame) in enumerate(self._frames(batch)):
            arguments = (self._bind(key), frame, times)
            try:
                self._processor.handleInitialState(*arguments)
            except Exception as exc:
                raise user_error(self._processor.handleInitialState, exc, row=self._key_row(key), index=index) from exc

    def _frames(self, batch: pa.RecordBatch) -> Iterator[tuple[Key, Any]]:
        """Each key and its rows, in the order in which the keys came.  The batch is converted once."""
        keys: Iterator[Key] = zip(*(batch.column(name).to_pylist() for name in self._spec.keys), strict=True)
        numbers: dict[Key, int] = {}
        group = np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)
        order = np.argsort(group, kind="stable")
        whole = _to_pandas(batch.take(pa.array(order)))
        ends = np.cumsum(np.bincount(group, minlength=len(numbers))).tolist()
        for key, start, end in zip(numbers, [0, *ends[:-1]], ends, strict=True):
            yield key, whole.iloc[start:end].reset_index(drop=True)

    def _add(self, result: Any, row: Row, index: int) -> None:
        import pandas as pd

        if not isinstance(result, pd.DataFrame):
            raise self._misfit(f"made {type(result).__name__} instead of a DataFrame", row, index)
        schema = self._spec.output_schema
        names = [str(name) for name in result.columns]
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
        if not made:
            return []
        import pandas as pd

        try:
            frame = pd.concat([result for result, _ in made], ignore_index=True) if len(made) > 1 else made[0][0]
            return [(0, self._to_batch(frame))]
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            return [(0, self._to_batch_or_say(result, origin(index), index)) for result, index in made]

    def _to_batch(self, frame: Any) -> pa.RecordBatch:
        schema = self._spec.output_schema
        batch = pa.RecordBatch.from_pandas(_localised(frame, schema), schema, preserve_index=False)
        for field, column in zip(schema, batch.columns, strict=True):
            if column.null_count and not field.nullable:
                raise ValueError(f"null for column {field.name!r}, which is declared not null")
        return pa.RecordBatch.from_arrays(batch.columns, schema=schema)

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
