"""Detectors (CL8), and watching a running network."""

from __future__ import annotations

from typing import Any

import networkx
import pytest
from network_world import START, bank

from cutwater.process_networks import (
    AllOf,
    AnyOf,
    Finding,
    Network,
    Process,
    conserved,
    deadlock,
    holds,
    terminated,
    tokens,
)
from cutwater.runtime.control.messages import Message


class Waiter(Process):
    """Waits for ``on`` as ``mode`` says."""

    mode: str = ""
    on: tuple[str, ...] = ()


def waiting(**waits: tuple[str, str]) -> Any:
    """``waiting(a=("all", "bc"))``; channels from everybody to everybody."""
    network = Network("waits", messages=[int])
    for name, (mode, on) in waits.items():
        network.add(name, Waiter(mode, tuple(on)))
    for x in waits:
        for y in waits:
            network.connect(x, y)
    return network.run_local().snapshot()


def whom(name: str, state: Waiter) -> AllOf | AnyOf | None:
    return {"all": AllOf, "any": AnyOf}[state.mode](state.on) if state.mode else None


@pytest.mark.parametrize(
    ("waits", "stuck", "shape"),
    [
        ({"a": ("all", "b"), "b": ("all", "a")}, "ab", "cycle"),
        ({"a": ("all", "b"), "b": ("all", "c"), "c": ("", "")}, "", ""),
        ({"a": ("all", "bc"), "b": ("all", "a"), "c": ("", "")}, "ab", "cycle"),
        ({"a": ("any", "bc"), "b": ("any", "a"), "c": ("", "")}, "", ""),
        ({"a": ("any", "bc"), "b": ("any", "a"), "c": ("any", "b")}, "abc", "knot"),
        ({"a": ("any", "b"), "b": ("any", "a"), "c": ("all", "a")}, "abc", "knot"),
        ({"a": ("all", "a")}, "a", "cycle"),
        ({"a": ("", ""), "b": ("", "")}, "", ""),
    ],
)
def test_cl8_cycles_of_and_waits_and_knots_of_or_waits(waits: dict, stuck: str, shape: str):
    found = deadlock(whom)(waiting(**waits))
    assert sorted(found.processes if found else ()) == sorted(stuck)
    assert shape in (found.detail if found else "")


def test_cl8_a_message_on_its_way_may_free_the_process_that_waits():
    snapshot = waiting(a=("all", "b"), b=("all", "a"))
    snapshot.parts["a"].logs["b->a"] = [Message(0, "int", b"\x01")]
    assert deadlock(whom)(snapshot) is None


def test_cl8_deadlocks_of_random_waits_agree_with_graph_theory():
    """AND: stuck is who reaches a cycle.  OR: stuck is who reaches nobody that is free.  NetworkX is the oracle."""
    import random

    both = [0, 0]
    for seed in range(200):
        rng = random.Random(seed)
        mode = rng.choice(["all", "any"])
        graph = {n: rng.sample("abcdef", rng.randint(0, 2)) for n in "abcdef"}
        found = deadlock(whom)(waiting(**{n: (mode if on else "", "".join(on)) for n, on in graph.items()}))
        g = networkx.DiGraph([(n, x) for n, on in graph.items() for x in on])
        g.add_nodes_from(graph)
        reach = {n: networkx.descendants(g, n) | {n} for n in g}
        free = {n for n in g if not graph[n]}
        cyclic = {n for group in networkx.strongly_connected_components(g) for n in group if len(group) > 1}
        cyclic |= {n for n in g if n in graph[n]}
        stuck = {n for n in g if (reach[n] & cyclic if mode == "all" else not reach[n] & free)}
        assert set(found.processes if found else ()) == stuck
        both[bool(stuck)] += 1
    assert min(both) > 20, "void: nearly all alike"


def test_cl8_termination_needs_empty_channels_and_passive_processes():
    run = bank("ab", "ab", "ba", left=5).run_local(seed=1)
    assert terminated()(run.snapshot()) is None
    found = run.await_termination(every="1ms")
    assert found is not None
    assert terminated(active=lambda name, state: name == "a")(run.snapshot()) is None


def test_cl8_lost_and_doubled_quantities_and_tokens():
    snapshot = bank("ab", "ab", "ba").run_local(seed=1).snapshot()

    def money(total: int) -> Finding | None:
        return conserved(lambda name, state: state.balance, lambda message: message, total)(snapshot)

    assert money(2 * START) is None
    assert money(2 * START + 1).detail.startswith("1 of 201 lost: ")  # type: ignore[union-attr]
    assert money(2 * START - 5).detail.startswith("5 of 195 appeared: ")  # type: ignore[union-attr]

    def held(expected: str) -> Finding | None:
        return tokens(lambda name, state: [name], lambda message: [], expected)(snapshot)

    assert held("ab") is None
    assert held("abc").detail == "lost: 'c'"  # type: ignore[union-attr]
    assert held("a") == Finding("tokens", "too many: 'b'", ("b",))


def test_watch_returns_what_it_finds_and_calls_back_and_gives_up_after_its_time():
    run = bank("abc", "ab", "bc", "ca", left=20).run_local(seed=3)
    seen: list[tuple[int, Finding]] = []
    found = run.watch(
        holds(lambda s: all(x.left == 0 for _, x in s.states()) or s.id > 20, "paid up"),
        every="100ms",
        on_found=lambda snapshot, finding: seen.append((snapshot.id, finding)),
    )
    assert found is not None
    assert [f for _, f in seen] == [found]
    assert found.what == "paid up"
    before = run.now_ms
    assert run.watch(holds(lambda s: False), every="100ms", timeout="1s") is None
    assert 1_000 <= run.now_ms - before < 1_200
