"""The cut world is worth its name only if it sees bugs: each of these must be caught."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable

import pytest
from cut_graphs import Graph, random_dag, random_loops
from cut_world import Violation, World

from cutwater.errors import InvariantError
from cutwater.protocol import messages as m
from cutwater.protocol.checkpoint import messages as cm
from cutwater.protocol.checkpoint.coordinator import CheckpointCoordinator
from cutwater.protocol.checkpoint.loops import LoopMonitor, LoopReported
from cutwater.protocol.protocols import PROTOCOLS
from cutwater.protocol.subtask.machine import SubtaskMachine
from cutwater.protocol.subtask.stages import StageStep
from cutwater.protocol.subtask.watermarks import WatermarkMerger


def rewriting(change: Callable[[list[m.Effect]], Iterable[m.Effect]]) -> type[SubtaskMachine]:
    class Mutant(SubtaskMachine):
        def handle(self, event: m.Event) -> list[m.Effect]:
            return list(change(super().handle(event)))

    return Mutant


class SkipsAlignment(SubtaskMachine):
    """Takes on from inputs that are ahead."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs | {"protocol": PROTOCOLS["at_least_once"]})


class FreezesOnFirstBarrier(SubtaskMachine):
    def _freeze_is_due(self, snapshot) -> bool:
        return True

    def _close_log(self, snapshot, event):
        return []


class LeavesEarlyBackEdgesOpen(SubtaskMachine):
    """C2 without its second sentence."""

    def _on_barrier(self, event):
        effects = super()._on_barrier(event)
        if event.input in self._back_edges and event.input in self._blocked:
            del self._blocked[event.input]
            effects = [e for e in effects if not isinstance(e, m.Block)]
        return effects

    def validate(self) -> None:
        """The invariant would tell; here the cut has to."""


class RecordsNothing(SubtaskMachine):
    def _on_rows(self, event):
        return []


class ForgetsToForgetAborts(SubtaskMachine):
    def _remember_aborted(self, id: int) -> None:
        pass


class WaitsForSkippedBarriers(SubtaskMachine):
    """A8 without its second sentence."""

    def _give_up_skipped(self, input, id):
        return []


class EndsWithItsInput(SubtaskMachine):
    """A7 broken: what has ended forwards no barrier."""

    def _on_barrier(self, event):
        return [] if event.input in self._ended else super()._on_barrier(event)


class LosesTheReceiversQueue(SubtaskMachine):
    """What the first barrier overtook at the receiver is in no log."""

    def _freeze(self, snapshot, first=None):
        return super()._freeze(snapshot)


class RecordsOnlyBackEdges(SubtaskMachine):
    """Frozen early, but the other inputs are not recorded."""

    def _to_record(self, snapshot):
        return [i for i in self._back_edges if i not in snapshot.arrived]

    def _close_log(self, snapshot, event):
        return super()._close_log(snapshot, event) if event.input in snapshot.logs else []


class DoesNotAskItsOutputs(SubtaskMachine):
    """Acknowledges without what its barriers overtook in the output queues."""

    def _freeze(self, snapshot, first=None):
        effects = super()._freeze(snapshot, first)
        if snapshot.outputs_open:
            snapshot.outputs_open = False
            effects += self._settle(snapshot, StageStep.OUTPUTS_SETTLED)
        return effects

    def _on_overtaken(self, event):
        return []


class StopsRecordingAtTheSwitch(SubtaskMachine):
    """Blocked inputs are let go, the others are taken for empty."""

    def _switch(self, snapshot, barrier=None):
        if not snapshot.frozen:
            snapshot.arrived |= set(self._inputs) - snapshot.waiting
        return super()._switch(snapshot, barrier)

    def _arrive(self, snapshot, event):
        return [] if event.input in snapshot.arrived else super()._arrive(snapshot, event)

    def validate(self) -> None:
        """The cut has to tell."""


class MovesOn(SubtaskMachine):
    """Synchronous in name only."""

    def _freeze(self, snapshot, first=None):
        effects = super()._freeze(snapshot, first)
        self._halted.clear()
        return effects


class CallsEverythingQuiet(SubtaskMachine):
    def _not_quiet(self, snapshot, input):
        pass


class IgnoresWatermarksOnTheirWay(SubtaskMachine):
    def _on_watermark(self, event):
        return []


class EndsWhenQuiet(SubtaskMachine):
    """C6 broken: a quiet loop may go on."""

    def _on_verdict(self, event):
        return super()._on_verdict(m.LoopVerdict(event.checkpoint_id, True, event.watermark))


class HoldsNothing(WatermarkMerger):
    """W3 broken: what came in passes at once."""

    def __init__(self, inputs, back_edges=frozenset(), loop_inputs=frozenset()) -> None:
        super().__init__([i for i in inputs if i not in back_edges])


class ReleasesTheNewest(WatermarkMerger):
    """Not what was held at the wave, but what is held now."""

    def release(self, checkpoint_id, limit=2**63 - 1):
        self._marks[checkpoint_id] = self._candidate
        return super().release(checkpoint_id)


class KnowsOneWayIn(WatermarkMerger):
    """Forgets that rows come into the loop elsewhere, too."""

    def release(self, checkpoint_id, limit=2**63 - 1):
        return super().release(checkpoint_id)


class AsksOneSubtask(LoopMonitor):
    def _completed(self, event):
        whole = self._loops
        self._loops = {loop: frozenset([min(subtasks)]) for loop, subtasks in whole.items()}
        effects = super()._completed(event)
        self._loops = whole
        return effects


class PresumesDrained(LoopMonitor):
    """Does not wait until the last watermark has passed every subtask."""

    def handle(self, event):
        if isinstance(event, LoopReported):
            event = dataclasses.replace(event, report=dataclasses.replace(event.report, drained=True))
        return super().handle(event)


class PublishesProbes(CheckpointCoordinator):
    def _finish_probe(self) -> None:
        pass


class PublishesEarly(CheckpointCoordinator):
    def _on_ack(self, event):
        pending = self._pending[event.checkpoint_id]
        pending.subtasks, everybody = frozenset(list(pending.subtasks)[:-1]), pending.subtasks
        super()._on_ack(event)
        pending.subtasks = everybody

    def validate(self) -> None:
        pass


class TellsBeforePublishing(CheckpointCoordinator):
    def _publish_next(self) -> None:
        before = len(self._effects)
        super()._publish_next()
        for effect in self._effects[before:]:
            self._effects.append(cm.NotifyComplete(effect.checkpoint_id, effect.kind, True))


def broadcast_first(effects):
    return sorted(effects, key=lambda e: not isinstance(e, m.BroadcastBarrier))


def unblock_first(effects):
    return sorted(effects, key=lambda e: not isinstance(e, m.Unblock))


def unblock_backwards(effects):
    rest = [e for e in effects if not isinstance(e, m.Unblock)]
    return [*rest, *reversed([e for e in effects if isinstance(e, m.Unblock)])]


def acknowledge_at_freeze(effects):
    for effect in effects:
        if not isinstance(effect, m.Acknowledge):
            yield effect
        if isinstance(effect, m.Freeze):
            yield m.Acknowledge(effect.checkpoint_id)


def commit_at_acknowledgement(effects):
    for effect in effects:
        yield effect
        if isinstance(effect, m.Acknowledge):
            yield m.Commit(effect.checkpoint_id)


RUNS = 100
UNALIGNED = {"protocol": "unaligned", "switch": 0.5}
SYNCHRONOUS = {"protocol": "synchronous"}
CHANDY_LAMPORT = {"protocol": "chandy_lamport"}
MUTANTS = {
    "skips alignment": (random_dag, {"machine": SkipsAlignment}),
    "freezes on the first barrier": (random_dag, {"machine": FreezesOnFirstBarrier}),
    "broadcasts before it freezes": (random_dag, {"machine": rewriting(broadcast_first)}),
    "unblocks before it broadcasts": (random_dag, {"machine": rewriting(unblock_first)}),
    "unblocks in the wrong order": (random_dag, {"machine": rewriting(unblock_backwards)}),
    "acknowledges what is not durable": (random_dag, {"machine": rewriting(acknowledge_at_freeze)}),
    "commits before the complete notice": (random_dag, {"machine": rewriting(commit_at_acknowledgement)}),
    "forgets which ids were aborted": (random_dag, {"machine": ForgetsToForgetAborts, "timeout_ms": 25.0}),
    "waits for barriers that were skipped": (random_dag, {"machine": WaitsForSkippedBarriers, "timeout_ms": 25.0}),
    "drops barriers of ended inputs": (random_dag, {"machine": EndsWithItsInput}),
    "leaves early back-edges open": (random_loops, {"machine": LeavesEarlyBackEdgesOpen}),
    "records no back-edge": (random_loops, {"machine": RecordsNothing}),
    "records nothing (chandy_lamport)": (random_dag, {"machine": RecordsNothing, **CHANDY_LAMPORT}),
    "records nothing (unaligned)": (random_dag, {"machine": RecordsNothing, **UNALIGNED}),
    "loses the receiver's queue (unaligned)": (random_dag, {"machine": LosesTheReceiversQueue, **UNALIGNED}),
    "loses the receiver's queue (synchronous)": (random_dag, {"machine": LosesTheReceiversQueue, **SYNCHRONOUS}),
    "does not ask its outputs (unaligned)": (random_dag, {"machine": DoesNotAskItsOutputs, **UNALIGNED}),
    "does not ask its outputs (synchronous)": (random_dag, {"machine": DoesNotAskItsOutputs, **SYNCHRONOUS}),
    "records only back-edges (chandy_lamport)": (random_dag, {"machine": RecordsOnlyBackEdges, **CHANDY_LAMPORT}),
    "records only back-edges (unaligned)": (random_dag, {"machine": RecordsOnlyBackEdges, **UNALIGNED}),
    "stops recording at the switch": (random_dag, {"machine": StopsRecordingAtTheSwitch, **UNALIGNED}),
    "moves on while everything stands still": (random_dag, {"machine": MovesOn, **SYNCHRONOUS}),
    "calls every loop quiet": (random_loops, {"machine": CallsEverythingQuiet}),
    "calls every loop quiet (none)": (random_loops, {"machine": CallsEverythingQuiet, "protocol": "none"}),
    "ends a loop that is merely quiet": (random_loops, {"machine": EndsWhenQuiet}),
    "holds no watermark": (random_loops, {"merger": HoldsNothing}),
    "releases the newest watermark": (random_loops, {"merger": ReleasesTheNewest}),
    "knows one way into the loop": (random_loops, {"merger": KnowsOneWayIn, **SYNCHRONOUS, "timeout_ms": 25.0}),
    "asks one subtask of a loop": (random_loops, {"monitor": AsksOneSubtask}),
    "presumes that the last watermark passed": (random_loops, {"monitor": PresumesDrained}),
    "ignores watermarks on their way": (random_loops, {"machine": IgnoresWatermarksOnTheirWay, **CHANDY_LAMPORT}),
    "publishes probes": (random_loops, {"coordinator": PublishesProbes, "protocol": "none"}),
    "publishes without the last acknowledgement": (random_dag, {"coordinator": PublishesEarly}),
    "notifies before it publishes": (random_dag, {"coordinator": TellsBeforePublishing}),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_caught(name):
    graphs, options = MUTANTS[name]
    for seed in range(RUNS):
        graph: Graph = graphs(random.Random(seed))
        try:
            World(graph, seed, **options).run(8_000)
        except (Violation, InvariantError):
            return
    pytest.fail(f"{RUNS} runs, and nobody noticed")


@pytest.mark.parametrize("graphs", [random_dag, random_loops])
@pytest.mark.parametrize(
    "options", [{}, {"timeout_ms": 25.0}, {"protocol": "none"}, UNALIGNED, SYNCHRONOUS, CHANDY_LAMPORT], ids=str
)
def test_without_a_planted_bug_nobody_complains(graphs, options):
    """The same runs, so that it is the bug that is caught; too short a timeout may keep a loop from ending."""
    if options.get("timeout_ms") and graphs is random_loops:
        options = {"timeout_ms": 45.0}
    for seed in range(12):
        World(graphs(random.Random(seed)), seed, **options).run(8_000)
