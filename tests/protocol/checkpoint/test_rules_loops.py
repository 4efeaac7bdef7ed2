"""Rules C6 and W3: probes, what a subtask reports of a wave, verdicts, and watermarks at the heads of loops."""

from __future__ import annotations

import pytest

from cutwater.errors import InvariantError
from cutwater.protocol.checkpoint.loops import (
    FIRST_PAUSE_MS,
    LONGEST_PAUSE_MS,
    LoopMonitor,
    LoopReported,
    ProbeWanted,
    SendVerdict,
    StartProbe,
    WaveCompleted,
    WaveFailed,
)
from cutwater.protocol.checkpoint.messages import Tick
from cutwater.protocol.messages import (
    Acknowledge,
    BarrierTaken,
    Block,
    BroadcastBarrier,
    CompleteNotice,
    Durable,
    EndOfInput,
    EndTaken,
    Freeze,
    LoopVerdict,
    Record,
    ReleaseWatermark,
    RowsOvertaken,
    RowsTaken,
    SourceExhausted,
    Trigger,
    WatermarkTaken,
)
from cutwater.protocol.protocols import PROTOCOLS
from cutwater.protocol.subtask.host import LoopReport
from cutwater.protocol.subtask.machine import SubtaskMachine
from cutwater.protocol.subtask.watermarks import InputTime, WatermarkMerger

MIN, MAX = -(2**63), 2**63 - 1
BACK = frozenset({"back"})


def head(protocol="aligned", **options):
    return SubtaskMachine("head", ["in", "back"], protocol=PROTOCOLS[protocol], back_edges=BACK, **options)


def feed(machine, *events):
    effects = []
    for event in events:
        effects += machine.handle(event)
        machine.validate()
    return effects


# -------------------------------------------------------------------------------------------------------------- probes


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_c6_a_probe_is_a_wave_of_every_row_that_writes_nothing(protocol):
    source = SubtaskMachine("s", [], protocol=PROTOCOLS[protocol])
    overtakes = protocol == "synchronous"
    wave = [Freeze(1, False, probe=True), BroadcastBarrier(1, False, probe=True, overtake=overtakes)]
    assert feed(source, Trigger(1, probe=True)) == wave
    if overtakes:
        feed(source, RowsOvertaken(1, 0))
    assert feed(source, Durable(1)) == [Acknowledge(1)]
    assert feed(source, CompleteNotice(1, commit=False)) == []
    assert not source.pending


def test_c6_a_probe_counts_rows_of_the_loop_without_recording_them():
    machine = head("none")
    assert feed(machine, BarrierTaken("in", 1, probe=True))[:1] == [Freeze(1, False, probe=True)]
    assert machine.recording("back")
    assert feed(machine, RowsTaken("back", 1), Durable(1)) == []
    assert feed(machine, BarrierTaken("back", 1, probe=True)) == [Acknowledge(1, quiet=False)]


def test_c6_a_probe_aligns_in_row_none():
    machine = SubtaskMachine("t", ["a", "b"], protocol=PROTOCOLS["none"])
    assert feed(machine, BarrierTaken("a", 1, probe=True)) == [Block("a")]


def test_c6_a_probe_and_a_stored_checkpoint_may_record_side_by_side():
    machine = head()
    feed(machine, BarrierTaken("in", 1, probe=True), BarrierTaken("in", 2))
    assert feed(machine, RowsTaken("back", 1)) == [Record("back", (2,))]


# ------------------------------------------------------------------------------------------------------------- reports


def test_c6_a_wave_without_rows_is_quiet_and_says_whether_the_outside_had_ended():
    machine = head()
    feed(machine, BarrierTaken("in", 1, probe=True), EndTaken("in"), Durable(1))
    assert feed(machine, BarrierTaken("back", 1, probe=True)) == [Acknowledge(1, quiet=True, outside_ended=False)]
    feed(machine, BarrierTaken("in", 2, probe=True), Durable(2))
    assert feed(machine, BarrierTaken("back", 2, probe=True)) == [Acknowledge(2, quiet=True, outside_ended=True)]


@pytest.mark.parametrize(("event", "quiet"), [(RowsTaken("in", 1), True), (RowsTaken("x", 1), False)])
def test_c6_only_what_moves_inside_the_loop_disturbs_it(event, quiet):
    loop = frozenset({"x", "back"})
    machine = SubtaskMachine(
        "t", ["first", "in", "x", "back"], protocol=PROTOCOLS["chandy_lamport"], back_edges=BACK, loop_inputs=loop
    )
    feed(machine, BarrierTaken("first", 1, probe=True), event, Durable(1))
    barriers = [BarrierTaken(i, 1, probe=True) for i in ("in", "x", "back")]
    assert feed(machine, *barriers) == [Acknowledge(1, quiet=quiet)]


def test_c6_a_watermark_on_its_way_inside_the_loop_disturbs_it():
    inputs = ["first", "in", "x"]
    machine = SubtaskMachine("t", inputs, protocol=PROTOCOLS["chandy_lamport"], loop_inputs=frozenset({"x"}))
    feed(machine, BarrierTaken("first", 1), WatermarkTaken("in"))
    assert feed(machine, WatermarkTaken("x")) == [Record("x", (1,))]
    machine = SubtaskMachine("t", ["x"], protocol=PROTOCOLS["synchronous"], loop_inputs=frozenset({"x"}))
    feed(machine, Trigger(1, probe=True), BarrierTaken("x", 1, probe=True, overtook=0, overtook_time=True), Durable(1))
    assert feed(machine, RowsOvertaken(1, 0)) == [Acknowledge(1, quiet=False, outside_ended=True)]


@pytest.mark.parametrize(("event", "quiet"), [
    (RowsOvertaken(1, 0), True), (RowsOvertaken(1, 5), False), (RowsOvertaken(1, 5, in_loop=False), True),
    (RowsOvertaken(1, 0, in_loop=True), False),
])  # fmt: skip
def test_c6_what_was_overtaken_on_the_way_into_the_loop_disturbs_it(event, quiet):
    machine = SubtaskMachine("t", ["x"], protocol=PROTOCOLS["synchronous"], loop_inputs=frozenset({"x"}))
    feed(machine, Trigger(1, probe=True), BarrierTaken("x", 1, probe=True, overtook=0), Durable(1))
    assert feed(machine, event) == [Acknowledge(1, quiet=quiet, outside_ended=True)]


# ------------------------------------------------------------------------------------------------------------ verdicts


def test_w3_a_quiet_loop_releases_the_watermark_at_its_heads():
    machine = head()
    feed(machine, BarrierTaken("in", 1))
    assert feed(machine, LoopVerdict(1, ended=False, watermark=7)) == [ReleaseWatermark(1, 7)]
    body = SubtaskMachine("body", ["x"], protocol=PROTOCOLS["aligned"], loop_inputs=frozenset({"x"}))
    feed(body, BarrierTaken("x", 1))
    assert feed(body, LoopVerdict(1, ended=True)) == []


def test_c6_an_ended_loop_ends_its_back_edges_and_then_the_head():
    machine = head()
    feed(machine, EndTaken("in"), BarrierTaken("in", 1))
    assert machine.loop_open
    assert feed(machine, LoopVerdict(1, ended=True)) == [ReleaseWatermark(1), EndOfInput()]
    assert not machine.loop_open
    assert feed(machine, LoopVerdict(1, ended=True)) == [ReleaseWatermark(1)]


def test_c6_the_end_of_data_that_comes_round_is_accepted_once():
    machine = head()
    feed(machine, EndTaken("in"), BarrierTaken("in", 1), LoopVerdict(1, ended=True))
    feed(machine, BarrierTaken("back", 1))
    assert feed(machine, EndTaken("back")) == []
    with pytest.raises(InvariantError, match="ended twice"):
        machine.handle(EndTaken("back"))


def test_c6_rows_on_a_back_edge_of_an_ended_loop_are_an_error():
    machine = head()
    feed(machine, EndTaken("in"), BarrierTaken("in", 1), LoopVerdict(1, ended=True))
    with pytest.raises(InvariantError, match="after its end of data"):
        machine.handle(RowsTaken("back", 1))


def test_a_verdict_outside_loops_or_on_an_unknown_wave_is_an_error():
    with pytest.raises(InvariantError, match="no loop"):
        SubtaskMachine("t", ["a"], protocol=PROTOCOLS["aligned"]).handle(LoopVerdict(1, ended=False))
    with pytest.raises(InvariantError, match="no loop"):
        head().handle(LoopVerdict(1, ended=False))
    source = SubtaskMachine("s", [], protocol=PROTOCOLS["none"])
    assert feed(source, SourceExhausted()) == [EndOfInput()]


# --------------------------------------------------------------------------------------------------------- the monitor


def report(quiet=True, outside_ended=True, drained=True, outside=MAX):
    return LoopReport(quiet, outside_ended, drained, InputTime(outside))


def wave(monitor, id, now_ms, **reports):
    for subtask, found in reports.items():
        assert monitor.handle(LoopReported(id, subtask, found)) == []
    return monitor.handle(WaveCompleted(id, now_ms))


def two():
    return LoopMonitor({0: frozenset("ab"), 1: frozenset("c")})


def test_c6_a_head_that_wants_a_probe_gets_one_wave():
    monitor = two()
    assert monitor.handle(ProbeWanted("a", 0.0)) == [StartProbe()]
    assert monitor.handle(ProbeWanted("c", 1.0)) == []
    assert monitor.next_due_ms is None
    with pytest.raises(InvariantError, match="no loop"):
        monitor.handle(ProbeWanted("z", 1.0))


@pytest.mark.parametrize(
    ("a", "b", "verdict"),
    [
        (report(), report(), [SendVerdict(1, 0, True)]),
        (report(), report(quiet=False), []),
        (report(), report(outside_ended=False), [SendVerdict(1, 0, False)]),
        (report(drained=False), report(), [SendVerdict(1, 0, False)]),
    ],
)
def test_c6_a_loop_is_quiet_if_all_say_so_and_has_ended_if_nothing_more_can_come(a, b, verdict):
    assert wave(two(), 1, 0.0, a=a, b=b) == verdict


def test_c6_a_wave_without_all_reports_says_nothing():
    assert wave(two(), 1, 0.0, a=report()) == []
    assert wave(two(), 1, 0.0, a=report(), c=report(), z=report()) == [SendVerdict(1, 1, True)]


def test_w3_the_verdict_goes_as_far_as_all_ways_into_the_loop():
    """Rows that came in at one subtask circulate and reach the heads of all."""
    assert wave(two(), 1, 0.0, a=report(outside=9), b=report(outside=5)) == [SendVerdict(1, 0, True, 5)]
    assert wave(two(), 2, 0.0, a=report(outside=9), b=report()) == [SendVerdict(2, 0, True, 9)]


def test_c6_the_pause_doubles_while_nothing_is_gained_and_begins_anew_after_progress():
    monitor, now, pauses = two(), 0.0, []
    monitor.handle(ProbeWanted("c", now))
    for id in range(1, 10):
        assert wave(monitor, id, now, c=report(quiet=False)) == []
        assert monitor.handle(ProbeWanted("c", now)) == []
        pauses.append(monitor.next_due_ms - now)
        now = monitor.next_due_ms
        assert monitor.handle(Tick(now)) == [StartProbe()]
    assert pauses == [min(FIRST_PAUSE_MS * 2**n, LONGEST_PAUSE_MS) for n in range(9)]
    wave(monitor, 10, now, c=report(drained=False, outside=3))
    monitor.handle(ProbeWanted("c", now))
    assert monitor.next_due_ms == now + FIRST_PAUSE_MS
    monitor.handle(Tick(now + FIRST_PAUSE_MS))
    wave(monitor, 11, now, c=report(drained=False, outside=3))  # quiet again, but no further
    wave(monitor, 12, now, c=report(drained=False, outside=3))
    monitor.handle(ProbeWanted("c", now))
    assert monitor.next_due_ms > now + FIRST_PAUSE_MS


def test_c6_a_failed_wave_is_tried_again_without_being_asked():
    monitor = two()
    monitor.handle(ProbeWanted("a", 0.0))
    assert monitor.handle(WaveFailed(1, 10.0)) == []
    assert monitor.next_due_ms == 10.0 + FIRST_PAUSE_MS
    assert monitor.handle(Tick(15.0)) == [StartProbe()]


def test_a_subtask_lies_in_one_loop():
    with pytest.raises(InvariantError, match="two loops"):
        LoopMonitor({0: frozenset("ab"), 1: frozenset("b")})


# ---------------------------------------------------------------------------------------------------------- watermarks


def merger():
    return WatermarkMerger(["in", "x", "back"], BACK, BACK | {"x"})


def test_w3_the_head_of_a_loop_holds_what_has_risen():
    m = merger()
    assert m.update("in", 5, False) is None
    assert not m.held
    assert m.update("x", 3, False) is None
    assert m.held
    assert m.combined == MIN


def test_w3_what_was_held_at_the_wave_passes_and_no_more():
    m = merger()
    m.update("in", 5, False), m.update("x", 5, False), m.mark(1)
    m.update("in", 9, False), m.update("x", 9, False)
    assert m.release(1) == 5
    assert m.held
    assert m.release(1) is None
    m.mark(2), m.mark(3)
    assert m.release(3, 7) == 7
    assert m.release(2) is None


def test_w3_a_wave_that_was_never_marked_releases_nothing():
    m = merger()
    m.update("in", 5, False), m.update("x", 5, False)
    assert m.release(1) is None


def test_w3_back_edges_have_no_say_and_the_last_watermark_is_held_too():
    m = merger()
    m.end("in"), m.end("x")
    assert m.held
    assert not m.drained
    m.mark(1)
    assert m.release(1) == MAX
    assert m.drained


def test_w3_outside_is_what_comes_from_elsewhere():
    m = merger()
    m.update("in", 5, False), m.update("x", 3, False)
    assert m.outside == InputTime(5)
    m.update("in", 6, True)
    assert m.outside == InputTime(6, idle=True)
    m.end("in")
    assert m.outside == InputTime(MAX)


def test_w3_a_restored_head_holds_what_had_not_passed():
    m = merger()
    m.update("in", 5, False), m.update("x", 5, False), m.mark(1), m.release(1), m.update("in", 8, False)
    m.update("x", 8, False)
    again = merger()
    again.restore(m.snapshot(), m.combined)
    assert (again.combined, again.held) == (5, True)
    again.mark(2)
    assert again.release(2) == 8


def test_without_back_edges_nothing_is_held():
    m = WatermarkMerger(["a"])
    assert m.update("a", 4, False) == 4
    m.mark(1)
    assert (m.held, m.release(1)) == (False, None)
