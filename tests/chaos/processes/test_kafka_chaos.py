"""SIGKILLs of workers, drivers and the broker of jobs from topic to topic: ``make chaos``.

The oracle is a reader of committed messages that knows nothing of the engine.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from kafka_driver import OUT, PARALLELISM, SOURCE
from servers.kafka import Broker

from kafka_feed import Feed, Reader

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800)]

KILLS, RATE, RECOVERY_S = 22, 500, 80.0
KINDS = ("worker",) * 6 + ("broker",) * 3 + ("driver",) * 2


class Storm:
    """Kills until so many have hit; each time the output has to go on before the next one.

    Args:
        folder: of the job.
        broker: of its topics.
        settings: scope of recovery and protocol.
        seed: of kinds, victims and pauses.
    """

    def __init__(self, folder: Path, broker: Broker, settings: tuple[str, str], seed: int) -> None:
        self._folder, self._broker, self._settings = folder, broker, settings
        self._dice = random.Random(seed)
        self.kinds: list[str] = []
        self.recoveries_s: list[float] = []
        self.reader = Reader(broker.address, OUT, "eid", PARALLELISM)
        self.driver = self._drive()

    def _drive(self) -> subprocess.Popen[bytes]:
        (self._folder / "told").unlink(missing_ok=True)
        program = str(Path(__file__).with_name("kafka_driver.py"))
        return subprocess.Popen([sys.executable, program, str(self._folder), self._broker.address, *self._settings])

    def go_on(self) -> None:
        """Returns when more rows are visible than before."""
        ends_s, before = time.monotonic() + RECOVERY_S, self.reader.seen()
        while self.reader.seen() < before + RATE // 5:
            assert self.driver.poll() is None, "the driver ended by itself"
            assert time.monotonic() < ends_s, f"nothing came out for {RECOVERY_S} s\n{self.kinds}\n{self._how_it_is()}"

    def _told(self) -> dict[str, Any]:
        told = self._folder / "told"
        return json.loads(told.read_text()) if told.exists() else {}

    def _how_it_is(self) -> str:
        counts = {
            kind: len(self._broker.committed(OUT, isolation=kind)) for kind in ("read_committed", "read_uncommitted")
        }
        told = self._told()
        reasons = "\n".join(told.get("failures", ()))
        return f"{counts}, of this reader {len(self.reader.times)}\n{told.get('status')}\n{reasons}"

    def strike(self) -> None:
        """One of them."""
        time.sleep(self._dice.uniform(0.0, 0.5))
        kind = self._dice.choice(KINDS)
        began_s = time.monotonic()
        strikes = {"worker": self._kill_worker, "broker": self._kill_broker, "driver": self._kill_driver}
        if strikes[kind]():
            self.kinds.append(kind)
            self.go_on()
            self.recoveries_s.append(time.monotonic() - began_s)

    def _kill_worker(self) -> bool:
        pids = self._told().get("workers")
        if not pids:
            return False
        try:
            os.kill(self._dice.choice(pids), 9)
        except ProcessLookupError:
            return False
        return True

    def _kill_broker(self) -> bool:
        self._broker.kill()
        time.sleep(self._dice.uniform(0.0, 1.5))
        self._broker.start()
        return True

    def _kill_driver(self) -> bool:
        self.driver.kill()
        self.driver.wait()
        self.driver = self._drive()
        return True

    def close(self) -> None:
        self.reader.close()
        if self.driver.poll() is None:
            self.driver.kill()
            self.driver.wait()


@pytest.mark.parametrize(
    ("settings", "seed"),
    [(("job", "aligned"), 1), (("task", "aligned"), 2), (("job", "unaligned"), 3)],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else str(value),
)
def test_each_row_comes_once(tmp_path: Path, settings: tuple[str, str], seed: int) -> None:
    with Broker() as broker:
        broker.create_topic(SOURCE, 2)
        broker.create_topic(OUT, PARALLELISM)
        feed, storm = Feed(broker.address, SOURCE, RATE), Storm(tmp_path, broker, settings, seed)
        try:
            storm.go_on()
            while len(storm.kinds) < KILLS:
                storm.strike()
            count, ends_s = feed.end(), time.monotonic() + RECOVERY_S
            while storm.reader.seen() < count:
                assert time.monotonic() < ends_s, f"{count - storm.reader.seen()} of {count} rows are missing"
            (tmp_path / "gate").touch()
            assert storm.driver.wait(120) == 0
        finally:
            feed.stop()
            storm.close()
        rows = [json.loads(message.value()) for message in broker.committed(OUT)]
    times = Counter(row["eid"] for row in rows)
    lost, doubled = count - len(times), sum(times.values()) - len(times)
    median_s = sorted(storm.recoveries_s)[len(storm.recoveries_s) // 2]
    print(
        f"\nkafka {'-'.join(settings)}: {len(storm.kinds)} kills ({dict(Counter(storm.kinds))}), {count} rows, "
        f"{lost} lost, {doubled} doubled; rows again after {median_s:.1f} s (median), {max(storm.recoveries_s):.1f} s"
    )
    assert (lost, doubled, max(times)) == (0, 0, count - 1)
    counts: dict[int, list[int]] = defaultdict(list)
    for row in rows:
        counts[row["key"]].append(row["n"])
    assert all(sorted(ns) == list(range(1, len(ns) + 1)) for ns in counts.values())
