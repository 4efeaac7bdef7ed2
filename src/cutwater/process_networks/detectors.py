"""Detectors: questions about a global snapshot whose answer, once yes, stays yes (CL8).

A detector is a function from a ``GlobalSnapshot`` to a ``Finding``, or ``None``.  If a stable property held when the
snapshot began, the detector finds it; if the detector finds it, it holds when the snapshot has ended.  Of a property
that is not stable, a finding says only that some state on the way *could* have had it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, TypeAlias

import msgspec

from cutwater.plan.cycles import components
from cutwater.process_networks.snapshot import GlobalSnapshot


class Finding(msgspec.Struct, frozen=True):
    """Finding of a detector.

    ``processes``: those concerned; of a deadlock the cycle or knot itself comes first, see ``detail``.
    """

    what: str
    """Name of the property, for example "deadlock"."""
    detail: str
    """For people."""
    processes: tuple[str, ...] = ()


class AllOf(msgspec.Struct, frozen=True):
    """The process is blocked until every one of these has answered (AND-wait)."""

    processes: tuple[str, ...]


class AnyOf(msgspec.Struct, frozen=True):
    """The process is blocked until one of these has answered (OR-wait)."""

    processes: tuple[str, ...]


Waits: TypeAlias = AllOf | AnyOf | None
Detector: TypeAlias = Callable[[GlobalSnapshot], Finding | None]


def terminated(active: Callable[[str, Any], bool] | None = None) -> Detector:
    """The computation has ended: no message in any channel, no timer, and no active process.

    Args:
        active: ``active(name, state)`` for processes that would still do something without being sent a message;
            usually there are none, since processes only react.
    """

    def detect(snapshot: GlobalSnapshot) -> Finding | None:
        if any(part.timers or any(part.logs.values()) for part in snapshot.parts.values()):
            return None
        if active is not None and any(active(name, state) for name, state in snapshot.states()):
            return None
        events = sum(part.events for part in snapshot.parts.values())
        return Finding("terminated", f"all channels are empty after {events} events, and no timer is set")

    return detect


def deadlock(waits: Callable[[str, Any], Waits]) -> Detector:
    """Processes that wait for each other for ever: a cycle of AND-waits, a knot of OR-waits, or a mixture.

    Nobody counts as blocked who has a message in a channel from a process it waits for, or a timer; what is left is
    reduced: whoever waits for free processes only (AND) or for a free one (OR) is free.

    Args:
        waits: ``waits(name, state)`` says whom a process waits for: ``AllOf``, ``AnyOf``, or ``None`` if for nobody.
    """

    def detect(snapshot: GlobalSnapshot) -> Finding | None:
        coming = {(c.source, c.target) for c in snapshot.channels.values() if snapshot.log(c.name)}
        blocked: dict[str, AllOf | AnyOf] = {}
        for name, state in snapshot.states():
            wait = waits(name, state)
            if wait is None or not wait.processes or snapshot.parts[name].timers:
                continue
            left = tuple(p for p in wait.processes if (p, name) not in coming)
            if len(left) == len(wait.processes) or (isinstance(wait, AllOf) and left):
                blocked[name] = type(wait)(left)
        stuck = _reduce(blocked)
        if not stuck:
            return None
        core, shape = _witness(stuck)
        others = tuple(p for p in stuck if p not in core)
        detail = f"{shape} {' -> '.join((*core, core[0]))}"
        if others:
            detail += f"; behind it wait {', '.join(others)}"
        return Finding("deadlock", detail, (*core, *others))

    return detect


def _reduce(blocked: Mapping[str, AllOf | AnyOf]) -> dict[str, AllOf | AnyOf]:
    """Those that can never be freed."""
    stuck = dict(blocked)
    while True:
        free = [
            name
            for name, wait in stuck.items()
            if (
                not any(p in stuck for p in wait.processes)
                if isinstance(wait, AllOf)
                else any(p not in stuck for p in wait.processes)
            )
        ]
        if not free:
            return stuck
        for name in free:
            del stuck[name]


def _witness(stuck: Mapping[str, AllOf | AnyOf]) -> tuple[tuple[str, ...], str]:
    """A group nobody of which waits for anybody outside it; if one AND-cycle is in it, just that."""
    following = {name: [p for p in wait.processes if p in stuck] for name, wait in stuck.items()}
    group = next(g for g in components(following) if all(p in g for name in g for p in following[name]))
    path: list[str] = []
    node = group[0]
    while node not in path and isinstance(stuck[node], AllOf):
        path.append(node)
        node = following[node][0]
    if node in path:
        return tuple(path[path.index(node) :]), "a cycle of processes each of which needs the next:"
    return group, "a knot of processes that wait only for each other:"


def conserved(
    state: Callable[[str, Any], float], message: Callable[[Any], float], total: float, *, tolerance: float = 0.0
) -> Detector:
    """A quantity that processes pass on and never make or destroy has another sum than it should.

    Args:
        state: ``state(name, state)``: how much of it a process holds.
        message: how much of it a message carries.
        total: how much there is.
        tolerance: difference that does not count (sums of floats).
    """

    def detect(snapshot: GlobalSnapshot) -> Finding | None:
        held = sum(state(name, s) for name, s in snapshot.states())
        moving = sum(message(m) for m in snapshot.messages())
        difference = held + moving - total
        if abs(difference) <= tolerance:
            return None
        word = "appeared" if difference > 0 else "lost"
        return Finding(
            "not conserved", f"{abs(difference)} of {total} {word}: {held} in processes, {moving} in channels"
        )

    return detect


def tokens(
    state: Callable[[str, Any], Iterable[Hashable]],
    message: Callable[[Any], Iterable[Hashable]],
    expected: Iterable[Hashable],
) -> Detector:
    """Tokens are lost or doubled.

    Args:
        state: ``state(name, state)``: the tokens that a process holds.
        message: the tokens that a message carries.
        expected: all there should be.
    """
    wanted = Counter(expected)

    def detect(snapshot: GlobalSnapshot) -> Finding | None:
        found: Counter[Hashable] = Counter()
        holders: dict[Hashable, list[str]] = {}
        for name, s in snapshot.states():
            for token in state(name, s):
                found[token] += 1
                holders.setdefault(token, []).append(name)
        for m in snapshot.messages():
            found.update(message(m))
        lost, extra = wanted - found, found - wanted
        if not lost and not extra:
            return None
        said = [f"lost: {', '.join(map(repr, lost.elements()))}"] if lost else []
        said += [f"too many: {', '.join(map(repr, extra.elements()))}"] if extra else []
        return Finding("tokens", "; ".join(said), tuple(dict.fromkeys(p for t in extra for p in holders.get(t, ()))))

    return detect


def holds(predicate: Callable[[GlobalSnapshot], bool], what: str = "predicate") -> Detector:
    """A user's own predicate over the global state.

    Args:
        what: the finding's name.
    """
    return lambda snapshot: Finding(what, f"holds in snapshot {snapshot.id}") if predicate(snapshot) else None
