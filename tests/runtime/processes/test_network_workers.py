"""Process networks whose processes live in several workers: real processes, sockets and SIGKILLs, no Spark."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import faults
import pytest
from fake_host import FakeHost, FakeSpark
from runtime_world import wait_until

from cutwater.errors import ConfigError, CutwaterError, IncompleteSnapshotError, UserCodeError
from cutwater.process_networks import GlobalSnapshot, Network, Process, conserved, holds
from cutwater.process_networks import job as network_job
from cutwater.process_networks.job import NetworkJob
from cutwater.trace.checker import check
from cutwater.trace.parts import read_run
from cutwater.trace.result import Kind

START = 1_000


class Bank(Process):
    """Sends random amounts to random neighbours, for ever or until it has sent ``left`` times."""

    balance: int = START
    left: int = 10**9
    got: int = 0

    def on_start(self, ctx):
        for _ in range(3):
            self.pay(ctx)

    def pay(self, ctx):
        if self.left > 0 and self.balance > 0:
            amount = ctx.random.randint(1, self.balance)
            self.balance -= amount
            self.left -= 1
            ctx.send(ctx.random.choice(ctx.outputs), amount)

    def on_message(self, ctx, sender, message):
        self.balance += message
        self.got += 1
        self.pay(ctx)


class Stuck(Bank):
    """Takes one message, and never returns."""

    def on_message(self, ctx, sender, message):
        import time

        time.sleep(3600)


class Failing(Bank):
    def on_message(self, ctx, sender, message):
        raise ValueError("no such account")


def bank(processes: int = 5, **kinds: Process) -> Network:
    network = Network("bank", messages=[int])
    names = [f"p{i}" for i in range(processes)]
    for name in names:
        network.add(name, kinds.get(name, Bank()))
    network.ring(*names)
    network.connect_both("p0", "p2")
    network.connect("p1", "p1")
    return network


def money(processes: int = 5) -> Callable[[GlobalSnapshot], object]:
    return conserved(lambda name, state: state.balance, lambda message: message, processes * START)


Start = Callable[..., NetworkJob]


@pytest.fixture
def start(fake_spark: FakeSpark, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setattr(network_job, "SparkHost", FakeHost)
    runs: list[NetworkJob] = []

    def start(network: Network, **settings: Any) -> NetworkJob:
        run = network.start(fake_spark, **{"workers": 2, **settings})  # type: ignore[arg-type]
        runs.append(run)
        return run

    yield start
    for run in runs:
        if run.is_active:
            run.stop()


def test_snapshots_of_a_network_on_workers_conserve_the_money(start: Start):
    run = start(bank())
    pending = [run.begin_snapshot([name]) for name in ("p0", "p3", "p4")]
    snapshots = [run.snapshot(), *(p.result() for p in pending), run.snapshot(["p1", "p2"])]
    assert [money()(s) for s in snapshots] == [None] * 5
    assert len({s.id for s in snapshots}) == 5
    before, after = snapshots[0], run.snapshot()
    assert sum(s.got for _, s in after.states()) > sum(s.got for _, s in before.states())


def test_a_snapshot_of_workers_goes_on_in_this_process_and_back(start: Start):
    network = bank()
    run = start(network)
    taken = run.snapshot()
    run.stop()
    local = network.run_local(seed=1, restore=taken)
    local.step(500)
    again = start(network, restore=local.snapshot(), workers=3)
    assert money()(again.snapshot()) is None
    assert again.snapshot().state("p0").got >= taken.state("p0").got


def test_after_a_sigkill_the_network_goes_on_from_its_last_snapshot(start: Start, fake_spark: FakeSpark):
    run = start(bank())
    run.snapshot()
    kept = run.last_snapshot
    assert kept is not None
    os.kill(fake_spark.pids[0], signal.SIGKILL)
    wait_until(lambda: run.status.attempt == 2 and run.status.phase == "running", "the network")
    assert run.status.restored == kept.id
    after = run.snapshot()
    assert after.id > kept.id
    assert money()(after) is None
    # Every message of the cut was delivered again: nobody has taken fewer than the cut says.
    assert all(after.parts[p].taken[c] >= n for p in kept.parts for c, n in kept.parts[p].taken.items())


def test_without_a_snapshot_a_lost_worker_means_the_beginning(start: Start, fake_spark: FakeSpark):
    run = start(bank())
    wait_until(lambda: run.status.phase == "running", "the network")
    os.kill(fake_spark.pids[0], signal.SIGKILL)
    wait_until(lambda: run.status.attempt == 2 and run.status.phase == "running", "the network")
    assert run.status.restored is None
    assert money()(run.snapshot()) is None


def test_periodic_snapshots_are_saved_and_another_driver_goes_on_from_them(start: Start, tmp_path: Path):
    network = bank()
    run = start(network, snapshot_every="50ms", checkpoint=tmp_path)
    wait_until(lambda: run.last_snapshot is not None and run.last_snapshot.id >= 3, "the network")
    run.stop()
    loaded = GlobalSnapshot.load(tmp_path, network)
    assert money()(loaded) is None
    again = start(network, restore=loaded)
    assert money()(again.snapshot()) is None


def test_a_process_that_never_answers_is_named(start: Start):
    run = start(bank(p3=Stuck()), cancel_timeout="200ms", place={"p3": 1, "p0": 0, "p1": 0, "p2": 0, "p4": 0})
    with pytest.raises(IncompleteSnapshotError, match=r"snapshot 1 .* not complete after 500ms: no answer from .*'p3'"):
        run.snapshot(deadline="500ms")


def test_an_error_of_a_process_ends_the_network_after_some_tries(start: Start):
    run = start(bank(p2=Failing()))
    with pytest.raises(UserCodeError, match=r"process 'p2' failed in on_message, event 2: ValueError: no such account"):
        run.watch(holds(lambda snapshot: False), every="10ms", timeout="30s")
    assert not run.is_active


def test_watch_and_termination(start: Start):
    run = start(bank(p0=Bank(left=20), p1=Bank(left=20), p2=Bank(left=20), p3=Bank(left=20), p4=Bank(left=20)))
    found = run.await_termination(every="20ms", timeout="30s")
    assert found is not None
    assert found.what == "terminated"
    assert money()(run.snapshot()) is None


def test_a_wrong_placement_is_refused(start: Start):
    with pytest.raises(ConfigError, match=r"place= names 'nobody', no process"):
        start(bank(), place={"nobody": 0})
    with pytest.raises(ConfigError, match=r"place= names 'p1', which is not to be put on one of workers 0 to 1"):
        start(bank(), place={"p1": 2})


# ------------------------------------------------------------------------------------------------------------- traces


class Ticking(Bank):
    """Pays every millisecond or so; its name for money is in every state."""

    def on_start(self, ctx):
        ctx.timer(1.0, 0)

    def on_timer(self, ctx, message):
        self.pay(ctx)
        ctx.timer(ctx.random.uniform(0.5, 1.5), 0)

    def on_message(self, ctx, sender, message):
        self.balance += message
        self.got += 1


def ticking() -> Network:
    return bank(**{f"p{i}": Ticking() for i in range(5)})


def after_messages(run: NetworkJob, count: int) -> None:
    before = sum(w.taken for w in run.status.workers)
    wait_until(lambda: sum(w.taken for w in run.status.workers) >= before + count, "some messages")


def test_cl6_and_cl7_hold_on_the_trace_of_workers_one_of_which_was_killed(
    start: Start, fake_spark: FakeSpark, tmp_path: Path
):
    run = start(ticking(), trace_dir=tmp_path)
    pending = [run.begin_snapshot([name]) for name in ("p0", "p3")]
    after_messages(run, 200)
    run.snapshot()
    taken = [p.result() for p in pending]
    os.kill(fake_spark.pids[0], signal.SIGKILL)
    wait_until(lambda: run.status.attempt == 2 and run.status.phase == "running", "the network")
    after_messages(run, 200)
    last = run.snapshot()
    run.stop()
    trace = read_run([tmp_path])
    assert trace.header.marked
    result = check(trace)
    assert result.ok, str(result)
    assert (result.snapshots, result.restores) == (4, 1)
    assert len(result.counts) == 4 * len(trace.header.channels)
    assert all(count.holds for count in result.counts)
    assert sorted(r.snapshot for r in result.reorderings) == [1, 2, 3, 4], "in the order of their ends"
    for snapshot in (*taken, last):  # what the checker counted is what the snapshot holds
        counted = {c.channel: (c.sent, c.taken) for c in result.counts if c.snapshot == snapshot.id}
        held = {n: (snapshot.parts[c.source].sent[n], snapshot.parts[c.target].taken[n])
                for n, c in snapshot.channels.items()}  # fmt: skip
        assert counted == held
    assert b"balance" not in b"".join(path.read_bytes() for path in tmp_path.glob("*.jsonl"))


def test_the_trace_of_a_network_that_goes_on_from_an_older_snapshot(start: Start, tmp_path: Path):
    network = ticking()
    local = network.run_local(seed=3, trace=tmp_path / "local.jsonl")
    local.advance("50ms")
    taken = local.snapshot()
    run = start(network, restore=taken, trace_dir=tmp_path / "workers")
    wait_until(lambda: run.status.phase == "running", "the network")
    after_messages(run, 100)
    again = run.snapshot()
    run.stop()
    result = check(read_run([tmp_path / "workers"]))
    assert result.ok, str(result)
    assert [r.snapshot for r in result.reorderings] == [again.id]
    local = network.run_local(seed=4, restore=again, trace=tmp_path / "again.jsonl")
    local.advance("20ms")
    local.snapshot()
    local.stop()
    assert str(check(read_run([tmp_path / "again.jsonl"]))).endswith("1 complete snapshot: no violation")


def test_a_marker_behind_a_message_is_found_in_the_trace_of_workers(
    start: Start, fake_spark: FakeSpark, tmp_path: Path
):
    fake_spark.prepare = faults.markers_first
    run = start(bank(), trace_dir=tmp_path)
    with contextlib.suppress(CutwaterError):  # the driver may see the wrong cut too, and end the run
        for _ in range(20):  # a snapshot that no message meets is a right one
            run.snapshot()
    run.stop()
    wait_until(lambda: not fake_spark.pids, "the end of the workers")
    assert Kind.MARKER in check(read_run([tmp_path]), quick=True).kinds()
