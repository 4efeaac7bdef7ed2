"""What the operators of user logic have in common: keyed object states and timers, their snapshots, and event time."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow as pa

from cutwater.data.time import MIN_WATERMARK
from cutwater.errors import StorageError
from cutwater.operators.base import Context, Operator, Outputs
from cutwater.operators.group_watermarks import WATERMARK, GroupWatermarks
from cutwater.operators.process.states import VALUE, KeyedState
from cutwater.state.backend import StateBackend
from cutwater.state.keys import hash_keys, key_groups
from cutwater.state.objects.segments import FrozenObjectStates, FrozenPart, as_written, object_rows, restore_objects
from cutwater.state.objects.timers import (
    EVENT,
    PREFIX,
    PROCESSING,
    Key,
    TimerDomain,
    Timers,
    timer_rows,
    timers_segment,
)
from cutwater.state.segments import Frozen, Segment

TIME = pa.field("__time", pa.int64())
"""Column of the timers' segments."""

TIMERS_PER_SLICE = 128
KEYS_PER_CLEANUP = 512


class ObjectOperator(Operator):
    """Keyed states and timers of a subtask, about one key at a time.

    Args:
        keys: the key columns, in the type in which keys are compared.
        states: as declared; the subtask works with fresh ones.
        fires: whether the user's logic takes timers.
        name: of the user's class, for messages.
        handler: its method that takes timers, for messages.
    """

    def __init__(
        self, keys: list[pa.Field], states: Mapping[str, KeyedState], *, fires: bool, name: str, handler: str
    ) -> None:
        self._keys = keys
        self._names = [field.name for field in keys]
        self._states = {name: state.fresh() for name, state in states.items()}
        self._expiring = [state for state in self._states.values() if state.expires]
        self._timers: dict[TimerDomain, Timers] = {EVENT: Timers(), PROCESSING: Timers()}
        self._fires, self._user, self._handler = fires, name, handler
        self._firing = False  # event-time timers of the current watermark are left
        self._patience = 0

    def open(self, ctx: Context) -> None:
        super().open(ctx)
        for timers in self._timers.values():
            timers.by_key = ctx.repeatable
        self._watermarks = GroupWatermarks(ctx.key_groups, ctx.max_parallelism)
        self._backend = StateBackend(ctx, len(self._states))
        layouts = [state.layout for state in self._states.values()]
        self._records = self._backend.records([field.type for field in self._keys], layouts)
        for place, state in enumerate(self._states.values()):
            state.open(self._records, place, ctx.processing_time_ms)
        self._track()

    def _track(self, *, restored: bool = False) -> None:
        if self.ctx.incremental:
            for table in (*(state.objects for state in self._states.values()), *self._timers.values()):
                table.track(restored=restored)

    def close(self) -> None:
        self._backend.close()

    @abstractmethod
    def _fire(self, domain: TimerDomain, until: int) -> Outputs:
        """Call the user's logic with a slice of the timers that are due."""

    @abstractmethod
    def _watermark_rose(self) -> None:
        """The user's logic is to see another watermark."""

    def _watermarks_of(self, batch: pa.RecordBatch, keys: Sequence[str]) -> list[int]:
        groups = key_groups(hash_keys([batch.column(k) for k in keys]), self.ctx.max_parallelism)
        return self._watermarks.of(groups).tolist()

    def _watermark_of_key(self, key: tuple[Hashable, ...]) -> int:
        if not self._watermarks.differ:
            return self._watermarks.current
        columns = [pa.array([value], field.type) for value, field in zip(key, self._keys, strict=True)]
        batch = pa.RecordBatch.from_arrays(columns, schema=pa.schema(self._keys))
        return self._watermarks_of(batch, self._names)[0]

    # ----------------------------------------------------------------------------------------------------- timers

    def on_watermark(self, watermark: int) -> Outputs:
        if not self._watermarks.advance(watermark):
            return []
        self._watermark_rose()
        self._patience = 100_000 + 1000 * len(self._timers[EVENT])
        return self.resume()

    @property
    def pending(self) -> bool:
        return self._firing

    def resume(self) -> Outputs:
        outputs = self._fire(EVENT, self._watermarks.current)
        first = self._timers[EVENT].next_time
        self._firing = first is not None and first <= self._watermarks.current
        return outputs

    @property
    def next_processing_time_ms(self) -> int | None:
        first = self._timers[PROCESSING].next_time
        for state in self._expiring:
            cleanup = state.next_cleanup_ms
            if cleanup is not None and (first is None or cleanup < first):
                first = cleanup
        return first

    @property
    def timers_pending(self) -> bool:
        return len(self._timers[PROCESSING]) > 0

    def on_processing_time(self, now_ms: int) -> Outputs:
        for state in self._expiring:
            state.clean_up(now_ms, KEYS_PER_CLEANUP)
        return self._fire(PROCESSING, now_ms)

    # -------------------------------------------------------------------------------------------------- snapshots

    def freeze(self, checkpoint_id: int) -> Frozen:
        groups = self.ctx.max_parallelism
        parts: list[FrozenPart] = []
        for name, state in self._states.items():
            rows = partial(_stored_rows, state)
            parts.append(
                FrozenPart(name, self._keys, _value_field(state), state.objects.freeze(checkpoint_id), rows, groups)
            )
        if self._fires:
            for domain, timers in self._timers.items():
                times = timers.freeze(checkpoint_id)
                parts.append(
                    FrozenPart(timers_segment(domain), self._keys, TIME, times, timer_rows, groups, several=True)
                )
        more = self._more_parts()
        if (parts or more) and self._watermarks.current > MIN_WATERMARK:
            marks = replace(self._watermarks.segment(), name=PREFIX + WATERMARK)
            more.append(lambda: [marks])
        return FrozenObjectStates(parts, more)

    def _more_parts(self) -> list[Callable[[], Iterable[Segment]]]:
        """What else goes into a snapshot, always whole: under each name, the first segment is a base."""
        return []

    def _more_names(self) -> Collection[str]:
        """Names of the segments of ``_more_parts``."""
        return ()

    def restore(self, segments: Iterable[Segment]) -> None:
        owned = self.ctx.key_groups
        found, known = restore_objects(self._states, segments, self._keys, VALUE, owned)
        for domain, timers in self._timers.items():
            timers.restore(object_rows(found.get(timers_segment(domain), ()), self._keys, TIME, owned))
            if len(timers) and not self._fires:
                raise StorageError(
                    f"the snapshot holds {len(timers)} {domain}-time timers, and {self._user} "
                    f"has no {self._handler} any more",
                    hint=f"Give it its {self._handler} back, or give the step a new id to begin empty.",
                )
        for segment in found.get(PREFIX + WATERMARK, ()):
            self._watermarks.restore(segment)
        self._watermarks.restored()
        self._watermark_rose()
        self._track(restored=known and self._as_written(found))
        self._restore_more(found)

    def _as_written(self, found: Mapping[str, list[Segment]]) -> bool:
        """Whether this program would have written such segments: else its first checkpoint is whole.

        A chain would keep what belongs to a state that is no more, and types that were others.
        """
        values = {name: _value_field(state) for name, state in self._states.items()}
        if self._fires:
            values |= {timers_segment(domain): TIME for domain in self._timers}
        others = {PREFIX + WATERMARK, *self._more_names()}
        return found.keys() <= values.keys() | others and all(
            as_written(found.get(name, ()), self._keys, value) for name, value in values.items()
        )

    def _restore_more(self, segments: Mapping[str, list[Segment]]) -> None:
        """Take back what ``_more_parts`` gave; segments by name."""


def _value_field(state: KeyedState) -> pa.Field:
    return pa.field(VALUE, state.stored_type)


def _stored_rows(state: KeyedState, values: Iterable[tuple[Key, Any]]) -> Iterator[tuple[Key, Any]]:
    return ((key, state.stored(value)) for key, value in values)
