"""A small job without time: every step that could happen next is an action, and a state can be copied and compared."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from enum import Enum
from typing import Any, NamedTuple

from cutwater.config import JobConfig
from cutwater.protocol.coordinator import CheckpointCoordinator
from cutwater.protocol.pending import PendingCheckpoint
from cutwater.protocol.rows import ProtocolRow
from cutwater.protocol.stages import Snapshot
from cutwater.protocol.subtask import SubtaskMachine

__all__ = ["Cut", "canonical", "clone", "new_coordinator"]

_PARTS = (Snapshot, PendingCheckpoint)
_NOT_STATE = frozenset({"_events", "block_version", "unblocked", "name", "protocol", "_settings", "_now_ms"})
_ORDERED = frozenset({"_blocked", "_snapshots", "_pending"})


class Cut(NamedTuple):
    """A subtask's part of a snapshot."""

    task: int
    attempt: int
    position: int
    absorbed: tuple[int, ...]
    ins: tuple[tuple[int, int], ...]
    outs: tuple[tuple[int, int], ...]
    ended: frozenset[int]
    has_ended: bool


def new_coordinator(protocol: str, row: ProtocolRow, tasks: int, sources: frozenset[int]) -> CheckpointCoordinator:
    """A coordinator that acts on requests only."""
    alone = row.switches or row.halts
    settings = JobConfig(
        protocol=protocol,  # type: ignore[arg-type]
        interval_ms=1e12,
        timeout_ms=1000.0,
        tolerable_failed=1000,
        max_concurrent=1 if alone else 2,
        aligned_timeout_ms=1.0,
    )
    return CheckpointCoordinator(settings, frozenset(range(tasks)), sources, 0)


_Core = SubtaskMachine | CheckpointCoordinator


def clone(core: Any) -> Any:
    """A copy that can go another way.

    >>> from cutwater.protocol import messages as m
    >>> from cutwater.protocol.rows import PROTOCOLS
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
    if kind in _PARTS:
        known = memo.get(id(value))
        if known is None:
            known = memo[id(value)] = object.__new__(kind)
            for name in kind.__slots__:
                setattr(known, name, _copy(getattr(value, name), memo))
        return known
    return value


def canonical(core: _Core) -> Hashable:
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
    if kind in _PARTS:
        return tuple(_plain("", getattr(value, slot)) for slot in kind.__slots__)
    return value.name if isinstance(value, Enum) else value


def _by_name(item: tuple[Any, Any]) -> str:
    return str(item[0])
