"""The fence between real processes on a real file system."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from itertools import pairwise

from cutwater.storage.job_log import JobLog
from cutwater.storage.log_entries import CheckpointCompleted
from cutwater.storage.store.local import LocalStore

PAUSED_DRIVER = """
import os, signal, sys
from cutwater.errors import CutwaterError
from cutwater.storage.store.local import LocalStore
from cutwater.storage.job_log import CheckpointCompleted, JobLog

log = JobLog(LocalStore(sys.argv[1]), "job")
log.begin_attempt("sleeper")
os.kill(os.getpid(), signal.SIGSTOP)
try:
    log.append(CheckpointCompleted(log.state.newest_id + 1, log.attempt, "d", "p", 0))
    print("told its sinks to commit")
except CutwaterError as error:
    print(error)
    sys.exit(error.exit_code)
"""

EAGER_DRIVER = """
import sys
from cutwater.errors import FencedError
from cutwater.storage.store.local import LocalStore
from cutwater.storage.job_log import CheckpointCompleted, JobLog

log = JobLog(LocalStore(sys.argv[1]), "job", keep=3)
for _ in range(12):
    log.begin_attempt(sys.argv[2])
    try:
        for _ in range(4):
            log.append(CheckpointCompleted(log.state.newest_id + 1, log.attempt, sys.argv[2], "p", 0))
            print(log.attempt, log.state.newest_id, flush=True)
    except FencedError:
        pass
"""


def test_a_stopped_process_wakes_up_fenced(tmp_path):
    store = LocalStore.open(tmp_path)
    for appends in (1, 150):  # without and with the sleeper's number having been trimmed away
        sleeper = subprocess.Popen(
            [sys.executable, "-c", PAUSED_DRIVER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        _, status = os.waitpid(sleeper.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        successor = JobLog(store, "job")
        successor.begin_attempt("successor")
        for _ in range(appends):
            next_id = successor.state.newest_id + 1
            successor.append(CheckpointCompleted(next_id, successor.attempt, "d", "p", 0))
        sleeper.send_signal(signal.SIGCONT)
        said, _ = sleeper.communicate(timeout=60)
        assert sleeper.returncode == 6, said
        assert "of successor" in said
        assert JobLog(store, "job").read() == successor.state


def test_processes_that_fight_for_the_job_never_publish_the_same_checkpoint(tmp_path):
    """An id may be in the log and nobody's: its driver slept so long between writing the entry and believing in it that
    others trimmed the one before.  Then it was superseded, and whoever came next found the checkpoint in the log.  So
    with attempts: who does not believe in its own begins the next one.
    """
    LocalStore.open(tmp_path)
    drivers = [
        subprocess.Popen(
            [sys.executable, "-c", EAGER_DRIVER, str(tmp_path), f"driver-{i}"], stdout=subprocess.PIPE, text=True
        )
        for i in range(3)
    ]
    published = [line for d in drivers for line in d.communicate(timeout=120)[0].splitlines()]
    assert [d.returncode for d in drivers] == [0, 0, 0]
    by_id = sorted((int(id), int(attempt)) for attempt, id in map(str.split, published))
    ids = [id for id, _ in by_id]
    state = JobLog(LocalStore(tmp_path), "job").read()
    assert len(set(ids)) == len(ids), "no id was believed in by two"
    assert set(ids) <= set(range(1, state.newest_id + 1))
    for (before, attempt), (after, next_attempt) in pairwise(by_id):
        superseded = after > before + 1
        assert next_attempt > attempt if superseded else next_attempt >= attempt, f"between {before} and {after}"
    assert state.attempt >= 36, "twelve of each, and those that nobody believed in"
