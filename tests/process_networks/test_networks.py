"""Building, running, saving, restoring and recovering networks in this process."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
from network_world import START, Account, bank, ends, random_bank, total

from cutwater.errors import BuildError, ConfigError, CorruptSnapshotError, CutwaterError, UserCodeError
from cutwater.process_networks import GlobalSnapshot, Network, Process, terminated
from cutwater.trace.checker import check
from cutwater.trace.events import read_trace

SEEDS = range(40)


class Sum(Process):
    """Adds up, in any order: the end does not depend on the schedule."""

    total: int = 0
    hops: int = 0

    def on_start(self, ctx):
        for target in ctx.outputs:
            ctx.send(target, 8)

    def on_message(self, ctx, sender, message):
        self.total += message
        self.hops += 1
        if message > 1:
            for target in ctx.outputs:
                ctx.send(target, message // 2)


def sums(seed: int) -> Network:
    rng = random.Random(seed)
    network = Network("sums", messages=[int])
    for name in "abcd":
        network.add(name, Sum())
    for pair in rng.sample([(x, y) for x in "abcd" for y in "abcd"], 7):
        network.connect(*pair)
    return network


# ------------------------------------------------------------------------------------------------------------ restore


@pytest.mark.parametrize("seed", SEEDS)
def test_a_restored_network_ends_as_a_run_without_failure_does(seed: int):
    """R5: where the end is the same for all schedules, so it is after a restore."""
    network = sums(seed)
    whole = network.run_local(seed=seed)
    whole.run_until_quiet()
    run = network.run_local(seed=seed + 1)
    run.step(random.Random(seed).randrange(40))
    snapshot = run.snapshot()
    again = network.run_local(seed=seed + 2, restore=snapshot)
    again.run_until_quiet()
    assert [again.state(n) for n in "abcd"] == [whole.state(n) for n in "abcd"]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fifo", [True, False])
def test_a_crash_takes_the_network_back_to_its_last_snapshot(seed: int, fifo: bool, tmp_path: Path):
    """The money of the cut, no more and no less, and a trace that the independent checker accepts."""
    network = random_bank(seed, fifo=fifo)
    rng = random.Random(seed)
    run = network.run_local(seed=seed, snapshot_every="1ms", trace=tmp_path / "trace")
    for _ in range(4):
        run.step(rng.randrange(60))
        run.crash(rng.choice(list(network.processes)))
    assert total(run.snapshot()) == START * len(network.processes)
    run.run_until_quiet()
    run.stop()
    result = check(read_trace(tmp_path / "trace"))
    assert not result.violations, str(result)


def test_a_restore_takes_place_exactly_at_the_cut():
    network = bank("abc", "ab", "bc", "ca", "ac")
    run = network.run_local(seed=4)
    run.step(20)
    snapshot = run.snapshot()
    again = network.run_local(seed=9, restore=snapshot)
    assert [again.state(n) for n in "abc"] == [snapshot.state(n) for n in "abc"]
    second = again.snapshot()
    assert second.id == snapshot.id + 1
    assert all(second.parts[p].events >= part.events for p, part in snapshot.parts.items())
    assert total(second) == 3 * START


def test_the_same_seed_gives_the_same_run():
    network = bank("abcd", "ab", "bc", "cd", "da", "ac", "bd")
    assert ends(network, None, 5) == ends(network, None, 5)
    assert len({tuple(ends(network, None, seed).values()) for seed in range(10)}) > 1


def test_chance_goes_on_where_it_was():
    class Dice(Process):
        rolls: list[int]

        def on_message(self, ctx, sender, message):
            self.rolls.append(ctx.random.randrange(10**9))
            if message:
                ctx.send(sender, message - 1)

        def on_start(self, ctx):
            ctx.send("a", 20)

    network = Network("dice", messages=[int])
    network.add("a", Dice(rolls=[]))
    network.connect("a", "a")
    whole = network.run_local(seed=3)
    whole.run_until_quiet()
    run = network.run_local(seed=3)
    run.step(7)
    again = network.run_local(seed=3, restore=run.snapshot())
    again.run_until_quiet()
    assert again.state("a") == whole.state("a")


def test_timers_fire_in_order_and_are_in_snapshots():
    class Alarm(Process):
        rung: list[str]

        def on_start(self, ctx):
            for delay_ms, name in ((30, "late"), (10, "early"), (20, "middle")):
                ctx.timer(delay_ms, name)

        def on_timer(self, ctx, message):
            self.rung.append(f"{message} {ctx.now_ms:.0f}")

    network = Network("alarms", messages=[str])
    network.add("a", Alarm(rung=[]))
    run = network.run_local()
    run.advance("15ms")
    snapshot = run.snapshot()
    assert snapshot.timers("a") == ["middle", "late"]
    assert terminated()(snapshot) is None
    again = network.run_local(restore=snapshot)
    again.run_until_quiet()
    assert again.state("a").rung == ["early 10", "middle 20", "late 30"]  # type: ignore[attr-defined]
    assert again.await_termination(every="1ms") is not None


# --------------------------------------------------------------------------------------------------------------- disk


def test_a_snapshot_is_saved_loaded_and_read_as_tables(tmp_path: Path):
    network = bank("abc", "ab", "bc", "ca")
    run = network.run_local(seed=1)
    run.step(5)
    snapshot = run.snapshot()
    assert snapshot.save(tmp_path) == 1
    loaded = GlobalSnapshot.load(tmp_path, network)
    assert loaded == snapshot
    run.step(5)
    second = run.snapshot()
    assert second.save(tmp_path) == 2
    assert GlobalSnapshot.load(tmp_path, network) == second
    assert GlobalSnapshot.load(f"{tmp_path}/bank@1", network) == snapshot

    plain = GlobalSnapshot.load(f"{tmp_path}/bank@1")
    assert plain.state("a") == {
        "balance": snapshot.state("a").balance,
        "left": snapshot.state("a").left,
        "got": snapshot.state("a").got,
    }
    assert plain.messages() == snapshot.messages()
    accounts = plain.table("Account").to_pylist()
    channels = plain.table("channels").to_pylist()
    messages = plain.table("messages").to_pylist()
    assert sum(a["balance"] for a in accounts) + sum(int(m["message"]) for m in messages) == 3 * START
    assert sum(c["sent"] - c["taken"] for c in channels) == len(messages) == sum(c["messages"] for c in channels)
    assert plain.table().column("process").to_pylist() == ["a", "b", "c"]
    with pytest.raises(ConfigError, match=r"no table 'nothing' in a snapshot"):
        plain.table("nothing")


def test_a_damaged_snapshot_is_named_and_an_older_one_is_not_taken_silently(tmp_path: Path):
    network = Network("big", messages=[str])
    network.add("a", Text(text="x" * 100_000))
    network.run_local().snapshot().save(tmp_path)
    (data,) = tmp_path.rglob("*.data")
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 1
    data.write_bytes(raw)
    with pytest.raises(CorruptSnapshotError, match=r"\.data at offset \d+ is damaged"):
        GlobalSnapshot.load(tmp_path, network)


class Text(Process):
    text: str = ""


def test_a_snapshot_of_another_network_is_refused():
    snapshot = bank("ab", "ab", "ba").run_local().snapshot()
    with pytest.raises(BuildError, match=r"only in the snapshot none, only in the network 'c'"):
        bank("abc", "ab", "ba").run_local(restore=snapshot)
    with pytest.raises(BuildError, match=r"other channels than 'bank': 'b->a'"):
        bank("ab", "ab").run_local(restore=snapshot)
    other = Network("bank", messages=[int])
    other.add("a", Text())
    other.add("b", Account())
    other.connect_both("a", "b")
    run = other.run_local(restore=snapshot)  # new fields have defaults, old ones are dropped
    assert run.state("a") == Text()


# ----------------------------------------------------------------------------------------------------------- building


@dataclass
class Order:
    item: str
    count: int


@dataclass
class Cancel:
    item: str


def test_messages_of_several_types_and_parallel_channels():
    class Shop(Process):
        log: list[str]

        def on_message(self, ctx, sender, message):
            match message:
                case Order(item, count):
                    self.log.append(f"{sender} by {ctx.channel}: {count} {item}")
                case Cancel(item):
                    self.log.append(f"{sender} by {ctx.channel}: no {item}")

    class Buyer(Process):
        def on_start(self, ctx):
            ctx.send("mail", Order("tea", 2))
            ctx.send("express", Cancel("tea"))

    network = Network("shop", messages=[Order, Cancel])
    network.add("shop", Shop(log=[]))
    network.add("buyer", Buyer())
    network.connect("buyer", "shop", name="mail")
    network.connect("buyer", "shop", name="express")
    run = network.run_local()
    snapshot = run.snapshot()
    assert sorted(map(repr, snapshot.messages())) == ["Cancel(item='tea')", "Order(item='tea', count=2)"] or run.steps
    run.run_until_quiet()
    assert sorted(run.state("shop").log) == ["buyer by express: no tea", "buyer by mail: 2 tea"]  # type: ignore[attr-defined]


def test_what_is_wrong_is_said_when_the_network_is_built():
    class Handle(Process):
        file: object = None

    network = Network("n", messages=[int])
    network.add("a", Account())
    for call, text in (
        (lambda: network.add("a", Account()), r"the name 'a' is empty or taken"),
        (lambda: network.add("h", Handle(file=open)), r"process 'h' cannot be put into a snapshot"),
        (lambda: network.connect("a", "z"), r"channel 'a->z': there is no process 'z'. Add it first; there are: 'a'"),
        (lambda: Network("x").run_local(), r"network 'x' has no process"),
        (lambda: Network("x", messages=[int, 3]), r"message type 3 is no class"),
        (lambda: Network("x", messages=[int, int]), r"has the name of another one"),
    ):
        with pytest.raises(BuildError, match=text):
            call()
    network.connect("a", "a")
    with pytest.raises(BuildError, match=r"the name 'a->a' is taken\. Give connect\(\.\.\., name=\.\.\.\)"):
        network.connect("a", "a")
    with pytest.raises(AttributeError, match="Account declares no field 'blance'"):
        Account().blance = 3  # type: ignore[attr-defined]


def test_what_is_wrong_with_a_send_is_said_with_the_name_of_the_process():
    class Wrong(Process):
        to: str
        what: str = ""

        def on_start(self, ctx):
            ctx.send(self.to, self.what or 1)

    for to, what, text in (
        ("z", "", r"process 'a' has no channel to 'z'. It can send to: 'b'"),
        ("b", "", r"process 'a' has 2 channels to 'b'. Say which: ctx.send\('a->b', ...\)"),
        ("a->b", "text", r"a message of type 'str' was sent; declared are: int"),
    ):
        network = Network("n", messages=[int])
        network.add("a", Wrong(to=to, what=what))
        network.add("b", Text())
        network.connect("a", "b")
        network.connect("a", "b", name="second")
        with pytest.raises(UserCodeError, match=text):
            network.run_local()


def test_messages_of_a_handler_that_raises_are_not_sent():
    class Halfway(Process):
        def on_message(self, ctx, sender, message):
            ctx.send("b", 1)
            raise ValueError("half way")

    class Sender(Process):
        def on_start(self, ctx):
            ctx.send("a", 1)

    network = Network("n", messages=[int])
    network.add("a", Halfway())
    network.add("b", Sender())
    network.connect_both("a", "b")
    run = network.run_local()
    with pytest.raises(UserCodeError, match=r"process 'a' failed in on_message, event 2: ValueError: half way"):
        run.run_until_quiet()
    assert not run._queues["a->b"]


def test_a_network_that_never_ends_says_so():
    class Loop(Process):
        def on_start(self, ctx):
            ctx.send("a", 1)

        def on_message(self, ctx, sender, message):
            ctx.send("a", 1)

    network = Network("loop", messages=[int])
    network.add("a", Loop())
    network.connect("a", "a")
    with pytest.raises(CutwaterError, match="network 'loop' is not quiet after 100 steps"):
        network.run_local().run_until_quiet(max_steps=100)
