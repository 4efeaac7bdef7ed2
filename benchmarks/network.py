"""Snapshots of a large process network in one process: seconds of each, and whether every token is in it once.

    python -m benchmarks.network [--processes 1000] [--channels 10000] [--tokens 2000] [--snapshots 5] [--quick]

Tokens wander: whoever gets one passes it on at once through a channel drawn by chance, so that they lie in channels
when a snapshot begins.  The channels are a ring, which makes every process reachable, and others drawn by chance.  A
snapshot is timed from its request to the assembled ``GlobalSnapshot``, its counts checked (CL6), while the network goes
on; then the tokens are counted in it, outside the time.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from dataclasses import dataclass

from cutwater.process_networks import Network, Process, conserved
from cutwater.process_networks.local import LocalRun

__all__ = ["main", "measure"]

STEPS_BETWEEN = 2_000
"""Items taken before each snapshot."""


class Passer(Process):
    """Keeps the tokens that it starts with until then, and passes on whatever comes."""

    tokens: int = 0
    passed: int = 0

    def on_start(self, ctx):  # type: ignore[no-untyped-def]
        for _ in range(self.tokens):
            self._pass(ctx)
        self.tokens = 0

    def on_message(self, ctx, sender, message):  # type: ignore[no-untyped-def]
        self._pass(ctx)

    def _pass(self, ctx):  # type: ignore[no-untyped-def]
        self.passed += 1
        ctx.send(ctx.random.choice(ctx.outputs), 1)


@dataclass(frozen=True)
class Result:
    """Of one run: seconds per snapshot, by the clock and of the processor, and items that were taken meanwhile."""

    seconds: list[float]
    cpu_seconds: list[float]
    steps: list[int]


def build(processes: int, channels: int, tokens: int, seed: int = 1) -> Network:
    """A ring with further channels between pairs drawn by chance.

    >>> network = build(10, 30, 4)
    >>> len(network.processes), len(network.channels)
    (10, 30)
    """
    chance = random.Random(seed)
    network = Network("tokens", messages=[int])
    names = [f"p{i}" for i in range(processes)]
    for i, name in enumerate(names):
        network.add(name, Passer(tokens=tokens // processes + (i < tokens % processes)))
    network.ring(*names)
    while len(network.channels) < channels:
        one, other = chance.sample(names, 2)
        if f"{one}->{other}" not in network.channels:
            network.connect(one, other)
    return network


def measure(processes: int, channels: int, tokens: int, snapshots: int) -> Result:
    """Run the network and take snapshots.

    Raises:
        RuntimeError: tokens are missing in a snapshot, or more than there are.
    """
    if not processes <= channels <= processes * (processes - 1) or processes < 3:
        raise ValueError(f"{channels} channels between {processes} processes: too few for a ring, or too many")
    lost = conserved(lambda _, passer: passer.tokens, lambda token: token, tokens)
    result = Result([], [], [])
    with build(processes, channels, tokens).run_local(seed=1) as run:
        assert isinstance(run, LocalRun)
        for _ in range(snapshots):
            run.step(STEPS_BETWEEN)
            before, started, started_cpu = run.steps, time.perf_counter(), time.process_time()
            snapshot = run.snapshot(["p0"])
            result.seconds.append(time.perf_counter() - started)
            result.cpu_seconds.append(time.process_time() - started_cpu)
            result.steps.append(run.steps - before)
            finding = lost(snapshot)
            if finding is not None:
                raise RuntimeError(f"snapshot {snapshot.id}: {finding.detail}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", type=int, default=1_000)
    parser.add_argument("--channels", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=2_000)
    parser.add_argument("--snapshots", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a small network: does it all work?")
    given = parser.parse_args()
    processes, channels, tokens = (50, 300, 100) if given.quick else (given.processes, given.channels, given.tokens)
    try:
        result = measure(processes, channels, tokens, given.snapshots)
    except (RuntimeError, ValueError) as error:
        sys.exit(str(error))
    print(f"{processes:,} processes, {channels:,} channels, {tokens:,} tokens; all of them in each snapshot, once")
    print(
        f"{given.snapshots} snapshots: median {statistics.median(result.seconds):.3f} s, "
        f"longest {max(result.seconds):.3f} s, "
        f"{statistics.median(result.cpu_seconds):.3f} s of processor time, "
        f"{statistics.median(result.steps):,.0f} items taken during one"
    )


if __name__ == "__main__":
    main()
