"""Performs the decisions of the core on a state of a small job."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cutwater.protocol import messages as m
from cutwater.protocol.checkpoint import messages as cm
from cutwater.protocol.checkpoint.loops import (
    LoopEvent,
    LoopReported,
    StartProbe,
    WaveCompleted,
    WaveFailed,
)
from cutwater.protocol.protocols import CheckpointKind, FreezeOn
from cutwater.protocol.subtask.host import LoopReport
from cutwater.sim.explorer.world import END, Barrier, Cut, Item, rows_of
from cutwater.sim.world.oracle import Violation
from cutwater.trace import events as e

if TYPE_CHECKING:
    from cutwater.sim.explorer.job import JobState

# ------------------------------------------------------------------------------------------- effects of a subtask


def feed(state: JobState, task: int, event: int, rows: tuple[int, ...] = ()) -> None:
    """Let the machine of a subtask decide, and perform it.  ``rows``: what is in hand, or was overtaken."""
    state.machines[task], effects = state.world.memo.handle(state.machines[task], event)
    answers: list[m.Event] = []
    for effect in effects:
        perform = _PERFORM.get(type(effect))
        if perform is not None:
            answer = perform(state, task, effect, rows)
            if answer is not None:
                answers.append(answer)
    for answer in answers:
        feed(state, task, state.world.memo.event(answer))
    if state.world.budget.eager:
        while state.writes[task]:
            written(state, task)
        while state.acks:
            acknowledge(state, 0)


def written(state: JobState, task: int) -> None:
    """Something is durable."""
    event, *rest = state.writes[task]
    state.writes[task] = tuple(rest)
    feed(state, task, event)


def acknowledge(state: JobState, number: int) -> None:
    """An acknowledgement or a refusal, any of those on their way, reaches the coordinator."""
    event, report = state.acks[number]
    state.acks = (*state.acks[:number], *state.acks[number + 1 :])
    if report is not None:
        watch_loops(state, LoopReported(event.checkpoint_id, event.subtask, report))
    coordinate(state, event)


def _freeze(state: JobState, task: int, effect: m.Freeze, _: object) -> None:
    id, world = effect.checkpoint_id, state.world
    state.writes[task] += (world.memo.event(m.Durable(id)),)
    if effect.probe:
        return
    graph = world.graph
    if state.open[task]:
        state.staged[task] += ((id, state.open[task]),)
        state.open[task] = ()
    state.cuts[task, id] = Cut(
        state.emitted[task],
        tuple((c, state.taken[c]) for c in graph.inputs[task]),
        tuple((c, state.scope.next_row(state, c)) for c in graph.outputs[task]),
        state.staged[task],
        state.scope.choices(task),
        world.row.halts and not effect.savepoint,
    )
    if state.story is not None:
        state.story.append(e.Cut(0.0, graph.names[task], state.attempt, id))


def _broadcast(state: JobState, task: int, effect: m.BroadcastBarrier, _: object) -> m.Event | None:
    id, graph = effect.checkpoint_id, state.world.graph
    found: list[tuple[int, tuple[int, ...]]] = []
    for c in graph.outputs[task]:
        end = state.scope.next_row(state, c)
        left = rows_of(state.out[c]) if effect.overtake else ()
        barrier = Barrier(id, effect.final, effect.probe, end, end - len(left), effect.savepoint)
        if state.story is not None and not effect.probe:
            name = graph.channel_names[c]
            state.story.append(e.MarkerSent(0.0, graph.names[task], state.attempt, id, name, end))
        if effect.overtake:
            found.append((c, left))
            state.urgent[c] += (barrier,)
        else:
            state.send(c, barrier)
    if effect.overtake:
        return _overtook(state, task, id, found, keep=not effect.probe)
    if state.world.row.switches and not (graph.outputs[task] and state.world.queued):
        state.post(task, m.BarriersSent(id))
    return None


def _overtake(state: JobState, task: int, effect: m.Overtake, _: object) -> m.Event:
    found: list[tuple[int, tuple[int, ...]]] = []
    for c in state.world.graph.outputs[task]:
        items = state.out[c]
        place = _place(items, effect.checkpoint_id)
        if place is not None:
            left, barrier = rows_of(items[:place]), items[place]
            found.append((c, left))
            state.urgent[c] += (barrier._replace(reach=barrier.position - len(left)),)  # type: ignore[union-attr]
            state.out[c] = (*items[:place], *items[place + 1 :])
    return _overtook(state, task, effect.checkpoint_id, found, keep=True)


def _overtook(state: JobState, task: int, id: int, found: list[tuple[int, tuple[int, ...]]], *, keep: bool) -> m.Event:
    in_loop = state.world.graph.loop_outputs[task]
    for c, rows in found:
        if rows and keep:
            state.logs[id, -1 - c] = rows
    total = sum(len(rows) for _, rows in found)
    return m.RowsOvertaken(id, total, any(rows and c in in_loop for c, rows in found))


def _expedite(state: JobState, task: int, effect: m.Expedite, _: object) -> None:
    c: Any = effect.input
    place = _place(state.inq[c], effect.checkpoint_id)
    if place is not None:
        items = state.inq[c]
        state.inq[c] = (*items[:place], *items[place + 1 :])
        state.urgent[c] += (items[place],)  # type: ignore[operator]


def _watch(state: JobState, task: int, effect: m.WatchAlignment, _: object) -> m.Event | None:
    if state.world.budget.hasty and state.is_idle(task):
        return m.AlignmentTimeout(effect.checkpoint_id)
    state.timers += ((task, effect.checkpoint_id),)
    return None


def _record(state: JobState, task: int, effect: m.Record, rows: tuple[int, ...]) -> None:
    c: Any = effect.input
    for id in effect.checkpoint_ids:
        state.logs[id, c] = (*state.logs.get((id, c), ()), *rows)


def _stop_recording(state: JobState, task: int, effect: m.StopRecording, rows: tuple[int, ...]) -> None:
    if rows:
        _record(state, task, m.Record(effect.input, (effect.checkpoint_id,)), rows)


def _write_logs(state: JobState, task: int, effect: m.WriteLogs, _: object) -> None:
    state.writes[task] += (state.world.memo.event(m.LogsDurable(effect.checkpoint_id)),)


def _acknowledge(state: JobState, task: int, effect: m.Acknowledge, _: object) -> None:
    report = LoopReport(effect.quiet, effect.outside_ended, effect.outside_ended) if state.monitor >= 0 else None
    _tell(state, cm.AckReceived(effect.checkpoint_id, state.attempt, task, None, state.now), report)


def _decline(state: JobState, task: int, effect: m.Decline, _: object) -> None:
    _tell(state, cm.DeclineReceived(effect.checkpoint_id, state.attempt, task, effect.reason, state.now), None)


def _tell(state: JobState, event: cm.AckReceived | cm.DeclineReceived, report: LoopReport | None) -> None:
    """They may overtake each other: kept in one order, whatever order they were sent in."""
    found = (*state.acks, (event, report))
    state.acks = tuple(sorted(found, key=lambda a: (a[0].subtask, a[0].checkpoint_id, type(a[0]).__name__)))


def _forget(state: JobState, task: int, effect: m.Forget, _: object) -> None:
    graph, id = state.world.graph, effect.checkpoint_id
    state.cuts.pop((task, id), None)
    for c in (*graph.inputs[task], *(-1 - c for c in graph.outputs[task])):
        state.logs.pop((id, c), None)


def _commit(state: JobState, task: int, effect: m.Commit, _: object) -> None:
    id = effect.checkpoint_id
    if state.done is None or id > state.done.id:
        raise Violation("early commit", f"{state.world.graph.names[task]} commits checkpoint {id}: not complete")
    state.commit(task, tuple(found for found in state.staged[task] if found[0] <= id), id)
    state.staged[task] = tuple(found for found in state.staged[task] if found[0] > id)


def _end_of_input(state: JobState, task: int, effect: m.EndOfInput, _: object) -> None:
    for c in state.world.graph.outputs[task]:
        state.send(c, END)


_PERFORM: dict[type, Callable[..., m.Event | None]] = {
    m.Freeze: _freeze,
    m.BroadcastBarrier: _broadcast,
    m.Overtake: _overtake,
    m.Expedite: _expedite,
    m.WatchAlignment: _watch,
    m.Record: _record,
    m.StopRecording: _stop_recording,
    m.WriteLogs: _write_logs,
    m.Acknowledge: _acknowledge,
    m.Decline: _decline,
    m.Forget: _forget,
    m.Commit: _commit,
    m.EndOfInput: _end_of_input,
}

# ------------------------------------------------------------------------------------- effects of the coordinator


def coordinate(state: JobState, event: cm.CoordinatorEvent) -> None:
    """Let the coordinator decide, and perform it."""
    memo = state.world.memo
    state.coordinator, effects = memo.handle(state.coordinator, memo.event(event))
    for effect in effects:
        match effect:
            case cm.SendTrigger(checkpoint_id=id, final=final, kind=kind, savepoint=savepoint):
                everybody = state.world.row.freeze_on is FreezeOn.TRIGGER and not savepoint
                for t in state.world.tasks if everybody else state.world.sources:
                    state.post(t, m.Trigger(id, final, kind is CheckpointKind.PROBE, savepoint))
            case cm.Publish(checkpoint_id=id, kind=kind):
                state.publishing = (id, kind.final, kind.commits)
            case cm.NotifyComplete(checkpoint_id=id, commit=commit):
                watch_loops(state, WaveCompleted(id, 0.0))
                _tell_everybody(state, m.CompleteNotice(id, commit))
                _drop(state, id)
            case cm.NotifyAborted(checkpoint_id=id, latest_completed=latest):
                watch_loops(state, WaveFailed(id, 0.0))
                _tell_everybody(state, m.AbortNotice(id, latest))
                _drop(state, id)
            case _:
                pass


def _tell_everybody(state: JobState, event: m.Event) -> None:
    for t in state.world.tasks:
        state.post(t, event)


def watch_loops(state: JobState, event: LoopEvent) -> None:
    """Let the monitor of the loops decide, and perform it."""
    if state.monitor < 0:
        return
    memo = state.world.memo
    state.monitor, effects = memo.handle(state.monitor, memo.event(event))
    for effect in effects:
        if isinstance(effect, StartProbe):
            coordinate(state, cm.RequestProbe(state.now))
        else:
            verdict = m.LoopVerdict(effect.checkpoint_id, effect.ended, effect.watermark)
            for t in sorted(state.world.graph.loop_tasks[effect.loop]):
                state.post(t, verdict)


def _drop(state: JobState, id: int) -> None:
    """Nobody looks at the parts of this checkpoint any more."""
    state.cuts = {k: v for k, v in state.cuts.items() if k[1] != id}
    state.logs = {k: v for k, v in state.logs.items() if k[0] != id}


def _place(items: tuple[Item, ...], id: int) -> int | None:
    return next((n for n, i in enumerate(items) if type(i) is Barrier and i.id == id), None)
