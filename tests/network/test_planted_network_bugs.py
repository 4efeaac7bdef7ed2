"""The alarm works: bugs planted into networks are seen by the money or by the counts of CL6 within some seeds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from network_world import START, random_bank, total

from cutwater.errors import InvariantError
from cutwater.network.algorithms import ChandyLamport, LaiYang
from cutwater.network.cell import Cell
from cutwater.network.local import LocalRun
from cutwater.network.messages import Marker, encode_state
from cutwater.network.queues import ItemQueue
from cutwater.protocol.lai_yang import Coloured

Patch = pytest.MonkeyPatch


def forgets_what_is_under_way(patch: Patch) -> None:
    patch.setattr(ChandyLamport, "message", lambda self, channel, colour: ())


def freezes_too_late(patch: Patch) -> None:
    done = Cell._done

    def late(self: Cell, snapshot: int) -> None:
        self._parts[snapshot].state = encode_state(self.name, self.process)
        done(self, snapshot)

    patch.setattr(Cell, "_done", late)


def lets_markers_overtake(patch: Patch) -> None:
    def push(self: ItemQueue, item: object) -> None:
        self._items.insert(self._head, item) if isinstance(item, Marker) else self._items.append(item)  # type: ignore[arg-type]

    patch.setattr(ItemQueue, "push", push)


def counts_wrongly_what_was_taken(patch: Patch) -> None:
    freeze = Cell._freeze

    def wrong(self: Cell, snapshot: int) -> None:
        freeze(self, snapshot)
        for channel in self._parts[snapshot].taken:
            self._parts[snapshot].taken[channel] += 1

    patch.setattr(Cell, "_freeze", wrong)


def colours_nothing(patch: Patch) -> None:
    patch.setattr(LaiYang, "message", lambda self, channel, colour: self._machine.handle(Coloured(channel, 0)))


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
    monkeypatch.setattr("cutwater.network.snapshot.GlobalSnapshot.log", lambda self, channel: [])
    lost = 0
    for seed in range(30):
        network = random_bank(seed)
        run = LocalRun(network, seed=seed, checked=False)
        run.step(10)
        again = LocalRun(network, seed=seed, restore=run.snapshot(), checked=False)
        again.run_until_quiet()
        lost += sum(again.state(n).balance for n in network.processes) < START * len(network.processes)  # type: ignore[attr-defined]
    assert lost > 5
