"""The core without time: machines that can be copied, compared, and asked again for nothing.

The machines of the core are deterministic and hold all their state, so that what one does on an event depends on
nothing but that state.  The explorer meets the same state of a machine in thousands of global states: ``Memo`` numbers
the states of machines and works every pair of state and event out once.  A global state then holds numbers instead of
machines; it is copied and compared quickly, and two global states are equal exactly when everything in them is.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Hashable
from enum import Enum
from functools import cache
from typing import Any

from cutwater.config import JobConfig
from cutwater.protocol.checkpoint.coordinator import CheckpointCoordinator
from cutwater.protocol.protocols import ProtocolSpec
from cutwater.protocol.snapshot_algorithms import ChandyLamport, LaiYang, LaiYangMachine
from cutwater.protocol.subtask.machine import SubtaskMachine

_NOT_STATE = frozenset(
    {"_events", "block_version", "unblocked", "name", "protocol", "_settings", "_now_ms"}  # stories, names, constants
    | {"_pause_ms", "_not_before_ms"}  # how long a probe waits: in a world without time it may come whenever it is due
)
_ORDERED = frozenset({"_blocked", "_snapshots", "_pending"})
_INNER = (SubtaskMachine, LaiYangMachine, ChandyLamport, LaiYang)
"""Classes that a machine may be made of."""


def new_coordinator(
    kind: type[CheckpointCoordinator], row: ProtocolSpec, tasks: int, sources: frozenset[int]
) -> CheckpointCoordinator:
    """A coordinator that acts on requests only; two checkpoints at once where the protocol allows it."""
    alone = row.switches or row.halts
    settings = JobConfig(
        protocol=row.name,  # type: ignore[arg-type]
        interval_ms=1e12,
        timeout_ms=1000.0,
        tolerable_failed=1000,
        max_concurrent=1 if alone else 2,
        aligned_timeout_ms=1.0,
    )
    return kind(settings, frozenset(range(tasks)), sources, 0)


class Memo:
    """The states of machines by number, and what each does on each event.

    Every state is validated once, when it gets its number.

    >>> from cutwater.protocol import messages as m
    >>> from cutwater.protocol.protocols import PROTOCOLS
    >>> memo = Memo()
    >>> first = memo.number("sum 0", SubtaskMachine("sum 0", ["a", "b"], protocol=PROTOCOLS["aligned"]))
    >>> barrier = memo.event(m.BarrierTaken("a", 1))
    >>> after, effects = memo.handle(first, barrier)
    >>> effects, memo.handle(first, barrier) == (after, effects), first == after
    ((Block(input='a'),), True, False)
    """

    def __init__(self) -> None:
        self.cores: list[Any] = []
        """Machines by number: to look at only."""
        self.events: list[Any] = []
        self._owners: list[Hashable] = []
        self._numbers: dict[Hashable, int] = {}
        self._event_numbers: dict[Hashable, int] = {}
        self._after: dict[tuple[int, int], tuple[int, tuple[Any, ...]]] = {}

    def number(self, owner: Hashable, core: Any) -> int:
        """The number of a machine in its present state.  Equal states of two owners have two numbers.

        Raises:
            InvariantError: the state is new and breaks an invariant.
        """
        key = owner, canonical(core)
        number = self._numbers.get(key)
        if number is None:
            if hasattr(core, "validate"):
                core.validate()
            number = self._numbers[key] = len(self.cores)
            self.cores.append(core)
            self._owners.append(owner)
        return number

    def event(self, event: Hashable) -> int:
        """The number of an event."""
        number = self._event_numbers.get(event)
        if number is None:
            number = self._event_numbers[event] = len(self.events)
            self.events.append(event)
        return number

    def handle(self, number: int, event: int) -> tuple[int, tuple[Any, ...]]:
        """The number of the state after an event, and the effects.

        Raises:
            InvariantError: the event is illegal in that state, or leads to one that breaks an invariant.
        """
        found = self._after.get((number, event))
        if found is None:
            core = clone(self.cores[number])
            effects = tuple(core.handle(self.events[event]))
            found = self._after[number, event] = self.number(self._owners[number], core), effects
        return found


def clone(core: Any) -> Any:
    """A copy that can go another way.

    >>> from cutwater.protocol import messages as m
    >>> from cutwater.protocol.protocols import PROTOCOLS
    >>> first = SubtaskMachine("sum 0", ["a", "b"], protocol=PROTOCOLS["aligned"])
    >>> second = clone(first)
    >>> second.handle(m.BarrierTaken("a", 1)), canonical(first) == canonical(second), first.blocked
    ([Block(input='a')], False, ())
    """
    memo: dict[int, Any] = {}
    new = object.__new__(type(core))
    for name, value in core.__dict__.items():
        new.__dict__[name] = deque(maxlen=16) if name == "_events" else _copy(value, memo)
    return new


@cache
def _fields(kind: type) -> tuple[str, ...]:
    """Of a dataclass that changes; nothing of anything else."""
    parameters: Any = getattr(kind, "__dataclass_params__", None)
    return () if parameters is None or parameters.frozen else tuple(f.name for f in dataclasses.fields(kind))


def _copy(value: Any, memo: dict[int, Any]) -> Any:
    kind = type(value)
    if kind is dict:
        return {k: _copy(v, memo) for k, v in value.items()} if value else {}
    if kind is set:
        return set(value)
    if kind is list:
        return [_copy(v, memo) for v in value]
    if kind is deque:
        return deque(value, value.maxlen)
    if kind in _INNER:
        return clone(value)
    fields = _fields(kind)
    if not fields:
        return value
    known = memo.get(id(value))
    if known is None:
        known = memo[id(value)] = object.__new__(kind)
        for name in fields:
            setattr(known, name, _copy(getattr(value, name), memo))
    return known


def canonical(core: Any) -> Hashable:
    """Everything that decides what it does next; the same for equal states however they were reached."""
    return tuple(_plain(name, v) for name, v in core.__dict__.items() if name not in _NOT_STATE)


def _plain(name: str, value: Any) -> Hashable:
    kind = type(value)
    if kind is dict:
        items = [(k, _plain("", v)) for k, v in value.items()]
        return tuple(items) if name in _ORDERED or len(items) < 2 else tuple(sorted(items, key=_by_name))
    if kind is set:
        return frozenset(value)
    if kind is list or kind is deque:
        return tuple(_plain("", v) for v in value)
    if kind in _INNER:
        return canonical(value)
    fields = _fields(kind)
    if fields:
        return tuple(_plain("", getattr(value, field)) for field in fields)
    return value.name if isinstance(value, Enum) else value


def _by_name(item: tuple[Any, Any]) -> str:
    return str(item[0])
