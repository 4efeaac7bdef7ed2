"""Strangers at ports of this machine: connections that say nothing, and connections that say rubbish, at a rate.

A process of its own, so that its work is not the driver's: ``python flood.py '{"addresses": ..., ...}'``.  It ends by
itself after ``seconds``, or when its standard input ends, and writes how many connections it made.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

TICK_S = 0.01
HELD_MAX = 2_000
"""Silent connections that are held at a time, of those that the other end has not closed."""


@contextlib.contextmanager
def flood(
    addresses: Sequence[tuple[str, int]], *, silent_per_s: int, rubbish_per_s: int, seconds: float = 60.0
) -> Iterator[dict[str, float]]:
    """Strangers come while the block runs, spread over the addresses; what they did is there afterwards."""
    told = {
        "addresses": [list(a) for a in addresses],
        "silent_per_s": silent_per_s,
        "rubbish_per_s": rubbish_per_s,
        "seconds": seconds,
    }
    command = [sys.executable, str(Path(__file__)), json.dumps(told)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    found: dict[str, float] = {}
    try:
        yield found
    finally:
        found.update(json.loads(process.communicate(timeout=30)[0]))


def _main(addresses: list[tuple[str, int]], silent_per_s: int, rubbish_per_s: int, seconds: float) -> None:
    dice = random.Random(0)
    held: deque[socket.socket] = deque()
    speaking: list[socket.socket] = []
    counts = {"silent": 0, "rubbish": 0, "refused": 0}
    print("begun", flush=True)
    start = time.monotonic()
    while (elapsed := time.monotonic() - start) < seconds and not select.select([0], [], [], 0)[0]:
        for kind, rate in (("silent", silent_per_s), ("rubbish", rubbish_per_s)):
            while counts[kind] < elapsed * rate:
                counts[kind] += 1
                sock = _dial(dice.choice(addresses))
                if sock is None:
                    counts["refused"] += 1
                else:
                    (held if kind == "silent" else speaking).append(sock)
        for sock in speaking:
            with contextlib.suppress(OSError):
                sock.send(os.urandom(dice.choice([1, 37, 300])))
            sock.close()
        speaking.clear()
        while len(held) > HELD_MAX:
            held.popleft().close()
        time.sleep(TICK_S)
    print(json.dumps({**counts, "seconds": time.monotonic() - start}))


def _dial(address: tuple[str, int]) -> socket.socket | None:
    sock = socket.socket()
    sock.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        try:
            sock.connect(tuple(address))
        except BlockingIOError:
            raise
        except OSError:
            sock.close()
            return None
    return sock


if __name__ == "__main__":
    _main(**json.loads(sys.argv[1]))
