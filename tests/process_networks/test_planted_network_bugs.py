"""The alarm works: bugs planted into networks are seen by the money or by the counts of CL6 within some seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from network_world import START, bank, random_bank, total

from cutwater.errors import InvariantError
from cutwater.process_networks.cell import Cell
from cutwater.process_networks.graph import Network
from cutwater.process_networks.local import ItemQueue, LocalRun
from cutwater.process_networks.messages import Marker, encode_state
from cutwater.protocol import messages as m
from cutwater.protocol.snapshot_algorithms import ChandyLamport, Coloured, LaiYang
from cutwater.trace.checker import check
from cutwater.trace.events import MarkerSent, MarkerTaken, Trace, read_trace
from cutwater.trace.result import Kind

Patch = pytest.MonkeyPatch


def forgets_what_is_under_way(patch: Patch) -> None:
    patch.setattr(ChandyLamport, "message", lambda self, channel, colour: ())


def freezes_too_late(patch: Patch) -> None:
    done = Cell._done

    def late(self: Cell, snapshot: int) -> None:
        state = encode_state(self.name, self.process)
        self._parts[snapshot] = msgspec.structs.replace(self._parts[snapshot], state=state)
        done(self, snapshot)

    patch.setattr(Cell, "_done", late)


def lets_markers_overtake(patch: Patch) -> None:
    def push(self: ItemQueue, item: object) -> None:
        put = self._items.appendleft if isinstance(item, Marker) else self._items.append
        put(item)  # type: ignore[arg-type]

    patch.setattr(ItemQueue, "push", push)


def counts_wrongly_what_was_taken(patch: Patch) -> None:
    freeze = Cell._freeze

    def wrong(self: Cell, snapshot: int) -> None:
        freeze(self, snapshot)
        for channel in self._parts[snapshot].taken:
            self._parts[snapshot].taken[channel] += 1

    patch.setattr(Cell, "_freeze", wrong)


def colours_nothing(patch: Patch) -> None:
    patch.setattr(LaiYang, "message", lambda self, channel, colour: self.handle(Coloured(channel, 0)))


def takes_before_it_freezes(patch: Patch) -> None:
    """Lai-Yang: a newer colour is looked at only after the message was processed."""
    take = Cell.take

    def late(self: Cell, channel: str, item: object) -> None:
        if isinstance(item, Marker):
            take(self, channel, item)
            return
        message, algorithm = self.algorithm.message, self.algorithm
        algorithm.message = lambda channel, colour: ()  # type: ignore[method-assign]
        take(self, channel, item)  # type: ignore[arg-type]
        algorithm.message = message  # type: ignore[method-assign]
        self._hand = item  # type: ignore[assignment]
        self._perform(message(channel, item.colour))  # type: ignore[attr-defined]

    patch.setattr(Cell, "take", late)


BUGS = [
    ("chandy_lamport", forgets_what_is_under_way),
    ("chandy_lamport", freezes_too_late),
    ("chandy_lamport", lets_markers_overtake),
    ("chandy_lamport", counts_wrongly_what_was_taken),
    ("lai_yang", colours_nothing),
    ("lai_yang", takes_before_it_freezes),
]


def first_alarm(algorithm: str, seeds: int = 100) -> int | None:
    """The first seed whose snapshot, or whose run, is seen to be wrong."""
    for seed in range(seeds):
        network = random_bank(seed, fifo=algorithm == "chandy_lamport")
        try:
            run = LocalRun(network, seed=seed, algorithm=algorithm)  # type: ignore[arg-type]
            run.step(10)
            pending = [run.begin_snapshot() for _ in range(2)]
            wrong = any(total(p.result()) != START * len(network.processes) for p in pending)
        except InvariantError:
            wrong = True
        if wrong:
            return seed
    return None


@pytest.mark.parametrize(("algorithm", "plant"), BUGS, ids=lambda x: getattr(x, "__name__", x))
def test_a_planted_bug_is_seen(algorithm: str, plant: Callable[[Patch], None], monkeypatch: Patch):
    plant(monkeypatch)
    assert first_alarm(algorithm) is not None


@pytest.mark.parametrize("algorithm", ["chandy_lamport", "lai_yang"])
def test_without_a_bug_there_is_no_alarm(algorithm: str):
    assert first_alarm(algorithm) is None


def test_a_restore_without_its_channels_is_seen(monkeypatch: Patch):
    monkeypatch.setattr("cutwater.process_networks.snapshot.GlobalSnapshot.log", lambda self, channel: [])
    lost = 0
    for seed in range(30):
        network = random_bank(seed)
        run = LocalRun(network, seed=seed, checked=False)
        run.step(10)
        again = LocalRun(network, seed=seed, restore=run.snapshot(), checked=False)
        again.run_until_quiet()
        lost += sum(again.state(n).balance for n in network.processes) < START * len(network.processes)  # type: ignore[attr-defined]
    assert lost > 5


# ----------------------------------------------------------------------------------------- markers that a trace lacks


def traced(network: Network, path: Path, seed: int = 0) -> Trace:
    """The trace of a run with two snapshots, of which the second begins while the first is under way."""
    run = network.run_local(seed=seed, trace=path)
    run.step(5)
    for pending in [run.begin_snapshot() for _ in range(2)]:
        assert total(pending.result()) == START * len(network.processes)
    run.run_until_quiet()
    run.stop()
    return read_trace(path)


def twins() -> Network:
    """Two processes, two channels there and one back; nothing is sent, so that any cut is right but for its markers."""
    network = bank("ab", "ab", "ba", left=0)
    network.connect("a", "b", name="beside")
    return network


def sends_markers_twice(patch: Patch) -> None:
    """And whoever takes one takes no notice of the second."""
    send, marker = Cell._send_markers, ChandyLamport.marker

    def twice(self: Cell, snapshot: int) -> None:
        send(self, snapshot)
        send(self, snapshot)

    def once(self: ChandyLamport, channel: str, snapshot: int, position: int) -> Sequence[m.Effect]:
        had: set[tuple[str, int]] = vars(self).setdefault("had", set())
        if (channel, snapshot) in had:
            return ()
        had.add((channel, snapshot))
        return marker(self, channel, snapshot, position)

    patch.setattr(Cell, "_send_markers", twice)
    patch.setattr(ChandyLamport, "marker", once)


def counts_one_marker_for_all_channels(patch: Patch) -> None:
    """One from a process closes every channel from there; the others are thrown away."""
    take = Cell.take

    def thrifty(self: Cell, channel: str, item: object) -> None:
        channels = [c for c, spec in self.inputs.items() if spec.source == self.inputs[channel].source]
        if not isinstance(item, Marker):
            take(self, channel, item)  # type: ignore[arg-type]
        elif channel == channels[0]:
            take(self, channel, item)
            for other in channels[1:]:
                self._perform(self.algorithm.marker(other, item.snapshot, item.position))

    patch.setattr(Cell, "take", thrifty)


def sends_one_marker_for_all_channels(patch: Patch) -> None:
    """The same, and the sender does without the others."""
    counts_one_marker_for_all_channels(patch)
    send = Cell._send_markers

    def thrifty(self: Cell, snapshot: int) -> None:
        channels = self._context.channels
        self._context.channels = {c.target: c for c in reversed(channels.values())}
        send(self, snapshot)
        self._context.channels = channels

    patch.setattr(Cell, "_send_markers", thrifty)


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (sends_markers_twice, "its marker was taken a second time"),
        (counts_one_marker_for_all_channels, "it is complete, and nobody took its marker"),
        (sends_one_marker_for_all_channels, "it is complete without a marker on it"),
    ],
)
def test_a_marker_too_many_or_too_few_is_seen_in_the_trace(
    plant: Callable[[Patch], None], said: str, monkeypatch: Patch, tmp_path: Path
):
    """No message is lost by it, so that neither the money nor the counts of CL6 tell."""
    assert check(traced(twins(), tmp_path / "good")).ok
    plant(monkeypatch)
    result = check(traced(twins(), tmp_path / "bad"))
    assert result.kinds() == {Kind.MARKER}
    assert said in str(result)


@pytest.mark.parametrize("fifo", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_each_single_marker_of_a_trace_counts(seed: int, fifo: bool, tmp_path: Path):
    trace = traced(random_bank(seed, fifo=fifo), tmp_path / "trace", seed)
    assert check(trace).ok
    markers = [i for i, event in enumerate(trace.events) if isinstance(event, MarkerSent | MarkerTaken)]
    assert len(markers) == 2 * 2 * len(trace.header.channels)
    for i in markers:
        for events in (trace.events[:i] + trace.events[i + 1 :], trace.events[: i + 1] + trace.events[i:]):
            assert Kind.MARKER in check(msgspec.structs.replace(trace, events=events), quick=True).kinds()
