"""The cut world is worth its name only if it sees bugs: each of these must be caught."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import pytest
from cut_graphs import Graph, random_dag, random_loops
from cut_world import Violation, World

from cutwater.errors import InvariantError
from cutwater.protocol import messages as m
from cutwater.protocol.coordinator import CheckpointCoordinator
from cutwater.protocol.rows import PROTOCOLS
from cutwater.protocol.subtask import SubtaskMachine


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


class PublishesEarly(CheckpointCoordinator):
    def _on_ack(self, event):
        self._subtasks, everybody = frozenset(list(self._subtasks)[:-1]), self._subtasks
        super()._on_ack(event)
        self._subtasks = everybody

    def validate(self) -> None:
        pass


class TellsBeforePublishing(CheckpointCoordinator):
    def _publish_next(self) -> None:
        before = len(self._effects)
        super()._publish_next()
        for effect in self._effects[before:]:
            self._effects.append(m.NotifyComplete(effect.checkpoint_id, effect.kind, True))


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
    "publishes without the last acknowledgement": (random_dag, {"coordinator": PublishesEarly}),
    "notifies before it publishes": (random_dag, {"coordinator": TellsBeforePublishing}),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_caught(name):
    graphs, options = MUTANTS[name]
    for seed in range(60):
        graph: Graph = graphs(random.Random(seed))
        try:
            World(graph, seed, **options).run(8_000)
        except (Violation, InvariantError):
            return
    pytest.fail("60 runs, and nobody noticed")
