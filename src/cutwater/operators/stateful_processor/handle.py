"""The handle that a ``StatefulProcessor`` gets in ``init``: states, and timers of the current key.

``init`` runs once when the flow is built, to learn which states there are, and once in each subtask.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from cutwater.errors import BuildError, UserCodeError
from cutwater.operators.process.states import KeyedState
from cutwater.operators.stateful_processor.spark_types import SparkSchema, TimeMode, arrow_schema
from cutwater.operators.stateful_processor.states import (
    HostedList,
    HostedMap,
    HostedState,
    HostedValue,
    StateDeclaration,
)
from cutwater.state.objects.records import Records
from cutwater.state.objects.timers import PREFIX, Timers
from cutwater.state.objects.ttl import TimeToLive

_MAX_MS = 2**63 - 1
_INIT = "Ask for it in init(self, handle) and keep it in self."


class _NoKeyYet(tuple[Hashable, ...]):
    """Stands for the key while ``init`` runs."""

    def __hash__(self) -> int:
        raise UserCodeError(
            "init reads or writes a state, and there is no key yet",
            hint="States belong to keys: use them in handleInputRows.",
        )


_NO_KEY_YET = _NoKeyYet()


class Handle:
    """``pyspark.sql.streaming.StatefulProcessorHandle``.

    Args:
        user: name of the user's class, for messages.
        mode: which time there is.
        states: of the subtask, by name; ``None`` while the flow is built.
        records: of the subtask's states.
        timers: of the subtask, in the unit of ``mode``.
    """

    def __init__(
        self,
        user: str,
        mode: TimeMode,
        states: Mapping[str, KeyedState] | None = None,
        records: Records | None = None,
        timers: Timers | None = None,
    ) -> None:
        self._user, self._mode, self._states = user, mode, states
        self._records = records
        if records is not None:
            records.unbind(_NO_KEY_YET)
        self._timers = Timers() if timers is None else timers
        self._hosted: dict[str, HostedState] = {}
        self.declared: dict[str, StateDeclaration] = {}
        self.deleted: set[str] = set()
        self.running = False
        """Init is over."""
        self.firing_ms: int | None = None
        """The timer that is being handled; it goes when that is over."""
        self.at_end = False
        """The bounded input has ended: timers are no longer taken."""
        self.watermark_ms = 0
        self.ignored_timers = 0

    # ----------------------------------------------------------------------------------------------------- states

    def getValueState(self, stateName: str, schema: SparkSchema, ttlDurationMs: int | None = None) -> HostedValue:
        made = self._declare(StateDeclaration("value", stateName, arrow_schema(schema), None, ttlDurationMs))
        assert isinstance(made, HostedValue)
        return made

    def getListState(self, stateName: str, schema: SparkSchema, ttlDurationMs: int | None = None) -> HostedList:
        made = self._declare(StateDeclaration("list", stateName, arrow_schema(schema), None, ttlDurationMs))
        assert isinstance(made, HostedList)
        return made

    def getMapState(
        self,
        stateName: str,
        userKeySchema: SparkSchema,
        valueSchema: SparkSchema,
        ttlDurationMs: int | None = None,
    ) -> HostedMap:
        key, value = arrow_schema(userKeySchema), arrow_schema(valueSchema)
        made = self._declare(StateDeclaration("map", stateName, value, key, ttlDurationMs))
        assert isinstance(made, HostedMap)
        return made

    def deleteIfExists(self, stateName: str) -> None:
        """The state goes, for all keys: what a snapshot of an earlier version holds of it is not restored."""
        self._require_init(f"deletes state {stateName!r}")
        self.deleted.add(stateName)
        self.declared.pop(stateName, None)
        self._hosted.pop(stateName, None)

    def _declare(self, asked: StateDeclaration) -> HostedState:
        name = asked.name
        self._require_init(f"asks for state {name!r}")
        before = self.declared.get(name)
        if before is not None:
            if before != asked:
                raise BuildError(f"{self._user}.init asks for state {name!r} twice, in two ways")
            return self._hosted[name]
        self._check(asked)
        if self._states is None:
            state = asked.make()
            state.unbind(_NO_KEY_YET)
        else:
            found = self._states.get(name)
            if found is None or found.stored_type != asked.make().stored_type:
                raise UserCodeError(
                    f"{self._user}.init asks for state {name!r} in the worker, and did not, or not so, when the flow "
                    "was built",
                    hint="Which states there are may not depend on where init runs.",
                )
            state = found
        self.deleted.discard(name)
        self.declared[name] = asked
        self._hosted[name] = hosted = asked.host(state)
        return hosted

    def _check(self, asked: StateDeclaration) -> None:
        name: Any = asked.name
        if not isinstance(name, str) or not name or name.startswith(PREFIX):
            raise BuildError(f"{self._user}.init: {name!r} cannot be the name of a state", hint="Write 'count'.")
        if len(asked.schema) == 0 or (asked.key_schema is not None and len(asked.key_schema) == 0):
            raise BuildError(f"{self._user}.init: the schema of state {name!r} has no columns")
        if asked.ttl is None:
            return
        if self._mode is not TimeMode.PROCESSING:
            raise BuildError(
                f"{self._user}.init: state {name!r} has a time to live, and the time mode is {self._mode.value}",
                hint="A time to live goes by the clock: write time_mode='ProcessingTime'.",
            )
        TimeToLive(asked.ttl)

    def _require_init(self, what: str) -> None:
        if self.running:
            raise UserCodeError(f"{self._user} {what} outside init", hint=_INIT)

    # ----------------------------------------------------------------------------------------------------- timers

    def registerTimer(self, expiryTimestampMs: int) -> None:
        time = self._time(expiryTimestampMs)
        if self.at_end:
            self.ignored_timers += 1
            return
        if self._mode is TimeMode.EVENT and time <= self.watermark_ms:
            raise UserCodeError(
                f"{self._user} registers a timer for {time} ms, which is not after the watermark "
                f"({self.watermark_ms} ms)",
                hint="Register it for a time after timerValues.getCurrentWatermarkInMs().",
            )
        if time != self.firing_ms:
            self._timers.register(self._key, time * self._mode.unit)

    def deleteTimer(self, expiryTimestampMs: int) -> None:
        time = self._time(expiryTimestampMs)
        if time == self.firing_ms:
            self.firing_ms = None
        self._timers.delete(self._key, time * self._mode.unit)

    def listTimers(self) -> Iterator[int]:
        self._time(0)
        times = [time // self._mode.unit for time in self._timers.times(self._key)]
        return iter(times if self.firing_ms is None else sorted([*times, self.firing_ms]))

    @property
    def _key(self) -> Any:
        assert self._records is not None  # timers are used while rows flow
        return self._records.whole(self._records.key)

    def _time(self, time_ms: Any) -> int:
        if not self.running:
            raise UserCodeError(
                f"{self._user}.init uses a timer, and there is no key yet",
                hint="Timers belong to keys: use them in handleInputRows.",
            )
        if self._mode is TimeMode.NONE:
            raise UserCodeError(
                f"{self._user} uses timers, and the time mode is None",
                hint="Write time_mode='ProcessingTime' or 'EventTime' in transform_with_state(...).",
            )
        try:
            time = operator.index(time_ms)
        except TypeError:
            time = None
        if time is None or isinstance(time_ms, bool) or abs(time) * self._mode.unit > _MAX_MS:
            raise UserCodeError(
                f"{time_ms!r} is not the time of a timer", hint="Give milliseconds since the epoch, a whole number."
            )
        return time
