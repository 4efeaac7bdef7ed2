"""Mutants of how waves pass: overtaking and recording in the machine, event time in loops, probes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from cutwater.data.time import MAX_WATERMARK
from cutwater.protocol import messages as m
from cutwater.protocol.checkpoint.loops import LoopEffect, LoopEvent, LoopMonitor, WaveCompleted
from cutwater.protocol.subtask.machine import SubtaskMachine
from cutwater.protocol.subtask.watermarks import WatermarkMerger

if TYPE_CHECKING:
    from cutwater.sim.world.world import World


class _BroadcastsFirst(SubtaskMachine):
    """Barriers leave before the state is frozen."""

    def handle(self, event: m.Event) -> list[m.Effect]:
        return sorted(super().handle(event), key=lambda effect: not isinstance(effect, m.BroadcastBarrier))


class _LosesTheReceiversQueue(SubtaskMachine):
    """What the first barrier overtook at the receiver is in no log."""

    def _freeze(self, snapshot: Any, first: Any = None) -> list[m.Effect]:
        return super()._freeze(snapshot)


class _RecordsOnlyBackEdges(SubtaskMachine):
    """Frozen early, but the other inputs are not recorded."""

    def _to_record(self, snapshot: Any) -> list[Any]:
        return [input for input in self._back_edges if input not in snapshot.arrived]

    def _close_log(self, snapshot: Any, event: Any) -> list[m.Effect]:
        return super()._close_log(snapshot, event) if event.input in snapshot.logs else []


class _StopsRecordingAtTheSwitch(SubtaskMachine):
    """Blocked inputs are let go, the others are taken for empty."""

    def _switch(self, snapshot: Any, barrier: Any = None) -> list[m.Effect]:
        if not snapshot.frozen:
            snapshot.arrived |= set(self._inputs) - snapshot.waiting
        return super()._switch(snapshot, barrier)

    def _arrive(self, snapshot: Any, event: m.BarrierTaken) -> list[m.Effect]:
        return [] if event.input in snapshot.arrived else super()._arrive(snapshot, event)

    def validate(self) -> None:
        """The invariant would tell; here the cut has to."""


class _HoldsNothing(WatermarkMerger):
    """What comes into a loop passes at once (W3)."""

    def update(self, input: Any, watermark: int, idle: bool) -> int | None:
        risen = super().update(input, watermark, idle)
        return self.let_pass(self._candidate) if self._back_edges else risen


class _ReleasesTheNewest(WatermarkMerger):
    """What is held now passes, not what was held at the wave."""

    def passing(self, checkpoint_id: int, limit: int = MAX_WATERMARK) -> int:
        return self._candidate


class _KnowsOneWayIn(WatermarkMerger):
    """Rows come into the loop elsewhere, too, and that is forgotten."""

    def passing(self, checkpoint_id: int, limit: int = MAX_WATERMARK) -> int:
        return super().passing(checkpoint_id)


class _AsksOneSubtask(LoopMonitor):
    """The first subtask of a loop stands for all of them."""

    def handle(self, event: LoopEvent) -> list[LoopEffect]:
        if not isinstance(event, WaveCompleted):
            return super().handle(event)
        whole = self._loops
        self._loops = {loop: frozenset([min(subtasks, key=str)]) for loop, subtasks in whole.items()}
        effects = super().handle(event)
        self._loops = whole
        return effects


def _machine(mutant: type[SubtaskMachine]) -> Callable[[World], None]:
    def prepare(world: World) -> None:
        world.machine_class = mutant

    return prepare


def _merger(mutant: type[WatermarkMerger]) -> Callable[[World], None]:
    def prepare(world: World) -> None:
        world.merger_class = mutant

    return prepare


def _monitor(mutant: type[LoopMonitor]) -> Callable[[World], None]:
    def prepare(world: World) -> None:
        world.monitor_class = mutant
        world.driver.core = world.driver.make_core()

    return prepare


def _each(name: str, mutant: type[SubtaskMachine], *protocols: str) -> Iterable[tuple[Any, ...]]:
    return ((f"{name}, {p}", "shuffle", p, {}, _machine(mutant)) for p in protocols)


MUTANTS_OF_WAVES: tuple[tuple[str, str, str, Mapping[str, Any], Callable[[World], None]], ...] = (
    ("broadcasts before it freezes", "four", "unaligned", {}, _machine(_BroadcastsFirst)),
    *_each("loses what was overtaken at the receiver", _LosesTheReceiversQueue, "unaligned", "synchronous"),
    *_each("records only back-edges", _RecordsOnlyBackEdges, "chandy_lamport", "unaligned"),
    ("stops recording at the switch", "shuffle", "unaligned", {}, _machine(_StopsRecordingAtTheSwitch)),
    ("holds no watermark (W3)", "self_loop", "aligned", {}, _merger(_HoldsNothing)),
    ("releases the newest watermark (W3)", "two_heads", "aligned", {}, _merger(_ReleasesTheNewest)),
    ("knows one way into a loop (W3)", "irreducible", "synchronous", {}, _merger(_KnowsOneWayIn)),
    ("asks one subtask of a loop (C6)", "two_heads", "none", {}, _monitor(_AsksOneSubtask)),
)
"""Name, world, protocol, settings, and how the world is prepared."""
